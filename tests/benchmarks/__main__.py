"""Runs the benchmarks that are named on the command line, or all."""

import sys

from tests.benchmarks import faults

BENCHMARKS = {"faults": faults.main}

if __name__ == "__main__":
    for name in sys.argv[1:] or BENCHMARKS:
        if name not in BENCHMARKS:
            sys.exit(f"unknown benchmark {name!r}: there are {', '.join(BENCHMARKS)}")
        BENCHMARKS[name]()
