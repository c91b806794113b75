"""Deals on real chunk factories: whole, repeatable and even; its table prints with pytest -s."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from espnet2.iterators.chunk_iter_factory import ChunkIterFactory

from espnet_sync.balance import (
    ChunkOptions,
    Corpus,
    Deal,
    apply_deal,
    deal,
    deal_in_file_order,
    read_corpus,
)
from tests.factories import ListFactory

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
    loader: Any = factory.per_sample_iter_factory.build_iter(1, shuffle=False)
    return [utterance for (utterance,) in loader.batch_sampler]


@pytest.fixture(autouse=True)
def without_messages_about_short_utterances() -> Any:
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    yield
    logging.getLogger().setLevel(level)


# --- What is measured ---------------------------------------------------------------------------


def make_corpus(rates: bool = False, categories: bool = False, count: int = UTTERANCES) -> Corpus:
    """Return utterances with log-normal lengths, at 8 and 16 kHz and of 3 categories if asked."""
    draw = np.random.RandomState(5 + rates + 2 * categories)
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
    Case(*shape, kind="two chunk lengths", chunk_length="16,24", limit=4)
    for shape in [(3, 8), (6, 16), (8, 32)]
] + [
    Case(*shape, kind="a range of lengths", chunk_length="16-20", limit=3.5)
    for shape in [(6, 8), (8, 32)]
]
PARTS = [
    *(Case(*shape, num_samples=100, epochs=6) for shape in SHAPES[:5]),
    Case(32, 128, num_samples=100, epochs=2),
    *(Case(*shape, num_samples=1_000) for shape in SHAPES[:4]),
    Case(3, 8, num_samples=700, epochs=3),
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
        assert 3 <= found.file_order <= 40


def test_the_table_prints() -> None:
    text = table()
    print(f"\n{text}")
    assert len(text.splitlines()) == 1 + len(CASES) + len(WIDTHS) + len(PARTS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_batches_that_a_deal_expects_are_those_of_the_factories(case: Case) -> None:
    found = measure(case)
    for made, batches in (
        (deal_in_file_order(case.options, case.corpus), found.batches_in_file_order),
        (deal(case.options, case.corpus), found.batches_dealt),
    ):
        assert list(made.batches) == batches
        assert made.dropped == pytest.approx(dropped(batches, made.batch_sizes))


def test_what_is_expected_of_a_part_or_of_drawn_widths_is_near() -> None:
    for case in (*WIDTHS, *PARTS):
        expected = deal_in_file_order(case.options, case.corpus).dropped
        assert expected == pytest.approx(measure(case).file_order, abs=12), case.name


# --- The deal -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES, *WIDTHS], ids=lambda case: case.name)
def test_every_utterance_is_on_exactly_one_rank(case: Case) -> None:
    options, corpus = case.options, case.corpus
    dealt = deal(options, corpus)
    factories = apply(dealt, options, corpus)
    held = [utterances_of(factory) for factory in factories]
    assert held == dealt.utterances
    assert sorted(utterance for one in held for utterance in one) == sorted(corpus.lengths)
    assert min(map(len, held)) > 0


@pytest.mark.parametrize("case", [*CASES, *WIDTHS], ids=lambda case: case.name)
def test_each_rank_gets_its_share_of_every_row(case: Case) -> None:
    dealt = deal(case.options, case.corpus)
    sizes = dealt.batch_sizes
    unit = int(np.gcd.reduce(sizes))
    assert len({len(rows) for rows in dealt.rows}) == 1
    broken = 0
    for row in zip(*dealt.rows, strict=True):
        counts = [len(part) for part in row]
        assert all(count <= size // unit for count, size in zip(counts, sizes, strict=True))
        broken += counts != [size // unit for size in sizes]
    # The last of each kind may be.
    kinds = {"two sampling rates": 2, "three categories": 3}
    assert broken <= kinds.get(case.kind, 1)
    per_share = [
        len(hand) * unit / size for hand, size in zip(dealt.utterances, sizes, strict=True)
    ]
    assert max(per_share) - min(per_share) <= 1


@pytest.mark.parametrize("categories", [False, True])
@pytest.mark.parametrize(("world_size", "batch_size"), [(6, 8), (6, 16), (5, 64), (8, 8)])
def test_a_corpus_of_one_utterance_per_rank_leaves_no_rank_empty(
    world_size: int, batch_size: int, categories: bool
) -> None:
    corpus = make_corpus(count=world_size, categories=categories)
    options = ChunkOptions(world_size=world_size, batch_size=batch_size, chunk_length=16)
    assert [len(hand) for hand in deal(options, corpus).utterances] == [1] * world_size


def test_the_same_corpus_gives_the_same_deal_in_every_process() -> None:
    case = Case(6, 16, kind="three categories", num_samples=100)
    first, second = (deal(case.options, case.corpus) for _ in range(2))
    assert first == second
    tiny = Corpus(lengths={"a": 90, "b": 10, "c": 30})
    options = ChunkOptions(world_size=2, batch_size=2, chunk_length=10)
    assert deal(options, tiny).fingerprint == FINGERPRINT
    assert deal_in_file_order(options, tiny).fingerprint != FINGERPRINT


def test_whatever_a_deal_is_made_from_changes_its_fingerprint() -> None:
    names = list("abcdef")
    lengths = {name: 40 + 7 * number for number, name in enumerate(names)}
    rates = dict.fromkeys(names, 16_000)
    kinds = dict.fromkeys(names, "x")
    corpus = Corpus(lengths=lengths, sampling_rates=rates, categories=kinds)
    options = ChunkOptions(world_size=2, batch_size=5, chunk_length=10, num_samples_per_epoch=2)
    corpora = [
        corpus,
        replace(corpus, lengths={**lengths, "c": lengths["c"] + 1}),
        replace(corpus, lengths={name: lengths[name] for name in names[:-1]}),
        replace(corpus, sampling_rates={**rates, "c": 8_000}),
        replace(corpus, categories={**kinds, "c": "y"}),
    ]
    changes: list[dict[str, Any]] = [
        {"world_size": 3},
        {"batch_size": 6},
        {"chunk_length": 11},
        {"chunk_shift_ratio": 0.6},
        {"discard_short_samples": False},
        {"chunk_max_abs_length": 9},
        {"default_fs": 16_000},
        {"num_samples_per_epoch": None},
    ]
    made = [deal(options, one) for one in corpora]
    made += [deal(replaced(options, change), corpus) for change in changes]
    prints = [one.fingerprint for one in made]
    assert len(set(prints)) == len(prints)
    assert all(0 < one < 2**56 for one in prints)


def replaced(options: ChunkOptions, change: dict[str, Any]) -> ChunkOptions:
    fields = {name: getattr(options, name) for name in OPTION_FIELDS}
    return ChunkOptions(**{**fields, **change})


OPTION_FIELDS = [name for name in ChunkOptions.__dataclass_fields__ if name != "chunk_lengths"]
#: Of three utterances on two ranks.
FINGERPRINT = 2_203_058_076_366_341


def test_a_part_of_the_corpus_is_the_same_rows_on_every_rank() -> None:
    options = ChunkOptions(
        world_size=3, batch_size=8, chunk_length=CHUNK_LENGTH, num_samples_per_epoch=40
    )
    corpus = make_corpus(count=201)  # 25 rows that go round, and one of one utterance
    dealt = deal(options, corpus)
    assert dealt.rows_per_epoch == 15  # of 8 utterances: 3 x 40 of all ranks
    factories = apply(dealt, options, corpus)
    rows_of = [
        {utterance: number for number, row in enumerate(rows) for utterance in row}
        for rows in dealt.rows
    ]
    seen: Counter[str] = Counter()
    for epoch in range(1, 6):
        taken = []
        for rank, factory in enumerate(factories):
            loader: Any = factory.per_sample_iter_factory.build_iter(epoch, None)
            utterances = [utterance for (utterance,) in loader.batch_sampler]
            rows = [rows_of[rank][utterance] for utterance in utterances]
            assert sum(one != other for one, other in pairwise(rows)) > 20  # rows are mixed
            seen.update(utterances)
            taken.append(Counter(rows))
        # Row 25 does not go round. An epoch may end one pass and begin the next.
        visits = [
            {row: count / share for row, count in one.items() if row != 25}
            for one, share in zip(taken, (3, 3, 2), strict=True)
        ]
        assert visits[0] == visits[1] == visits[2]
    # 5 epochs of 15 of 26 rows: each utterance comes twice or three times.
    assert {*seen} == {*corpus.lengths}
    assert {*seen.values()} <= {2, 3, 4}


# --- Chunks -------------------------------------------------------------------------------------


def count_by_factory(options: ChunkOptions, length: int, rate: int | None, shuffle: bool) -> int:
    """Count one utterance's chunks by a real factory with batches of one."""
    corpus = Corpus(lengths={"a": length}, sampling_rates=None if rate is None else {"a": rate})
    collate_fn = collate if options.discard_short_samples else collate_chunks
    factory = build_factory(options, corpus, 0, shuffle=shuffle, collate_fn=collate_fn)
    return batches_of([factory], 1)[0]


