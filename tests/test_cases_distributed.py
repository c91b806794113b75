"""Situations from public bug reports, on real Gloo ranks: each test bears its case's number."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from espnet_sync import EpochSyncIterator, SyncedIterFactory
from tests.factories import ListFactory, NumberFactory, chunk, frozen, sequence
from tests.ranks import run_ranks

BACKENDS = ("auto", "default")
Case = Callable[[int, Callable[..., SyncedIterFactory]], Any]


def tail(rank: int, *shape: int) -> list[float]:
    """Stand in for validation: an all-reduce on the default group. Gives 1 + 2 + ... ranks."""
    total = torch.full(shape or (1,), float(rank + 1))
    torch.distributed.all_reduce(total)
    return total.flatten().tolist()


def drain(iterator: EpochSyncIterator) -> list[Any]:
    return [batch for batch in iterator]


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "[train]" in record.getMessage():
            self.messages.append(record.getMessage())


def run_cases(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Run each case on each backend; gives what it returned, a tail, and the warnings."""
    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    seen: dict[str, dict[str, Any]] = {}
    for backend in BACKENDS:
        for name, case in cases.items():

            def synced(
                inner: AbsIterFactory, *, backend: str = backend, **options: Any
            ) -> SyncedIterFactory:
                return SyncedIterFactory(inner, label="train", backend=backend, **options)

            warnings.messages.clear()
            value = case(rank, synced)
            seen.setdefault(name, {})[backend] = (value, tail(rank), [*warnings.messages])
    return seen


Outcomes = dict[str, list[dict[str, Any]]]


def outcomes_of(world_size: int, cases: dict[str, Case]) -> Outcomes:
    everyones = run_ranks(world_size, run_cases, cases)
    return {name: [seen[name] for seen in everyones] for name in cases}


def each(outcomes: Outcomes, name: str) -> Iterator[tuple[int, Any, list[str]]]:
    """Yield each rank's value and warnings on each backend, having checked its tail."""
    world_size = len(outcomes[name])
    for rank, seen in enumerate(outcomes[name]):
        assert set(seen) == set(BACKENDS)
        for value, total, warnings in seen.values():
            assert total == [world_size * (world_size + 1) / 2]
            yield rank, value, warnings


# --- Two ranks --------------------------------------------------------------------------------

CHUNKED = ([31, 42, 55], [15, 26])


