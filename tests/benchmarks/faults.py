"""What each surviving rank sees of a fault, and after how long; beside it espnet3's class."""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from torch.utils.data import DataLoader, Dataset

from espnet_sync.errors import EpochSyncError, OutOfStepError
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.benchmarks.machine import print_table, print_title
from tests.benchmarks.ways import espnet3s_class
from tests.ranks import Outcome, try_ranks

RANKS = 3
VICTIM = 1
BATCHES = 12
AT = 5
#: Seconds, of the default group, and of our option for the same.
TIMEOUT = 15.0


class Clock:
    """Keeps in a file when the fault happened."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "happened"

    def start(self) -> None:
        self._file.write_text(str(time.time()))

    def seconds(self) -> float:
        return time.time() - float(self._file.read_text())


class Batches(AbsIterFactory):
    """Counts from 100 times the epoch; raises on the victim where the fault is that."""

    def __init__(self, clock: Clock, raises: bool) -> None:
        self._clock = clock
        self._raises = raises

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
        for index in range(BATCHES):
            if self._raises and index == AT:
                self._clock.start()
                raise ValueError("a torn file")
            yield 100 * epoch + index


class Loaded(Dataset[int]):
    """The process that loads item `AT` dies, where the fault is that."""

    def __init__(self, clock: Clock, dies: bool) -> None:
        self._clock = clock
        self._dies = dies

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> int:
        if self._dies and index == AT:
            self._clock.start()
            os._exit(1)
        return 100 + index


class Loaders(AbsIterFactory):
    def __init__(self, dataset: Loaded) -> None:
        self._dataset = dataset

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> DataLoader[int]:
        # The harness starts its ranks as daemons, which may have no children.
        multiprocessing.current_process().daemon = False
        return DataLoader(
            self._dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"
        )


def ours(inner: AbsIterFactory, epoch: int, label: str = "train") -> Any:
    return SyncedIterFactory(inner, label=label, timeout=TIMEOUT).build_iter(epoch)


def espnet3s(inner: AbsIterFactory, epoch: int, label: str = "train") -> Any:
    return espnet3s_class()(partial(inner.build_iter, epoch))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(0)


def sleep() -> None:
    time.sleep(TIMEOUT + 5)


#: What happens on the victim while it holds a batch.
IN_THE_LOOP: dict[str, Callable[[], None]] = {
    "is killed (SIGKILL)": kill,
    "exits with code 0": leave,
    "sleeps past the timeout": sleep,
}
FAULTS = (
    "its source raises",
    "a loader's worker dies",
    *IN_THE_LOOP,
    "breaks out of its loop alone",
    "iterates another iterator alone",
    "is in another epoch",
)


@dataclass(frozen=True)
class Sight:
    """What one rank saw, and how many seconds after the fault."""

    text: str
    seconds: float


def run_rank(rank: int, world_size: int, fault: str, make: Any, folder: Path) -> Sight:
    """Iterate one epoch, and reduce a number on the default group as a validation would."""
    clock = Clock(folder)
    is_victim = rank == VICTIM
    inner: AbsIterFactory = Batches(clock, is_victim and fault == "its source raises")
    if fault == "a loader's worker dies":
        inner = Loaders(Loaded(clock, is_victim))
    epochs = set()
    try:
        if fault == "is in another epoch" and is_victim:
            clock.start()
        for batch in make(inner, 2 if fault == "is in another epoch" and is_victim else 1):
            epochs.add(batch // 100)
            if not is_victim or batch % 100 != AT:
                continue
            if fault in IN_THE_LOOP:
                clock.start()
                IN_THE_LOOP[fault]()
            elif fault.startswith("breaks"):
                clock.start()
                break
            elif fault.startswith("iterates"):
                clock.start()
                list(make(Batches(clock, False), 1, label="valid"))
        total = torch.tensor([float(rank + 1)])
        torch.distributed.all_reduce(total)
    except Exception as error:
        if is_victim:
            raise
        return Sight(describe(error), clock.seconds())
    right = RANKS * (RANKS + 1) / 2
    after = (
        "" if total.item() == right else f"; its validation read {total.item():g} for {right:g}"
    )
    return Sight(f"nothing{after}", clock.seconds())


def describe(error: Exception) -> str:
    """Return an error's class, and what it names."""
    name = f"`{type(error).__name__}`"
    if isinstance(error, OutOfStepError):
        return f"{name}, with each rank's place"
    if isinstance(error, EpochSyncError):
        reasons = getattr(error, "reasons", {})
        why = ", with the reason" if any(reasons.values()) else ""
        return f"{name}: {', '.join(f'rank {rank}' for rank in error.ranks)}{why}"  # type: ignore[attr-defined]
    return f"{name}: {short(str(error))}"


def short(text: str) -> str:
    """Return what torch says, without its file and its advice."""
    line = text.strip().splitlines()[0].partition("] ")[2] or text.strip().splitlines()[0]
    for advice in (". This is", " [", " to complete"):
        line = line.partition(advice)[0]
    return line


def summary(outcomes: list[Outcome]) -> tuple[str, str]:
    """Return what the survivors saw, and the seconds of the last."""
    sights = {rank: o.value for rank, o in enumerate(outcomes) if rank != VICTIM}
    texts = {sight.text if sight else "died" for sight in sights.values()}
    seconds = max(sight.seconds for sight in sights.values() if sight)
    if len(texts) == 1:
        return texts.pop(), f"{seconds:.1f}"
    return "; ".join(f"rank {r}: {sight.text}" for r, sight in sights.items()), f"{seconds:.1f}"


def measure(fault: str, make: Any) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return summary(
            try_ranks(RANKS, run_rank, fault, make, Path(folder), group_timeout=TIMEOUT)
        )


def main() -> None:
    """Measure all faults under both classes, and print a table for README."""
    print_title(
        "Faults",
        f"{RANKS} ranks with Gloo. Rank {VICTIM} has the fault, at batch {AT}; seconds from the "
        f"fault until the last of ranks 0 and 2 sees it; timeouts {TIMEOUT:.0f} s.",
    )
    rows = [(f"rank {VICTIM}: {f}", *measure(f, ours), *measure(f, espnet3s)) for f in FAULTS]
    print_table(("fault", "the others see", "s", "under espnet3's class", "s"), rows)
