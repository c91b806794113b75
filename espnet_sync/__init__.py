"""Make every rank of an ESPnet2 training end its epoch at the same batch.

The names below are looked up when first used, so that importing this package imports
neither torch nor ESPnet.

Examples:
    >>> import espnet_sync
    >>> iterator = espnet_sync.EpochSyncIterator(lambda: iter(["batch 0", "batch 1"]))
    >>> list(iterator)
    ['batch 0', 'batch 1']
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espnet_sync.epoch_sync_iterator import EpochSyncIterator
    from espnet_sync.errors import (
        EmptyRankError,
        EpochSyncError,
        OutOfStepError,
        PeerFailedError,
        PeerLostError,
    )
    from espnet_sync.report import RankReport, SyncReport
    from espnet_sync.synced_iter_factory import SyncedIterFactory
    from espnet_sync.task import synced

__version__ = "0.1.0"

__all__ = [
    "EmptyRankError",
    "EpochSyncError",
    "EpochSyncIterator",
    "OutOfStepError",
    "PeerFailedError",
    "PeerLostError",
    "RankReport",
    "SyncReport",
    "SyncedIterFactory",
    "synced",
]

_HOMES = {
    "EmptyRankError": "errors",
    "EpochSyncError": "errors",
    "EpochSyncIterator": "epoch_sync_iterator",
    "OutOfStepError": "errors",
    "PeerFailedError": "errors",
    "PeerLostError": "errors",
    "RankReport": "report",
    "SyncReport": "report",
    "SyncedIterFactory": "synced_iter_factory",
    "synced": "task",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
