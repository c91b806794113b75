"""An iterator over one rank's batches that ends on all ranks at the same batch."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# NOTE: not used in this file. Tests written for espnet3's class of the same name patch torch
# through the module that holds the class.
import torch  # noqa: F401

from espnet_sync.consensus import (
    FAILED_TO_BUILD,
    UNSIZED,
    Consensus,
    FlagConsensus,
    PassConsensus,
    State,
    Tally,
)
from espnet_sync.report import SyncReport, count

Source = Callable[[], Iterable[Any]] | Iterable[Any]


class EpochSyncIterator:
    """Yield a source's batches, and end every rank's pass at the same one.

    Without an initialised `torch.distributed` each batch comes unchanged and in order. With
    it, all ranks agree before each batch, so that all stop where the shortest does. Every rank
    drives its iterators in the same order, from its main thread.

    Args:
        source: A zero-argument callable that returns a fresh iterable, called once per pass
            (preferred), or a container that can be iterated again. A live iterator serves one
            pass.
        consensus: Who makes the agreements. None takes the one-element flag on the default
            group, which no other rank can be named by. `SyncedIterFactory` sets it.
        label: Shown in messages and reports, e.g. `train`.

    Attributes:
        report: The `SyncReport` of the last pass that ended; None before.

    Raises:
        TypeError: If `source` is neither callable nor iterable.

    Examples:
        >>> iterator = EpochSyncIterator(lambda: (x * x for x in range(4)), label="train")
        >>> list(iterator), list(iterator)
        ([0, 1, 4, 9], [0, 1, 4, 9])
        >>> print(iterator.report)
        [train] this pass: 4 batches

        What one rank drops or adds is below the agreement when `generate()` does it:

        >>> class OddBatches(EpochSyncIterator):
        ...     def generate(self):
        ...         for batch in super().generate():
        ...             if batch % 2:
        ...                 yield batch
        >>> list(OddBatches([1, 2, 3, 4, 5]))
        [1, 3, 5]
    """

    def __init__(
        self, source: Source, *, consensus: Consensus | None = None, label: str = ""
    ) -> None:
        if not callable(source) and not _is_iterable(source):
            raise TypeError(
                f"source={source!r}: must be a zero-argument callable that returns a fresh "
                "iterable, or a container that can be iterated again"
            )
        self.label = label
        self.report: SyncReport | None = None
        self._source = source
        self._consensus = FlagConsensus(label) if consensus is None else consensus
        self._lengths: dict[str, int | None] = {}
        self._probed: Iterable[Any] | None = None
        self._handed_out: Iterable[Any] | None = None
        self._stop_requested = False
        self._passes = 0
        self._warned = False

    def __len__(self) -> int:
        """Return the number of batches; never runs a collective.

        From `SyncedIterFactory.build_iter` it is exact and equal on all ranks. From a bare
        iterator it is that of one pass over this rank's source: in a distributed run an upper
        bound. The pass built to ask serves the next `__iter__` too.

        Raises:
            TypeError: If the source has no length, on any rank.
        """
        agreed = "agreed" in self._lengths
        length = self._lengths["agreed"] if agreed else self._own_length()
        if length is None:
            raise TypeError(
                f"[{self.label or 'espnet_sync'}] this {type(self).__name__} has no length: its "
                f"source is unsized{', or that of another rank is' if agreed else ''}"
            )
        return length

    def __iter__(self) -> Iterator[Any]:
        """Yield one pass's batches; every rank iterates.

        Raises:
            PeerFailedError: If another rank's source raised. This rank's own exceptions come
                through untouched, after all ranks were told.
            RuntimeError: If the source is a live iterator that an earlier pass has used.
        """
        self._passes += 1
        this_pass = self._passes
        tally = Tally()
        sync = self._consensus.start_pass()
        try:
            if not sync.alone:
                yield from self._iterate_together(sync, tally)
            elif self._stop_requested:
                tally.stopped = True
            else:
                for batch in self.generate():
                    tally.pulled += 1
                    yield batch
                    if self._stop_requested:
                        tally.stopped = True
                        break
                else:
                    tally.ran_out = True
                tally.yielded = tally.pulled
        finally:
            # NOTE: A pass dropped in the middle may be collected while the next one runs.
            if this_pass == self._passes:
                self._stop_requested = False
        if tally.ran_out:
            self._warn_if_short(tally.pulled)
        self.report = sync.finish(tally)

    def generate(self) -> Iterator[Any]:
        """Return this rank's batches of one pass: the extension point.

        Called once per pass, on every rank, by `__iter__`. A subclass overrides it, mostly as a
        generator over `super().generate()`, to change, drop or add batches, and inherits the
        synchronisation. What it raises reaches all ranks.
        """
        built = self._build()
        if not _is_iterable(built):
            raise TypeError(
                f"[{self.label or 'espnet_sync'}] the source returned {built!r}: it must return "
                "a fresh iterable of batches"
            )
        iterator: Iterator[Any] = iter(built)
        if iterator is not built:
            self._handed_out = None
            return iterator
        if built is not self._handed_out:
            self._handed_out = built
            return iterator
        # NOTE: Some iterators start over under their old identity, e.g. those of a DataLoader
        # with persistent workers. Python's own can't.
        if callable(self._source) and type(built).__module__ not in ("builtins", "itertools"):
            return self._refuse_exhausted(iterator)
        raise self._live_iterator_error()

    def request_stop(self) -> None:
        """Ask that all ranks end this pass at the same batch; any one rank may call it.

        The pass ends before the next batch that no agreement has covered yet. Outside a pass,
        the next one ends at once. Only sets a flag, so that a signal handler may call it.
        """
        self._stop_requested = True

    def settle_length(self, agree: Callable[[int], int]) -> None:
        """Collective: every rank calls this, in `SyncedIterFactory.build_iter`.

        Builds a pass, asks it for its length, and makes what all ranks agree on the answer of
        `len()`. The built pass serves the next `__iter__`. With a `generate()` of a subclass
        nothing is built and the length stays unknown: it may yield fewer batches.

        Args:
            agree: The collective: takes this rank's number of batches, `UNSIZED` or
                `FAILED_TO_BUILD`, and returns the number that all ranks will yield, or `UNSIZED`.

        Raises:
            PeerFailedError: If building a pass failed on another rank.
        """
        failure: Exception | None = None
        mine: int | None = None
        try:
            if self._yields_what_is_built():
                mine = self._own_length()
        except Exception as error:
            failure = error
        agreed = agree(FAILED_TO_BUILD if failure else UNSIZED if mine is None else mine)
        if failure is not None:
            raise failure
        self._lengths["agreed"] = None if agreed == UNSIZED else agreed

    def _iterate_together(self, sync: PassConsensus, tally: Tally) -> Iterator[Any]:
        batches: Iterator[Any] | None = None
        while True:
            batch = None
            state = State.HAS_NEXT
            if self._stop_requested:
                state = State.ENDED
                tally.stopped = True
            else:
                try:
                    if batches is None:
                        batches = self._start_generating()
                    batch = next(batches)
                    tally.pulled += 1
                except StopIteration:
                    state = State.ENDED
                    tally.ran_out = True
                except Exception as failure:
                    self._tell_failure(sync, tally, failure)
                    raise
            if not sync.agree(state, tally):
                return
            tally.yielded += 1
            yield batch

    def _start_generating(self) -> Iterator[Any]:
        """Call `generate()`; a StopIteration that escapes from it is a failure, and no end."""
        try:
            return iter(self.generate())
        except StopIteration as error:
            raise RuntimeError(
                f"[{self.label or 'espnet_sync'}] the source raised StopIteration when called"
            ) from error

    def _tell_failure(self, sync: PassConsensus, tally: Tally, failure: Exception) -> None:
        try:
            sync.agree(State.FAILED, tally)
        except Exception as error:
            # The rank that failed keeps its own exception, also where telling it fails.
            logging.getLogger().error(
                "[%s] could not tell the other ranks of %r: %s",
                self.label or "espnet_sync",
                failure,
                error,
            )

    def _build(self) -> Iterable[Any]:
        """Return what one pass iterates: the one built for `len()` if it waits, else a fresh one."""
        if self._probed is not None:
            probed, self._probed = self._probed, None
            return probed
        return self._source() if callable(self._source) else self._source

    def _own_length(self) -> int | None:
        if "own" not in self._lengths:
            built = self._build()
            if callable(self._source):
                self._probed = built
            try:
                self._lengths["own"] = len(built)  # type: ignore[arg-type]
            except TypeError:
                self._lengths["own"] = None
        return self._lengths["own"]

    def _yields_what_is_built(self) -> bool:
        return type(self).generate is EpochSyncIterator.generate

    def _warn_if_short(self, pulled: int) -> None:
        """Warn once where a source that has run out gave fewer batches than its length."""
        own = self._lengths.get("own")
        if own is not None and pulled < own and self._yields_what_is_built() and not self._warned:
            self._warned = True
            logging.getLogger().warning(
                "[%s] the source has a length of %s and ran out after %d: what trusts len() may "
                "wait for the rest. Mend its __len__.",
                self.label or "espnet_sync",
                count(own, "batch", "batches"),
                pulled,
            )

    def _refuse_exhausted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        try:
            yield next(iterator)
        except StopIteration:
            raise self._live_iterator_error() from None
        yield from iterator

    def _live_iterator_error(self) -> RuntimeError:
        given = "callable returned the same" if callable(self._source) else "source is a"
        return RuntimeError(
            f"[{self.label or 'espnet_sync'}] pass {self._passes}: the {given} live iterator "
            f"({type(self._handed_out).__name__}), which an earlier pass has used. Hand over the "
            "callable that builds it and not its result: EpochSyncIterator(partial("
            "factory.build_iter, epoch)) and not EpochSyncIterator(factory.build_iter(epoch))."
        )


def _is_iterable(value: object) -> bool:
    """Return whether `iter()` takes a value, without calling it: that may start workers."""
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
