"""Deals on real chunk factories: whole, repeatable and even; its table prints with pytest -s."""

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from espnet2.iterators.chunk_iter_factory import ChunkIterFactory
from espnet2.iterators.sequence_iter_factory import RawSampler, SequenceIterFactory

from espnet_sync.balance import (
    ChunkOptions,
    Corpus,
    Deal,
    apply_deal,
    deal,
    deal_in_file_order,
    read_corpus,
)

UTTERANCES = 3_000
#: Speech has 16,000 samples a second and chunks of seconds; all is shrunk here by one factor.
CHUNK_LENGTH = 16
MEDIAN = 100
CACHE = 1024

# --- Real factories without audio ---------------------------------------------------------------

Sample = tuple[str, tuple[int, int | None, int | None]]


class Silence:
    """A dataset of utterances that have a length and no samples in memory."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __getitem__(self, utterance: str) -> Sample:
        rates, categories = self.corpus.sampling_rates, self.corpus.categories
        rate = None if rates is None else rates[utterance]
        category = None if categories is None else int(categories[utterance])
        return utterance, (self.corpus.lengths[utterance], rate, category)


def collate(samples: list[Sample]) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Make ESPnet2's `(ids, dict)` of one utterance."""
    ((utterance, (length, rate, category)),) = samples
    data = {
        "speech": torch.zeros(1, 1).expand(1, length),
        "speech_lengths": torch.tensor([length]),
    }
    for name, number in (("utt2fs", rate), ("utt2category", category)):
        if number is not None:
            data[name] = torch.tensor([[number]])
            data[f"{name}_lengths"] = torch.tensor([1])
    return [utterance], data


def build_factory(
    options: ChunkOptions, corpus: Corpus, rank: int, **others: Any
) -> ChunkIterFactory:
    """Build a rank's factory as ESPnet2's `build_chunk_iter_factory` does."""
    world_size = options.world_size
    batches = [[utterance] for utterance in corpus.lengths][rank::world_size]
    batch_size = options.batch_size // world_size + (rank < options.batch_size % world_size)
    return ChunkIterFactory(
        dataset=Silence(corpus),
        batches=batches,
        batch_size=batch_size,
        chunk_length=options.chunk_length,
        chunk_shift_ratio=options.chunk_shift_ratio,
        num_cache_chunks=CACHE // world_size,
        num_samples_per_epoch=options.num_samples_per_epoch,
        discard_short_samples=options.discard_short_samples,
        default_fs=options.default_fs,
        chunk_max_abs_length=options.chunk_max_abs_length,
        **{"collate_fn": collate, "shuffle": True, **others},
    )


def apply(dealt: Deal, options: ChunkOptions, corpus: Corpus) -> list[ChunkIterFactory]:
    """Return the factories of all ranks, with what was dealt to them."""
    factories = []
    for rank in range(options.world_size):
        factory, reason = apply_deal(dealt, build_factory(options, corpus, rank), rank)
        assert factory is not None, reason
        factories.append(factory)
    return factories


def batches_of(factories: Sequence[ChunkIterFactory], epoch: int) -> list[int]:
    return [sum(1 for _ in factory.build_iter(epoch)) for factory in factories]


def dropped(batches: Sequence[int], sizes: Sequence[int]) -> float:
    """Per cent of the data that ends up in no batch if all ranks end with the shortest."""
    rest = sum((number - min(batches)) * size for number, size in zip(batches, sizes, strict=True))
    return 100 * rest / sum(map(int.__mul__, batches, sizes))


def utterances_of(factory: ChunkIterFactory) -> list[str]:
    return [utterance for (utterance,) in factory.per_sample_iter_factory.sampler]


@pytest.fixture(autouse=True)
def without_messages_about_short_utterances() -> Any:
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    yield
    logging.getLogger().setLevel(level)


# --- What is measured ---------------------------------------------------------------------------


