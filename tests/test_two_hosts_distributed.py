"""Two hosts, as network namespaces: the link between them goes down in mid-epoch."""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import espnet_sync.roll_call
from espnet_sync.errors import EpochSyncError
from espnet_sync.roll_call import REFUSED_SECONDS
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.factories import NumberFactory

TIMEOUT = 6.0
PROBE = 4.0
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def within(seconds: float) -> float:
    """Return a bound of the contract with slack for two busy cores."""
    return 2 * seconds + 3


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Make two namespaces joined by a veth pair; gives their names, and those of the ends."""
    spaces = (f"hosts{os.getpid()}a", f"hosts{os.getpid()}b")
    ends = (f"v{os.getpid()}a", f"v{os.getpid()}b")
    made = []
    try:
        for space in spaces:
            ip("netns", "add", space)
            made.append(space)
        pair = ("type", "veth", "peer", "name", ends[1], "netns", spaces[1])
        ip("link", "add", ends[0], "netns", spaces[0], *pair)
        for space, end, address in zip(spaces, ends, ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", end, "up")
        yield spaces, ends
    finally:
        for space in made:
            ip("netns", "delete", space)


def join(rank: int, folder: Path) -> None:
    """Initialise torch.distributed, with a port that the first host finds free."""
    port_file = folder / "port"
    while rank and not port_file.exists():
        time.sleep(0.05)
    store = torch.distributed.TCPStore(
        ADDRESSES[0],
        int(port_file.read_text()) if rank else 0,
        2,
        is_master=rank == 0,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
    )
    if rank == 0:
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port_file)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )


def lose_the_link(rank: int, folder: Path) -> None:
    """Train some batches, then go on until the other host is out of reach; writes what it saw."""
    join(rank, folder)
    factory = SyncedIterFactory(
        NumberFactory(1_000_000), label="train", timeout=TIMEOUT, backend="gloo"
    )
    total = torch.ones(1)
    try:
        for batch in factory.build_iter(1):
            if batch < 5:
                torch.distributed.all_reduce(total)
            elif batch == 5:
                (folder / f"trained.{rank}").touch()
            else:
                time.sleep(0.02)  # a step
        seen: dict[str, Any] = {"error": "none"}
    except EpochSyncError as error:
        seen = {
            "error": type(error).__name__,
            "ranks": getattr(error, "ranks", None),
            "message": str(error),
        }
    seen |= {"at": time.time(), "total": total.item()}
    (folder / f"seen.{rank}").write_text(json.dumps(seen))


def fall_back(rank: int, folder: Path) -> None:
    """Train where the control group's Gloo takes the loopback, which leads nowhere."""
    lines: list[str] = []
    logging.getLogger().addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    join(rank, folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # The thread that connects goes on for five times as long, and the process with it.
    espnet_sync.roll_call.PROBE_SECONDS = PROBE
    started = time.monotonic()
    iterator = SyncedIterFactory(NumberFactory(5 + rank), label="train").build_iter(1)
    seen = {"took": time.monotonic() - started, "batches": len(list(iterator)), "lines": lines}
    (folder / f"seen.{rank}").write_text(json.dumps(seen))
    # NOTE: torch may abort a process that ends right after a collective and keeps its groups.
    for thread in threading.enumerate():
        if thread.name == "espnet_sync probe":
            thread.join()
    torch.distributed.destroy_process_group()


def start_rank(
    rank: int, space: str, end: str, folder: Path, what: str = "lose_the_link"
) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", space, sys.executable, "-m", __name__, what, str(rank)]
    return subprocess.Popen(
        [*command, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"},
    )


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """End what is left of some processes."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def did_not_run(why: str) -> None:
    warnings.warn(f"THE TEST OF TWO HOSTS DID NOT RUN: {why}", stacklevel=2)


@pytest.fixture
def hosts() -> Iterator[tuple[tuple[str, str], tuple[str, str]] | None]:
    """Give two hosts as `two_hosts` does, or None, with a warning, where that needs more."""
    with contextlib.ExitStack() as stack:
        made = None
        if os.geteuid() or not shutil.which("ip"):
            did_not_run("it needs root and iproute2 (apt-get install iproute2)")
        else:
            try:
                made = stack.enter_context(two_hosts())
            except subprocess.CalledProcessError as error:
                did_not_run(f"{error.cmd}: {error.stderr}")
        yield made


def test_both_sides_of_a_link_that_goes_down_name_the_other(
    hosts: tuple[tuple[str, str], tuple[str, str]] | None, tmp_path: Path
) -> None:
    if hosts is not None:
        cut_and_look(*hosts, tmp_path)


def test_hosts_whose_gloo_takes_the_loopback_fall_back_within_the_bound(
    hosts: tuple[tuple[str, str], tuple[str, str]] | None, tmp_path: Path
) -> None:
    if hosts is None:
        return
    processes = [
        start_rank(rank, space, end, tmp_path, "fall_back")
        for rank, (space, end) in enumerate(zip(*hosts, strict=True))
    ]
    with ended(processes):
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    for rank in (0, 1):
        assert processes[rank].returncode == 0, outputs[rank]
        seen = json.loads((tmp_path / f"seen.{rank}").read_text())
        assert seen["batches"] == 5
        # Not the five times that connecting takes.
        assert seen["took"] < REFUSED_SECONDS + 2 * PROBE, seen
        told = [line for line in seen["lines"] if "could not make a Gloo group" in line]
        assert len(told) == (rank == 0), seen
        assert all("Connection refused" in line for line in told), seen


def cut_and_look(spaces: tuple[str, str], ends: tuple[str, str], folder: Path) -> None:
    processes = [start_rank(rank, spaces[rank], ends[rank], folder) for rank in (0, 1)]
    with ended(processes):
        until = time.monotonic() + 60
        while not all((folder / f"trained.{rank}").exists() for rank in (0, 1)):
            assert all(process.poll() is None for process in processes), "a rank left early"
            assert time.monotonic() < until, "the ranks did not come to train"
            time.sleep(0.05)
        ip("-n", spaces[0], "link", "set", ends[0], "down")
        cut = time.time()
        outputs = [process.communicate(timeout=TIMEOUT + 60)[0] for process in processes]
    for rank in (0, 1):
        assert processes[rank].returncode == 0, outputs[rank]
        seen = json.loads((folder / f"seen.{rank}").read_text())
        assert seen["total"] == 32, "the ranks trained together before"
        assert seen["error"] == "PeerLostError", seen
        assert seen["ranks"] == [1 - rank], seen
        assert seen["at"] - cut < TIMEOUT + within(3), seen
        assert "[train] epoch 1, pass 1, batch" in seen["message"]


if __name__ == "__main__":
    {"lose_the_link": lose_the_link, "fall_back": fall_back}[sys.argv[1]](
        int(sys.argv[2]), Path(sys.argv[3])
    )
