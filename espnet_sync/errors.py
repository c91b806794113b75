"""The exceptions of espnet_sync: each says what happened, where, and what to do."""

from collections.abc import Mapping


class EpochSyncError(RuntimeError):
    """Base of every error that this package raises about a distributed run."""


class PeerFailedError(EpochSyncError):
    """Another rank's source raised: that rank keeps its own exception, all others get this one.

    Attributes:
        ranks: The failed ranks, ascending. Empty where only the one-element flag of a bare
            `EpochSyncIterator` told of the failure, which carries no names.
        reasons: The failure of each of those ranks as text, as far as it could be carried.
    """

    def __init__(
        self, message: str, ranks: tuple[int, ...] = (), reasons: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.reasons = dict(reasons or {})


class OutOfStepError(EpochSyncError):
    """The ranks met at different places, e.g. one in a train pass and one in a validation pass.

    Attributes:
        positions: Where each rank is, as text, by rank.
    """

    def __init__(self, message: str, positions: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.positions = dict(positions or {})


class PeerLostError(EpochSyncError):
    """Another rank did not come to an agreement: it died, or stayed away longer than `timeout`.

    Attributes:
        ranks: The missing ranks, ascending.
        waited: How long this rank had waited for them, in seconds.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), waited: float = 0.0) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.waited = waited


class EmptyRankError(EpochSyncError):
    """A rank has no batch at all where every rank needs at least one.

    Attributes:
        ranks: The empty ranks, ascending.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def require_version(package: str, found: str, floor: str) -> None:
    """Refuse a package that is too old; called when the module that needs it is imported.

    `setup.cfg` names torch and ESPnet without versions, so that installing never replaces a
    user's build of either. What is too old is told here instead.

    Args:
        package: The name that pip knows.
        found: Its version, e.g. `2.14.1+cu130`; what is not a number counts as new enough.
        floor: The oldest version that works.

    Raises:
        ImportError: If `found` is older than `floor`.

    Examples:
        >>> require_version("torch", "2.14.1+cpu", "2.4")
        >>> require_version("torch", "1.13.1", "2.4")
        Traceback (most recent call last):
        ...
        ImportError: espnet_sync needs torch >= 2.4 and found 1.13.1: pip install "torch>=2.4"
    """

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())

    if numbers(found) and numbers(found) < numbers(floor):
        raise ImportError(
            f"espnet_sync needs {package} >= {floor} and found {found}: "
            f'pip install "{package}>={floor}"'
        )
