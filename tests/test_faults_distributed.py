"""Faults on three real ranks: each ends on every rank, in its time, with the right names."""

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from torch.utils.data import DataLoader, Dataset

import espnet_sync.roll_call
from espnet_sync.epoch_sync_iterator import EpochSyncIterator
from espnet_sync.errors import (
    EpochSyncError,
    OutOfStepError,
    PeerFailedError,
    PeerLostError,
)
from espnet_sync.process_groups import control_state
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.factories import NumberFactory
from tests.ranks import initialise_group, run_ranks, tail, try_ranks

RANKS = 3
#: Batches of an epoch, and the batch at which a fault happens.
BATCHES = 12
AT = 5
#: Each fault meets each victim and each lookahead at least once.
PAIRS = ((0, 0), (1, 4))
CROSSED = ((0, 4), (1, 0))
SQUARE = PAIRS + CROSSED


def within(seconds: float) -> float:
    """Return a bound of the contract with slack for two busy cores."""
    return 2 * seconds + 3


@dataclass(frozen=True)
class End:
    """How an epoch ended on one rank.

    Attributes:
        batches: What was handed out.
        error: What came out of the loop or of `build_iter`.
        at: When, by the host's clock.
        later: What came of everything that was tried afterwards.
        lines: What the rank logged, each with its level.

    """

    batches: tuple[int, ...]
    error: BaseException | None
    at: float
    later: tuple[Any, ...] = ()
    lines: tuple[str, ...] = ()


def run_epoch(
    build: Callable[[], EpochSyncIterator], rank: int, victim: int, fault: Callable[[], Any]
) -> End:
    """Drive one epoch; the victim has its fault when it holds batch `AT`."""
    batches: list[int] = []
    try:
        for batch in build():
            batches.append(int(batch))
            if rank == victim and batches[-1] == AT:
                fault()
    except Exception as error:
        at = time.time()
        # Its frames would keep the loader and its worker alive.
        return End(tuple(batches), error.with_traceback(None), at)
    return End(tuple(batches), None, time.time())


def nothing() -> None:
    """Be no fault."""


def try_out(action: Callable[[], Any]) -> Any:
    """Return what an action returns or raises."""
    try:
        return action()
    except Exception as error:
        return error


# --- Faults after which all ranks are still in step -------------------------------------------


class DyingDataset(Dataset[int]):
    """The process that loads item `AT` dies."""

    def __init__(self, dies: bool) -> None:
        self.dies = dies

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> int:
        if self.dies and index == AT:
            os._exit(1)
        return index


class LoaderFactory(AbsIterFactory):
    """Hands out a `DataLoader` with one worker process."""

    def __init__(self, dataset: Dataset[int]) -> None:
        self.dataset = dataset

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> DataLoader[int]:
        # The harness starts its ranks as daemons, which may have no children. Forked, as in a
        # training, the worker inherits the rank's connections.
        multiprocessing.current_process().daemon = False
        return DataLoader(
            self.dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"
        )


def synced(lookahead: int, inner: AbsIterFactory | None = None, **options: Any) -> Any:
    options = {"label": "train", **options}
    return SyncedIterFactory(inner or NumberFactory(BATCHES), lookahead=lookahead, **options)


