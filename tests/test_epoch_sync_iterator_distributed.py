"""The bare iterator on real Gloo ranks: whatever happens, the collective that follows works."""

import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed

from espnet_sync import EpochSyncIterator, PeerFailedError
from tests.ranks import run_ranks

#: Generous: a rank that is left waiting waits for the group's timeout, which is longer.
PROMPT = 10.0

LENGTHS = {
    2: [(7, 5), (5, 7), (4, 4), (0, 3), (5, 0), (0, 0), (1, 1), (6, 5), (1, 100)],
    3: [(10, 11, 9), (4, 4, 4), (0, 2, 5), (3, 1, 1), (1, 2, 3), (0, 0, 1)],
    4: [(4, 4, 8, 4), (0, 0, 3, 3), (2, 2, 2, 1), (5, 6, 7, 8), (3, 3, 3, 3), (9, 0, 9, 9)],
}


def tail(rank: int, numbers: int = 1) -> list[float]:
    """Return what a collective of the default group gives, which stands in for validation."""
    total = torch.full((numbers,), float(rank + 1))
    torch.distributed.all_reduce(total)
    return total.tolist()


def right_tail(world_size: int) -> list[float]:
    return [world_size * (world_size + 1) / 2]


def generate(
    count: int, fails_at: int | None = None, error: Exception | None = None
) -> Iterator[int]:
    for index in range(count + 1):
        if index == fails_at and error is not None:
            raise error
        if index < count:
            yield index


def drain(iterator: EpochSyncIterator) -> list[Any]:
    return [batch for batch in iterator]


# --- Ends -------------------------------------------------------------------------------------


def end_in_order(rank: int, world_size: int, tables: Sequence[Sequence[int]]) -> list[Any]:
    """Run two passes for each row of lengths, with a tail after each."""
    seen = []
    for lengths in tables:
        iterator = EpochSyncIterator(partial(generate, lengths[rank]))
        for _ in range(2):
            batches = drain(iterator)
            assert iterator.report is not None
            (own,) = iterator.report.ranks
            seen.append((batches, tail(rank), iterator.report.batches, own.pulled, own.discarded))
    return seen


@pytest.mark.parametrize("world_size", LENGTHS)
def test_all_ranks_stop_where_the_shortest_does_and_the_tail_works(world_size: int) -> None:
    everyones = run_ranks(world_size, end_in_order, LENGTHS[world_size])
    for rank, seen in enumerate(everyones):
        for lengths, *passes in zip(LENGTHS[world_size], seen[::2], seen[1::2], strict=True):
            shortest = min(lengths)
            pulled = min(lengths[rank], shortest + 1)
            expected = (
                [*range(shortest)],
                right_tail(world_size),
                shortest,
                pulled,
                pulled - shortest,
            )
            assert passes == [expected, expected], f"rank {rank} of {lengths}"


# --- Failures ---------------------------------------------------------------------------------

#: For each case: the index at which a rank fails, for the ranks that do; all have 6 batches.
FAILURES: list[dict[int, int]] = [
    {0: 0},
    {1: 0},
    {2: 3},
    {0: 3},
    {1: 6},
    {0: 2, 1: 2, 2: 2},
    {0: 4, 2: 4},
    {0: 5, 1: 1},
]


def fail_together(rank: int, world_size: int, cases: Sequence[dict[int, int]]) -> list[Any]:
    seen = []
    for number, fails_at in enumerate(cases):
        own = OSError(f"torn file {number} of rank {rank}")
        source = partial(generate, 6, fails_at.get(rank), own)
        iterator = EpochSyncIterator(source, label="train")
        batches, caught = [], None
        started = time.monotonic()
        try:
            for batch in iterator:
                batches.append(batch)
        except Exception as error:
            caught = error
        seconds = time.monotonic() - started
        frames = traceback.extract_tb(caught.__traceback__) if caught is not None else []
        seen.append(
            {
                "batches": batches,
                "own": caught is own,
                "in_source": "generate" in [frame.name for frame in frames],
                "chained": caught is not None and caught.__cause__ is not None,
                "error": caught,
                "tail": tail(rank),
                "next": drain(EpochSyncIterator(partial(generate, 2 + rank))),
                "seconds": seconds,
            }
        )
    return seen


