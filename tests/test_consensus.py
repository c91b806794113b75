"""The deciding part with all ranks in one process: offers, decisions, places, whole passes."""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espnet_sync.consensus import (
    FAILED_TO_BUILD,
    FINGERPRINTS,
    UNSIZED,
    ControlConsensus,
    Decision,
    Offer,
    Reduced,
    Then,
    decide,
    log_report,
    unpack,
)
from espnet_sync.epoch_sync_iterator import EpochSyncIterator
from espnet_sync.errors import (
    EmptyRankError,
    EpochSyncError,
    OutOfStepError,
    PeerFailedError,
    PeerLostError,
)
from espnet_sync.options import SyncOptions
from espnet_sync.report import SyncReport
from tests.test_random_distributed import Case, Source, batches_of, plainly

POLICIES = ("shortest", "longest")

# --- Offers and decisions ----------------------------------------------------------------------


def offer(batches: int, **facts: Any) -> Offer:
    return Offer(**{"batches": batches, "failed": False, "first_pass": 0, "stop": False, **facts})


def reduced(offers: Sequence[Offer], fingerprints: Sequence[int] = ()) -> Reduced:
    """Return what a MIN reduction of the words that carry the ranks' offers gives."""
    places = fingerprints or [7] * len(offers)
    rows = [one.pack(place) for one, place in zip(offers, places, strict=True)]
    assert all(-(2**63) <= word < 2**63 for row in rows for word in row)
    return unpack([min(column) for column in zip(*rows, strict=True)])


def test_a_failure_comes_after_as_many_batches_and_before_an_end() -> None:
    ends = [offer(batches) for batches in range(4)]
    fails = [offer(batches, failed=True) for batches in range(4)]
    stops = [offer(3, stop=True), offer(3, stop=True, failed=True)]
    in_order = [fails[0], stops[0], *itertools.chain(*zip(ends, fails[1:], strict=False)), ends[3]]
    for earlier, later in itertools.pairwise(in_order):
        both = reduced([later, earlier])
        assert (both.batches, both.failed, both.stop) == (
            0 if earlier.stop else earlier.batches,
            earlier.failed,
            earlier.stop,
        )
    # A rank that asks to stop offers nothing, and its own failure after that never happened.
    assert stops[0].pack(9) == stops[1].pack(9)


@pytest.mark.parametrize("places", [(5, 5, 5), (0, 0, 0), (2**31 - 1,) * 3])
def test_ranks_with_equal_fingerprints_are_in_step(places: tuple[int, ...]) -> None:
    assert reduced([offer(1)] * 3, places).in_step


@pytest.mark.parametrize("places", [(5, 6, 6), (6, 5, 6), (6, 6, 5), (0, 2**31 - 1, 1)])
def test_ranks_with_unequal_fingerprints_are_not(places: tuple[int, ...]) -> None:
    assert not reduced([offer(1)] * 3, places).in_step


def every_offer(window: int, stop_at: str) -> list[Offer]:
    """Return all that one rank can offer."""
    offers = []
    for batches, stop in itertools.product(range(window + 1), (False, True)):
        full = batches == window
        # With `longest` a rank that is short of a window has failed, or it asks to stop.
        fails = (False,) if full else (True,) if stop_at == "longest" and not stop else (0, 1)
        for failed in fails:
            # What it holds beyond its first pass comes from fresh ones.
            ends = range(batches + 1) if stop_at == "longest" else ()
            for first_pass in {*ends, window}:
                offers.append(
                    offer(batches, failed=bool(failed), first_pass=first_pass, stop=stop)
                )
    return offers


def decide_plainly(offers: Sequence[Offer], window: int, stop_at: str) -> Decision:
    """Go through the window batch by batch, as if the ranks asked before each one."""
    for index in range(window):
        active = [one for one in offers if not one.stop]
        failed = any(one.failed and one.batches == index for one in active)
        if stop_at == "longest":
            ended = all(one.first_pass <= index for one in offers)
            failed = failed and not ended
        else:
            ended = any(not one.failed and one.batches == index for one in active)
        if failed:
            return Decision(batches=index, then=Then.FAIL)
        if ended or len(active) < len(offers):
            return Decision(batches=index, then=Then.END)
    return Decision(batches=window, then=Then.GO_ON)


