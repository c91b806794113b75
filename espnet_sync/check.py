r"""Do the ranks of a job reach one another? Start it as you will start the training.

torchrun:  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d \
               --rdzv-endpoint HOST:29500 -m espnet_sync.check
srun:      srun --ntasks 8 python -m espnet_sync.check --dist_launcher slurm \
               --dist_master_port 29500
ESPnet2:   python -m espnet2.bin.launch --host host1:0:1,host2:0:1 --log check.log -- \
               python -m espnet_sync.check

It finds its rank as ESPnet2 does, meets the others in the store, connects with Gloo, and times
the agreements of a `SyncedIterFactory`. NCCL and the GPUs are not tried.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import platform
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

if __name__ == "__main__":
    # NOTE: read when torch is imported. What it logs when it finds nobody is pages of its stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import espnet2
import torch
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.train import distributed_utils as distributed
from espnet2.utils.build_dataclass import build_dataclass
from espnet2.utils.types import int_or_none, str2bool, str_or_none

from espnet_sync import __version__
from espnet_sync.errors import EpochSyncError
from espnet_sync.process_groups import (
    BoundedStore,
    StoreUnreachableError,
    join_store,
    leave_store,
    make_gloo_group,
)
from espnet_sync.report import count, name_ranks
from espnet_sync.roll_call import Roll
from espnet_sync.synced_iter_factory import SyncedIterFactory

#: Seconds for connecting and for each agreement; for all to tell the outcome (one that waits for
#: Gloo learns of it when that is over); and, after `--timeout`, for whatever a rank is stuck in.
CONNECT_SECONDS, TELL_SECONDS, LAST_SECONDS = 6.0, 8.0, 20.0
#: Agreements that are timed, and those before them that are not.
AGREEMENTS, WARM_UP = 50, 3
#: Of Linux' ioctl: the IPv4 address of an interface. See netdevice(7).
_SIOCGIFADDR = 0x8915
_VERSIONS = ("python", "torch", "espnet", "espnet_sync")
Row = dict[str, Any]  # what the table says of one rank


def list_interfaces() -> dict[str, str]:
    """Return the IPv4 address of each of this host's network interfaces that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def find_interface(named: str, resolved: str, interfaces: Mapping[str, str]) -> tuple[str, str]:
    """Return the interface that Gloo takes, and its address: the named one, or the hostname's.

    Examples:
        >>> here = {"lo": "127.0.0.1", "eth0": "10.0.0.7"}
        >>> find_interface("", "10.0.0.7", here), find_interface("", "127.0.1.1", here)
        (('eth0', '10.0.0.7'), ('lo', '127.0.1.1'))
    """
    if named:
        addresses = [interfaces.get(name, "no such interface") for name in named.split(",")]
        return named, ", ".join(addresses)
    for name, address in interfaces.items():
        if address == resolved:
            return name, address
    # Where the name leads elsewhere, Gloo falls back to the loopback.
    return "lo", resolved if resolved.startswith("127.") else "127.0.0.1"


