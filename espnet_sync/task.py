"""Sync any ESPnet2 task through its config: the one file that knows args and modes."""

import argparse
import copyreg
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.tasks.abs_task import AbsTask, IteratorOptions
from espnet2.train.distributed_utils import DistributedOption
from espnet2.utils.nested_dict_action import NestedDictAction
from espnet2.utils.types import str2bool

from espnet_sync import __version__
from espnet_sync.balance import (
    ChunkOptions,
    Corpus,
    Deal,
    apply_deal,
    deal,
    deal_in_file_order,
    read_corpus,
)
from espnet_sync.consensus import log_report
from espnet_sync.epoch_sync_iterator import EpochSyncIterator
from espnet_sync.errors import EmptyRankError
from espnet_sync.options import (
    CONF_KEYS,
    SyncOptions,
    conf_options,
    refuse_unknown,
    stop_signal,
    sync_policy,
)
from espnet_sync.process_groups import NamedDefaultGroup, count_ranks, is_distributed
from espnet_sync.report import (
    FILE_NAME,
    SyncReport,
    append_report,
    count,
    name_ranks,
    place,
    plot_reports,
    read_reports,
)
from espnet_sync.roll_call import Lookout, leave
from espnet_sync.synced_iter_factory import SyncedIterFactory

#: The keys of the parser and of the YAML, with their defaults. None: as train.
KEYS: Mapping[str, Any] = {
    "epoch_sync": "shortest",
    "epoch_sync_conf": {},
    "valid_epoch_sync": "shortest",
    "valid_epoch_sync_conf": None,
    "chunk_balance": False,
}
_PREFIXES = {"train": "", "valid": "valid_"}


def synced(task: type[AbsTask], **defaults: Any) -> type[AbsTask]:
    """Return a subclass of an ESPnet2 task whose epochs end on all ranks together.

    Its iterator factories for the modes `train` and `valid` are wrapped in a
    `SyncedIterFactory`, as the keys `epoch_sync`, `epoch_sync_conf`, `valid_epoch_sync` and
    `valid_epoch_sync_conf` of its parser say. The class keeps its name, can be pickled, and
    repeated calls return the same one.

    Args:
        task: A task, e.g. `espnet2.tasks.asr.ASRTask`, ESPnet2's or your own.
        **defaults: Other defaults for the keys, e.g. `epoch_sync="none"`.

    Raises:
        TypeError: If `task` is no `AbsTask` subclass, or a default is for no such key.

    Examples:
        >>> from espnet2.tasks.lm import LMTask
        >>> synced(LMTask).__name__, synced(LMTask) is synced(LMTask)
        ('LMTask', True)
        >>> synced(synced(LMTask)) is synced(LMTask)
        True
    """
    if not (isinstance(task, type) and issubclass(task, AbsTask)):
        raise TypeError(f"task={task!r}: must be a subclass of espnet2.tasks.abs_task.AbsTask")
    refuse_unknown("synced", defaults, KEYS)
    return _synced(task, defaults, epoch_offset=0)


def synced_for_lightning(task: type[AbsTask], **defaults: Any) -> type[AbsTask]:
    """Return `synced(task)` for a caller that counts epochs from 0: Lightning's trainer does."""
    return _synced(task, defaults, epoch_offset=1)


def parse_keys(words: list[str]) -> dict[str, Any]:
    """Parse the keys as the parser of a synced task does; the runner reads its options so.

    Args:
        words: A command line with nothing but keys, e.g. `["--epoch_sync", "none"]`.

    Returns:
        dict[str, Any]: The keys that were given, with their values.

    Examples:
        >>> parse_keys(["--epoch_sync=true", "--epoch_sync_conf", "timeout=60"])
        {'epoch_sync': 'shortest', 'epoch_sync_conf': {'timeout': 60}}
    """
    parser = argparse.ArgumentParser(prog="espnet_sync", add_help=False, allow_abbrev=False)
    _add_keys(parser, dict.fromkeys(KEYS, argparse.SUPPRESS))
    return vars(parser.parse_args(words))