@pytest.mark.parametrize("stop_at", POLICIES)
@pytest.mark.parametrize(
    ("window", "world_size"), [(1, 2), (2, 2), (3, 2), (4, 2), (1, 3), (2, 3)]
)
def test_a_window_is_decided_as_batch_by_batch_for_all_that_ranks_can_offer(
    window: int, world_size: int, stop_at: str
) -> None:
    seen = set()
    for offers in itertools.product(every_offer(window, stop_at), repeat=world_size):
        decision = decide(reduced(offers), window, stop_at)
        assert decision == decide_plainly(offers, window, stop_at), offers
        # Nobody is to hand out what it does not hold.
        assert all(one.batches >= decision.batches or one.stop for one in offers), offers
        seen.add(decision.then)
    assert seen == {*Then}


@pytest.mark.parametrize("stop_at", POLICIES)
def test_a_failure_outranks_an_end_at_the_same_batch_and_not_one_before(stop_at: str) -> None:
    ends = offer(2, first_pass=2) if stop_at == "shortest" else offer(4, first_pass=2)
    for batches, then in ((1, Then.FAIL), (2, Then.FAIL), (3, Then.END)):
        fails = offer(batches, failed=True, first_pass=4 if stop_at == "shortest" else 3)
        if stop_at == "longest" and then is Then.END:
            fails = offer(batches, failed=True, first_pass=1)
        decision = decide(reduced([ends, fails]), 4, stop_at)
        assert decision == Decision(batches=min(batches, 2), then=then)


def test_longest_ends_with_the_last_first_pass_whatever_a_fresh_pass_does_there() -> None:
    # Both have run out after two batches; the fresh pass of one fails, and nobody needs it.
    offers = [offer(2, failed=True, first_pass=2), offer(4, first_pass=2)]
    assert decide(reduced(offers), 4, "longest") == Decision(batches=2, then=Then.END)


# --- All ranks in one process ------------------------------------------------------------------


