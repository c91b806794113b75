"""Runs the benchmarks that are named on the command line, or all."""

import importlib
import sys
import time

BENCHMARKS = (
    "single_process",
    "added_cost",
    "lookahead",
    "training",
    "growth",
    "gpu",
    "profiling",
    "startup",
    "faults",
)


def run(names: list[str]) -> None:
    """Run benchmarks one after the other, and print how long each took."""
    for name in names:
        if name not in BENCHMARKS:
            sys.exit(f"unknown benchmark {name!r}: there are {', '.join(BENCHMARKS)}")
    for name in names:
        started = time.monotonic()
        importlib.import_module(f"tests.benchmarks.{name}").main()
        print(f"({name}: {time.monotonic() - started:.0f} s)", flush=True)


# NOTE: nothing heavy is imported above, since every rank imports its parent's main module.
if __name__ == "__main__":
    run(sys.argv[1:] or list(BENCHMARKS))
