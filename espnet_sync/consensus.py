"""Decides, from what the ranks exchange, whether a pass goes on, ends, or fails.

`process_groups.py` carries the exchanges. A consensus belongs to one iterator; its
`start_pass()` gives the object that makes one pass's agreements.
"""

import logging
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from espnet_sync.errors import PeerFailedError
from espnet_sync.process_groups import DefaultGroup, NamedDefaultGroup, is_distributed
from espnet_sync.report import RankReport, SyncReport, name_ranks, place

#: What `agree_length` takes and gives in place of a length.
UNSIZED = -1
FAILED_TO_BUILD = -2


class State(IntEnum):
    """What a rank offers before a batch. MIN lets a failure outrank an end, and that a batch."""

    FAILED = -1
    ENDED = 0
    HAS_NEXT = 1


@dataclass(slots=True)
class Tally:
    """What one rank counts in one pass: batches, and seconds spent in agreements."""

    pulled: int = 0
    yielded: int = 0
    repeated: int = 0
    waited: float = 0.0
    stopped: bool = False
    ran_out: bool = False


class PassConsensus(Protocol):
    """Makes the agreements of one pass on one rank."""

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part, so that `agree` must not be called."""

    def agree(self, state: State, tally: Tally) -> bool:
        """Collective: every rank calls this before each batch, also when it has none.

        Args:
            state: What this rank has.
            tally: What it has counted so far; the wait is added to it.

        Returns:
            bool: Whether every rank hands out its batch now. False ends the pass on all ranks.

        Raises:
            PeerFailedError: If another rank's source raised, and this rank's did not.
        """

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report of the pass; called once it has ended, on every rank."""


class Consensus(Protocol):
    """Ends the passes of one iterator together on all ranks."""

    def start_pass(self) -> PassConsensus:
        """Return what makes the agreements of one pass; called when the pass starts."""


class LonePass:
    """A pass that no other rank takes part in."""

    alone = True

    def __init__(self, label: str, epoch: int | None, logs: bool) -> None:
        self._label = label
        self._epoch = epoch
        self._logs = logs

    def agree(self, state: State, tally: Tally) -> bool:
        """Return whether this rank has a batch: there is nobody to ask."""
        return state is State.HAS_NEXT

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report of rank 0."""
        report = SyncReport(
            label=self._label,
            epoch=self._epoch,
            batches=tally.yielded,
            ended_by=() if tally.stopped else (0,),
            ranks=(
                RankReport(
                    rank=0,
                    pulled=tally.pulled,
                    discarded=tally.pulled - tally.yielded,
                    repeated=tally.repeated,
                ),
            ),
        )
        if self._logs:
            log_report(report)
        return report


class Row(NamedTuple):
    """What each rank tells the others after a failure and at the end of a pass."""

    state: int
    stopped: int
    pulled: int
    repeated: int
    waited_in_microseconds: int


class FlagPass:
    """One pass of a bare iterator: a has-next flag on the default group, and nothing else."""

    alone = False

    def __init__(self, group: DefaultGroup, label: str, epoch: int | None) -> None:
        self._group = group
        self._label = label
        self._epoch = epoch
        self._rows: list[Row] = []

    def agree(self, state: State, tally: Tally) -> bool:
        """Collective: see `PassConsensus.agree`."""
        started = time.perf_counter()
        lowest = self._group.min_flag(state)
        tally.waited += time.perf_counter() - started
        if lowest == State.HAS_NEXT:
            return True
        self._rows = self._exchange(
            Row(state, tally.stopped, tally.pulled, tally.repeated, int(tally.waited * 1e6))
        )
        if lowest == State.FAILED and state != State.FAILED:
            raise self._peer_failed(tally.yielded)
        return False

    def _exchange(self, mine: Row) -> list[Row]:
        return [mine]

    def _ranks_known(self) -> list[int | None]:
        return [None]

    def _peer_failed(self, index: int) -> PeerFailedError:
        failed = tuple(
            rank
            for rank, row in zip(self._ranks_known(), self._rows, strict=True)
            if rank is not None and row.state == State.FAILED
        )
        who = name_ranks(failed) if failed else "another rank"
        return PeerFailedError(
            f"{place(self._label, self._epoch)}, batch {index}: the data source of {who} raised "
            "an exception, so that no rank can go on. Look for it in the log of "
            f"{'that rank' if len(failed) < 2 else 'those ranks'}, and mend it there.",
            ranks=failed,
        )

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report; it knows the ranks whose rows this rank has seen."""
        ranks = self._ranks_known()
        return SyncReport(
            label=self._label,
            epoch=self._epoch,
            batches=tally.yielded,
            ended_by=tuple(
                rank
                for rank, row in zip(ranks, self._rows, strict=True)
                if rank is not None and row.state == State.ENDED and not row.stopped
            ),
            ranks=tuple(
                RankReport(
                    rank=rank,
                    pulled=row.pulled,
                    discarded=row.pulled - tally.yielded,
                    repeated=row.repeated,
                    waited=row.waited_in_microseconds / 1e6,
                )
                for rank, row in zip(ranks, self._rows, strict=True)
            ),
        )