class Stage:
    """Plays ranks as threads, one at a time, in an order that `choose` gives.

    A rank goes on until it comes to an exchange; `choose` picks the next among those that can go
    on there. Where none can, the ranks would wait for ever.
    """

    def __init__(self, choose: Callable[[list[int]], int] | None = None) -> None:
        self._choose = choose
        self._parked: dict[int, Callable[[], bool]] = {}
        self._turns: list[threading.Semaphore] = []
        self._back = threading.Semaphore(0)
        self._hangs = False

    def play(self, parts: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what each rank's part returned."""
        results: list[Any] = [None] * len(parts)
        raised: list[BaseException] = []
        done: set[int] = set()
        self._turns = [threading.Semaphore(0) for _ in parts]
        self._parked = {rank: lambda: True for rank in range(len(parts))}

        def run(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = parts[rank]()
            except BaseException as error:
                raised.append(error)
            done.add(rank)
            self._back.release()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
        for thread in threads:
            thread.start()
        while len(done) < len(parts):
            ready = sorted(rank for rank, may_go in self._parked.items() if may_go())
            if not ready:
                self._hangs = True
                ready = sorted(self._parked)
            rank = self._choose(ready) if self._choose and not self._hangs else ready[0]
            del self._parked[rank]
            self._turns[rank].release()
            self._back.acquire()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]
        assert not self._hangs
        return results

    def wait(self, rank: int, may_go: Callable[[], bool]) -> None:
        """Let the others go on until a rank may; called by that rank."""
        if self._choose is None and may_go():
            return
        self._parked[rank] = may_go
        self._back.release()
        self._turns[rank].acquire()
        if self._hangs:
            raise AssertionError(f"rank {rank} waits for ever")


class Wire:
    """What the ranks have sent: by rank, one entry for each collective."""

    def __init__(self, world_size: int) -> None:
        self.sent: list[list[tuple[str, Any]]] = [[] for _ in range(world_size)]

    def post(self, rank: int, kind: str, value: Any) -> int:
        self.sent[rank].append((kind, value))
        return len(self.sent[rank]) - 1

    def is_there(self, number: int) -> bool:
        return all(len(sent) > number for sent in self.sent)

    def everyones(self, number: int) -> list[Any]:
        kinds = {sent[number][0] for sent in self.sent}
        assert len(kinds) == 1, f"ranks run different collectives, which Gloo hangs on: {kinds}"
        return [sent[number][1] for sent in self.sent]


class Launched:
    def __init__(self, number: int, settle: Callable[[list[int]], Any]) -> None:
        self.number = number
        self.settle = settle
        self.was_read = False
        self.outcome: Any = None
        self.error: Exception | None = None


class PlayedGroup:
    """Stands in for a `ControlGroup`: launches do not wait, readings need all ranks' numbers."""

    def __init__(self, rank: int, stage: Stage, wire: Wire) -> None:
        self.rank = rank
        self.world_size = len(wire.sent)
        self.handed_out = 0
        self.serial = 0
        self.broken: Exception | None = None
        self.is_here = True
        self.is_current = True
        self._stage = stage
        self._wire = wire
        self._unread: Launched | None = None

    def launch(self, numbers: list[int], settle: Callable[[list[int]], Any], _: Any) -> Launched:
        if self._unread is not None:
            self.read(self._unread)
        self._stage.wait(self.rank, lambda: True)
        self.serial += 1
        self._unread = Launched(self._wire.post(self.rank, "reduce", numbers), settle)
        return self._unread

    def read(self, exchange: Launched) -> Any:
        if not exchange.was_read:
            exchange.was_read = True
            self._unread = None
            everyones = self._everyones(exchange.number)
            try:
                exchange.outcome = exchange.settle([min(c) for c in zip(*everyones, strict=True)])
            except Exception as error:
                exchange.error = error
        if exchange.error is not None:
            raise exchange.error
        return exchange.outcome

    def gather_numbers(self, numbers: Sequence[int], _: Any) -> list[list[int]]:
        return self._everyones(self._wire.post(self.rank, "numbers", list(numbers)))

    def gather_texts(self, text: str, _: Any) -> list[str]:
        return self._everyones(self._wire.post(self.rank, "texts", text))

    def _everyones(self, number: int) -> list[Any]:
        self._stage.wait(self.rank, lambda: self._wire.is_there(number))
        return self._wire.everyones(number)


class SilentRollCall:
    """Stands in for a `RollCall`: nobody is late."""

    def note_meeting(self) -> None:
        pass

    def clock(self) -> float:
        return 0.0

    def away(self) -> float:
        return 0.0


class Rank:
    """One rank of a job that is played in this process."""

    def __init__(self, group: PlayedGroup) -> None:
        self.rank = group.rank
        self.group = group

    def consensus(
        self, *, label: str = "train", epoch: int = 1, factory: int = 1, **options: Any
    ) -> ControlConsensus:
        return ControlConsensus(
            self.group,  # type: ignore[arg-type]
            SilentRollCall(),  # type: ignore[arg-type]
            SyncOptions(label=label, **options),
            epoch,
            factory,
            log_report,
        )

    def iterator(self, source: Any, **where: Any) -> EpochSyncIterator:
        return EpochSyncIterator(source, consensus=self.consensus(**where), label="train")


def play(
    world_size: int,
    part: Callable[[Rank], Any],
    choose: Callable[[list[int]], int] | None = None,
) -> list[Any]:
    """Return what a part gives on each rank; what it raises is raised here."""
    stage, wire = Stage(choose), Wire(world_size)
    ranks = [Rank(PlayedGroup(rank, stage, wire)) for rank in range(world_size)]
    return stage.play([lambda rank=rank: part(rank) for rank in ranks])


def every_order(world_size: int, part: Callable[[Rank], Any]) -> Iterator[list[Any]]:
    """Play a part in every order in which the ranks can come to their exchanges."""
    script: list[int] = []
    while True:
        options: list[int] = []

        def choose(ready: list[int], options: list[int] = options) -> int:
            step = len(options)
            options.append(len(ready))
            if step == len(script):
                script.append(0)
            return ready[script[step]]

        yield play(world_size, part, choose)
        while script and script[-1] == options[len(script) - 1] - 1:
            script.pop()
        if not script:
            return
        script[-1] += 1


def caught(run: Callable[[], Any]) -> Any:
    """Return what a call gives, or the error that it raises."""
    try:
        return run()
    except Exception as error:
        return error


Seen = tuple[list[int], Any, SyncReport | None, int]


def pass_of(case: Case, rank: Rank) -> Seen:
    """Drive one pass of a case; gives the batches, how it ended, the report, the builds."""
    source = Source(case.lengths[rank.rank], False, case.fails.get(rank.rank))
    iterator = rank.iterator(
        lambda: source.build_iter(1), lookahead=case.window, stop_at=case.stop_at
    )
    batches: list[int] = []
    if case.stop == (rank.rank, -1):
        iterator.request_stop()
    try:
        for batch in iterator:
            batches.append(batch)
            if case.stop == (rank.rank, len(batches) - 1):
                iterator.request_stop()
            if case.break_at == len(batches) - 1:
                return batches, "break", iterator.report, source.builds
    except Exception as error:
        if error is source.failure:
            return batches, "own", None, source.builds
        return batches, (type(error), getattr(error, "ranks", None)), None, source.builds
    return batches, "end", iterator.report, source.builds


def check(case: Case, seen: list[Seen]) -> None:
    """Compare what all ranks saw with what plain Python says."""
    expected = plainly(case)
    for rank, (batches, ended, report, builds) in enumerate(seen):
        where = f"rank {rank} of {case}: {expected}"
        assert batches == batches_of(case, rank, expected), where
        if expected.manner == "fail":
            own = rank in expected.ranks
            assert ended == ("own" if own else (PeerFailedError, expected.ranks)), where
        elif expected.manner == "empty":
            assert ended == (EmptyRankError, expected.ranks), where
        elif expected.manner == "break":
            assert ended == "break", where
        else:
            assert ended == "end", where
            assert report == seen[0][2], where
            assert report is not None
            assert report.batches == expected.batches, where
            assert report.ended_by == expected.ranks, where
        if case.stop_at == "shortest":
            assert builds <= 1, where


SMALL = [
    Case((2, 1), window=1),
    Case((1, 2), window=0),
    Case((3, 2), window=2),
    Case((2, 2), window=2, stop_at="longest"),
    Case((1, 3), window=2, stop_at="longest"),
    Case((3, 3), window=2, fails={1: 2}),
    Case((3, 3), window=2, stop=(1, 0)),
    Case((4, 4), window=2, break_at=1),
    Case((0, 1), window=1, stop_at="longest"),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_passes_go_the_same_way_in_every_order_of_proposing_and_deciding(case: Case) -> None:
    orders = 0
    for seen in every_order(2, lambda rank: pass_of(case, rank)):
        check(case, seen)
        orders += 1
    assert orders > 2


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(1, 4))
    lengths = tuple(draw(st.integers(0, 12)) for _ in range(world_size))
    fails: dict[int, int] = {}
    for rank in draw(st.sets(st.integers(0, world_size - 1), max_size=2)):
        fails[rank] = draw(st.integers(0, lengths[rank]))
    asks = st.tuples(st.integers(0, world_size - 1), st.integers(-1, 12))
    return Case(
        lengths=lengths,
        window=draw(st.integers(0, 8)),
        stop_at=draw(st.sampled_from(POLICIES)),
        fails=fails,
        stop=draw(st.none() | asks),
        break_at=draw(st.none() | st.integers(0, 12)),
    )


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_passes_of_any_lengths_windows_stops_and_failures_go_as_plain_python_says(
    case: Case,
) -> None:
    check(case, play(len(case.lengths), lambda rank: pass_of(case, rank)))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 10), min_size=2, max_size=3),
    stop_at=st.sampled_from(POLICIES),
    failing=st.none() | st.tuples(st.integers(0, 1), st.integers(0, 10)),
)
def test_batches_ends_and_errors_do_not_depend_on_the_window(
    lengths: list[int], stop_at: str, failing: tuple[int, int] | None
) -> None:
    fails = {failing[0]: failing[1]} if failing and failing[1] <= lengths[failing[0]] else {}
    by_window = set()
    for window in range(9):
        case = Case(tuple(lengths), window=window, stop_at=stop_at, fails=fails)
        seen = play(len(lengths), lambda rank, case=case: pass_of(case, rank))
        by_window.add(
            tuple(
                (tuple(batches), ended, report and (report.batches, report.ended_by))
                for batches, ended, report, _ in seen
            )
        )
    assert len(by_window) == 1


