"""What the README's examples import: a rank's share of real speech, and a model that counts.

The tests copy this file beside each script. It takes `speech` in the folder where it runs.
"""

import atexit
import json
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed
from espnet2.iterators.chunk_iter_factory import ChunkIterFactory
from espnet2.train.dataset import ESPnetDataset

CHUNK_LENGTH = 8000
BATCH_SIZE = 2


class Model(torch.nn.Module):
    """A filter that predicts a sample from those around it. It counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = torch.nn.Conv1d(1, 1, 9, padding=4)
        self.batches = {"train": 0, "valid": 0}

    def forward(self, speech: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
        self.batches["train" if self.training else "valid"] += 1
        speech = speech.unsqueeze(1)
        loss = (self.filter(speech) - speech).square().mean()
        return loss, {"loss": loss.detach()}, speech.new_tensor(len(speech))

    def tell(self) -> None:
        """Print what this rank did, as one line of JSON."""
        weights = [value for one in self.parameters() for value in one.flatten().tolist()]
        told = {"rank": int(os.environ["RANK"]), "batches": self.batches, "weights": weights}
        # NOTE: torchrun's ranks are unbuffered, and print writes a line's end on its own.
        sys.stdout.write(f"{json.dumps(told)}\n")


def build_factory(
    mode: str, rank: int | None = None, world_size: int | None = None
) -> ChunkIterFactory:
    """Build a rank's factory; of this process's rank where none is given."""
    if rank is None or world_size is None:
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dataset = ESPnetDataset([(f"speech/{mode}/wav.scp", "speech", "sound")])
    with open(f"speech/{mode}/wav.scp") as file:
        utterances = [line.split()[0] for line in file]
    return ChunkIterFactory(
        dataset,
        batch_size=BATCH_SIZE,
        batches=[[utterance] for utterance in utterances[rank::world_size]],
        chunk_length=CHUNK_LENGTH,
        shuffle=mode == "train",
        collate_fn=_collate,
    )


def build_model() -> Model:
    """Build a model that prints what it did when the process ends."""
    model = Model()
    atexit.register(model.tell)
    return model


def _collate(
    samples: list[tuple[str, dict[str, np.ndarray]]],
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Make a batch of one utterance, which is then cut into chunks."""
    [(utterance, data)] = samples
    speech = torch.from_numpy(data["speech"])
    return [utterance], {"speech": speech[None], "speech_lengths": torch.tensor([len(speech)])}
