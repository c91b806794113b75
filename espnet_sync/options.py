"""The options of a `SyncedIterFactory`, and the keys that set them in ESPnet2's configs."""

import argparse
import difflib
import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

STOP_AT = ("shortest", "longest")
BACKENDS = ("auto", "gloo", "default")
#: Batches held ahead where the backend can hold any and nothing else is asked for. The smallest
#: that adds less than half of what a flag at each batch does also where a step takes no time
#: (`make bench`: 0.3 of it with 2 ranks; 4 lies near the bound, and beyond 6 little is gained).
DEFAULT_LOOKAHEAD = 6
#: More than memory holds; agreements count to some thousand times as many.
MAX_LOOKAHEAD = 1_000_000
#: What a config may set in `epoch_sync_conf`; the task sets the other options itself.
CONF_KEYS = ("lookahead", "timeout", "warn_after", "backend", "stop_signal")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """How one factory's iterators end their epochs. Checked when built.

    Attributes:
        stop_at: `shortest` ends with the first rank to run out, `longest` with the last.
        lookahead: Batches held ahead; None takes the default of the backend.
        timeout: Seconds before a missing rank is an error.
        warn_after: Seconds before a missing rank is named in a warning.
        backend: `auto`, `gloo` (the control group or an error) or `default` (the one-element
            flag on the group that training uses).
        label: Shown in messages and reports, e.g. `train`.
        epoch_offset: Added to the epoch before the inner factory sees it.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option has a value that is not allowed, or one that the chosen
            backend can't serve.

    Examples:
        >>> SyncOptions(backend="default").lookahead
        0
        >>> SyncOptions(stop_at="middle")
        Traceback (most recent call last):
        ...
        ValueError: stop_at='middle': must be one of 'shortest', 'longest'
    """

    stop_at: str = "shortest"
    lookahead: int | None = None
    timeout: float = 1800.0
    warn_after: float = 30.0
    backend: str = "auto"
    label: str = ""
    epoch_offset: int = 0

    def __post_init__(self) -> None:  # noqa: D105
        _check_choice("stop_at", self.stop_at, STOP_AT)
        _check_choice("backend", self.backend, BACKENDS)
        _check_seconds("timeout", self.timeout)
        _check_seconds("warn_after", self.warn_after)
        _check_integer("epoch_offset", self.epoch_offset)
        if not isinstance(self.label, str):
            raise TypeError(f"label={self.label!r}: must be a str")
        if self.lookahead is not None:
            _check_integer("lookahead", self.lookahead)
            if not 0 <= self.lookahead <= MAX_LOOKAHEAD:
                raise ValueError(
                    f"lookahead={self.lookahead!r}: must be 0 to {MAX_LOOKAHEAD:,} batches"
                )
        if self.backend == "default":
            self._check_default_backend()
        lookahead = self.lookahead
        if lookahead is None:
            lookahead = 0 if self.backend == "default" else DEFAULT_LOOKAHEAD
        object.__setattr__(self, "lookahead", int(lookahead))

    @property
    def window(self) -> int:
        """Batches held ahead; 0 with one blocking agreement before each batch."""
        return self.lookahead or 0

    @property
    def policy(self) -> str:
        """What must be equal on all ranks, as text."""
        return (
            f"stop_at={self.stop_at}, lookahead={self.lookahead}, backend={self.backend}, "
            f"timeout={float(self.timeout):g}, warn_after={float(self.warn_after):g}"
        )

    def _check_default_backend(self) -> None:
        for name, value, served in (
            ("lookahead", self.lookahead, (None, 0)),
            ("stop_at", self.stop_at, ("shortest",)),
        ):
            if value not in served:
                raise ValueError(
                    f"{name}={value!r}: backend='default' exchanges a one-element flag and "
                    f"serves {name}={served[-1]!r} alone; leave {name} out, or take "
                    "backend='auto' or 'gloo'"
                )


def refuse_unknown(what: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Refuse names that are not allowed, and suggest the nearest one.

    Args:
        what: What the names are, as the message puts it, e.g. `SyncedIterFactory`.
        given: The names with their values.
        allowed: The names that may stand there.

    Raises:
        TypeError: If a name is not allowed.

    Examples:
        >>> refuse_unknown("epoch_sync_conf", {"lookahed": 2}, ["lookahead", "timeout"])
        Traceback (most recent call last):
        ...
        TypeError: epoch_sync_conf: unknown option lookahed=2 (did you mean 'lookahead'?): \
allowed are 'lookahead', 'timeout'
    """
    allowed = list(allowed)
    for name, value in given.items():
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise TypeError(
                f"{what}: unknown option {name}={value!r}{hint}: "
                f"allowed are {', '.join(map(repr, allowed))}"
            )


def sync_policy(value: object) -> str:
    """Read a value of the keys `epoch_sync` and `valid_epoch_sync`.

    Args:
        value: `shortest`, `longest` or `none`; `true` stands for `shortest`, and `false` or
            YAML's null for `none`.

    Returns:
        str: `shortest`, `longest` or `none`.

    Raises:
        argparse.ArgumentTypeError: If it is anything else.

    Examples:
        >>> sync_policy("longest"), sync_policy(True), sync_policy("false")
        ('longest', 'shortest', 'none')
    """
    word = str(value).strip().lower()
    policy = {"true": "shortest", "false": "none"}.get(word, word)
    if policy not in (*STOP_AT, "none"):
        raise argparse.ArgumentTypeError(
            f"must be 'shortest', 'longest' or 'none' ('true' and 'false' are taken too), "
            f"not {value!r}"
        )
    return policy


def conf_options(key: str, conf: object, policy: str) -> SyncOptions:
    """Read the value of `epoch_sync_conf` or `valid_epoch_sync_conf`.

    Args:
        key: The key, for messages.
        conf: Its value: a mapping of some of `CONF_KEYS`.
        policy: `shortest` or `longest`.

    Returns:
        SyncOptions: The options, without a label.

    Raises:
        TypeError: If `conf` is no mapping, has an unknown key or a value of a wrong type.
        ValueError: If a value is not allowed.

    Examples:
        >>> conf_options("epoch_sync_conf", {"timeout": 60}, "shortest").timeout
        60
    """
    if not isinstance(conf, Mapping):
        raise TypeError(f"{key}: must be a mapping such as {{timeout: 60}}, not {conf!r}")
    refuse_unknown(key, conf, CONF_KEYS)
    options = {name: value for name, value in conf.items() if name != "stop_signal"}
    try:
        stop_signal(conf)
        return SyncOptions(stop_at=policy, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from None


def stop_signal(conf: Mapping[str, Any]) -> signal.Signals | None:
    """Read the key `stop_signal` of an `epoch_sync_conf`.

    Args:
        conf: The mapping.

    Returns:
        signal.Signals | None: The signal that ends training after an epoch; None where there is
        none.

    Raises:
        TypeError: If the value is no str.
        ValueError: If it names no signal that a process can handle.

    Examples:
        >>> stop_signal({"stop_signal": "USR1"}).name, stop_signal({})
        ('SIGUSR1', None)
    """
    name = conf.get("stop_signal")
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"stop_signal={name!r}: must be the name of a signal, such as USR1")
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    known = {
        number.name for number in signal.valid_signals() if isinstance(number, signal.Signals)
    }
    if full not in known - {"SIGKILL", "SIGSTOP", "SIGCHLD"}:
        raise ValueError(
            f"stop_signal={name!r}: must name a signal that a process can handle, such as USR1, "
            "USR2 or TERM"
        )
    return signal.Signals[full]


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: must be an int")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: must be a number of seconds")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r}: must be a finite number of seconds above 0")