# --- What a pass costs -------------------------------------------------------------------------


class Batch:
    """Something that a weak reference can point to."""


class Counted:
    """A source that counts what is asked of it, and which of its batches are alive."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.builds = 0
        self.pulls = 0
        self.alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    def __call__(self) -> Iterator[Batch]:
        """Build a pass."""
        self.builds += 1
        for _ in range(self.length):
            self.pulls += 1
            batch = Batch()
            self.alive.add(batch)
            yield batch
            del batch


WINDOWS = [*range(9)]


@pytest.mark.parametrize("window", WINDOWS)
def test_w_pulls_before_the_first_batch_and_one_for_each_that_goes_out(window: int) -> None:
    def part(rank: Rank) -> None:
        source = Counted(40)
        iterator = iter(rank.iterator(source, lookahead=window))
        assert (source.builds, source.pulls) == (0, 0)
        for number in range(1, 41):
            next(iterator)
            # Pulls go on while the window goes out: one with each batch.
            expected = number + window if window else number
            assert source.pulls == min(expected, 40), number

    play(2, part)


@pytest.mark.parametrize("window", WINDOWS)
def test_at_most_2w_and_one_batches_are_alive(window: int) -> None:
    def part(rank: Rank) -> int:
        source = Counted(30)
        most = 0
        for batch in rank.iterator(source, lookahead=window):
            most = max(most, len(source.alive))
            del batch
        return most

    for most in play(2, part):
        assert max(1, window) <= most <= 2 * window + 1


@pytest.mark.parametrize("stop_at", POLICIES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_pass_of_n_batches_takes_one_agreement_per_window_and_one_build(
    window: int, stop_at: str
) -> None:
    for count in (0, 1, 2, 3, 4, 5, 7, 8, 9, 16):

        def part(rank: Rank, count: int = count) -> tuple[int, int]:
            source = Counted(count + (rank.rank if stop_at == "shortest" else 0))
            batches = sum(1 for _ in rank.iterator(source, lookahead=window, stop_at=stop_at))
            assert batches == count
            return rank.group.serial, source.builds

        if count == 0 and stop_at == "longest":
            continue
        for agreements, builds in play(2, part):
            assert agreements == -(-(count + 1) // max(window, 1))
            # With `longest` a fresh pass waits for the ranks that have not run out.
            assert builds == (1 if stop_at == "shortest" else builds)


def test_a_lone_source_is_built_once_per_pass_and_each_pass_is_whole() -> None:
    def part(rank: Rank) -> tuple[list[int], int]:
        source = Counted(5)
        iterator = rank.iterator(source, lookahead=2)
        next(iter(iterator))
        return [sum(1 for _ in iterator) for _ in range(2)], source.builds

    assert play(2, part) == [([5, 5], 3)] * 2


# --- Lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "shortest", "longest"),
    [
        ((6, 4, 5), 4, 6),
        ((3, 3, 3), 3, 3),
        ((0, 4, 5), 0, 5),
        ((UNSIZED, 4, 5), UNSIZED, UNSIZED),
        ((4, 0, UNSIZED), UNSIZED, UNSIZED),
    ],
)
def test_a_length_is_that_of_the_policy_or_missing_on_all_ranks(
    lengths: tuple[int, ...], shortest: int, longest: int
) -> None:
    for stop_at, expected in (("shortest", shortest), ("longest", longest)):

        def part(rank: Rank, stop_at: str = stop_at) -> int:
            return rank.consensus(stop_at=stop_at).agree_length(lengths[rank.rank], "")

        assert play(3, part) == [expected] * 3


def test_a_rank_that_could_not_build_is_named_with_its_reason_on_the_others() -> None:
    def part(rank: Rank) -> Any:
        length, failure = (FAILED_TO_BUILD, "OSError: no disk") if rank.rank == 1 else (5, "")
        return caught(lambda: rank.consensus(epoch=3).agree_length(length, failure))

    first, second, third = play(3, part)
    assert second == UNSIZED  # and then raises its own
    for error in (first, third):
        assert isinstance(error, PeerFailedError)
        assert (error.ranks, error.reasons) == ((1,), {1: "OSError: no disk"})
        assert "[train] epoch 3, build_iter: " in str(error)


# --- Reasons -----------------------------------------------------------------------------------


def test_a_reason_says_index_type_message_frames_and_the_last_good_utterances() -> None:
    def reads() -> Iterator[Any]:
        yield ["utt1", "utt2"], {"speech": 1}
        yield [f"utt{number}" for number in range(3, 13)], {"speech": 2}
        raise OSError("torn: /data/a.wav")

    def part(rank: Rank) -> Any:
        source = reads if rank.rank == 1 else lambda: itertools.repeat((["a"], {}))
        return caught(lambda: [*rank.iterator(source, epoch=4, lookahead=4)])

    peer, own = play(2, part)
    assert type(own) is OSError
    assert isinstance(peer, PeerFailedError)
    reason = peer.reasons[1]
    assert reason.startswith("at batch 2: OSError: torn: /data/a.wav (")
    assert "test_consensus.py:" in reason
    assert " in reads" in reason
    assert "last good utterances: utt3, utt4, " in reason
    assert "utt10 and 2 more" in reason
    assert "utt1," not in reason
    assert "[train] epoch 4, batch 2: the data source of rank 1 raised" in str(peer)
    assert reason in str(peer)


class UnreadableError(Exception):
    def __str__(self) -> str:
        """Fail, as some errors of libraries do."""
        raise RuntimeError("no text")


def test_a_failure_whose_text_cannot_be_had_is_told_all_the_same() -> None:
    failure = UnreadableError()

    def raises() -> Iterator[int]:
        yield 0
        raise failure

    def part(rank: Rank) -> Any:
        return caught(lambda: [*rank.iterator(raises if rank.rank == 0 else itertools.count)])

    own, peer = play(2, part)
    assert own is failure
    assert isinstance(peer, PeerFailedError)
    assert peer.reasons[0].startswith("at batch 1: UnreadableError: ")


@pytest.mark.parametrize("first", [3, None, 2.5, object()])
def test_a_pair_of_anything_and_a_dict_is_a_batch_like_any_other(first: object) -> None:
    def part(rank: Rank) -> list[Any]:
        return [*rank.iterator(lambda: [(first, {"x": 1})] * 2)]

    assert play(2, part) == [[(first, {"x": 1})] * 2] * 2


def test_iterators_of_numbers_in_a_batch_are_not_used_up() -> None:
    def part(rank: Rank) -> list[list[int]]:
        return [[*pair[0]] for pair in rank.iterator(lambda: [(iter([1, 2]), {})])]

    assert play(2, part) == [[[1, 2]]] * 2


def chained() -> ValueError:
    """Return an exception with a cause, as a loader's worker raises it."""
    try:
        raise ValueError("a torn file") from OSError("no disk")
    except ValueError as error:
        return error


