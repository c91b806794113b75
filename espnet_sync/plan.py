r"""What the epochs of a training will look like on each rank, before it starts.

python -m espnet_sync.plan --config conf/train.yaml --world_size 8 --epochs 3 \
    --shape_file exp/stats/train/speech_shape --valid_shape_file exp/stats/valid/speech_shape

Any other option is one of ESPnet2's training command, by the same name; with --task enh, of that
task's too. ESPnet2's own iterator factories are built and run for every rank, over data of which
they get the lengths alone: no audio is read, and batches are counted and not estimated.
"""

import argparse
import difflib
import json
import sys
import types
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import yaml
from espnet2.fileio.read_text import read_2columns_text
from espnet2.tasks.abs_task import AbsTask

from espnet_sync.balance import read_corpus
from espnet_sync.epoch_plan import (
    BALANCED,
    DEALS,
    FILE_ORDER,
    EpochPlan,
    count_batches,
    try_batch_size,
)
from espnet_sync.report import count, name_ranks
from espnet_sync.task import iterator_type, synced

#: Iterator types whose ranks can differ in their number of batches.
CHUNKED = ("chunk", "category_chunk")
#: Per cent of the batches; a plan that loses more says what to change.
MOST_LOST = 5.0
#: Ranks whose batches a table lists one by one.
MOST_LISTED = 16
#: What ESPnet2 adds to the config that it writes into an experiment's directory.
_ADDED = ("distributed", "version")


class BadInputError(Exception):
    """What the command line or a file has wrong, and what to do, in one line."""


