"""Do the ranks reach one another? `python -m espnet_sync.check`, before a long job.

Started the way that training will be, it finds rank and world size as ESPnet2 does, meets the
other ranks in the store, connects with Gloo, and makes agreements on the control group.
"""

import argparse
import fcntl
import gc
import ipaddress
import json
import multiprocessing
import os
import platform
import re
import socket
import statistics
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlparse

import espnet2
import torch
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.train.distributed_utils import (
    DistributedOption,
    free_port,
    get_master_port,
    get_node_rank,
    get_num_nodes,
    resolve_distributed_mode,
)
from espnet2.utils.build_dataclass import build_dataclass
from espnet2.utils.types import int_or_none, str2bool, str_or_none

from espnet_sync import __version__
from espnet_sync.errors import EpochSyncError, PeerLostError
from espnet_sync.process_groups import BoundedStore, StoreUnreachableError
from espnet_sync.report import count, name_ranks
from espnet_sync.roll_call import Meeting, Roll
from espnet_sync.synced_iter_factory import SyncedIterFactory

#: Seconds for connecting, and for one agreement, once all ranks have come.
CONNECT_SECONDS = 8.0
AGREE_SECONDS = 5.0
#: Seconds after `--timeout` at which a rank leaves, whatever it is stuck in.
LAST_SECONDS = 14.0
#: Agreements that are timed, those before them that are not, and seconds for all of them.
AGREEMENTS = 100
WARM_UP = 3
MEASURE_SECONDS = 4.0
#: Of Linux' ioctl: the IPv4 address of an interface. See netdevice(7).
_SIOCGIFADDR = 0x8915
_VERSIONS = ("python", "torch", "espnet", "espnet_sync")
_LISTED_HOSTS = 16
#: Why a rank takes the loopback interface, by `Row.chosen_by`.
_BLAMED = {
    "GLOO_SOCKET_IFNAME": "GLOO_SOCKET_IFNAME names it",
    "hostname": "the host's own name resolves to it there, see /etc/hosts",
    "fallback": "the host's own name resolves to no address of it there, see /etc/hosts",
}

DESCRIPTION = """\
Find out before a long job whether its ranks reach one another. Start it as you will start the
training, on the same hosts. Rank 0 prints a table: each rank's host, network interface, versions,
and the round trip of an agreement. Exit code 0: all is well. Exit code 1, on every rank: it is
not, and what to set is said. Versions that differ are marked, and no error.
"""
EPILOG = """\
examples:
  torchrun:
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m espnet_sync.check
  srun, one task per rank:
    srun --ntasks 8 python -m espnet_sync.check --dist_launcher slurm --dist_master_port 29500
  ESPnet2's launch, here over ssh:
    python -m espnet2.bin.launch --host host1:0:1,host2:0:1 --log check.log -- \\
        python -m espnet_sync.check
  by hand, on each host:
    python -m espnet_sync.check --dist_rank RANK --dist_world_size 2 \\
        --dist_init_method file:///a/shared/folder/new_file

Tried is Gloo, which carries the agreements; NCCL is not, and neither are GPUs.
"""


class CheckFailedError(Exception):
    """The ranks do not reach one another; the message says why and what to set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What the table says of one rank.

    Attributes:
        rank: The rank.
        state: `ok`, `came`, `failed`, `did not come` or `alone`.
        host: The host's name.
        interface: The network interface that Gloo takes there.
        address: Its address.
        chosen_by: Who names the interface: `GLOO_SOCKET_IFNAME`, `hostname` or `fallback`.
        python: Version of Python; likewise `torch`, `espnet` and `espnet_sync`.
        median_ms: Of the round trips of its agreements, in milliseconds; None without any.
        max_ms: The longest of them.
        interfaces: The addresses of each interface of its host.
    """

    rank: int
    state: str = "did not come"
    host: str = "?"
    interface: str = "?"
    address: str = "?"
    chosen_by: str = "?"
    python: str = "?"
    torch: str = "?"
    espnet: str = "?"
    espnet_sync: str = "?"
    median_ms: float | None = None
    max_ms: float | None = None
    interfaces: Mapping[str, Sequence[str]] | None = None