def make_corpus(rates: bool = False, categories: bool = False, count: int = UTTERANCES) -> Corpus:
    """Return utterances with log-normal lengths, at 8 and 16 kHz and of 3 categories if asked."""
    draw = np.random.RandomState(5)
    seconds = draw.lognormal(np.log(MEDIAN), 0.7, count)
    hertz = draw.choice([8_000, 16_000], count) if rates else np.full(count, 8_000)
    names = [f"utt{number:04}" for number in range(count)]
    lengths = (seconds * hertz // 8_000).astype(int).tolist()
    kinds = draw.choice([0, 1, 2], count, p=[0.6, 0.3, 0.1]).tolist()
    return Corpus(
        lengths=dict(zip(names, lengths, strict=True)),
        sampling_rates=dict(zip(names, hertz.tolist(), strict=True)) if rates else None,
        categories=dict(zip(names, map(str, kinds), strict=True)) if categories else None,
    )


@dataclass(frozen=True)
class Case:
    """One row of the table: a corpus, how it is cut, the epochs, and the most it may drop."""

    world_size: int
    batch_size: int
    kind: str = "one chunk length"
    chunk_length: int | str = CHUNK_LENGTH
    num_samples: int | None = None
    epochs: int = 1
    limit: float = 1.5

    @property
    def name(self) -> str:
        every = "" if self.num_samples is None else f", {self.num_samples:,} utterances per rank"
        return f"{self.world_size:>2} x {self.batch_size:<3} {self.kind}{every}"

    @property
    def corpus(self) -> Corpus:
        return make_corpus(
            rates=self.kind == "two sampling rates", categories=self.kind == "three categories"
        )

    @property
    def options(self) -> ChunkOptions:
        return ChunkOptions(
            world_size=self.world_size,
            batch_size=self.batch_size,
            chunk_length=self.chunk_length,
            default_fs=8_000 if self.kind == "two sampling rates" else None,
            num_samples_per_epoch=self.num_samples,
        )


@dataclass(frozen=True)
class Measured:
    """The batches of each rank and the average drop in per cent, as ESPnet2 deals and as we do."""

    file_order: float
    dealt: float
    batches_in_file_order: list[int]
    batches_dealt: list[int]


SHAPES = [(2, 8), (3, 8), (6, 8), (6, 16), (8, 32), (32, 128)]
CASES = [
    *(Case(*shape) for shape in SHAPES),
    *(Case(*shape, kind="two sampling rates") for shape in [(3, 8), (6, 16), (8, 32)]),
    *(Case(*shape, kind="three categories") for shape in [(2, 8), (6, 8), (8, 32)]),
]
WIDTHS = [
    Case(*shape, kind="two chunk lengths", chunk_length="16,24", limit=2.5)
    for shape in [(3, 8), (6, 16), (8, 32)]
] + [
    Case(*shape, kind="a range of lengths", chunk_length="16-20", limit=3.5)
    for shape in [(6, 8), (8, 32)]
]
PARTS = [
    *(Case(*shape, num_samples=100, epochs=6, limit=5) for shape in SHAPES),
    *(Case(*shape, num_samples=1_000, epochs=2) for shape in SHAPES[:4]),
]


@cache
def measure(case: Case) -> Measured:
    """Count the batches of real factories."""
    options, corpus = case.options, case.corpus
    sizes = options.batch_sizes
    plain = [build_factory(options, corpus, rank) for rank in range(options.world_size)]
    ours = apply(deal(options, corpus), options, corpus)
    drops: list[list[float]] = [[], []]
    counts: list[list[int]] = [[], []]
    for epoch in range(1, case.epochs + 1):
        for which, factories in enumerate((plain, ours)):
            counts[which] = batches_of(factories, epoch)
            drops[which].append(dropped(counts[which], sizes))
    return Measured(*(float(np.mean(each)) for each in drops), *counts)


def table() -> str:
    """Return what ending with the shortest rank drops, as lines of text."""
    lines = [f"{'ranks x batch':53} file order    dealt"]
    for case in [*CASES, *WIDTHS, *PARTS]:
        found = measure(case)
        lines.append(f"{case.name:53} {found.file_order:8.1f} % {found.dealt:6.2f} %")
    return "\n".join(lines)


@pytest.mark.parametrize("case", [*CASES, *WIDTHS, *PARTS], ids=lambda case: case.name)
def test_a_deal_drops_next_to_nothing_where_file_order_drops_much(case: Case) -> None:
    found = measure(case)
    assert found.dealt <= case.limit
    assert found.dealt < found.file_order
    if case in CASES and (case.world_size, case.batch_size) != (2, 8):
        assert 5 <= found.file_order <= 40


def test_the_table_prints() -> None:
    text = table()
    print(f"\n{text}")
    assert len(text.splitlines()) == 1 + len(CASES) + len(WIDTHS) + len(PARTS)