class _SyncedTask(AbsTask):  # type: ignore[misc]  # ESPnet2 has no types
    """What `synced` puts before a task's own methods."""

    unsynced_task: type[AbsTask]
    key_defaults: Mapping[str, Any]
    epoch_offset: int
    has_announced = False
    stop_request: "_StopSignal | None" = None
    lookout: Lookout | None = None
    logs: "dict[str, _EpochLog]"
    logger: logging.Logger

    @classmethod
    def get_parser(cls) -> argparse.ArgumentParser:
        """Add the keys to the task's own parser, and check them as soon as they are read."""
        parser: argparse.ArgumentParser = super().get_parser()
        _add_keys(parser.add_argument_group("epoch_sync related"), cls.key_defaults)
        parse = parser.parse_known_args

        def parse_and_check(*words: Any, **options: Any) -> tuple[Any, list[str]]:
            args, rest = parse(*words, **options)
            _check_keys(args)
            return args, rest

        # NOTE: ESPnet2's parser takes values from a YAML as they are, whatever an argument's
        # type, and Lightning's command calls nothing of the task before it builds the model.
        parser.parse_known_args = parse_and_check  # type: ignore[method-assign]
        return parser

    @classmethod
    def main(
        cls, args: argparse.Namespace | None = None, cmd: Sequence[str] | None = None
    ) -> None:
        """Run ESPnet2's `main`; where that spawns the ranks, hand them the stop signal."""
        if args is None:
            args = cls.get_parser().parse_args(cmd)
        _check_keys(args)
        with _handled(_stop_signal(args), _hand_on):
            super().main(args=args, cmd=cmd)

    @classmethod
    def main_worker(cls, args: argparse.Namespace) -> None:
        """Run a rank; let a stop signal end it after the epoch, and errors in good order."""
        number = _stop_signal(args)
        cls.stop_request = None if number is None else _StopSignal(number)
        cls.lookout = lookout = Lookout()
        with _handled(number, cls.stop_request):
            try:
                super().main_worker(args)
                _plot_epochs(args)
            except SystemExit:  # a stop signal's
                _plot_epochs(args)
                raise
            except Exception as error:
                is_on = any(_read_options(args, mode)[0] != "none" for mode in _PREFIXES)
                if not is_on or not leave(error, lookout):
                    raise
                sys.exit(1)
            finally:
                lookout.stop()

    @classmethod
    def plot_logged_epochs(cls) -> None:
        """Draw the epochs that this process has logged; the runner calls it after Lightning's."""
        told = [log.args for log in cls.logs.values() if log.has_told]
        if told:
            _plot_epochs(told[0])

    @classmethod
    def check_required_command_args(cls, args: argparse.Namespace) -> None:
        """Refuse bad values of a Namespace that no parser has read."""
        _check_keys(args)
        super().check_required_command_args(args)

    @classmethod
    def build_iter_factory(
        cls,
        args: argparse.Namespace,
        distributed_option: DistributedOption,
        mode: str,
        kwargs: dict[str, Any] | None = None,
    ) -> AbsIterFactory:
        """Wrap the factory of one mode, but not those of a multiple iterator's splits."""
        inner = super().build_iter_factory(args, distributed_option, mode, kwargs)
        is_split = kwargs is not None and mode == "train" and args.multiple_iterator
        if is_split or mode not in _PREFIXES:
            return inner
        deals: list[Deal] = []

        def list_splits() -> list[IteratorOptions]:
            options = cls.build_iter_options(args, distributed_option, mode)
            for name, value in (kwargs or {}).items():
                setattr(options, name, value)
            return [options]

        if _balances(args, distributed_option, mode):
            deals, reason = make_deals(args, list_splits(), deal)
            if deals:
                made, reason = apply_deal(deals[0], inner, NamedDefaultGroup().rank)
                inner, deals = (inner, []) if made is None else (made, deals)
            _warn_unbalanced(mode, reason)
        return _wrap(cls, inner, args, mode, deals, list_splits)

    @classmethod
    def build_multiple_iter_factory(
        cls, args: argparse.Namespace, distributed_option: DistributedOption, mode: str
    ) -> AbsIterFactory:
        """Wrap the factory over all splits."""
        inner = super().build_multiple_iter_factory(args, distributed_option, mode)
        deals: list[Deal] = []

        def list_splits() -> list[IteratorOptions]:
            options = cls.build_iter_options(args, distributed_option, mode)
            return _split_options(options, len(inner.build_funcs))

        if _balances(args, distributed_option, mode):
            deals, reason = make_deals(args, list_splits(), deal)
            if deals:
                rank = NamedDefaultGroup().rank
                inner.build_funcs = [
                    partial(_build_dealt, build, dealt, rank)
                    for build, dealt in zip(inner.build_funcs, deals, strict=True)
                ]
            _warn_unbalanced(mode, reason)
        return _wrap(cls, inner, args, mode, deals, list_splits)


