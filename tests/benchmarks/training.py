"""The demo's ESPnet2 training, synced over unsynced, in pairs."""

import contextlib
import logging
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import print_table, print_title
from tests.benchmarks.rounds import Spread, ratios
from tests.ranks import run_ranks

RANKS = 2
PAIRS = 5
EPOCHS = 3
#: Of a first pair, which warms up.
SHORT = ("--max_epoch", "1", "--num_iters_per_epoch", "4")
DEADLINE = 400.0
RECIPE = Path(__file__).parents[2] / "egs_demo"
CONFIG = RECIPE / "conf/tuning/train_enh_tcn_chunk.yaml"


@dataclass(frozen=True)
class Training:
    """The seconds that one training took on one rank.

    Attributes:
        step: Of a training step, the median of the epochs' means, by ESPnet2's own `train_time`,
            which counts from the end of one step to that of the next: with the wait for a batch.
        whole: From the start of `main_worker` to its end.
        cpu: What the process took of the cores in that time.
    """

    step: float
    whole: float
    cpu: float


def prepare_data(folder: Path) -> list[str]:
    """Run stage 1 of the demo in a copy, and return the words that hand its data over."""
    made = shutil.ignore_patterns("data", "dump", "exp", "downloads", "__pycache__")
    recipe = shutil.copytree(RECIPE, folder / "egs_demo", ignore=made)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["./run.sh", "--python", sys.executable, "--stop_stage", "1"]
    subprocess.run(
        command,
        cwd=recipe,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    words = []
    for split in ("train", "valid"):
        for file, name in (("wav.scp", "speech_mix"), ("spk1.scp", "speech_ref1")):
            words += [
                f"--{split}_data_path_and_name_and_type",
                f"{recipe}/data/{split}/{file},{name},sound",
                f"--{split}_shape_file",
                f"{recipe}/exp/enh_stats_16k/{split}/{name}_shape",
            ]
    return words


def train_pairs(
    rank: int, world_size: int, recipe: Path, words: list[str]
) -> dict[str, list[Training]]:
    """Train unsynced and synced in turn, the first of a pair by turns, and one pair to warm up."""
    # Takes seconds to import: not in the process that starts the ranks.
    from espnet2.tasks.enh import EnhancementTask

    from espnet_sync.task import synced

    os.chdir(recipe)
    # The harness starts its ranks as daemons, which may have no children.
    multiprocessing.current_process().daemon = False
    logging.getLogger().addHandler(logging.NullHandler())
    tasks = {"unsynced": EnhancementTask, "synced": synced(EnhancementTask)}
    trainings: dict[str, list[Training]] = {name: [] for name in tasks}
    for pair in range(PAIRS + 1):
        for name in tasks if pair % 2 else reversed(tasks):
            given = words if pair else [*words, *SHORT]
            training = train(tasks[name], rank, world_size, f"{name}.{pair}", given)
            if pair:
                trainings[name].append(training)
    return trainings


def train(task: Any, rank: int, world_size: int, output: str, words: list[str]) -> Training:
    """Train once as ESPnet2's `main` does for a rank, and read the reporter's figures."""
    import torch

    given = ["--output_dir", output, "--dist_init_method", f"file://{Path.cwd()}/{output}.meet"]
    args = task.get_parser().parse_args([*words, *given])
    args.version = "0"
    args.distributed = True
    args.dist_rank, args.local_rank, args.dist_world_size = rank, rank, world_size
    started, started_cpu = time.perf_counter(), time.process_time()
    try:
        task.main_worker(args)
    finally:
        whole, cpu = time.perf_counter() - started, time.process_time() - started_cpu
        with contextlib.suppress(AssertionError):
            torch.distributed.destroy_process_group()
    if rank:  # The first one writes the checkpoint.
        return Training(0.0, whole, cpu)
    stats = torch.load(f"{output}/checkpoint.pth", weights_only=False)["reporter"]["stats"]
    means = [epoch["train"]["train_time"] for epoch in stats.values()]
    return Training(statistics.median(means), whole, cpu)


def main() -> None:
    """Train the pairs in one spawn, and print the ratios of their times."""
    print_title(
        "Real training",
        f"The demo's ESPnet2 training ({CONFIG.name}, {EPOCHS} epochs, {RANKS} CPU ranks with "
        f"Gloo), in {PAIRS} pairs after a short one to warm up, all in one spawn: synced with the "
        "defaults over unsynced, median (lowest to highest). The step: ESPnet2's train_time, with "
        "the wait for the batch. The whole: main_worker, so with data, model, validation, "
        "checkpoints and plots, and without starting Python. CPU time does not count what else "
        "the machine does.",
    )
    words = ["--config", str(CONFIG), "--max_epoch", str(EPOCHS), "--log_level", "ERROR"]
    words += ["--ngpu", "0", "--dist_backend", "gloo"]
    with tempfile.TemporaryDirectory(prefix="espnet_sync-bench-") as folder:
        words += prepare_data(Path(folder))
        arguments = (Path(folder) / "egs_demo", words)
        outcomes = run_ranks(RANKS, train_pairs, *arguments, deadline=DEADLINE, initialise=False)
    trainings = outcomes[0]
    rows = []
    for figure, unit in (
        ("step", "step, ms"),
        ("whole", "whole training, s"),
        ("cpu", "rank 0's CPU time, s"),
    ):
        times = {
            name: [getattr(training, figure) for training in those]
            for name, those in trainings.items()
        }
        factor, digits = (1000.0, 1) if figure == "step" else (1.0, 2)
        rows.append(
            (
                unit,
                Spread.of(times["unsynced"]).text(factor, digits),
                Spread.of(times["synced"]).text(factor, digits),
                Spread.of(ratios(times["synced"], times["unsynced"])).text(1, 3),
            )
        )
    print_table(("time", "unsynced", "synced", "ratio of the pairs"), rows)
