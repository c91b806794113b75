"""The roll call on fakes: all ranks in one process, on a store and a clock of the test's own."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from espnet_sync import roll_call
from espnet_sync.errors import OutOfStepError, PeerLostError
from espnet_sync.process_groups import BoundedStore, StoreUnreachableError
from espnet_sync.roll_call import (
    DEPARTURE_SECONDS,
    LEAVE_SECONDS,
    ROLL_SECONDS,
    Departure,
    Meeting,
    Roll,
    RollCall,
    Waiting,
)


class FakeStore:
    """One rank's end of a store in memory; `error` is what its calls raise, `calls` all ranks'."""

    def __init__(self, shared: "FakeStore | None" = None, host_rank: int | None = None) -> None:
        self.data: dict[str, Any] = {} if shared is None else shared.data
        self.calls: list[str] = [] if shared is None else shared.calls
        self.host_rank = host_rank
        self.error: StoreUnreachableError | None = None

    def _note(self, key: str) -> None:
        self.calls.append(key)
        if self.error is not None:
            raise self.error

    def set(self, key: str, text: str) -> None:
        self._note(key)
        self.data[key] = text

    def check(self, key: str) -> bool:
        self._note(key)
        return key in self.data

    def get(self, key: str) -> str:
        self._note(key)
        return str(self.data[key])

    def add(self, key: str, number: int) -> int:
        self._note(key)
        self.data[key] = self.data.get(key, 0) + number
        return int(self.data[key])

    def set_once(self, key: str, text: str) -> str:
        self._note(key)
        return str(self.data.setdefault(key, text))


class Stage:
    """Plays ranks as threads, of which one runs at a time, on a clock that a `sleep` moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended: dict[int, float] = {}
        self._due: list[tuple[float, int, threading.Event]] = []
        self._turns = itertools.count()
        self._is_idle = threading.Semaphore(0)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        wake = self._wake_at(self.now + seconds)
        self._is_idle.release()
        wake.wait()

    def play(
        self, parts: dict[int, Callable[[], Any]], starts: dict[int, float] | None = None
    ) -> dict[int, Any]:
        """Run each rank's part; gives what each returned or raised."""
        outcomes: dict[int, Any] = {}

        def run(rank: int, part: Callable[[], Any], wake: threading.Event) -> None:
            wake.wait()
            try:
                outcomes[rank] = part()
            except Exception as error:
                outcomes[rank] = error
            self.ended[rank] = self.now
            self._is_idle.release()

        threads = []
        for rank, part in parts.items():
            wake = self._wake_at((starts or {}).get(rank, 0.0))
            threads.append(threading.Thread(target=run, args=(rank, part, wake), daemon=True))
            threads[-1].start()
        while self._due:
            at, _, wake = heapq.heappop(self._due)
            self.now = max(self.now, at)
            wake.set()
            self._is_idle.acquire()
        for thread in threads:
            thread.join()
        return outcomes

    def _wake_at(self, at: float) -> threading.Event:
        wake = threading.Event()
        heapq.heappush(self._due, (at, next(self._turns), wake))
        return wake


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    clock = SimpleNamespace(monotonic=made.clock, sleep=made.sleep)
    monkeypatch.setattr(roll_call, "time", clock)
    return made


def roll_calls(stage: Stage, world_size: int, host_rank: int | None = None) -> list[RollCall]:
    shared = FakeStore()
    return [
        RollCall(
            FakeStore(shared, host_rank),  # type: ignore[arg-type]
            rank,
            world_size,
            stage.clock,
            stage.sleep,
        )
        for rank in range(world_size)
    ]


def calls_of(call: RollCall) -> list[str]:
    return call.store.calls  # type: ignore[attr-defined,no-any-return]


def notice(call: RollCall, known: tuple[int, ...] = ()) -> Callable[[], PeerLostError]:
    """Return what a rank does that noticed a closed connection."""
    return lambda: call.call("[train] here", 1.5, "a cause", frozenset(known), was_late=False)


