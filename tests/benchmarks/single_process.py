"""What iterating costs in a single process, per batch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from espnet2.iterators.abs_iter_factory import AbsIterFactory

from espnet_sync.epoch_sync_iterator import EpochSyncIterator
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.benchmarks.machine import print_table, print_title
from tests.benchmarks.rounds import Spread, Way, ratios, time_rounds
from tests.benchmarks.ways import ESPNET3, espnet3s_class, open_pass
from tests.factories import NumberFactory, chunk

BARE = "bare generator"
OURS = "ours (EpochSyncIterator)"
OURS_BUILT = "ours (SyncedIterFactory)"
ROUNDS = 25
#: Batches of a pass over a generator of numbers, and utterances of one over ESPnet2's chunks.
BATCHES = 20_000
UTTERANCES = 500


def make_passes(inner: AbsIterFactory) -> dict[str, Way]:
    """Return a pass over what a factory builds, for each way."""
    source = partial(inner.build_iter, 1)
    theirs = espnet3s_class()
    builds: dict[str, Callable[[], Iterable[Any]]] = {
        BARE: source,
        ESPNET3: lambda: theirs(source),
        OURS: lambda: EpochSyncIterator(source),
        OURS_BUILT: lambda: SyncedIterFactory(inner).build_iter(1),
    }
    return {name: partial(open_pass, build, 0) for name, build in builds.items()}


def main() -> None:
    """Time passes without torch.distributed, and print the ratios."""
    print_title(
        "Single process",
        f"Time per batch, without torch.distributed, of iterating a generator that counts "
        f"({BATCHES} batches) and ESPnet2's ChunkIterFactory ({UTTERANCES} utterances in chunks); "
        f"median of {ROUNDS} rounds (lowest to highest), ratios round by round.",
    )
    chunks = chunk([100] * UTTERANCES)
    sources = {
        "a generator that counts": (NumberFactory(BATCHES), BATCHES),
        "ChunkIterFactory": (chunks, sum(1 for _ in chunks.build_iter(1))),
    }
    rows = []
    for name, (inner, batches) in sources.items():
        seconds = time_rounds(make_passes(inner), ROUNDS)
        for way, times in seconds.items():
            rows.append(
                (
                    name,
                    way,
                    Spread.of(times).text(1e9 / batches),
                    f"{Spread.of(ratios(times, seconds[BARE])).median:.2f}",
                    f"{Spread.of(ratios(times, seconds[ESPNET3])).median:.2f}",
                )
            )
    print_table(("source", "way", "ns a batch", "over bare", "over espnet3's"), rows)
