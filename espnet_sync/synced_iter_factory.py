"""A decorator over ESPnet2's iterator factories whose epochs end on all ranks together."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol

import espnet2
from espnet2.iterators.abs_iter_factory import AbsIterFactory

from espnet_sync.consensus import (
    STOPPED,
    ControlConsensus,
    FactoryConsensus,
    NamedFlagConsensus,
    log_report,
)
from espnet_sync.epoch_sync_iterator import EpochSyncIterator
from espnet_sync.errors import EpochSyncError, require_version
from espnet_sync.options import SyncOptions, refuse_unknown
from espnet_sync.process_groups import ControlGroup, NamedDefaultGroup, in_loader_worker
from espnet_sync.report import SyncReport
from espnet_sync.roll_call import open_control_group

require_version("espnet", espnet2.__version__, "202511")


class StopRequest(Protocol):
    """What asks, on this rank, that training ends before its next epoch."""

    def is_set(self) -> bool:
        """Return whether it asks; called in each `build_iter`."""

    def note(self, iterator: EpochSyncIterator) -> None:
        """Take note of the epoch that has been built, which `request_stop()` may end."""

    def leave(self) -> NoReturn:
        """Leave training; called on all ranks where one of them asks."""


class SyncedIterFactory(AbsIterFactory):  # type: ignore[misc]  # ESPnet2 has no types
    """Build epoch iterators that end at the same batch on every rank.

    Every rank builds its factories and calls `build_iter` in the same order, from its main
    thread.

    Args:
        inner: Any ESPnet2 iterator factory: chunk, sequence, category, category chunk,
            multiple, or one of your own.
        stop_at: `shortest` ends an epoch with the first rank to run out.
        lookahead: Batches held ahead. None takes the default of the backend.
        timeout: Seconds before a missing rank is an error.
        warn_after: Seconds before a missing rank is named in a warning.
        backend: `default` exchanges a one-element flag on the group that training uses.
        label: Shown in messages and reports, e.g. `train`.
        epoch_offset: Added to `epoch` before the inner factory sees it: ESPnet2 counts epochs
            from 1, Lightning from 0.
        iterator_class: A subclass of `EpochSyncIterator` with its own `generate()`.

    Raises:
        TypeError: If `inner` is no `AbsIterFactory`, or an option is unknown or has a wrong
            type.
        ValueError: If an option has a value that is not allowed.

    Examples:
        >>> from espnet2.iterators.sequence_iter_factory import SequenceIterFactory
        >>> inner = SequenceIterFactory({"a": 1, "b": 2, "c": 3}, [["a", "b"], ["c"]])
        >>> factory = SyncedIterFactory(inner, label="train")
        >>> for batch in factory.build_iter(epoch=1):
        ...     print(batch)
        tensor([1, 2])
        tensor([3])
    """

    def __init__(
        self,
        inner: AbsIterFactory,
        *,
        stop_at: str = "shortest",
        lookahead: int | None = None,
        timeout: float = 1800.0,
        warn_after: float = 30.0,
        backend: str = "auto",
        label: str = "",
        epoch_offset: int = 0,
        iterator_class: type[EpochSyncIterator] = EpochSyncIterator,
        **unknown: Any,
    ) -> None:
        fields = [*SyncOptions.__dataclass_fields__, "iterator_class"]
        refuse_unknown("SyncedIterFactory", unknown, fields)
        if not isinstance(inner, AbsIterFactory):
            raise TypeError(
                f"inner={inner!r}: must be an espnet2.iterators.abs_iter_factory.AbsIterFactory; "
                "a plain iterable goes into EpochSyncIterator instead"
            )
        is_class = isinstance(iterator_class, type)
        if not is_class or not issubclass(iterator_class, EpochSyncIterator):
            raise TypeError(
                f"iterator_class={iterator_class!r}: must be a subclass of EpochSyncIterator"
            )
        self.inner = inner
        self.options = SyncOptions(
            stop_at=stop_at,
            lookahead=lookahead,
            timeout=timeout,
            warn_after=warn_after,
            backend=backend,
            label=label,
            epoch_offset=epoch_offset,
        )
        self.iterator_class = iterator_class
        self._warned_of_epoch_0 = False
        #: What may end training before an epoch, on all ranks; a task sets it.
        self.stop_request: StopRequest | None = None
        #: What else must be equal on all ranks, as text; compared in each agreement.
        self.context = ""
        #: Called on rank 0 with each pass's report; a task sets it to do more than to log.
        self.tell: Callable[[SyncReport], None] = log_report
        #: Logged on rank 0 by the first `build_iter`, with what the ranks agree over.
        self.announcement = ""
        self.logger = logging.getLogger()
        self._group: ControlGroup | None = None
        self._number = 0

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> EpochSyncIterator:
        """Collective: every rank calls this before each epoch, in the same order.

        With more than one rank they agree on the epoch's length here, so that `len()` is exact.

        Args:
            epoch: The epoch; the inner factory sees `epoch + epoch_offset`.
            shuffle: Handed on to the inner factory where it is given.

        Returns:
            EpochSyncIterator: The epoch's batches. Each of its passes is built afresh.

        Raises:
            PeerFailedError: If the inner `build_iter` raised on another rank; its own
                exceptions come through on the rank that raised them.
        """
        epoch += self.options.epoch_offset
        if epoch == 0 and not self._warned_of_epoch_0:
            self._warned_of_epoch_0 = True
            logging.getLogger().warning(
                "[%s] the inner factory gets epoch 0, and ESPnet2 counts epochs from 1: where "
                "your loop counts from 0, as Lightning does, set epoch_offset=1",
                self.options.label or "espnet_sync",
            )
        source = partial(self.inner.build_iter, epoch)
        if shuffle is not None:
            source = partial(source, shuffle=shuffle)
        consensus = self._consensus(epoch)
        iterator = self.iterator_class(source, consensus=consensus, label=self.options.label)
        stop = self.stop_request is not None and self.stop_request.is_set()
        if consensus.has_peers():
            stop = iterator.settle_length(partial(consensus.agree_length, stop=stop)) == STOPPED
        if isinstance(consensus, ControlConsensus) and self._group is not consensus.group:
            # NOTE: counted once all ranks have agreed, so that a rank which builds an iterator
            # alone, and is told so, does not count differently from then on.
            self._group = consensus.group
            self._group.factories = self._number
        if self.stop_request is not None:
            if stop:
                self.stop_request.leave()
            self.stop_request.note(iterator)
        return iterator

    def _consensus(self, epoch: int) -> FactoryConsensus:
        """Collective: every rank calls this in `build_iter`; the first one makes the group."""
        options = self.options
        flag = NamedFlagConsensus(options.label, epoch, self.tell)
        if not flag.has_peers():
            self._announce(0, "one rank alone")
            return flag
        if in_loader_worker():
            raise EpochSyncError(
                f"[{options.label or 'espnet_sync'}] build_iter was called in a worker of a "
                "DataLoader: call it in the rank's main process"
            )
        ranks = NamedDefaultGroup()
        over_flag = f"{ranks.world_size} ranks, a flag on the default group"
        if options.backend == "default":
            self._announce(ranks.rank, over_flag)
            return flag
        state = open_control_group(options)
        if state.group is None:
            if options.backend == "gloo" or options.stop_at == "longest":
                asked = f"backend={options.backend!r}, stop_at={options.stop_at!r}"
                raise EpochSyncError(
                    f"[{options.label or 'espnet_sync'}] {asked} needs the control group: "
                    f"{state.fallback}"
                )
            self._announce(ranks.rank, over_flag)
            return flag
        if self._group is not state.group:
            self._number = state.group.factories + 1
        self._announce(ranks.rank, f"{ranks.world_size} ranks, a Gloo group ({options.policy})")
        return ControlConsensus(
            state.group, state.roll_call, options, epoch, self._number, self.tell, self.context
        )

    def _announce(self, rank: int, over: str) -> None:
        if self.announcement and rank == 0:
            self.logger.info("%s; %s", self.announcement, over)
        self.announcement = ""