# --- Roll -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 60, 61, 1024])
def test_a_roll_knows_who_has_signed(world_size: int) -> None:
    store: Any = FakeStore()
    signers = {rank for rank in range(world_size) if rank % 59 == 0 or rank == world_size - 1}
    for rank in signers:
        own = Roll(store, "roll", world_size)
        own.sign(rank)
        own.sign(rank)
    reader = Roll(store, "roll", world_size)
    assert reader.signed() == signers
    assert reader.missing() == tuple(sorted(set(range(world_size)) - signers))
    assert reader.absent() == world_size - len(signers)


def test_rolls_of_different_names_are_apart() -> None:
    store: Any = FakeStore()
    Roll(store, "roll", 2).sign(0)
    assert Roll(store, "left", 2).signed() == set()


# --- RollCall.call ----------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 3, 5])
def test_one_missing_rank_is_named_at_once_by_all_others(stage: Stage, victim: int) -> None:
    calls = roll_calls(stage, 6)
    parts = {call.rank: notice(call) for call in calls if call.rank != victim}
    outcomes = stage.play(parts)
    assert stage.now < 1
    for error in outcomes.values():
        assert type(error) is PeerLostError
        assert error.ranks == (victim,)
        assert error.waited == 1.5
        assert "[train] here: lost rank" in str(error)
        # All quote the rank that noticed first.
        assert f"(rank {min(outcomes)}: a cause)" in str(error)


def test_ranks_that_notice_at_different_times_name_the_same(stage: Stage) -> None:
    calls = roll_calls(stage, 5)
    parts = {call.rank: notice(call) for call in calls if call.rank != 2}
    outcomes = stage.play(parts, starts={0: 0, 1: 3, 3: 6, 4: 9})
    assert {error.ranks for error in outcomes.values()} == {(2,)}
    assert 9 <= stage.now < ROLL_SECONDS


def test_two_missing_ranks_are_named_when_the_roll_is_over(stage: Stage) -> None:
    calls = roll_calls(stage, 6)
    outcomes = stage.play({call.rank: notice(call) for call in calls if call.rank not in (1, 4)})
    assert {error.ranks for error in outcomes.values()} == {(1, 4)}
    assert ROLL_SECONDS <= stage.now < ROLL_SECONDS + 1


def test_nobody_waits_for_ranks_that_are_known_to_be_missing(stage: Stage) -> None:
    calls = roll_calls(stage, 6)
    parts = {call.rank: notice(call) for call in calls if call.rank not in (0, 1, 4)}
    parts[0] = notice(calls[0], known=(1, 4))
    outcomes = stage.play(parts)
    assert {error.ranks for error in outcomes.values()} == {(1, 4)}
    assert stage.now < 1


def test_a_known_rank_that_signs_after_all_is_not_named(stage: Stage) -> None:
    calls = roll_calls(stage, 3)
    outcomes = stage.play({0: notice(calls[0], known=(1, 2)), 1: notice(calls[1])}, {0: 1})
    assert {error.ranks for error in outcomes.values()} == {(2,)}


def test_where_every_rank_signs_nobody_is_named(stage: Stage) -> None:
    calls = roll_calls(stage, 2)
    outcomes = stage.play({0: notice(calls[0]), 1: notice(calls[1])}, starts={1: 0.01})
    # With two ranks, all but one have signed when the first has: the verdict stands.
    assert {error.ranks for error in outcomes.values()} == {(1,)}
    calls = roll_calls(stage, 3)
    Roll(calls[0].store, "roll", 3).sign(2)
    Roll(calls[0].store, "roll", 3).sign(1)
    error = stage.play({0: notice(calls[0])})[0]
    assert error.ranks == ()
    assert "though every rank is alive" in str(error)


def test_a_rank_that_was_given_up_is_told_so_when_it_comes(stage: Stage) -> None:
    calls = roll_calls(stage, 4)
    outcomes = stage.play({call.rank: notice(call) for call in calls}, starts={2: 60})
    assert {error.ranks for error in outcomes.values()} == {(2,)}
    assert "had given up rank 2, this one, before it came" in str(outcomes[2])
    assert "lost rank 2 after waiting 1.5 s" in str(outcomes[3])
    assert stage.now == 60