# --- Interfaces -------------------------------------------------------------------------------


def list_interfaces() -> dict[str, list[str]]:
    """Return the addresses of each of this host's network interfaces that has any.

    IPv4 from the kernel's ioctl, IPv6 from `/proc/net/if_inet6`; link-local ones are left out.
    """
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name, addresses in found.items():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            addresses.append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return {name: addresses for name, addresses in found.items() if addresses}


def hostname_addresses() -> list[str]:
    """Return what this host's name resolves to, in the resolver's order; nothing if it doesn't."""
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in answers]


def find_interface(
    named: str, resolved: Sequence[str], interfaces: Mapping[str, Sequence[str]]
) -> tuple[str, str, str]:
    """Return the interface that Gloo takes, its address, and who chose it.

    Args:
        named: The value of GLOO_SOCKET_IFNAME; several names may stand there, with commas.
        resolved: What the hostname resolves to.
        interfaces: The addresses of each interface of the host.

    Examples:
        >>> here = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"]}
        >>> find_interface("eth0", ["127.0.1.1"], here)
        ('eth0', '10.0.0.7', 'GLOO_SOCKET_IFNAME')
        >>> find_interface("", ["127.0.1.1"], here)
        ('lo', '127.0.1.1', 'hostname')
    """
    if named:
        names = [name.strip() for name in named.split(",")]
        addresses = [(interfaces.get(name) or ["none"])[0] for name in names]
        return ",".join(names), ",".join(addresses), "GLOO_SOCKET_IFNAME"
    for address in resolved:
        for name, own in interfaces.items():
            if address in own or (is_loopback(address) and any(map(is_loopback, own))):
                return name, address, "hostname"
    # Gloo binds to the loopback then, which no other host can reach.
    return "lo", "127.0.0.1", "fallback"


def is_loopback(address: str) -> bool:
    """Return whether an address leads back to its own host.

    Examples:
        >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.7")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def describe_this_rank(rank: int, state: str) -> Row:
    """Return this rank's row, before any agreement."""
    interfaces = list_interfaces()
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    interface, address, chosen_by = find_interface(named, hostname_addresses(), interfaces)
    return Row(
        rank=rank,
        state=state,
        host=socket.gethostname(),
        interface=interface,
        address=address,
        chosen_by=chosen_by,
        python=platform.python_version(),
        torch=torch.__version__,
        espnet=espnet2.__version__,
        espnet_sync=__version__,
        interfaces=interfaces,
    )


# --- What is said -----------------------------------------------------------------------------


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as a table; versions that most ranks don't have are marked with `*`.

    Where `tabulate` is missing, each row is a line of JSON, and what to install is said.
    """
    usual = usual_versions(rows)
    shown = [
        {
            "rank": row.rank,
            "state": row.state,
            "host": row.host,
            "interface": row.interface,
            "address": row.address,
            "chosen by": row.chosen_by,
            **{name: _marked(getattr(row, name), usual[name]) for name in _VERSIONS},
            "median ms": row.median_ms,
            "max ms": row.max_ms,
        }
        for row in rows
    ]
    try:
        from tabulate import tabulate
    except ImportError:
        lines = [*map(json.dumps, shown), "(pip install tabulate shows this as a table)"]
        return "\n".join(lines)
    return tabulate(
        shown, headers="keys", floatfmt=".2f", missingval="-", disable_numparse=[6, 7, 8, 9]
    )


def usual_versions(rows: Sequence[Row]) -> dict[str, str]:
    """Return the version of each package that most ranks have; the lowest rank's in a tie."""
    usual = {}
    for name in _VERSIONS:
        versions = [getattr(row, name) for row in rows if getattr(row, name) != "?"]
        usual[name] = Counter(versions).most_common(1)[0][0] if versions else "?"
    return usual


