"""A synced training gives the losses of the plain one, to the last digit, also where it cuts."""

import contextlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.speech import ENHANCEMENT, ENHANCEMENT_SOURCES, data_words, write_config, write_speech

pytestmark = pytest.mark.training

#: What is compared of each epoch, out of the reporter's state in the checkpoint. Not how many
#: batches ESPnet2 counts: a plain run counts the one that a longer rank pulls and drops.
FIGURES = {"train": ("loss", "si_snr_loss", "grad_norm"), "valid": ("loss", "si_snr_loss")}
#: With the loader in the rank's own process, where pulling ahead could change which of loader and
#: model (it has dropout) draws first from a generator that they share.
OTHER_WINDOWS = {
    "lookahead 0": ["--epoch_sync_conf", "lookahead=0"],
    "lookahead 2": ["--epoch_sync_conf", "lookahead=2"],
}


def train_all(
    rank: int, world_size: int, folder: Path, words: list[str]
) -> dict[tuple[str, int], Any]:
    """Train plain and synced runs one after the other, as ESPnet2's `main` does for a rank."""
    # Takes seconds to import: not when a rank of another test imports this module.
    import torch.distributed
    from espnet2.tasks.enh import EnhancementTask

    from espnet_sync.task import synced

    # The harness starts its ranks as daemons, which may have no children: the loader's workers.
    # Forked, as in a process that no harness started.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)
    figures: dict[tuple[str, int], Any] = {}
    for num_workers in (0, 2):
        runs: dict[str, list[str]] = {"plain": [], "default": []}
        if num_workers == 0:
            runs.update(OTHER_WINDOWS)
        for name, added in runs.items():
            task = EnhancementTask if name == "plain" else synced(EnhancementTask)
            output = folder / f"{name}, {num_workers} workers"
            given = ["--num_workers", str(num_workers), "--output_dir", str(output)]
            given += ["--dist_init_method", f"file://{output}.meeting", *added]
            args = task.get_parser().parse_args([*words, *given])
            args.version = "0"
            args.distributed = True
            args.dist_rank, args.local_rank, args.dist_world_size = rank, rank, world_size
            try:
                task.main_worker(args)
            finally:
                with contextlib.suppress(AssertionError):
                    torch.distributed.destroy_process_group()
            if rank == 0:  # which writes the checkpoint
                figures[name, num_workers] = read_figures(output)
    return figures


def read_figures(output: Path) -> list[dict[str, dict[str, float]]]:
    """Return the figures of each epoch and mode, from the last checkpoint."""
    import torch

    states = torch.load(output / "checkpoint.pth", weights_only=False)
    return [
        {mode: {name: stats[mode][name] for name in names} for mode, names in FIGURES.items()}
        for _, stats in sorted(states["reporter"]["stats"].items())
    ]


def test_losses_are_equal_to_the_last_digit(tmp_path: Path) -> None:
    speech = write_speech(tmp_path / "speech")
    write_config(tmp_path / "train.yaml", ENHANCEMENT)
    words = ["--config", str(tmp_path / "train.yaml"), "--ngpu", "0", "--dist_backend", "gloo"]
    words += data_words(speech, ENHANCEMENT_SOURCES, ["speech_shape"])
    arguments = (tmp_path, words)
    first, _ = run_ranks(2, train_all, *arguments, deadline=400, initialise=False)
    plain = first["plain", 0]
    print(plain)
    assert len(plain) == 2
    assert plain[0] != plain[1]
    for (name, num_workers), figures in first.items():
        assert figures == first["plain", num_workers], f"{name}, {num_workers} workers"