def describe_rank(rank: int, interfaces: Mapping[str, str]) -> Row:
    """Return the row of this rank, but for its round trips."""
    host, resolved = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname(host)
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    interface, address = find_interface(named, resolved, interfaces)
    row = {"rank": rank, "host": host, "interface": interface, "address": address}
    versions = (platform.python_version(), torch.__version__, espnet2.__version__, __version__)
    return row | dict(zip(_VERSIONS, versions, strict=True))


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as a table, with `*` at versions that most ranks do not have."""
    shown = [dict(row) for row in rows]
    for name in _VERSIONS:
        usual = Counter(row[name] for row in rows).most_common(1)[0][0]
        for row in shown:
            row[name] += "" if row[name] == usual else " *"
    try:
        from tabulate import tabulate
    except ImportError:
        return "\n".join(", ".join(f"{name} {row[name]}" for name in row) for row in shown)
    return tabulate(shown, headers="keys", floatfmt=".2f", disable_numparse=[3, 4, 5, 6, 7])


def explain_failure(reason: str, row: Row, interfaces: Mapping[str, str]) -> str:
    """Return what this rank says when ranks met in the store and Gloo could not connect them."""
    reason = re.sub(r"\[enforce fail at [^]]*\] .*?\. ", "", reason).rstrip(". ")
    reach = ", which no other host can reach" if row["address"].startswith("127.") else ""
    here = ", ".join(f"{name} {address}" for name, address in interfaces.items())
    return (
        f"the ranks met, but could not connect with Gloo ({reason}). This rank takes "
        f"{row['interface']} ({row['address']}{reach}); its host has {here}. Set "
        "GLOO_SOCKET_IFNAME on every rank to the interface of its host that reaches the others."
    )


class _Numbers(AbsIterFactory):  # type: ignore[misc]  # ESPnet2 has no types
    """As many batches as agreements are to be made."""

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
        return iter(range(WARM_UP + AGREEMENTS))


@dataclass
class _RankCheck:
    """What one rank does, in order; `run` is called once, in a thread of its own."""

    rank: int
    world_size: int
    where: str
    timeout: float
    step: str = "starting"
    exit_code: int = 1

    def run(self) -> None:
        """Collective: every rank calls this."""
        until = time.monotonic() + self.timeout
        store: BoundedStore | None = None
        try:
            store = self._open_store()
            row = self._meet(store, max(0.1, until - time.monotonic()))
            self._agree(store, row)
            self.exit_code = 0
        except (RuntimeError, StoreUnreachableError) as error:
            self.complain(str(error).strip().splitlines()[0])
        if store is not None:
            with contextlib.suppress(StoreUnreachableError):  # its host has left, all is told
                self._leave_together(store)
        if self.exit_code == 0:
            leave_store()

    def complain(self, message: str) -> None:
        say(f"rank {self.rank} on {socket.gethostname()}, {self.step}: {message}", sys.stderr)

    def _open_store(self) -> BoundedStore:
        """Return the store that the ranks meet in."""
        self.step = f"looking for the store at {self.where}"
        try:
            join_store(self.where, self.rank, self.world_size, self.timeout)
        except (RuntimeError, ValueError) as error:
            raise EpochSyncError(
                f"it could not be opened within {self.timeout:.0f} s "
                f"({str(error).strip().splitlines()[0].rstrip('. ')}). Set MASTER_ADDR "
                "(--dist_master_addr) to an address of rank 0's host that every host reaches and "
                "MASTER_PORT (--dist_master_port) to a port that is free there and open to them, "
                "or --dist_init_method to file:///PATH, a new file in a folder that all share."
            ) from error
        return BoundedStore("espnet_sync/check/", seconds=5.0)

    def _meet(self, store: BoundedStore, seconds: float) -> Row:
        """Collective: every rank calls this to come, to connect, and to show its row."""
        self.step = "waiting for the other ranks"
        row = describe_rank(self.rank, list_interfaces())
        store.set(f"row/{self.rank}", json.dumps(row))
        reason = self._wait_for_all(store, f"come to {self.where}", seconds)
        if reason:
            raise EpochSyncError(
                f"{reason}. Look there for the first error, and set the same MASTER_ADDR and "
                "MASTER_PORT on every rank, or the same --dist_init_method with a new file."
            )
        self.step = "connecting"
        # NOTE: one that waits for a rank which has failed takes five times its bound.
        connecting = ThreadPoolExecutor(1).submit(make_gloo_group, CONNECT_SECONDS)
        reason = self._wait_for_all(store, "connect", CONNECT_SECONDS, connecting)
        if reason:
            raise EpochSyncError(explain_failure(reason, row, list_interfaces()))
        return row

    def _wait_for_all(
        self, store: BoundedStore, verb: str, seconds: float, task: Future[Any] | None = None
    ) -> str:
        """Collective: every rank calls this and gets the first failure; empty without any."""
        name = verb.split()[0]
        roll = Roll(store, name, self.world_size)
        until = time.monotonic() + seconds
        while True:
            is_done = task is None or task.done()
            error = task.exception() if task and is_done else None
            try:
                if error is not None:
                    store.set_once(f"{name}/failure", f"rank {self.rank}: {error}".splitlines()[0])
                elif is_done:
                    roll.sign(self.rank)
                if time.monotonic() >= until and roll.absent():
                    late = f"{name_ranks(roll.missing())} of {self.world_size}"
                    store.set_once(
                        f"{name}/failure", f"{late} did not {verb} within {seconds:.0f} s"
                    )
                if store.check(f"{name}/failure"):
                    return store.get(f"{name}/failure")
                if not roll.absent():
                    return ""
            except StoreUnreachableError as unreachable:
                # While Gloo waits in the store, no other thread gets an answer.
                if unreachable.closed or time.monotonic() >= until + CONNECT_SECONDS:
                    raise
            time.sleep(0.05)

    def _agree(self, store: BoundedStore, row: Row) -> None:
        """Collective: every rank calls this to time agreements, and to add them to its row."""
        self.step = "making agreements"
        factory = SyncedIterFactory(
            _Numbers(), lookahead=0, timeout=CONNECT_SECONDS, backend="gloo", label="check"
        )
        moments = [time.perf_counter() for _ in factory.build_iter(1)][WARM_UP - 1 :]
        times = [1e3 * (after - before) for before, after in itertools.pairwise(moments)]
        row |= {"median ms": statistics.median(times), "max ms": max(times)}
        store.set(f"row/{self.rank}", json.dumps(row))
        # All rows are there once all ranks have come to one more agreement.
        factory.build_iter(2)

    def _leave_together(self, store: BoundedStore) -> None:
        """Show the table on the lowest rank, and wait for all: a launcher ends them else."""
        came = Roll(store, "come", self.world_size).signed()
        told = Roll(store, "told", self.world_size)
        if self.rank == min(came, default=None):
            rows = [json.loads(store.get(f"row/{rank}")) for rank in sorted(came)]
            say(format_table(rows))
            if self.exit_code == 0:
                hosts = count(len({row["host"] for row in rows}), "host", "hosts")
                say(f"All {len(rows)} ranks on {hosts} reach one another.")
        told.sign(self.rank)
        until = time.monotonic() + TELL_SECONDS
        while not came <= told.signed() and time.monotonic() < until:
            time.sleep(0.05)


def run_rank(arguments: argparse.Namespace) -> int:
    """Check in this process, where ESPnet2's `main_worker` would train; return the exit code."""
    option = build_dataclass(distributed.DistributedOption, arguments)
    option.init_options()
    place = option.dist_rank, option.dist_world_size, option.dist_init_method
    check = _RankCheck(*place, arguments.timeout)
    # NOTE: in a thread, for many of torch's calls can be neither bounded nor interrupted.
    thread = threading.Thread(target=check.run, name="espnet_sync check", daemon=True)
    thread.start()
    thread.join(arguments.timeout + LAST_SECONDS)
    if thread.is_alive():
        check.complain(
            "stuck. See that nothing else has taken MASTER_PORT on rank 0's host, and set "
            "GLOO_SOCKET_IFNAME to the interface that reaches the others."
        )
    return check.exit_code