def collate_chunks(samples: list[Any]) -> Any:
    """Collate a sample of the dataset, or what a factory that keeps short ones hands over."""
    return collate(samples) if isinstance(samples[0][1], tuple) else samples


OPTIONS = [
    {},
    {"chunk_shift_ratio": 0.3},
    {"chunk_shift_ratio": 1.7},
    {"chunk_length": "7"},
    {"discard_short_samples": False},
    {"default_fs": 8_000},
    {"default_fs": 16_000},
    {"default_fs": 8_000, "chunk_max_abs_length": 13},
    {"chunk_max_abs_length": 5, "discard_short_samples": False},
]


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_chunks_are_counted_as_the_factory_makes_them(given: dict[str, Any]) -> None:
    options = ChunkOptions(**{"world_size": 1, "batch_size": 1, "chunk_length": 10, **given})
    lengths = [1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 19, 20, 21, 25, 33, 40, 41, 97]
    for rate in (None, 8_000, 16_000, 32_000):
        known = {} if rate is None else {"sampling_rate": rate}
        counted = options.count_chunks(lengths, **known).tolist()
        for shuffle in (False, True):
            made = [count_by_factory(options, length, rate, shuffle) for length in lengths]
            assert counted == made, rate


def test_of_several_chunk_lengths_the_expected_number_is_counted() -> None:
    lengths = list(range(1, 60))
    several = ChunkOptions(world_size=1, batch_size=1, chunk_length="8,11-13,8")
    assert several.chunk_lengths == (8, 11, 12, 13, 8)
    single = [
        ChunkOptions(world_size=1, batch_size=1, chunk_length=width).count_chunks(lengths)
        for width in several.chunk_lengths
    ]
    for length, counted, counts in zip(
        lengths, several.count_chunks(lengths).tolist(), zip(*single, strict=True), strict=True
    ):
        eligible = [
            float(count)
            for count, width in zip(counts, several.chunk_lengths, strict=True)
            if width < length
        ]
        assert counted == pytest.approx(np.mean(eligible) if eligible else 0)


