"""Run functions on real Gloo ranks: one process a rank, a deadline for each, no ports.

    outcomes = run_ranks(4, my_rank_function, arguments...)

`my_rank_function(rank, world_size, arguments...)` is module-level and runs in a process of its
own, whose default group is initialised through a file. What it returns or raises comes back,
in rank order. A rank that is not done at the deadline dumps the stacks of all its threads and
fails the test, as does one that dies without a word, unless the test expects it.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed

#: Seconds that a rank may take before its stacks are dumped.
DEADLINE = 90.0
#: Seconds that torch waits for a peer in a collective of the default group.
GROUP_TIMEOUT = 15.0


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        value: What its function returned.
        error: What its function raised.
        trace: The traceback of `error`, as text.
        exit_code: Of its process; negative for a signal.
        output: What it wrote to standard output and standard error.
        seconds: From its function's start to its end.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None
    output: str = ""
    seconds: float = 0.0


class RanksFailedError(AssertionError):
    """Some ranks raised, died, or were not done at the deadline: with each one's traceback."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    deadline: float = DEADLINE,
    group_timeout: float = GROUP_TIMEOUT,
    store: str = "file",
    initialise: bool = True,
) -> list[Any]:
    """Run a function on all ranks and return what each returned.

    Args:
        world_size: The number of ranks.
        function: Module-level; called as `function(rank, world_size, *arguments)`.
        *arguments: Picklable, the same for all ranks.
        deadline: Seconds before a rank's stacks are dumped.
        group_timeout: Seconds, of the default group.
        store: `file` for a FileStore, `tcp` for a TCPStore that rank 0 hosts.
        initialise: Whether the default group is initialised before the call.

    Raises:
        RanksFailedError: If a rank raised, died or ran into the deadline.
    """
    outcomes = try_ranks(
        world_size,
        function,
        *arguments,
        deadline=deadline,
        group_timeout=group_timeout,
        store=store,
        initialise=initialise,
    )
    bad = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.exit_code != 0}
    if bad:
        raise RanksFailedError("\n".join(_describe(rank, bad[rank]) for rank in bad))
    return [outcome.value for outcome in outcomes]


def try_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    deadline: float = DEADLINE,
    group_timeout: float = GROUP_TIMEOUT,
    store: str = "file",
    initialise: bool = True,
) -> list[Outcome]:
    """Run a function on all ranks as `run_ranks` does, and return how each ended.

    A rank may raise or die here: the test looks at its outcome.

    Raises:
        RanksFailedError: If a rank ran into the deadline.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with tempfile.TemporaryDirectory(prefix="espnet_sync-ranks-") as folder:
        job = _Job(
            world_size,
            function,
            arguments,
            Path(folder),
            deadline,
            group_timeout,
            store,
            initialise,
        )
        processes, receivers = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(job, rank, sender), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        try:
            outcomes = _collect(processes, receivers, job)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        late = [rank for rank, outcome in enumerate(outcomes) if "Timeout (" in outcome.trace]
        if late:
            raise RanksFailedError(
                f"ranks {late} were not done after {deadline} s\n"
                + "\n".join(_describe(rank, outcome) for rank, outcome in enumerate(outcomes))
            )
        return outcomes


@dataclass(frozen=True)
class _Job:
    world_size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    folder: Path
    deadline: float
    group_timeout: float
    store: str
    initialise: bool


def _run_rank(job: _Job, rank: int, sender: Connection) -> None:
    output = os.open(job.folder / f"output.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Python's own streams may have been made before, over other descriptors.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = open(job.folder / f"stacks.{rank}", "w")  # noqa: SIM115
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(job.deadline, exit=True, file=stacks)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(rank),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    started = time.monotonic()
    value, error, trace = None, None, ""
    try:
        if job.initialise:
            initialise_group(job.folder, rank, job.world_size, job.group_timeout, job.store)
        value = job.function(rank, job.world_size, *job.arguments)
    except BaseException as raised:
        error, trace = raised, traceback.format_exc()
    seconds = time.monotonic() - started
    try:
        message = pickle.dumps((value, error, trace, seconds))
    except Exception as unpicklable:
        error = RuntimeError(f"{error!r} / {value!r}: {unpicklable}")
        message = pickle.dumps((None, error, trace, seconds))
    sender.send_bytes(message)
    if torch.distributed.is_initialized() and error is None:
        torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    if error is not None:
        # As a rank that raises would leave: without waiting for what it had under way.
        os._exit(1)


def tail(rank: int) -> float:
    """Collective: stand in for validation, which comes after an epoch's loop on all ranks."""
    total = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(total)
    return total.item()


def right_tail(world_size: int) -> float:
    """Return what `tail` gives where no other collective got in between."""
    return world_size * (world_size + 1) / 2


def initialise_group(
    folder: Path, rank: int, world_size: int, timeout: float = GROUP_TIMEOUT, store: str = "file"
) -> None:
    """Initialise the default group with a FileStore, or with a TCPStore on a free port."""
    made: torch.distributed.Store
    if store == "file":
        made = torch.distributed.FileStore(str(folder / "store"), world_size)
    else:
        meeting = torch.distributed.FileStore(str(folder / "port"), world_size)
        port = 0 if rank == 0 else int(meeting.get("port"))
        made = torch.distributed.TCPStore(
            "127.0.0.1",
            port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
        if rank == 0:
            meeting.set("port", str(made.port))
    torch.distributed.init_process_group(
        "gloo",
        store=made,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def _collect(processes: list[Any], receivers: list[Connection], job: _Job) -> list[Outcome]:
    """Wait for all ranks; each ends itself at its deadline, which counts from its start."""
    until = time.monotonic() + job.deadline + 60
    messages: dict[int, tuple[Any, BaseException | None, str, float]] = {}
    waiting = dict(enumerate(receivers))
    while waiting and time.monotonic() < until:
        for ready in multiprocessing.connection.wait(list(waiting.values()), timeout=1):
            rank = receivers.index(ready)  # type: ignore[arg-type]
            with contextlib.suppress(EOFError):
                messages[rank] = pickle.loads(receivers[rank].recv_bytes())
            del waiting[rank]
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(max(0.1, until - time.monotonic()))
        value, error, trace, seconds = messages.get(rank, (None, None, "", 0.0))
        stacks = job.folder / f"stacks.{rank}"
        output = job.folder / f"output.{rank}"
        trace += stacks.read_text() if stacks.exists() else ""
        if process.is_alive():
            trace += f"\nTimeout (rank {rank} did not even dump its stacks)"
        outcomes.append(
            Outcome(
                value=value,
                error=error,
                trace=trace,
                exit_code=process.exitcode,
                output=output.read_text(errors="replace") if output.exists() else "",
                seconds=seconds,
            )
        )
    return outcomes


def _describe(rank: int, outcome: Outcome) -> str:
    return (
        f"--- rank {rank}: exit code {outcome.exit_code}, {outcome.error!r}\n{outcome.trace}\n"
        f"{outcome.output[-4000:]}"
    )
