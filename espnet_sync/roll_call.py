"""Who is there, and who is missing: told through the default store, never by guessing.

Gloo tells of a dead rank only its two neighbours in the ring. The first to notice raises an
alarm in the store; every waiting rank looks for it between two slices of its wait and signs the
roll. Who has not signed is missing. The calls do not grow with the square of the number of ranks:
while a rank waits it reads single keys, and reads who has signed, a bit per rank, once at the end;
of the waiting ranks only the lowest reads what all wrote.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from espnet_sync.errors import EpochSyncError, OutOfStepError, PeerFailedError, PeerLostError
from espnet_sync.options import SyncOptions
from espnet_sync.process_groups import (
    BoundedStore,
    ControlGroup,
    ControlState,
    NamedDefaultGroup,
    StoreUnreachableError,
    control_state,
    destroy_group,
    is_distributed,
    make_gloo_group,
)
from espnet_sync.report import name_ranks

#: Seconds to wait for signatures after an alarm: a rank in a long step signs when it is done.
ROLL_SECONDS = 10.0
#: Seconds that the rank which serves the store stays for those still counting.
LEAVE_SECONDS = 2.0
#: Seconds for connecting in the probe of a control group.
PROBE_SECONDS = 30.0
#: Seconds that ranks which still connect have, once another one has failed to.
REFUSED_SECONDS = 5.0
#: The timeout of the control group itself, never reached: ours is kept in the wait loop.
GROUP_SECONDS = 30 * 86400.0
#: Seconds that ranks which leave wait for each other, so that the one to blame dies first:
#: launchers report the first process to die, and end the others at once.
DEPARTURE_SECONDS = 5.0
#: Between two epochs rank 0 is late by design (plots, checkpoints): as many times longer.
RANK_0_FACTOR = 10.0

_BITS = 60
#: How torch's messages tell that a collective broke because another rank has gone: their source,
#: and what happened there. NCCL also reports faults of this rank's own, such as no memory.
_COLLECTIVE = re.compile(r"gloo/transport|NCCL")
_PEER_HAS_GONE = re.compile(r"closed|reset|broken pipe|time[d ]?-?out|remote|abort", re.IGNORECASE)
#: Characters of the reason that a rank gives for leaving.
REASON_LENGTH = 1000
#: How torch's messages tell that a rank only waited: "Wait timeout", "Timed out after ...". One
#: with a "SO_ERROR" tells of a connection that was refused.
_TIMED_OUT = re.compile(r"timed?[ -]?out(?!.*SO_ERROR)", re.IGNORECASE)


class Roll:
    """Which ranks have signed: one bit a rank, in counters of the store."""

    def __init__(self, store: BoundedStore, name: str, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._keys = [f"{name}/{block}" for block in range((world_size - 1) // _BITS + 1)]
        self._total = f"{name}/total"
        self._has_signed = False

    def sign(self, rank: int) -> None:
        """Sign, once."""
        if not self._has_signed:
            self._store.add(self._keys[rank // _BITS], 1 << (rank % _BITS))
            self._store.add(self._total, 1)
            self._has_signed = True

    def absent(self) -> int:
        """Return how many ranks have not signed: one call, however many ranks there are."""
        return self._world_size - self._store.add(self._total, 0)

    def signed(self) -> set[int]:
        """Return the ranks that have signed."""
        masks = [self._store.add(key, 0) for key in self._keys]
        return {
            block * _BITS + bit
            for block, mask in enumerate(masks)
            for bit in range(_BITS)
            if mask >> bit & 1
        }

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not signed, ascending."""
        return tuple(sorted(set(range(self._world_size)) - self.signed()))