@pytest.mark.parametrize("serial", [1, 2])
def test_a_rank_that_failed_keeps_its_own_where_the_others_can_not_be_told(
    serial: int, caplog: pytest.LogCaptureFixture
) -> None:
    failure = chained()

    def fails() -> Iterator[int]:
        if serial == 2:
            yield 0
        raise failure

    def part(rank: Rank) -> None:
        def broken(*_: object) -> None:
            raise PeerLostError("lost rank 1", (1,), 3.0)

        launch = rank.group.launch
        rank.group.launch = lambda *arguments: (  # type: ignore[method-assign,assignment]
            broken() if rank.group.serial + 1 == serial else launch(*arguments)
        )
        with pytest.raises(ValueError, match="a torn file") as raised:
            list(rank.iterator(fails, lookahead=1))
        assert raised.value is failure

    play(1, part)
    assert isinstance(failure.__cause__, OSError)
    assert failure.__context__ is None
    assert "could not tell ValueError('a torn file'): lost rank 1" in caplog.text


def test_a_rank_that_could_not_build_keeps_its_own_where_the_others_can_not_be_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failure = chained()

    def fails() -> list[int]:
        raise failure

    def lost(length: int, reason: str) -> int:
        assert (length, reason[:22]) == (FAILED_TO_BUILD, "ValueError: a torn fil")
        raise PeerLostError("lost rank 1", (1,), 3.0)

    def elsewhere(length: int, reason: str) -> int:
        raise OutOfStepError("elsewhere", {})

    iterator = EpochSyncIterator(fails, label="train")
    with pytest.raises(ValueError, match="a torn file") as raised:
        iterator.settle_length(lost)
    assert raised.value is failure
    assert isinstance(failure.__cause__, OSError)
    assert "could not tell ValueError('a torn file'): lost rank 1" in caplog.text
    with pytest.raises(OutOfStepError):
        iterator.settle_length(elsewhere)


