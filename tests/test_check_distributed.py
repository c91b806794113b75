"""The check before a long job, on real ranks: they reach one another, or who does not is named."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from espnet2.train.distributed_utils import free_port

from tests.ranks import Outcome, run_ranks, try_ranks

#: Seconds: what is promised for a check that all ranks come to, and the most that one takes.
WELL, AT_MOST = 30.0, 35.0


def check_on_rank(
    rank: int,
    world_size: int,
    words: list[str],
    variables: Mapping[int, Mapping[str, str]],
    absent: tuple[int, ...] = (),
) -> None:
    """Run the command as a process that a launcher started would, unless the rank is absent."""
    if rank in absent:
        return
    from espnet_sync import check

    os.environ.update(variables.get(rank, {}))
    check.leave(check.main(words))


def failed_alike(outcomes: list[Outcome], *words: str) -> None:
    """Assert that every rank left with 1, said all of the words, and showed no traceback."""
    for outcome in outcomes:
        assert outcome.exit_code == 1, outcome
        assert "Traceback" not in outcome.output and "frame #" not in outcome.output
        for word in words:
            assert word in outcome.output


def run_command(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a module in a process of its own, without what a launcher around may have set."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def rows_of(table: str) -> list[list[str]]:
    """Return the words of the table's rows, which follow its line of dashes."""
    lines = table.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("---")) + 1
    return [line.split() for line in lines[start:] if line[:6].strip().isdigit()]