class RollCall:
    """Finds out which ranks are missing, for one control group, on one rank.

    Args:
        store: The job's store, under the group's prefix.
        rank: This rank.
        world_size: The number of ranks.
        clock: Seconds, monotonic.
        sleep: Waits some seconds between two looks at the store, which can't push.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self._sleep = sleep
        self._roll = Roll(store, "roll", world_size)
        self._left = Roll(store, "left", world_size)
        self._last_met = clock()

    def note_meeting(self) -> None:
        """Note that all ranks have met just now; called after each exchange."""
        self._last_met = self.clock()

    def away(self) -> float:
        """Return for how many seconds this rank has not met the others."""
        return self.clock() - self._last_met

    def alarm_stands(self) -> bool:
        """Return whether a rank has raised the alarm."""
        return self.store.check("alarm")

    def call(
        self, where: str, waited: float, cause: str, known: frozenset[int], was_late: bool
    ) -> PeerLostError:
        """Raise the alarm, sign, and find out with the others who is missing.

        Args:
            where: Where this rank waits.
            waited: Seconds that it has waited.
            cause: What it noticed.
            known: The ranks that this one knows to be missing: nobody waits for their signature.
            was_late: Whether this rank itself came so late that the others have given it up,
                which is how it tells where nobody is left to ask.

        Returns:
            PeerLostError: What this rank raises; every rank that signs gets the same names.
        """
        try:
            cause = self.store.set_once("alarm", f"rank {self.rank}: {cause}")
            self._roll.sign(self.rank)
            missing = self._verdict(known)
            self._left.sign(self.rank)
            if self.rank == self.store.host_rank:
                self._leave_last(missing)
        except StoreUnreachableError as error:
            if was_late:
                return self._error(where, waited, cause, (self.rank,))
            return self._without_store(where, waited, cause, error)
        return self._error(where, waited, cause, missing)

    def _verdict(self, known: frozenset[int]) -> tuple[int, ...]:
        """Wait until all but one rank have signed, or for a while, and agree on the missing."""
        until = self.clock() + ROLL_SECONDS
        interval = 0.02
        while not self.store.check("verdict"):
            is_over = self.clock() >= until or self._roll.absent() <= 1
            if is_over or known:
                missing = self._roll.missing()
                if is_over or known.issuperset(missing):
                    self.store.set_once("verdict", " ".join(map(str, missing)) or "-")
                    break
            self._sleep(interval)
            interval = min(0.25, interval * 1.5)
        return tuple(int(word) for word in self.store.get("verdict").split() if word != "-")

    def _leave_last(self, missing: tuple[int, ...]) -> None:
        """Serve the store to those still counting, who would blame this rank else."""
        until = self.clock() + LEAVE_SECONDS
        staying = set(range(self.world_size)) - {self.rank, *missing}
        while not staying <= self._left.signed() and self.clock() < until:
            self._sleep(0.05)

    def _error(
        self, where: str, waited: float, cause: str, missing: tuple[int, ...]
    ) -> PeerLostError:
        if self.rank in missing:
            message = (
                f"{where}: the other ranks had given up rank {self.rank}, this one, before it "
                f"came ({cause}). Find out what kept it, or raise `timeout`."
            )
        elif missing:
            message = (
                f"{where}: lost {name_ranks(missing)} after waiting {waited:.1f} s ({cause}). "
                "Look for the first error in the log of what was lost (killed for memory, "
                "preempted, a full disk, a loader that stands still?), mend it, and start again."
            )
        else:
            message = (
                f"{where}: the control group broke after waiting {waited:.1f} s, though every "
                f"rank is alive ({cause}). Look at the network, and start again."
            )
        return PeerLostError(message, ranks=missing, waited=waited)

    def _without_store(
        self, where: str, waited: float, cause: str, error: StoreUnreachableError
    ) -> PeerLostError:
        """Name the ranks that are out of reach, and say that nobody can be asked."""
        missing = _out_of_reach(self.store, self.rank, self.world_size)
        return PeerLostError(
            f"{where}: lost {name_ranks(missing)} after waiting {waited:.1f} s ({cause}); the "
            f"store that the ranks met in is out of reach ({error}), so that no other rank can "
            "be asked. Look at that rank's log, and at the network between the hosts.",
            ranks=missing,
            waited=waited,
        )


class Waiting:
    """Looks after one rank while it waits for one exchange: warns, and gives up.

    Args:
        call: The group's roll call.
        serial: The exchange's number in the group.
        where: Where this rank waits, e.g. `[train] epoch 3, batch 12`.
        timeout: Seconds before a missing rank is an error.
        warn_after: Seconds before a missing rank is named in a warning.
        between_epochs: Whether rank 0 alone may be late by design.
    """

    def __init__(
        self,
        call: RollCall,
        serial: int,
        where: str,
        timeout: float,
        warn_after: float,
        between_epochs: bool,
    ) -> None:
        self._call = call
        self._serial = serial
        self._where = where
        self._timeout = timeout
        self._warn_after = warn_after
        self._between_epochs = between_epochs
        self._started: float | None = None
        self._has_told = False
        self._late: tuple[int, ...] = ()
        self._was_late = False

    def start(self) -> None:
        """Start counting; called when the wait starts."""
        if self._started is None:
            self._started = self._call.clock()
            self._was_late = self._call.away() > self._timeout

    @property
    def waited(self) -> float:
        """Seconds since the wait started."""
        return 0.0 if self._started is None else self._call.clock() - self._started

    def tick(self) -> None:
        """Look for an alarm, for late ranks, and at the clock; called between slices of a wait.

        Raises:
            PeerLostError: If another rank raised the alarm, or one is missing for too long.
        """
        self.start()
        try:
            if not self._has_told:
                self._call.store.set(f"at/{self._call.rank}", f"{self._serial} {self._where}")
                self._has_told = True
            if self._call.alarm_stands():
                raise self.lost("it saw the alarm")
            is_lowest = self._is_lowest()
            if is_lowest and self.waited >= min(self._warn_after, self._timeout):
                self._look_for_the_late()
        except StoreUnreachableError as error:
            host_is_gone = error.closed and self._call.store.host_rank not in (
                None,
                self._call.rank,
            )
            # While merely waiting, a store that does not answer proves nothing.
            if host_is_gone or self.waited >= self._timeout:
                raise self.lost(f"the store: {error}") from error

    def lost(self, cause: str, known: frozenset[int] = frozenset()) -> PeerLostError:
        """Return what to raise: call the roll and name who is missing."""
        self.start()
        return self._call.call(self._where, self.waited, cause, known, self._was_late)

    def _is_lowest(self) -> bool:
        """Return whether this is the lowest rank that waits for the exchange, as far as is known.

        NOTE: two ranks that come at once may overwrite each other: the next tick puts it right.
        """
        store = self._call.store
        if store.check("lowest"):
            serial, rank = map(int, store.get("lowest").split())
            if serial == self._serial and rank <= self._call.rank:
                return rank == self._call.rank
        store.set("lowest", f"{self._serial} {self._call.rank}")
        return True

    def _look_for_the_late(self) -> None:
        """Warn of late ranks, or give them up; called on the lowest waiting rank."""
        call = self._call
        places = {rank: self._place_of(rank) for rank in range(call.rank + 1, call.world_size)}
        late = tuple(
            sorted([*range(call.rank), *(rank for rank, at in places.items() if at is None)])
        )
        # A rank tells where it waits one slice after it came, so a first look may miss it.
        seen_before, self._late = late == self._late, late
        if not late or not seen_before:
            return
        factor = RANK_0_FACTOR if self._between_epochs and late == (0,) else 1.0
        if self.waited >= self._timeout * factor:
            raise self.lost(
                f"waited {self.waited:.1f} s for {name_ranks(late)}", known=frozenset(late)
            )
        if self.waited >= self._warn_after * factor:
            self._warn(late, places)
            while self._warn_after * factor <= self.waited:
                self._warn_after *= 2

    def _place_of(self, rank: int) -> str | None:
        """Return where a rank waits for this exchange, or None while it does not."""
        key = f"at/{rank}"
        if not self._call.store.check(key):
            return None
        serial, _, where = self._call.store.get(key).partition(" ")
        return where if int(serial) == self._serial else None

    def _warn(self, late: tuple[int, ...], places: dict[int, str | None]) -> None:
        """Say who is late, and where which of the others wait."""
        waiting: dict[str, list[int]] = {self._where: [self._call.rank]}
        for rank, where in places.items():
            if where is not None:
                waiting.setdefault(where, []).append(rank)
        _warn_loudly(
            "waited %.0f s for %s so far, an error follows after %.0f s; at %s",
            self.waited,
            name_ranks(late),
            self._timeout,
            "; at ".join(
                f"{where}: {name_ranks(tuple(ranks))}" for where, ranks in waiting.items()
            ),
        )


class Departure:
    """Why a rank leaves, told through the store.

    Args:
        store: The job's store, under the prefix of its control group.
        rank: This rank.
        world_size: The number of ranks.
        clock: Seconds, monotonic.
        sleep: Waits some seconds between two looks at the store.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._rank = rank
        self._clock = clock
        self._sleep = sleep
        self._heard = Roll(store, "heard", world_size)

    def announce(self, why: str) -> None:
        """Say why this rank leaves, and stay until the others have heard or a while has passed."""
        told = f"rank {self._rank} {why}"
        self._store.set_once("alarm", told)
        if self._store.set_once("departed", told) != told:
            self.sign()
        self._wait(lambda: self._heard.absent() <= 1)
        self._store.set(f"gone/{self._rank}", why)

    def why(self) -> str:
        """Return which rank leaves and why; empty while none does."""
        return self._store.get("departed") if self._store.check("departed") else ""

    def sign(self) -> None:
        """Tell the rank that leaves that this one has heard."""
        self._heard.sign(self._rank)

    def let_leave_first(self, ranks: tuple[int, ...]) -> None:
        """Wait until some ranks, which this one is not to blame for, have left, or a while."""
        self.sign()
        self._wait(lambda: all(self._store.check(f"gone/{rank}") for rank in ranks))
        # What a rank does between its last word and its end.
        self._sleep(1.0)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        until = self._clock() + DEPARTURE_SECONDS
        while not is_over() and self._clock() < until:
            self._sleep(0.05)


