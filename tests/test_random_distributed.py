"""Random passes on real Gloo ranks against plain Python; thousands of epochs leak nothing."""

import itertools
import os
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from espnet2.iterators.abs_iter_factory import AbsIterFactory

from espnet_sync.errors import EmptyRankError, PeerFailedError
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.ranks import run_ranks, tail

SEED = 20240229
CASES = 1_000
WORLD_SIZE = 3


# --- What plain Python says --------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One pass, as all ranks drive it.

    Attributes:
        lengths: The batches of each rank's source.
        window: The lookahead.
        stop_at: The policy.
        sized: Whether the sources have a length.
        fails: By rank, the index before which its source raises.
        stop: The rank that calls `request_stop()` and the batch that it holds; -1: before the
            pass.
        break_at: The batch after which all ranks leave their loops.
    """

    lengths: tuple[int, ...]
    window: int = 0
    stop_at: str = "shortest"
    sized: bool = False
    fails: Mapping[int, int] = field(default_factory=dict)
    stop: tuple[int, int] | None = None
    break_at: int | None = None


@dataclass(frozen=True)
class Expected:
    """How a pass goes: `manner` is `end`, `stop`, `break`, `fail` or `empty`."""

    batches: int
    manner: str
    ranks: tuple[int, ...] = ()


def first_free(window: int, asked_at: int) -> int:
    """Return the first batch that no agreement covers, where one is asked to stop at a batch."""
    if asked_at < 0 or window == 0:
        return asked_at + 1
    # A window is agreed on when the last batch of the one before goes out, before it is seen.
    return -(-(asked_at + 2) // window) * window


def plainly(case: Case) -> Expected:
    """Return how a pass goes, without windows and exchanges: batch by batch."""
    ranks = range(len(case.lengths))
    stop_index = None if case.stop is None else first_free(case.window, case.stop[1])
    for index in itertools.count():
        asks = index == stop_index
        others = [rank for rank in ranks if not (asks and case.stop and rank == case.stop[0])]
        failed = tuple(rank for rank in others if case.fails.get(rank) == index)
        ended = [r for r in ranks if case.lengths[r] <= index and r not in case.fails]
        empty: tuple[int, ...] = ()
        if case.stop_at == "longest" and index == 0:
            empty = tuple(rank for rank in others if rank in ended)
        if failed or empty:
            return Expected(index, "fail" if failed else "empty", failed or empty)
        if asks:
            return Expected(index, "stop")
        if len(ended) == len(ranks) or (ended and case.stop_at == "shortest"):
            return Expected(index, "end", tuple(r for r in ended if case.lengths[r] == index))
        if index == case.break_at:
            return Expected(index + 1, "break")
    raise AssertionError("no end")


def batches_of(case: Case, rank: int, expected: Expected) -> list[int]:
    """Return what a rank gets: with `longest`, its source's batches over and over."""
    return [index % case.lengths[rank] for index in range(expected.batches)]


# --- Random cases ------------------------------------------------------------------------------


class Source(AbsIterFactory):
    """Hands out 0, 1, 2, ... and raises before one of them; sized where asked."""

    def __init__(self, length: int, sized: bool, fails_at: int | None) -> None:
        self.length = length
        self.sized = sized
        self.fails_at = fails_at
        self.failure = ValueError("a torn file")
        self.builds = 0

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Any:
        self.builds += 1
        return Sized(self) if self.sized else iter(self)

    def __iter__(self) -> Iterator[int]:
        """Yield the batches."""
        for index in range(self.length):
            if index == self.fails_at:
                raise self.failure
            yield index
        if self.fails_at == self.length:
            raise self.failure


class Sized:
    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        """Return the number of batches."""
        return self.source.length

    def __iter__(self) -> Iterator[int]:
        """Yield the batches."""
        return iter(self.source)


def random_case(dice: random.Random) -> Case:
    """Return a random case: one half of them with neither failure nor stop nor break."""
    longest = 30 if dice.random() < 0.4 else 9
    lengths = tuple(dice.randint(0, longest) for _ in range(WORLD_SIZE))
    if dice.random() < 0.25:
        lengths = (dice.choice(lengths),) * WORLD_SIZE
    fails: dict[int, int] = {}
    stop = break_at = None
    if dice.random() < 0.25:
        for rank in dice.sample(range(WORLD_SIZE), dice.choice((1, 1, 2))):
            fails[rank] = dice.randint(0, lengths[rank])
    if dice.random() < 0.2:
        stop = (dice.randrange(WORLD_SIZE), dice.randint(-1, max(lengths)))
    if dice.random() < 0.2:
        break_at = dice.randint(0, max(lengths))
    return Case(
        lengths=lengths,
        window=dice.randint(0, 8),
        stop_at=dice.choice(("shortest", "longest")),
        sized=dice.random() < 0.5,
        fails=fails,
        stop=stop,
        break_at=break_at,
    )


