"""The check before a long job: its table, its words, its options, and the interfaces it finds."""

import builtins
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from espnet_sync import check
from espnet_sync.check import Row, explain_failure, find_interface, format_table, main
from espnet_sync.process_groups import join_store

HERE = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.7"}


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what a launcher around the tests may have set."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def row(rank: int, **given: Any) -> Row:
    """Return the row of a rank that is well."""
    place = {"rank": rank, "host": f"host{rank}", "interface": "eth0", "address": "10.0.0.7"}
    versions = {"python": "3.12.1", "torch": "2.14.0", "espnet": "202611", "espnet_sync": "0.1.0"}
    return {**place, **versions, "median ms": 0.25, "max ms": 1.5, **given}


# --- The table and the words ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "resolved", "expected"),
    [
        ("", "172.17.0.1", ("docker0", "172.17.0.1")),
        # Debian's /etc/hosts has an address that no interface shows.
        ("", "127.0.1.1", ("lo", "127.0.1.1")),
        ("", "192.0.2.9", ("lo", "127.0.0.1")),
        ("", "", ("lo", "127.0.0.1")),
        ("eth0", "127.0.1.1", ("eth0", "10.0.0.7")),
        ("eth0,eth9", "", ("eth0,eth9", "10.0.0.7, no such interface")),
    ],
)
def test_the_interface_is_the_one_that_gloo_takes(
    named: str, resolved: str, expected: tuple[str, str]
) -> None:
    assert find_interface(named, resolved, HERE) == expected


def test_this_ranks_row_is_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check.list_interfaces()
    assert found["lo"] == "127.0.0.1"
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x9")
    described = check.describe_rank(3, found)
    assert list(described) == list(row(3))[:-2]
    assert list(described.values())[:4] == [3, socket.gethostname(), "x9", "no such interface"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert check.describe_rank(3, found)["address"] == "127.0.0.1"


def test_the_table_marks_the_versions_that_most_ranks_do_not_have() -> None:
    rows = [row(0), row(1, torch="2.4.1", python="3.11.2"), row(2, torch="2.4.1"), row(3), row(4)]
    lines = format_table(rows).splitlines()
    assert " ".join(lines[0].split()) == " ".join(rows[0])
    words = "0 host0 eth0 10.0.0.7 3.12.1 2.14.0 202611 0.1.0 0.25 1.50"
    assert " ".join(lines[2].split()) == words
    assert [line.count("*") for line in lines[2:]] == [0, 2, 1, 0, 0]
    assert "3.11.2 *  2.4.1 *" in lines[3]


def test_without_tabulate_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "tabulate":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    lines = format_table([row(0), row(1, torch="2.4.1")]).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("rank 1, host host1, interface eth0, address 10.0.0.7, ")
    assert "torch 2.4.1 *" in lines[1]


def test_a_failure_names_the_rank_the_reason_the_interfaces_and_the_remedy() -> None:
    gloo = "rank 1: [enforce fail at /gloo/device.cc:84] ifa != nullptr. Unable to find eth9. "
    assert explain_failure(gloo, row(0, interface="lo", address="127.0.1.1"), HERE) == (
        "the ranks met, but could not connect with Gloo (rank 1: Unable to find eth9). This rank "
        "takes lo (127.0.1.1, which no other host can reach); its host has lo 127.0.0.1, docker0 "
        "172.17.0.1, eth0 10.0.0.7. Set GLOO_SOCKET_IFNAME on every rank to the interface of its "
        "host that reaches the others."
    )
    assert "no other host" not in explain_failure(gloo, row(0), HERE)


# --- The command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("", 0, "One rank: nothing to check."),
        ("--ngpu 1 --multiprocessing_distributed True", 0, "One rank: nothing to check."),
        # What espnet2.bin.launch appends over ssh.
        (
            "--ngpu 0 --multiprocessing_distributed false --local_rank none --dist_rank 0 "
            "--dist_world_size 1 --dist_init_method file:///no/such/x --dist_backend gloo",
            0,
            "One rank: nothing to check.",
        ),
        ("--dist_rank 0 --dist_world_size 2", 1, "MASTER_ADDR must be set"),
        ("--dist_world_size 2 --dist_master_addr a --dist_master_port 1", 1, "RANK must be set"),
        ("--dist_rank 2 --dist_world_size 2 --dist_init_method file:///x", 1, "RANK >= WORLD_SI"),
        ("--dist_launcher slurm", 1, "not to be launched by 'srun'"),
        ("--timeout 0", 2, "--timeout 0.0: must be a number of seconds above 0"),
        ("--timeout soon", 2, "--timeout: invalid float value: 'soon'"),
        ("--dist_launcher ssh", 2, "--dist_launcher: invalid choice: 'ssh'"),
        ("--lookahead 3", 2, "unrecognized arguments: --lookahead 3"),
        ("--help", 0, "srun --ntasks 8 python -m espnet_sync.check"),
    ],
)
def test_one_rank_alone_and_wrong_words_are_told(
    words: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(words.split())
    except SystemExit as exit_:
        ended = exit_.code
    told = capsys.readouterr()
    assert ended == code
    assert message in (told.err if code else told.out)


@pytest.mark.parametrize(
    ("words", "ranks", "world_size"),
    [("--ngpu 3", [0, 1, 2], 3), ("--ngpu 2 --dist_world_size 3 --dist_rank 1", [2, 3], 6)],
)
def test_a_host_starts_its_ranks_as_espnet2_does(
    words: str, ranks: list[int], world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            assert command[1:3] == ["-m", "espnet_sync.check"]
            started.append(check.build_parser().parse_args(command[3:]))
            self.code = int(len(started) == 2)

        def wait(self) -> int:
            return self.code

    monkeypatch.setattr(subprocess, "Popen", Process)
    code = main(["--multiprocessing_distributed", "true", "--timeout", "7", *words.split()])
    assert code == 1, "the second rank failed"
    assert [one.dist_rank for one in started] == ranks
    assert [one.local_rank for one in started] == list(range(len(ranks)))
    for one in started:
        assert (one.dist_world_size, one.ngpu, one.timeout) == (world_size, 1, 7.0)
        assert one.multiprocessing_distributed is False
    if world_size == 3:
        assert {one.dist_master_addr for one in started} == {"localhost"}
        assert len({one.dist_master_port for one in started} - {None}) == 1


def test_a_file_store_without_its_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="its folder is not there"):
        join_store(f"file://{tmp_path}/nowhere/new", 0, 2, 1.0)