class Lookout:
    """Tells one rank of an ESPnet2 run why another leaves, whatever its main thread is busy with.

    NOTE: a rank that waits in a gradient all-reduce learns of nothing until its peer is gone. By
    then the store may be gone too, or the launcher has ended the rank.
    """

    #: Seconds between two looks.
    INTERVAL = 1.0

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._departure: Departure | None = None
        self.has_said = False

    def start(self) -> Departure:
        """Start to look, once; called with `torch.distributed` initialised."""
        if self._departure is None:
            ranks = NamedDefaultGroup()
            store = BoundedStore(control_state().prefix)
            self._departure = Departure(store, ranks.rank, ranks.world_size)
            self._thread = threading.Thread(
                target=self._look, args=(self._departure,), name="espnet_sync lookout", daemon=True
            )
            self._thread.start()
        return self._departure

    def stop(self) -> None:
        """Stop to look; the interpreter must not end in the midst of a store's call."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, line: str) -> None:
        """Log a line as this rank's last, unless one was logged."""
        with self._lock:
            if not self.has_said:
                self.has_said = True
                logging.getLogger().error("%s", line)

    def _look(self, departure: Departure) -> None:
        while not self._stopped.wait(self.INTERVAL):
            try:
                why = departure.why()
                if why:
                    self.say(f"{_whereabouts()}: {why}")
                    departure.sign()
                    return
            except StoreUnreachableError as error:
                if error.closed:
                    return


