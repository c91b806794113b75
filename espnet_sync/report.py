"""What a pass gave, and what ending it together cost."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank's part in a pass.

    Attributes:
        rank: The rank, or None where a bare `EpochSyncIterator` can't know its own.
        pulled: Batches taken from the rank's source.
        discarded: Batches of its first pass over the source that were not handed out.
        repeated: Batches handed out from a further pass over the source.
        waited: Seconds spent in agreements.
    """

    rank: int | None
    pulled: int
    discarded: int = 0
    repeated: int = 0
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """How one pass ended, the same on every rank.

    Attributes:
        label: The iterator's label, e.g. `train`.
        epoch: The epoch as the inner factory saw it, or None for a bare iterator.
        batches: Batches yielded, the same number on each rank.
        ended_by: The ranks whose running out ended the pass, ascending: the first with
            `shortest`, the last with `longest`. Empty after `request_stop()`, and where a bare
            iterator can't know.
        ranks: A `RankReport` for each rank, in rank order; a bare iterator knows its own alone.

    Examples:
        >>> report = SyncReport(
        ...     label="train",
        ...     epoch=3,
        ...     batches=2,
        ...     ended_by=(1,),
        ...     ranks=(
        ...         RankReport(rank=0, pulled=3, discarded=1, waited=0.25),
        ...         RankReport(rank=1, pulled=2, waited=0.5),
        ...     ),
        ... )
        >>> print(report)
        [train] epoch 3: 2 batches on each of 2 ranks; rank 1 ran out first; 1 batch discarded; \
waited 0.5 s at most (rank 1)
    """

    label: str
    epoch: int | None
    batches: int
    ended_by: tuple[int, ...]
    ranks: tuple[RankReport, ...]

    def __str__(self) -> str:
        """Return the pass's line for the log."""
        parts = [f"{place(self.label, self.epoch)}: {count(self.batches, 'batch', 'batches')}"]
        if len(self.ranks) > 1:
            parts[0] += f" on each of {len(self.ranks)} ranks"
            if not self.ended_by:
                parts.append("stopped on request")
            elif len(self.ended_by) == len(self.ranks):
                parts.append("all ran out together")
            else:
                when = "last" if any(rank.repeated for rank in self.ranks) else "first"
                parts.append(f"{name_ranks(self.ended_by)} ran out {when}")
        elif not self.ended_by:
            parts.append("stopped on request")
        for word in ("discarded", "repeated"):
            total = sum(getattr(rank, word) for rank in self.ranks)
            if total:
                parts.append(f"{count(total, 'batch', 'batches')} {word}")
        if len(self.ranks) > 1:
            slowest = max(self.ranks, key=lambda rank: rank.waited)
            parts.append(f"waited {slowest.waited:.1f} s at most (rank {slowest.rank})")
        return "; ".join(parts)


def place(label: str, epoch: int | None) -> str:
    """Return how messages name a pass.

    Examples:
        >>> place("train", 3), place("", None)
        ('[train] epoch 3', '[espnet_sync] this pass')
    """
    return f"[{label or 'espnet_sync'}] " + ("this pass" if epoch is None else f"epoch {epoch}")


def count(number: int, one: str, many: str) -> str:
    """Return a number with its noun.

    Examples:
        >>> count(1, "batch", "batches"), count(0, "batch", "batches")
        ('1 batch', '0 batches')
    """
    return f"{number:,} {one if number == 1 else many}"


def name_ranks(ranks: tuple[int, ...]) -> str:
    """Return the names of some ranks, as messages give them.

    Examples:
        >>> name_ranks((2,)), name_ranks((0, 2, 5))
        ('rank 2', 'ranks 0, 2, 5')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} " + ", ".join(map(str, ranks))