# --- Places ------------------------------------------------------------------------------------


def one_batch(rank: Rank, **where: Any) -> Any:
    return caught(lambda: next(iter(rank.iterator(range(9), **where))))


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({"label": "valid"}, "[valid] epoch 1, pass 1, batch 0"),
        ({"epoch": 2}, "[train] epoch 2, pass 1, batch 0"),
        ({"factory": 2}, "(factory 2 of the job"),
        ({"lookahead": 1}, "lookahead=1"),
        ({"stop_at": "longest"}, "stop_at=longest"),
        ({"timeout": 5}, "timeout=5"),
        ({"warn_after": 5}, "warn_after=5"),
    ],
)
def test_ranks_at_different_places_are_all_told_where_all_are(
    other: dict[str, Any], shown: str
) -> None:
    for seen in every_order(2, lambda rank: one_batch(rank, **(other if rank.rank else {}))):
        for error in seen:
            assert isinstance(error, OutOfStepError)
            assert [*error.positions] == [0, 1]
            assert error.positions[0].startswith("[train] epoch 1, pass 1, batch 0 (")
            assert shown in error.positions[1]
            assert shown not in error.positions[0]
            assert error.positions[0] in str(error)
            assert error.positions[1] in str(error)


def test_another_pass_and_the_build_are_other_places_too() -> None:
    def another_pass(rank: Rank) -> Any:
        iterator = rank.iterator(range(2 + 3 * rank.rank), lookahead=1, stop_at="longest")
        if rank.rank == 1:
            return caught(lambda: [*iterator])
        next(iter(iterator))
        return caught(lambda: next(iter(iterator)))

    for error in play(2, another_pass):
        assert isinstance(error, OutOfStepError)
        assert "pass 2, batch 0" in error.positions[0]
        assert "pass 1, batch 2" in error.positions[1]

    def build(rank: Rank) -> Any:
        if rank.rank == 0:
            return caught(lambda: rank.consensus().agree_length(5, ""))
        return one_batch(rank)

    for error in play(2, build):
        assert isinstance(error, OutOfStepError)
        assert "[train] epoch 1, build_iter" in error.positions[0]