def test_the_rank_that_serves_the_store_leaves_last(stage: Stage) -> None:
    calls = roll_calls(stage, 6, host_rank=0)
    parts = {call.rank: notice(call) for call in calls if call.rank != 3}
    # It signs last, gives the verdict, and could leave before the others have read it.
    stage.play(parts, starts={0: 2})
    assert max(stage.ended, key=lambda rank: (stage.ended[rank], rank == 0)) == 0
    assert max(at for rank, at in stage.ended.items() if rank) > 2


def test_the_rank_that_serves_the_store_stays_two_seconds_at_most(stage: Stage) -> None:
    calls = roll_calls(stage, 4, host_rank=0)
    for died_while_counting in (1, 2):
        Roll(calls[0].store, "roll", 4).sign(died_while_counting)
    stage.play({0: notice(calls[0])})
    assert LEAVE_SECONDS <= stage.now < LEAVE_SECONDS + 0.2


@pytest.mark.parametrize("host_rank", [None, 0, 2])
def test_without_the_store_its_host_is_named_or_all_that_can_not_be_heard(
    stage: Stage, host_rank: int | None
) -> None:
    calls = roll_calls(stage, 4, host_rank)
    calls[2].store.error = StoreUnreachableError("no answer", closed=False)  # type: ignore[attr-defined]
    error = notice(calls[2])()
    assert error.ranks == ((0,) if host_rank == 0 else (0, 1, 3))
    assert "out of reach (no answer)" in str(error)


def test_a_rank_that_finds_nobody_left_to_ask_after_it_was_late_names_itself(
    stage: Stage,
) -> None:
    calls = roll_calls(stage, 4, host_rank=0)
    calls[2].store.error = StoreUnreachableError("closed", closed=True)  # type: ignore[attr-defined]
    error = calls[2].call("[train] here", 0, "a cause", frozenset(), was_late=True)
    assert error.ranks == (2,)
    assert "this one" in str(error)


# --- Waiting ----------------------------------------------------------------------------------


def waiting(call: RollCall, between_epochs: bool = False, **seconds: float) -> Waiting:
    times = {"timeout": 1000.0, "warn_after": 3.0, **seconds}
    return Waiting(
        call, 7, f"place {call.rank}", between_epochs=between_epochs, **times
    )  # `where` tells who speaks


def wait(stage: Stage, waits: list[Waiting], seconds: float, step: float = 0.5) -> dict[int, Any]:
    """Let some ranks wait for the others; gives what each raised, or None."""

    def part(one: Waiting) -> Callable[[], None]:
        def run() -> None:
            one.start()
            until = stage.now + seconds
            while stage.now < until:
                stage.sleep(step)
                one.tick()

        return run

    return stage.play({one._call.rank: part(one) for one in waits})


