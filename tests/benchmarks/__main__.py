"""Runs the benchmarks that are named on the command line, or all."""

import importlib
import sys

BENCHMARKS = ("faults",)

# NOTE: nothing is imported above this line, since every rank imports its parent's main module.
if __name__ == "__main__":
    for name in sys.argv[1:] or BENCHMARKS:
        if name not in BENCHMARKS:
            sys.exit(f"unknown benchmark {name!r}: there are {', '.join(BENCHMARKS)}")
        importlib.import_module(f"tests.benchmarks.{name}").main()
