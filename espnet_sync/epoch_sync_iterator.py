"""An iterator over one rank's batches that ends on all ranks at the same batch."""

import logging
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# NOTE: not used in this file. Tests written for espnet3's class of the same name patch torch
# through the module that holds the class.
import torch  # noqa: F401

from espnet_sync.consensus import (
    FAILED_TO_BUILD,
    REASON_BYTES,
    UNSIZED,
    Consensus,
    Decision,
    FlagConsensus,
    Offer,
    PassConsensus,
    Tally,
    Then,
)
from espnet_sync.errors import EmptyRankError, EpochSyncError, OutOfStepError
from espnet_sync.report import SyncReport, count

_END = object()

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
        self._worker_deaths = _WorkerDeaths()

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
            if sync.alone:
                # NOTE: here and with a local counter, since this is all that a batch costs.
                pulled = 0
                if not self._stop_requested:
                    for batch in self.generate():
                        pulled += 1
                        yield batch
                        if self._stop_requested:
                            break
                    else:
                        tally.first_pass = pulled
                        self._warn_if_short(pulled)
                tally.pulled = tally.yielded = pulled
                self.report = sync.finish(tally)
            else:
                batches = self._iterate_together(sync, tally)
                try:
                    while True:
                        with self._worker_deaths.held_back():
                            batch = next(batches, _END)
                        if batch is _END:
                            break
                        yield batch
                finally:
                    batches.close()
        finally:
            # NOTE: A pass dropped in the middle may be collected while the next one runs.
            if this_pass == self._passes:
                self._stop_requested = False

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

    def settle_length(self, agree: Callable[[int, str], int]) -> int:
        """Collective: every rank calls this, in `SyncedIterFactory.build_iter`.

        Builds a pass, asks it for its length, and makes what all ranks agree on the answer of
        `len()`. The built pass serves the next `__iter__`. With a `generate()` of a subclass
        nothing is built and the length stays unknown: it may yield fewer batches.

        Args:
            agree: The collective, `FactoryConsensus.agree_length`.

        Returns:
            int: What was agreed on.

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
        if failure is not None:
            with self._worker_deaths.held_back():
                try:
                    agree(FAILED_TO_BUILD, describe_failure(failure, None))
                except OutOfStepError:
                    raise
                except Exception as error:
                    _log_untold(failure, error)
            raise failure
        with self._worker_deaths.held_back():
            agreed = agree(UNSIZED if mine is None else mine, "")
        self._lengths["agreed"] = agreed if agreed >= 0 else None
        return agreed

    def _iterate_together(self, sync: PassConsensus, tally: Tally) -> Generator[Any, None, None]:
        pulls = _Pulls(self, sync, tally)
        pulls.fill()
        decision = self._agree(sync, pulls, tally)
        reported = False
        while True:
            batches = pulls.take(decision.batches)
            following: Decision | None = None
            for position in range(decision.batches):
                is_last = position == decision.batches - 1
                if sync.ahead and decision.then is Then.GO_ON:
                    pulls.pull()
                    if is_last:
                        self._propose(sync, pulls, tally)
                    if is_last and tally.yielded + 1 == self._lengths.get("agreed"):
                        # Some frameworks never ask for more than len() batches, so the
                        # agreement that ends the pass is read before the last one goes out.
                        following = self._decide(sync, pulls, tally)
                tally.yielded += 1
                sync.note_batch()
                if is_last and (
                    decision.then is Then.END
                    or (following and following.then is Then.END and not following.batches)
                ):
                    self.report = sync.finish(tally)
                    reported = True
                yield batches.popleft()
            if decision.then is Then.END:
                if not reported:
                    self.report = sync.finish(tally)
                return
            if decision.then is Then.FAIL:
                error = decision.error or pulls.failure
                assert error is not None
                sync.refuse(error)
                raise error
            if following is not None:
                decision = following
            elif sync.ahead:
                decision = self._decide(sync, pulls, tally)
            else:
                pulls.fill()
                decision = self._agree(sync, pulls, tally)

    def _agree(self, sync: PassConsensus, pulls: "_Pulls", tally: Tally) -> Decision:
        self._propose(sync, pulls, tally)
        return self._decide(sync, pulls, tally)

    def _propose(self, sync: PassConsensus, pulls: "_Pulls", tally: Tally) -> None:
        try:
            return sync.propose(pulls.offer(), tally)
        except EpochSyncError as error:
            own = self._refuse(sync, pulls, error)
            if own is error:
                raise
        raise own

    def _decide(self, sync: PassConsensus, pulls: "_Pulls", tally: Tally) -> Decision:
        try:
            return sync.decide(tally)
        except Exception as error:
            own = self._refuse(sync, pulls, error)
            if own is error:
                raise
        # NOTE: out of the handler, which would give the exception another context.
        raise own

    def _refuse(self, sync: PassConsensus, pulls: "_Pulls", error: Exception) -> Exception:
        """Return what to raise where an agreement failed: a rank that failed keeps its own."""
        sync.refuse(error)
        if pulls.failure is None or isinstance(error, OutOfStepError):
            return error
        _log_untold(pulls.failure, error)
        return pulls.failure

    def _start_generating(self) -> Iterator[Any]:
        """Call `generate()`; a StopIteration that escapes from it is a failure, and no end."""
        try:
            return iter(self.generate())
        except StopIteration as error:
            raise RuntimeError(
                f"[{self.label or 'espnet_sync'}] the source raised StopIteration when called"
            ) from error

    def _build(self) -> Iterable[Any]:
        """Return what a pass iterates: what was built for `len()` if it waits, or afresh."""
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
        # NOTE: no `yield from`, whose iter() would start such an iterator over once more.
        try:
            batch = next(iterator)
        except StopIteration:
            raise self._live_iterator_error() from None
        while True:
            yield batch
            try:
                batch = next(iterator)
            except StopIteration:
                return

    def _live_iterator_error(self) -> RuntimeError:
        given = "callable returned the same" if callable(self._source) else "source is a"
        return RuntimeError(
            f"[{self.label or 'espnet_sync'}] pass {self._passes}: the {given} live iterator "
            f"({type(self._handed_out).__name__}), which an earlier pass has used. Hand over the "
            "callable that builds it and not its result: EpochSyncIterator(partial("
            "factory.build_iter, epoch)) and not EpochSyncIterator(factory.build_iter(epoch))."
        )


class _Pulls:
    """What one rank has pulled from its source and not yet handed out, in one pass."""

    def __init__(self, owner: EpochSyncIterator, sync: PassConsensus, tally: Tally) -> None:
        self.failure: Exception | None = None
        self._owner = owner
        self._sync = sync
        self._tally = tally
        self._buffer: deque[Any] = deque()
        self._batches: Iterator[Any] | None = None
        self._pulled_in_this_round = 0
        self._taken = 0
        self._last_ids: list[str] = []

    def fill(self) -> None:
        """Pull one window of batches."""
        while len(self._buffer) < self._sync.window and self.pull():
            pass

    def pull(self) -> bool:
        """Pull one batch, and return whether there was one."""
        if self.failure is not None or self._owner._stop_requested:
            return False
        try:
            with self._owner._worker_deaths.told():
                return self._pull()
        except Exception as error:
            self.failure = error
            return False

    def _pull(self) -> bool:
        while True:
            if self._tally.first_pass is not None and self._sync.stop_at == "shortest":
                return False
            if self._batches is None:
                self._batches = self._owner._start_generating()
            try:
                batch = next(self._batches)
            except StopIteration:
                self._start_over()
                continue
            self._buffer.append(batch)
            self._tally.pulled += 1
            self._pulled_in_this_round += 1
            self._last_ids = utterance_ids(batch)
            return True

    def _start_over(self) -> None:
        """Note that a pass over the source has ended; with `longest` a fresh one follows."""
        if self._tally.first_pass is None:
            self._tally.first_pass = self._tally.pulled
            self._owner._warn_if_short(self._tally.pulled)
        if self._sync.stop_at == "longest" and not self._pulled_in_this_round:
            raise EmptyRankError("a pass over this rank's source has no batch")
        self._batches = None
        self._pulled_in_this_round = 0

    def offer(self) -> Offer:
        """Return what this rank can yield in the next window."""
        window = self._sync.window
        first_pass = window
        # A first pass with no batch has not ended: with `longest`, it is what fails.
        if self._tally.first_pass:
            first_pass = min(window, max(0, self._tally.first_pass - self._taken))
        stop = self._owner._stop_requested
        self._tally.stopped = self._tally.stopped or stop
        failure = ""
        if self.failure is not None:
            failure = describe_failure(self.failure, self._tally.pulled, self._last_ids)
        return Offer(
            batches=min(len(self._buffer), window),
            failed=self.failure is not None,
            first_pass=first_pass,
            stop=stop,
            failure=failure,
            is_empty=isinstance(self.failure, EmptyRankError),
        )

    def take(self, number: int) -> deque[Any]:
        """Return the batches of a window that was agreed on, and drop what lies beyond."""
        taken = deque(self._buffer.popleft() for _ in range(number))
        self._buffer.clear()
        self._taken += number
        return taken


class _WorkerDeaths:
    """Lets torch tell of a dead `DataLoader` worker in a pull, and nowhere else in a pass.

    NOTE: torch does so from a handler of SIGCHLD, which raises wherever the main thread happens
    to be. In the midst of an agreement it would take the rank out of it, and leave the others
    waiting for one that will never say why.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, Any], Any] | None = None
        self._pending = False
        self._holds_back = False

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Note deaths for the next pull; around all that a pass does between two batches."""
        if self._holds_back or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._holds_back = True
        try:
            self._take_over()
            yield
        finally:
            self._holds_back = False
            self._give_back()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Let torch raise; around a pull."""
        if not self._holds_back:
            yield
            return
        handler = self._give_back()
        try:
            if self._pending and handler is not None:
                self._pending = False
                handler(signal.SIGCHLD, None)
            yield
        finally:
            self._take_over()

    def _take_over(self) -> None:
        # The first worker that is started installs torch's handler, in the midst of a pull.
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGCHLD, self._note)

    def _give_back(self) -> Callable[[int, Any], Any] | None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)
        return handler

    def _note(self, signum: int, frame: Any) -> None:
        self._pending = True