LONE_BREAKS = [(window, at) for window in (0, 1, 2, 4) for at in range(6)]


@pytest.mark.parametrize(("window", "at"), LONE_BREAKS)
def test_a_lone_break_at_any_batch_is_told_by_the_next_iterator(window: int, at: int) -> None:
    def part(rank: Rank) -> Any:
        for number, batch in enumerate(rank.iterator(range(6), lookahead=window)):
            assert number == batch
            if rank.rank == 1 and number == at:
                break
        return [*rank.iterator(range(3), label="valid", factory=2, lookahead=window)]

    # After its last batch a rank that leaves and one that asks for another may be told apart or
    # not; both have done the same steps.
    seen = play(2, lambda rank: caught(lambda: part(rank)))
    if at == 5 and all(batches == [0, 1, 2] for batches in seen):
        return
    for error in seen:
        assert isinstance(error, OutOfStepError), error
        assert "[valid]" in error.positions[1]


@pytest.mark.parametrize("window", [0, 1, 2, 4])
def test_after_ranks_were_out_of_step_new_iterators_go_on(window: int) -> None:
    def part(rank: Rank) -> Any:
        old = rank.iterator(range(6), lookahead=window)
        for batch in range(3 + rank.rank):  # one batch more on rank 1
            next_ = one_batch(rank, epoch=2 + batch, lookahead=window) if batch == 3 else None
            assert next_ is None or isinstance(next_, OutOfStepError)
        if rank.rank == 0:
            error = caught(lambda: [*old])
            assert isinstance(error, OutOfStepError)
            again = caught(lambda: [*old])
            assert type(again) is EpochSyncError
            assert "refuses to go on since an earlier pass raised OutOfStepError" in str(again)
        return [*rank.iterator(range(4), epoch=9, lookahead=window)]

    assert play(2, part) == [[0, 1, 2, 3]] * 2


# --- Refusals ----------------------------------------------------------------------------------


def test_an_iterator_that_raised_refuses_and_a_new_one_goes_on() -> None:
    def part(rank: Rank) -> Any:
        fails = Source(4, False, 2 if rank.rank == 0 else None)
        iterator = rank.iterator(lambda: fails.build_iter(1))
        first = caught(lambda: [*iterator])
        second = caught(lambda: [*iterator])
        return first, second, [*rank.iterator(range(2))]

    (own, refusal, after), (peer, peers_refusal, peers_after) = play(2, part)
    assert type(own) is ValueError
    assert isinstance(peer, PeerFailedError)
    assert after == peers_after == [0, 1]
    for error in (refusal, peers_refusal):
        assert type(error) is EpochSyncError
        assert "build a new one with build_iter()" in str(error)
    assert "raised ValueError: a torn file" in str(refusal)
    assert "raised PeerFailedError: " in str(peers_refusal)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"broken": PeerLostError("lost", (1,), 3.0)}, PeerLostError, "initialise torch.dist"),
        ({"is_here": False}, EpochSyncError, "a fork of the rank"),
        ({"is_current": False}, EpochSyncError, "initialised anew"),
    ],
)
def test_a_group_that_is_of_no_use_refuses_every_pass(
    state: dict[str, Any], error: type[Exception], message: str
) -> None:
    def part(rank: Rank) -> None:
        iterator = rank.iterator(range(3))
        for name, value in state.items():
            setattr(rank.group, name, value)
        for _ in range(2):
            with pytest.raises(error, match=message) as raised:
                next(iter(iterator))
            if isinstance(raised.value, PeerLostError):
                assert (raised.value.ranks, raised.value.waited) == ((1,), 3.0)
        assert rank.group.serial == 0

    play(1, part)


# --- Longest -----------------------------------------------------------------------------------


