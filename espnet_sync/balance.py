"""Deal utterances to ranks so that their chunk iterators come out even. Knows no args or modes."""

import copy
import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from espnet2.fileio.read_text import read_2columns_text
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.iterators.chunk_iter_factory import ChunkIterFactory
from espnet2.iterators.sequence_iter_factory import RawSampler, SequenceIterFactory

#: What ESPnet2's chunk iterators take for data that comes without a sampling rate, in Hz.
ASSUMED_SAMPLING_RATE = 16000
#: Of a range of chunk lengths, so many are looked at: a range of seconds holds thousands.
MOST_WIDTHS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOptions:
    """What decides how ESPnet2 cuts chunks and puts them into the batches of all ranks.

    Attributes:
        world_size: The number of ranks.
        batch_size: Chunks in a batch, of all ranks together.
        chunk_length: Samples in a chunk, as ESPnet2 takes them: 16000, "16000", "8000,16000"
            (one is drawn for each utterance) or "8000-16000" (one of all in the range).
        chunk_shift_ratio: From one chunk's start to the next one's, in chunk lengths.
        discard_short_samples: Whether an utterance that is shorter than every chunk length is
            left out; else it is one chunk.
        chunk_max_abs_length: The most samples in a chunk, at any sampling rate.
        default_fs: The sampling rate in Hz that `chunk_length` is meant for, where it grows
            with an utterance's own rate. None: it is fixed.
        num_samples_per_epoch: Utterances that each rank takes in an epoch. None: all it has.

    Raises:
        ValueError: If there are fewer chunks in a batch than ranks, a number is below 1, or
            `chunk_length` can't be read.

    Examples:
        >>> options = ChunkOptions(world_size=3, batch_size=8, chunk_length="5,7-9")
        >>> options.batch_sizes, options.chunk_lengths
        ((3, 3, 2), (5, 7, 8, 9))
        >>> ChunkOptions(world_size=4, batch_size=2, chunk_length=5)
        Traceback (most recent call last):
        ...
        ValueError: batch_size=2: must be at least world_size=4, so that each rank has a share
    """

    world_size: int
    batch_size: int
    chunk_length: int | str
    chunk_shift_ratio: float = 0.5
    discard_short_samples: bool = True
    chunk_max_abs_length: int | None = None
    default_fs: int | None = None
    num_samples_per_epoch: int | None = None
    chunk_lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:  # noqa: D105
        object.__setattr__(self, "chunk_lengths", _read_chunk_lengths(self.chunk_length))
        for name in ("world_size", "chunk_max_abs_length", "default_fs", "num_samples_per_epoch"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name}={number!r}: must be 1 or more")
        if self.batch_size < self.world_size:
            raise ValueError(
                f"batch_size={self.batch_size}: must be at least world_size={self.world_size}, "
                "so that each rank has a share"
            )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Each rank's batch size, in chunks, as ESPnet2 shares it out."""
        size, more = divmod(self.batch_size, self.world_size)
        return tuple(size + (rank < more) for rank in range(self.world_size))

    @property
    def dropped_by_shares(self) -> float:
        """Per cent of the data dropped if all ranks hold the same number of chunks.

        Above 0 where `batch_size` does not divide by `world_size`: the ranks with a smaller
        share of the batch have more batches, and all end with the one that has fewest. It needs
        no lengths; `Deal.dropped` is the better figure where there are some.

        Examples:
            >>> round(ChunkOptions(world_size=6, batch_size=8, chunk_length=5).dropped_by_shares)
            33
        """
        return 100 * (1 - self.batch_size / (self.world_size * max(self.batch_sizes)))

    def count_chunks(
        self, lengths: Sequence[int], sampling_rate: int = ASSUMED_SAMPLING_RATE
    ) -> npt.NDArray[np.float64]:
        """Count the chunks that ESPnet2's `ChunkIterFactory` makes of each utterance.

        Args:
            lengths: The utterances' lengths, in samples.
            sampling_rate: Of all of them, in Hz. Counts where `default_fs` is set.

        Returns:
            np.ndarray: Chunks, float64 of shape (utterances,): whole numbers with one chunk
            length, and the expected ones where it is drawn from several (from a wide range,
            those expected of 256 lengths in it).

        Raises:
            ValueError: If chunks would follow one another by less than a sample.

        Examples:
            >>> options = ChunkOptions(world_size=1, batch_size=1, chunk_length="10,20")
            >>> options.count_chunks([10, 11, 25, 40]).tolist()
            [0.0, 1.0, 2.5, 5.0]
        """
        samples = np.asarray(lengths, dtype=np.int64)
        total = np.zeros_like(samples)
        choices = np.zeros_like(samples)
        for width in _thin_out(self.widths(sampling_rate), MOST_WIDTHS):
            # ESPnet2 compares before it cuts the width down, and leaves out equal lengths.
            longer = samples > width
            choices += longer
            cut = width if self.chunk_max_abs_length is None else self.chunk_max_abs_length
            cut = min(width, cut)
            shift = int(cut * self.chunk_shift_ratio)
            if shift < 1:
                raise ValueError(
                    f"chunk_length={self.chunk_length!r}, chunk_shift_ratio="
                    f"{self.chunk_shift_ratio!r}: chunks of {cut} samples would follow one "
                    f"another by {shift} samples, and ESPnet2 can't make those; take a larger "
                    "chunk_shift_ratio"
                )
            total += np.where(longer, (samples - cut) // shift + 1, 0)
        short = 0.0 if self.discard_short_samples else 1.0
        return np.where(choices > 0, total / np.maximum(choices, 1), short)

    def widths(self, sampling_rate: int = ASSUMED_SAMPLING_RATE) -> list[int]:
        """Return the chunk lengths at a sampling rate, in samples, before they are cut down.

        Args:
            sampling_rate: In Hz.

        Examples:
            >>> options = ChunkOptions(
            ...     world_size=1, batch_size=1, chunk_length=100, default_fs=8000
            ... )
            >>> options.widths(8000), options.widths(16000)
            ([100], [200])
        """
        base = sampling_rate if self.default_fs is None else self.default_fs
        return [length * sampling_rate // base for length in self.chunk_lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The utterances of a shape file, in file order.

    Attributes:
        lengths: Samples, by utterance.
        sampling_rates: Hz, by utterance; None where the data comes without.
        categories: By utterance; None where the data comes without.

    Raises:
        ValueError: If there is no utterance, one has a length but no sampling rate or category
            where others have one, a length is below 0 or a rate below 1.

    Examples:
        >>> Corpus(lengths={"a": 5, "b": 7}, sampling_rates={"a": 8000})
        Traceback (most recent call last):
        ...
        ValueError: sampling_rates has nothing for 1 of 2 utterances, e.g. 'b'
    """

    lengths: Mapping[str, int]
    sampling_rates: Mapping[str, int] | None = None
    categories: Mapping[str, str] | None = None

    def __post_init__(self) -> None:  # noqa: D105
        if not self.lengths:
            raise ValueError("lengths has no utterance")
        for name, least in (("lengths", 0), ("sampling_rates", 1), ("categories", None)):
            values = getattr(self, name)
            if values is None:
                continue
            lacking = [utterance for utterance in self.lengths if utterance not in values]
            if lacking:
                raise ValueError(
                    f"{name} has nothing for {len(lacking)} of {len(self.lengths)} utterances, "
                    f"e.g. {lacking[0]!r}"
                )
            for utterance in self.lengths if least is not None else ():
                if values[utterance] < least:
                    raise ValueError(
                        f"{name} has {values[utterance]} for {utterance!r}, which must be "
                        f"{least} or more"
                    )

    def sampling_rate(self, utterance: str) -> int:
        """Return an utterance's sampling rate in Hz, as ESPnet2's chunk iterators take it."""
        return (
            ASSUMED_SAMPLING_RATE
            if self.sampling_rates is None
            else self.sampling_rates[utterance]
        )

    def category(self, utterance: str) -> str:
        """Return an utterance's category; all are in one where the data comes without."""
        return "" if self.categories is None else self.categories[utterance]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """Which rank takes which utterances. Made by `deal` or `deal_in_file_order`.

    Attributes:
        rows: Each rank's utterances, row by row: equally many rows on each rank, some of which
            may be empty. A row is that rank's share of utterances with about as many chunks.
        batch_sizes: Each rank's batch size, in chunks.
        rows_per_epoch: Rows that each rank takes in an epoch, or None: all of them.
        batches: The batches expected from each rank in an epoch, if nothing is dropped: exact
            with one chunk length and all utterances.
        fingerprint: 56 bits that differ where the deal or anything it was made from differs;
            the same in every process.
    """

    rows: tuple[tuple[tuple[str, ...], ...], ...]
    batch_sizes: tuple[int, ...]
    rows_per_epoch: int | None
    batches: tuple[int, ...]
    fingerprint: int

    @property
    def utterances(self) -> list[list[str]]:
        """Each rank's utterances, in order."""
        return [[utterance for row in rows for utterance in row] for rows in self.rows]

    @property
    def dropped(self) -> float:
        """Per cent of the data expected to be dropped by ending with the shortest rank.

        Examples:
            >>> corpus = Corpus(lengths={str(number): 100 for number in range(240)})
            >>> options = ChunkOptions(world_size=6, batch_size=8, chunk_length=10)
            >>> round(deal_in_file_order(options, corpus).dropped, 1)
            33.3
            >>> deal(options, corpus).dropped
            0.0
        """
        pairs = zip(self.batches, self.batch_sizes, strict=True)
        chunks = sum(batches * size for batches, size in pairs)
        kept = min(self.batches) * sum(self.batch_sizes)
        return 100 * (chunks - kept) / chunks if chunks else 0.0


def deal(options: ChunkOptions, corpus: Corpus) -> Deal:
    """Deal a corpus so that all ranks have the same number of batches.

    Each rank calls this by itself, with the same files, and gets the same deal.

    Utterances are dealt by their number of chunks, most chunks first, in rows that give each
    rank its share of the batch. In a row the rank that is furthest behind takes the utterance
    with most chunks: while ranks are level, rows alternate in direction. Where an epoch takes a
    part of the corpus, it takes the same rows on every rank, so that the ranks stay even.

    Utterances that ESPnet2 puts into caches of their own (by category, and by chunk width where
    sampling rates differ) are dealt one kind after another, so that each kind comes out even.

    Args:
        options: How chunks are cut and batched.
        corpus: The utterances. Their order matters among those with equally many chunks.

    Returns:
        Deal: Each utterance is in exactly one rank's rows. `rows_per_epoch` makes
        `world_size * num_samples_per_epoch` utterances of all ranks, to the next whole row, and
        gives each its share; ESPnet2 gives all equally many, also where batch sizes differ.

    Raises:
        ValueError: If chunks would follow one another by less than a sample.

    Examples:
        >>> corpus = Corpus(lengths={"a": 90, "b": 10, "c": 30, "d": 50, "e": 70, "f": 60})
        >>> options = ChunkOptions(world_size=2, batch_size=4, chunk_length=10)
        >>> deal(options, corpus).utterances
        [['a', 'd', 'b'], ['e', 'f', 'c']]
    """
    counted = _count(options, corpus)
    hands = _Hands(options.batch_sizes)
    for kind in counted.kinds:
        kind = sorted(kind, key=counted.chunks.__getitem__, reverse=True)
        for start in range(0, len(kind), hands.row):
            hands.deal_row(kind[start : start + hands.row], counted.chunks)
    rows_per_epoch = None
    if options.num_samples_per_epoch is not None:
        total = options.world_size * options.num_samples_per_epoch
        rows_per_epoch = max(1, round(total / hands.row))
    return _make_deal(options, corpus, counted, hands.rows, rows_per_epoch)


def deal_in_file_order(options: ChunkOptions, corpus: Corpus) -> Deal:
    """Deal a corpus as ESPnet2 does: in file order, one utterance to each rank in turn.

    Args:
        options: How chunks are cut and batched.
        corpus: The utterances.

    Returns:
        Deal: Whose `dropped` says what ESPnet2's deal costs.

    Raises:
        ValueError: If chunks would follow one another by less than a sample.

    Examples:
        >>> corpus = Corpus(lengths={"a": 90, "b": 10, "c": 30})
        >>> options = ChunkOptions(world_size=2, batch_size=2, chunk_length=10)
        >>> deal_in_file_order(options, corpus).utterances
        [['a', 'c'], ['b']]
    """
    order = list(corpus.lengths)
    rows: list[list[tuple[str, ...]]] = [[] for _ in range(options.world_size)]
    for start in range(0, len(order), options.world_size):
        for rank, hand in enumerate(rows):
            hand.append(tuple(order[start + rank : start + rank + 1]))
    counted = _count(options, corpus)
    return _make_deal(options, corpus, counted, rows, options.num_samples_per_epoch)


def read_corpus(
    shape_file: str | Path,
    *,
    sampling_rate_file: str | Path | None = None,
    category_file: str | Path | None = None,
) -> tuple[Corpus | None, str]:
    """Read the files that a deal is made from.

    Args:
        shape_file: ESPnet2's, e.g. `speech_shape`: `<utterance> <samples>[,<dimension>...]`.
        sampling_rate_file: `<utterance> <Hz>`, as `utt2fs`.
        category_file: `<utterance> <category>`, as `utt2category`.

    Returns:
        tuple[Corpus | None, str]: The corpus and an empty text; or None and the reason, for a
        message: a file can't be read, holds no lengths, or lacks an utterance of the first.

    Examples:
        >>> read_corpus("exp/stats/train/speech_shape")
        (None, "exp/stats/train/speech_shape can't be read: No such file or directory")
    """
    try:
        return Corpus(
            lengths=_read_numbers(shape_file, "a length in samples"),
            sampling_rates=_read_numbers(sampling_rate_file, "a sampling rate in Hz")
            if sampling_rate_file is not None
            else None,
            categories=_read_text(category_file) if category_file is not None else None,
        ), ""
    except _UnreadableError as error:
        return None, str(error)
    except ValueError as error:
        names = {
            "lengths": shape_file,
            "sampling_rates": sampling_rate_file,
            "categories": category_file,
        }
        name, rest = str(error).split(" ", 1)
        return None, f"{names[name]} {rest} (the utterances of {shape_file})"


def apply_deal(
    dealt: Deal, factory: AbsIterFactory, rank: int
) -> tuple[ChunkIterFactory | None, str]:
    """Give a rank's chunk factory, as ESPnet2 built it, the utterances dealt to that rank.

    Each rank calls this by itself, on the factory that it has just built.

    Args:
        dealt: The deal, of the corpus that the factory was built from.
        factory: An ESPnet2 `ChunkIterFactory`. It stays as it was.
        rank: The rank that the factory is for.

    Returns:
        tuple[ChunkIterFactory | None, str]: A factory that differs in its utterances, their
        order and their number per epoch alone, and an empty text; or None and the reason why
        the deal does not fit, for a message. Then no rank may use the deal: the others learn of
        it because the fingerprint of a rank without a deal differs from theirs.

    Examples:
        >>> corpus = Corpus(lengths={"a": 90, "b": 10, "c": 30})
        >>> options = ChunkOptions(world_size=2, batch_size=2, chunk_length=10)
        >>> factory = ChunkIterFactory(None, 1, [["b"]], chunk_length=10)
        >>> made, reason = apply_deal(deal(options, corpus), factory, rank=1)
        >>> list(made.per_sample_iter_factory.build_iter(epoch=1).batch_sampler)
        [['c'], ['b']]
    """
    if not isinstance(factory, ChunkIterFactory):
        return None, f"it is a {type(factory).__name__} and no ChunkIterFactory"
    inner = getattr(factory, "per_sample_iter_factory", None)
    if not isinstance(inner, SequenceIterFactory):
        return None, f"its utterances come from a {type(inner).__name__}, which is not ESPnet2's"
    if factory.batch_size != dealt.batch_sizes[rank]:
        return None, (
            f"its batch size is {factory.batch_size} on rank {rank}, where ESPnet2's own share "
            f"is {dealt.batch_sizes[rank]}"
        )
    known = {utterance for rows in dealt.rows for row in rows for utterance in row}
    foreign = [utterance for (utterance,) in inner.sampler if utterance not in known]
    if foreign:
        return None, (
            f"{len(foreign)} of its {len(inner.sampler)} utterances on rank {rank} have no "
            f"length, e.g. {foreign[0]!r}"
        )
    # NOTE: copied and not built anew, so that whatever else a factory holds stays as it is,
    # also in subclasses and in later versions of ESPnet2.
    made = copy.copy(factory)
    made.per_sample_iter_factory = RowsIterFactory(inner, dealt.rows[rank], dealt.rows_per_epoch)
    return made, ""


class RowsIterFactory(AbsIterFactory):  # type: ignore[misc]  # ESPnet2 has no types
    """Build epochs of single utterances that are taken from a corpus row by row.

    ESPnet2 shuffles a corpus before it takes an epoch's part of it, and lists of different
    lengths come out in unrelated orders. All ranks have equally many rows, so they shuffle rows
    alike and take the same ones.

    Args:
        inner: What ESPnet2 made; its data, seed and workers are kept.
        rows: The utterances; an empty row is one.
        rows_per_epoch: Rows that an epoch takes. None: all.

    Examples:
        >>> inner = SequenceIterFactory({"a": 1, "b": 2, "c": 3}, [["a"], ["b"], ["c"]])
        >>> factory = RowsIterFactory(inner, [("c", "a"), ("b",)], rows_per_epoch=1)
        >>> [list(factory.build_iter(epoch)) for epoch in (1, 2)]
        [[tensor([3]), tensor([1])], [tensor([2])]]
    """

    def __init__(
        self,
        inner: SequenceIterFactory,
        rows: Sequence[Sequence[str]],
        rows_per_epoch: int | None,
    ) -> None:
        self.inner = inner
        self.rows = copy.copy(inner)
        self.rows.sampler = RawSampler(rows)
        self.rows.num_iters_per_epoch = rows_per_epoch
        # Its loaders say which rows an epoch takes, and load none.
        self.rows.num_workers = 0

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterable[Any]:
        """Build an epoch's loader, as ESPnet2's chunk factory asks for it.

        Args:
            epoch: The epoch, from 1.
            shuffle: Whether rows, and the epoch's utterances, are shuffled. None: as the
                factory is set.

        Returns:
            Iterable: A `DataLoader` of single utterances.
        """
        rows = self.rows.build_iter(epoch, shuffle).batch_sampler
        single = copy.copy(self.inner)
        single.sampler = RawSampler([[utterance] for row in rows for utterance in row])
        single.num_iters_per_epoch = None
        loader: Iterable[Any] = single.build_iter(epoch, shuffle)
        return loader


@dataclass(frozen=True, slots=True)
class _Counted:
    """A corpus with its chunks counted.

    Attributes:
        chunks: By utterance.
        kinds: The utterances, in file order, by what cache ESPnet2 collects their chunks in.
    """

    chunks: Mapping[str, float]
    kinds: Sequence[Sequence[str]]


def _count(options: ChunkOptions, corpus: Corpus) -> _Counted:
    by_rate: dict[int, list[str]] = {}
    for utterance in corpus.lengths:
        by_rate.setdefault(corpus.sampling_rate(utterance), []).append(utterance)
    chunks: dict[str, float] = {}
    shortest: dict[int, int] = {}
    for rate, utterances in by_rate.items():
        # A large corpus has far fewer lengths than utterances.
        lengths = sorted({corpus.lengths[utterance] for utterance in utterances})
        counts = dict(zip(lengths, options.count_chunks(lengths, rate).tolist(), strict=True))
        chunks.update((utterance, counts[corpus.lengths[utterance]]) for utterance in utterances)
        shortest[rate] = min(options.widths(rate))
    kinds: dict[tuple[str, int], list[str]] = {}
    for utterance, length in corpus.lengths.items():
        width = shortest[corpus.sampling_rate(utterance)]
        if length <= width and not options.discard_short_samples:
            width = 0  # Kept whole, in a cache of their own.
        kinds.setdefault((corpus.category(utterance), width), []).append(utterance)
    return _Counted(chunks, list(kinds.values()))


class _Hands:
    """What each rank has been dealt so far."""

    def __init__(self, batch_sizes: Sequence[int]) -> None:
        divisor = math.gcd(*batch_sizes)
        self._shares = [size // divisor for size in batch_sizes]
        self.row = sum(self._shares)
        self.rows: list[list[tuple[str, ...]]] = [[] for _ in batch_sizes]
        self._utterances = [0] * len(batch_sizes)
        self._chunks = [0.0] * len(batch_sizes)

    def deal_row(self, row: Sequence[str], chunks: Mapping[str, float]) -> None:
        """Deal one row, most chunks first, each to the rank that is furthest behind."""
        # A row that does not go round evens out the number of utterances first.
        whole = len(row) == self.row
        hands: list[list[str]] = [[] for _ in self._shares]
        behind = [self._place(rank, whole) for rank in range(len(hands))]
        heapq.heapify(behind)
        for utterance in row:
            *_, rank = heapq.heappop(behind)
            hands[rank].append(utterance)
            self._utterances[rank] += 1
            self._chunks[rank] += chunks[utterance]
            if len(hands[rank]) < self._shares[rank]:
                heapq.heappush(behind, self._place(rank, whole))
        for rows, hand in zip(self.rows, hands, strict=True):
            rows.append(tuple(hand))

    def _place(self, rank: int, whole: bool) -> tuple[float, float, int]:
        share = self._shares[rank]
        held = 0.0 if whole else self._utterances[rank] / share
        return held, self._chunks[rank] / share, rank


def _make_deal(
    options: ChunkOptions,
    corpus: Corpus,
    counted: _Counted,
    rows: Sequence[Sequence[tuple[str, ...]]],
    rows_per_epoch: int | None,
) -> Deal:
    part = 1.0 if rows_per_epoch is None else rows_per_epoch / len(rows[0])
    kind_of = {one: number for number, kind in enumerate(counted.kinds) for one in kind}
    batches = []
    digest = hashlib.blake2b(f"{options}".encode(), digest_size=7)
    for rank, hand in enumerate(rows):
        chunks = [0.0] * len(counted.kinds)
        for number, row in enumerate(hand):
            for utterance in row:
                chunks[kind_of[utterance]] += counted.chunks[utterance]
                rate, category = corpus.sampling_rate(utterance), corpus.category(utterance)
                facts = (rank, number, utterance, corpus.lengths[utterance], rate, category)
                digest.update(f"{facts}\n".encode())
        # ESPnet2 drops what does not fill a last batch of each kind.
        batches.append(sum(int(each * part / options.batch_sizes[rank]) for each in chunks))
    return Deal(
        rows=tuple(map(tuple, rows)),
        batch_sizes=options.batch_sizes,
        rows_per_epoch=rows_per_epoch,
        batches=tuple(batches),
        fingerprint=int.from_bytes(digest.digest(), "big"),
    )


def _read_chunk_lengths(text: int | str) -> tuple[int, ...]:
    lengths: list[int] = []
    try:
        for part in str(text).split(","):
            first, *last = map(int, part.split("-"))
            (end,) = last or [first]
            lengths += range(first, end + 1)
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"chunk_length={text!r}: must be a number of samples such as 300, some such as "
            "'300,400', or a range such as '300-400'"
        )
    return tuple(lengths)


def _thin_out(widths: list[int], most: int) -> list[int]:
    """Return the widths, or as many as `most` of them, evenly spread, with both ends."""
    if len(widths) <= most:
        return widths
    ordered = sorted(widths)
    return [ordered[index * (len(ordered) - 1) // (most - 1)] for index in range(most)]


class _UnreadableError(Exception):
    """A file can't be read, for the reason that the message gives."""


def _read_text(path: str | Path) -> dict[str, str]:
    try:
        rows: dict[str, str] = read_2columns_text(str(path))
    except OSError as error:
        raise _UnreadableError(f"{path} can't be read: {error.strerror}") from error
    except (RuntimeError, UnicodeDecodeError) as error:
        raise _UnreadableError(f"{path} can't be read: {error}") from error
    if not rows:
        raise _UnreadableError(f"{path} is empty")
    return rows


def _read_numbers(path: str | Path, wanted: str) -> dict[str, int]:
    numbers = {}
    for utterance, text in _read_text(path).items():
        try:
            numbers[utterance] = int(text.split(",")[0])
        except ValueError:
            raise _UnreadableError(
                f"{path} has {text!r} for {utterance!r} where {wanted} is wanted"
            ) from None
    return numbers
