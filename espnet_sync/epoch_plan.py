"""How many batches each rank has in an epoch: ESPnet2's factories, run without data."""

import argparse
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from espnet2.tasks.abs_task import AbsTask, IteratorOptions
from espnet2.train.distributed_utils import DistributedOption

from espnet_sync.balance import deal, deal_in_file_order
from espnet_sync.process_groups import played_rank
from espnet_sync.task import make_deals, synced

#: How utterances are dealt to ranks, by the value of `chunk_balance`.
FILE_ORDER, BALANCED = DEALS = ("file order", "chunk_balance")


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """One epoch of one mode, with one deal: each rank's batches, if nothing ends it early.

    Examples:
        >>> epoch = EpochPlan("file order", epoch=1, batches=(10, 8, 7))
        >>> epoch.dropped, epoch.repeated, epoch.percent(epoch.dropped), epoch.empty_ranks
        (4, 5, 16.0, ())
    """

    deal: str
    epoch: int
    batches: tuple[int, ...]

    @property
    def dropped(self) -> int:
        """Batches of all ranks that ending with the shortest rank loses."""
        return sum(self.batches) - len(self.batches) * min(self.batches)

    @property
    def repeated(self) -> int:
        """Batches of all ranks that ending with the longest rank adds."""
        return len(self.batches) * max(self.batches) - sum(self.batches)

    @property
    def empty_ranks(self) -> tuple[int, ...]:
        """The ranks without a batch."""
        return tuple(rank for rank, batches in enumerate(self.batches) if not batches)

    def percent(self, number: int) -> float:
        """Return a number of batches in per cent of all ranks' batches."""
        return 100 * number / max(1, sum(self.batches))

    def as_json(self) -> dict[str, Any]:
        """Return all of the above by name."""
        return {
            "deal": self.deal,
            "epoch": self.epoch,
            "batches": self.batches,
            "dropped": self.dropped,
            "dropped_percent": self.percent(self.dropped),
            "repeated": self.repeated,
            "repeated_percent": self.percent(self.repeated),
            "empty_ranks": self.empty_ranks,
        }


class _WithoutData(AbsTask):  # type: ignore[misc]  # ESPnet2 has no types
    """What stands before a task's own methods: its data has lengths, and takes no memory."""

    @classmethod
    def build_iter_options(cls, args: Any, distributed_option: Any, mode: str) -> IteratorOptions:
        """Have ESPnet2's own data set read the shape file in place of audio and text."""
        options = super().build_iter_options(args, distributed_option, mode)
        # NOTE: ESPnet2 looks for lists of categories beside the first file.
        files = options.data_path_and_name_and_type
        data = [(str(path), "beside", "text") for path, *_ in files[:1]]
        data.append((str(options.shape_files[0]), "lengths", "csv_int"))
        kept = ("fs", "utt2fs", "category", "utt2category")
        data += [(str(path), name, "text") for path, name, _ in files if name in kept]
        options.data_path_and_name_and_type = data
        return options

    @classmethod
    def build_preprocess_fn(cls, args: Any, train: bool) -> Callable[..., Any]:
        """Turn lengths into arrays that have them."""
        return _Preprocess()

    @classmethod
    def build_collate_fn(cls, args: Any, train: bool) -> Callable[..., Any]:
        """Collate such arrays."""
        return _collate

    @classmethod
    def check_task_requirements(cls, *_: Any, **__: Any) -> None:
        """Require none of the task's data."""


class _Preprocess:
    """Makes of an utterance's length an array of that length, and of no bytes."""

    def __init__(self) -> None:
        self._categories: dict[str, int] = {}

    def __call__(self, utterance: str, data: Mapping[str, Any]) -> dict[str, np.ndarray]:
        made = {"speech": np.empty((int(data["lengths"][0]), 0), np.float32)}
        for name, value in data.items():
            if name in ("fs", "utt2fs"):
                made["utt2fs"] = np.array([int(value)])
            elif name in ("category", "utt2category"):
                number = self._categories.setdefault(value, len(self._categories))
                made["utt2category"] = np.array([number])
        return made


