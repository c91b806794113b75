"""Where the time of an agreement goes: Gloo's and torch's part, and ours by file."""

import cProfile
import logging
import pstats
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import espnet_sync
from espnet_sync.process_groups import ControlGroup
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.benchmarks.machine import print_table, print_title
from tests.benchmarks.rounds import Spread, Way, slowest, time_rounds
from tests.benchmarks.ways import open_pass
from tests.factories import NumberFactory
from tests.ranks import run_ranks

AGREEMENTS = 400
ROUNDS = 9
WINDOWS = (0, 4)
RAW = "Gloo alone"
WAITING = "Gloo: waiting for the other rank"
LAUNCHING = "Gloo: launching"
TORCH = "torch: tensors, groups"
STANDARD = "Python's standard library"
SOURCE = "the source and the loop of the benchmark"


class Waited:
    """Work that is waited for in a function of this file, which a profile can tell apart."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *arguments: Any) -> bool:
        return bool(self._work.wait(*arguments))


def reduce_raw(agreements: int) -> None:
    """Collective: every rank exchanges what agreements do, as they do, and nothing else."""
    numbers = torch.zeros(ControlGroup.WIDTH, dtype=torch.int64)
    for _ in range(agreements):
        torch.distributed.all_reduce(
            numbers, op=torch.distributed.ReduceOp.MIN, async_op=True
        ).wait()


def part_of(file: str, function: str) -> str:
    """Return whose part a function of a profile is.

    Examples:
        >>> part_of("/lib/python3.12/signal.py", "getsignal")
        "Python's standard library"
    """
    path = Path(file)
    if path == Path(__file__):
        return WAITING
    if path.is_relative_to(Path(espnet_sync.__file__).parent):
        return f"ours: {path.name}"
    if "/torch/" in file:
        return LAUNCHING if function == "all_reduce" else TORCH
    if file == "~":
        return TORCH if "torch" in function.lower() else STANDARD
    if "benchmarks" in path.parts or path.name == "factories.py":
        return SOURCE
    return STANDARD


@dataclass(frozen=True)
class Measured:
    """What one rank found: unprofiled seconds by way and round, and profiled ones by part."""

    seconds: dict[str, list[float]]
    parts: dict[str, dict[str, float]]


def measure(rank: int, world_size: int) -> Measured:
    """Time agreements beside Gloo alone, then profile them; nothing to do between batches."""
    logging.getLogger().setLevel(logging.ERROR)
    ways: dict[str, Way] = {RAW: lambda: partial(reduce_raw, AGREEMENTS)}
    for window in WINDOWS:
        batches = AGREEMENTS * max(1, window)
        factory = SyncedIterFactory(
            NumberFactory(batches + 1), label=f"{window}", lookahead=window
        )
        ways[str(window)] = partial(open_pass, partial(factory.build_iter, 1), 0)
    seconds = time_rounds(ways, ROUNDS, meet=torch.distributed.barrier)

    all_reduce = torch.distributed.all_reduce

    def waited_for(*arguments: Any, **named: Any) -> Waited:
        return Waited(all_reduce(*arguments, **named))

    parts: dict[str, dict[str, float]] = {}
    for window in WINDOWS:
        run = ways[str(window)]()
        torch.distributed.barrier()
        torch.distributed.all_reduce = waited_for
        profile = cProfile.Profile()
        profile.runcall(run)
        torch.distributed.all_reduce = all_reduce
        parts[str(window)] = by_part(pstats.Stats(profile).stats)  # type: ignore[attr-defined]
    return Measured(seconds, parts)


def by_part(stats: Mapping[tuple[str, int, str], tuple[Any, ...]]) -> dict[str, float]:
    """Sum up the seconds that each function took itself, by whose part it is."""
    seconds: dict[str, float] = defaultdict(float)
    for (file, _, function), (_, _, own, *_) in stats.items():
        seconds[part_of(file, function)] += own
    return dict(seconds)


def main() -> None:
    """Measure with two ranks, and print what an agreement takes and where."""
    print_title(
        "Profile of an agreement",
        "2 ranks, nothing to do between batches. First without a profiler, beside Gloo's "
        f"all-reduce of the same {ControlGroup.WIDTH} int64 alone: median of {ROUNDS} rounds "
        "(lowest to highest). Then cProfile on rank 0, by the functions' own time; it makes calls "
        "of Python slower, so that the shares of all but Gloo are too large.",
    )
    outcomes = run_ranks(2, measure, deadline=120.0, group_timeout=60.0)
    seconds = slowest([outcome.seconds for outcome in outcomes])
    raw = Spread.of(seconds[RAW]).median
    names = {RAW: RAW, **{str(window): f"ours, lookahead={window}" for window in WINDOWS}}
    print_table(
        ("way", "µs an agreement", "over Gloo alone"),
        [
            (
                name,
                Spread.of(seconds[way]).text(1e6 / AGREEMENTS),
                f"{Spread.of(seconds[way]).median / raw:.2f}",
            )
            for way, name in names.items()
        ],
    )
    parts = outcomes[0].parts
    rows = []
    for part in sorted(set().union(*parts.values()), key=order):
        row: list[object] = [part]
        for window in WINDOWS:
            taken = parts[str(window)].get(part, 0.0)
            row += [
                f"{taken / AGREEMENTS * 1e6:.1f}",
                f"{100 * taken / sum(parts[str(window)].values()):.0f} %",
            ]
        rows.append(row)
    headers = ["profiled: whose time"]
    for window in WINDOWS:
        headers += [f"lookahead={window}: µs an agreement", "share"]
    print_table(headers, rows)


def order(part: str) -> tuple[int, str]:
    """Return where a part stands in the table."""
    first = (WAITING, LAUNCHING, TORCH, STANDARD)
    return (first.index(part) if part in first else len(first) + (part == SOURCE), part)