@dataclass(kw_only=True, slots=True)
class ModePlan:
    """The epochs of one mode.

    Attributes:
        mode: `train` or `valid`.
        title: What is planned.
        deal: The one that the options ask for.
        policy: The `epoch_sync` that they ask for.
        batch_size: As given, for all ranks together.
        epochs: By deal, then by number.
        batch_sizes: The first epoch of each deal at batch sizes near the given one.
        refused: Why ESPnet2 would not start so; empty where it would.
    """

    mode: str
    title: str
    deal: str
    policy: str
    batch_size: int
    epochs: list[EpochPlan] = field(default_factory=list)
    batch_sizes: dict[int, list[EpochPlan]] = field(default_factory=dict)
    refused: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return what a program may want to know."""
        return {
            "title": self.title,
            "refused": self.refused,
            "epochs": [epoch.as_json() for epoch in self.epochs],
            "batch_sizes": {
                size: [epoch.as_json() for epoch in tried]
                for size, tried in self.batch_sizes.items()
            },
        }


# --- The command line ---------------------------------------------------------------------------


class _AnyTask(AbsTask):  # type: ignore[misc]  # ESPnet2 has no types
    """Stands for whatever task a config is for: has the options that all tasks share."""

    @classmethod
    def add_task_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add none."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message}. See --help")


def read_arguments(
    words: Sequence[str] | None,
) -> tuple[argparse.Namespace, type[AbsTask], argparse.Namespace]:
    """Read a command line, and the config that it names.

    Returns:
        tuple: This program's own options; the task; and what ESPnet2's training command would
        make of the other words.

    Raises:
        BadInputError: If an option or the config is wrong.
    """
    own, rest = _build_parser().parse_known_args(words)
    task = _AnyTask if own.task is None else _find_task(own.task)
    parser = synced(task).get_parser()
    parser.error = types.MethodType(_Parser.error, parser)
    known = {action.dest for action in parser._actions}
    config = _read_config(own.config)
    foreign = [key for key in config if key not in known and key not in _ADDED]
    if foreign and own.task is not None:
        near = difflib.get_close_matches(foreign[0], known, n=1, cutoff=0.8)
        raise BadInputError(
            f"{own.config}: the task {own.task} has no option {foreign[0]!r}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
            + ". Correct it, or name the task that the config is for: --task"
        )
    # NOTE: as ESPnet2's parser does, which takes a config's values as they are.
    parser.set_defaults(**{key: value for key, value in config.items() if key in known})
    args = parser.parse_args(rest)
    args.train_shape_file = own.shape_file or args.train_shape_file
    if not args.train_shape_file:
        raise BadInputError(
            "there is no shape file, so no lengths. Give the training's: --shape_file FILE"
        )
    for name in ("batch_size", "valid_batch_size"):
        size = getattr(args, name)
        if not (isinstance(size, int) and size > 0) and (size or name == "batch_size"):
            raise BadInputError(f"{name}={size!r}: must be a number of 1 or more")
    if config.get("speech_segment") or getattr(args, "speech_segment", None):
        raise BadInputError(
            "speech_segment crops utterances in training, so that their lengths are not those "
            "in the shape file. Plan without it"
        )
    return own, task, args


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m espnet_sync.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--world_size", type=_positive, required=True, help="number of ranks")
    parser.add_argument("--epochs", type=_positive, default=1, help="epochs to run (1)")
    parser.add_argument("--config", help="the training's YAML")
    parser.add_argument(
        "--task",
        help="enh for espnet2.bin.enh_train, or a module of your own; without it, options that "
        "not all tasks share are passed over",
    )
    parser.add_argument("--shape_file", action="append", help="as --train_shape_file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be 1 or more")
    return number


def _find_task(name: str) -> type[AbsTask]:
    module = name if "." in name else f"espnet2.bin.{name}_train"
    try:
        found = vars(import_module(module)).values()
    # Whatever a user's module makes of being imported.
    except (Exception, SystemExit) as error:
        raise BadInputError(
            f"--task {name}: {module} can't be imported ({type(error).__name__}: {error}). Give "
            "the middle of a training command's name, such as enh of espnet2.bin.enh_train, or a "
            "module"
        ) from None
    tasks = {each for each in found if isinstance(each, type) and issubclass(each, AbsTask)}
    tasks.discard(AbsTask)
    if len(tasks) != 1:
        names = ", ".join(sorted(each.__name__ for each in tasks)) or "none"
        raise BadInputError(
            f"--task {name}: {module} must hold one ESPnet2 task; it has {names}. Name another"
        )
    return tasks.pop()


def _read_config(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"can't be read: {error.strerror}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = f"is no YAML: {' '.join(str(error).split())}"
    else:
        if isinstance(config, dict):
            return config
        reason = "holds no options"
    raise BadInputError(f"{path} {reason}. Give a training's YAML: --config")


def _count_utterances(args: argparse.Namespace, mode: str) -> int:
    """Return the number of a mode's utterances, after a look at its files."""
    shape = str(getattr(args, f"{mode}_shape_file")[0])
    data = [str(path) for path, *_ in getattr(args, f"{mode}_data_path_and_name_and_type")[:1]]
    parts = [""]
    if args.multiple_iterator and mode == "train":
        parts = [f"/{path.name}" for path in sorted(Path(shape).glob("split.*"))]
        if not parts:
            raise BadInputError(f"{shape}: with multiple_iterator, give a folder with split.0")
    total = 0
    for part in parts:
        corpus, reason = read_corpus(f"{shape}{part}")
        if corpus is None:
            raise BadInputError(
                f"{reason}. Give the {mode} set's lengths, as ESPnet2's statistics stage writes "
                "them: <utterance> <length>"
            )
        total += len(corpus.lengths)
        for path in data:
            try:
                known = read_2columns_text(f"{path}{part}")
            except (OSError, RuntimeError, UnicodeDecodeError) as error:
                raise BadInputError(
                    f"{path}{part} can't be read: {error}. Correct "
                    f"--{mode}_data_path_and_name_and_type, or leave it out"
                ) from None
            lacking = [utterance for utterance in corpus.lengths if utterance not in known]
            if lacking:
                raise BadInputError(
                    f"{shape}{part} does not match {path}{part}: {len(lacking)} of its "
                    f"{len(corpus.lengths)} utterances are not there, e.g. {lacking[0]!r}. Give "
                    f"the shape file of the {mode} set"
                )
    return total


# --- The plan -----------------------------------------------------------------------------------


