"""How the cost of an agreement grows with the number of ranks."""

import math
import resource
import statistics
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed

from espnet_sync.options import DEFAULT_LOOKAHEAD
from espnet_sync.process_groups import ControlGroup
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.benchmarks.machine import print_plot, print_table, print_title
from tests.benchmarks.rounds import Spread, Way, slowest, time_rounds
from tests.benchmarks.ways import ESPNET3, espnet3s_class, open_pass
from tests.factories import NumberFactory
from tests.ranks import run_ranks

#: Agreements of a round, by the number of processes.
PROCESSES = {2: 300, 4: 100, 8: 40, 16: 16}
#: Agreements that are timed, by the number of threads.
THREADS = {2: 200, 8: 40, 32: 12, 64: 6, 128: 4}
ROUNDS = 5
DEADLINE = 200.0
OURS = "ours, lookahead=0"
RAW = "Gloo's all-reduce alone"


def reduce_raw(times: int) -> None:
    """Collective: every rank reduces what an agreement exchanges, and nothing else."""
    numbers = torch.zeros(ControlGroup.WIDTH, dtype=torch.int64)
    for _ in range(times):
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN)


def time_processes(rank: int, world_size: int, agreements: int) -> dict[str, list[float]]:
    """Return the seconds of so many agreements, one before each batch, by way and round."""
    inner = NumberFactory(agreements + 1)
    factory = SyncedIterFactory(inner, lookahead=0)
    theirs = espnet3s_class()
    source = partial(inner.build_iter, 1)
    ways: dict[str, Way] = {
        RAW: lambda: partial(reduce_raw, agreements),
        ESPNET3: partial(open_pass, lambda: theirs(source), 0),
        OURS: partial(open_pass, partial(factory.build_iter, 1), 0),
    }
    return time_rounds(ways, ROUNDS, meet=torch.distributed.barrier)


def run_threads(ranks: int, function: Callable[[int], None]) -> None:
    """Run a function on one thread a rank, and raise what the first of them raised."""
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            function(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def time_threads(ranks: int, agreements: int) -> list[float]:
    """Return the seconds of each exchange among raw Gloo ranks, all threads of this process."""
    store = torch.distributed.HashStore()
    limit = timedelta(seconds=120)
    seconds: list[list[float]] = [[] for _ in range(ranks)]
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MIN

    def work(rank: int) -> None:
        group = torch.distributed.ProcessGroupGloo(store, rank, ranks, limit)
        numbers = torch.zeros(ControlGroup.WIDTH, dtype=torch.int64)
        for _ in range(agreements + 1):
            started = time.perf_counter()
            group.allreduce([numbers], options).wait()
            seconds[rank].append(time.perf_counter() - started)

    run_threads(ranks, work)
    # Once all have met in the first, each is as long as on the rank that waits the longest.
    return [max(times) for times in zip(*(rank[1:] for rank in seconds), strict=True)]


def enough_files(ranks: int) -> bool:
    """Let this process open a socket for each end of each pair of ranks, if it may."""
    needed = ranks * ranks + 500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return False
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    return True


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent of the power law that fits best.

    Examples:
        >>> round(exponent([2, 4, 8], [1.0, 4.0, 16.0]), 3)
        2.0
    """
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(value) for value in values]
    ).slope


def main() -> None:
    """Time agreements among processes and among threads, print tables, and plot."""
    print_title(
        "Growth",
        "Microseconds of one agreement, with nothing to do between two: median (lowest to "
        f"highest) of {ROUNDS} rounds for processes, and of single exchanges for threads. Gloo's "
        f"all-reduce is of the {ControlGroup.WIDTH} int64 that an agreement exchanges; espnet3's "
        "of a single float. All ranks share the cores.",
    )
    processes: dict[int, dict[str, Spread]] = {}
    for ranks, agreements in PROCESSES.items():
        arguments = (agreements,)
        outcomes = run_ranks(
            ranks, time_processes, *arguments, deadline=DEADLINE, group_timeout=60.0
        )
        processes[ranks] = {
            way: Spread.of([value / agreements for value in times])
            for way, times in slowest(outcomes).items()
        }
    rows = [
        (
            ranks,
            *(spreads[way].text(1e6) for way in (RAW, ESPNET3, OURS)),
            f"{spreads[OURS].median / spreads[RAW].median:.2f}",
        )
        for ranks, spreads in processes.items()
    ]
    print_table(("processes", RAW, ESPNET3, OURS, "ours over Gloo's"), rows)
    threads = {
        ranks: Spread.of(time_threads(ranks, agreements))
        for ranks, agreements in THREADS.items()
        if enough_files(ranks)
    }
    for ranks in THREADS.keys() - threads:
        print(f"Not run: {ranks} ranks as threads need {ranks * ranks} open files.\n")
    print_table(
        ("threads of one process", RAW),
        [(ranks, spread.text(1e6)) for ranks, spread in threads.items()],
    )
    say_what_follows(threads)
    plot(processes, threads)


def say_what_follows(threads: dict[int, Spread]) -> None:
    """Print what the figures say of larger jobs."""
    sizes = [ranks for ranks in threads if ranks > 2]
    medians = [threads[ranks].median for ranks in sizes]
    largest = sizes[-1]
    hops = 2 * (largest - 1)
    text = (
        "Gloo reduces in a ring: each number makes 2(n - 1) hops, one after another, so that time "
        f"grows with n and not with its square: here as n^{exponent(sizes, medians):.1f} from "
        f"{sizes[0]} to {largest} ranks. At {largest} that is {hops} hops of "
        f"{medians[-1] / hops * 1e6:.0f} µs, in each of which the cores that all ranks share "
        f"carry {ControlGroup.WIDTH} messages. With a core for each rank a hop is about one: "
        f"{medians[-1] / hops / ControlGroup.WIDTH * 1e6:.0f} µs here, and an agreement of "
        f"{largest} ranks some {medians[-1] / ControlGroup.WIDTH * 1e3:.0f} ms. It goes on while "
        f"the trainer is busy with the {DEFAULT_LOOKAHEAD} batches before, and costs time only "
        "where it takes longer than they do."
    )
    print(textwrap.fill(text, 99) + "\n")


def plot(processes: dict[int, dict[str, Spread]], threads: dict[int, Spread]) -> None:
    """Plot the time of an agreement over the number of ranks."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for way in (RAW, ESPNET3, OURS):
        heights = [spreads[way].median * 1e6 for spreads in processes.values()]
        axes.plot(list(processes), heights, "o-", label=f"{way} (processes)")
    heights = [spread.median * 1e6 for spread in threads.values()]
    axes.plot(list(threads), heights, "s--", label=f"{RAW} (threads)")
    axes.set(xlabel="ranks", ylabel="one agreement (µs)", xscale="log", yscale="log")
    axes.set_xticks([*threads, 4, 16], [str(ranks) for ranks in (*threads, 4, 16)])
    axes.legend()
    print_plot("growth", figure)
    plt.close(figure)