class NamedFlagPass(FlagPass):
    """One pass of a factory's iterator on the default group: the flag, then who is where."""

    _group: NamedDefaultGroup

    def _exchange(self, mine: Row) -> list[Row]:
        """Collective: every rank calls this right after a flag below 1."""
        return [Row(*numbers) for numbers in self._group.gather(mine)]

    def _ranks_known(self) -> list[int | None]:
        return list(range(self._group.world_size))

    def finish(self, tally: Tally) -> SyncReport:
        """Return the report of all ranks, and log it on rank 0."""
        report = super().finish(tally)
        if self._group.rank == 0:
            log_report(report)
        return report


class FlagConsensus:
    """What a bare `EpochSyncIterator` uses: section "the flag" of the README."""

    def __init__(self, label: str) -> None:
        self._label = label

    def start_pass(self) -> PassConsensus:
        """Look up whether and where to exchange flags; called when a pass starts."""
        if not is_distributed():
            return LonePass(self._label, epoch=None, logs=False)
        return FlagPass(DefaultGroup(), self._label, epoch=None)


class NamedFlagConsensus:
    """What a `SyncedIterFactory` uses on the default group: names ranks, agrees on lengths."""

    def __init__(self, label: str, epoch: int) -> None:
        self._label = label
        self._epoch = epoch

    def start_pass(self) -> PassConsensus:
        """Look up the default group; called when a pass starts."""
        if self.has_peers():
            return NamedFlagPass(NamedDefaultGroup(), self._label, self._epoch)
        return LonePass(self._label, self._epoch, logs=True)

    def has_peers(self) -> bool:
        """Return whether there is more than one rank."""
        return is_distributed() and NamedDefaultGroup().world_size > 1

    def agree_length(self, length: int) -> int:
        """Collective: every rank calls this in `build_iter`, where it has peers.

        Args:
            length: The batches that this rank's pass holds, `UNSIZED`, or `FAILED_TO_BUILD`.

        Returns:
            int: The batches that every rank will yield, or `UNSIZED` if one rank can't tell.

        Raises:
            PeerFailedError: If another rank's inner `build_iter` raised, and this one's did not.
        """
        group = NamedDefaultGroup()
        lowest = group.min_number(length)
        if lowest != FAILED_TO_BUILD:
            return lowest
        rows = group.gather([length])
        if length != FAILED_TO_BUILD:
            failed = tuple(rank for rank, row in enumerate(rows) if row[0] == FAILED_TO_BUILD)
            raise PeerFailedError(
                f"{place(self._label, self._epoch)}: build_iter of {name_ranks(failed)} raised an "
                "exception, so that no rank can start. Look for it in the log of that rank, and "
                "mend it there.",
                ranks=failed,
            )
        return UNSIZED


def log_report(report: SyncReport) -> None:
    """Log a pass's one line; called on rank 0 alone.

    NOTE: through the root logger, as ESPnet2 does, but not through `logging.info()`, which
    would configure a root logger that the user has left unconfigured.
    """
    root = logging.getLogger()
    root.info("%s", report)
    if report.batches == 0 and report.ended_by:
        root.warning(
            "%s: no rank yields a batch, since %s has none. Are the utterances shorter than "
            "every chunk length, or fewer than the ranks or the batch size?",
            place(report.label, report.epoch),
            name_ranks(report.ended_by),
        )