def test_a_rank_that_raises_keeps_its_exception_and_the_others_are_told_at_once() -> None:
    everyones = run_ranks(3, fail_together, FAILURES)
    for rank, seen in enumerate(everyones):
        for fails_at, result in zip(FAILURES, seen, strict=True):
            index = min(fails_at.values())
            case = f"rank {rank} of {fails_at}: {result}"
            assert result["batches"] == [*range(index)], case
            assert result["seconds"] < PROMPT, case
            assert result["tail"] == right_tail(3), case
            assert result["next"] == [0, 1], case
            if fails_at.get(rank) == index:
                assert result["own"], case
                assert result["in_source"], case
                assert not result["chained"], case
            else:
                assert isinstance(result["error"], PeerFailedError), case
                assert result["error"].ranks == (), case
                assert f"[train] this pass, batch {index}" in str(result["error"]), case


def fail_to_start(rank: int, world_size: int) -> list[Any]:
    """Fail before there is anything to iterate, in three ways."""

    def broken() -> Iterator[int]:
        raise OSError("no such folder")

    used = EpochSyncIterator(generate(1) if rank == 1 else partial(generate, 1))
    drain(used)
    bad = [
        EpochSyncIterator(broken if rank == 1 else partial(generate, 3)),
        EpochSyncIterator((lambda: None) if rank == 1 else partial(generate, 3)),  # type: ignore[arg-type,return-value]
        used,
    ]
    seen = []
    for iterator in bad:
        try:
            drain(iterator)
        except Exception as error:
            seen.append((type(error).__name__, str(error), tail(rank)))
    return seen


def test_a_source_that_cannot_be_built_fails_on_all_ranks() -> None:
    first, second = run_ranks(2, fail_to_start)
    assert [name for name, _, _ in first] == ["PeerFailedError"] * 3
    assert [name for name, _, _ in second] == ["OSError", "TypeError", "RuntimeError"]
    for (_, message, total), part in zip(
        second, ["no such folder", "returned None", "callable that builds it"], strict=True
    ):
        assert part in message
        assert total == right_tail(2)


# --- Stops, breaks, passes --------------------------------------------------------------------

#: The rank that asks, and the index of the batch that it holds; -1: before the pass.
STOPS = [(0, 0), (1, 2), (2, 4), (0, -1), (2, -1), (1, 5)]


def stop_together(rank: int, world_size: int, stops: Sequence[tuple[int, int]]) -> list[Any]:
    seen = []
    for asking, index in stops:
        iterator = EpochSyncIterator(partial(generate, 6 + rank))
        if asking == rank and index < 0:
            iterator.request_stop()
        batches = []
        for batch in iterator:
            batches.append(batch)
            if asking == rank and batch == index:
                iterator.request_stop()
        assert iterator.report is not None
        ended_by = iterator.report.ended_by
        seen.append((batches, ended_by, tail(rank), drain(iterator)))
    return seen


def test_any_one_rank_can_ask_all_to_stop_and_the_next_pass_is_whole() -> None:
    for seen in run_ranks(3, stop_together, STOPS):
        for (_, index), (batches, ended_by, total, following) in zip(STOPS, seen, strict=True):
            assert batches == [*range(index + 1)]
            assert ended_by == ()
            assert total == right_tail(3)
            assert following == [*range(6)]