def test_torchruns_ranks_reach_one_another(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = run_command([*torchrun, "-m", "espnet_sync.check"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert [words[:3] for words in rows] == [
        [str(rank), "ok", socket.gethostname()] for rank in range(3)
    ]
    for words in rows:
        median, longest = map(float, words[-2:])
        assert 0 < median <= longest < 1e3 * WELL
    assert "All 3 ranks on 1 host reach one another" in done.stdout


def test_ranks_that_this_host_spawns_reach_one_another(tmp_path: Path) -> None:
    done = run_command(
        ["espnet_sync.check", "--ngpu", "2", "--multiprocessing_distributed", "True", "--json"],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    assert [(rank["rank"], rank["state"]) for rank in told["ranks"]] == [(0, "ok"), (1, "ok")]


def test_the_options_of_espnet2s_launch_and_of_slurm_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "meeting"
    slurm = {
        rank: {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "3",
            "SLURM_STEP_NUM_NODES": "3",
            "SLURM_STEP_NODELIST": "host[1-3]",
            "SLURM_NODEID": str(rank),
            "RANK": "0",
        }
        for rank in range(3)
    }
    words = ["--ngpu", "0", "--multiprocessing_distributed", "true", "--dist_launcher", "slurm"]
    words += ["--dist_init_method", f"file://{file}", "--dist_backend", "gloo"]
    outcomes = try_ranks(3, check_on_rank, words, slurm, initialise=False)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], outcomes
    assert [words[:2] for words in rows_of(outcomes[0].output)] == [
        ["0", "ok"],
        ["1", "ok"],
        ["2", "ok"],
    ]
    assert outcomes[1].output.strip() == outcomes[2].output.strip() == ""
    assert max(outcome.seconds for outcome in outcomes) < WELL
    assert not file.exists(), "a rerun with the same file would find the keys of this one"


def launch_on_rank(rank: int, world_size: int, folder: str) -> None:
    """Run the command with what `espnet2.bin.launch --host` appends to it."""
    words = ["--ngpu", "0", "--multiprocessing_distributed", "false", "--local_rank", "none"]
    words += ["--dist_rank", str(rank), "--dist_world_size", str(world_size)]
    words += ["--dist_init_method", f"file://{folder}/meeting", "--dist_backend", "gloo"]
    check_on_rank(rank, world_size, words, {})


def test_the_options_of_espnet2s_launch_over_ssh_are_followed(tmp_path: Path) -> None:
    run_ranks(2, launch_on_rank, str(tmp_path), initialise=False)


def test_a_wrong_interface_is_told_on_every_rank_at_once() -> None:
    words = ["--dist_init_method", f"tcp://localhost:{free_port()}"]
    # On the rank that serves the store, whose end would cut off the others.
    variables = {0: {"GLOO_SOCKET_IFNAME": "eth99"}}
    before = time.monotonic()
    outcomes = try_ranks(3, check_on_rank, words, variables, initialise=False)
    assert time.monotonic() - before < AT_MOST
    failed_alike(
        outcomes,
        "could not connect: rank 0 (",
        "GLOO_SOCKET_IFNAME=eth99)",
        "Set GLOO_SOCKET_IFNAME on every rank",
        f"{socket.gethostname()} (ranks 0, 1, 2): lo 127.0.0.1",
    )
    rows = rows_of(outcomes[0].output)
    assert [words[1] for words in rows] == ["failed", "came", "came"]
    assert rows[0][3:5] == ["eth99", "none"]


def test_a_rank_that_never_comes_is_named_on_every_other_rank(tmp_path: Path) -> None:
    words = ["--timeout", "2", "--dist_init_method", f"file://{tmp_path}/meeting"]
    outcomes = try_ranks(3, check_on_rank, words, {}, (2,), initialise=False)
    failed_alike(outcomes[:2], "rank 2 of 3 did not come", "within 2 s")
    assert "2  did not come" in outcomes[0].output
    assert "---" not in outcomes[1].output, "one table is enough"


def test_a_rank_0_that_never_comes_is_named_with_its_address() -> None:
    port = free_port()
    words = ["--timeout", "2", "--dist_init_method", f"tcp://localhost:{port}"]
    outcomes = try_ranks(3, check_on_rank, words, {}, (0,), initialise=False)
    failed_alike(
        outcomes[1:], f"could not reach rank 0 at localhost:{port}", "Set MASTER_ADDR", "refused"
    )


def fault_on_rank(rank: int, world_size: int, folder: str, port: int) -> None:
    """Be rank 0 of a job of one's own, whose rank 1 never comes."""
    from espnet_sync import check

    methods = [
        f"file://{folder}/interrupted",
        f"file://{folder}/stuck",
        f"tcp://localhost:{port}",
        f"file://{folder}/no/such/folder",
        "mpi://somewhere",
    ]
    if rank == 0:
        interrupting = threading.Thread(target=_interrupt, args=(Path(folder, "interrupted"),))
        interrupting.start()
    if rank == 1:
        check.LAST_SECONDS = 0.0
        check.describe_this_rank = lambda *_: threading.Event().wait()  # type: ignore
    words = ["--dist_rank", "0", "--dist_world_size", "2", "--dist_init_method", methods[rank]]
    check.leave(check.main([*words, "--timeout", "20" if rank == 0 else "1"]))


def _interrupt(file: Path) -> None:
    """Send Ctrl-C once the check has come so far that it waits in the file."""
    while not file.exists() or not file.stat().st_size:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_whatever_happens_a_rank_says_what_and_leaves(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcomes = try_ranks(5, fault_on_rank, str(tmp_path), port, initialise=False)
    interrupted, stuck, occupied, folderless, foreign = outcomes
    assert interrupted.exit_code == 130
    assert "interrupted while waiting for the other ranks" in interrupted.output
    assert "Traceback" not in interrupted.output
    failed_alike([stuck], "was stuck looking up its own host after 1 s", "GLOO_SOCKET_IFNAME")
    failed_alike([occupied], "could not serve", "Set MASTER_PORT")
    failed_alike([folderless], "there is no folder", "file system that all hosts share")
    failed_alike([foreign], "--dist_init_method mpi://somewhere: must be env://")


def die_on_rank(rank: int, world_size: int, words: list[str]) -> None:
    """Run the command, and be killed in the midst of the agreements where the rank is 1."""
    from espnet_sync import check

    def numbers(self: check._Numbers, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
        yield from range(10)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        check._Numbers.build_iter = numbers  # type: ignore[method-assign]
    check.leave(check.main(words))


def test_a_rank_that_dies_on_the_way_is_named() -> None:
    words = ["--dist_init_method", f"tcp://localhost:{free_port()}"]
    outcomes = try_ranks(3, die_on_rank, words, initialise=False)
    assert outcomes[1].exit_code == -signal.SIGKILL
    failed_alike([outcomes[0], outcomes[2]], "could not make an agreement", "lost rank 1 ")
    assert [words[1] for words in rows_of(outcomes[0].output)][1] == "came"