def test_of_a_wide_range_the_expected_number_is_near_and_quickly_found() -> None:
    lengths = [9, 1_000, 1_001, 1_500, 2_400, 3_001, 7_777, 20_000]
    options = ChunkOptions(world_size=1, batch_size=1, chunk_length="1000-3000")
    expected = np.mean(
        [
            ChunkOptions(world_size=1, batch_size=1, chunk_length=width).count_chunks(lengths)
            for width in range(1_000, 3_001)
        ],
        axis=0,
    )
    shares = [np.mean([width < length for width in range(1_000, 3_001)]) for length in lengths]
    expected = [mean / share if share else 0 for mean, share in zip(expected, shares, strict=True)]
    assert options.count_chunks(lengths).tolist() == pytest.approx(expected, rel=0.02)
    many = ChunkOptions(world_size=2, batch_size=2, chunk_length="1000-3000000")
    assert many.count_chunks([1_001, 6_000_000])[0] == 1


@pytest.mark.parametrize("text", ["5", "5,8", "3-6", "5,7-9,5", 12])
def test_chunk_lengths_are_read_as_the_factory_reads_them(text: int | str) -> None:
    options = ChunkOptions(world_size=1, batch_size=1, chunk_length=text)
    factory = build_factory(options, Corpus(lengths={"a": 1}), 0)
    assert list(options.chunk_lengths) == factory.chunk_lengths


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk_length": ""}, r"chunk_length='': must be a number of samples"),
        ({"chunk_length": "5-"}, r"chunk_length='5-': .*or a range such as '300-400'"),
        ({"chunk_length": "1-2-3"}, r"chunk_length='1-2-3': must be"),
        ({"chunk_length": "long"}, r"chunk_length='long': must be"),
        ({"chunk_length": 0}, r"chunk_length=0: must be"),
        ({"world_size": 0}, r"world_size=0: must be 1 or more"),
        ({"num_samples_per_epoch": 0}, r"num_samples_per_epoch=0: must be 1 or more"),
        ({"default_fs": 0}, r"default_fs=0: must be 1 or more"),
        ({"batch_size": 2}, r"batch_size=2: must be at least world_size=3, .* has a share"),
    ],
    ids=str,
)
def test_options_that_can_not_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkOptions(**{"world_size": 3, "batch_size": 4, "chunk_length": 5, **given})