def leave(error: Exception, lookout: Lookout) -> bool:
    """Bring a rank's last error into order with the other ranks; an ESPnet2 run calls this.

    A rank that fails by itself tells why, and stays until the others know. One that leaves
    because of another rank says so in one line, and lets that one die first: launchers report
    the first process to die.

    Args:
        error: What came out of training.
        lookout: This rank's, which is stopped here.

    Returns:
        bool: Whether a line was logged that stands for the traceback: another rank is to blame.
    """
    try:
        if is_distributed():
            departure = lookout.start()
            lookout.stop()
            return _leave_in_order(error, lookout, departure)
    except StoreUnreachableError:
        # Its host has left, so that nobody is left to wait for.
        pass
    if isinstance(error, EpochSyncError):
        lookout.say(str(error))
    return lookout.has_said


def _leave_in_order(error: Exception, lookout: Lookout, departure: Departure) -> bool:
    """Wait for those that are to leave first, and return whether another rank is to blame."""
    is_broken = (
        isinstance(error, RuntimeError)
        and _COLLECTIVE.search(str(error))
        and _PEER_HAS_GONE.search(str(error))
    )
    brief = " ".join(str(error).split())[:REASON_LENGTH]
    if not is_broken and not isinstance(error, EpochSyncError):
        departure.announce(f"left {_whereabouts()}: {type(error).__name__}: {brief}")
        return False
    why = departure.why()
    if isinstance(error, EpochSyncError):
        # A failed source's reason says more than that its rank has left.
        lookout.has_said &= not isinstance(error, PeerFailedError)
        lookout.say(str(error))
    elif why:
        lookout.say(f"{_whereabouts()}: {why}")
    elif call := control_state().roll_call:
        # A collective of training's own noticed a death first.
        cause = f"a collective of training broke: {brief}"
        lookout.say(str(call.call(_whereabouts(), 0.0, cause, frozenset(), False)))
    else:
        return False
    if isinstance(error, PeerFailedError):
        departure.let_leave_first(error.ranks)
    elif why:
        departure.let_leave_first((int(why.split()[1]),))
    return True


