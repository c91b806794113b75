"""What a pass gave, and what ending it together cost: its line, its table and its plot.

`python -m espnet_sync.report exp/.../epoch_sync.jsonl` shows the epochs of one run or of several.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: What a run writes its epochs to, in its output directory.
FILE_NAME = "epoch_sync.jsonl"
#: Okabe and Ito's palette, which the colour-blind can tell apart: for ranks, and for kinds.
_RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_RANK_MARKERS = "os^Dv<>P"
#: With more ranks than this, the plot shows their span and not each.
_SHOWN_RANKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank's part in a pass.

    Attributes:
        rank: The rank, or None where a bare `EpochSyncIterator` can't know its own.
        pulled: Batches taken from the rank's source.
        discarded: Batches of its first pass over the source that were not handed out.
        repeated: Batches handed out from a further pass over the source.
        waited: Seconds spent in agreements.
    """

    rank: int | None
    pulled: int
    discarded: int = 0
    repeated: int = 0
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """How one pass ended, the same on every rank.

    Attributes:
        label: The iterator's label, e.g. `train`.
        epoch: The epoch as the inner factory saw it, or None for a bare iterator.
        batches: Batches yielded, the same number on each rank.
        ended_by: The ranks whose running out ended the pass, ascending: the first with
            `shortest`, the last with `longest`. Empty after `request_stop()`, and where a bare
            iterator can't know.
        ranks: A `RankReport` for each rank, in rank order; a bare iterator knows its own alone.

    Examples:
        >>> report = SyncReport(
        ...     label="train",
        ...     epoch=3,
        ...     batches=2,
        ...     ended_by=(1,),
        ...     ranks=(
        ...         RankReport(rank=0, pulled=3, discarded=1, waited=0.25),
        ...         RankReport(rank=1, pulled=2, waited=0.5),
        ...     ),
        ... )
        >>> print(report)
        [train] epoch 3: 2 batches on each of 2 ranks; rank 1 ran out first; 1 batch discarded; \
waited 0.5 s at most (rank 1)
    """

    label: str
    epoch: int | None
    batches: int
    ended_by: tuple[int, ...]
    ranks: tuple[RankReport, ...]

    @property
    def discarded(self) -> int:
        """Batches that all ranks together discarded."""
        return sum(rank.discarded for rank in self.ranks)

    @property
    def repeated(self) -> int:
        """Batches that all ranks together repeated."""
        return sum(rank.repeated for rank in self.ranks)

    @property
    def slowest(self) -> RankReport:
        """The rank that waited longest."""
        return max(self.ranks, key=lambda rank: rank.waited)

    def __str__(self) -> str:
        """Return the pass's line for the log."""
        parts = [f"{place(self.label, self.epoch)}: {count(self.batches, 'batch', 'batches')}"]
        if len(self.ranks) > 1:
            parts[0] += f" on each of {len(self.ranks)} ranks"
            if not self.ended_by:
                parts.append("stopped on request")
            elif len(self.ended_by) == len(self.ranks):
                parts.append("all ran out together")
            else:
                when = "last" if any(rank.repeated for rank in self.ranks) else "first"
                parts.append(f"{name_ranks(self.ended_by)} ran out {when}")
        elif not self.ended_by:
            parts.append("stopped on request")
        for word in ("discarded", "repeated"):
            total = getattr(self, word)
            if total:
                parts.append(f"{count(total, 'batch', 'batches')} {word}")
        if len(self.ranks) > 1:
            parts.append(f"waited {self.slowest.waited:.1f} s at most (rank {self.slowest.rank})")
        return "; ".join(parts)


Run = tuple[str, list[SyncReport]]


def append_report(file: Path, report: SyncReport) -> None:
    """Append a pass's report to a file, as one line of JSON; called on rank 0 alone.

    What a run left unfinished there, when it was killed or its disk was full, gets its own line.

    Raises:
        OSError: If the file can't be written.
    """
    with open(file, "ab+") as opened:
        if opened.tell() > 0:
            opened.seek(-1, os.SEEK_END)
            if opened.read() != b"\n":
                opened.write(b"\n")
        opened.write(json.dumps(asdict(report)).encode() + b"\n")