def _marked(version: str, usual: str) -> str:
    return version if version in (usual, "?") else f"{version} *"


def describe_differences(rows: Sequence[Row]) -> str:
    """Return a line for each package whose version is not the same on all ranks.

    Examples:
        >>> describe_differences([Row(rank=0, torch="2.4.1"), Row(rank=1, torch="2.14.0")])
        '* torch: 2.14.0 on rank 1, 2.4.1 elsewhere. Install the same on every host.'
    """
    lines = []
    for name, usual in usual_versions(rows).items():
        others: dict[str, list[int]] = {}
        for row in rows:
            version = getattr(row, name)
            if version not in (usual, "?"):
                others.setdefault(version, []).append(row.rank)
        if others:
            parts = [
                f"{version} on {name_ranks(tuple(ranks))}" for version, ranks in others.items()
            ]
            lines.append(
                f"* {name}: {', '.join(parts)}, {usual} elsewhere. Install the same on every host."
            )
    return "\n".join(lines)


def describe_success(rows: Sequence[Row]) -> str:
    """Return the last line where all is well.

    Examples:
        >>> rows = [Row(rank=rank, host="a", median_ms=0.25, max_ms=1.5) for rank in range(3)]
        >>> describe_success(rows)
        'All 3 ranks on 1 host reach one another; an agreement takes 0.25 ms, 1.50 ms at most.'
    """
    hosts = count(len({row.host for row in rows}), "host", "hosts")
    median = statistics.median(row.median_ms or 0.0 for row in rows)
    longest = max(row.max_ms or 0.0 for row in rows)
    return (
        f"All {len(rows)} ranks on {hosts} reach one another; an agreement takes "
        f"{median:.2f} ms, {longest:.2f} ms at most."
    )


def explain_absence(missing: tuple[int, ...], place: str, seconds: float, world_size: int) -> str:
    """Return what is said when ranks do not come to the store.

    Args:
        missing: Those ranks.
        place: The store's address, e.g. `tcp://10.0.0.1:29500`.
        seconds: For how long they were waited for.
        world_size: The number of ranks.
    """
    if place.startswith("file:"):
        remedy = (
            "the same --dist_init_method on a file system that all hosts share, and a file that "
            "no earlier run has left"
        )
    else:
        remedy = (
            "the same MASTER_ADDR and MASTER_PORT (--dist_master_addr, --dist_master_port), and a "
            "host that can reach them"
        )
    them = "it" if len(missing) == 1 else "each of them"
    return (
        f"{name_ranks(missing)} of {world_size} did not come to {place} within {seconds:.0f} s. "
        f"Look at its log for the first error, and see that {them} was started and has {remedy}."
    )


def explain_no_store(rank: int, host: str, port: int, seconds: float, cause: object) -> str:
    """Return what is said on a rank that can't reach the store, which rank 0 serves."""
    return (
        f"rank {rank} on {socket.gethostname()} could not reach rank 0 at {host}:{port} within "
        f"{seconds:.0f} s ({cause}). Set MASTER_ADDR (--dist_master_addr) to an address of rank "
        "0's host that this host reaches, and MASTER_PORT (--dist_master_port) to a port that is "
        "free there and that its firewall lets through; and see that rank 0 was started."
    )


