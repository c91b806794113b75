"""The ways to end an epoch together that are compared, each as a pass over simulated steps."""

import importlib.util
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.benchmarks.rounds import Way
from tests.factories import NumberFactory

NO_SYNC = "no sync"
JOIN = "torch's Join"
ESPNET3 = "espnet3's class"
DEFAULT_BACKEND = 'ours, backend="default"'
OURS = "ours"


def espnet3s_class() -> Any:
    """Return `espnet3.components.data.epoch_sync_iterator.EpochSyncIterator`.

    NOTE: from its file, since importing the package takes some 10 s on every rank.
    """
    package = importlib.util.find_spec("espnet3")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "components/data/epoch_sync_iterator.py"
    spec = importlib.util.spec_from_file_location("espnet3s_epoch_sync_iterator", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EpochSyncIterator


class Announced(Joinable):
    """Tells torch's `Join` of each step, as DDP does; has no collectives to be shadowed."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return torch.distributed.group.WORLD


def open_pass(build: Callable[[], Iterable[Any]], step: float) -> Callable[[], None]:
    """Build a pass and take its first batch; return what goes through the rest.

    A step is simulated by a sleep, which leaves the cores to the ranks.
    """
    batches = iter(build())
    next(batches)

    def run() -> None:
        for _ in batches:
            if step:
                time.sleep(step)

    return run


def open_joined_pass(build: Callable[[], Iterable[Any]], step: float) -> Callable[[], None]:
    """Do so under torch's `Join`: announce each step, and wait for that after it, as DDP does."""
    announced = Announced()
    batches = iter(build())
    next(batches)

    def run() -> None:
        with Join([announced]):
            for _ in batches:
                work = Join.notify_join_context(announced)
                if step:
                    time.sleep(step)
                work.wait()

    return run


def make_ways(batches: int, step: float) -> dict[str, Way]:
    """Return all ways, for ranks that hold equally many batches.

    Args:
        batches: Of a pass, after its first.
        step: Seconds of a step.
    """
    inner = NumberFactory(batches + 1)
    source = partial(inner.build_iter, 1)
    theirs = espnet3s_class()
    default = SyncedIterFactory(inner, label="default", backend="default")
    ours = SyncedIterFactory(inner, label="ours")
    return {
        NO_SYNC: partial(open_pass, source, step),
        JOIN: partial(open_joined_pass, source, step),
        ESPNET3: partial(open_pass, lambda: theirs(source), step),
        DEFAULT_BACKEND: partial(open_pass, partial(default.build_iter, 1), step),
        OURS: partial(open_pass, partial(ours.build_iter, 1), step),
    }


def make_windows(batches: int, step: float, windows: Iterable[int]) -> dict[str, Way]:
    """Return no sync, espnet3's class, and ours with several values of `lookahead`."""
    ways = make_ways(batches, step)
    inner = NumberFactory(batches + 1)
    factories = {w: SyncedIterFactory(inner, label=f"{w}", lookahead=w) for w in windows}
    return {
        NO_SYNC: ways[NO_SYNC],
        ESPNET3: ways[ESPNET3],
        **{
            str(window): partial(open_pass, partial(factory.build_iter, 1), step)
            for window, factory in factories.items()
        },
    }
