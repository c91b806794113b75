"""What synchronising does to a launch-bound model on one GPU with NCCL.

    torchrun --standalone --nproc_per_node=1 -m tests.benchmarks.gpu

One rank can show what an iterator makes the host wait for: a flag on the GPU is read after all
that is queued there, whoever else takes part. It can't show the wait for other ranks, nor what a
flag's kernel costs beside the gradients' all-reduces. With one rank a `SyncedIterFactory`
exchanges nothing, so that the control group is also measured by force: its exchanges, of one
rank, run through all of our code.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch.profiler import ProfilerActivity, profile, record_function

from espnet_sync.consensus import ControlConsensus
from espnet_sync.epoch_sync_iterator import EpochSyncIterator
from espnet_sync.options import SyncOptions
from espnet_sync.roll_call import open_control_group
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.benchmarks.machine import print_table, print_title
from tests.benchmarks.rounds import Spread, ratios, time_rounds
from tests.benchmarks.ways import ESPNET3, NO_SYNC, espnet3s_class
from tests.factories import ListFactory

ROUNDS = 9
STEPS = 200
LAYERS = 60
OURS_FORCED = "ours, control group by force"
OURS_FLAG = "ours, flag on the default group"
OURS = "ours, as one rank gets it"
#: CUDA's calls in which the host waits for the GPU.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
#: The mark around each `next()` in a profile.
MARK = "next batch"


@dataclass(frozen=True)
class Waits:
    """How often the host waited within the iterator, and for how many seconds."""

    number: int
    seconds: float


class LaunchBound:
    """Many layers so small that launching their kernels takes longer than running them."""

    def __init__(self, device: torch.device) -> None:
        layers: list[torch.nn.Module] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(32, 32), torch.nn.ReLU()]
        self._model = torch.nn.Sequential(*layers).to(device)
        self._parameters = list(self._model.parameters())

    def step(self, batch: torch.Tensor) -> None:
        gradients = torch.autograd.grad(self._model(batch).square().mean(), self._parameters)
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=1e-3)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Initialise a group of one rank: torchrun's, or one of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        if torch.distributed.get_world_size() != 1:
            raise SystemExit("tests.benchmarks.gpu: takes one rank (--nproc_per_node=1)")
        yield
    finally:
        torch.distributed.destroy_process_group()


def make_builds(batches: list[Any]) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return how each way builds a pass over some batches."""
    inner = ListFactory({1: batches})
    source = partial(inner.build_iter, 1)
    theirs = espnet3s_class()
    options = SyncOptions(label="forced", backend="gloo")
    state = open_control_group(options)
    assert state.group is not None, state.fallback
    control = ControlConsensus(
        state.group, state.roll_call, options, epoch=1, factory=1, tell=lambda report: None
    )
    return {
        NO_SYNC: source,
        ESPNET3: lambda: theirs(source),
        OURS_FLAG: lambda: EpochSyncIterator(source),
        OURS_FORCED: lambda: EpochSyncIterator(source, consensus=control),
        OURS: lambda: SyncedIterFactory(inner).build_iter(1),
    }


def count_waits(events: Iterable[Any], names: Iterable[str]) -> Waits:
    """Count the events of some names that lie within a `MARK` on the same thread.

    Args:
        events: Of torch's profiler.
        names: What counts as a wait.
    """
    events = list(events)
    marks = [event for event in events if event.name == MARK]
    waits = [
        event
        for event in events
        if event.name in set(names)
        and any(
            mark.thread == event.thread
            and mark.time_range.start <= event.time_range.start <= mark.time_range.end
            for mark in marks
        )
    ]
    return Waits(len(waits), sum(event.time_range.elapsed_us() for event in waits) / 1e6)


def profile_waits(
    build: Callable[[], Iterable[Any]], model: LaunchBound, names: Iterable[str] = WAITS
) -> Waits:
    """Profile a pass, and return the waits within its iterator."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    batches = iter(build())
    with profile(activities=activities) as profiler:
        while True:
            with record_function(MARK):
                batch = next(batches, None)
            if batch is None:
                break
            model.step(batch)
    return count_waits(profiler.events() or [], names)


def measure(
    device: torch.device, steps: int = STEPS, rounds: int = ROUNDS
) -> tuple[dict[str, list[float]], dict[str, Waits]]:
    """Return the seconds of a pass, by way and round, and the waits of one, by way."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    model = LaunchBound(device)

    def run(build: Callable[[], Iterable[Any]]) -> None:
        for batch in build():
            model.step(batch)
        finish()

    with one_rank(device):
        builds = make_builds([torch.randn(8, 32, device=device)] * steps)
        ways = {name: partial(partial, run, build) for name, build in builds.items()}
        seconds = time_rounds(ways, rounds, meet=finish)
        waits = {name: profile_waits(build, model) for name, build in builds.items()}
    return seconds, waits


def main() -> None:
    """Measure on the GPU, and print a table; say so where there is none."""
    print_title(
        "GPU",
        f"One GPU, NCCL, one rank; {LAYERS} tiny layers, so that launching kernels is what takes "
        f"time; passes of {STEPS} steps, median of {ROUNDS} rounds (lowest to highest). Host "
        "waits: CUDA's synchronising calls within the iterator, from torch's profiler.",
    )
    if not torch.cuda.is_available():
        print(
            "NOT RUN: torch sees no CUDA device here. Where there is one:\n"
            "torchrun --standalone --nproc_per_node=1 -m tests.benchmarks.gpu\n"
        )
        return
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    print(f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}; {time.ctime()}\n")
    seconds, waits = measure(device)
    rows = [
        (
            name,
            Spread.of([STEPS / value for value in times]).text(),
            f"{Spread.of(ratios(seconds[NO_SYNC], times)).median:.3f}",
            f"{waits[name].number / STEPS:.2f}",
            f"{waits[name].seconds / STEPS * 1e6:.1f}",
        )
        for name, times in seconds.items()
    ]
    headers = ("way", "steps a second", "over no sync", "host waits a batch", "µs waited a batch")
    print_table(headers, rows)


if __name__ == "__main__":
    main()