def test_chunks_that_would_not_move_on_are_refused() -> None:
    options = ChunkOptions(world_size=1, batch_size=1, chunk_length=4, chunk_shift_ratio=0.2)
    with pytest.raises(ValueError, match=r"chunk_length=4, chunk_shift_ratio=0.2: chunks of 4"):
        options.count_chunks([9])


@pytest.mark.parametrize(
    ("world_size", "batch_size", "expected"), [(6, 8, 100 / 3), (6, 16, 100 / 9), (8, 32, 0)]
)
def test_what_unequal_shares_drop_is_known_without_lengths(
    world_size: int, batch_size: int, expected: float
) -> None:
    options = ChunkOptions(world_size=world_size, batch_size=batch_size, chunk_length=5)
    assert options.dropped_by_shares == pytest.approx(expected)
    even = Corpus(lengths={str(number): 500 for number in range(4_800)})
    assert deal_in_file_order(options, even).dropped == pytest.approx(expected, abs=0.1)


# --- Files --------------------------------------------------------------------------------------


def write(folder: Path, **texts: str) -> dict[str, Path]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


def test_a_corpus_is_read_from_espnets_files_in_file_order(tmp_path: Path) -> None:
    files = write(
        tmp_path,
        shape="b 16000\na 8000,80\n",
        utt2fs="a 8000\nb 16000\nc 44100\n",
        utt2category="a 1ch_real\nb 2ch_simu noisy\n",
    )
    corpus, reason = read_corpus(
        files["shape"], sampling_rate_file=files["utt2fs"], category_file=files["utt2category"]
    )
    assert corpus is not None
    assert reason == ""
    assert list(corpus.lengths.items()) == [("b", 16_000), ("a", 8_000)]
    assert (corpus.sampling_rate("a"), corpus.sampling_rate("b")) == (8_000, 16_000)
    assert (corpus.category("a"), corpus.category("b")) == ("1ch_real", "2ch_simu noisy")
    plain, _ = read_corpus(str(files["shape"]))
    assert plain == Corpus(lengths=corpus.lengths)
    assert (plain.sampling_rate("a"), plain.category("a")) == (16_000, "")


UNREADABLE = [
    ({}, r"^None: .*shape can't be read: No such file"),
    ({"shape": ""}, r"shape is empty"),
    ({"shape": "a dump/a.wav\n"}, r"shape has 'dump/a.wav' for 'a' where a length in samples"),
    ({"shape": "a\n"}, r"shape has '' for 'a' where a length"),
    ({"shape": "a -1\n"}, r"shape has -1 for 'a', which must be 0 or more"),
    ({"shape": "a 1\na 2\n"}, r"shape can't be read: a is duplicated"),
    ({"shape": "a 1\nb 2\n", "fs": "a 8000\n"}, r"fs has nothing for 1 of 2 .*'b' .*of .*shape"),
    ({"shape": "a 1\n", "fs": "a fast\n"}, r"fs has 'fast' for 'a' where a sampling rate in Hz"),
    ({"shape": "a 1\n", "fs": "a 0\n"}, r"fs has 0 for 'a', which must be 1 or more"),
    ({"shape": "a 1\n", "kind": "x y\n"}, r"kind has nothing for 1 of 1 utterances, e.g. 'a'"),
]