def _collate(samples: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> Any:
    """Make ESPnet2's `(ids, dict)`, of utterances or of chunks, fast."""
    lengths = [len(data["speech"]) for _, data in samples]
    batch = {
        "speech": torch.empty(len(samples), max(lengths), 0),
        "speech_lengths": torch.tensor(lengths),
    }
    for name in samples[0][1].keys() - {"speech"}:
        batch[name] = torch.tensor(np.stack([data[name] for _, data in samples]))
        batch[f"{name}_lengths"] = torch.ones(len(samples), dtype=torch.int64)
    return [utterance for utterance, _ in samples], batch


@contextmanager
def _silence() -> Iterator[None]:
    """Show none of ESPnet2's messages: there is one for each short utterance."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers[:] = [logging.NullHandler()]
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def count_batches(
    task: type[AbsTask],
    args: argparse.Namespace,
    mode: str,
    world_size: int,
    epochs: int,
    tick: Callable[[], object] = lambda: None,
) -> list[EpochPlan]:
    """Count the batches of each rank in each epoch by running ESPnet2's factories.

    Args:
        task: The task that is trained.
        args: What the parser of the synced task made; `chunk_balance` says which deal.
        mode: `train` or `valid`.
        world_size: The number of ranks.
        epochs: How many are run, from 1.
        tick: Called after each epoch of each rank.

    Raises:
        Exception: What ESPnet2 would raise, such as a RuntimeError that refuses so many ranks.
    """
    args, planned = _cheapen(args), _without_data(task)
    option = DistributedOption(distributed=world_size > 1)
    counts: list[list[int]] = []
    for rank in range(world_size):
        counts.append([])
        with _silence(), played_rank(rank, world_size):
            if args.multiple_iterator and mode == "train":
                factory = planned.build_multiple_iter_factory(args, option, mode)
            else:
                factory = planned.build_iter_factory(args, option, mode)
            for epoch in range(1, epochs + 1):
                counts[-1].append(sum(1 for _ in factory.build_iter(epoch)))
                tick()
    name = DEALS[args.chunk_balance]
    by_epoch = enumerate(zip(*counts, strict=True), 1)
    return [EpochPlan(name, number, batches) for number, batches in by_epoch]


def _cheapen(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments without what costs time here, and changes no batch."""
    args = copy(args)
    args.epoch_sync = args.valid_epoch_sync = "none"
    args.num_workers = args.ngpu = 0
    args.max_cache_size, args.valid_max_cache_size = 0.0, None
    args.multi_task_dataset = False
    return args


def _without_data(task: type[AbsTask]) -> Any:
    return types.new_class(task.__name__, (_WithoutData, synced(task)))


def try_batch_size(
    task: type[AbsTask], args: argparse.Namespace, world_size: int, size: int
) -> list[EpochPlan]:
    """Return the first training epoch with another batch size, and with each deal.

    Of plain chunk iterators the batches are those expected from lengths, which are exact with
    one chunk length and all utterances: to run every factory would take minutes.

    Args:
        task: As in `count_batches`.
        args: The training's options.
        world_size: The number of ranks.
        size: The batch size, of all ranks together.
    """
    args = _cheapen(args)
    args.batch_size, args.chunk_balance = size, False
    if args.iterator_type != "chunk" or args.multiple_iterator:
        return count_batches(task, args, "train", world_size, 1)
    with played_rank(0, world_size):
        option = DistributedOption(distributed=True)
        options = _without_data(task).build_iter_options(args, option, "train")
        made = [make_deals(args, [options], make)[0] for make in (deal_in_file_order, deal)]
    return [
        EpochPlan(name, 1, each[0].batches) for name, each in zip(DEALS, made, strict=True) if each
    ]