def explain_failures(failures: Mapping[int, str], rows: Sequence[Row]) -> str:
    """Return what is said when ranks met in the store and can't connect with Gloo.

    Args:
        failures: What Gloo said on the ranks on which it failed.
        rows: All ranks' rows.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(failures):
        row = rows[rank]
        set_to = f", GLOO_SOCKET_IFNAME={row.interface}" if "IFNAME" in row.chosen_by else ""
        ranks_of.setdefault(f" ({failures[rank]}{set_to})", []).append(rank)
    parts = [f"{name_ranks(tuple(ranks))}{why}" for why, ranks in ranks_of.items()]
    lines = [f"the ranks met, but could not connect: {'; '.join(parts)}."]
    if len({row.host for row in rows}) > 1:
        lines += [
            f"rank {row.rank} on {row.host} takes {row.interface} ({row.address}), which no other "
            f"host can reach: {_BLAMED[row.chosen_by]}."
            for row in rows
            if is_loopback(row.address)
        ]
    lines.append(
        "Set GLOO_SOCKET_IFNAME on every rank to the interface of its host that reaches the "
        "others. There are:"
    )
    return "\n".join([*lines, *list_by_host(rows)])


def list_by_host(rows: Sequence[Row]) -> list[str]:
    """Return a line per host with its interfaces.

    Examples:
        >>> here = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"]}
        >>> list_by_host([Row(rank=0, host="a", interfaces=here), Row(rank=1, host="a")])
        ['  a (ranks 0, 1): lo 127.0.0.1, eth0 10.0.0.7']
    """
    hosts: dict[str, list[Row]] = {}
    for row in rows:
        hosts.setdefault(row.host, []).append(row)
    lines = []
    for host, members in list(hosts.items())[:_LISTED_HOSTS]:
        shown = ", ".join(
            f"{name} {' '.join(addresses)}"
            for name, addresses in (members[0].interfaces or {}).items()
        )
        lines.append(f"  {host} ({name_ranks(tuple(row.rank for row in members))}): {shown}")
    if len(hosts) > _LISTED_HOSTS:
        lines.append(f"  and {len(hosts) - _LISTED_HOSTS} more hosts")
    return lines


# --- One rank's check -------------------------------------------------------------------------


class MeetingStore(BoundedStore):
    """The store that the ranks meet in before `torch.distributed` is initialised.

    Its calls are not bounded one by one: `check_rank` bounds the whole check.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        # NOTE: not super().__init__(), which looks up the default group's store.
        self.host_rank = None
        self._given = torch.distributed.PrefixStore(prefix, store)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._given, method)(*arguments)
        except RuntimeError as error:
            raise StoreUnreachableError(_first_line(error), closed=True) from error


class _Numbers(AbsIterFactory):  # type: ignore[misc]  # ESPnet2 has no types
    """As many batches as agreements are to be made."""

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
        return iter(range(WARM_UP + AGREEMENTS))


