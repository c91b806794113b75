"""The control group on real Gloo ranks: interleaving, stops, ends, lengths, reports, errors."""

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from torch.utils.data import DataLoader

from espnet_sync import roll_call
from espnet_sync.epoch_sync_iterator import EpochSyncIterator
from espnet_sync.errors import (
    EmptyRankError,
    EpochSyncError,
    OutOfStepError,
    PeerFailedError,
    PeerLostError,
)
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.factories import ListFactory, NumberFactory, chunk, frozen
from tests.ranks import initialise_group, right_tail, run_ranks, tail
from tests.test_random_distributed import Sized, Source, first_free

WINDOWS = (0, 1, 2, 4)
POLICIES = ("shortest", "longest")
#: Seconds that none of these waits comes near, unless it hangs.
TIMEOUT = 30.0


def synced(inner: AbsIterFactory, *, label: str = "train", **options: Any) -> SyncedIterFactory:
    return SyncedIterFactory(inner, label=label, **{"timeout": TIMEOUT, **options})


def numbers(count: int, **options: Any) -> SyncedIterFactory:
    return synced(NumberFactory(count), **options)


def drain(iterator: EpochSyncIterator) -> list[Any]:
    return [batch for batch in iterator]


def caught(run: Callable[[], Any]) -> Any:
    """Return what a call gives, or the error that it raises."""
    try:
        return run()
    except Exception as error:
        return error


def drain_into(batches: list[Any], iterator: EpochSyncIterator) -> Exception | None:
    """Collect a pass's batches; return what it raised."""
    try:
        for batch in iterator:
            batches.append(batch)
    except Exception as error:
        return error
    return None


def length(iterator: EpochSyncIterator) -> int | None:
    try:
        return len(iterator)
    except TypeError:
        return None


