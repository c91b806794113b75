"""Decides, from what the ranks exchange, how far a pass goes on, and where it ends or fails.

`Offer` and `decide` are pure: all ranks can be played in one process. `process_groups.py`
carries the exchanges. A consensus belongs to one iterator; its `start_pass()` gives the object
that makes one pass's agreements.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

from espnet_sync.errors import (
    EmptyRankError,
    EpochSyncError,
    OutOfStepError,
    PeerFailedError,
    PeerLostError,
)
from espnet_sync.options import SyncOptions
from espnet_sync.process_groups import (
    ControlGroup,
    DefaultGroup,
    Exchange,
    NamedDefaultGroup,
    count_ranks,
    is_distributed,
)
from espnet_sync.report import RankReport, SyncReport, count, name_ranks, place
from espnet_sync.roll_call import RollCall, Waiting

#: What `agree_length` takes and gives in place of a length. MIN lets a failure outrank a stop,
#: and that what can't be told.
UNSIZED = -1
STOPPED = -2
FAILED_TO_BUILD = -3


#: What a reason may hold, as UTF-8: `ControlGroup.gather_texts` carries it after a word.
REASON_BYTES = ControlGroup.TEXT_BYTES - len("failed ")


class Then(Enum):
    """What follows the batches that an agreement lets through."""

    GO_ON = "go on"
    END = "end"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What one rank can yield in a window.

    Attributes:
        batches: Batches that it holds for the window, at most the window's size.
        failed: Whether its source raised after them.
        first_pass: Batches among them from its first pass; the window's size while that pass
            may hold more. Matters for `longest` alone.
        stop: Whether this rank asks that the pass ends before the window.
        failure: For a failed rank: what happened, for the other ranks.
        is_empty: Whether the failure is that the rank has no batch at all.
    """

    batches: int
    failed: bool
    first_pass: int
    stop: bool
    failure: str = ""
    is_empty: bool = False

    def pack(self, fingerprint: int) -> list[int]:
        """Return the two words that travel, for a MIN reduction.

        NOTE: Gloo reduces in a ring that every element goes round by itself, so that five numbers
        cost up to four times what two do. MIN compares the upper half first: where all ranks have
        the same fingerprint there, the lower half is that of the smallest; where they have not,
        the smallest fingerprint comes back in one word, and the largest in the other.

        Args:
            fingerprint: Of the place where this rank is, below `FINGERPRINTS`.

        Examples:
            >>> unpack(Offer(batches=2, failed=True, first_pass=4, stop=False).pack(7))
            Reduced(batches=2, failed=True, first_pass=4, stop=False, in_step=True)
        """
        # What counts first: a failure at once, a stop, all else; a failure before an end.
        if self.stop:
            order = 1
        elif self.failed and not self.batches:
            order = 0
        else:
            order = 2 * self.batches + (1 if self.failed else 2)
        return [
            fingerprint << _HALF | order,
            (FINGERPRINTS - 1 - fingerprint) << _HALF | _MOST - self.first_pass,
        ]


class Reduced(NamedTuple):
    """What the offers of all ranks come to, the same on each.

    Attributes:
        batches: The fewest that a rank holds; 0 where one asks to stop.
        failed: Whether a source raised after as many.
        first_pass: The most that a rank has from its first pass.
        stop: Whether a rank asks to stop; a failure at once hides it, and it makes no difference.
        in_step: Whether all ranks are at the same place; nothing else counts where they are not.
    """

    batches: int
    failed: bool
    first_pass: int
    stop: bool
    in_step: bool


#: Bits of each half of a word that travels, and the largest number in a half.
_HALF = 32
_MOST = (1 << _HALF) - 1
#: The longest length that travels: as a window of one more, which is doubled.
_MOST_LENGTH = _MOST // 2 - 3
#: Fingerprints are smaller than this: with a half beside it, one still fits an int64.
FINGERPRINTS = 1 << (63 - _HALF)


