"""What synchronising adds to a batch, by `lookahead`: where its default comes from."""

from collections.abc import Mapping

from espnet_sync.options import DEFAULT_LOOKAHEAD
from tests.benchmarks.added_cost import ROUNDS, Setting, measure, share
from tests.benchmarks.machine import print_plot, print_table, print_title
from tests.benchmarks.rounds import Spread
from tests.benchmarks.ways import ESPNET3

WINDOWS = (0, 1, 2, 4, 6, 8)
SETTINGS = (Setting(2, 0, 500), Setting(2, 2, 100), Setting(2, 5, 60))


def main() -> None:
    """Measure the added cost of several windows, print a table, and plot the curve."""
    print_title(
        "Added cost by lookahead",
        f"As above, with {SETTINGS[0].ranks} ranks, for several values of `lookahead` (W): "
        f"microseconds a batch, median of {ROUNDS} rounds (lowest to highest), and the ratio over "
        f"espnet3's class. The default is {DEFAULT_LOOKAHEAD}. A rank holds up to 2W + 1 batches.",
    )
    found = measure(SETTINGS, WINDOWS)
    headers = ["way", "batches held"]
    for setting in SETTINGS:
        headers += [f"{setting.name}: µs", "ratio"]
    rows = []
    for way in (ESPNET3, *map(str, WINDOWS)):
        held = "1" if way == ESPNET3 else f"{2 * int(way) + 1}"
        row = [way if way == ESPNET3 else f"lookahead={way}", held]
        for setting in SETTINGS:
            spreads = found[setting]
            row += [spreads[way].text(1e6), f"{share(spreads, way):.2f}"]
        rows.append(row)
    print_table(headers, rows)
    plot(found)


def plot(found: Mapping[Setting, Mapping[str, Spread]]) -> None:
    """Plot the curve of each step time."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for setting, spreads in found.items():
        shares = [share(spreads, str(window)) for window in WINDOWS]
        axes.plot(WINDOWS, shares, "o-", label=f"steps of {setting.name}")
    axes.set(xlabel="lookahead", ylabel="added cost over espnet3's class", ylim=(0, None))
    axes.legend()
    print_plot("lookahead", figure)
    plt.close(figure)