class _TaskIterator(EpochSyncIterator):
    """An epoch of an ESPnet2 run: one without a batch is an error.

    NOTE: ESPnet2's Trainer would go on, and fail after the epoch on a missing `valid.loss`.
    """

    describe_data: Callable[[], str]

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, as `EpochSyncIterator.__iter__` does.

        Raises:
            EmptyRankError: If the pass has ended with no batch, on every rank.
        """
        yield from super().__iter__()
        report = self.report
        if report is not None and report.batches == 0 and report.ended_by:
            ranks = report.ended_by
            raise EmptyRankError(
                f"{place(report.label, report.epoch)} has no batch: {name_ranks(ranks)} "
                f"{'has' if len(ranks) == 1 else 'have'} none. {self.describe_data()}. Is that "
                "too little for this many ranks or this batch size, or is every utterance shorter "
                "than the chunks? Take fewer ranks, a smaller batch_size or valid_batch_size, a "
                "smaller chunk_length, or more data.",
                ranks=ranks,
            )


class _StopSignal:
    """Ends training after the epoch in which a signal comes: for time limits and preemption.

    The first training epoch that is built from then on leaves with exit code 0 on all ranks.
    ESPnet2 has validated and written its checkpoint by then.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._is_set = False
        self._epoch: EpochSyncIterator | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: nothing but flags are set here."""
        self._is_set = True
        if self._epoch is not None:
            self._epoch.request_stop()

    def is_set(self) -> bool:
        """See `StopRequest.is_set`."""
        return self._is_set

    def note(self, iterator: EpochSyncIterator) -> None:
        """See `StopRequest.note`."""
        self._epoch = iterator
        if self._is_set:
            iterator.request_stop()

    def leave(self) -> NoReturn:
        """See `StopRequest.leave`."""
        logging.getLogger().warning(
            "espnet_sync: %s came to a rank, so training ends here with exit code 0 on all ranks. "
            "Run the same command again to resume from the checkpoint.",
            self._number.name,
        )
        sys.exit(0)

    def __str__(self) -> str:
        parent = multiprocessing.parent_process()
        process = os.getpid() if parent is None else parent.pid
        return f"kill -{self._number.name.removeprefix('SIG')} {process} ends it after the epoch"


class _EpochLog:
    """What rank 0 does with the report of each of a mode's epochs.

    It logs the line, which names `chunk_balance` where that would have saved data, and keeps a
    row in the experiment's directory and scalars for TensorBoard.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        mode: str,
        list_splits: Callable[[], Sequence[IteratorOptions]],
        logger: logging.Logger,
    ) -> None:
        self.args = args
        self.has_told = False
        self._logger = logger
        self._is_dealt_in_file_order = (
            count_ranks() > 1
            and iterator_type(args, mode) == "chunk"
            and not getattr(args, "chunk_balance", False)
        )
        self._list_splits = list_splits
        self._expected: float | None = None
        self._writer: Any = None

    def __call__(self, report: SyncReport) -> None:
        """Tell of a pass that has ended."""
        self.has_told = True
        log_report(report, self._hint(report), self._logger)
        folder = getattr(self.args, "output_dir", None)
        if folder is None or not Path(folder).is_dir():
            return
        try:
            append_report(Path(folder) / FILE_NAME, report)
        except OSError as error:
            logging.getLogger().warning(
                "%s keeps no row of it: %s", place(report.label, report.epoch), error
            )
        if getattr(self.args, "use_tensorboard", False):
            self._write_scalars(report, Path(folder) / "tensorboard" / "epoch_sync")

    def _hint(self, report: SyncReport) -> str:
        discarded = report.discarded
        if not (self._is_dealt_in_file_order and discarded and report.ended_by):
            return ""
        if self._expected is None:
            # A rank pulls a few batches ahead and no more: what it still held, lengths tell.
            dealt, _ = make_deals(self.args, self._list_splits(), deal_in_file_order)
            self._expected = max((each.dropped for each in dealt), default=0.0)
        seen = 100 * discarded / (discarded + report.batches * len(report.ranks))
        share = max(seen, self._expected)
        if share <= 2:
            return ""
        return f"an uneven deal loses {share:.0f} % of the data, set chunk_balance: true"

    def _write_scalars(self, report: SyncReport, folder: Path) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))
        for name, value in (
            ("batches", report.batches),
            ("discarded", report.discarded),
            ("repeated", report.repeated),
            ("longest_wait", report.slowest.waited),
        ):
            self._writer.add_scalar(f"{report.label}/{name}", value, report.epoch)
        self._writer.flush()