def case_1(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    plain = frozen(chunk(CHUNKED[rank]).build_iter(1))
    real = frozen(synced(chunk(CHUNKED[rank])).build_iter(1))
    return drain(synced(NumberFactory((7, 5)[rank])).build_iter(1)), plain, real


def case_2(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(NumberFactory(4)).build_iter(1)
    return next(iter(iterator)), drain(iterator)


def case_7(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    seen: list[Any] = []
    for index, batch in enumerate(synced(NumberFactory((5, 4)[rank])).build_iter(1)):
        seen.append(batch)
        if index % 2:
            seen.append(tail(rank))
    return seen


def case_8(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(NumberFactory((3, 2)[rank])).build_iter(1)
    return drain(iterator), iterator.report


def case_13(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(NumberFactory((5, 0)[rank])).build_iter(1)
    return drain(iterator), iterator.report


def case_14(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(chunk(([31, 42], [9, 8, 10, 3])[rank])).build_iter(1)
    return drain(iterator), iterator.report


class WithoutBadBatches(EpochSyncIterator):
    def generate(self) -> Iterator[Any]:
        return (batch for batch in super().generate() if batch != "bad")


def case_21(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    batches = ([0, 1, 2, 3, 4, 5], ["bad", 0, 1, "bad", 2, 3])[rank]
    inner = ListFactory({1: batches})
    return drain(synced(inner, iterator_class=WithoutBadBatches).build_iter(1))


def case_35(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    epochs = {1: range((4, 2)[rank]), 2: range((3, 5)[rank])}
    factory = synced(ListFactory(epochs, sized=True))
    seen = []
    for epoch in (1, 2):
        iterator = factory.build_iter(epoch)
        seen.append((len(iterator), drain(iterator)))
    return seen


class Packer(AbsIterFactory):
    """Packs utterances up to a budget of tokens: equal tokens, unequal rows."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[list[int]]:
        row: list[int] = []
        for length in self.lengths:
            if sum(row) + length > 10:
                yield row
                row = []
            row.append(length)
        yield row


def case_36(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(Packer(([6, 6, 6, 6], [3, 3, 3, 9])[rank])).build_iter(1)
    try:
        size: Any = len(iterator)
    except TypeError as error:
        size = str(error)
    return size, drain(iterator)


def train(rank: int, iterator: EpochSyncIterator, accumulate: int = 1) -> tuple[int, list[float]]:
    """Train a linear model; returns the number of micro-batches and the parameters."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    micro_batches = 0
    for micro_batches, batch in enumerate(iterator, 1):
        inputs = torch.full((2, 3), float(batch + rank))
        if micro_batches % accumulate:
            with model.no_sync():
                model(inputs).mean().backward()
            continue
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return micro_batches, [x for value in model.parameters() for x in value.flatten().tolist()]


def case_41(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(NumberFactory((7, 5)[rank])).build_iter(1)
    return train(rank, iterator, accumulate=3)


def case_42(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    inner = sequence([20] * (13, 16)[rank], batch_size=4)
    iterator = synced(inner).build_iter(1)
    sizes = torch.tensor([len(ids) for ids, _ in iterator])
    gathered = [torch.empty(4, dtype=torch.int64) for _ in range(2)]
    torch.distributed.all_gather(gathered, sizes)
    return [sizes_of_rank.tolist() for sizes_of_rank in gathered], iterator.report


def case_45(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(NumberFactory((6, 5)[rank])).build_iter(1)
    return drain(iterator), tail(rank, 3, 2)


@pytest.fixture(scope="module")
def two() -> Outcomes:
    cases: list[Case] = [case_1, case_2, case_7, case_8, case_13, case_14, case_21]
    cases += [case_35, case_36, case_41, case_42, case_45]
    return outcomes_of(2, {case.__name__: case for case in cases})  # type: ignore[attr-defined]


def test_case_1_chunk_iterators_of_unequal_length_end_at_the_minimum(two: Outcomes) -> None:
    counts = [seen["auto"][0][1] for seen in two["case_1"]]
    shortest = min(map(len, counts))
    assert 0 < shortest < max(map(len, counts))
    for rank, (numbers, plain, real), _ in each(two, "case_1"):
        assert numbers == [0, 1, 2, 3, 4], rank
        assert real == plain[:shortest], rank


def test_case_2_a_dropped_pass_is_followed_by_a_whole_one(two: Outcomes) -> None:
    for _, value, _ in each(two, "case_2"):
        assert value == (0, [0, 1, 2, 3])


def test_case_7_a_validation_every_two_batches_stays_in_step(two: Outcomes) -> None:
    for _, value, _ in each(two, "case_7"):
        assert value == [0, 1, [3.0], 2, 3, [3.0]]


def test_case_8_the_report_says_what_was_dropped(two: Outcomes) -> None:
    for _, (batches, report), _ in each(two, "case_8"):
        assert batches == [0, 1]
        assert [(own.pulled, own.discarded) for own in report.ranks] == [(3, 1), (2, 0)]
        assert report.ended_by == (1,)
        assert "1 batch discarded" in str(report)


def test_case_13_fewer_shards_than_ranks_give_no_batch_and_a_warning(two: Outcomes) -> None:
    for rank, (batches, report), warnings in each(two, "case_13"):
        assert batches == []
        assert report.ended_by == (1,)
        assert len(warnings) == (rank == 0)
        if rank == 0:
            assert "rank 1 " in warnings[0]


def test_case_14_a_chunk_factory_of_short_utterances_is_named_as_empty(two: Outcomes) -> None:
    for rank, (batches, report), warnings in each(two, "case_14"):
        assert batches == []
        assert (report.batches, report.ended_by) == (0, (1,))
        assert len(warnings) == (rank == 0)
        if rank == 0:
            assert "rank 1 " in warnings[0]
            assert "chunk length" in warnings[0]


def test_case_21_a_filter_in_generate_is_below_the_agreement(two: Outcomes) -> None:
    for _, value, _ in each(two, "case_21"):
        assert value == [0, 1, 2, 3]


def test_case_35_nothing_of_one_epoch_leaks_into_the_next(two: Outcomes) -> None:
    for _, value, _ in each(two, "case_35"):
        assert value == [(2, [0, 1]), (3, [0, 1, 2])]


def test_case_36_packing_to_a_budget_ends_at_the_minimum_and_is_unsized(two: Outcomes) -> None:
    expected = {0: [[6], [6]], 1: [[3, 3, 3], [9]]}
    for rank, (size, batches), _ in each(two, "case_36"):
        assert batches == expected[rank]
        assert "no length" in size


def test_case_41_accumulation_under_no_sync_stops_at_one_micro_batch(two: Outcomes) -> None:
    values = [value for _, value, _ in each(two, "case_41")]
    assert [micro_batches for micro_batches, _ in values] == [5] * 4
    assert all(parameters == values[0][1] for _, parameters in values)


def test_case_42_metrics_can_be_gathered_after_the_epoch(two: Outcomes) -> None:
    for _, (sizes, report), _ in each(two, "case_42"):
        assert sizes == [[4, 4, 4, 1], [4, 4, 4, 4]]
        assert report.batches == 4
        assert [(own.rank, own.pulled, own.discarded) for own in report.ranks] == [
            (0, 4, 0),
            (1, 4, 0),
        ]
        assert report.ended_by == (0, 1)


def test_case_45_an_odd_number_of_batches_over_two_workers(two: Outcomes) -> None:
    for _, value, _ in each(two, "case_45"):
        assert value == ([0, 1, 2, 3, 4], [3.0] * 6)


# --- Three ranks ------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        """Yield numbers."""
        return iter(range(self.count))


class StreamFactory(AbsIterFactory):
    def __init__(self, count: int) -> None:
        self.count = count

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> DataLoader[int]:
        return DataLoader(Stream(self.count), batch_size=None)


def case_9(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    return train(rank, synced(StreamFactory((10, 11, 9)[rank])).build_iter(1))


def test_case_9_an_iterable_dataset_of_unequal_length_under_ddp() -> None:
    values = [value for _, value, _ in each(outcomes_of(3, {"case_9": case_9}), "case_9")]
    assert [batches for batches, _ in values] == [9] * 6
    assert all(parameters == values[0][1] for _, parameters in values)


# --- Four ranks -------------------------------------------------------------------------------


def case_10(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    factory = synced(NumberFactory((4, 4, 8, 4)[rank]))
    return [(drain(factory.build_iter(epoch)), tail(rank)) for epoch in (1, 2)]


def case_12(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(NumberFactory((0, 0, 3, 3)[rank])).build_iter(1)
    return drain(iterator), iterator.report


def case_33(rank: int, synced: Callable[..., SyncedIterFactory]) -> Any:
    iterator = synced(sequence([20] * (4, 3, 4, 2)[rank])).build_iter(1)
    return len(iterator), [ids for ids, _ in iterator]


@pytest.fixture(scope="module")
def four() -> Outcomes:
    return outcomes_of(4, {"case_10": case_10, "case_12": case_12, "case_33": case_33})


def test_case_10_four_four_eight_four_gives_four_in_each_epoch(four: Outcomes) -> None:
    for _, value, _ in each(four, "case_10"):
        assert value == [([0, 1, 2, 3], [10.0])] * 2


def test_case_12_ranks_without_data_are_named(four: Outcomes) -> None:
    for rank, (batches, report), warnings in each(four, "case_12"):
        assert batches == []
        assert report.ended_by == (0, 1)
        assert len(warnings) == (rank == 0)
        if rank == 0:
            assert "ranks 0, 1 " in warnings[0]


def test_case_33_a_tiny_dev_set_on_many_ranks(four: Outcomes) -> None:
    for _, value, _ in each(four, "case_33"):
        assert value == (1, [["utt000", "utt001"]])