def spawn_ranks(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Start this host's ranks, numbered as ESPnet2's `AbsTask.main` does; return the exit code."""
    nodes = distributed.get_num_nodes(arguments.dist_world_size, arguments.dist_launcher)
    options: dict[str, int | str] = {"ngpu": 1, "multiprocessing_distributed": False}
    options["dist_world_size"] = arguments.ngpu * nodes
    if nodes == 1:
        arguments.dist_rank, options["dist_master_addr"] = 0, "localhost"
        port = distributed.get_master_port(arguments.dist_master_port)
        options["dist_master_port"] = port or distributed.free_port()
    node = distributed.get_node_rank(arguments.dist_rank, arguments.dist_launcher)
    processes = []
    for local_rank in range(arguments.ngpu):
        options |= {"local_rank": local_rank, "dist_rank": arguments.ngpu * node + local_rank}
        command = [sys.executable, "-m", "espnet_sync.check", *words]
        command += [word for name, value in options.items() for word in (f"--{name}", f"{value}")]
        processes.append(subprocess.Popen(command))
    return max([process.wait() for process in processes], key=abs)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: ESPnet2's options of the same names, and `--timeout`."""
    form = argparse.RawDescriptionHelpFormatter
    prog = "python -m espnet_sync.check"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=form)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for all to come")
    group = parser.add_argument_group("as for ESPnet2's training commands")
    group.add_argument("--ngpu", type=int, default=0, help="ranks to start here, with the next")
    group.add_argument("--multiprocessing_distributed", type=str2bool, default=False)
    group.add_argument("--dist_backend", default="gloo", help="taken, and of no effect")
    group.add_argument("--dist_init_method", default="env://")
    for name in ("dist_world_size", "dist_rank", "local_rank", "dist_master_port"):
        group.add_argument(f"--{name}", type=int_or_none)
    group.add_argument("--dist_master_addr", type=str_or_none)
    group.add_argument("--dist_launcher", type=str_or_none, choices=["slurm", "mpi", None])
    return parser


def main(words: Sequence[str]) -> int:
    """Check, and return the exit code; `words` are those after the program's name."""
    parser = build_parser()
    arguments = parser.parse_args(words)
    if not 0 < arguments.timeout < threading.TIMEOUT_MAX - LAST_SECONDS:
        parser.error(f"--timeout {arguments.timeout}: must be a number of seconds above 0")
    try:
        if arguments.dist_launcher == "slurm" and not arguments.multiprocessing_distributed:
            # NOTE: without it ESPnet2 refuses several tasks on a node, which Lightning takes.
            arguments.dist_rank = distributed.get_rank(arguments.dist_rank, "slurm")
        distributed.resolve_distributed_mode(arguments)
        if not arguments.distributed:
            say("One rank: nothing to check. Start this as you will start training: see --help.")
            return 0
        is_parent = arguments.multiprocessing_distributed
        return spawn_ranks(arguments, words) if is_parent else run_rank(arguments)
    except (RuntimeError, ImportError) as error:  # what ESPnet2 refuses; mpi4py is missing
        say(f"{parser.prog}: {error}", sys.stderr)
        return 1


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a text, to standard output where nothing else is given, at once."""
    stream = stream or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


if __name__ == "__main__":
    # NOTE: not sys.exit(): after a failure threads may be stuck in torch's calls.
    os._exit(main(sys.argv[1:]))