def cases_of_the_seed() -> list[Case]:
    dice = random.Random(SEED)
    return [random_case(dice) for _ in range(CASES)]


def drive(rank: int, case: Case) -> tuple[list[int], Any, int | None, Any]:
    """Run a case; gives the batches, how it ended, the length and the report."""
    inner = Source(case.lengths[rank], case.sized, case.fails.get(rank))
    factory = SyncedIterFactory(
        inner, label="train", lookahead=case.window, stop_at=case.stop_at, timeout=30
    )
    iterator = factory.build_iter(1)
    try:
        length: int | None = len(iterator)
    except TypeError:
        length = None
    batches: list[int] = []
    if case.stop == (rank, -1):
        iterator.request_stop()
    try:
        for batch in iterator:
            batches.append(batch)
            if case.stop == (rank, len(batches) - 1):
                iterator.request_stop()
            if case.break_at == len(batches) - 1:
                return batches, "break", length, iterator.report
    except Exception as error:
        own = error is inner.failure
        return (
            batches,
            "own" if own else (type(error), getattr(error, "ranks", None)),
            length,
            None,
        )
    return batches, "end", length, iterator.report


def run_cases(rank: int, world_size: int) -> list[Any]:
    return [(*drive(rank, case), tail(rank)) for case in cases_of_the_seed()]


def test_a_thousand_random_passes_end_on_all_ranks_as_plain_python_says() -> None:
    everyones = run_ranks(WORLD_SIZE, run_cases, deadline=300)
    manners = set()
    for number, case in enumerate(cases_of_the_seed()):
        expected = plainly(case)
        manners.add((expected.manner, case.stop_at))
        for rank, seen in enumerate(everyones):
            batches, ended, length, report, total = seen[number]
            where = f"seed {SEED}, case {number}, rank {rank}: {case}, {expected}"
            assert batches == batches_of(case, rank, expected), where
            assert total == WORLD_SIZE * (WORLD_SIZE + 1) / 2, where
            if not case.sized:
                assert length is None, where
            else:
                assert length == (min if case.stop_at == "shortest" else max)(case.lengths), where
            if expected.manner == "fail":
                own = rank in expected.ranks
                assert ended == ("own" if own else (PeerFailedError, expected.ranks)), where
            elif expected.manner == "empty":
                assert ended == (EmptyRankError, expected.ranks), where
            elif expected.manner == "break":
                assert ended == "break", where
            else:
                assert ended == "end", where
                assert report.batches == expected.batches, where
                assert report == everyones[0][number][3], where
                assert report.ended_by == expected.ranks, where
    assert len(manners) == 9, f"the seed leaves out some manner: {manners}"


# --- Thousands of epochs -----------------------------------------------------------------------

EPOCHS = 2_000
SETTLED = 200


def resources() -> tuple[int, int, int]:
    """Return the open files, the threads and the resident memory in bytes of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    return files, threads, pages * os.sysconf("SC_PAGE_SIZE")


def run_epochs(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    factories = [
        SyncedIterFactory(Source(5 + rank, sized, None), label=label, lookahead=2, timeout=30)
        for label, sized in (("train", True), ("valid", False))
    ]
    for epoch in range(1, EPOCHS + 1):
        iterator = factories[epoch % 2].build_iter(epoch)
        if epoch % 10 == 0:  # leaves with its second window in flight
            for batch in iterator:
                if batch == 1:
                    break
        else:
            assert [*iter(iterator)] == [0, 1, 2, 3, 4]
        if epoch in (SETTLED, EPOCHS):
            seen[str(epoch)] = (*resources(), len(threading.enumerate()))
    return {**seen, "tail": tail(rank)}


def test_two_thousand_epochs_leave_files_threads_and_memory_as_they_were() -> None:
    for seen in run_ranks(2, run_epochs, deadline=300):
        files, threads, memory, python_threads = seen[str(SETTLED)]
        last_files, last_threads, last_memory, last_python_threads = seen[str(EPOCHS)]
        assert last_files <= files
        # Gloo and torch start some of their own pool's threads late, a few at most.
        assert last_threads <= threads + 2
        assert last_python_threads <= python_threads
        # 1,800 epochs that each kept an exchange or an iterator would take more than this.
        assert last_memory - memory < 8 * 2**20
        assert seen["tail"] == 3.0
