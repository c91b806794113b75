"""What synchronising adds to a batch, on real Gloo ranks, against the other ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed

from tests.benchmarks.machine import print_plot, print_table, print_title
from tests.benchmarks.rounds import Spread, Way, slowest, time_rounds
from tests.benchmarks.ways import ESPNET3, NO_SYNC, OURS, make_ways, make_windows
from tests.ranks import run_ranks

ROUNDS = 9
#: Rounds of what one pass costs once.
OPENINGS = 25
DEADLINE = 300.0


@dataclass(frozen=True)
class Setting:
    """Ranks, the milliseconds of a step, and the batches of a pass."""

    ranks: int
    step: float
    batches: int

    @property
    def name(self) -> str:
        return f"{self.step:g} ms"


SETTINGS = (
    Setting(2, 0, 500),
    Setting(2, 2, 100),
    Setting(2, 5, 60),
    Setting(2, 20, 24),
    Setting(4, 0, 100),
    Setting(4, 5, 40),
    Setting(8, 0, 40),
    Setting(8, 5, 24),
)


def time_settings(
    rank: int, world_size: int, settings: Sequence[Setting], windows: Sequence[int]
) -> list[dict[str, list[float]]]:
    """Return the seconds of each pass, by setting, way and round; on each rank."""
    results = []
    for setting in settings:
        step = setting.step / 1000
        ways = (
            make_windows(setting.batches, step, windows)
            if windows
            else make_ways(setting.batches, step)
        )
        results.append(time_rounds(ways, ROUNDS, meet=torch.distributed.barrier))
    return results


def time_openings(rank: int, world_size: int) -> dict[str, list[float]]:
    """Return the seconds until a pass's first batch, by way and round; the rest is dropped."""
    ways = make_ways(batches=8, step=0)
    openings: dict[str, Way] = {name: partial(lambda way: way, way) for name, way in ways.items()}
    return time_rounds(openings, OPENINGS, meet=torch.distributed.barrier)


def added(seconds: Mapping[str, Sequence[float]], batches: int) -> dict[str, Spread]:
    """Return the seconds that each way adds to a batch, over no sync in the same round.

    Examples:
        >>> added({"no sync": [1.0, 2.0], "ours": [2.0, 4.0]}, batches=10)
        {'ours': Spread(median=0.15000000000000002, low=0.1, high=0.2)}
    """
    return {
        way: Spread.of([(a - b) / batches for a, b in zip(times, seconds[NO_SYNC], strict=True)])
        for way, times in seconds.items()
        if way != NO_SYNC
    }


def measure(
    settings: Sequence[Setting], windows: Sequence[int] = ()
) -> dict[Setting, dict[str, Spread]]:
    """Measure settings: those of equally many ranks in one spawn."""
    found: dict[Setting, dict[str, Spread]] = {}
    for ranks in sorted({setting.ranks for setting in settings}):
        chosen = [setting for setting in settings if setting.ranks == ranks]
        outcomes = run_ranks(
            ranks, time_settings, chosen, windows, deadline=DEADLINE, group_timeout=60.0
        )
        for number, setting in enumerate(chosen):
            seconds = slowest([outcome[number] for outcome in outcomes])
            found[setting] = added(seconds, setting.batches)
    return found


def share(spreads: Mapping[str, Spread], way: str) -> float:
    """Return a way's added cost over that of espnet3's class."""
    return spreads[way].median / spreads[ESPNET3].median


def main() -> None:
    """Measure the ways, print a table for each number of ranks, and plot."""
    print_title(
        "Added cost per batch",
        "Time of a pass from its first batch to its end, less that of an unsynced pass in the "
        f"same round, per batch: microseconds, median of {ROUNDS} rounds (lowest to highest), of "
        "the slowest rank; every round runs all ways, in an order of its own. A step is a sleep, "
        "which leaves the cores to the ranks. The ratio is that of the medians, over espnet3's "
        "class.",
    )
    found = measure(SETTINGS)
    for ranks in sorted({setting.ranks for setting in SETTINGS}):
        rows = []
        for setting, spreads in found.items():
            if setting.ranks == ranks:
                for way, spread in spreads.items():
                    ratio = f"{share(spreads, way):.2f}"
                    rows.append((ranks, setting.name, way, spread.text(1e6), ratio))
        print_table(("ranks", "step", "way", "added, µs a batch", "ratio"), rows)
    print("Once a pass: from building the iterator to its first batch, 2 ranks.\n")
    openings = slowest(run_ranks(2, time_openings, deadline=DEADLINE))
    print_table(
        ("way", "µs a pass"),
        [(way, Spread.of(times).text(1e6)) for way, times in openings.items()],
    )
    plot(found)


def plot(found: Mapping[Setting, Mapping[str, Spread]]) -> None:
    """Plot the added cost with two ranks over the time of a step."""
    import matplotlib.pyplot as plt

    settings = [setting for setting in found if setting.ranks == 2]
    figure, axes = plt.subplots(figsize=(6, 4))
    for way in found[settings[0]]:
        heights = [found[setting][way].median * 1e6 for setting in settings]
        style = "o-" if way == OURS else "o--"
        axes.plot([f"{setting.step:g}" for setting in settings], heights, style, label=way)
    axes.set(xlabel="step (ms)", ylabel="added cost (µs a batch)", yscale="log")
    axes.legend()
    print_plot("added_cost", figure)
    plt.close(figure)
