"""How long the runner takes to hand over to Python: recipes start it hundreds of times."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.machine import print_table, print_title

ROUNDS = 15
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "espnet_sync -c pass": [str(Path(sys.executable).parent / "espnet_sync"), "-c", "pass"],
    "python -m espnet_sync -c pass": [sys.executable, "-m", "espnet_sync", "-c", "pass"],
    'python -c "import torch"': [sys.executable, "-c", "import torch"],
}


def main() -> None:
    print_title(
        "Start-up of the runner",
        f"Seconds from start to end of a process that does nothing, median of {ROUNDS} rounds, "
        "each of which runs every command once; importing torch, for scale, in every fifth.",
    )
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(ROUNDS):
        for name, command in COMMANDS.items():
            if "torch" in name and turn % 5:
                continue
            started = time.perf_counter()
            subprocess.run(command, check=True)
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    plain = medians["python -c pass"]
    rows = [
        [f"`{name}`", f"{median:.2f}", f"+{median - plain:.2f}", f"{median / plain:.1f}"]
        for name, median in medians.items()
    ]
    print_table(["command", "s", "more than plain Python, s", "ratio"], rows)


if __name__ == "__main__":
    main()
