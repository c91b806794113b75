"""Carries what the ranks exchange: the one file that talks to `torch.distributed`.

Who decides what to exchange, and what follows from it, is `consensus.py`.
"""

import atexit
import ctypes
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlparse

import torch
import torch.distributed
import torch.utils.data

from espnet_sync.errors import require_version

# NOTE: destroy_process_group() of torch 2.4 to 2.6 may wait for ever after our last exchange.
require_version("torch", torch.__version__, "2.8")

#: Backends that reduce CPU tensors. "undefined" is what `get_backend()` calls a group that was
#: made without naming one: it has Gloo for the CPU.
_CPU_BACKENDS = ("gloo", "mpi", "ucc", "ccl", "fake", "undefined")


def is_distributed() -> bool:
    """Return whether this process is a rank of an initialised `torch.distributed` job."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def count_ranks() -> int:
    """Return the number of ranks; 1 where `torch.distributed` is not initialised."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def flag_device(backend: str) -> torch.device:
    """Return where a flag must live so that the default group can reduce it.

    Args:
        backend: What `torch.distributed.get_backend()` returns, e.g. `gloo`, `nccl` or
            `cpu:gloo,cuda:nccl`.

    Returns:
        torch.device: The CPU where the group reduces CPU tensors, CUDA for NCCL alone, else the
        current accelerator.

    Examples:
        >>> flag_device("gloo"), flag_device("cpu:gloo,cuda:nccl")
        (device(type='cpu'), device(type='cpu'))
    """
    by_device = dict(part.split(":", 1) for part in backend.lower().split(",") if ":" in part)
    if "cpu" in by_device or backend.lower() in _CPU_BACKENDS:
        return torch.device("cpu")
    if "cuda" in by_device or backend.lower() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


class DefaultGroup:
    """The group that training itself uses, for one pass. Built when the pass starts.

    Raises:
        RuntimeError: If `torch.distributed` is not initialised.
    """

    def __init__(self) -> None:
        self.device = flag_device(torch.distributed.get_backend())

    def min_flag(self, flag: int) -> int:
        """Collective: every rank calls this before each batch.

        Args:
            flag: This rank's flag: 1, 0 or -1. Travels as a float32 tensor of shape (1,).

        Returns:
            int: The smallest flag of all ranks.

        Raises:
            RuntimeError: If torch lost a peer or ran into the group's timeout.
        """
        make = torch.zeros if flag == 0 else torch.ones
        tensor = make(1, device=self.device)
        if flag < 0:
            tensor.neg_()
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return int(tensor.item())


class NamedDefaultGroup(DefaultGroup):
    """The default group for a `SyncedIterFactory`: knows ranks and can name them."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

    def min_number(self, number: int) -> int:
        """Collective: every rank calls this in `build_iter`.

        Args:
            number: Any int. Travels as an int64 tensor of shape (1,).

        Returns:
            int: The smallest number of all ranks.

        Raises:
            RuntimeError: If torch lost a peer or ran into the group's timeout.
        """
        tensor = torch.tensor([number], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return int(tensor.item())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Collective: every rank calls this, right after a reduction that says so.

        Args:
            numbers: This rank's numbers, equally many on all ranks. Travel as int64.

        Returns:
            list[list[int]]: The numbers of each rank, in rank order.

        Raises:
            RuntimeError: If torch lost a peer or ran into the group's timeout.
        """
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
        torch.distributed.all_gather(everyones, mine)
        return [tensor.tolist() for tensor in everyones]


class StoreUnreachableError(Exception):
    """A call of the default store did not come back, or failed.

    Attributes:
        closed: Whether the store closed the connection, which tells that its host has gone. A
            call that only blocks tells nothing: its host may be busy, stopped or cut off.
    """

    def __init__(self, message: str, closed: bool) -> None:
        super().__init__(message)
        self.closed = closed