class _Initialising(threading.Thread):
    """Initialises the default group with Gloo, which can't be interrupted."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(name="espnet_sync check: Gloo", daemon=True)
        self.error: Exception | None = None
        self._initialise = partial(
            torch.distributed.init_process_group,
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=CONNECT_SECONDS),
        )

    def run(self) -> None:
        """Initialise; called by `start`."""
        try:
            self._initialise()
        except Exception as error:
            self.error = error


class RankCheck:
    """What one rank does, in order; `run` is called once, in a thread of its own.

    Args:
        rank: This rank.
        world_size: The number of ranks, more than one.
        init_method: Where the ranks meet: `tcp://HOST:PORT` or `file:///PATH`.
        timeout: Seconds for all ranks to come.
        tell: Called with the rows and what went wrong, empty where nothing did, on the lowest
            rank that came, and on one that can reach no other.

    Attributes:
        step: What it is doing, for who has to give it up.
        exit_code: 0 where all is well, else 1.
        error: What was raised that is no fault of the network.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        init_method: str,
        timeout: float,
        tell: Callable[[Sequence[Row], str], None],
    ) -> None:
        self.step = "looking up its own host"
        self.exit_code = 1
        self.error: Exception | None = None
        self._rank = rank
        self._world_size = world_size
        self._init_method = init_method
        self._timeout = timeout
        self._tell = tell
        self._started = time.monotonic()
        self._row = Row(rank=rank)
        self._store: MeetingStore | None = None

    def run(self) -> None:
        """Collective: every rank calls this. Never raises."""
        failure = ""
        try:
            try:
                self._row = describe_this_rank(self._rank, "came")
                mine, torchs = self._open_store()
                self._store = MeetingStore(mine, _prefix())
                self._meet(self._store)
                self._connect(torchs, self._store)
                self._agree(self._store)
            except CheckFailedError as error:
                failure = str(error)
            except StoreUnreachableError as error:
                failure = f"the store at {self._init_method} went out of reach ({error})"
            self._finish(failure)
            if not failure:
                torch.distributed.destroy_process_group()
                self.exit_code = 0
        except Exception as error:
            self.error = error

    def _open_store(self) -> tuple[Any, Any]:
        """Return the store that the ranks meet in, as torch's `init_method` would make it, twice.

        NOTE: once for this check and once for torch. While Gloo waits in a TCPStore, no other
        thread gets an answer over the same connection.

        Raises:
            CheckFailedError: If this rank can't reach or serve it.
        """
        self.step = f"looking for {self._init_method}"
        url = urlparse(self._init_method)
        if url.scheme == "file":
            path = Path(url.netloc + url.path)
            if not path.parent.is_dir():
                raise CheckFailedError(
                    f"rank {self._rank} on {self._row.host}: there is no folder {path.parent} for "
                    f"{self._init_method}. Name a file on a file system that all hosts share."
                )
            file = torch.distributed.FileStore(str(path), self._world_size)
            return file, file
        if url.scheme != "tcp" or not url.hostname or not url.port:
            raise CheckFailedError(
                f"--dist_init_method {self._init_method}: must be env://, tcp://HOST:PORT or "
                "file:///PATH"
            )
        served_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = self._rank == 0 and not served_by_launcher
        if not serves:
            self._wait_for_port(url.hostname, url.port)
        connect = partial(
            torch.distributed.TCPStore,
            url.hostname,
            url.port,
            self._world_size,
            timeout=timedelta(seconds=self._timeout),
            wait_for_workers=False,
        )
        try:
            return connect(is_master=serves), connect(is_master=False)
        except RuntimeError as error:
            if not serves:
                raise CheckFailedError(
                    explain_no_store(
                        self._rank, url.hostname, url.port, self._timeout, _first_line(error)
                    )
                ) from error
            raise CheckFailedError(
                f"rank 0 on {self._row.host} could not serve {self._init_method} "
                f"({_first_line(error)}). Set MASTER_PORT (--dist_master_port) to a port that is "
                "free on this host."
            ) from error

    def _wait_for_port(self, host: str, port: int) -> None:
        """Wait until somebody listens there.

        NOTE: torch would wait too, and write its own stack to the log when it gives up.
        """
        while True:
            try:
                socket.create_connection((host, port), timeout=self._remaining()).close()
                return
            except OSError as error:
                if self._remaining() <= 0.2:
                    text = explain_no_store(self._rank, host, port, self._timeout, error)
                    raise CheckFailedError(text) from error
            time.sleep(0.1)

    def _remaining(self) -> float:
        """Return the seconds left for all ranks to come, a moment at the least."""
        return max(0.1, self._started + self._timeout - time.monotonic())

    def _meet(self, store: MeetingStore) -> None:
        """Collective: every rank calls this to show its row, and waits for all.

        Raises:
            CheckFailedError: If a rank does not come.
        """
        self.step = f"waiting for the other ranks at {self._init_method}"
        self._show(store)
        self._roll("present").sign(self._rank)
        policy = f"--timeout {self._timeout:g}"
        try:
            Meeting(store, self._rank, self._world_size, policy).meet(
                self._remaining(), self._remaining()
            )
        except PeerLostError as error:
            if isinstance(error.__cause__, StoreUnreachableError):
                raise error.__cause__ from error
            text = explain_absence(error.ranks, self._init_method, self._timeout, self._world_size)
            raise CheckFailedError(text) from error
        except EpochSyncError as error:
            raise CheckFailedError(str(error)) from error

    def _connect(self, torchs: Any, store: MeetingStore) -> None:
        """Collective: every rank calls this to initialise the default group, with Gloo.

        A rank that fails tells the others, who would else wait for it until they time out.

        Args:
            torchs: The store for torch.
            store: The one for this check.

        Raises:
            CheckFailedError: If a rank could not.
        """
        self.step = f"connecting with Gloo over {self._row.interface}"
        connecting = _Initialising(torchs, self._rank, self._world_size)
        connecting.start()
        tried, failed = self._roll("tried"), self._roll("failed")
        has_told = False
        until = time.monotonic() + CONNECT_SECONDS + 2
        while not store.check("outcome"):
            if not connecting.is_alive() and not has_told:
                has_told = True
                if connecting.error is not None:
                    self._row = replace(self._row, state="failed")
                    self._show(store)
                    store.set(f"failure/{self._rank}", _first_line(connecting.error))
                    failed.sign(self._rank)
                tried.sign(self._rank)
            has_failed = failed.signed()
            missing = tried.missing()
            if has_failed:
                # Others may be about to fail too: a moment, and not the whole time, for them.
                until = min(until, time.monotonic() + 0.5)
            if not missing or time.monotonic() >= until:
                failures = {rank: store.get(f"failure/{rank}") for rank in has_failed}
                if not failures:
                    failures = {rank: "not done in time" for rank in missing}
                text = explain_failures(failures, self._rows(store)) if failures else "connected"
                store.set_once("outcome", text)
            elif connecting.is_alive():
                connecting.join(0.05)
            else:
                time.sleep(0.05)
        outcome = store.get("outcome")
        if outcome != "connected":
            raise CheckFailedError(outcome)

    def _agree(self, store: MeetingStore) -> None:
        """Collective: every rank calls this to make and time agreements on the control group.

        Raises:
            CheckFailedError: If they could not be made.
        """
        self.step = "making agreements on the control group"
        try:
            times = time_agreements()
        except RuntimeError as error:  # an EpochSyncError, or torch's
            self._row = replace(self._row, state="failed")
            self._show(store)
            raise CheckFailedError(
                f"the ranks connected, but rank {self._rank} on {self._row.host} could not make "
                f"an agreement: {str(error).strip()}"
            ) from error
        self._row = replace(
            self._row,
            state="ok",
            median_ms=round(statistics.median(times) * 1e3, 3),
            max_ms=round(max(times) * 1e3, 3),
        )
        self._show(store)
        measured = self._roll("measured")
        measured.sign(self._rank)
        _wait_until(lambda: not measured.missing(), AGREE_SECONDS)

    def _finish(self, failure: str) -> None:
        """Tell, on the lowest rank that came; leave together, for a launcher ends the rest."""
        self.step = "telling the outcome"
        store = self._store
        try:
            if store is None:
                self._tell([replace(self._row, state="failed")], failure)
                return
            present = self._roll("present").signed()
            if self._rank == min(present):
                self._tell(self._rows(store), failure)
                store.set("told", "yes")
            else:
                _wait_until(lambda: store.check("told"), 3.0)
                if failure:
                    self._tell([], failure)
            if failure:
                _silence()
            left = self._roll("left")
            left.sign(self._rank)
            _wait_until(lambda: present <= left.signed(), 2.0)
        except StoreUnreachableError:
            # Its host is gone. Nothing is left to tell where all was well.
            if failure:
                self._tell([self._row], failure)

    def _roll(self, name: str) -> Roll:
        assert self._store is not None
        return Roll(self._store, name, self._world_size)

    def _show(self, store: MeetingStore) -> None:
        """Put this rank's row where the others can read it."""
        store.set(f"row/{self._rank}", json.dumps(asdict(self._row)))

    def _rows(self, store: MeetingStore) -> list[Row]:
        """Return all ranks' rows, in rank order."""
        present = self._roll("present").signed()
        return [
            Row(**json.loads(store.get(f"row/{rank}"))) if rank in present else Row(rank=rank)
            for rank in range(self._world_size)
        ]