def _whereabouts() -> str:
    """Return where this rank is, as far as a control group knows: its pass and last batch."""
    group = control_state().group
    if group is None:
        return "training"
    if group.whereabouts is None:
        return "training before its first batch"
    place, batches = group.whereabouts
    return f"{place}, after batch {batches}"


class Meeting:
    """Brings all ranks together in the store, before they make a control group.

    NOTE: in the store and not on the default group, where it could pair with the gradients of a
    rank that is elsewhere.
    """

    def __init__(self, store: BoundedStore, rank: int, world_size: int, policy: str) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._policy = policy

    def meet(self, timeout: float, warn_after: float) -> None:
        """Wait for all ranks, and compare their options.

        Args:
            timeout: Seconds before a missing rank is an error.
            warn_after: Seconds before it is named in a warning.

        Raises:
            OutOfStepError: If ranks have different options.
            PeerLostError: If a rank does not come, or this one was given up before it came.
        """
        arrived = Roll(self._store, "arrived", self._world_size)
        differing = Roll(self._store, "differing", self._world_size)
        started = time.monotonic()
        interval = 0.02
        while True:
            waited = time.monotonic() - started
            try:
                if self._store.set_once("policy", self._policy) != self._policy:
                    self._store.set(f"policy/{self._rank}", self._policy)
                    differing.sign(self._rank)
                arrived.sign(self._rank)
                if self._store.check("departed"):
                    raise self._departed(self._store.get("departed"), waited)
                if self._store.check("given up"):
                    raise self._never_came(self._store.get("given up"), waited)
                if not arrived.absent():
                    return self._compare(differing)
                if waited >= timeout:
                    text = " ".join(map(str, arrived.missing()))
                    raise self._never_came(self._store.set_once("given up", text), waited)
                if waited >= warn_after:
                    warn_after *= 2
                    if self._rank == min(arrived.signed()):
                        _warn_loudly(
                            "[espnet_sync] first epoch: waited %.0f s for %s so far, an error "
                            "follows after %.0f s",
                            waited,
                            name_ranks(arrived.missing()),
                            timeout,
                        )
            except StoreUnreachableError as error:
                if error.closed or waited >= timeout:
                    raise self._no_store(waited, error) from error
            time.sleep(interval)
            interval = min(0.25, interval * 1.5)

    def try_out(self) -> str:
        """Collective: every rank calls this to make a group for a moment.

        Returns:
            str: Why one could not be made, the same on all ranks; empty where it could.
        """
        failed = Roll(self._store, "failed", self._world_size)
        tried = Roll(self._store, "tried", self._world_size)
        made: list[Any] = []
        reasons: list[str] = []

        def connect() -> None:
            try:
                made.append(make_gloo_group(PROBE_SECONDS))
            except Exception as error:
                reasons.append((str(error).strip() or repr(error)).splitlines()[0])

        # NOTE: in a thread: a rank that waits for one whose connection was refused takes five
        # times the group's timeout. No daemon: the interpreter must not end while torch connects,
        # which would abort the process.
        connecting = threading.Thread(target=connect, name="espnet_sync probe")
        connecting.start()
        until = time.monotonic() + PROBE_SECONDS + 10
        while True:
            connecting.join(0.05)
            try:
                if not connecting.is_alive():
                    if reasons:
                        self._store.set(f"failure/{self._rank}", reasons[0])
                        failed.sign(self._rank)
                    tried.sign(self._rank)
                if self._store.check("outcome"):
                    break
                if not tried.absent() or time.monotonic() >= until:
                    outcome = self._describe(failed.signed(), tried.missing())
                    self._store.set_once("outcome", outcome)
                    break
                if failed.absent() < self._world_size:
                    # Others may be about to fail too, and tell more.
                    until = min(until, time.monotonic() + REFUSED_SECONDS)
            except StoreUnreachableError as error:
                # While Gloo waits in the store, it answers no other thread.
                if not connecting.is_alive():
                    raise self._no_store(0.0, error) from error
            if not connecting.is_alive():
                time.sleep(0.05)
        if made:
            # NOTE: not before all are done: a rank may still be connecting to this one.
            destroy_group(made[0])
        return self._store.get("outcome").strip()

    def _describe(self, failed: set[int], missing: tuple[int, ...]) -> str:
        parts = [f"rank {rank}: {self._store.get(f'failure/{rank}')}" for rank in sorted(failed)]
        # Those that could connect waited for those that could not: the first to fail tells why.
        told = [part for part in parts if not _TIMED_OUT.search(part)]
        late = [f"rank {rank}: not done after {PROBE_SECONDS:.0f} s" for rank in missing]
        parts = told or late or parts
        return "; ".join(parts[:4]) or " "

    def _compare(self, differing: Roll) -> None:
        if differing.absent() == self._world_size:
            return
        ranks = differing.signed()
        common = self._store.get("policy")
        positions = {
            rank: self._store.get(f"policy/{rank}") if rank in ranks else common
            for rank in range(self._world_size)
        }
        raise OutOfStepError(
            "the ranks are out of step before their first epoch: "
            + "; ".join(f"rank {rank} has {policy}" for rank, policy in positions.items())
            + ". Give every rank the same options.",
            positions=positions,
        )

    def _never_came(self, given_up: str, waited: float) -> PeerLostError:
        ranks = tuple(map(int, given_up.split()))
        if self._rank in ranks:
            message = (
                f"the other ranks had given up rank {self._rank}, this one, before it came to its "
                "first epoch. Find out what kept it, or raise `timeout`."
            )
        else:
            message = (
                f"{name_ranks(ranks)} did not come to the first epoch within {waited:.1f} s. Did "
                "it fail, is its data slow, or is espnet_sync off there (epoch_sync: none, or "
                "plain Python on that host)? Switch it on for every rank, or raise `timeout`."
            )
        return PeerLostError(f"[espnet_sync] first epoch: {message}", ranks=ranks, waited=waited)

    def _departed(self, why: str, waited: float) -> PeerLostError:
        return PeerLostError(
            f"[espnet_sync] first epoch: {why}. Mend that, and start again.",
            ranks=(int(why.split()[1]),),
            waited=waited,
        )

    def _no_store(self, waited: float, error: StoreUnreachableError) -> PeerLostError:
        return PeerLostError(
            f"[espnet_sync] first epoch: the store that the ranks meet in is out of reach "
            f"({error}). Look at the rank that serves it, and at the network.",
            ranks=_out_of_reach(self._store, self._rank, self._world_size),
            waited=waited,
        )