def pass_in_all_manners(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    lengths = (6, 4, 5)

    iterator = EpochSyncIterator(partial(generate, lengths[rank]))
    seen["second pass"] = [drain(iterator), drain(iterator), tail(rank)]

    iterator = EpochSyncIterator(partial(generate, lengths[rank]))
    seen["dropped pass"] = [next(iter(iterator))]
    gc.collect()
    seen["dropped pass"] += [drain(iterator), tail(rank)]

    iterator = EpochSyncIterator(partial(generate, lengths[rank]))
    held = []
    for batch in iterator:
        held.append(batch)
        if batch == 2:
            break
    seen["break"] = [held, tail(rank), drain(iterator), tail(rank)]

    train = EpochSyncIterator(partial(generate, lengths[rank]), label="train")
    valid = EpochSyncIterator(partial(generate, 2 + rank), label="valid")
    trained, validated = [], []
    for batch in train:
        trained.append(batch)
        if batch % 2:
            validated.append((drain(valid), tail(rank)))
    seen["validation in mid-pass"] = [trained, validated, tail(rank)]

    ours, theirs = iter(train), iter(valid)
    pairs = []
    while True:
        pair = (next(ours, None), next(theirs, None))
        pairs.append(pair)
        if pair[1] is None:
            break
    seen["interleaved"] = [pairs, tail(rank, numbers=3)]
    return seen


def test_second_dropped_broken_and_interleaved_passes_stay_together() -> None:
    whole = [0, 1, 2, 3]
    total = right_tail(3)
    for seen in run_ranks(3, pass_in_all_manners):
        assert seen["second pass"] == [whole, whole, total]
        assert seen["dropped pass"] == [0, whole, total]
        assert seen["break"] == [[0, 1, 2], total, whole, total]
        assert seen["validation in mid-pass"] == [whole, [([0, 1], total)] * 2, total]
        assert seen["interleaved"] == [[(0, 0), (1, 1), (2, None)], total * 3]


# --- What it costs ----------------------------------------------------------------------------


def count_collectives(rank: int, world_size: int) -> dict[str, Any]:
    calls: list[tuple[int, str]] = []
    all_reduce = torch.distributed.all_reduce

    def counting(tensor: torch.Tensor, op: Any = None) -> Any:
        calls.append((tensor.numel(), str(tensor.device)))
        return all_reduce(tensor, op=op)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the bare iterator makes no other collective")

    torch.distributed.all_reduce = counting
    for name in ("all_gather", "broadcast", "barrier", "new_group", "all_gather_object"):
        setattr(torch.distributed, name, forbidden)

    def since(before: int) -> list[tuple[int, str]]:
        return calls[before:]

    seen: dict[str, Any] = {}
    sized = EpochSyncIterator([*range(4 + rank)])
    seen["len"] = (len(sized), since(0))
    for name in ("first pass", "second pass"):
        before = len(calls)
        seen[name] = (drain(sized), since(before))
    before = len(calls)
    next(iter(sized))
    seen["dropped pass"] = since(before)
    before = len(calls)
    if rank == 0:
        sized.request_stop()
    seen["request_stop"] = since(before)
    seen["stopped pass"] = (drain(sized), since(before))
    before = len(calls)
    failing = EpochSyncIterator(partial(generate, 4, 2 if rank else None, OSError("torn")))
    try:
        drain(failing)
    except (OSError, PeerFailedError):
        seen["failed pass"] = since(before)
    return seen


def test_a_pass_costs_one_flag_a_batch_and_one_more_and_len_costs_none() -> None:
    flag = (1, "cpu")
    for rank, seen in enumerate(run_ranks(2, count_collectives)):
        assert seen["len"] == (4 + rank, [])
        assert seen["first pass"] == ([0, 1, 2, 3], [flag] * 5)
        assert seen["second pass"] == ([0, 1, 2, 3], [flag] * 5)
        assert seen["dropped pass"] == [flag]
        assert seen["request_stop"] == []
        assert seen["stopped pass"] == ([], [flag])
        assert seen["failed pass"] == [flag] * 3


def pass_alone(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    iterator = EpochSyncIterator(partial(generate, 3))
    iterator_of_none = EpochSyncIterator([])
    return drain(iterator), drain(iterator_of_none)


def test_a_job_of_one_rank_gets_all_of_its_batches() -> None:
    assert run_ranks(1, pass_alone) == [([0, 1, 2], [])]