def time_agreements() -> list[float]:
    """Collective: every rank calls this, with `torch.distributed` initialised.

    Returns:
        list[float]: The seconds of each agreement on the control group.

    Raises:
        EpochSyncError: If the control group can't be made, or a rank was lost.
    """
    factory = SyncedIterFactory(
        _Numbers(),
        lookahead=0,
        timeout=AGREE_SECONDS,
        warn_after=AGREE_SECONDS,
        backend="gloo",
        label="check",
    )
    iterator = factory.build_iter(1)
    seconds = []
    first = before = time.perf_counter()
    for _ in iterator:
        now = time.perf_counter()
        seconds.append(now - before)
        if now - first > MEASURE_SECONDS:
            iterator.request_stop()
        before = time.perf_counter()
    return seconds[WARM_UP:] or seconds


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Look until a condition holds, or for some seconds."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)


def _prefix() -> str:
    """Return what is put before every key: torchrun keeps its store when it starts again."""
    return f"espnet_sync/check/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"


def _first_line(error: Exception) -> str:
    """Return what torch says, without the lines of its source."""
    line = str(error).strip().splitlines()[0]
    return re.sub(r"^\[enforce fail at [^]]*\] .*?\. |\[\S+:\d+\] ", "", line)


# --- The command ------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: ESPnet2's options of the same names, and this command's own."""
    parser = argparse.ArgumentParser(
        prog="python -m espnet_sync.check",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=20.0, help="seconds for all ranks to come (default 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    group = parser.add_argument_group("as for ESPnet2's training commands")
    group.add_argument("--ngpu", type=int, default=0, help="ranks that a host starts, as below")
    group.add_argument("--multiprocessing_distributed", type=str2bool, default=False)
    group.add_argument("--dist_backend", default="gloo", help="taken, and Gloo is what is tried")
    group.add_argument("--dist_init_method", default="env://")
    group.add_argument("--dist_world_size", type=int_or_none, default=None)
    group.add_argument("--dist_rank", type=int_or_none, default=None)
    group.add_argument("--local_rank", type=int_or_none, default=None)
    group.add_argument("--dist_master_addr", type=str_or_none, default=None)
    group.add_argument("--dist_master_port", type=int_or_none, default=None)
    group.add_argument(
        "--dist_launcher", type=str_or_none, choices=["slurm", "mpi", None], default=None
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Check, and return the exit code.

    Args:
        argv: The words after the program's name; None takes `sys.argv`'s.
    """
    arguments = build_parser().parse_args(argv)
    try:
        resolve_distributed_mode(arguments)
        if arguments.distributed and arguments.multiprocessing_distributed:
            return spawn_ranks(arguments)
    except (RuntimeError, ImportError, KeyError) as error:
        return complain(f"{type(error).__name__}: {error}")
    return run_rank(arguments)


def run_rank(arguments: argparse.Namespace) -> int:
    """Check in this process, as ESPnet2's `main_worker` would train; return the exit code."""
    option = build_dataclass(DistributedOption, arguments)
    try:
        option.init_options()
    except (RuntimeError, KeyError) as error:
        return complain(f"{type(error).__name__}: {error}")
    if not option.distributed:
        row = describe_this_rank(0, "alone")
        note = (
            "One rank: there is nothing to check. Start this as you will start the training "
            "(see --help)."
        )
        say(sys.stdout, [row], note, is_well=True, as_json=arguments.json)
        return 0
    return check_rank(
        option.dist_rank,
        option.dist_world_size,
        option.dist_init_method,
        arguments.timeout,
        arguments.json,
    )


def check_rank(rank: int, world_size: int, init_method: str, timeout: float, as_json: bool) -> int:
    """Collective: every rank calls this, in its main thread, and gets its exit code.

    Whatever the network does, it returns `LAST_SECONDS` after `timeout` at the latest.

    Raises:
        Exception: What was raised in the check that is no fault of the network.
    """
    out = _claim_stdout()

    def tell(rows: Sequence[Row], failure: str) -> None:
        if rows:
            note = failure or describe_success(rows)
            say(out, rows, note, is_well=not failure, as_json=as_json)
        if failure:
            complain(f"rank {rank}: {failure}")

    check = RankCheck(rank, world_size, init_method, timeout, tell)
    # NOTE: in a thread, for many of torch's calls can be neither bounded nor interrupted.
    thread = threading.Thread(target=check.run, name="espnet_sync check", daemon=True)
    until = time.monotonic() + timeout + LAST_SECONDS
    thread.start()
    try:
        while thread.is_alive() and time.monotonic() < until:
            thread.join(0.2)
    except KeyboardInterrupt:
        complain(f"rank {rank}: interrupted while {check.step}")
        return 130
    if thread.is_alive():
        return complain(
            f"rank {rank} on {socket.gethostname()} was stuck {check.step} after "
            f"{timeout + LAST_SECONDS:.0f} s. Look at the network between the hosts, set "
            "GLOO_SOCKET_IFNAME on every rank to the interface that reaches the others "
            "(`ip -brief address` lists them), and see that MASTER_ADDR and MASTER_PORT lead to "
            "rank 0."
        )
    if check.error is not None:
        raise check.error
    exit_code = check.exit_code
    # NOTE: a FileStore removes its file, which a rerun would trip over, when its last reference
    # goes, and torch's objects are in cycles.
    del check, thread
    gc.collect()
    return exit_code


def spawn_ranks(arguments: argparse.Namespace) -> int:
    """Start this host's ranks as ESPnet2 does with `--multiprocessing_distributed true`.

    Returns:
        int: 0 where all ranks returned 0, else 1.
    """
    nodes = get_num_nodes(arguments.dist_world_size, arguments.dist_launcher)
    if nodes == 1:
        arguments.dist_master_addr, arguments.dist_rank = "localhost", 0
        has_port = get_master_port(arguments.dist_master_port) is not None
        if arguments.dist_init_method == "env://" and not has_port:
            arguments.dist_master_port = free_port()
    first = arguments.ngpu * get_node_rank(arguments.dist_rank, arguments.dist_launcher)
    local_ranks = range(arguments.ngpu)
    arguments.dist_world_size = arguments.ngpu * nodes
    context = multiprocessing.get_context("spawn")
    processes = []
    for local_rank in local_ranks:
        own = {"local_rank": local_rank, "dist_rank": first + local_rank, "ngpu": 1}
        own_arguments = argparse.Namespace(**{**vars(arguments), **own})
        process = context.Process(target=_run_spawned, args=(own_arguments,), daemon=True)
        process.start()
        processes.append(process)
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        return 130
    return int(any(process.exitcode for process in processes))


def _run_spawned(arguments: argparse.Namespace) -> None:
    leave(run_rank(arguments))


def say(out: TextIO, rows: Sequence[Row], note: str, is_well: bool, as_json: bool) -> None:
    """Write the rows and what follows from them: a table, or one JSON object.

    Args:
        out: Where to.
        rows: All ranks' rows.
        note: The outcome in words.
        is_well: Whether the ranks reach one another.
        as_json: Whether programs will read it: an object with `ok`, `message` and `ranks`.
    """
    if as_json:
        told = {"ok": is_well, "message": note, "ranks": [asdict(row) for row in rows]}
        out.write(json.dumps(told) + "\n")
    else:
        parts = [format_table(rows), describe_differences(rows), note if is_well else ""]
        out.write("\n".join(filter(None, parts)) + "\n")
    out.flush()


def complain(message: str) -> int:
    """Say on standard error what is wrong, and return the exit code for it."""
    sys.stderr.write(f"espnet_sync.check: {message}\n")
    sys.stderr.flush()
    return 1


def _claim_stdout() -> TextIO:
    """Return standard output, and let whatever else is written there go to standard error.

    NOTE: Some versions of torch write to it when Gloo connects.
    """
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _silence() -> None:
    """Drop what is written to standard error from here on, once this rank has said its own.

    NOTE: torch's threads, which Gloo may still keep, write stacks there as the others leave.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def leave(code: int) -> None:
    """End the process; at once after a failure, when threads may be stuck in torch's calls."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    leave(main())