def _plot_epochs(args: argparse.Namespace) -> None:
    """Draw the epochs of a training that has ended, where ESPnet2 puts its plots; on rank 0."""
    folder = Path(args.output_dir)
    rows = folder / FILE_NAME
    if (
        not args.use_matplotlib
        or not rows.exists()
        or (is_distributed() and NamedDefaultGroup().rank)
    ):
        return
    try:
        (folder / "images").mkdir(exist_ok=True)
        runs = [(folder.name, read_reports(rows))]
        plot_reports(runs, folder / "images" / "epoch_sync.png")
    # The training is done: nothing that goes wrong here may fail it.
    except Exception as error:
        logging.getLogger().warning("espnet_sync draws no plot of the epochs: %s", error)


def _stop_signal(args: argparse.Namespace) -> signal.Signals | None:
    """Return the signal that `epoch_sync_conf` names, where syncing is on."""
    policy, _ = _read_options(args, "train")
    return None if policy == "none" else stop_signal(getattr(args, "epoch_sync_conf", None) or {})


@contextmanager
def _handled(number: signal.Signals | None, handler: Any) -> Iterator[None]:
    """Handle a signal for a while; in the main thread alone, where Python handles them."""
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _hand_on(number: int, frame: FrameType | None) -> None:
    """Hand a signal on to the ranks that this process has spawned."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            os.kill(child.pid, number)


def _add_keys(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, defaults: Mapping[str, Any]
) -> None:
    for mode, prefix in _PREFIXES.items():
        parser.add_argument(
            f"--{prefix}epoch_sync",
            type=sync_policy,
            default=defaults[f"{prefix}epoch_sync"],
            metavar="{shortest,longest,none}",
            help=f"End the {mode} epochs of all ranks at the same batch: that of the shortest "
            "or of the longest rank",
        )
        parser.add_argument(
            f"--{prefix}epoch_sync_conf",
            action=NestedDictAction,
            default=defaults[f"{prefix}epoch_sync_conf"],
            help=f"How, for {mode}: {', '.join(CONF_KEYS)}"
            + ("" if mode == "train" else " (None: as epoch_sync_conf)"),
        )
    parser.add_argument(
        "--chunk_balance",
        type=str2bool,
        default=defaults["chunk_balance"],
        help="Deal the utterances of chunk iterators to the ranks by their number of chunks, so "
        "that the ranks come out even",
    )


def _synced(task: type[AbsTask], defaults: Mapping[str, Any], epoch_offset: int) -> type[AbsTask]:
    if issubclass(task, _SyncedTask):
        defaults = {**task.key_defaults, **defaults}
        task = task.unsynced_task
    changed = {key: value for key, value in defaults.items() if value != KEYS[key]}
    frozen = json.dumps(changed, sort_keys=True)
    return _make_class(task, frozen, epoch_offset)  # type: ignore[arg-type]  # it can be hashed


@cache
def _make_class(task: type[AbsTask], defaults: str, epoch_offset: int) -> type[AbsTask]:
    """Make the class once for each task and set of defaults (as JSON, which can be a key)."""
    metaclass = type("SyncedTaskType", (type(task),), {})
    # NOTE: pickle finds a class by its name, which leads to the task; a metaclass of its own
    # lets the class say how it is made instead.
    copyreg.pickle(metaclass, _reduce_class)
    made: type[AbsTask] = metaclass(
        task.__name__,
        (_SyncedTask, task),
        {
            "__module__": task.__module__,
            "__qualname__": task.__qualname__,
            "__doc__": task.__doc__,
            "unsynced_task": task,
            "key_defaults": {**KEYS, **json.loads(defaults)},
            "epoch_offset": epoch_offset,
            "logs": {},
            # NOTE: Lightning's command sets up no other logger than Lightning's own.
            "logger": logging.getLogger("lightning.pytorch" if epoch_offset else None),
        },
    )
    return made


def _reduce_class(made: type[_SyncedTask]) -> tuple[Any, ...]:
    task = made.unsynced_task
    parts = (task.__module__, task.__qualname__, made.key_defaults, made.epoch_offset)
    _find_and_sync(*parts)
    return _find_and_sync, parts


def _find_and_sync(
    module: str, name: str, defaults: Mapping[str, Any], epoch_offset: int
) -> type[AbsTask]:
    """Make a pickled class again.

    NOTE: pickle would refuse the task itself where the module that the runner runs defines it:
    the synced class stands there in its place, as it does where this finds it in that process.
    """
    task: Any = import_module(module)
    for part in name.split("."):
        task = getattr(task, part)
    return _synced(task, defaults, epoch_offset)


def _check_keys(args: argparse.Namespace) -> None:
    """Leave with exit code 2 where a key has a bad value; write policies as words."""
    for mode, prefix in _PREFIXES.items():
        try:
            policy, _ = _read_options(args, mode)
        except (TypeError, ValueError) as error:
            sys.stderr.write(f"espnet_sync: error: {error}\n")
            sys.exit(2)
        setattr(args, f"{prefix}epoch_sync", policy)
    if not isinstance(getattr(args, "chunk_balance", False), bool):
        sys.stderr.write(
            f"espnet_sync: error: chunk_balance={args.chunk_balance!r}: must be true or false\n"
        )
        sys.exit(2)


def _read_options(args: argparse.Namespace, mode: str) -> tuple[str, SyncOptions]:
    """Return a mode's policy and options; a key that `args` lacks means its default."""
    key = f"{_PREFIXES[mode]}epoch_sync"
    try:
        policy = sync_policy(getattr(args, key, KEYS[key]))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{key}: {error}") from None
    conf_key = f"{key}_conf"
    conf = getattr(args, conf_key, None)
    if conf is None:
        conf_key = "epoch_sync_conf"
        conf = getattr(args, conf_key, None) or {}
    return policy, conf_options(conf_key, conf, "shortest" if policy == "none" else policy)


