"""Faults from public bug reports, on real Gloo ranks: each test bears its case's number."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from torch.distributed import destroy_process_group

from espnet_sync.errors import EpochSyncError, OutOfStepError, PeerFailedError, PeerLostError
from tests.factories import NumberFactory
from tests.ranks import initialise_group, run_ranks, try_ranks
from tests.test_faults_distributed import (
    DyingDataset,
    LoaderFactory,
    synced,
    tail,
    try_out,
    within,
)

TIMEOUT = 2.0
LOOKAHEADS = (0, 4)


def drain(iterator: Any) -> tuple[list[Any], Exception | None]:
    """Return an iterator's batches, and what ended them where that is no end."""
    batches = []
    try:
        for batch in iterator:
            batches.append(int(batch))
    except Exception as error:
        return batches, error.with_traceback(None)
    return batches, None


# --- Two ranks that stay in step --------------------------------------------------------------


def case_15(rank: int, lookahead: int) -> Any:
    seen = {}
    for at in (0, 3, 6):
        factory = synced(lookahead, NumberFactory(6, fails_at=at if rank == 1 else None))
        # Without a failure both would end at batch 6: the last one is due after it.
        seen[at] = drain(factory.build_iter(1))
    return seen


def case_16(rank: int, lookahead: int) -> Any:
    return drain(synced(lookahead, LoaderFactory(DyingDataset(rank == 1))).build_iter(1))


def case_20(rank: int, lookahead: int) -> Any:
    iterator = synced(lookahead, NumberFactory(6)).build_iter(1)
    batches = []
    for batch in iterator:
        batches.append(batch)
        if rank == 1 and batch == 2:
            iterator.request_stop()
    return batches


def case_24(rank: int, lookahead: int) -> Any:
    first = synced(lookahead, NumberFactory(6))
    second = synced(lookahead, NumberFactory(6), label="eval")

    def evaluate_on_rank_0() -> None:
        for batch in first.build_iter(1):
            if rank == 0 and batch == 2:
                list(second.build_iter(1))

    return try_out(evaluate_on_rank_0)