def raises(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    factory = synced(lookahead, NumberFactory(BATCHES, fails_at=AT if rank == victim else None))
    iterator = factory.build_iter(1)
    started = time.time()
    end = run_epoch(lambda: iterator, rank, victim, nothing)
    refused = try_out(lambda: list(iterator))
    return End(end.batches, end.error, end.at, later=(end.at - started, refused))


def worker_dies(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    factory = synced(lookahead, LoaderFactory(DyingDataset(rank == victim)))
    return run_epoch(lambda: factory.build_iter(1), rank, victim, nothing)


def iterates_alone(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    factory = synced(lookahead)
    other = synced(lookahead, label="valid")
    return run_epoch(
        lambda: factory.build_iter(1), rank, victim, lambda: list(other.build_iter(1))
    )


def is_in_another_epoch(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    factory = synced(lookahead)
    return run_epoch(lambda: factory.build_iter(2 if rank == victim else 1), rank, victim, nothing)


def has_other_options(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    factory = synced(lookahead + 1 if rank == victim else lookahead)
    return run_epoch(lambda: factory.build_iter(1), rank, victim, nothing)


class Lines(logging.Handler):
    """Keeps what the root logger is told; the root's level is as ESPnet2 sets it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        root = logging.getLogger()
        root.setLevel(logging.INFO if rank == 0 else logging.ERROR)
        root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def is_late(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    lines = Lines(rank)
    factory = synced(lookahead, warn_after=1)
    end = run_epoch(lambda: factory.build_iter(1), rank, victim, lambda: time.sleep(4))
    logging.getLogger().removeHandler(lines)
    return End(end.batches, end.error, end.at, lines=tuple(lines.lines))


def wake(pid: int, after: float) -> None:
    """Continue a process some seconds after it was stopped."""
    while not is_stopped(pid):
        time.sleep(0.05)
    time.sleep(after)
    os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def all_pids() -> list[int]:
    """Return all ranks' process ids; every rank calls this."""
    mine = torch.tensor([os.getpid()])
    pids = [torch.empty_like(mine) for _ in range(RANKS)]
    torch.distributed.all_gather(pids, mine)
    return [int(pid) for pid in pids]


def stop_oneself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_stopped_and_continued(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    pids = all_pids()
    waker = threading.Thread(target=wake, args=(pids[victim], 2), daemon=True)
    if rank == 2:
        waker.start()
    factory = synced(lookahead, timeout=60, warn_after=60)
    return run_epoch(lambda: factory.build_iter(1), rank, victim, stop_oneself)


Fault = Callable[[int, int, int, Path], End]
Ends = dict[tuple[str, int, int], list[End]]

IN_STEP: dict[Fault, tuple[tuple[int, int], ...]] = {
    raises: SQUARE,
    worker_dies: SQUARE,
    iterates_alone: SQUARE,
    is_in_another_epoch: SQUARE,
    has_other_options: SQUARE,
    is_late: PAIRS,
    is_stopped_and_continued: PAIRS,
}


def run_in_step(rank: int, world_size: int, folder: Path) -> dict[tuple[str, int, int], End]:
    """Run one fault after another in one job: each leaves the ranks in step."""
    list(synced(0).build_iter(1))
    seen = {}
    for fault, pairs in IN_STEP.items():
        for victim, lookahead in pairs:
            seen[fault.__name__, victim, lookahead] = fault(rank, victim, lookahead, folder)
            assert tail(rank) == 6, fault
    return seen


def by_rank(everyones: list[dict[Any, End]]) -> dict[Any, list[End]]:
    return {key: [seen[key] for seen in everyones] for key in everyones[0]}


@pytest.fixture(scope="module")
def in_step(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return by_rank(run_ranks(RANKS, run_in_step, tmp_path_factory.mktemp("in_step")))


def each(ends: Ends, fault: Fault) -> Iterator[tuple[int, int, int, End]]:
    """Yield victim, lookahead, rank and end for each run of a fault."""
    found = [
        (key[1], key[2], everyones) for key, everyones in ends.items() if key[0] == name(fault)
    ]
    assert {victim for victim, _, _ in found} == {0, 1}
    assert {lookahead for _, lookahead, _ in found} == {0, 4}
    for victim, lookahead, everyones in found:
        for rank, end in enumerate(everyones):
            yield victim, lookahead, rank, end


def name(fault: Any) -> str:
    return str(fault.__name__)


def test_a_source_that_raises_keeps_its_exception_and_tells_the_others_why(in_step: Ends) -> None:
    for victim, _, rank, end in each(in_step, raises):
        assert end.batches == tuple(range(AT))
        seconds, refused = end.later
        assert seconds < within(1)
        assert isinstance(refused, EpochSyncError) and "refuses to go on" in str(refused)
        if rank == victim:
            assert type(end.error) is ValueError and str(end.error) == "a torn file"
        else:
            assert type(end.error) is PeerFailedError
            assert end.error.ranks == (victim,) and set(end.error.reasons) == {victim}
            assert f"at batch {AT}: ValueError: a torn file" in end.error.reasons[victim]
            assert f"[train] epoch 1, batch {AT}" in str(end.error)


def test_case_16_a_worker_that_dies_is_its_ranks_failure(in_step: Ends) -> None:
    for victim, _, rank, end in each(in_step, worker_dies):
        assert len(end.batches) <= AT
        if rank == victim:
            assert type(end.error) is RuntimeError and "DataLoader worker" in str(end.error)
        else:
            assert type(end.error) is PeerFailedError
            assert end.error.ranks == (victim,)
            assert "DataLoader worker" in end.error.reasons[victim]


def test_a_rank_that_iterates_alone_is_out_of_step_on_every_rank(in_step: Ends) -> None:
    for victim, _, _, end in each(in_step, iterates_alone):
        assert type(end.error) is OutOfStepError
        assert set(end.error.positions) == set(range(RANKS))
        for rank, where in end.error.positions.items():
            assert where.startswith("[valid]" if rank == victim else "[train]"), where


def test_a_rank_in_another_epoch_is_out_of_step_on_every_rank(in_step: Ends) -> None:
    for victim, _, _, end in each(in_step, is_in_another_epoch):
        assert type(end.error) is OutOfStepError
        assert end.batches == ()
        for rank, where in end.error.positions.items():
            assert where.startswith(f"[train] epoch {2 if rank == victim else 1},"), where


def test_a_rank_with_other_options_is_out_of_step_on_every_rank(in_step: Ends) -> None:
    for victim, lookahead, _, end in each(in_step, has_other_options):
        assert type(end.error) is OutOfStepError
        for rank, where in end.error.positions.items():
            assert f"lookahead={lookahead + (rank == victim)}," in where


def test_a_late_rank_is_named_by_the_lowest_that_waits_and_nothing_else_happens(
    in_step: Ends,
) -> None:
    for victim, _, rank, end in each(in_step, is_late):
        assert end.error is None
        assert end.batches == tuple(range(BATCHES))
        warnings = [line for line in end.lines if "so far" in line]
        if rank != (1 if victim == 0 else 0):
            assert not warnings
            continue
        # Off rank 0 ESPnet2 shows errors alone.
        level = "WARNING" if rank == 0 else "ERROR"
        assert warnings and warnings[0].startswith(f"{level} waited ")
        assert f"for rank {victim} so far" in warnings[0]
        assert "at [train] epoch 1, pass 1, batch" in warnings[0]


def test_a_rank_that_is_stopped_and_continued_in_time_changes_nothing(in_step: Ends) -> None:
    for _, _, _, end in each(in_step, is_stopped_and_continued):
        assert end.error is None
        assert end.batches == tuple(range(BATCHES))


def break_anywhere(rank: int, world_size: int) -> list[tuple[int, int, int, Any, float]]:
    """Break on one rank at each batch, and go on with another iterator there."""
    seen = []
    for lookahead in (0, 1, 4):
        for victim in (0, 1):
            for index in range(BATCHES):
                factory, other = synced(lookahead), synced(lookahead, label="valid")

                def drive(
                    factory: Any = factory, other: Any = other, at: int = index, who: int = victim
                ) -> list[Any]:
                    for batch in factory.build_iter(1):
                        if rank == who and batch == at:
                            break
                    return list(other.build_iter(1))

                seen.append((lookahead, victim, index, try_out(drive), tail(rank)))
    return seen


def test_case_24_a_lone_break_at_any_batch_is_out_of_step_with_the_next_iterator() -> None:
    everyones = run_ranks(RANKS, break_anywhere)
    for seen in zip(*everyones, strict=True):
        for lookahead, victim, index, outcome, total in seen:
            assert total == 6
            if index == BATCHES - 1 and lookahead:
                # The last batch went out with the agreement that ends the epoch under way.
                assert outcome == list(range(BATCHES))
                continue
            assert type(outcome) is OutOfStepError, (lookahead, victim, index, outcome)
            for rank, where in outcome.positions.items():
                assert where.startswith("[valid]" if rank == victim else "[train]"), where


# --- Faults that cost the control group -------------------------------------------------------

TIMEOUT = 2.0


def lose(
    rank: int,
    victim: int,
    folder: Path,
    factory: SyncedIterFactory,
    fault: Callable[[], Any],
) -> End:
    """Drive an epoch that ends in `PeerLostError`, and try to go on."""

    def note_and_have_fault() -> None:
        (folder / "happened").write_text(str(time.time()))
        fault()

    iterator = factory.build_iter(1)
    end = run_epoch(lambda: iterator, rank, victim, note_and_have_fault)
    if isinstance(end.error, LeavesItsLoopError):
        return end
    happened = float((folder / "happened").read_text())
    refused = try_out(lambda: list(iterator)), try_out(lambda: bool(factory.build_iter(2)))
    return End(end.batches, end.error, end.at - happened, later=refused)


def sleeps_past_the_timeout(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    factory = synced(lookahead, timeout=TIMEOUT)
    return lose(rank, victim, folder, factory, lambda: time.sleep(3 * TIMEOUT))


def is_stopped_past_the_timeout(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    pids = all_pids()
    end = lose(rank, victim, folder, synced(lookahead, timeout=TIMEOUT), stop_oneself)
    (folder / f"ended.{rank}").touch()
    if rank == 2:
        while not (folder / f"ended.{1 - victim}").exists():
            time.sleep(0.05)
        wake(pids[victim], 0)
    return end


class LeavesItsLoopError(Exception):
    """Stands for a `break` on the victim."""


def leave() -> None:
    raise LeavesItsLoopError


def breaks_alone(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    end = lose(rank, victim, folder, synced(lookahead, timeout=TIMEOUT), leave)
    if rank != victim:
        return end
    # The victim's own collective meets nobody, until the others give the job up.
    return End(end.batches, try_out(lambda: tail(rank)), 0)


def iterates_while_the_others_are_past_it(
    rank: int, victim: int, lookahead: int, folder: Path
) -> End:
    factory = synced(lookahead, timeout=TIMEOUT)
    list(factory.build_iter(1))
    if rank != victim:
        return End((), try_out(lambda: tail(rank)), 0)
    started = time.time()
    end = run_epoch(lambda: factory.build_iter(2), rank, victim, nothing)
    return End(end.batches, end.error, end.at - started)


def differs_at_the_first_epoch(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    factory = synced(lookahead, timeout=30 if rank == victim else 40)
    end = run_epoch(lambda: factory.build_iter(1), rank, victim, nothing)
    return End(end.batches, end.error, end.at, later=(try_out(factory_again(factory)),))


def has_the_adapter_off(rank: int, victim: int, lookahead: int, folder: Path) -> End:
    if rank == victim:
        return End((), try_out(lambda: tail(rank)), 0)
    started = time.time()
    factory = synced(lookahead, timeout=TIMEOUT)
    end = run_epoch(lambda: factory.build_iter(1), rank, victim, nothing)
    return End(end.batches, end.error, end.at - started, later=(try_out(factory_again(factory)),))


def factory_again(factory: SyncedIterFactory) -> Callable[[], Any]:
    return lambda: bool(factory.build_iter(1))


LOST: tuple[Fault, ...] = (
    sleeps_past_the_timeout,
    is_stopped_past_the_timeout,
    breaks_alone,
    iterates_while_the_others_are_past_it,
    differs_at_the_first_epoch,
    has_the_adapter_off,
)


def run_lost(
    rank: int, world_size: int, victim: int, folder: Path
) -> dict[tuple[str, int, int], tuple[End, float, float]]:
    """Run one fault after another in one process; torch.distributed is made anew for each."""
    seen = {}
    for number, fault in enumerate(LOST):
        lookahead = 4 * ((number + victim) % 2)
        own = folder / f"{fault.__name__}-{victim}"
        own.mkdir(exist_ok=True)
        initialise_group(own, rank, world_size)
        whole = tail(rank)
        end = fault(rank, victim, lookahead, own)
        started = time.monotonic()
        torch.distributed.destroy_process_group()
        destroyed = time.monotonic() - started
        seen[fault.__name__, victim, lookahead] = (end, whole, destroyed)
    return seen


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Run the faults; each starts on a job made anew, and is left promptly."""
    folder = tmp_path_factory.mktemp("lost")
    ends: Ends = {}
    for victim in (0, 1):
        everyones = run_ranks(RANKS, run_lost, victim, folder, initialise=False)
        for seen in everyones:
            for key, (_, whole, destroyed) in seen.items():
                assert whole == 6, key
                assert destroyed < within(1), key
        ends |= by_rank([{key: value[0] for key, value in seen.items()} for seen in everyones])
    return ends


def is_refused(outcome: Any) -> bool:
    return type(outcome) is PeerLostError and "refuses to go on" in str(outcome)


def assert_names_the_victim(victim: int, rank: int, end: End) -> None:
    """Assert that a rank, the victim included, was told who was given up, and may not go on."""
    assert type(end.error) is PeerLostError, end.error
    assert end.error.ranks == (victim,)
    assert all(map(is_refused, end.later)), end.later
    if rank == victim:
        assert f"given up rank {victim}, this one" in str(end.error)
    else:
        assert f"lost rank {victim} after waiting" in str(end.error)
        assert "[train] epoch 1, pass 1, batch" in str(end.error)
        assert end.error.waited > TIMEOUT - 1
        assert end.at < TIMEOUT + within(3)


@pytest.mark.parametrize("fault", [sleeps_past_the_timeout, is_stopped_past_the_timeout])
def test_a_rank_that_stays_away_is_named_after_the_timeout(lost: Ends, fault: Fault) -> None:
    for victim, _, rank, end in each(lost, fault):
        assert_names_the_victim(victim, rank, end)


def test_a_rank_that_breaks_alone_is_named_and_its_own_collective_meets_nobody(
    lost: Ends,
) -> None:
    for victim, _, rank, end in each(lost, breaks_alone):
        if rank == victim:
            assert isinstance(end.error, RuntimeError), "it paired with something"
            assert not isinstance(end.error, EpochSyncError)
        else:
            assert_names_the_victim(victim, rank, end)


def test_a_rank_that_iterates_what_the_others_are_past_of_names_them(lost: Ends) -> None:
    for victim, _, rank, end in each(lost, iterates_while_the_others_are_past_it):
        if rank == victim:
            assert type(end.error) is PeerLostError
            assert end.error.ranks == tuple(sorted({0, 1, 2} - {victim}))
            assert end.at < TIMEOUT + within(3)
        else:
            assert isinstance(end.error, RuntimeError), "it paired with an agreement"
            assert not isinstance(end.error, EpochSyncError)


def test_other_options_at_the_first_epoch_are_out_of_step_on_every_rank(lost: Ends) -> None:
    for victim, _, _, end in each(lost, differs_at_the_first_epoch):
        assert type(end.error) is OutOfStepError
        for rank, policy in end.error.positions.items():
            assert f"timeout={30 if rank == victim else 40}," in policy
        (again,) = end.later
        assert type(again) is OutOfStepError


def test_a_rank_that_never_builds_an_iterator_is_named_with_the_likely_reason(
    lost: Ends,
) -> None:
    for victim, _, rank, end in each(lost, has_the_adapter_off):
        if rank == victim:
            assert isinstance(end.error, RuntimeError), "it paired with a meeting"
            continue
        assert type(end.error) is PeerLostError
        assert end.error.ranks == (victim,)
        assert "is espnet_sync off there" in str(end.error)
        assert type(end.later[0]) is PeerLostError
        assert end.at < TIMEOUT + within(3)


def stop_the_host(rank: int, world_size: int, folder: Path) -> End:
    """Stop rank 0, which serves the store, for longer than the timeout."""
    return is_stopped_past_the_timeout(rank, 0, 4, folder)


def test_the_rank_that_serves_the_store_is_named_when_it_is_stopped(tmp_path: Path) -> None:
    ends = run_ranks(RANKS, stop_the_host, tmp_path, store="tcp")
    for rank, end in enumerate(ends):
        assert type(end.error) is PeerLostError
        if rank:
            assert end.error.ranks == (0,)
            assert "out of reach" in str(end.error)
            assert end.at < TIMEOUT + within(3)
        assert all(map(is_refused, end.later))


# --- Deaths -----------------------------------------------------------------------------------


class Endless(Dataset[int]):
    """Keeps its loader's worker alive."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def die(how: str) -> None:
    if how == "exits":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def run_death(
    rank: int, world_size: int, victim: int, lookahead: int, how: str, folder: Path
) -> tuple[End, float]:
    inner = LoaderFactory(Endless()) if how == "killed with a worker" else NumberFactory(1000)
    fault = leave if how == "breaks and leaves" else partial(die, how)
    end = lose(rank, victim, folder, synced(lookahead, inner), fault)
    started = time.monotonic()
    torch.distributed.destroy_process_group()
    return end, time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "victim", "lookahead", "store"),
    [
        ("killed", 0, 4, "tcp"),
        ("killed", 1, 0, "file"),
        ("killed with a worker", 0, 0, "file"),
        ("killed with a worker", 1, 4, "tcp"),
        ("exits", 0, 0, "file"),
        ("exits", 1, 4, "tcp"),
        ("breaks and leaves", 0, 4, "file"),
        ("breaks and leaves", 1, 0, "tcp"),
    ],
)
def test_a_rank_that_has_gone_is_named_on_every_rank_at_once(
    how: str, victim: int, lookahead: int, store: str, tmp_path: Path
) -> None:
    outcomes = try_ranks(RANKS, run_death, victim, lookahead, how, tmp_path, store=store)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            expected = -signal.SIGKILL if how.startswith("killed") else 0
            assert outcome.exit_code == expected
            continue
        assert outcome.exit_code == 0, outcome.trace
        end, destroyed = outcome.value
        assert type(end.error) is PeerLostError
        assert end.error.ranks == (victim,), end.error
        assert f"lost rank {victim} after waiting" in str(end.error)
        assert end.at < within(8 if how == "killed with a worker" else 2)
        assert all(map(is_refused, end.later)), end.later
        assert destroyed < within(1)


# --- The way out ------------------------------------------------------------------------------


def leave_a_job(rank: int, folder: Path, fault: str, destroys: bool) -> None:
    """Fall off the end of a script where rank 1 has a fault; notes what was seen, and when."""
    initialise_group(folder, rank, RANKS)
    tail(rank)
    seen = ""
    try:
        if fault == "gone, without us":
            if rank == 1:
                os._exit(0)
            tail(rank)
        else:
            go_on(rank, folder, fault)
    except RuntimeError as error:
        seen = type(error).__name__
    (folder / f"seen.{rank}").write_text(f"{time.time()} {seen}")
    if destroys:
        torch.distributed.destroy_process_group()


def go_on(rank: int, folder: Path, fault: str) -> None:
    """Iterate until rank 1 has gone, or break out while it is stopped and owes an exchange."""
    for batch in synced(4).build_iter(1):
        if rank == 1 and batch == AT:
            if fault == "gone":
                os._exit(0)
            (folder / "stops").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "stopped" and batch >= AT:
            while not (folder / "stops").exists():
                time.sleep(0.01)
            if control_state().group.is_under_way:  # type: ignore[union-attr]
                return


JOBS = [
    (fault, destroys)
    for fault in ("gone", "stopped", "gone, without us")
    for destroys in (True, False)
]


def leave_jobs(folder: Path) -> None:
    """Fork the ranks of all `JOBS`, and note how long each took to exit.

    NOTE: an interpreter of their own, and not the harness, whose ranks end without its exit.
    """
    ranks = {}
    stopped = set()
    for number, (fault, destroys) in enumerate(JOBS):
        own = folder / str(number)
        own.mkdir()
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                leave_a_job(rank, own, fault, destroys)
                return
            ranks[pid] = own, rank
            if fault == "stopped" and rank == 1:
                stopped.add(pid)
    while ranks.keys() - stopped:
        pid, _ = os.wait()
        own, rank = ranks.pop(pid)
        (own / f"exited.{rank}").write_text(str(time.time()))


def test_a_script_that_lost_a_rank_exits_as_promptly_as_without_us(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, tmp_path],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert process.wait(timeout=80) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that are stopped
    took = {}
    for number, job in enumerate(JOBS):
        for rank in (0, 2):
            ended, _, seen = (tmp_path / str(number) / f"seen.{rank}").read_text().partition(" ")
            expected = {"gone": "PeerLostError", "stopped": "", "gone, without us": "RuntimeError"}
            assert seen == expected[job[0]]
            exited = (tmp_path / str(number) / f"exited.{rank}").read_text()
            took[(*job, rank)] = float(exited) - float(ended)
    for fault in ("gone", "stopped"):
        for destroys in (True, False):
            for rank in (0, 2):
                plain = took["gone, without us", destroys, rank]
                assert took[fault, destroys, rank] < plain + 3, took


def be_interrupted(rank: int, world_size: int) -> tuple[str, float, float]:
    """Send rank 0 a Ctrl-C while it waits for rank 1."""
    factory = synced(4)
    iterator = iter(factory.build_iter(1))
    started: list[float] = []
    seen = ""
    if rank == 0:

        def interrupt() -> None:
            # Its wait in slices has written where it waits.
            store = control_state().group.store  # type: ignore[union-attr]
            while not store.check("at/0"):
                time.sleep(0.05)
            started.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            next(iterator)
        except KeyboardInterrupt:
            seen = "KeyboardInterrupt"
    waited = time.monotonic() - started[0] if started else 0.0
    return seen, waited, tail(rank)


def test_ctrl_c_reaches_a_rank_that_waits() -> None:
    (seen, waited, total), other = run_ranks(2, be_interrupted)
    assert seen == "KeyboardInterrupt"
    assert waited < within(2)
    assert total == other[2] == 3


# --- Making the group -------------------------------------------------------------------------


def train_on_a_wrong_interface(rank: int, world_size: int) -> dict[str, Any]:
    lines = Lines(rank)
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "leads-nowhere"
    started = time.monotonic()
    batches = list(synced(4, NumberFactory(5 + rank)).build_iter(1))
    seconds = time.monotonic() - started
    return {
        "batches": batches,
        "seconds": seconds,
        "total": tail(rank),
        "lines": lines.lines,
        "gloo": try_out(lambda: synced(4, backend="gloo").build_iter(1)),
        "longest": try_out(lambda: synced(4, stop_at="longest").build_iter(1)),
        "again": list(synced(0, NumberFactory(5 + rank)).build_iter(2)),
    }


def test_a_rank_that_gloo_can_not_reach_costs_the_control_group_and_nothing_else() -> None:
    everyones = run_ranks(RANKS, train_on_a_wrong_interface, group_timeout=60)
    for seen in everyones:
        assert seen["batches"] == seen["again"] == [0, 1, 2, 3, 4]
        assert seen["seconds"] < 40 + within(0)
        assert seen["total"] == 6
        for asked in ("gloo", "longest"):
            assert type(seen[asked]) is EpochSyncError
            assert str(seen[asked]) == str(everyones[0][asked])
            assert "rank 1: " in str(seen[asked])
            assert "GLOO_SOCKET_IFNAME" in str(seen[asked])
    (line,) = [line for line in everyones[0]["lines"] if "GLOO_SOCKET_IFNAME" in line]
    assert line.startswith("ERROR ") and "rank 1: " in line
    assert "rank 0: " not in line and "rank 2: " not in line


def be_late_to_the_first_epoch(rank: int, world_size: int, probe: float) -> tuple[Any, ...]:
    espnet_sync.roll_call.PROBE_SECONDS = probe
    if rank == 1:
        time.sleep(2 * probe)
    lines = Lines(0)
    batches = list(synced(4).build_iter(1))
    return batches, control_state().group is not None, lines.lines


def test_a_rank_late_to_its_first_epoch_is_no_network_fault() -> None:
    for batches, has_group, lines in run_ranks(RANKS, be_late_to_the_first_epoch, 3.0):
        assert batches == list(range(BATCHES))
        assert has_group
        assert not [line for line in lines if line.startswith("ERROR")]


if __name__ == "__main__":
    leave_jobs(Path(sys.argv[1]))
