"""Small ESPnet2 iterator factories over synthetic speech, and one of plain lists."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.iterators.category_chunk_iter_factory import CategoryChunkIterFactory
from espnet2.iterators.category_iter_factory import CategoryIterFactory
from espnet2.iterators.chunk_iter_factory import ChunkIterFactory
from espnet2.iterators.multiple_iter_factory import MultipleIterFactory
from espnet2.iterators.sequence_iter_factory import SequenceIterFactory

KINDS = ("chunk", "sequence", "category", "category_chunk", "multiple")
CHUNK_LENGTH = 10

Sample = tuple[str, dict[str, np.ndarray]]


def speech(lengths: Sequence[int]) -> dict[str, Sample]:
    """Return a dataset of utterances each sample of which tells where it comes from."""
    return {
        f"utt{number:03}": (
            f"utt{number:03}",
            {"speech": np.arange(length, dtype=np.float32) + 1000 * number},
        )
        for number, length in enumerate(lengths)
    }


def collate(samples: list[Sample]) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Pad and stack samples as ESPnet2 does: `(ids, dict)`, with the lengths in the dict."""
    sounds = [torch.from_numpy(data["speech"]) for _, data in samples]
    return [utterance for utterance, _ in samples], {
        "speech": torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True),
        "speech_lengths": torch.tensor([len(one) for one in sounds]),
    }


def in_rows(utterances: Iterable[str], size: int) -> list[list[str]]:
    """Cut a list into batches of `size`, the last of which may be smaller."""
    rest = list(utterances)
    return [rest[start : start + size] for start in range(0, len(rest), size)]


def chunk(lengths: Sequence[int], **options: Any) -> ChunkIterFactory:
    dataset = speech(lengths)
    options = {"batch_size": 2, "chunk_length": CHUNK_LENGTH, **options}
    batches = in_rows(dataset, 1)
    return ChunkIterFactory(dataset, batches=batches, collate_fn=collate, **options)


def sequence(lengths: Sequence[int], batch_size: int = 2, **options: Any) -> SequenceIterFactory:
    dataset = speech(lengths)
    batches = in_rows(dataset, batch_size)
    return SequenceIterFactory(dataset, batches, collate_fn=collate, **options)


def category(lengths: Sequence[int], folder: Path, **options: Any) -> CategoryIterFactory:
    """Return a factory over two categories, the file of which is written to `folder`."""
    dataset = speech(lengths)
    folder.mkdir(exist_ok=True)
    file = folder / "category2utt"
    utterances = list(dataset)
    half = len(utterances) // 2
    file.write_text(f"a {' '.join(utterances[:half])}\nb {' '.join(utterances[half:])}\n")
    return CategoryIterFactory(
        dataset,
        in_rows(utterances, 2),
        collate_fn=collate,
        sampler_args={
            "batch_size": 2,
            "category2utt_file": str(file),
            "num_batches": None,
            "distributed": False,
        },
        **options,
    )


def category_chunk(lengths: Sequence[int], **options: Any) -> CategoryChunkIterFactory:
    dataset = speech(lengths)
    options = {"batch_size": 2, "chunk_length": CHUNK_LENGTH, **options}
    batches = in_rows(dataset, 2)
    return CategoryChunkIterFactory(dataset, batches=batches, collate_fn=collate, **options)


def multiple(lengths: Sequence[int], **options: Any) -> MultipleIterFactory:
    """Return chunks of the first half of the utterances, and the second half whole."""
    half = len(lengths) // 2
    return MultipleIterFactory(
        [lambda: chunk(lengths[:half]), lambda: sequence(lengths[half:])], **options
    )


def make_factory(
    kind: str, lengths: Sequence[int], folder: Path, **options: Any
) -> AbsIterFactory:
    """Return the factory of one of `KINDS`; `folder` is for those that read a file."""
    if kind == "category":
        return category(lengths, folder, **options)
    makers: dict[str, Callable[..., AbsIterFactory]] = {
        "chunk": chunk,
        "sequence": sequence,
        "category_chunk": category_chunk,
        "multiple": multiple,
    }
    return makers[kind](lengths, **options)


def frozen(batches: Iterable[Any]) -> list[Any]:
    """Return ESPnet2's batches as plain lists, which can be compared and sent."""
    return [
        (list(ids), {name: value.tolist() for name, value in data.items()})
        for ids, data in batches
    ]


class ListFactory(AbsIterFactory):
    """Hands out each epoch's list, as it is where `sized`, and notes the epochs in `built`."""

    def __init__(self, epochs: dict[int, Sequence[Any]], sized: bool = False) -> None:
        self.epochs = epochs
        self.sized = sized
        self.built: list[int] = []

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Any:
        self.built.append(epoch)
        return list(self.epochs[epoch]) if self.sized else self._generate(epoch)

    def _generate(self, epoch: int) -> Iterator[Any]:
        yield from self.epochs[epoch]


class NumberFactory(AbsIterFactory):
    """Hands out 0, 1, 2, ... `count` times each epoch; raises at `fails_at`."""

    def __init__(self, count: int, sized: bool = False, fails_at: int | None = None) -> None:
        self.count = count
        self.sized = sized
        self.fails_at = fails_at
        self.failure = ValueError("a torn file")

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Any:
        return range(self.count) if self.sized else self._generate()

    def _generate(self) -> Iterator[int]:
        for index in range(self.count):
            if index == self.fails_at:
                raise self.failure
            yield index
        if self.fails_at == self.count:
            raise self.failure