@pytest.mark.parametrize(("texts", "message"), UNREADABLE, ids=str)
def test_lengths_that_are_missing_or_foreign_are_none_with_the_reason(
    texts: dict[str, str], message: str, tmp_path: Path
) -> None:
    files = write(tmp_path, **texts)
    corpus, reason = read_corpus(
        tmp_path / "shape", sampling_rate_file=files.get("fs"), category_file=files.get("kind")
    )
    assert re.search(message, f"{corpus}: {reason}")


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths has no utterance"):
        Corpus(lengths={})


# --- Factories ----------------------------------------------------------------------------------


class OwnFactory(ChunkIterFactory):
    """A user's own chunk factory."""


def test_a_deal_changes_the_utterances_of_a_factory_and_nothing_else() -> None:
    case = Case(3, 8, num_samples=100)
    options, corpus = case.options, case.corpus
    plain = build_factory(options, corpus, 1, seed=3, num_workers=2)
    plain.__class__ = OwnFactory
    before, inner_before = dict(vars(plain)), dict(vars(plain.per_sample_iter_factory))
    made, reason = apply_deal(deal(options, corpus), plain, 1)
    assert made is not None
    assert (type(made), reason) == (OwnFactory, "")
    assert vars(plain) == before
    assert vars(plain.per_sample_iter_factory) == inner_before
    changed = {name for name in before if vars(made)[name] is not before[name]}
    assert changed == {"per_sample_iter_factory"}
    loader: Any = made.per_sample_iter_factory.build_iter(1)
    assert (loader.num_workers, loader.dataset) == (2, inner_before["dataset"])
    assert loader.worker_init_fn.keywords == {"base_seed": 4}


def test_each_utterance_gives_the_chunks_that_it_gave_before() -> None:
    case = Case(2, 2)
    options, corpus = case.options, make_corpus(count=60)
    factories = [build_factory(options, corpus, rank) for rank in range(2)]
    before, after = (
        Counter(ids[0] for factory in each for ids, _ in factory.build_iter(1))
        for each in (factories, apply(deal(options, corpus), options, corpus))
    )
    assert before == after


def test_epochs_differ_and_an_epoch_comes_again() -> None:
    case = Case(3, 8, num_samples=40)
    options, corpus = case.options, make_corpus(count=200)
    first, second = (apply(deal(options, corpus), options, corpus)[2] for _ in range(2))

    def ids(factory: ChunkIterFactory, epoch: int) -> list[list[str]]:
        return [list(ids) for ids, _ in factory.build_iter(epoch)]

    assert ids(first, 1) == ids(second, 1)
    assert ids(first, 1) != ids(first, 2)
    assert ids(first, 3) == ids(second, 3)


def test_a_factory_that_the_deal_does_not_fit_is_none_with_the_reason() -> None:
    case = Case(2, 8)
    options, corpus = case.options, make_corpus(count=20)
    dealt = deal(options, corpus)
    other: Any = build_factory(options, corpus, 0)
    other.per_sample_iter_factory = ListFactory({})
    wide = build_factory(options, corpus, 0)
    wide.batch_size = 8
    foreign = build_factory(options, Corpus(lengths={"utt0000": 9, "x": 9, "y": 9}), 0)
    for factory, message in (
        (foreign, r"1 of its 2 utterances on rank 0 have no length, e.g. 'y'"),
        (wide, r"its batch size is 8 on rank 0, where ESPnet2's own share is 4"),
        (other, r"its utterances come from a ListFactory, which is not ESPnet2's"),
        (ListFactory({}), r"it is a ListFactory and no ChunkIterFactory"),
    ):
        made, reason = apply_deal(dealt, factory, 0)
        assert made is None
        assert re.search(message, reason)