def describe_failure(
    error: Exception, index: int | None, last_ids: list[str] | None = None
) -> str:
    """Return a failure as the other ranks get to read it.

    Args:
        error: What a source raised.
        index: The batch before which it did; None for `build_iter`.
        last_ids: The utterance ids of the last batch before.

    Examples:
        >>> describe_failure(ValueError("no such wav"), 3, ["utt1", "utt2"])
        'at batch 3: ValueError: no such wav (last good utterances: utt1, utt2)'
    """
    try:
        message = str(error)
    except Exception as unreadable:
        message = f"(its text can't be had: {type(unreadable).__name__})"
    frames = traceback.extract_tb(error.__traceback__)
    details = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in frames
        if frame.filename != __file__
    ][-3:]
    if last_ids:
        more = f" and {len(last_ids) - 8} more" if len(last_ids) > 8 else ""
        details.append(f"last good utterances: {', '.join(last_ids[:8])}{more}")
    start = ("" if index is None else f"at batch {index}: ") + f"{type(error).__name__}: "
    end = f" ({'; '.join(details)})" if details else ""
    # A long message is cut, so that the frames and ids are told as well.
    room = max(0, REASON_BYTES - len((start + end).encode("utf-8", "replace")))
    return start + message.encode("utf-8", "replace")[:room].decode("utf-8", "ignore") + end


def _log_untold(failure: Exception, error: Exception) -> None:
    """Log why the other ranks were not told of a failure, which its own rank raises then."""
    logging.getLogger().error("could not tell %r: %s", failure, error)


def utterance_ids(batch: object) -> list[str]:
    """Return the utterance ids of a batch of ESPnet2's form `(ids, dict)`, or nothing.

    Examples:
        >>> utterance_ids((["utt1", "utt2"], {"speech": ...})), utterance_ids([1.0, 2.0])
        (['utt1', 'utt2'], [])
    """
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], dict):
        ids = batch[0]
        if isinstance(ids, list | tuple):
            return [id_ for id_ in ids if isinstance(id_, str)]
    return []


def _is_iterable(value: object) -> bool:
    """Return whether `iter()` takes a value, without calling it: that may start workers."""
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