class BoundedStore:
    """The default group's store, under a prefix of its own, with a bound on every call.

    NOTE: Where the store's host is stopped or cut off, a call blocks for ever, whatever timeout
    it is given. So each runs in a daemon thread, and while one is stuck no other is tried.

    Args:
        prefix: Put before every key.
        seconds: The bound of a call.
    """

    def __init__(self, prefix: str, seconds: float = 2.0) -> None:
        self.host_rank = _store_host(torch.distributed.distributed_c10d._get_default_store())
        self._prefix = prefix
        self._seconds = seconds
        self._stuck: threading.Thread | None = None

    def set(self, key: str, text: str) -> None:
        """Set a key."""
        self._call("set", key, text)

    def check(self, key: str) -> bool:
        """Return whether a key is set."""
        return bool(self._call("check", [key]))

    def get(self, key: str) -> str:
        """Return the text of a key that is set."""
        return bytes(self._call("get", key)).decode("utf-8", errors="replace")

    def add(self, key: str, number: int) -> int:
        """Add to the number under a key, 0 at first, and return the sum."""
        return int(self._call("add", key, number))

    def set_once(self, key: str, text: str) -> str:
        """Set a key that is not set yet, and return what it holds then."""
        return bytes(self._call("compare_set", key, "", text)).decode("utf-8", errors="replace")

    def _call(self, method: str, *arguments: Any) -> Any:
        """Make a call in a thread of its own.

        Raises:
            StoreUnreachableError: If it fails, or does not come back within the bound.
        """
        if self._stuck is not None and self._stuck.is_alive():
            raise StoreUnreachableError("an earlier call is still stuck", closed=False)
        result: list[Any] = []
        error: list[Exception] = []

        def run() -> None:
            try:
                # NOTE: looked up for each call: a reference kept here would keep its server,
                # and so its port, beyond destroy_process_group().
                store = torch.distributed.distributed_c10d._get_default_store()
                prefixed = torch.distributed.PrefixStore(self._prefix, store)
                result.append(getattr(prefixed, method)(*arguments))
            except Exception as raised:
                error.append(raised)

        thread = threading.Thread(target=run, name="espnet_sync store call", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if error:
            brief = (str(error[0]).strip() or repr(error[0])).splitlines()[0]
            raise StoreUnreachableError(brief, closed=True) from error[0]
        if not result:
            self._stuck = thread
            raise StoreUnreachableError(
                f"no answer within {self._seconds:.0f} seconds", closed=False
            )
        return result[0]


def _store_host(store: Any) -> int | None:
    """Return the rank whose process serves the store, or None where that is no rank's."""
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    is_tcp = isinstance(store, torch.distributed.TCPStore)
    return 0 if is_tcp and not served_by_torchrun() else None


class Watch(Protocol):
    """Who looks after a rank while it waits."""

    def start(self) -> None:
        """Start to count; called when a wait starts, also a further one for the same exchange."""

    def tick(self) -> None:
        """Look around; called between the slices of a wait. May raise to end it."""

    def lost(self, cause: str) -> Exception:
        """Return what to raise after a closed connection; called once, and may take seconds."""


class Exchange:
    """One reduction under way on the control group.

    Attributes:
        serial: Its number in the group: the same on all ranks for the same exchange.
    """

    def __init__(
        self,
        serial: int,
        numbers: torch.Tensor,
        settle: Callable[[list[int]], Any],
        watch: Watch,
    ) -> None:
        self.serial = serial
        self.numbers = numbers
        self.settle = settle
        self.watch = watch
        # The group, while the exchange may be under way: see `_keep_for_ever`.
        self.group: Any = None
        self.work: Any = None
        self.outcome: Any = None
        self.error: Exception | None = None
        self.was_read = False


class ControlGroup:
    """A Gloo group on the CPU, used for agreements and nothing else. One per job.

    Every exchange that opens is the same: a MIN all-reduce of `WIDTH` int64 numbers. What may
    follow one, follows in `read`, on all ranks, decided by the reduced numbers alone.

    Args:
        group: What `make_gloo_group` returned.
        store: The job's store, under this group's prefix.

    Attributes:
        factories: Counts the job's factories; the same on all ranks.
        handed_out: Counts the batches of all passes; the same on ranks that are in step.
        whereabouts: The pass of the last batch that was handed out, and its number there.
        broken: Why the group is of no more use; None while it is.
    """

    #: Numbers in each exchange. Gloo aborts the process where ranks send different sizes.
    WIDTH = 2
    #: Bytes of a text in `gather_texts`.
    TEXT_BYTES = 4096
    #: Seconds of one slice of a wait; between slices signals work and the watch looks around.
    SLICE = 0.5

    def __init__(self, group: Any, store: BoundedStore) -> None:
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.store = store
        self.factories = 0
        self.handed_out = 0
        self.whereabouts: tuple[str, int] | None = None
        self.broken: Exception | None = None
        # NOTE: weak, so that destroy_process_group() ends the group and lets go of its store.
        self._group = weakref.ref(group)
        self._process = os.getpid()
        self._serial = 0
        self._unread: Exchange | None = None

    @property
    def serial(self) -> int:
        """The number of the last exchange that was launched."""
        return self._serial

    @property
    def is_current(self) -> bool:
        """Whether `torch.distributed` still knows the group."""
        try:
            torch.distributed.get_process_group_ranks(self._group())
        except (KeyError, ValueError, RuntimeError):
            return False
        return self._group() is not None

    @property
    def is_under_way(self) -> bool:
        """Whether an exchange is not done, e.g. that of a rank which broke out of its loop."""
        work = None if self._unread is None else self._unread.work
        return work is not None and not work.is_completed()

    @property
    def is_here(self) -> bool:
        """Whether this process made the group; a forked DataLoader worker did not."""
        return self._process == os.getpid()

    def launch(
        self, numbers: Sequence[int], settle: Callable[[list[int]], Any], watch: Watch
    ) -> Exchange:
        """Collective: every rank calls this in the same order; does not wait for the others.

        First reads the exchange before, which may have been left in flight by a pass that was
        dropped: the other ranks may be waiting in what follows from it.

        Args:
            numbers: This rank's `WIDTH` numbers.
            settle: Called once, by `read`, with the smallest numbers of all ranks. It makes the
                collectives that follow from them, and returns the exchange's outcome.
            watch: Looks after this rank while it waits for the exchange.
        """
        if self._unread is not None:
            self._complete(self._unread)
        self._serial += 1
        tensor = torch.tensor(list(numbers), dtype=torch.int64)
        exchange = Exchange(self._serial, tensor, settle, watch)
        exchange.group = self._group()
        self._unread = exchange
        try:
            exchange.work = torch.distributed.all_reduce(
                tensor, op=torch.distributed.ReduceOp.MIN, group=self._group(), async_op=True
            )
        except RuntimeError as error:
            raise self._lose(exchange, watch, error) from error
        return exchange

    def read(self, exchange: Exchange) -> Any:
        """Collective: every rank calls this for each exchange, here or in the next `launch`.

        Returns:
            Any: What the exchange's `settle` returned; it is called once.

        Raises:
            Exception: What `settle` or the watch raised, again at each reading.
        """
        self._complete(exchange)
        if exchange.error is not None:
            raise exchange.error
        return exchange.outcome

    def gather_numbers(self, numbers: Sequence[int], watch: Watch) -> list[list[int]]:
        """Collective: every rank calls this in `settle`, where the reduced numbers say so.

        Args:
            numbers: This rank's numbers, equally many on all ranks. Travel as int64.
            watch: Looks after this rank while it waits.

        Returns:
            list[list[int]]: The numbers of each rank, in rank order.
        """
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        return [tensor.tolist() for tensor in self._gather(mine, watch)]

    def gather_texts(self, text: str, watch: Watch) -> list[str]:
        """Collective: every rank calls this in `settle`, where the reduced numbers say so.

        Args:
            text: This rank's text. Travels as UTF-8 in a uint8 tensor of shape
                (`TEXT_BYTES`,): what is longer is cut.
            watch: Looks after this rank while it waits.

        Returns:
            list[str]: The text of each rank, in rank order.
        """
        encoded = text.replace("\0", " ").encode("utf-8", errors="replace")[: self.TEXT_BYTES]
        mine = torch.zeros(self.TEXT_BYTES, dtype=torch.uint8)
        mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        return [
            bytes(tensor.tolist()).rstrip(b"\0").decode("utf-8", errors="ignore")
            for tensor in self._gather(mine, watch)
        ]

    def _gather(self, mine: torch.Tensor, watch: Watch) -> list[torch.Tensor]:
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            work = torch.distributed.all_gather(
                everyones, mine, group=self._group(), async_op=True
            )
        except RuntimeError as error:
            raise self._lose((everyones, mine), watch, error) from error
        self._wait(work, (everyones, mine), watch)
        return everyones

    def _complete(self, exchange: Exchange) -> None:
        """Wait for an exchange and settle it, unless that was done."""
        if exchange.was_read:
            return
        self._wait(exchange.work, exchange, exchange.watch)
        exchange.was_read = True
        exchange.group = None
        if self._unread is exchange:
            self._unread = None
        try:
            exchange.outcome = exchange.settle(exchange.numbers.tolist())
        except Exception as error:
            exchange.error = error
            raise

    def _wait(self, work: Any, kept: Any, watch: Watch) -> None:
        """Wait in slices for an operation, and look around between them."""
        slice_ = timedelta(seconds=self.SLICE)
        watch.start()
        while True:
            was_completed = work.is_completed()
            try:
                work.wait(slice_)
                return
            except RuntimeError as error:
                if was_completed:
                    raise self._lose((work, kept), watch, error) from error
            if not work.is_completed():
                try:
                    watch.tick()
                except Exception as error:
                    self.broken = error
                    _keep_for_ever((work, kept, self._group()))
                    raise

    def _lose(self, kept: Any, watch: Watch, error: RuntimeError) -> Exception:
        """Return what to raise after a closed connection, and keep what was lost."""
        _keep_for_ever((kept, self._group()))
        self.broken = watch.lost(_brief(error))
        return self.broken


def _keep_for_ever(lost: object) -> None:
    """Keep an object to the very end of the process.

    NOTE: An operation that is not done must stay alive, and its group with it: dropping the last
    reference makes destroy_process_group() wait for the group's timeout, and the interpreter's
    exit too, which drops what any module holds. So this is a reference that nothing holds.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(lost))


def _brief(error: RuntimeError) -> str:
    """Return what Gloo says without the line of its own source and its general advice."""
    text = str(error).strip().splitlines()[0]
    return re.sub(r"^\[\S+\] ", "", text).partition(" This is typically")[0].rstrip(". ")


def make_gloo_group(seconds: float) -> Any:
    """Collective: every rank calls this to make a Gloo group of all ranks.

    NOTE: TORCH_DISTRIBUTED_DEBUG=DETAIL, which people set when a job hangs, would make
    launching an exchange block like a barrier, so the group is made with that level off.

    Args:
        seconds: The timeout of connecting, and of each of the group's operations.

    Raises:
        RuntimeError: If this rank could not connect to the others in that time.
    """
    level = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)
    try:
        return torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    finally:
        torch.distributed.set_debug_level(level)


def destroy_group(group: Any) -> None:
    """Destroy a group that `make_gloo_group` made; every rank calls this."""
    torch.distributed.destroy_process_group(group)


class ControlState:
    """What this process knows of the control group of the default group that is initialised.

    Attributes:
        number: Counts the default groups for which one was asked for. Part of every key in the
            store: after destroying and initialising anew, torch may use the same store again,
            where an old alarm would still stand.
        group: The control group; None before it is made, and after a fallback.
        roll_call: Its roll call; None where there is no group.
        fallback: Why the ranks agreed to go on without one; empty where they have not.
        broken: Why no control group can be made any more; None while it can.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.group: ControlGroup | None = None
        self.roll_call: Any = None
        self.fallback = ""
        self.broken: Exception | None = None
        self._default_group = weakref.ref(torch.distributed.group.WORLD)

    @property
    def prefix(self) -> str:
        """What stands before each of its keys in the store."""
        return f"espnet_sync/{self.number}/"

    @property
    def is_current(self) -> bool:
        """Whether the default group is still the one that this was made for."""
        return self._default_group() is torch.distributed.group.WORLD


# The one global: the control group of the job.
_state: ControlState | None = None


def control_state() -> ControlState:
    """Return the state for the default group of now, a new one where that is a new group."""
    global _state
    if _state is None or not _state.is_current:
        _keep_what_is_under_way()
        _state = ControlState(1 if _state is None else _state.number + 1)
    return _state


@atexit.register
def _keep_what_is_under_way() -> None:
    """Keep an exchange that is not done when its group is replaced, or the process ends."""
    if _state is not None and _state.group is not None and _state.group.is_under_way:
        _keep_for_ever(_state)


def in_loader_worker() -> bool:
    """Return whether this process is a worker of a `DataLoader`."""
    return torch.utils.data.get_worker_info() is not None


class _StoreOnlyGroup(torch.distributed.ProcessGroup):
    """A default group that knows ranks and a store, and connects to nobody."""

    def getBackendName(self) -> str:  # noqa: N802  # older torch asks when it is destroyed
        return "store_only"


def join_store(init_method: str, rank: int, world_size: int, seconds: float) -> None:
    """Initialise `torch.distributed` with a store alone; `espnet_sync.check` calls this, once.

    Every rank calls it, and none waits for the others. With Gloo as the default group, ranks that
    can't connect would fail in here, each by itself. With this one they first find one another
    in the store, through which they then tell who could not connect, and why.

    Args:
        init_method: `tcp://HOST:PORT` or `file:///PATH`.
        rank: This rank. Rank 0 serves a TCP store, unless torchrun does.
        world_size: The number of ranks.
        seconds: The bound of connecting to a TCP store.

    Raises:
        ValueError: If `init_method` is of neither form.
        RuntimeError: If this rank can't serve, reach or open the store.
    """
    url = urlparse(init_method)
    store: torch.distributed.Store
    if url.scheme == "file" and url.path:
        # NOTE: torch would try for minutes, and let no other thread run.
        if not os.access(os.path.dirname(url.netloc + url.path) or ".", os.W_OK):
            raise RuntimeError("its folder is not there, or can't be written to")
        store = torch.distributed.FileStore(url.netloc + url.path, world_size)
    elif url.scheme == "tcp" and url.hostname and url.port:
        # NOTE: torchrun keeps its store when it starts the ranks again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = torch.distributed.PrefixStore(
            f"attempt {attempt}",
            torch.distributed.TCPStore(
                url.hostname,
                url.port,
                world_size,
                is_master=rank == 0 and not served_by_torchrun(),
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
            ),
        )
    else:
        raise ValueError("it must be env://, tcp://HOST:PORT or file:///PATH")

    _init_store_only(store, rank, world_size)


def _init_store_only(store: torch.distributed.Store, rank: int, world_size: int) -> None:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> _StoreOnlyGroup:
        return _StoreOnlyGroup(rank, size)  # type: ignore[call-arg]  # torch's stub lacks it

    if "store_only" not in torch.distributed.Backend.backend_list:
        torch.distributed.Backend.register_backend("store_only", make, devices=["cpu"])
    torch.distributed.init_process_group(
        "cpu:store_only", store=store, rank=rank, world_size=world_size
    )


@contextmanager
def played_rank(rank: int, world_size: int) -> Iterator[None]:
    """Have this process be one rank of a job without others; `espnet_sync.plan` does.

    Code that asks torch for its rank is told; a collective in it would fail.

    Raises:
        RuntimeError: If `torch.distributed` is initialised already.
    """
    if is_distributed():
        raise RuntimeError("torch.distributed is initialised: this process is a rank already")
    _init_store_only(torch.distributed.HashStore(), rank, world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def leave_store() -> None:
    """Undo `join_store`, so that a FileStore removes its file: with its last reference."""
    torch.distributed.destroy_process_group()
    gc.collect()  # torch's objects are in cycles


def served_by_torchrun() -> bool:
    """Return whether the store is served by torchrun's agent, and so by no rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