class Lines(logging.Handler):
    """Keeps what the root logger is told of train and valid, as `LEVEL message`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger().addHandler(self)
        logging.getLogger().setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "[train]" in message or "[valid]" in message:
            self.lines.append(f"{record.levelname} {message}")

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


# --- Interleaving and breaks -------------------------------------------------------------------


def run_interleaved(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for window in WINDOWS:
        train = numbers(7 + rank, lookahead=window)
        valid = numbers(4 - rank, label="valid", lookahead=window)
        middle: list[Any] = []
        for batch in train.build_iter(1):
            middle.append(batch)
            if batch in (1, 5):
                middle.append([*valid.build_iter(1)])
        pairs = [*zip(train.build_iter(2), valid.build_iter(2), strict=False)]
        dropped = iter(train.build_iter(3))
        held = [next(dropped) for _ in range(max(window, 1))]  # with its next window in flight
        others = [[*valid.build_iter(3)], [*train.build_iter(4)]]
        rest = [*dropped]
        left = iter(train.build_iter(5))
        held.append(next(left))
        del left
        seen.append((middle, pairs, held, others, rest, tail(rank)))
    return seen


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_iterators_that_are_interleaved_in_one_order_stay_whole(store: str) -> None:
    for seen in run_ranks(3, run_interleaved, store=store):
        for window, (middle, pairs, held, others, rest, total) in zip(WINDOWS, seen, strict=True):
            assert middle == [0, 1, [0, 1], 2, 3, 4, 5, [0, 1], 6], window
            assert pairs == [(0, 0), (1, 1)], window
            assert held == [*range(max(window, 1)), 0], window
            assert others == [[0, 1], [*range(7)]], window
            assert rest == [*range(max(window, 1), 7)], window
            assert total == right_tail(3), window


def run_breaks(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for window in WINDOWS:
        for at in range(6):
            factory = numbers(6 + rank, lookahead=window)
            iterator = factory.build_iter(1)
            held: list[int] = []
            for batch in iterator:
                held.append(batch)
                if batch == at:
                    break
            total = tail(rank)
            again = [*iterator]
            seen.append((window, at, held, total, again, [*factory.build_iter(2)]))
    return seen


def test_a_break_on_all_ranks_at_any_batch_leaves_the_next_pass_clean() -> None:
    for seen in run_ranks(2, run_breaks):
        for window, at, held, total, again, following in seen:
            where = f"lookahead={window}, break at {at}"
            assert held == [*range(at + 1)], where
            assert total == right_tail(2), where
            assert again == following == [*range(6)], where


# --- request_stop ------------------------------------------------------------------------------


def run_stops(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for window in WINDOWS:
        for asking in range(world_size):
            for at in (-1, 0, 1, 2, 3, 4, 7):
                factory = numbers(20 + rank, lookahead=window)
                iterator = factory.build_iter(1)
                batches: list[int] = []
                if at < 0 and rank == asking:
                    iterator.request_stop()
                for batch in iterator:
                    batches.append(batch)
                    if batch == at and rank == asking:
                        iterator.request_stop()
                report, total, again = iterator.report, tail(rank), len([*iterator])
                seen.append((window, asking, at, batches, report, total, again))
    return seen


def test_a_stop_that_one_rank_asks_for_ends_all_at_the_first_batch_that_is_not_agreed() -> None:
    everyones = run_ranks(3, run_stops)
    for seen in everyones:
        for number, (window, asking, at, batches, report, total, again) in enumerate(seen):
            where = f"lookahead={window}, rank {asking} asks at batch {at}"
            assert batches == [*range(first_free(window, at))], where
            assert len(batches) <= at + 1 + window, where
            assert (report.batches, report.ended_by) == (len(batches), ()), where
            assert "stopped on request" in str(report), where
            assert report == everyones[0][number][4], where
            assert total == right_tail(3), where
            assert again == 20, where


def run_stops_of_several(rank: int, world_size: int) -> list[Any]:
    """Let each rank ask at another batch, and one outside a pass, between two."""
    seen: list[Any] = []
    for window in WINDOWS:
        iterator = numbers(20, lookahead=window).build_iter(1)
        batches: list[int] = []
        for batch in iterator:
            batches.append(batch)
            if batch == 6 - 2 * rank:
                iterator.request_stop()
        if rank == 1:
            iterator.request_stop()
        seen.append((batches, [*iterator], len([*iterator]), tail(rank)))
    return seen


def test_the_earliest_of_several_stops_counts_and_one_between_passes_ends_the_next() -> None:
    for seen in run_ranks(3, run_stops_of_several):
        for window, (batches, between, after, total) in zip(WINDOWS, seen, strict=True):
            assert batches == [*range(first_free(window, 2))], window
            assert between == [], window
            assert after == 20, window
            assert total == right_tail(3), window


# --- stop_at="longest" -------------------------------------------------------------------------

CHUNKED = ([31, 42, 55, 28], [15, 26], [31, 12, 40])
COUNTS = [(3, 7, 5), (4, 4, 4), (1, 9, 2), (8, 4, 1)]


def run_longest(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for window in WINDOWS:
        plain = frozen(chunk(CHUNKED[rank]).build_iter(1))
        factory = synced(chunk(CHUNKED[rank]), stop_at="longest", lookahead=window)
        iterator = factory.build_iter(1)
        chunks = (plain, frozen(iterator), iterator.report, len(frozen(factory.build_iter(2))))
        rows = []
        for counts in COUNTS:
            inner = ListFactory({1: range(counts[rank])}, sized=True)
            iterator = synced(inner, stop_at="longest", lookahead=window).build_iter(1)
            rows.append((length(iterator), [*iterator], iterator.report))
        seen.append((chunks, rows, tail(rank)))
    return seen


def test_longest_loses_no_batch_and_goes_on_with_fresh_passes() -> None:
    everyones = run_ranks(3, run_longest)
    for number, window in enumerate(WINDOWS):
        plains = [seen[number][0][0] for seen in everyones]
        longest = max(map(len, plains))
        assert min(map(len, plains)) < longest
        for rank, seen in enumerate(everyones):
            (plain, came, report, again), rows, total = seen[number]
            where = f"lookahead={window}, rank {rank}"
            assert total == right_tail(3), where
            assert came == (plain * longest)[:longest], where
            assert again == longest, where
            check_longest(report, [len(own) for own in plains], where)
            for counts, (size, batches, row_report) in zip(COUNTS, rows, strict=True):
                assert size == max(counts), where
                assert batches == [index % counts[rank] for index in range(max(counts))], where
                check_longest(row_report, counts, where)


def check_longest(report: Any, counts: Sequence[int], where: str) -> None:
    longest = max(counts)
    assert report.batches == longest, where
    assert report.ended_by == tuple(r for r, own in enumerate(counts) if own == longest), where
    assert [own.discarded for own in report.ranks] == [0] * len(counts), where
    assert [own.repeated for own in report.ranks] == [longest - own for own in counts], where


class Once(AbsIterFactory):
    """Has batches in its first pass alone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.builds = 0

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
        self.builds += 1
        return iter([*range(self.count)] if self.builds == 1 else [])


class Live(AbsIterFactory):
    """Hands out the same live iterator each time: a bug of its author."""

    def __init__(self, count: int) -> None:
        self.iterator = iter(range(count))

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
        return self.iterator


EMPTY: list[tuple[str, type[AbsIterFactory], tuple[int, int, int]]] = [
    ("no batch at all", NumberFactory, (4, 0, 5)),
    ("two ranks without", NumberFactory, (0, 3, 0)),
    ("all ranks without", NumberFactory, (0, 0, 0)),
    ("a fresh pass without", Once, (3, 5, 5)),
    ("live", Live, (5, 2, 5)),
    ("live, all ending together", Live, (3, 3, 3)),
]