class SlowFactory(AbsIterFactory):
    """The first batch takes some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
        time.sleep(self.seconds)
        yield from range(4)


def case_28(rank: int, lookahead: int) -> Any:
    inner = SlowFactory(5 if rank == 0 else 0)
    return drain(synced(lookahead, inner, timeout=15).build_iter(1))


def case_32(rank: int, lookahead: int) -> Any:
    train = synced(lookahead, NumberFactory(4), label="train")
    valid = synced(lookahead, NumberFactory((3, 2)[rank]), label="valid")
    seen = []
    for epoch in (1, 2):
        seen += [drain(train.build_iter(epoch)), tail(rank), drain(valid.build_iter(epoch))]
    return seen


CASES: tuple[Callable[[int, int], Any], ...] = (
    case_15,
    case_16,
    case_20,
    case_24,
    case_28,
    case_32,
)
Seen = list[dict[tuple[str, int], Any]]


def run_cases(rank: int, world_size: int) -> dict[tuple[str, int], Any]:
    seen = {}
    for case in CASES:
        for lookahead in LOOKAHEADS:
            seen[case.__name__, lookahead] = case(rank, lookahead)
            assert tail(rank) == 3, case
    return seen


@pytest.fixture(scope="module")
def two() -> Seen:
    return run_ranks(2, run_cases)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_case_15_the_others_learn_why_a_loader_raised(two: Seen, lookahead: int) -> None:
    for at in (0, 3, 6):
        (batches, told), (own_batches, own) = (seen["case_15", lookahead][at] for seen in two)
        assert type(own) is ValueError and str(own) == "a torn file"
        assert batches == own_batches == list(range(at))
        assert type(told) is PeerFailedError
        assert told.ranks == (1,)
        assert f"at batch {at}: ValueError: a torn file" in told.reasons[1]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_case_16_the_others_learn_that_a_worker_died(two: Seen, lookahead: int) -> None:
    (_, told), (_, own) = (seen["case_16", lookahead] for seen in two)
    assert type(own) is RuntimeError
    assert type(told) is PeerFailedError
    assert "DataLoader worker" in told.reasons[1]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_case_20_early_stopping_on_one_rank_ends_it_for_all(two: Seen, lookahead: int) -> None:
    batches, others = (seen["case_20", lookahead] for seen in two)
    assert batches == others
    assert batches == list(range(4 if lookahead else 3))


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_case_24_an_evaluation_on_rank_0_alone_is_told_with_both_places(
    two: Seen, lookahead: int
) -> None:
    for seen in two:
        error = seen["case_24", lookahead]
        assert type(error) is OutOfStepError
        assert error.positions[0].startswith("[eval] epoch 1")
        assert error.positions[1].startswith("[train] epoch 1")


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_case_28_a_rank_late_on_its_first_batch_never_ends_the_epoch(
    two: Seen, lookahead: int
) -> None:
    for seen in two:
        assert seen["case_28", lookahead] == ([0, 1, 2, 3], None)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_case_32_training_and_validation_share_no_counters(two: Seen, lookahead: int) -> None:
    epoch = [([0, 1, 2, 3], None), 3.0, ([0, 1], None)]
    for seen in two:
        assert seen["case_32", lookahead] == 2 * epoch


# --- Ranks that are lost ----------------------------------------------------------------------


def break_and_do_the_tail(rank: int, world_size: int) -> Any:
    batches = []
    iterator = synced(0, NumberFactory(6), timeout=TIMEOUT).build_iter(1)
    started = time.monotonic()
    try:
        for batch in iterator:
            batches.append(batch)
            if rank == 1 and batch == 2:
                break
    except EpochSyncError as error:
        return batches, error, time.monotonic() - started
    return batches, try_out(lambda: tail(rank)), 0.0


def test_case_20_a_bare_break_is_named_and_never_mixes_with_the_ranks_own_collective() -> None:
    (batches, error, seconds), (_, own, _) = run_ranks(2, break_and_do_the_tail)
    assert batches == [0, 1, 2]
    assert type(error) is PeerLostError and error.ranks == (1,)
    assert seconds < TIMEOUT + within(3)
    assert isinstance(own, RuntimeError), "it read a flag of the other rank"


def be_preempted(rank: int, world_size: int, folder: Path) -> Any:
    iterator = synced(4, NumberFactory(100)).build_iter(1)
    for batch in iterator:
        if rank == 0 and batch == 2:
            (folder / "left").write_text(str(time.time()))
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(rank: int, world_size: int, folder: Path) -> Any:
    error = try_out(partial(be_preempted, rank, world_size, folder))
    return error, time.time() - float((folder / "left").read_text())


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_case_23_survivors_name_rank_0_that_exits_between_batches(
    store: str, tmp_path: Path
) -> None:
    outcomes = try_ranks(3, preempted, tmp_path, store=store)
    assert outcomes[0].exit_code == 0
    for outcome in outcomes[1:]:
        error, seconds = outcome.value
        assert type(error) is PeerLostError and error.ranks == (0,)
        assert seconds < within(2)


def fit_twice(rank: int, world_size: int, folder: Path) -> Any:
    seen = []
    factory = synced(4, NumberFactory((5, 3)[rank]))
    # A store of its own for each: torch's own groups would find the addresses of before.
    for store in ("one", "two", "three"):
        (folder / store).mkdir(exist_ok=True)
        initialise_group(folder / store, rank, world_size)
        seen.append((drain(factory.build_iter(1)), tail(rank)))
        destroy_process_group()
    return seen


def test_case_26_a_second_fit_in_the_same_process_starts_afresh(tmp_path: Path) -> None:
    for seen in run_ranks(2, fit_twice, tmp_path, initialise=False):
        assert seen == 3 * [(([0, 1, 2], None), 3.0)]


class StuckFactory(AbsIterFactory):
    """Stays in its second batch until a condition holds."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
        yield 0
        while not self.is_over():
            time.sleep(0.05)
        yield 1


def wait_for_storage(rank: int, world_size: int, lookahead: int, folder: Path) -> Any:
    """Drive an epoch in which the last rank's loader stands still until all others gave up."""
    others = [folder / f"gave_up.{other}" for other in range(world_size - 1)]
    inner: AbsIterFactory = NumberFactory(6)
    if rank == world_size - 1:
        inner = StuckFactory(lambda: all(file.exists() for file in others))
    iterator = synced(lookahead, inner, timeout=TIMEOUT).build_iter(1)
    started = time.monotonic()
    batches, error = drain(iterator)
    seconds = time.monotonic() - started
    again = try_out(lambda: list(iterator))
    (folder / f"gave_up.{rank}").touch()
    return batches, error, seconds, again


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_case_29_slow_storage_is_an_error_that_names_the_rank(
    lookahead: int, tmp_path: Path
) -> None:
    seen = run_ranks(2, wait_for_storage, lookahead, tmp_path)
    for batches, error, seconds, _ in seen:
        # The rank itself is told so when it comes.
        assert type(error) is PeerLostError and error.ranks == (1,)
        assert batches == list(range(len(batches)))
        assert seconds < TIMEOUT + within(3)
    assert seen[0][0] == ([] if lookahead else [0])


def test_case_30_a_rank_that_blocks_for_ever_is_named_and_the_iterator_refuses(
    tmp_path: Path,
) -> None:
    for _, error, seconds, again in run_ranks(3, wait_for_storage, 0, tmp_path)[:2]:
        assert type(error) is PeerLostError and error.ranks == (2,)
        assert seconds < TIMEOUT + within(3)
        assert type(again) is PeerLostError and "refuses to go on" in str(again)