class OneShot:
    """A source whose first pass alone has batches; counts its passes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.builds = 0

    def __call__(self) -> list[int]:
        """Build a pass."""
        self.builds += 1
        return [*range(self.length)] if self.builds == 1 else []


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 8])
def test_longest_names_a_rank_whose_fresh_pass_is_empty_where_one_is_needed(window: int) -> None:
    def part(rank: Rank) -> Any:
        batches: list[int] = []
        source = OneShot(3) if rank.rank == 1 else OneShot(7)
        iterator = rank.iterator(source, stop_at="longest", lookahead=window)
        return batches, caught(lambda: batches.extend(iter_into(batches, iterator)))

    for batches, error in play(2, part):
        assert batches == [0, 1, 2]
        assert isinstance(error, EmptyRankError)
        assert error.ranks == (1,)


def iter_into(batches: list[int], iterator: EpochSyncIterator) -> list[int]:
    for batch in iterator:
        batches.append(batch)
    return []


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 8])
def test_longest_asks_no_more_of_sources_that_run_out_together(window: int) -> None:
    def part(rank: Rank) -> Any:
        live = iter(range(5))  # a fresh pass of which would be an error
        return [*rank.iterator(lambda: live, stop_at="longest", lookahead=window)]

    assert play(2, part) == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 8])
def test_longest_fails_where_a_live_iterator_can_not_start_over(window: int) -> None:
    def part(rank: Rank) -> Any:
        live = iter(range(2 if rank.rank == 0 else 5))
        batches: list[int] = []
        iterator = rank.iterator(lambda: live, stop_at="longest", lookahead=window)
        return batches, caught(lambda: iter_into(batches, iterator))

    (batches, own), (peers_batches, peer) = play(2, part)
    assert batches == peers_batches == [0, 1]
    assert type(own) is RuntimeError
    assert "Hand over the callable" in str(own)
    assert isinstance(peer, PeerFailedError)
    assert "Hand over the callable" in peer.reasons[0]


@pytest.mark.parametrize("window", [0, 2, 4])
def test_all_ranks_empty_is_an_error_with_longest_and_an_end_with_shortest(window: int) -> None:
    def part(rank: Rank, stop_at: str) -> Any:
        return caught(lambda: [*rank.iterator(list, stop_at=stop_at, lookahead=window)])

    assert play(2, lambda rank: part(rank, "shortest")) == [[], []]
    for error in play(2, lambda rank: part(rank, "longest")):
        assert isinstance(error, EmptyRankError)
        assert error.ranks == (0, 1)


# --- What travels -----------------------------------------------------------------------------

FINGERPRINT = st.integers(0, FINGERPRINTS - 1)
OFFER = st.builds(
    Offer,
    batches=st.integers(0, 2**31 - 3),
    failed=st.booleans(),
    first_pass=st.integers(0, 2**31 - 3),
    stop=st.just(False),
)


@given(st.lists(OFFER, min_size=1, max_size=5), FINGERPRINT)
def test_ranks_at_one_place_get_what_their_offers_come_to(
    offers: list[Offer], fingerprint: int
) -> None:
    fewest, is_whole = min((one.batches, not one.failed) for one in offers)
    first_pass = max(one.first_pass for one in offers)
    expected = Reduced(fewest, not is_whole, first_pass, stop=False, in_step=True)
    assert reduced(offers, [fingerprint] * len(offers)) == expected


@given(st.lists(OFFER, min_size=2, max_size=5), FINGERPRINT, st.data())
def test_a_stop_of_any_rank_reaches_all_unless_one_fails_at_once(
    offers: list[Offer], fingerprint: int, data: st.DataObject
) -> None:
    stopping = data.draw(st.integers(0, len(offers) - 1))
    offers[stopping] = replace(offers[stopping], stop=True)
    all_offers = reduced(offers, [fingerprint] * len(offers))
    fails_at_once = any(one.failed and not one.batches and not one.stop for one in offers)
    assert all_offers.batches == 0
    assert (all_offers.stop, all_offers.failed) == (not fails_at_once, fails_at_once)
    assert all_offers.in_step


@given(st.lists(st.tuples(OFFER, FINGERPRINT), min_size=2, max_size=5))
def test_other_fingerprints_are_seen_by_all(offers: list[tuple[Offer, int]]) -> None:
    ranks, places = zip(*offers, strict=True)
    assert reduced(ranks, places).in_step == (len(set(places)) == 1)


def test_a_length_that_does_not_fit_is_none() -> None:
    assert play(2, lambda rank: rank.consensus().agree_length(2**40, "")) == [UNSIZED] * 2