def run_empty(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for window in WINDOWS:
        for _, kind, counts in EMPTY:
            inner = kind(counts[rank])  # type: ignore[call-arg]
            factory = synced(inner, stop_at="longest", lookahead=window)
            batches: list[int] = []
            error = drain_into(batches, factory.build_iter(1))
            seen.append(
                (batches, error, [*numbers(2, lookahead=window).build_iter(2)], tail(rank))
            )
    return seen


def test_longest_names_ranks_with_nothing_to_go_on_with_on_all_ranks() -> None:
    for rank, seen in enumerate(run_ranks(3, run_empty)):
        rows = iter(seen)
        for window in WINDOWS:
            for name, kind, counts in EMPTY:
                batches, error, following, total = next(rows)
                where = f"{name}, lookahead={window}, rank {rank}: {error!r}"
                assert batches == [*range(min(counts))], where
                assert (following, total) == ([0, 1], right_tail(3)), where
                if name.endswith("ending together"):
                    assert error is None, where
                elif kind is Live and rank == 1:
                    assert type(error) is RuntimeError, where
                    assert "Hand over the callable" in str(error), where
                elif kind is Live:
                    assert isinstance(error, PeerFailedError), where
                    assert error.ranks == (1,), where
                    assert "Hand over the callable" in error.reasons[1], where
                else:
                    empty = tuple(r for r in range(3) if counts[r] == min(counts))
                    assert isinstance(error, EmptyRankError), where
                    assert error.ranks == empty, where
                    assert f"rank{'s' if len(empty) > 1 else ''} " in str(error), where
                    assert "[train] epoch 1" in str(error), where


# --- Lengths -----------------------------------------------------------------------------------


class EvenAlone(EpochSyncIterator):
    def generate(self) -> Iterator[Any]:
        return (batch for batch in super().generate() if batch % 2 == 0)


class Loaded(AbsIterFactory):
    def __init__(self, count: int) -> None:
        self.count = count

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> DataLoader[int]:
        return DataLoader(range(2 * self.count - 1), batch_size=2)  # type: ignore[arg-type]


#: What each rank has: so many sized batches, or `None` for six unsized ones.
MIXED: list[tuple[int | None, ...]] = [(6, 4, 5), (3, 3, 3), (6, None, 4), (None, None, None)]


def run_lengths(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for stop_at in POLICIES:
        for window in (0, 4):
            options: dict[str, Any] = {"stop_at": stop_at, "lookahead": window}
            for row in MIXED:
                own = row[rank]
                inner = NumberFactory(6) if own is None else Loaded(own)
                iterator = synced(inner, **options).build_iter(1)
                sizes = [length(iterator)]
                batches = len([*iterator])
                sizes.append(length(iterator))
                seen.append((stop_at, row, sizes, batches))
            # A generate() of one's own on one rank alone leaves all without a length.
            kind = EvenAlone if rank == 1 else EpochSyncIterator
            inner = NumberFactory(6, sized=True)
            iterator = synced(inner, iterator_class=kind, **options).build_iter(1)
            sizes = [length(iterator)] * 2
            own_row = (6, None, 6) if stop_at == "longest" else (None, 3, None)
            seen.append((stop_at, own_row, sizes, len([*iterator])))
    return [*seen, tail(rank)]


def test_len_is_what_comes_or_missing_on_all_ranks_with_either_policy() -> None:
    for seen in run_ranks(3, run_lengths):
        assert seen.pop() == right_tail(3)
        for stop_at, row, sizes, batches in seen:
            where = f"{stop_at}, {row}"
            counts = [6 if own is None else own for own in row]
            assert batches == (min if stop_at == "shortest" else max)(counts), where
            assert sizes == [None if None in row else batches] * 2, where


class Boasts(AbsIterFactory):
    """Has a length that is larger than what comes."""

    def __init__(self, says: int, has: int) -> None:
        self.says = says
        self.has = has

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Sized:
        sized = Sized(Source(self.has, True, None))
        says = self.says
        return type("Boasting", (Sized,), {"__len__": lambda _: says})(sized.source)


def run_boasts(rank: int, world_size: int) -> list[Any]:
    lines = Lines()
    seen: list[Any] = []
    for stop_at in POLICIES:
        for window in WINDOWS:
            inner = Boasts(8, 3) if rank == 0 else NumberFactory(8, sized=True)
            factory = synced(inner, stop_at=stop_at, lookahead=window)
            iterator = factory.build_iter(1)
            lines.take()
            batches = [len([*iterator]) for _ in range(2)]
            warnings = [line for line in lines.take() if line.startswith("WARNING")]
            seen.append((stop_at, length(iterator), batches, warnings, tail(rank)))
    return seen


def test_a_source_that_ends_before_its_own_len_warns_once_and_hangs_nobody() -> None:
    for rank, seen in enumerate(run_ranks(2, run_boasts)):
        for stop_at, size, batches, warnings, total in seen:
            assert size == 8
            assert batches == [3 if stop_at == "shortest" else 8] * 2
            assert len(warnings) == (rank == 0)
            for warning in warnings:
                assert "a length of 8 batches and ran out after 3" in warning
            assert total == right_tail(2)


# --- Reports -----------------------------------------------------------------------------------


def run_reports(rank: int, world_size: int) -> list[Any]:
    lines = Lines()
    seen: list[Any] = []
    for stop_at in POLICIES:
        for window in WINDOWS:
            for sized in (False, True):
                for count in range(1, 9):
                    # Rank 1 decides where it ends, and the others differ.
                    more = {"shortest": rank != 1, "longest": -(rank != 1 and count > 1)}
                    inner = NumberFactory(count + more[stop_at], sized)
                    factory = synced(inner, stop_at=stop_at, lookahead=window)
                    iterator = factory.build_iter(1)
                    lines.take()
                    told = []
                    for _ in iterator:
                        assert (iterator.report is not None) == (lines.lines != []) or rank
                        told.append(iterator.report is not None)
                    report = iterator.report
                    seen.append((stop_at, window, sized, count, told, report, lines.take()))
    return seen


def test_the_report_is_set_and_logged_before_the_last_batch_where_it_is_known_to_be() -> None:
    everyones = run_ranks(3, run_reports)
    for rank, seen in enumerate(everyones):
        for number, (stop_at, window, sized, count, told, report, lines) in enumerate(seen):
            where = f"{stop_at}, lookahead={window}, sized={sized}, {count} batches, rank {rank}"
            # An unsized pass that fills its last window is not known to end with it, and without
            # a window no agreement says more than that there is one more batch.
            known = window > 0 and (sized or count % window != 0)
            assert told == [False] * (count - 1) + [known], where
            assert report == everyones[0][number][5], where
            assert report.batches == count, where
            assert lines == ([f"INFO {report}"] if rank == 0 else []), where


def run_without_batches(rank: int, world_size: int) -> list[Any]:
    lines = Lines()
    seen: list[Any] = []
    for window in WINDOWS:
        for counts in ((3, 0, 3), (0, 3, 0), (0, 0, 0)):
            iterator = numbers(counts[rank], lookahead=window).build_iter(3)
            lines.take()
            batches = [*iterator]
            seen.append((counts, batches, iterator.report, lines.take()))
    return [*seen, tail(rank)]


def test_a_pass_without_batches_warns_on_rank_0_and_names_the_empty_ranks() -> None:
    for rank, seen in enumerate(run_ranks(3, run_without_batches)):
        assert seen.pop() == right_tail(3)
        for counts, batches, report, lines in seen:
            empty = tuple(other for other in range(3) if counts[other] == 0)
            assert batches == []
            assert (report.batches, report.ended_by) == (0, empty)
            if rank != 0:
                assert lines == []
                continue
            line, warning = lines
            assert line == f"INFO {report}"
            names = ", ".join(map(str, empty))
            assert warning.startswith("WARNING [train] epoch 3: no rank yields a batch, since ")
            assert f" rank{'s' if len(empty) > 1 else ''} {names} ha" in warning


# --- Failures ----------------------------------------------------------------------------------


class Utterances(AbsIterFactory):
    """Hands out ESPnet2's batches, and fails as it is told before one of them."""

    def __init__(self, fails_at: int | None, failure: Callable[[], Any]) -> None:
        self.fails_at = fails_at
        self.failure = failure

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[Any]:
        for index in range(6):
            if index == self.fails_at:
                self.failure()
            yield [f"utt{index}a", f"utt{index}b"], {"speech": torch.zeros(2, 3)}


FAILURE = KeyError("no such speaker")


def raise_key_error() -> None:
    raise FAILURE


def raise_stop_iteration() -> None:
    next(iter(()))


def run_failures(rank: int, world_size: int) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    for window in WINDOWS:
        options: dict[str, Any] = {"lookahead": window}
        inner = Utterances(3 if rank == 1 else None, raise_key_error)
        factory = synced(inner, **options)
        iterator = factory.build_iter(2)
        batches: list[Any] = []
        error = drain_into(batches, iterator)
        refusal = drain_into([], iterator)
        inner.fails_at = None
        after = [ids[0] for ids, _ in factory.build_iter(3)]
        stops = Utterances(0 if rank == 1 else None, raise_stop_iteration)
        pair = NumberFactory(6, fails_at={0: 4, 2: 4}.get(rank))
        pair_error = drain_into([], synced(pair, **options).build_iter(2))
        never = NumberFactory(3) if rank == 0 else NumberFactory(9, fails_at=5)
        seen.append(
            {
                "where": f"lookahead={window}, rank {rank}",
                "batches": [ids[0] for ids, _ in batches],
                "error": error,
                "is own": error is FAILURE,
                "refusal": refusal,
                "after": after,
                "stop": drain_into([], synced(stops, **options).build_iter(2)),
                "pair": pair_error,
                "pair is own": pair_error is pair.failure,
                "never": [*synced(never, **options).build_iter(2)],
                "tail": tail(rank),
            }
        )
    return seen


@pytest.fixture(scope="module")
def failures() -> list[list[dict[str, Any]]]:
    return run_ranks(3, run_failures)


def rows_of(everyones: list[list[dict[str, Any]]]) -> Iterator[tuple[int, dict[str, Any], str]]:
    for rank, seen in enumerate(everyones):
        for row in seen:
            yield rank, row, row["where"]


def test_a_failed_rank_keeps_its_exception_and_its_peers_learn_all_of_it(
    failures: list[list[dict[str, Any]]],
) -> None:
    for rank, row, where in rows_of(failures):
        error = row["error"]
        assert row["batches"] == ["utt0a", "utt1a", "utt2a"], where
        assert row["is own"] == (rank == 1), where
        assert row["tail"] == right_tail(3), where
        if rank == 1:
            continue
        assert isinstance(error, PeerFailedError), where
        assert error.ranks == (1,), where
        reason = error.reasons[1]
        assert reason.startswith("at batch 3: KeyError: 'no such speaker' ("), where
        assert " in raise_key_error" in reason, where
        assert " in build_iter" in reason, where
        assert "test_control_distributed.py:" in reason, where
        assert "last good utterances: utt2a, utt2b" in reason, where
        assert "[train] epoch 2, batch 3: the data source of rank 1 " in str(error), where
        assert reason in str(error), where


def test_an_iterator_that_raised_refuses_to_go_on_and_a_new_one_goes_on(
    failures: list[list[dict[str, Any]]],
) -> None:
    for rank, row, where in rows_of(failures):
        assert type(row["refusal"]) is EpochSyncError, where
        name = "KeyError" if rank == 1 else "PeerFailedError"
        assert f"refuses to go on since an earlier pass raised {name}" in str(row["refusal"])
        assert "build_iter()" in str(row["refusal"]), where
        assert row["after"] == [f"utt{index}a" for index in range(6)], where


def test_a_stop_iteration_in_a_generator_is_a_failure_and_no_end(
    failures: list[list[dict[str, Any]]],
) -> None:
    for rank, row, where in rows_of(failures):
        if rank == 1:
            assert type(row["stop"]) is RuntimeError, where
            assert isinstance(row["stop"].__cause__, StopIteration) or "StopIteration" in str(
                row["stop"]
            ), where
        else:
            assert isinstance(row["stop"], PeerFailedError), where
            assert "at batch 0: RuntimeError: generator raised StopIteration" in str(row["stop"])


def test_two_ranks_that_fail_at_once_keep_their_own_and_the_third_names_both(
    failures: list[list[dict[str, Any]]],
) -> None:
    for rank, row, where in rows_of(failures):
        assert row["pair is own"] == (rank != 1), where
        if rank == 1:
            assert isinstance(row["pair"], PeerFailedError), where
            assert row["pair"].ranks == (0, 2), where
            for reason in row["pair"].reasons.values():
                assert reason.startswith("at batch 4: ValueError: a torn file"), where
            assert "ranks 0, 2" in str(row["pair"]), where


def test_a_failure_that_lies_after_the_end_never_happened(
    failures: list[list[dict[str, Any]]],
) -> None:
    for _, row, where in rows_of(failures):
        assert row["never"] == [0, 1, 2], where


#: As many characters of 1 to 4 bytes in front as put the cut at any byte of a character.
SHIFTS = (*range(5), 1000)
LETTERS = "\u00df\u20ac\U0001d11e\u7e41"


def run_long_reasons(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for shift in SHIFTS:

        def fail(shift: int = shift) -> None:
            raise OSError("x" * shift + LETTERS * 600)

        inner = Utterances(1 if rank == 0 else None, fail)
        error = drain_into([], synced(inner).build_iter(1))
        seen.append((error.reasons if isinstance(error, PeerFailedError) else None, tail(rank)))
    return seen


def test_a_reason_of_more_than_4_kb_is_cut_between_two_characters() -> None:
    own, peers = run_ranks(2, run_long_reasons)
    for shift, (_, own_total), (reasons, total) in zip(SHIFTS, own, peers, strict=True):
        assert own_total == total == right_tail(2)
        reason = reasons[0]
        start = "at batch 1: OSError: " + "x" * shift
        assert reason.startswith(start)
        text, _, details = reason[len(start) :].partition(" (")
        assert 4096 - 16 <= len(reason.encode()) <= 4096
        assert (LETTERS * 600).startswith(text), f"{shift}: ends in {text[-8:]!r}"
        # The message alone is cut: what follows it is told whole.
        assert "test_control_distributed.py" in details
        assert details.endswith("last good utterances: utt0a, utt0b)")


# --- Out of step -------------------------------------------------------------------------------

Situation = Callable[[int, int], None]
ODD = 1


def meets_valid(rank: int, window: int) -> None:
    train = numbers(6, lookahead=window)
    valid = numbers(6, label="valid", lookahead=window)
    drain((valid if rank == ODD else train).build_iter(1))


def other_epoch(rank: int, window: int) -> None:
    numbers(6, lookahead=window).build_iter(3 if rank == ODD else 2)


def other_window(rank: int, window: int) -> None:
    numbers(6, lookahead=window + 1 if rank == ODD else window).build_iter(1)


def other_policy(rank: int, window: int) -> None:
    numbers(6, stop_at=POLICIES[rank == ODD], lookahead=window).build_iter(1)


def other_factory(rank: int, window: int) -> None:
    """Two factories with the same label and options are two places all the same."""
    first, second = numbers(6, lookahead=window), numbers(6, lookahead=window)
    first.build_iter(1)
    second.build_iter(1)
    (first if rank == ODD else second).build_iter(2)


def iterates_alone(rank: int, window: int) -> None:
    factory = numbers(6, lookahead=window)
    iterator = factory.build_iter(1)
    if rank == ODD:
        drain(iterator)
    factory.build_iter(2)


def one_pass_more(rank: int, window: int) -> None:
    factory = numbers(6, lookahead=window)
    iterator = factory.build_iter(1)
    drain(iterator)
    if rank == ODD:
        drain(iterator)
    factory.build_iter(2)


def second_loader(rank: int, window: int) -> None:
    """Case 24: one rank starts a second factory, then all go on with the first."""
    train = numbers(9, lookahead=window)
    for batch in train.build_iter(1):
        if rank == 0 and batch == 1:
            drain(numbers(2, label="valid", lookahead=window).build_iter(1))


def validates_later(rank: int, window: int) -> None:
    """Validate in mid-epoch, one rank a window later than the others."""
    train = numbers(20, lookahead=window)
    valid = numbers(3, label="valid", lookahead=window)
    for batch in train.build_iter(1):
        if batch == (2 + max(window, 1) if rank == ODD else 2):
            drain(valid.build_iter(1))


SITUATIONS: dict[str, tuple[Situation, str, str]] = {
    "meets valid": (meets_valid, "[train] epoch 1, build_iter", "[valid] epoch 1, build_iter"),
    "other epoch": (other_epoch, "[train] epoch 2, build_iter", "[train] epoch 3, build_iter"),
    "other window": (other_window, "lookahead=", "lookahead="),
    "other policy": (other_policy, "stop_at=shortest", "stop_at=longest"),
    "other factory": (other_factory, "[train] epoch 2, build_iter", "[train] epoch 2, build_iter"),
    "iterates alone": (iterates_alone, "epoch 2, build_iter", "epoch 1, pass 1, batch 0"),
    "one pass more": (one_pass_more, "epoch 2, build_iter", "epoch 1, pass 2, batch 0"),
    "validates later": (validates_later, "[valid] epoch 1, build_iter", "[train] epoch 1, pass"),
}


def run_out_of_step(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    steady = numbers(2 + rank)
    for window in WINDOWS:
        for name, (situation, _, _) in SITUATIONS.items():
            error = caught(lambda situation=situation, window=window: situation(rank, window))
            seen.append((window, name, error, [*steady.build_iter(7)], tail(rank)))
    return seen


def test_ranks_that_are_out_of_step_are_all_told_where_all_are_and_may_go_on() -> None:
    for rank, seen in enumerate(run_ranks(3, run_out_of_step)):
        for window, name, error, following, total in seen:
            where = f"{name}, lookahead={window}, rank {rank}: {error!r}"
            assert isinstance(error, OutOfStepError), where
            assert [*error.positions] == [0, 1, 2], where
            _, common, odd = SITUATIONS[name]
            assert common in error.positions[0], where
            assert error.positions[2] == error.positions[0], where
            assert odd in error.positions[ODD], where
            assert error.positions[ODD] != error.positions[0], where
            assert f"ranks 0, 2 at {error.positions[0]}" in str(error), where
            assert f"rank {ODD} at {error.positions[ODD]}" in str(error), where
            assert following == [0, 1], where
            assert total == right_tail(3), where


def run_second_loader(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    train = numbers(5)
    for window in WINDOWS:
        error = caught(lambda window=window: second_loader(rank, window))
        seen.append((error, [*train.build_iter(2)], tail(rank)))
    return seen


def test_case_24_a_second_loader_on_rank_0_alone_never_pairs_with_the_train_pass() -> None:
    for seen in run_ranks(2, run_second_loader):
        for error, following, total in seen:
            assert isinstance(error, OutOfStepError)
            assert "[valid] epoch 1, build_iter" in error.positions[0]
            assert "[train] epoch 1, pass 1, batch" in error.positions[1]
            assert following == [*range(5)]
            assert total == right_tail(2)


def run_lone_breaks(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for window in WINDOWS:
        for at in range(6):
            train = numbers(6, lookahead=window)
            valid = numbers(2, label="valid", lookahead=window)

            def epoch(
                train: SyncedIterFactory = train, valid: SyncedIterFactory = valid, at: int = at
            ) -> list[int]:
                for batch in train.build_iter(1):
                    if rank == 1 and batch == at:
                        break
                return [*valid.build_iter(1)]

            error = caught(epoch)
            seen.append((window, at, error, [*valid.build_iter(2)], tail(rank)))
    return seen


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_lone_break_at_any_batch_is_told_on_both_ranks(store: str) -> None:
    everyones = run_ranks(2, run_lone_breaks, store=store)
    for rank, seen in enumerate(everyones):
        for number, (window, at, error, following, total) in enumerate(seen):
            where = f"lookahead={window}, break at {at}, rank {rank}: {error!r}"
            if at == 5 and error == [0, 1]:  # all have done the same steps
                assert everyones[1 - rank][number][2] == [0, 1], where
            else:
                assert isinstance(error, OutOfStepError), where
                assert "[valid] epoch 1, build_iter" in error.positions[1], where
            assert following == [0, 1], where
            assert total == right_tail(2), where


def run_unequal_at_first(rank: int, world_size: int) -> Any:
    return caught(lambda: numbers(3, timeout=20 + rank // 2).build_iter(1)), tail(rank)


def test_options_that_differ_before_the_group_is_made_are_told_on_all_ranks() -> None:
    for error, total in run_ranks(3, run_unequal_at_first):
        assert isinstance(error, OutOfStepError)
        assert ["timeout=20" in error.positions[rank] for rank in range(3)] == [True, True, False]
        assert "timeout=21" in error.positions[2]
        assert total == right_tail(3)


# --- One group per job -------------------------------------------------------------------------


def count_groups() -> list[str]:
    """Return a list that grows by a backend's name with each group that is made."""
    made: list[str] = []
    new_group = torch.distributed.new_group

    def counting(*arguments: Any, **options: Any) -> Any:
        made.append(options["backend"])
        return new_group(*arguments, **options)

    torch.distributed.new_group = counting
    return made


def run_many_factories(rank: int, world_size: int) -> Any:
    made = count_groups()
    factories = [
        numbers(3 + rank, timeout=10 + number, warn_after=5 + number, lookahead=number)
        for number in range(5)
    ]
    before = len(made)
    batches = [[*factory.build_iter(epoch)] for epoch in (1, 2) for factory in factories]
    return before, made, batches, tail(rank)


def test_all_factories_share_one_group_whatever_their_timeouts() -> None:
    for before, made, batches, total in run_ranks(2, run_many_factories):
        assert before == 0
        assert made == ["gloo", "gloo"]  # the one that is tried, and the one that stays
        assert batches == [[0, 1, 2]] * 10
        assert total == right_tail(2)


def run_slow_connection(rank: int, world_size: int, folder: Path) -> Any:
    """Let rank 1 be slow to make the group that is tried; gives who had made it at its end."""
    make, destroy = roll_call.make_gloo_group, roll_call.destroy_group
    seen: list[list[str]] = []

    def slow_make(seconds: float) -> Any:
        group = make(seconds)
        if rank == 1:
            time.sleep(1)
        (folder / f"made by {rank}").touch()
        return group

    def noting_destroy(group: Any) -> None:
        seen.append(sorted(path.name for path in folder.glob("made by *")))
        destroy(group)

    roll_call.make_gloo_group, roll_call.destroy_group = slow_make, noting_destroy
    batches = [*numbers(3, backend="gloo").build_iter(1)]
    return seen, batches, tail(rank)


def test_the_group_that_is_tried_stays_until_every_rank_has_made_it(tmp_path: Path) -> None:
    for seen, batches, total in run_ranks(3, run_slow_connection, tmp_path):
        assert seen == [["made by 0", "made by 1", "made by 2"]]
        assert batches == [0, 1, 2]
        assert total == right_tail(3)


def run_counted(rank: int, world_size: int) -> list[Any]:
    numbers(1).build_iter(1)  # makes the group
    calls: list[str] = []

    def count(name: str) -> None:
        collective = getattr(torch.distributed, name)

        def call(*arguments: Any, **options: Any) -> Any:
            assert options["group"] is not None, "an exchange on the default group"
            calls.append(name)
            return collective(*arguments, **options)

        setattr(torch.distributed, name, call)

    names = ("all_reduce", "all_gather", "broadcast", "barrier", "gather", "scatter")
    originals = {name: getattr(torch.distributed, name) for name in names}
    for name in names:
        count(name)
    seen: list[Any] = []
    for window in WINDOWS:
        for counts in range(8):
            for sized in (True, False):
                inner = NumberFactory(counts + rank, sized)
                iterator = synced(inner, lookahead=window).build_iter(1)
                built = calls[:]
                length(iterator)
                assert len([*iterator]) == counts
                seen.append((window, counts, built, calls[len(built) :]))
                calls.clear()
    for name, collective in originals.items():
        setattr(torch.distributed, name, collective)
    return [*seen, tail(rank)]


def test_an_epoch_costs_one_agreement_at_its_start_and_one_per_window() -> None:
    for seen in run_ranks(2, run_counted):
        assert seen.pop() == right_tail(2)
        for window, batches, built, passed in seen:
            where = f"lookahead={window}, {batches} batches"
            assert built == ["all_reduce"], where
            agreements = -(-(batches + 1) // max(window, 1))
            # What follows the last one is the report's numbers.
            assert passed == ["all_reduce"] * agreements + ["all_gather"], where


def test_a_job_of_one_rank_makes_no_group() -> None:
    ((_, made, batches, total),) = run_ranks(1, run_many_factories)
    assert made == []
    assert batches == [[0, 1, 2]] * 10
    assert total == 1.0


def run_anew(rank: int, world_size: int, folder: Path, store: str) -> list[Any]:
    seen: list[Any] = []
    factory = numbers(6 + rank, lookahead=2)
    for number in range(3):
        old = factory.build_iter(1)
        dropped = iter(factory.build_iter(2))
        held = [next(dropped), next(dropped)]  # with a window in flight
        total = tail(rank)
        torch.distributed.destroy_process_group()
        again = folder / f"again-{number}"
        again.mkdir(exist_ok=True)
        initialise_group(again, rank, world_size, store=store)
        refusals = [caught(lambda old=old: [*old]), drain_into(held, dropped)]  # type: ignore[arg-type]
        seen.append((held, total, refusals, [*factory.build_iter(3)], tail(rank)))
    return seen


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_after_destroy_and_init_the_group_is_made_anew_and_old_iterators_refuse(
    store: str, tmp_path: Path
) -> None:
    for seen in run_ranks(2, run_anew, tmp_path, store, store=store):
        for held, total, (never_started, in_mid_pass), following, after in seen:
            assert type(never_started) is EpochSyncError
            assert "initialised anew" in str(never_started)
            assert "build_iter()" in str(never_started)
            # What had been agreed before comes still.
            assert held == [*range(len(held))]
            assert 2 <= len(held) < 6
            assert isinstance(in_mid_pass, EpochSyncError)
            assert following == [*range(6)]
            assert total == after == right_tail(2)


def run_anew_after_a_loss(rank: int, world_size: int, folder: Path, store: str) -> Any:
    factory = numbers(6, timeout=1.5, warn_after=1, lookahead=2)
    iterator = factory.build_iter(1)
    error: Exception | None = None
    started = time.monotonic()
    try:
        for batch in iterator:
            if rank == 1 and batch == 1:
                time.sleep(5)
    except Exception as raised:
        error = raised
    refusals = [drain_into([], iterator), caught(lambda: factory.build_iter(2))]
    seconds = time.monotonic() - started
    torch.distributed.destroy_process_group()
    left = time.monotonic() - started - seconds
    folder.joinpath("again").mkdir(exist_ok=True)
    initialise_group(folder / "again", rank, world_size, store=store)
    stale = drain_into([], iterator)
    patient = numbers(5 + rank, lookahead=2)
    return error, refusals, left, stale, [*patient.build_iter(1)], tail(rank)


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_after_a_lost_rank_destroy_and_init_go_on(store: str, tmp_path: Path) -> None:
    outcomes = run_ranks(2, run_anew_after_a_loss, tmp_path, store, store=store, group_timeout=60)
    for error, refusals, left, stale, following, total in outcomes:
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)
        for refusal in refusals:
            assert isinstance(refusal, PeerLostError)
            assert refusal.ranks == (1,)
            assert "initialise torch.distributed anew" in str(refusal)
        assert left < 10  # and not the group's timeout
        assert isinstance(stale, EpochSyncError)
        assert following == [*range(5)]
        assert total == right_tail(2)


class BuildsInWorker:
    """A dataset that calls `build_iter`, or iterates, where a DataLoader's worker asks it."""

    def __init__(self, factory: SyncedIterFactory, iterator: EpochSyncIterator | None) -> None:
        self.factory = factory
        self.iterator = iterator

    def __len__(self) -> int:
        """Return that there is one sample."""
        return 1

    def __getitem__(self, index: int) -> list[str]:
        """Return what came of it."""
        if self.iterator is not None:
            error = caught(lambda: [*self.iterator])  # type: ignore[misc]
        else:
            error = caught(lambda: self.factory.build_iter(1))
        return [type(error).__name__, str(error)]


def run_in_workers(rank: int, world_size: int) -> list[Any]:
    # The harness starts ranks as daemons, which may not have children of their own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    factory = numbers(3)
    seen: list[Any] = []
    for iterator in (None, factory.build_iter(1)):
        dataset = BuildsInWorker(factory, iterator)
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=1,
            multiprocessing_context="fork",
        )
        seen.extend(loader)
    return [*seen, [*factory.build_iter(2)], tail(rank)]


def test_building_or_iterating_in_a_loaders_worker_is_a_clear_error() -> None:
    for built, iterated, following, total in run_ranks(2, run_in_workers):
        assert built[0] == iterated[0] == "EpochSyncError"
        assert "worker of a DataLoader" in built[1]
        assert "[train]" in built[1]
        assert "DataLoader worker" in iterated[1]
        assert following == [0, 1, 2]
        assert total == right_tail(2)


# --- TORCH_DISTRIBUTED_DEBUG=DETAIL ------------------------------------------------------------


def run_with_debug_level(rank: int, world_size: int, folder: Path, store: str) -> Any:
    """Take a long step on rank 1, until rank 0 has got the batch that launches an exchange."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()
    initialise_group(folder, rank, world_size, store=store)
    got = folder / "rank 0 got the batch"
    factory = numbers(8 + rank, lookahead=2)
    batches: list[int] = []
    was_let_go = True
    for batch in factory.build_iter(1):
        batches.append(batch)
        if rank == 0 and batch == 1:
            got.touch()
        if rank == 1 and batch == 0:
            until = time.monotonic() + 20
            while not got.exists() and time.monotonic() < until:
                time.sleep(0.05)
            was_let_go = got.exists()
    total = tail(rank)
    level = torch.distributed.get_debug_level().name
    return was_let_go, batches, total, level, [*factory.build_iter(2)]


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_under_debug_level_detail_launching_an_exchange_waits_for_nobody(
    store: str, tmp_path: Path
) -> None:
    outcomes = run_ranks(2, run_with_debug_level, tmp_path, store, initialise=False)
    for was_let_go, batches, total, level, following in outcomes:
        assert was_let_go, "rank 0 was not handed its batch while rank 1 was in its step"
        assert batches == following == [*range(8)]
        assert total == right_tail(2)
        assert level == "DETAIL"
