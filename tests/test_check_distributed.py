"""The check before a long job, on real ranks: they reach one another, or who does not is named."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from espnet_sync import check
from tests.ranks import Outcome, try_ranks
from tests.speech import TORCHRUN, Ended, run

CHECK = (sys.executable, "-m", "espnet_sync.check")


def check_on_rank(
    rank: int, world_size: int, words: list[str], variables: Mapping[int, Mapping[str, str]]
) -> None:
    """Run the command as a process that a launcher started would."""
    os.environ.update(variables.get(rank, {}))
    code = check.main(words)
    sys.stdout.flush()
    os._exit(code)


def assert_well(ended: Ended, ranks: int) -> None:
    """Assert that a table of all ranks was shown once, and that they reach one another."""
    assert ended.code == 0, ended.output
    rows = [line.split() for line in ended.lines(rf"^ +\d+ +{socket.gethostname()} .*$")]
    assert [int(words[0]) for words in rows] == list(range(ranks)), ended.output
    for words in rows:
        median, longest = map(float, words[-2:])
        assert 0 < median <= longest
    assert f"All {ranks} ranks on 1 host reach one another." in ended.output


def assert_failed_alike(outcomes: list[Outcome], *parts: str) -> None:
    """Assert that every rank left with 1 and said the same in a line of its own."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 1, outcome
        assert "Traceback" not in outcome.output
        lines = [line for line in outcome.output.splitlines() if line.startswith("rank ")]
        assert len(lines) == 1, outcome.output
        assert lines[0].startswith(f"rank {rank} on {socket.gethostname()}, ")
        for part in parts:
            assert part in lines[0]


def write_script(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def rows_of(outcome: Outcome) -> list[str]:
    """Return the rank, and what is said of its interface, for each row of the table."""
    host = socket.gethostname()
    rows = [line.split() for line in outcome.output.splitlines() if f" {host} " in line]
    return [" ".join(words[:4]) for words in rows if words[0].isdigit()]


def test_torchruns_ranks_reach_one_another(tmp_path: Path) -> None:
    ended = run([*TORCHRUN, "--nproc_per_node=2", *CHECK], tmp_path)
    assert_well(ended, 2)
    assert "frame #" not in ended.output


def test_the_ranks_that_espnet2s_launch_has_spawned_reach_one_another(tmp_path: Path) -> None:
    # As Kaldi's run.pl is called: --gpu 2 LOG COMMAND.
    script = write_script(tmp_path / "run.pl", 'shift 3; exec "$@"')
    launch = [sys.executable, "-m", "espnet2.bin.launch", "--cmd", script, "--ngpu", "2"]
    ended = run([*launch, "--", *CHECK], tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    assert_well(ended, 2)


def test_the_ranks_that_espnet2s_launch_starts_over_ssh_reach_one_another(tmp_path: Path) -> None:
    write_script(tmp_path / "ssh", 'shift; exec sh -c "$*"')
    launch = [sys.executable, "-m", "espnet2.bin.launch", "--host", "a,b", "--ngpu", "0"]
    launch += ["--envfile", "none", "--log", "-"]
    ended = run([*launch, "--", *CHECK], tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert_well(ended, 2)
    assert not list(tmp_path.glob(".dist_init_*")), "a rerun would find the keys of this one"


def test_a_rank_that_never_comes_is_named_on_every_other_rank(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/meeting"
    words = ["--timeout", "8", "--dist_init_method", where, "--dist_world_size", "3"]
    outcomes = try_ranks(2, check_on_rank, words, {}, initialise=False)
    assert_failed_alike(outcomes, f"rank 2 of 3 did not come to {where} within 8 s", "MASTER_ADDR")
    assert len(rows_of(outcomes[0])) == 2
    assert not rows_of(outcomes[1]), "one table is enough"


def test_a_wrong_interface_is_told_on_every_rank(tmp_path: Path) -> None:
    words = ["--dist_init_method", f"file://{tmp_path}/meeting"]
    variables = {0: {"GLOO_SOCKET_IFNAME": "eth99"}, 1: {"GLOO_SOCKET_IFNAME": "lo"}}
    outcomes = try_ranks(2, check_on_rank, words, variables, initialise=False)
    assert_failed_alike(
        outcomes,
        "could not connect with Gloo (rank 0: Unable to find address for: eth99). This rank takes",
        "its host has lo 127.0.0.1",
        "Set GLOO_SOCKET_IFNAME on every rank",
    )
    assert "takes eth99 (no such interface)" in outcomes[0].output
    assert "takes lo (127.0.0.1, which no other host can reach)" in outcomes[1].output
    host = socket.gethostname()
    assert rows_of(outcomes[0]) == [f"0 {host} eth99 no", f"1 {host} lo 127.0.0.1"]


def test_a_master_out_of_reach_is_told_without_a_traceback(tmp_path: Path) -> None:
    words = ["--timeout", "2", "--dist_world_size", "2", "--dist_rank", "1"]
    with socket.socket() as silent:  # bound, so that nobody else takes it, and not listening
        silent.bind(("localhost", 0))
        port = str(silent.getsockname()[1])
        words += ["--dist_master_addr", "localhost", "--dist_master_port", port]
        ended = run([*CHECK, *words], tmp_path)
    assert ended.code == 1, ended.output
    (line,) = ended.output.splitlines()
    assert line.startswith(f"rank 1 on {socket.gethostname()}, looking for the store at tcp://")
    assert f"localhost:{port}" in line
    assert "within 2 s" in line
    assert "Set MASTER_ADDR (--dist_master_addr)" in line


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    # NOTE: whatever it is at by then, the outcome is the same.
    words = ["timeout", "--preserve-status", "--signal=INT", "5", *CHECK, "--timeout", "100"]
    words += ["--dist_world_size", "2", "--dist_rank", "0", "--dist_init_method"]
    ended = run([*words, f"file://{tmp_path}/meeting"], tmp_path)
    assert (ended.code, ended.output) == (130, "")
