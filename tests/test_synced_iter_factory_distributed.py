"""The factory on real Gloo ranks: real ESPnet2 factories, lengths, failures, reports."""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from espnet_sync import EpochSyncIterator, PeerFailedError, SyncedIterFactory, SyncReport
from tests.factories import KINDS, NumberFactory, chunk, frozen, make_factory
from tests.ranks import right_tail, run_ranks, tail

BACKENDS = ("auto", "default")
#: Generous: a rank that is left waiting waits for the group's timeout, which is longer.
PROMPT = 10.0

#: The lengths of each rank's utterances, in samples.
UNEVEN = [
    [31, 12, 55, 24, 47, 60, 19, 40, 33, 28],
    [15, 22, 31, 18, 26, 12],
    [44, 51, 62, 73, 24, 35, 46, 57],
]


def drain(iterator: EpochSyncIterator) -> list[Any]:
    return [batch for batch in iterator]


def length(iterator: EpochSyncIterator) -> int | str:
    try:
        return len(iterator)
    except TypeError as error:
        return f"TypeError: {error}"


class Lines(logging.Handler):
    """Keeps what the root logger is told, as `LEVEL message`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return [line for line in lines if "[train]" in line or "[valid]" in line]


def listen() -> Lines:
    lines = Lines()
    root = logging.getLogger()
    root.addHandler(lines)
    root.setLevel(logging.INFO)
    return lines


# --- Real factories ---------------------------------------------------------------------------


def run_real_factories(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    seen = {}
    for kind in KINDS:
        for shuffle in (False, True):
            own = folder / f"{kind}-{shuffle}-{rank}"
            own.mkdir()
            plain = make_factory(kind, UNEVEN[rank], own / "plain")
            counts, expected = [], []
            for epoch in (1, 2):
                batches = frozen(plain.build_iter(epoch, shuffle))
                counts.append(len(batches))
                expected.append(batches)
            for backend in BACKENDS:
                inner = make_factory(kind, UNEVEN[rank], own / backend)
                factory = SyncedIterFactory(inner, label="train", backend=backend)
                came = []
                for epoch in (1, 2):
                    iterator = factory.build_iter(epoch, shuffle)
                    came.append((length(iterator), frozen(iterator), frozen(iterator)))
                seen[kind, shuffle, backend] = (counts, expected, came, tail(rank))
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_end_at_the_shortest_plain_factory_with_its_first_batches(
    world_size: int, tmp_path: Path
) -> None:
    everyones = run_ranks(world_size, run_real_factories, tmp_path)
    for case in everyones[0]:
        kind = case[0]
        per_epoch = zip(*(seen[case][0] for seen in everyones), strict=True)
        shortest = [min(counts) for counts in per_epoch]
        assert all(count > 0 for count in shortest), case
        assert len({tuple(seen[case][0]) for seen in everyones}) > 1, f"{case}: even lengths"
        for rank, seen in enumerate(everyones):
            _, expected, came, total = seen[case]
            assert total == right_tail(world_size)
            for count, plain, (size, first, second) in zip(shortest, expected, came, strict=True):
                where = f"rank {rank} of {case}"
                assert first == plain[:count], where
                if kind == "category":  # whose factory deals afresh for each pass, from one seed
                    assert len(second) == count, where
                else:
                    assert second == first, where
                if kind in ("sequence", "category"):
                    assert size == count, where
                else:
                    assert "no length" in str(size), where


# --- Ends, lengths, reports -------------------------------------------------------------------

LENGTHS = [
    (7, 5, 6),
    (4, 4, 4),
    (9, 9, 2),
    (1, 30, 30),
    (5, 4, 4),
    (0, 3, 3),
    (2, 0, 0),
    (0, 0, 0),
]


def run_tables(
    rank: int, world_size: int, tables: Sequence[Sequence[int]], sized: bool
) -> dict[str, list[Any]]:
    lines = listen()
    seen: dict[str, list[Any]] = {}
    for backend in BACKENDS:
        seen[backend] = []
        for row in tables:
            inner = NumberFactory(row[rank], sized)
            factory = SyncedIterFactory(inner, label="train", backend=backend)
            iterator = factory.build_iter(3)
            size = length(iterator)
            lines.take()
            batches = drain(iterator)
            seen[backend].append((size, batches, iterator.report, lines.take(), tail(rank)))
    return seen


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_lengths_reports_and_lines_are_right_on_all_ranks(sized: bool) -> None:
    everyones = run_ranks(3, run_tables, LENGTHS, sized)
    for backend in BACKENDS:
        for number, row in enumerate(LENGTHS):
            shortest = min(row)
            shortest_ranks = tuple(rank for rank in range(3) if row[rank] == shortest)
            results = [seen[backend][number] for seen in everyones]
            for rank, (size, batches, report, lines, total) in enumerate(results):
                where = f"{backend}, rank {rank} of {row}: {report}"
                if sized:
                    assert size == shortest, where
                else:
                    assert "[train]" in size, where
                    assert "no length" in size, where
                assert batches == [*range(shortest)], where
                assert total == right_tail(3), where
                check_report(report, row, where)
                if rank == 0:
                    assert len(lines) == (2 if shortest == 0 else 1), where
                    assert lines[0] == f"INFO {report}", where
                    assert "[train] epoch 3" in lines[0], where
                else:
                    assert lines == [], where
            if shortest == 0:
                warning = results[0][3][1]
                names = ", ".join(map(str, shortest_ranks))
                assert warning.startswith("WARNING [train] epoch 3"), warning
                assert f"rank{'s' if len(shortest_ranks) > 1 else ''} {names} " in warning


def check_report(report: SyncReport, row: Sequence[int], where: str) -> None:
    shortest = min(row)
    assert (report.label, report.epoch, report.batches) == ("train", 3, shortest), where
    assert report.ended_by == tuple(rank for rank in range(3) if row[rank] == shortest), where
    assert [own.rank for own in report.ranks] == [0, 1, 2], where
    for own in report.ranks:
        assert own.rank is not None
        if row[own.rank] == shortest:
            assert own.pulled == shortest, where
        else:  # a rank may hold some ahead
            assert shortest < own.pulled <= row[own.rank], where
        assert own.discarded == own.pulled - shortest, where
        assert own.repeated == 0, where
        assert 0 <= own.waited < PROMPT, where


def run_late(rank: int, world_size: int) -> dict[str, SyncReport | None]:
    """Let rank 1 read its batches from a slow disk."""
    seen = {}
    for backend in BACKENDS:

        class Slow(AbsIterFactory):
            def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
                for number in range(3):
                    if rank == 1:
                        time.sleep(0.2)
                    yield number

        iterator = SyncedIterFactory(Slow(), backend=backend).build_iter(1)
        assert drain(iterator) == [0, 1, 2]
        seen[backend] = iterator.report
    return seen


def test_the_report_tells_who_waited() -> None:
    reports = run_ranks(2, run_late)
    for backend in BACKENDS:
        for seen in reports:
            report = seen[backend]
            waited = [own.waited for own in report.ranks]
            assert waited[0] > 0.3, f"{backend}: {report}"
            assert waited[1] < waited[0], f"{backend}: {report}"


#: What each rank's inner factory is: a sized DataLoader of so many batches, or a generator.
MIXED = [(6, 4, 5), (6, None, 4), (None, 3, 3), (2, 2, None)]


class LoaderFactory(AbsIterFactory):
    def __init__(self, count: int) -> None:
        self.count = count

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> DataLoader[int]:
        return DataLoader(range(2 * self.count - 1), batch_size=2)  # type: ignore[arg-type]


def run_mixed(rank: int, world_size: int) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {}
    for backend in BACKENDS:
        seen[backend] = []
        for row in MIXED:
            own = row[rank]
            inner = NumberFactory(5) if own is None else LoaderFactory(own)
            iterator = SyncedIterFactory(inner, label="train", backend=backend).build_iter(1)
            seen[backend].append((length(iterator), len(drain(iterator)), tail(rank)))
    return seen


def test_len_is_exact_and_equal_or_missing_on_every_rank() -> None:
    for seen in run_ranks(3, run_mixed):
        for backend in BACKENDS:
            for row, (size, batches, total) in zip(MIXED, seen[backend], strict=True):
                assert total == right_tail(3)
                assert batches == min(5 if own is None else own for own in row)
                if None in row:
                    assert "no length" in size, f"{backend}: {row}"
                else:
                    assert size == batches, f"{backend}: {row}"


# --- Subclasses -------------------------------------------------------------------------------


class EvenAlone(EpochSyncIterator):
    def generate(self) -> Iterator[Any]:
        return (batch for batch in super().generate() if batch % 2 == 0)


class NoGenerate(EpochSyncIterator):
    """A subclass that changes nothing about the batches."""


def run_subclasses(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for backend in BACKENDS:
        results = []
        for iterator_class in (EvenAlone, NoGenerate):
            factory = SyncedIterFactory(
                NumberFactory(6 + 2 * rank, sized=True),
                iterator_class=iterator_class,
                backend=backend,
            )
            iterator = factory.build_iter(1)
            results.append((length(iterator), drain(iterator), tail(rank)))
        # On one rank alone: the length is the same, missing, on both.
        factory = SyncedIterFactory(
            NumberFactory(6, sized=True),
            iterator_class=EvenAlone if rank == 1 else EpochSyncIterator,
            backend=backend,
        )
        iterator = factory.build_iter(1)
        results.append((length(iterator), len(drain(iterator)), tail(rank)))
        seen[backend] = results
    return seen


def test_a_subclass_with_its_own_generate_is_unsized_on_every_rank() -> None:
    for seen in run_ranks(2, run_subclasses):
        for backend in BACKENDS:
            even, same, mixed = seen[backend]
            assert "no length" in even[0]
            assert even[1:] == ([0, 2, 4], right_tail(2))
            assert same == (6, [*range(6)], right_tail(2))
            assert "no length" in mixed[0]
            assert mixed[1:] == (3, right_tail(2))


# --- Failures ---------------------------------------------------------------------------------


class FailsToBuild(AbsIterFactory):
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.failure = OSError("no such folder")

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> list[int]:
        if self.fails and epoch == 1:
            raise self.failure
        return [1, 2]


def run_failing_builds(rank: int, world_size: int) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {}
    for backend in BACKENDS:
        seen[backend] = []
        for failing in ((1,), (0, 2), (0, 1, 2)):
            inner = FailsToBuild(rank in failing)
            factory = SyncedIterFactory(inner, label="train", backend=backend)
            caught: Exception | None = None
            started = time.monotonic()
            try:
                factory.build_iter(1)
            except Exception as error:
                caught = error
            seconds = time.monotonic() - started
            own = caught is inner.failure
            following = drain(factory.build_iter(2))
            seen[backend].append((failing, own, caught, seconds, tail(rank), following))
    return seen


def test_an_inner_build_iter_that_raises_on_one_rank_fails_on_all() -> None:
    for rank, seen in enumerate(run_ranks(3, run_failing_builds)):
        for backend in BACKENDS:
            for failing, own, caught, seconds, total, following in seen[backend]:
                where = f"{backend}, rank {rank} of {failing}: {caught!r}"
                assert own == (rank in failing), where
                if rank not in failing:
                    assert isinstance(caught, PeerFailedError), where
                    assert caught.ranks == failing, where
                    assert "[train] epoch 1" in str(caught), where
                    for other in failing:
                        assert str(other) in str(caught), where
                assert seconds < PROMPT, where
                assert total == right_tail(3), where
                assert following == [1, 2], where


#: The index at which each rank fails, and the batches of all ranks.
FAILURES: list[tuple[dict[int, int], tuple[int, int, int]]] = [
    ({0: 0}, (6, 6, 6)),
    ({1: 3}, (6, 6, 6)),
    ({2: 6}, (6, 6, 6)),
    ({0: 4, 2: 4}, (6, 6, 6)),
    ({0: 5, 1: 2}, (6, 6, 6)),
    ({0: 1, 1: 1, 2: 1}, (6, 6, 6)),
    ({1: 5}, (5, 9, 9)),
]


def run_failures(rank: int, world_size: int) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {}
    for backend in BACKENDS:
        seen[backend] = []
        for fails_at, counts in FAILURES:
            inner = NumberFactory(counts[rank], fails_at=fails_at.get(rank))
            factory = SyncedIterFactory(inner, label="train", backend=backend)
            iterator = factory.build_iter(2)
            batches, caught = [], None
            started = time.monotonic()
            try:
                for batch in iterator:
                    batches.append(batch)
            except Exception as error:
                caught = error
            seconds = time.monotonic() - started
            own = caught is inner.failure
            after = SyncedIterFactory(NumberFactory(2 + rank), label="valid", backend=backend)
            following = drain(after.build_iter(2))
            seen[backend].append((batches, own, caught, seconds, tail(rank), following))
    return seen


def test_a_rank_that_raises_is_named_on_all_others() -> None:
    for rank, seen in enumerate(run_ranks(3, run_failures)):
        for backend in BACKENDS:
            for (fails_at, counts), result in zip(FAILURES, seen[backend], strict=True):
                batches, own, caught, seconds, total, following = result
                index = min(fails_at.values())
                where = f"{backend}, rank {rank} of {fails_at}, {counts}: {caught!r}"
                failed = tuple(other for other in sorted(fails_at) if fails_at[other] == index)
                assert batches == [*range(index)], where
                assert own == (rank in failed), where
                if rank not in failed:
                    assert isinstance(caught, PeerFailedError), where
                    assert caught.ranks == failed, where
                    for part in ("[train] epoch 2", f"batch {index}", *map(str, failed)):
                        assert part in str(caught), where
                assert seconds < PROMPT, where
                assert total == right_tail(3), where
                assert following == [0, 1], where


def run_failure_that_never_comes(rank: int, world_size: int) -> dict[str, Any]:
    seen = {}
    for backend in BACKENDS:
        inner = NumberFactory(3) if rank == 0 else NumberFactory(9, fails_at=4)
        factory = SyncedIterFactory(inner, label="train", backend=backend)
        seen[backend] = [(drain(factory.build_iter(epoch)), tail(rank)) for epoch in (1, 2)]
    return seen


def test_a_failure_at_an_index_after_the_end_never_happened() -> None:
    for seen in run_ranks(2, run_failure_that_never_comes):
        for backend in BACKENDS:
            assert seen[backend] == [([0, 1, 2], right_tail(2))] * 2


# --- Stops, breaks, several factories -----------------------------------------------------------

#: The rank that asks, and the index of the batch that it holds; -1: before the pass.
STOPS = [(0, 0), (1, 2), (1, -1)]


def run_stops(rank: int, world_size: int) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {}
    for backend in BACKENDS:
        seen[backend] = []
        for asking, index in STOPS:
            factory = SyncedIterFactory(NumberFactory(30 + rank), label="train", backend=backend)
            iterator = factory.build_iter(1)
            if asking == rank and index < 0:
                iterator.request_stop()
            batches = []
            for batch in iterator:
                batches.append(batch)
                if asking == rank and batch == index:
                    iterator.request_stop()
            report = iterator.report
            following = [drain(iterator), drain(factory.build_iter(2))]
            seen[backend].append((batches, report, tail(rank), following))
    return seen


def test_any_one_rank_can_ask_all_to_stop() -> None:
    first, second = run_ranks(2, run_stops)
    for backend in BACKENDS:
        for number, (_, index) in enumerate(STOPS):
            batches, report, total, following = first[backend][number]
            assert second[backend][number][0] == batches
            if backend == "default" or index < 0:
                assert batches == [*range(index + 1)]
            else:  # a window that was agreed is yielded, and no more than that
                assert batches == [*range(len(batches))]
                assert index + 1 <= len(batches) <= index + 1 + 2 * 8
            assert (report.batches, report.ended_by) == (len(batches), ())
            assert "stopped on request" in str(report)
            assert total == right_tail(2)
            assert following == [[*range(30)]] * 2


def run_epochs(rank: int, world_size: int) -> dict[str, Any]:
    """Train and validate for two epochs, with a break on all ranks in a third."""
    seen: dict[str, Any] = {}
    for backend in BACKENDS:
        train = SyncedIterFactory(NumberFactory(4 + rank), label="train", backend=backend)
        valid = SyncedIterFactory(NumberFactory(3 - rank), label="valid", backend=backend)
        epochs = []
        for epoch in (1, 2):
            epochs.append((drain(train.build_iter(epoch)), drain(valid.build_iter(epoch))))
            epochs.append(tail(rank))
        held = []
        for batch in train.build_iter(3):
            held.append(batch)
            epochs.append(tail(rank))
            if batch == 1:
                break
        middle = []
        for batch in train.build_iter(4):
            if batch == 2:
                middle.append(drain(valid.build_iter(4)))
            middle.append(batch)
        dropped = train.build_iter(5)
        first = next(iter(dropped))
        seen[backend] = (epochs, held, middle, first, drain(dropped), tail(rank))
    return seen


def test_epochs_breaks_and_validation_in_mid_epoch_stay_together() -> None:
    total = right_tail(2)
    for seen in run_ranks(2, run_epochs):
        for backend in BACKENDS:
            epochs, held, middle, first, whole, after = seen[backend]
            epoch = ([0, 1, 2, 3], [0, 1])
            assert epochs == [epoch, total, epoch, total, total, total]
            assert held == [0, 1]
            assert middle == [0, 1, [0, 1], 2, 3]
            assert (first, whole, after) == (0, [0, 1, 2, 3], total)


# --- DistributedDataParallel ------------------------------------------------------------------


def train_with_accumulation(rank: int, world_size: int) -> dict[str, Any]:
    seen = {}
    for backend in BACKENDS:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        factory = SyncedIterFactory(NumberFactory((7, 5)[rank]), label="train", backend=backend)
        micro_batches = []
        steps = 0
        for epoch in (1, 2):
            iterator = factory.build_iter(epoch)
            for index, batch in enumerate(iterator):
                micro_batches.append(batch)
                inputs = torch.full((2, 4), float(batch + rank))
                if index % 3 != 2:
                    with model.no_sync():
                        model(inputs).mean().backward()
                    continue
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
            optimizer.zero_grad()
        weights = [value.tolist() for value in model.module.state_dict().values()]
        seen[backend] = (micro_batches, steps, weights, tail(rank))
    return seen


def test_gradient_accumulation_under_no_sync_ends_with_equal_parameters() -> None:
    first, second = run_ranks(2, train_with_accumulation)
    assert first == second
    for backend in BACKENDS:
        micro_batches, steps, _, total = first[backend]
        assert micro_batches == [*range(5)] * 2
        assert steps == 2
        assert total == right_tail(2)
    assert first["auto"] == first["default"]


# --- What is exchanged ------------------------------------------------------------------------


def count_collectives(rank: int, world_size: int) -> dict[str, list[str]]:
    calls: list[str] = []

    def counting(name: str) -> None:
        collective = getattr(torch.distributed, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return collective(*arguments, **options)

        setattr(torch.distributed, name, call)

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "new_group", "gather"):
        counting(name)
    seen = {}
    factory = SyncedIterFactory(NumberFactory(4 + rank, sized=True), backend="default")
    iterator = factory.build_iter(1)
    seen["build_iter"] = calls[:]
    calls.clear()
    assert len(iterator) == 4
    seen["len"] = calls[:]
    assert drain(iterator) == [0, 1, 2, 3]
    seen["pass"] = calls[:]
    return seen


def test_the_default_backend_adds_one_exchange_at_either_end_of_a_pass() -> None:
    for seen in run_ranks(2, count_collectives):
        assert seen["build_iter"] == ["all_reduce"]
        assert seen["len"] == []
        assert seen["pass"] == ["all_reduce"] * 5 + ["all_gather"]


def run_alone(rank: int, world_size: int) -> dict[str, Any]:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("with one rank nothing is exchanged")

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "new_group"):
        setattr(torch.distributed, name, forbidden)
    lines = listen()
    seen = {}
    for backend in (*BACKENDS, "gloo"):
        factory = SyncedIterFactory(NumberFactory(4, sized=True), label="train", backend=backend)
        iterator = factory.build_iter(1)
        batches = drain(iterator)
        stopped = []
        for batch in iterator:
            stopped.append(batch)
            if batch == 1:
                iterator.request_stop()
        empty = SyncedIterFactory(chunk([3, 4]), label="valid", backend=backend).build_iter(1)
        seen[backend] = (len(iterator), batches, stopped, drain(empty), lines.take())
    return seen


def test_a_job_of_one_rank_exchanges_nothing() -> None:
    (seen,) = run_ranks(1, run_alone)
    for backend in (*BACKENDS, "gloo"):
        size, batches, stopped, empty, lines = seen[backend]
        assert (size, batches, stopped, empty) == (4, [0, 1, 2, 3], [0, 1], [])
        assert any("4 batches" in line for line in lines)
        assert any(line.startswith("WARNING [valid] epoch 1") for line in lines)