def _deals(args: argparse.Namespace, own: argparse.Namespace, mode: str) -> list[bool]:
    """Return the values of `chunk_balance` that can make a difference."""
    return [False, True][: 1 + (iterator_type(args, mode) == "chunk" and own.world_size > 1)]


def _batch_sizes(args: argparse.Namespace, own: argparse.Namespace, mode: str) -> list[int]:
    """Return the batch sizes to compare: multiples of the number of ranks near the given one."""
    ranks, size = own.world_size, args.batch_size
    if mode != "train" or ranks == 1 or args.iterator_type not in CHUNKED:
        return []
    near = {ranks * (size // ranks + more) for more in range(-2, 3)}
    return sorted(each for each in near | {size} if each >= ranks)


def plan_mode(
    task: type[AbsTask],
    args: argparse.Namespace,
    mode: str,
    own: argparse.Namespace,
    tick: Callable[[], object],
) -> ModePlan:
    """Plan the epochs of one mode with each deal, and its first epoch at other batch sizes.

    Args:
        task: As `args` and `own`, from `read_arguments`.
        args: The training's options.
        mode: `train` or `valid`.
        own: The plan's.
        tick: Called as the work goes on.

    Raises:
        BadInputError: If ESPnet2 can't build the iterators from what it is given.
    """
    kind = iterator_type(args, mode)
    if kind not in ("sequence", "category", *CHUNKED):
        raise BadInputError(
            f"the {mode} iterator is of type {kind!r}, which lengths alone don't make. Set "
            "iterator_type to sequence, category, chunk or category_chunk"
        )
    prefix = "" if mode == "train" else "valid_"
    size = getattr(args, f"{prefix}batch_size") or args.batch_size
    number = count(_count_utterances(args, mode), "utterance", "utterances")
    detail = f", batch_size {size}" if kind in CHUNKED else ""
    plan = ModePlan(
        mode=mode,
        title=f"[{mode}] {kind} iterator{detail}, {number}, "
        + count(own.world_size, "rank", "ranks"),
        deal=DEALS[args.chunk_balance and len(_deals(args, own, mode)) > 1],
        policy=getattr(args, f"{prefix}epoch_sync"),
        batch_size=size,
    )
    args = copy(args)
    try:
        for is_dealt in _deals(args, own, mode):
            args.chunk_balance = is_dealt
            plan.epochs += count_batches(task, args, mode, own.world_size, own.epochs, tick)
        for other in _batch_sizes(args, own, mode):
            plan.batch_sizes[other] = try_batch_size(task, args, own.world_size, other)
            tick()
    # Whatever ESPnet2 makes of a user's files and options.
    except Exception as error:
        brief = " ".join(str(error).split())
        if "world_size" not in brief:
            raise BadInputError(
                f"ESPnet2 can't build the {mode} iterator: {type(error).__name__}: {brief}. "
                f"Correct the options or files of the {mode} set"
            ) from error
        plan.refused = brief
    return plan


def hints(plan: ModePlan) -> list[str]:
    """Return what to change where a rank is empty or much is lost, a line each."""
    mode, prefix = plan.mode, "" if plan.mode == "train" else "valid_"
    if plan.refused:
        return [
            f"[{mode}] ESPnet2 will not start: {plan.refused}. Take fewer ranks or "
            + (f"a larger {prefix}batch_size." if "batch" in plan.refused else "more data.")
        ]
    longest = plan.policy == "longest"
    lost: dict[str, float] = {}
    for epoch in plan.epochs:
        share = epoch.percent(epoch.repeated if longest else epoch.dropped)
        lost[epoch.deal] = max(lost.get(epoch.deal, 0.0), share)
    lines = []
    empty = {epoch.deal: epoch for epoch in reversed(plan.epochs) if epoch.empty_ranks}
    for name, epoch in empty.items():
        is_dealt_better = BALANCED in lost and BALANCED not in empty
        lines.append(
            f"[{mode}] {name}, epoch {epoch.epoch}: {name_ranks(epoch.empty_ranks)} without a "
            f"batch, which is an error in training. "
            f"{'Set chunk_balance: true, or take' if is_dealt_better else 'Take'} fewer ranks, a "
            f"smaller {prefix}batch_size or chunk_length, or more data."
        )
    verb, now = "repeats" if longest else "drops", lost[plan.deal]
    if now > MOST_LOST:
        ways = []
        if plan.deal == FILE_ORDER and lost.get(BALANCED, now) < now:
            ways.append(f"set chunk_balance: true ({lost[BALANCED]:.1f} %)")
        dropped = {
            size: epoch.percent(epoch.dropped)
            for size, tried in plan.batch_sizes.items()
            for epoch in tried
            if epoch.deal == plan.deal
        }
        best = min(
            dropped,
            key=lambda size: (dropped[size], abs(size - plan.batch_size)),
            default=plan.batch_size,
        )
        if best != plan.batch_size and not longest and dropped[best] < now - MOST_LOST:
            ways.append(f"take batch_size: {best} ({dropped[best]:.1f} %)")
        if not longest:
            ways.append(f"set {prefix}epoch_sync: longest (drops none, repeats some)")
        advice = ", or ".join(ways) or "take fewer ranks or more data"
        lines.append(f"[{mode}] {plan.deal} {verb} {now:.1f} % of the batches: {advice}.")
    return lines


def format_plan(plan: ModePlan) -> str:
    """Return the tables of one mode."""
    from tabulate import tabulate

    rows = [
        {
            "deal": epoch.deal,
            "epoch": epoch.epoch,
            "batches by rank": " ".join(map(str, epoch.batches))
            if len(epoch.batches) <= MOST_LISTED
            else f"{min(epoch.batches)} to {max(epoch.batches)}",
            "shortest drops": f"{epoch.dropped:,} ({epoch.percent(epoch.dropped):.1f} %)",
            "longest repeats": f"{epoch.repeated:,} ({epoch.percent(epoch.repeated):.1f} %)",
        }
        for epoch in plan.epochs
    ]
    sizes = [
        {"batch_size": f"{size}{' (given)' * (size == plan.batch_size)}"}
        | {f"{epoch.deal} would drop": f"{epoch.percent(epoch.dropped):.1f} %" for epoch in tried}
        for size, tried in plan.batch_sizes.items()
    ]
    parts = [plan.title, *(tabulate(each, headers="keys") for each in (rows, sizes) if each)]
    least = min((batches for epoch in plan.epochs for batches in epoch.batches), default=0)
    if least:
        parts.append(f"Every rank has {count(least, 'batch', 'batches')} or more.")
    return "\n\n".join(parts)


def main(words: Sequence[str] | None = None) -> int:
    """Plan, print, and return the exit code; `words` are those after the program's name."""
    try:
        own, task, args = read_arguments(words)
        try:
            import tabulate  # noqa: F401
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError as error:
            raise BadInputError(f"{error.name} is missing: pip install {error.name}") from None
        tqdm.monitor_interval = 0  # no thread of its own
        modes = [mode for mode in ("train", "valid") if getattr(args, f"{mode}_shape_file")]
        total = sum(
            len(_deals(args, own, mode)) * own.world_size * own.epochs
            + len(_batch_sizes(args, own, mode))
            for mode in modes
        )
        with tqdm(total=total, unit="epoch", disable=None, leave=False) as bar:
            plans = [plan_mode(task, args, mode, own, bar.update) for mode in modes]
    except BadInputError as error:
        sys.stderr.write(f"espnet_sync.plan: error: {error}\n")
        return 2
    advice = [line for plan in plans for line in hints(plan)]
    if own.json:
        found: dict[str, Any] = {"world_size": own.world_size, "task": own.task}
        found |= {plan.mode: plan.as_json() for plan in plans} | {"hints": advice}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    parts = [format_plan(plan) for plan in plans]
    if "valid" not in modes:
        parts.append("[valid] not planned: there is no --valid_shape_file.")
    sys.stdout.write("\n\n".join([*parts, *advice]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