def _balances(args: argparse.Namespace, distributed: DistributedOption, mode: str) -> bool:
    """Return whether a mode's utterances are to be dealt by their number of chunks."""
    if not distributed.distributed:
        return False
    kind = iterator_type(args, mode)
    if not getattr(args, "chunk_balance", False):
        if kind == "chunk":
            _warn_of_shares(args, mode)
        return False
    if kind != "chunk":
        logging.getLogger().info("[%s] chunk_balance leaves a %s iterator alone", mode, kind)
    return bool(kind == "chunk")


def iterator_type(args: argparse.Namespace, mode: str) -> str:
    """Return the type of a mode's iterator: validation may have one of its own."""
    kind: str = (mode == "valid" and args.valid_iterator_type) or args.iterator_type
    return kind


def _warn_of_shares(args: argparse.Namespace, mode: str) -> None:
    """Warn where ranks get unequal shares of a batch, but equally many utterances."""
    world_size = count_ranks()
    batch_size = (mode == "valid" and args.valid_batch_size) or args.batch_size
    if batch_size > world_size and batch_size % world_size:
        options = ChunkOptions(
            world_size=world_size, batch_size=batch_size, chunk_length=args.chunk_length
        )
        logging.getLogger().warning(
            "[%s] a batch size of %d does not divide by %d ranks, so that about %.0f %% of the "
            "data will be dropped. Take one that does, or set chunk_balance: true",
            mode,
            batch_size,
            world_size,
            options.dropped_by_shares,
        )


def make_deals(
    args: argparse.Namespace,
    splits: Sequence[IteratorOptions],
    make: Callable[[ChunkOptions, Corpus], Deal],
) -> tuple[list[Deal], str]:
    """Deal each split's utterances to all ranks; where one can't be, none is, with the reason."""
    deals = []
    for split in splits:
        files = {name: path for path, name, _ in split.data_path_and_name_and_type}
        if not split.shape_files:
            return [], "there is no shape file"
        rates = files.get("fs") or files.get("utt2fs")
        corpus, reason = read_corpus(
            split.shape_files[0],
            sampling_rate_file=None if args.chunk_default_fs is None else rates,
            category_file=files.get("category") or files.get("utt2category"),
        )
        if corpus is None:
            return [], reason
        try:
            options = ChunkOptions(
                world_size=count_ranks(),
                batch_size=split.batch_size,
                chunk_length=args.chunk_length,
                chunk_shift_ratio=args.chunk_shift_ratio,
                discard_short_samples=args.chunk_discard_short_samples,
                chunk_max_abs_length=args.chunk_max_abs_length,
                default_fs=args.chunk_default_fs,
                num_samples_per_epoch=split.num_iters_per_epoch,
            )
            deals.append(make(options, corpus))
        except ValueError as error:
            return [], str(error)
    return deals, ""