def read_reports(path: Path) -> list[SyncReport]:
    """Read what `append_report` wrote, in the order of epochs.

    A line that a killed run left unfinished is passed over; of an epoch that a resumed run went
    through again, the last report counts.

    Args:
        path: The file, or the directory that holds it as `epoch_sync.jsonl`.

    Raises:
        ValueError: If there is none, it holds something else, or no epoch.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ValueError(
            f"{file} does not exist: give the {FILE_NAME} that a training under espnet_sync "
            "writes to its --output_dir, or that directory"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} can't be read as text: {error}") from None
    reports: dict[tuple[str, int], SyncReport] = {}
    foreign = []
    for number, line in enumerate(lines, start=1):
        row: Any = None
        try:
            row = json.loads(line)
            report = _read_row(row)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            # Empty, or cut off: the last one, or one before a rerun.
            if row is not None or not '{"label"'.startswith(line[:8]):
                foreign.append(f"{file}, line {number}: {line[:40]!r} is no report of an epoch")
            continue
        # A training that went on from an earlier epoch, or started again, begins there.
        epoch = report.epoch or 0
        for key in [key for key in reports if key[0] == report.label and key[1] >= epoch]:
            del reports[key]
        reports[report.label, epoch] = report
    if not reports and foreign:
        raise ValueError(f"{foreign[0]}; is it another file than the {FILE_NAME} of a training?")
    if not reports:
        raise ValueError(f"{file} holds no epoch: has the run ended its first one?")
    if foreign:
        logging.getLogger().warning("%s: passed over, %d in all", foreign[0], len(foreign))
    return [reports[key] for key in sorted(reports, key=lambda key: (key[1], key[0]))]


def _read_row(row: Any) -> SyncReport:
    """Return a report from its JSON, with every type as it was written."""
    ranks = tuple(RankReport(**rank) for rank in row["ranks"])
    report = SyncReport(**{**row, "ended_by": tuple(row["ended_by"]), "ranks": ranks})
    numbers = [report.epoch, report.batches, *report.ended_by]
    numbers += [
        number for each in ranks for number in (each.pulled, each.discarded, each.repeated)
    ]
    if not (
        ranks
        and isinstance(report.label, str)
        and all(type(number) is int for number in numbers)
        and all(isinstance(each.waited, (int, float)) for each in ranks)
    ):
        raise ValueError("a field of another type")
    return report


def format_table(runs: Sequence[Run]) -> str:
    """Return the epochs of some runs as a table, those of an epoch together.

    Args:
        runs: Each run's name, and its reports.

    Raises:
        ImportError: If tabulate is not installed.
    """
    from tabulate import tabulate

    rows = []
    for name, reports in runs:
        for report in reports:
            slowest = report.slowest
            row = {
                "mode": report.label,
                "epoch": report.epoch,
                "run": name,
                "ranks": len(report.ranks),
                "batches per rank": report.batches,
                "ended by": _name_briefly(report.ended_by, len(report.ranks)),
                "discarded": report.discarded,
                "repeated": report.repeated,
                "waited at most": f"{slowest.waited:.1f} s (rank {slowest.rank})",
            }
            if len(runs) == 1:
                del row["run"]
            rows.append(row)
    rows.sort(key=lambda row: (row["mode"], row["epoch"]))
    return tabulate(rows, headers="keys")


def _name_briefly(ranks: tuple[int, ...], world_size: int) -> str:
    if not ranks:
        return "request"
    if len(ranks) == world_size:
        return "all ranks"
    shown = name_ranks(ranks[:4])
    return shown if len(ranks) <= 4 else f"{shown}, ... ({len(ranks)})"


def plot_reports(runs: Sequence[Run], file: Path) -> None:
    """Draw batches, losses and waits over the epochs: a column for each run and mode.

    Args:
        runs: Each run's name, and its reports.
        file: Where to, with a suffix that matplotlib knows, e.g. `.png`.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If the file can't be written.
        ValueError: If matplotlib does not know its suffix.
    """
    # NOTE: not through pyplot, whose state belongs to the training that this may run in.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = [
        (name, label, [each for each in reports if each.label == label])
        for label in sorted({each.label for _, reports in runs for each in reports})
        for name, reports in runs
        if any(each.label == label for each in reports)
    ]
    # NOTE: margins by hand, in inches: matplotlib's own layouts take as long as all the rest.
    width, height = 2.8 + 4.2 * len(columns), 7.5
    figure = Figure(figsize=(width, height))
    margins = {"left": 0.8 / width, "right": 1 - 2.0 / width, "bottom": 0.6 / height}
    margins |= {"top": 1 - 0.95 / height, "wspace": 0.22, "hspace": 0.12}
    grid = figure.subplots(3, len(columns), squeeze=False, sharex="col", gridspec_kw=margins)
    figure.suptitle("How the ranks ended their epochs together")
    columns_of: dict[str, list[Any]] = {}
    for (name, label, reports), axes in zip(columns, grid.T, strict=True):
        epochs = [report.epoch or 0 for report in reports]
        axes[0].set_title(f"{label}\n{name}" if len(runs) > 1 else label)
        _plot_batches(axes[0], epochs, reports)
        _plot_losses(axes[1], epochs, reports)
        _plot_waits(axes[2], epochs, reports)
        axes[2].set_xlabel("epoch")
        axes[2].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        columns_of.setdefault(label, []).append(axes)
    # The runs of a mode are there to be compared.
    for columns_of_mode in columns_of.values():
        for row, axes in enumerate(zip(*columns_of_mode, strict=True)):
            lowest = min(axis.get_ylim()[0] for axis in axes) if row == 0 else 0
            highest = max(axis.get_ylim()[1] for axis in axes)
            for axis in axes:
                axis.set_ylim(lowest, highest if row == 0 else max(1.05 * highest, 0.1))
    texts = ("batches per rank", "batches, all ranks", "seconds in agreements")
    for axes, text in zip(grid, texts, strict=True):
        axes[0].set_ylabel(text)
        shown = [axis.get_legend_handles_labels() for axis in axes]
        signs = {
            text: sign for signs, texts in shown for sign, text in zip(signs, texts, strict=True)
        }
        axes[-1].legend(
            signs.values(), signs, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small"
        )
        for axis in axes:
            axis.grid(axis="y", alpha=0.3)
            axis.set_axisbelow(True)
    for axis in grid[0]:
        axis.ticklabel_format(axis="y", useOffset=False)
    for axis in grid[:2].flat:
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.savefig(file, dpi=120)


def _plot_batches(axis: Any, epochs: list[int], reports: list[SyncReport]) -> None:
    pulled = [[rank.pulled for rank in report.ranks] for report in reports]
    world_size = max(map(len, pulled))
    if world_size <= _SHOWN_RANKS:
        for rank in range(world_size):
            points = [
                (x, row[rank]) for x, row in zip(epochs, pulled, strict=True) if rank < len(row)
            ]
            # Beside one another, so that none hides another.
            shift = 0.3 * ((rank + 0.5) / world_size - 0.5)
            axis.plot(
                [x + shift for x, _ in points],
                [y for _, y in points],
                _RANK_MARKERS[rank % len(_RANK_MARKERS)],
                color=_RANK_COLOURS[rank % len(_RANK_COLOURS)],
                label=f"pulled, rank {rank}",
            )
    else:
        lowest, highest = (list(map(each, pulled)) for each in (min, max))
        label, colour = "pulled, all ranks", _RANK_COLOURS[4]
        axis.vlines(epochs, lowest, highest, color=colour, linewidth=6, label=label)
    axis.margins(y=0.2)
    axis.hlines(
        [report.batches for report in reports],
        [epoch - 0.35 for epoch in epochs],
        [epoch + 0.35 for epoch in epochs],
        color="black",
        label="handed out",
    )


def _plot_losses(axis: Any, epochs: list[int], reports: list[SyncReport]) -> None:
    bottom = [0] * len(epochs)
    for word, colour, hatch in (("discarded", "#D55E00", ""), ("repeated", "#56B4E9", "//")):
        heights = [getattr(report, word) for report in reports]
        axis.bar(
            epochs, heights, 0.6, bottom, color=colour, hatch=hatch, edgecolor="black", label=word
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


def _plot_waits(axis: Any, epochs: list[int], reports: list[SyncReport]) -> None:
    for pick, style, word in ((max, "^-", "longest"), (min, "v--", "shortest")):
        waits = [pick(rank.waited for rank in report.ranks) for report in reports]
        colour = _RANK_COLOURS[0 if pick is max else 1]
        axis.plot(epochs, waits, style, color=colour, label=f"{word} wait of a rank")


def main(argv: Sequence[str] | None = None) -> int:
    """Show the epochs of some runs, and return the exit code.

    Args:
        argv: The words after the program's name; None takes `sys.argv`'s.
    """
    parser = argparse.ArgumentParser(
        prog="python -m espnet_sync.report",
        description="Show how the ranks of a training ended each epoch, for one run or several.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help=f"the {FILE_NAME} of a training, or its output directory",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the epochs, too")
    arguments = parser.parse_args(argv)
    try:
        runs = [(name, read_reports(path)) for name, path in name_runs(arguments.runs).items()]
        sys.stdout.write(format_table(runs) + "\n")
        if arguments.plot is not None:
            if arguments.plot.is_dir():
                raise ValueError(f"--plot {arguments.plot} is a directory: give FILE.png")
            plot_reports(runs, arguments.plot)
    except ImportError as error:
        message = f"{error}: pip install tabulate matplotlib"
    except (OSError, ValueError) as error:
        message = str(error)
    else:
        return 0
    sys.stderr.write(f"espnet_sync.report: error: {message}\n")
    return 2


def name_runs(paths: Sequence[Path]) -> Mapping[str, Path]:
    """Return short names for some runs: where their paths differ.

    Examples:
        >>> list(name_runs([Path("exp/a/epoch_sync.jsonl"), Path("exp/b")]))
        ['a', 'b']
    """
    folders = [path.parent if path.name.endswith(".jsonl") else path for path in paths]
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, paths, strict=True))


def place(label: str, epoch: int | None) -> str:
    """Return how messages name a pass.

    Examples:
        >>> place("train", 3), place("", None)
        ('[train] epoch 3', '[espnet_sync] this pass')
    """
    return f"[{label or 'espnet_sync'}] " + ("this pass" if epoch is None else f"epoch {epoch}")


def count(number: int, one: str, many: str) -> str:
    """Return a number with its noun.

    Examples:
        >>> count(1, "batch", "batches"), count(0, "batch", "batches")
        ('1 batch', '0 batches')
    """
    return f"{number:,} {one if number == 1 else many}"


def name_ranks(ranks: tuple[int, ...]) -> str:
    """Return the names of some ranks, as messages give them.

    Examples:
        >>> name_ranks((2,)), name_ranks((0, 2, 5))
        ('rank 2', 'ranks 0, 2, 5')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} " + ", ".join(map(str, ranks))


if __name__ == "__main__":
    sys.exit(main())