def test_late_ranks_are_named_at_doubling_intervals_by_the_lowest_that_waits(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    calls = roll_calls(stage, 5)
    outcomes = wait(stage, [waiting(calls[rank]) for rank in (1, 2, 4)], 40)
    assert set(outcomes.values()) == {None}
    messages = [record.getMessage() for record in caplog.records]
    expected = "waited {:.0f} s for ranks 0, 3 so far, an error follows after 1000 s; at place 1: "
    # The first after two looks, 3.5 s: a rank tells where it waits one slice after it came.
    assert [message.partition("rank 1;")[0] for message in messages] == [
        expected.format(seconds) for seconds in (3.5, 6, 12, 24)
    ]
    assert messages[0].endswith("at place 2: rank 2; at place 4: rank 4")


@pytest.mark.parametrize(("root", "shown"), [("WARNING", "WARNING"), ("ERROR", "ERROR")])
def test_the_warning_has_a_level_that_the_root_logger_shows(
    stage: Stage, caplog: pytest.LogCaptureFixture, root: str, shown: str
) -> None:
    caplog.set_level(getattr(logging, root))
    wait(stage, [waiting(roll_calls(stage, 2)[1])], 5)
    assert [record.levelname for record in caplog.records] == [shown]


def test_between_epochs_rank_0_alone_may_be_ten_times_as_late(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    calls = roll_calls(stage, 3)
    waits = [waiting(calls[rank], between_epochs=True, timeout=20) for rank in (1, 2)]
    outcomes = wait(stage, waits, 300)
    assert caplog.records[0].getMessage().startswith("waited 30 s")
    assert {error.ranks for error in outcomes.values()} == {(0,)}
    assert 200 <= stage.now < 205


@pytest.mark.parametrize(
    ("waits_too", "between_epochs"), [((1,), True), ((0, 1), True), ((1, 2), False)]
)
def test_nobody_else_and_at_no_other_time(
    stage: Stage, waits_too: tuple[int, ...], between_epochs: bool
) -> None:
    calls = roll_calls(stage, 3)
    waits = [waiting(calls[rank], between_epochs, timeout=20) for rank in waits_too]
    missing = tuple(sorted({0, 1, 2} - set(waits_too)))
    outcomes = wait(stage, waits, 300)
    assert {error.ranks for error in outcomes.values()} == {missing}
    assert 20 <= stage.now < 25


def test_a_missing_rank_is_an_error_after_the_timeout_on_all_that_wait(stage: Stage) -> None:
    calls = roll_calls(stage, 5)
    outcomes = wait(stage, [waiting(calls[rank], timeout=8) for rank in (0, 1, 3, 4)], 100)
    for rank, error in outcomes.items():
        assert type(error) is PeerLostError
        assert error.ranks == (2,)
        assert 8 <= error.waited < 11
        assert f"place {rank}: lost rank 2 after waiting" in str(error)


def test_a_rank_at_an_earlier_exchange_is_missing_from_this_one(stage: Stage) -> None:
    calls = roll_calls(stage, 3)
    calls[1].store.set("at/1", "6 place of before")
    outcomes = wait(stage, [waiting(calls[rank], timeout=8) for rank in (0, 2)], 100)
    assert {error.ranks for error in outcomes.values()} == {(1,)}


def test_the_alarm_ends_every_wait(stage: Stage) -> None:
    calls = roll_calls(stage, 4)
    parts = {1: notice(calls[1])}
    waits = {rank: waiting(calls[rank]) for rank in (0, 3)}

    def part(one: Waiting) -> Callable[[], None]:
        def run() -> None:
            while True:
                stage.sleep(0.5)
                one.tick()

        return run

    outcomes = stage.play(parts | {rank: part(one) for rank, one in waits.items()}, {1: 2.0})
    assert {error.ranks for error in outcomes.values()} == {(2,)}
    assert stage.now < 4


@pytest.mark.parametrize("host_rank", [None, 0])
def test_a_store_that_does_not_answer_proves_nothing_before_the_timeout(
    stage: Stage, host_rank: int | None
) -> None:
    call = roll_calls(stage, 3, host_rank)[1]
    call.store.error = StoreUnreachableError("no answer", closed=False)  # type: ignore[attr-defined]
    outcomes = wait(stage, [waiting(call, timeout=50)], 49)
    assert outcomes == {1: None}
    outcomes = wait(stage, [waiting(call, timeout=50)], 60)
    assert outcomes[1].ranks == ((0,) if host_rank == 0 else (0, 2))
    assert 50 <= outcomes[1].waited < 51


def test_a_store_that_closed_the_connection_tells_that_its_host_has_gone(stage: Stage) -> None:
    for host_rank in (0, None):
        call = roll_calls(stage, 3, host_rank)[1]
        call.store.error = StoreUnreachableError("closed", closed=True)  # type: ignore[attr-defined]
        outcomes = wait(stage, [waiting(call, timeout=50)], 10)
        if host_rank is None:
            assert outcomes == {1: None}
        else:
            assert outcomes[1].ranks == (0,)
            assert outcomes[1].waited <= 0.5


# --- Meeting ----------------------------------------------------------------------------------


def meetings(world_size: int, policies: dict[int, str] | None = None) -> dict[int, Meeting]:
    shared = FakeStore()
    return {
        rank: Meeting(FakeStore(shared), rank, world_size, (policies or {}).get(rank, "same"))  # type: ignore[arg-type]
        for rank in range(world_size)
    }


def meet(meeting: Meeting, timeout: float = 100, warn_after: float = 3) -> Callable[[], None]:
    return lambda: meeting.meet(timeout, warn_after)


def test_ranks_meet_however_late_one_is(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    parts = {rank: meet(one) for rank, one in meetings(4).items()}
    assert set(stage.play(parts, starts={0: 20}).values()) == {None}
    assert 20 <= stage.now < 21
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(" so far")[0] for message in messages] == [
        f"[espnet_sync] first epoch: waited {seconds} s for rank 0" for seconds in (3, 6, 12)
    ]


def test_ranks_with_other_options_are_told_where_they_meet(stage: Stage) -> None:
    parts = {rank: meet(one) for rank, one in meetings(3, {2: "other"}).items()}
    for error in stage.play(parts, starts={0: 1}).values():
        assert type(error) is OutOfStepError
        assert error.positions == {0: "same", 1: "same", 2: "other"}
        assert "rank 2 has other" in str(error)


def test_a_rank_that_does_not_come_to_the_first_epoch_is_named_on_all(stage: Stage) -> None:
    parts = {rank: meet(one, timeout=8) for rank, one in meetings(4).items()}
    outcomes = stage.play(parts, starts={1: 60})
    assert {error.ranks for error in outcomes.values()} == {(1,)}
    assert "is espnet_sync off there (epoch_sync: none" in str(outcomes[0])
    assert "had given up rank 1, this one" in str(outcomes[1])
    assert max(stage.ended[rank] for rank in (0, 2, 3)) < 10


def test_the_ranks_agree_why_no_group_could_be_made(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {1: "Unable to find address for: nowhere", 0: "Wait timeout", 3: "Timed out after"}
    acting: list[int] = []

    def make(seconds: float) -> str:
        if acting[-1] in failures:
            raise RuntimeError(failures[acting[-1]])
        return "group"

    monkeypatch.setattr(roll_call, "make_gloo_group", make)
    monkeypatch.setattr(roll_call, "destroy_group", lambda group: None)

    def try_out(rank: int, meeting: Meeting) -> Callable[[], str]:
        def run() -> str:
            acting.append(rank)
            return meeting.try_out()

        return run

    outcomes = stage.play({rank: try_out(rank, one) for rank, one in meetings(4).items()})
    assert set(outcomes.values()) == {"rank 1: Unable to find address for: nowhere"}
    failures.clear()
    outcomes = stage.play({rank: try_out(rank, one) for rank, one in meetings(4).items()})
    assert set(outcomes.values()) == {""}


# --- Calls ------------------------------------------------------------------------------------


def calls_per_rank(situation: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> float:
    stage = Stage()
    monkeypatch.setattr(
        roll_call, "time", SimpleNamespace(monotonic=stage.clock, sleep=stage.sleep)
    )
    if situation == "meeting":
        ranks = meetings(world_size)
        stage.play({rank: meet(one) for rank, one in ranks.items()}, starts={0: 5})
        return len(ranks[0]._store.calls) / world_size  # type: ignore[attr-defined]
    calls = roll_calls(stage, world_size)
    if situation == "roll call":
        stage.play({call.rank: notice(call) for call in calls[2:]})
    else:
        half = [waiting(call, timeout=8) for call in calls[world_size // 2 :]]
        wait(stage, half, 6, step=1)
    return len(calls_of(calls[0])) / world_size


@pytest.mark.parametrize("situation", ["roll call", "half of the ranks are late", "meeting"])
def test_the_calls_of_1024_ranks_do_not_grow_with_the_square(
    situation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = calls_per_rank(situation, 64, monkeypatch)
    assert calls_per_rank(situation, 1024, monkeypatch) < 2 * few


# --- BoundedStore -----------------------------------------------------------------------------


def test_a_call_that_never_comes_back_is_bounded_and_no_other_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.HashStore()
    module = torch.distributed.distributed_c10d
    monkeypatch.setattr(module, "_get_default_store", lambda: store)
    bounded = BoundedStore("ours/", seconds=0.2)
    bounded.set("key", "text")
    assert bounded.get("key") == "text"
    assert bounded.set_once("key", "other") == "text"
    assert bounded.add("number", 1 << 59) == bounded.add("number", 0) == 1 << 59
    started = time.monotonic()
    # Getting a key that nobody sets blocks.
    with pytest.raises(StoreUnreachableError, match="no answer within") as caught:
        bounded.get("never set")
    assert not caught.value.closed
    with pytest.raises(StoreUnreachableError, match="still stuck"):
        bounded.get("key")
    assert time.monotonic() - started < 5
    torch.distributed.PrefixStore("ours/", store).set("never set", "at last")
    while bounded._stuck is not None and bounded._stuck.is_alive():
        bounded._stuck.join(1)
    assert bounded.get("key") == "text"


def test_a_call_that_fails_tells_that_the_store_has_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.HashStore()
    module = torch.distributed.distributed_c10d
    monkeypatch.setattr(module, "_get_default_store", lambda: store)
    bounded = BoundedStore("ours/")
    bounded.set("word", "no number")
    with pytest.raises(StoreUnreachableError) as caught:
        bounded.add("word", 1)
    assert caught.value.closed


# --- A rank that leaves -----------------------------------------------------------------------


def departures(stage: Stage, world_size: int) -> tuple[FakeStore, list[Departure]]:
    shared = FakeStore()
    return shared, [
        Departure(
            FakeStore(shared),  # type: ignore[arg-type]
            rank,
            world_size,
            stage.clock,
            stage.sleep,
        )
        for rank in range(world_size)
    ]


def test_a_rank_that_leaves_stays_until_all_others_have_heard(stage: Stage) -> None:
    store, ends = departures(stage, 3)
    parts = {0: lambda: ends[0].announce("left epoch 1"), 1: ends[1].sign, 2: ends[2].sign}
    stage.play(parts, starts={1: 1, 2: 2})
    assert 2 <= stage.ended[0] < 2.1
    assert store.data["alarm"] == store.data["departed"] == "rank 0 left epoch 1"
    assert store.data["gone/0"] == "left epoch 1"


def test_a_rank_that_leaves_waits_a_bounded_time_for_those_that_do_not_hear(stage: Stage) -> None:
    store, ends = departures(stage, 3)
    stage.play({0: lambda: ends[0].announce("left"), 1: ends[1].sign})
    assert DEPARTURE_SECONDS <= stage.ended[0] < DEPARTURE_SECONDS + 0.1
    assert "gone/0" in store.data


def test_of_two_ranks_that_leave_the_first_is_quoted_and_neither_waits_for_the_other(
    stage: Stage,
) -> None:
    store, ends = departures(stage, 3)
    assert ends[2].why() == ""
    parts = {0: lambda: ends[0].announce("a"), 1: lambda: ends[1].announce("b"), 2: ends[2].sign}
    stage.play(parts, starts={1: 0.5, 2: 1})
    assert max(stage.ended.values()) < 1.2
    assert ends[2].why() == "rank 0 a"
    assert {"gone/0", "gone/1"} <= store.data.keys()


@pytest.mark.parametrize(("leaves_at", "left_at"), [(2.0, 3.0), (60.0, DEPARTURE_SECONDS + 1)])
def test_the_others_leave_after_the_one_to_blame_or_after_a_while(
    stage: Stage, leaves_at: float, left_at: float
) -> None:
    _, ends = departures(stage, 2)
    parts = {0: lambda: ends[0].announce("left"), 1: lambda: ends[1].let_leave_first((0,))}
    stage.play(parts, starts={0: leaves_at})
    assert left_at <= stage.ended[1] < left_at + 0.2


def test_a_rank_that_comes_to_a_first_epoch_hears_of_one_that_has_left(stage: Stage) -> None:
    for rank, meeting in meetings(3).items():
        meeting._store.set("departed", "rank 2 left before its first batch: OSError: disk")
        with pytest.raises(
            PeerLostError, match=r"first epoch: rank 2 left .*: disk\. Mend"
        ) as lost:
            meeting.meet(60, 30)
        assert lost.value.ranks == (2,), rank