def _split_options(options: IteratorOptions, number: int) -> list[IteratorOptions]:
    """Return the options of each split, as ESPnet2's multiple iterator makes them."""
    number_per_epoch = options.num_iters_per_epoch
    return [
        replace(
            options,
            data_path_and_name_and_type=[
                (f"{path}/split.{index}", name, kind)
                for path, name, kind in options.data_path_and_name_and_type
            ],
            shape_files=[f"{path}/split.{index}" for path in options.shape_files],
            num_iters_per_epoch=(
                None if number_per_epoch is None else (number_per_epoch + index) // number
            ),
        )
        for index in range(number)
    ]


def _build_dealt(build: Callable[[], AbsIterFactory], dealt: Deal, rank: int) -> AbsIterFactory:
    """Build a split's factory in mid-epoch, and deal it this rank's utterances.

    Raises:
        RuntimeError: If the deal does not fit; the other ranks get to read it.
    """
    made, reason = apply_deal(dealt, build(), rank)
    if made is None:
        raise RuntimeError(f"chunk_balance can't deal a split: {reason}. Set chunk_balance: false")
    return made


def _describe_data(
    args: argparse.Namespace, mode: str, list_splits: Callable[[], Sequence[IteratorOptions]]
) -> str:
    """Return what an epoch's number of batches follows from: ranks, batch size, lengths."""
    splits = list_splits()
    told = f"There are {count(count_ranks(), 'rank', 'ranks')}, batch_size={splits[0].batch_size}"
    if "chunk" in iterator_type(args, mode):
        told += f", chunk_length={args.chunk_length}"
    for split in splits:
        for file in split.shape_files[:1]:
            corpus, reason = read_corpus(file)
            if corpus is None:
                told += f", {file}: {reason}"
                continue
            lengths = corpus.lengths.values()
            told += f", and {count(len(lengths), 'utterance', 'utterances')} of {min(lengths):,} "
            told += f"to {max(lengths):,} in {file}"
    return told


def _warn_unbalanced(mode: str, reason: str) -> None:
    if reason:
        logging.getLogger().warning(
            "[%s] chunk_balance is off for this iterator, and ESPnet2 deals in file order: %s",
            mode,
            reason,
        )


def _wrap(
    cls: type[_SyncedTask],
    inner: AbsIterFactory,
    args: argparse.Namespace,
    mode: str,
    deals: Sequence[Deal],
    list_splits: Callable[[], Sequence[IteratorOptions]],
) -> AbsIterFactory:
    """Wrap a train or valid factory. Never plot_att's: ESPnet2 iterates it on rank 0 alone."""
    policies = {mode: _read_options(args, mode)[0] for mode in _PREFIXES}
    if policies.get(mode, "none") == "none":
        return inner
    options = {
        **asdict(_read_options(args, mode)[1]),
        "label": mode,
        "epoch_offset": cls.epoch_offset,
    }

    class Epoch(_TaskIterator):
        describe_data = staticmethod(partial(_describe_data, args, mode, list_splits))

    factory = SyncedIterFactory(inner, iterator_class=Epoch, **options)
    # NOTE: Lightning has a factory built for each epoch; the log and its writer go on.
    if mode not in cls.logs or cls.logs[mode].args is not args:
        cls.logs[mode] = _EpochLog(args, mode, list_splits, cls.logger)
    factory.tell = cls.logs[mode]
    factory.context = " ".join(f"deal {dealt.fingerprint:x}" for dealt in deals)
    if mode == "train":
        factory.stop_request = cls.stop_request
    if cls.lookout is not None and is_distributed():
        cls.lookout.start()
    if not cls.has_announced:
        cls.has_announced = True
        factory.logger = cls.logger
        factory.announcement = (
            f"espnet_sync {__version__} ends the ranks' epochs together: "
            + ", ".join(f"{mode} {policy}" for mode, policy in policies.items())
            + f", chunk_balance {'on' if deals else 'off'}"
            + (f" ({cls.stop_request})" if cls.stop_request else "")
        )
    return factory