def open_control_group(options: SyncOptions) -> ControlState:
    """Collective: every rank calls this in `build_iter`; the first time it makes the group.

    The ranks meet in the store, make a group for a moment (connecting is bounded by a group's
    timeout, and a group that is meant to last needs a long one), agree whether all could, and
    then make the real one, or agree to do without.

    Args:
        options: Those of the factory that asks first.

    Returns:
        ControlState: With the control group, or with why there is none.

    Raises:
        OutOfStepError: If ranks have different options.
        PeerLostError: If a rank does not come.
    """
    state = control_state()
    if isinstance(state.broken, EpochSyncError):
        raise state.broken
    if state.group is not None or state.fallback:
        return state
    ranks = NamedDefaultGroup()
    store = BoundedStore(state.prefix)
    meeting = Meeting(store, ranks.rank, ranks.world_size, options.policy)
    try:
        meeting.meet(options.timeout, options.warn_after)
        reason = meeting.try_out()
    except EpochSyncError as error:
        state.broken = error
        raise
    if reason:
        state.fallback = (
            f"the ranks could not make a Gloo group for their agreements ({reason}). Set "
            "GLOO_SOCKET_IFNAME on every rank to the network interface that reaches the others "
            "(`ip -brief address` lists them)"
        )
        if ranks.rank == 0 and options.backend == "auto" and options.stop_at == "shortest":
            logging.getLogger().error(
                "[espnet_sync] %s. Going on with one flag per batch on the group that training "
                "uses, which knows no reasons and no lost ranks; backend='default' asks for that",
                state.fallback,
            )
        return state
    state.group = ControlGroup(make_gloo_group(GROUP_SECONDS), store)
    state.roll_call = RollCall(store, ranks.rank, ranks.world_size)
    return state


def _out_of_reach(store: BoundedStore, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the rank that serves a store which is out of reach; where none does, all others."""
    host = store.host_rank
    if host is None or host == rank:
        return tuple(other for other in range(world_size) if other != rank)
    return (host,)


def _warn_loudly(message: str, *arguments: object) -> None:
    """Warn at a level that the root logger shows: ESPnet2 shows errors alone off rank 0."""
    root = logging.getLogger()
    level = logging.WARNING if root.isEnabledFor(logging.WARNING) else logging.ERROR
    root.log(level, message, *arguments)