def unpack(words: Sequence[int]) -> Reduced:
    """Return what the smallest of all ranks' words mean; see `Offer.pack`."""
    first, second = words
    order = first & _MOST
    return Reduced(
        batches=max(0, order - 1) // 2,
        failed=order == 0 or (order > 1 and order % 2 == 1),
        first_pass=_MOST - (second & _MOST),
        stop=order == 1,
        in_step=first >> _HALF == FINGERPRINTS - 1 - (second >> _HALF),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What all ranks do with a window.

    Attributes:
        batches: Batches that every rank hands out.
        then: What follows them.
        error: With `Then.FAIL`: what this rank raises then; None where it raises its own.
    """

    batches: int
    then: Then
    error: EpochSyncError | None = None


def decide(reduced: Reduced, window: int, stop_at: str) -> Decision:
    """Return what the offers of all ranks mean, the same on each.

    Args:
        reduced: What they come to.
        window: The size of the window, in batches.
        stop_at: `shortest` or `longest`.

    Examples:
        Two ranks hold four batches each, and one knows that it has run out after three:

        >>> decide(Reduced(3, False, 4, False, True), window=4, stop_at="shortest")
        Decision(batches=3, then=<Then.END: 'end'>, error=None)

        With `longest`, both hold four, and no first pass has more than two of them left:

        >>> decide(Reduced(4, False, 2, False, True), window=4, stop_at="longest")
        Decision(batches=2, then=<Then.END: 'end'>, error=None)
    """
    # With `longest`, a fresh pass that fails where the last first pass ends is one too many.
    is_due = stop_at == "shortest" or reduced.batches < reduced.first_pass
    if reduced.failed and is_due:
        return Decision(batches=reduced.batches, then=Then.FAIL)
    end = reduced.batches
    if stop_at == "longest":
        end = 0 if reduced.stop else min(reduced.first_pass, window)
    if end < window:
        return Decision(batches=end, then=Then.END)
    return Decision(batches=window, then=Then.GO_ON)


@dataclass(slots=True)
class Tally:
    """What one rank counts in one pass: batches, and seconds spent in agreements.

    `first_pass` counts the batches pulled from its first pass, or is None while that goes on;
    `stopped` says whether the last offer asked to end the pass.
    """

    pulled: int = 0
    yielded: int = 0
    first_pass: int | None = None
    waited: float = 0.0
    stopped: bool = False

    def row(self, yielded: int, waiting: float = 0.0) -> "Row":
        """Return what this rank tells the others at the end of a pass of some batches.

        Args:
            yielded: The batches of the pass.
            waiting: Seconds of the wait that goes on.
        """
        return Row(
            self.pulled,
            self.pulled if self.first_pass is None else self.first_pass,
            self.first_pass == yielded,
            self.stopped,
            int((self.waited + waiting) * 1e6),
        )


class Row(NamedTuple):
    """What each rank tells the others at the end of a pass; travels as int64."""

    pulled: int
    pulled_in_first_pass: int
    ran_out: int
    stopped: int
    waited_in_microseconds: int


class PassConsensus(Protocol):
    """Makes the agreements of one pass on one rank."""

    #: Whether no other rank takes part, so that nothing needs to be proposed.
    alone: bool
    #: Batches that one agreement covers.
    window: int
    #: Whether the next window is filled and proposed while the one before is handed out.
    ahead: bool
    stop_at: str

    def propose(self, offer: Offer, tally: Tally) -> None:
        """Collective: every rank calls this for each window. Does not wait where it need not."""

    def decide(self, tally: Tally) -> Decision:
        """Collective: every rank calls this after `propose`, and waits for all.

        Raises:
            OutOfStepError: If a rank is at another place, on every rank.
            PeerLostError: If a rank is missing.
        """

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report of the pass, once an agreement has ended it; on every rank."""

    def note_batch(self) -> None:
        """Count a batch; called right before each is handed out."""

    def refuse(self, error: Exception) -> None:
        """Let no further pass of the iterator start; called when it raises, on every rank."""


class Consensus(Protocol):
    """Ends the passes of one iterator together on all ranks."""

    def start_pass(self) -> PassConsensus:
        """Return what makes the agreements of one pass; called when the pass starts."""


class FactoryConsensus(Consensus, Protocol):
    """What `SyncedIterFactory` gives its iterators."""

    def has_peers(self) -> bool:
        """Return whether there is more than one rank."""

    def agree_length(self, length: int, failure: str, stop: bool = False) -> int:
        """Collective: every rank calls this in `build_iter`, where it has peers.

        Args:
            length: The batches that this rank's pass holds, `UNSIZED`, or `FAILED_TO_BUILD`.
            failure: In the last case: what happened, for the other ranks.

            stop: Whether this rank asks that no further epoch starts.

        Returns:
            int: The batches that every rank will yield, `UNSIZED` if one rank can't tell, or
            `STOPPED` if one asks for it and none failed.

        Raises:
            PeerFailedError: If another rank's inner `build_iter` raised, and this one's did not.
        """


class LonePass:
    """A pass that no other rank takes part in."""

    alone = True
    window = 1
    ahead = False
    stop_at = "shortest"

    def __init__(
        self, label: str, epoch: int | None, tell: Callable[[SyncReport], None] | None
    ) -> None:
        self._label = label
        self._epoch = epoch
        self._tell = tell

    def propose(self, offer: Offer, tally: Tally) -> None:
        """There is nobody to propose to."""

    def decide(self, tally: Tally) -> Decision:
        """There is nobody to wait for."""
        return Decision(batches=1, then=Then.GO_ON)

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report of rank 0."""
        report = make_report(self._label, self._epoch, tally.yielded, [tally.row(tally.yielded)])
        if self._tell is not None:
            self._tell(report)
        return report

    def note_batch(self) -> None:
        """Nobody else could be out of step."""

    def refuse(self, error: Exception) -> None:
        """Nobody else has to know."""


class FlagPass:
    """One pass of a bare iterator: a has-next flag on the default group, and nothing else."""

    alone = False
    window = 1
    ahead = False
    stop_at = "shortest"

    def __init__(self, group: DefaultGroup, label: str, epoch: int | None) -> None:
        self._group = group
        self._label = label
        self._epoch = epoch
        self._offer: Offer | None = None
        self._report: SyncReport | None = None

    def propose(self, offer: Offer, tally: Tally) -> None:
        """Keep the offer for `decide`: a flag waits for all ranks."""
        self._offer = offer

    def decide(self, tally: Tally) -> Decision:
        """Collective: see `PassConsensus.decide`. MIN lets a failure outrank an end."""
        offer = self._offer
        assert offer is not None
        has_next = not offer.stop and offer.batches == 1
        failed = offer.failed and not has_next and not offer.stop
        started = time.perf_counter()
        lowest = self._group.min_flag(1 if has_next else -1 if failed else 0)
        tally.waited += time.perf_counter() - started
        if lowest == 1:
            return Decision(batches=1, then=Then.GO_ON)
        if lowest == 0:
            self._report = self._tell_end(tally)
            return Decision(batches=0, then=Then.END)
        ranks = self._tell_failures(failed)
        error = None if failed else peer_failed(self._label, self._epoch, tally.yielded, ranks)
        return Decision(batches=0, then=Then.FAIL, error=error)

    def _tell_end(self, tally: Tally) -> SyncReport:
        report = make_report(self._label, self._epoch, tally.yielded, [tally.row(tally.yielded)])
        return replace(report, ended_by=(), ranks=(replace(report.ranks[0], rank=None),))

    def _tell_failures(self, failed: bool) -> tuple[int, ...]:
        return ()

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report; a bare iterator knows its own rank's part alone."""
        assert self._report is not None
        return self._report

    def note_batch(self) -> None:
        """A flag carries no place."""

    def refuse(self, error: Exception) -> None:
        """The next pass starts clean: the flag of a failure came in step on all ranks."""


class NamedFlagPass(FlagPass):
    """One pass of a factory's iterator on the default group: the flag, then who is where."""

    _group: NamedDefaultGroup

    def __init__(
        self,
        group: NamedDefaultGroup,
        label: str,
        epoch: int,
        tell: Callable[[SyncReport], None],
    ) -> None:
        super().__init__(group, label, epoch)
        self._tell = tell

    def _tell_end(self, tally: Tally) -> SyncReport:
        """Collective: every rank calls this right after a flag of 0."""
        rows = [Row(*row) for row in self._group.gather(tally.row(tally.yielded))]
        return make_report(self._label, self._epoch, tally.yielded, rows)

    def _tell_failures(self, failed: bool) -> tuple[int, ...]:
        """Collective: every rank calls this right after a flag of -1."""
        rows = self._group.gather([int(failed)])
        return tuple(rank for rank, row in enumerate(rows) if row[0])

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report of all ranks, and tell it on rank 0."""
        report = super().finish(tally)
        if self._group.rank == 0:
            self._tell(report)
        return report


class FlagConsensus:
    """What a bare `EpochSyncIterator` uses: the flag on the default group."""

    def __init__(self, label: str) -> None:
        self._label = label

    def start_pass(self) -> PassConsensus:
        """Look up whether and where to exchange flags; called when a pass starts."""
        if not is_distributed():
            return LonePass(self._label, epoch=None, tell=None)
        return FlagPass(DefaultGroup(), self._label, epoch=None)


class NamedFlagConsensus:
    """What a factory uses with one rank, with `backend="default"`, and after a fallback."""

    def __init__(self, label: str, epoch: int, tell: Callable[[SyncReport], None]) -> None:
        self._label = label
        self._epoch = epoch
        self._tell = tell

    def start_pass(self) -> PassConsensus:
        """Look up the default group; called when a pass starts."""
        if self.has_peers():
            return NamedFlagPass(NamedDefaultGroup(), self._label, self._epoch, self._tell)
        return LonePass(self._label, self._epoch, self._tell)

    def has_peers(self) -> bool:
        """Return whether there is more than one rank."""
        return count_ranks() > 1

    def agree_length(self, length: int, failure: str, stop: bool = False) -> int:
        """Collective: see `FactoryConsensus.agree_length`."""
        group = NamedDefaultGroup()
        lowest = group.min_number(min(length, STOPPED) if stop else length)
        if lowest != FAILED_TO_BUILD:
            return lowest
        rows = group.gather([length])
        if length != FAILED_TO_BUILD:
            failed = tuple(rank for rank, row in enumerate(rows) if row[0] == FAILED_TO_BUILD)
            raise peer_failed(self._label, self._epoch, None, failed)
        return UNSIZED


class ControlPass:
    """One pass on the control group: windows, places, reasons."""

    alone = False

    def __init__(self, consensus: "ControlConsensus", number: int) -> None:
        options = consensus.options
        self.ahead = options.window > 0
        self.window = max(1, options.window)
        self.stop_at = options.stop_at
        self._consensus = consensus
        self._number = number
        self._place = place(options.label, consensus.epoch)
        self._handed_out = 0
        self._index = 0
        self._exchange: Exchange | None = None
        self._report: SyncReport | None = None

    def propose(self, offer: Offer, tally: Tally) -> None:
        """Collective: see `PassConsensus.propose`."""
        index = self._index
        self._index += self.window

        def settle(reduced: Reduced, waiting: Waiting) -> Decision:
            decision = decide(reduced, self.window, self.stop_at)
            if decision.then is Then.END:
                self._report = self._tell_end(index + decision.batches, tally, waiting)
            elif decision.then is Then.FAIL:
                error = self._tell_failures(index + decision.batches, offer, decision, waiting)
                return replace(decision, error=error)
            return decision

        self._exchange = self._consensus.launch(
            offer, f"pass {self._number}, batch {index}", settle, index == 0
        )

    def decide(self, tally: Tally) -> Decision:
        """Collective: see `PassConsensus.decide`."""
        assert self._exchange is not None
        started = time.perf_counter()
        try:
            decision: Decision = self._consensus.group.read(self._exchange)
        finally:
            tally.waited += time.perf_counter() - started
        return decision

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report of all ranks, and tell it on rank 0."""
        assert self._report is not None
        if self._consensus.group.rank == 0:
            self._consensus.tell(self._report)
        return self._report

    def note_batch(self) -> None:
        """See `PassConsensus.note_batch`."""
        group = self._consensus.group
        group.handed_out += 1
        self._handed_out += 1
        group.whereabouts = (self._place, self._handed_out)

    def refuse(self, error: Exception) -> None:
        """See `PassConsensus.refuse`."""
        self._consensus.refuse(error)

    def _tell_end(self, batches: int, tally: Tally, waiting: Waiting) -> SyncReport:
        """Collective: every rank calls this where the reduced numbers end the pass."""
        row = tally.row(batches, waiting.waited)
        rows = self._consensus.group.gather_numbers(row, waiting)
        options = self._consensus.options
        return make_report(
            options.label, self._consensus.epoch, batches, [Row(*row) for row in rows]
        )

    def _tell_failures(
        self, index: int, offer: Offer, decision: Decision, waiting: Waiting
    ) -> EpochSyncError | None:
        """Collective: every rank calls this where the reduced numbers tell of a failure."""
        is_mine = offer.failed and not offer.stop and offer.batches == decision.batches
        mine = ("empty " if offer.is_empty else "failed ") + offer.failure if is_mine else ""
        texts = self._consensus.group.gather_texts(mine, waiting)
        label, epoch = self._consensus.options.label, self._consensus.epoch
        reasons = {
            rank: text.partition(" ")[2]
            for rank, text in enumerate(texts)
            if text.startswith("failed ")
        }
        if not reasons:
            empty = tuple(rank for rank, text in enumerate(texts) if text)
            return EmptyRankError(
                f"{place(label, epoch)}: {name_ranks(empty)} "
                f"{'has' if len(empty) == 1 else 'have'} no batch, and stop_at='longest' needs "
                "at least one on each rank to go on with. Give every rank data (shorter chunks, "
                "a smaller batch size, fewer ranks), or take stop_at='shortest'.",
                ranks=empty,
            )
        if is_mine and not offer.is_empty:
            return None
        return peer_failed(label, epoch, index, tuple(reasons), reasons)


class ControlConsensus:
    """What a factory uses: agreements on the control group, for one epoch of one factory.

    Args:
        group: The job's control group.
        roll_call: The group's roll call.
        options: The factory's options.
        epoch: The epoch as the inner factory sees it.
        factory: The factory's number in the job, the same on all ranks.
        tell: Called on rank 0 with each pass's report.
        context: What else must be equal on all ranks, as text.
    """

    def __init__(
        self,
        group: ControlGroup,
        roll_call: RollCall,
        options: SyncOptions,
        epoch: int,
        factory: int,
        tell: Callable[[SyncReport], None],
        context: str = "",
    ) -> None:
        self.group = group
        self._roll_call = roll_call
        self.options = options
        self.epoch = epoch
        self._factory = factory
        self.tell = tell
        self._context = f"; {context}" if context else ""
        self._passes = 0
        self._refusal: Exception | None = None

    def has_peers(self) -> bool:
        """Return whether there is more than one rank: else there is no control group."""
        return True

    def start_pass(self) -> PassConsensus:
        """Start counting a pass; called when it starts, on all ranks.

        Raises:
            EpochSyncError: If an earlier pass of this iterator raised one.
            PeerLostError: If the control group is broken.
        """
        self._check_usable()
        self._passes += 1
        return ControlPass(self, self._passes)

    def refuse(self, error: Exception) -> None:
        """Let no further pass start, after an error of this one."""
        self._refusal = error

    def agree_length(self, length: int, failure: str, stop: bool = False) -> int:
        """Collective: see `FactoryConsensus.agree_length`. `longest` yields the longest."""
        failed = length == FAILED_TO_BUILD
        if length > _MOST_LENGTH:
            length = UNSIZED
        # NOTE: a length travels as a window of length + 1 batches, so that it is 0 where unsized.
        batches = 0 if failed else length + 1
        offer = Offer(
            batches=batches,
            failed=failed,
            first_pass=batches,
            stop=stop and not failed,
        )

        def settle(reduced: Reduced, waiting: Waiting) -> int:
            if reduced.failed:
                texts = self.group.gather_texts(f"failed {failure}" if failed else "", waiting)
                reasons = {rank: text.partition(" ")[2] for rank, text in enumerate(texts) if text}
                if not failed:
                    raise peer_failed(
                        self.options.label, self.epoch, None, tuple(reasons), reasons
                    )
                return UNSIZED
            if reduced.stop:
                return STOPPED
            if reduced.batches == 0:
                return UNSIZED
            is_longest = self.options.stop_at == "longest"
            return (reduced.first_pass if is_longest else reduced.batches) - 1

        exchange = self.launch(offer, "build_iter", settle, between_epochs=True)
        agreed: int = self.group.read(exchange)
        return agreed

    def launch(
        self,
        offer: Offer,
        where: str,
        settle: Callable[[Reduced, Waiting], object],
        between_epochs: bool,
    ) -> Exchange:
        """Collective: every rank calls this for each agreement.

        Args:
            offer: This rank's.
            where: What the place is within the epoch.
            settle: Makes what follows from all offers, where all ranks are at one place.
            between_epochs: Whether rank 0 alone may be late by design.

        Raises:
            OutOfStepError: If the exchange before turns out to have met at different places.
        """
        self._check_usable()
        options = self.options
        here = f"{place(options.label, self.epoch)}, {where}"
        # NOTE: with the batches handed out so far, a rank that leaves its loop alone within the
        # last window, where no agreement is to come, is told by the next iterator's first one.
        whole = (
            f"{here} (factory {self._factory} of the job, after "
            f"{count(self.group.handed_out, 'batch', 'batches')} in all; {options.policy}"
            f"{self._context})"
        )
        digest = hashlib.blake2b(whole.encode(), digest_size=4).digest()
        waiting = Waiting(
            self._roll_call,
            self.group.serial + 1,
            here,
            options.timeout,
            options.warn_after,
            between_epochs,
        )

        def settle_in_step(words: list[int]) -> object:
            self._roll_call.note_meeting()
            reduced = unpack(words)
            if not reduced.in_step:
                raise self._out_of_step(whole, waiting)
            return settle(reduced, waiting)

        fingerprint = int.from_bytes(digest, "big") % FINGERPRINTS
        return self.group.launch(offer.pack(fingerprint), settle_in_step, waiting)

    def _out_of_step(self, whole: str, waiting: Waiting) -> OutOfStepError:
        """Collective: every rank calls this where the reduced fingerprints differ."""
        texts = dict(enumerate(self.group.gather_texts(whole, waiting)))
        self.group.handed_out = 0
        places: dict[str, list[int]] = {}
        for rank, text in texts.items():
            places.setdefault(text, []).append(rank)
        return OutOfStepError(
            "the ranks are out of step: "
            + "; ".join(f"{name_ranks(tuple(ranks))} at {text}" for text, ranks in places.items())
            + ". Every rank must build and iterate its synced iterators in the same order, leave "
            "a loop at the same batch (request_stop() does that), resume at the same epoch, and "
            "have the same options. What one rank iterates alone must not be synced.",
            positions=texts,
        )

    def _check_usable(self) -> None:
        label = f"[{self.options.label or 'espnet_sync'}]"
        broken = self.group.broken
        if isinstance(broken, PeerLostError):
            raise PeerLostError(
                f"{label} the control group is broken and refuses to go on since: {broken} -- "
                "start again, or initialise torch.distributed anew "
                "(destroy_process_group(), then init_process_group()).",
                ranks=broken.ranks,
                waited=broken.waited,
            )
        if self._refusal is not None:
            raise EpochSyncError(
                f"{label} this iterator refuses to go on since an earlier pass raised "
                f"{type(self._refusal).__name__}: {self._refusal} -- build a new one with "
                "build_iter() on all ranks, or start again."
            )
        if not self.group.is_here:
            raise EpochSyncError(
                f"{label} this process is a fork of the rank, such as a DataLoader worker: "
                "iterate the synced iterator in the rank's main process"
            )
        if not self.group.is_current:
            raise EpochSyncError(
                f"{label} torch.distributed was initialised anew since this iterator was built: "
                "build a new one with build_iter()"
            )


def make_report(label: str, epoch: int | None, batches: int, rows: Sequence[Row]) -> SyncReport:
    """Return the report of a pass from what every rank told, in rank order."""
    stopped = any(row.stopped for row in rows)
    return SyncReport(
        label=label,
        epoch=epoch,
        batches=batches,
        ended_by=tuple(rank for rank, row in enumerate(rows) if row.ran_out and not stopped),
        ranks=tuple(
            RankReport(
                rank=rank,
                pulled=row.pulled,
                discarded=max(0, row.pulled_in_first_pass - batches),
                repeated=max(0, batches - row.pulled_in_first_pass),
                waited=row.waited_in_microseconds / 1e6,
            )
            for rank, row in enumerate(rows)
        ),
    )


def peer_failed(
    label: str,
    epoch: int | None,
    index: int | None,
    ranks: tuple[int, ...],
    reasons: dict[int, str] | None = None,
) -> PeerFailedError:
    """Return the error for the ranks whose own source did not raise.

    Args:
        label: The iterator's label.
        epoch: Its epoch.
        index: The batch before which the source raised; None for `build_iter`.
        ranks: The failed ranks, as far as they are known.
        reasons: Their failures, as far as they were told.
    """
    where = place(label, epoch) + (", build_iter" if index is None else f", batch {index}")
    who = name_ranks(ranks) if ranks else "another rank"
    told = "; ".join(f"rank {rank}: {reason}" for rank, reason in (reasons or {}).items())
    return PeerFailedError(
        f"{where}: the data source of {who} raised an exception, so that no rank can go on. "
        + (f"{told}. Mend it there." if told else "Look for it in that rank's log, and mend it."),
        ranks=ranks,
        reasons=reasons,
    )


def log_report(report: SyncReport, hint: str = "", logger: logging.Logger | None = None) -> None:
    """Log a pass's one line; called on rank 0 alone.

    Args:
        report: The pass's.
        hint: What to add to the line, if anything.
        logger: None: the root logger, which ESPnet2 uses.

    NOTE: not through `logging.info()`, which would configure a root logger that the user has
    left unconfigured.
    """
    logger = logger or logging.getLogger()
    logger.info("%s%s", report, f"; {hint}" if hint else "")
    if report.batches == 0 and report.ended_by:
        logger.warning(
            "%s: no rank yields a batch, since %s %s none. Are the utterances shorter than every "
            "chunk length, or fewer than the ranks or the batch size?",
            place(report.label, report.epoch),
            name_ranks(report.ended_by),
            "has" if len(report.ended_by) == 1 else "have",
        )
