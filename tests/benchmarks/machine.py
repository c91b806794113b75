"""What a benchmark prints around its figures: where they were measured, and tables for README."""

import os
import platform
import textwrap
from collections.abc import Sequence
from pathlib import Path

import espnet2
import torch
from tabulate import tabulate

import espnet_sync

#: Where plots go: git ignores it.
PLOTS = Path(__file__).parent / "plots"


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def versions() -> str:
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, espnet "
        f"{espnet2.__version__}, espnet_sync {espnet_sync.__version__}"
    )


def print_title(title: str, text: str) -> None:
    """Print a benchmark's title, what it measures, and the hardware and versions."""
    print(f"\n## {title}\n\n{textwrap.fill(text, 99)}")
    print(textwrap.fill(f"On {processor()}; {versions()}.", 99) + "\n", flush=True)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table in Markdown, numbers to the right."""
    is_number = [
        all(str(row[column])[:1].isdigit() or str(row[column])[:1] == "-" for row in rows)
        for column in range(len(headers))
    ]
    sides = ["right" if number else "left" for number in is_number]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=sides))
    print(flush=True)


def print_plot(name: str, figure: object) -> None:
    """Save a matplotlib figure in `PLOTS`, and print where."""
    PLOTS.mkdir(exist_ok=True)
    file = PLOTS / f"{name}.png"
    figure.savefig(file, dpi=120, bbox_inches="tight")  # type: ignore[attr-defined]
    print(f"Plot: {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}\n")
