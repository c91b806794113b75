"""The check before a long job: its table, its words, its options, and the interfaces it finds."""

import builtins
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from espnet_sync import check
from espnet_sync.check import (
    Row,
    build_parser,
    describe_differences,
    explain_absence,
    explain_failures,
    find_interface,
    format_table,
    hostname_addresses,
    list_by_host,
    list_interfaces,
    main,
)

HERE = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7", "fd00::7"]}
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what a launcher around the tests may have set."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def row(rank: int, **given: Any) -> Row:
    """Return the row of a rank that is well on a host of its own."""
    usual = {
        "state": "ok",
        "host": f"host{rank}",
        "interface": "eth0",
        "address": f"10.0.0.{rank}",
        "chosen_by": "hostname",
        "python": "3.12.1",
        "torch": "2.14.0",
        "espnet": "202611",
        "espnet_sync": "0.1.0",
        "median_ms": 0.25,
        "max_ms": 1.5,
        "interfaces": HERE,
    }
    return Row(rank=rank, **{**usual, **given})


# --- Interfaces -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "resolved", "expected"),
    [
        ("", ["10.0.0.7"], ("eth0", "10.0.0.7", "hostname")),
        ("", ["fd00::7", "10.0.0.7"], ("eth0", "fd00::7", "hostname")),
        ("", ["192.0.2.9", "172.17.0.1"], ("docker0", "172.17.0.1", "hostname")),
        # Debian's /etc/hosts has an address that the interface itself does not have.
        ("", ["127.0.1.1"], ("lo", "127.0.1.1", "hostname")),
        ("", ["192.0.2.9"], ("lo", "127.0.0.1", "fallback")),
        ("", [], ("lo", "127.0.0.1", "fallback")),
        ("eth0", ["127.0.1.1"], ("eth0", "10.0.0.7", "GLOO_SOCKET_IFNAME")),
        ("eth9", ["10.0.0.7"], ("eth9", "none", "GLOO_SOCKET_IFNAME")),
        ("eth0, lo", [], ("eth0,lo", "10.0.0.7,127.0.0.1", "GLOO_SOCKET_IFNAME")),
    ],
)
def test_the_interface_is_the_one_that_gloo_takes(
    named: str, resolved: Sequence[str], expected: tuple[str, str, str]
) -> None:
    assert find_interface(named, resolved, HERE) == expected


def test_the_interfaces_of_this_host_are_found() -> None:
    found = list_interfaces()
    names = {name for _, name in socket.if_nameindex()}
    assert set(found) <= names
    assert "127.0.0.1" in found["lo"]
    assert not any(address.startswith("fe80") for own in found.values() for address in own)


def test_a_hostname_that_does_not_resolve_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert hostname_addresses() == []


# --- The table and the words ------------------------------------------------------------------


def test_the_table_has_a_row_per_rank_with_all_that_was_asked_for() -> None:
    lines = format_table([row(0), row(1, median_ms=12.5), Row(rank=2)]).splitlines()
    for word in ("rank", "state", "host", "interface", "address", "torch", "median ms", "max ms"):
        assert word in lines[0]
    words = "0 ok host0 eth0 10.0.0.0 hostname 3.12.1 2.14.0 202611 0.1.0 0.25 1.50"
    assert " ".join(lines[2].split()) == words
    assert "12.50" in lines[3]
    assert " ".join(lines[4].split()) == "2 did not come" + 8 * " ?" + " - -"


def test_versions_that_differ_are_marked_and_told() -> None:
    rows = [row(0), row(1, torch="2.4.1", python="3.11.2"), row(2, torch="2.4.1"), row(3), row(4)]
    table = format_table([*rows, Row(rank=5)]).splitlines()
    assert [line.count("*") for line in table[2:]] == [0, 2, 1, 0, 0, 0]
    assert "2.4.1 *" in table[3] and "3.11.2 *" in table[3]
    assert describe_differences(rows).splitlines() == [
        "* python: 3.11.2 on rank 1, 3.12.1 elsewhere. Install the same on every host.",
        "* torch: 2.4.1 on ranks 1, 2, 2.14.0 elsewhere. Install the same on every host.",
    ]
    assert describe_differences([row(0), row(1), Row(rank=2)]) == ""


def test_without_tabulate_the_rows_are_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "tabulate":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    lines = format_table([row(0), row(1)]).splitlines()
    assert [json.loads(line)["host"] for line in lines[:2]] == ["host0", "host1"]
    assert lines[2] == "(pip install tabulate shows this as a table)"


def test_ranks_that_did_not_come_are_named_with_what_they_need() -> None:
    text = explain_absence((2, 5), "tcp://10.0.0.1:29500", 20.0, 8)
    assert text.startswith("ranks 2, 5 of 8 did not come to tcp://10.0.0.1:29500 within 20 s.")
    assert "MASTER_ADDR and MASTER_PORT" in text
    text = explain_absence((2,), "file:///shared/meeting", 20.0, 8)
    assert "rank 2 of 8" in text and "MASTER" not in text and "no earlier run has left" in text


def test_a_failure_to_connect_lists_the_interfaces_of_each_host() -> None:
    rows = [
        row(0, host="a"),
        row(1, host="b", interface="eth9", chosen_by="GLOO_SOCKET_IFNAME", address="none"),
        row(2, host="b", interface="lo", address="127.0.1.1"),
        row(3, host="b"),
    ]
    lines = explain_failures({1: "Unable to find address for: eth9", 3: "timed out"}, rows)
    assert lines.splitlines() == [
        "the ranks met, but could not connect: rank 1 (Unable to find address for: eth9, "
        "GLOO_SOCKET_IFNAME=eth9); rank 3 (timed out).",
        "rank 2 on b takes lo (127.0.1.1), which no other host can reach: the host's own name "
        "resolves to it there, see /etc/hosts.",
        "Set GLOO_SOCKET_IFNAME on every rank to the interface of its host that reaches the "
        "others. There are:",
        "  a (rank 0): lo 127.0.0.1 ::1, docker0 172.17.0.1, eth0 10.0.0.7 fd00::7",
        "  b (ranks 1, 2, 3): lo 127.0.0.1 ::1, docker0 172.17.0.1, eth0 10.0.0.7 fd00::7",
    ]


def test_ranks_that_fail_alike_are_told_together_and_loopback_is_fine_on_one_host() -> None:
    rows = [row(rank, host="a", interface="lo", address="127.0.0.1") for rank in range(3)]
    text = explain_failures(dict.fromkeys(range(3), "timed out"), rows)
    assert "ranks 0, 1, 2 (timed out)." in text
    assert "no other host" not in text


def test_a_long_list_of_hosts_is_cut() -> None:
    lines = list_by_host([row(rank) for rank in range(20)])
    assert len(lines) == 17
    assert lines[-1] == "  and 4 more hosts"


# --- The command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        # As espnet2.bin.launch appends them: ssh, one host, Slurm and MPI.
        "--ngpu 0 --multiprocessing_distributed false --local_rank none --dist_rank 1 "
        "--dist_world_size 2 --dist_init_method file:///x --dist_backend gloo",
        "--ngpu 4 --multiprocessing_distributed True",
        "--ngpu 4 --multiprocessing_distributed true --dist_launcher slurm "
        "--dist_master_port 29500",
        "--ngpu 1 --multiprocessing_distributed true --dist_launcher mpi --dist_master_addr a "
        "--dist_master_port 29500",
    ],
)
def test_the_options_that_espnet2s_launch_appends_are_taken(words: str) -> None:
    arguments = build_parser().parse_args(words.split())
    assert isinstance(arguments.multiprocessing_distributed, bool)
    assert (arguments.timeout, arguments.json, arguments.local_rank) == (20.0, False, None)


@pytest.mark.parametrize("words", [["--timeout", "0"], ["--timeout", "soon"], ["--time", "3"]])
def test_options_that_can_not_be_taken_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_the_help_has_an_example_for_each_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    told = capsys.readouterr().out
    for word in ("torchrun --nnodes", "srun --ntasks", "espnet2.bin.launch", "file:///", "--json"):
        assert word in told


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--ngpu 1 --multiprocessing_distributed True",
        "--ngpu 0 --multiprocessing_distributed false --local_rank none --dist_rank 0 "
        "--dist_world_size 1 --dist_init_method file:///no/such/folder/x --dist_backend gloo",
    ],
)
@pytest.mark.usefixtures("without_launcher")
def test_one_rank_alone_has_nothing_to_check(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[2].split()[:3] == ["0", "alone", socket.gethostname()]
    assert "One rank: there is nothing to check." in told


@pytest.mark.usefixtures("without_launcher")
def test_programs_get_the_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and "One rank" in told["message"]
    assert [rank["state"] for rank in told["ranks"]] == ["alone"]
    assert told["ranks"][0]["interfaces"] == list_interfaces()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dist_rank 0 --dist_world_size 2", "MASTER_ADDR must be set"),
        ("--dist_world_size 2 --dist_master_addr a --dist_master_port 1", "RANK must be set"),
        (
            "--dist_rank 2 --dist_world_size 2 --dist_master_addr a --dist_master_port 1",
            "RANK >= WORLD_SIZE: 2 >= 2",
        ),
        ("--dist_launcher slurm", "not to be launched by 'srun'"),
    ],
)
@pytest.mark.usefixtures("without_launcher")
def test_what_espnet2_refuses_is_told_without_a_traceback(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({"ngpu": 3}, [0, 1, 2]),
        ({"ngpu": 2, "dist_world_size": 3, "dist_rank": 1}, [2, 3]),
    ],
)
@pytest.mark.usefixtures("without_launcher")
def test_a_host_starts_its_ranks_as_espnet2_does(
    given: Mapping[str, int], ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Process:
        exitcode = 0

        def __init__(self, target: Callable[..., Any], args: tuple[Any], daemon: bool) -> None:
            started.append(args[0])

        def start(self) -> None: ...

        def join(self) -> None: ...

    class Context:
        def __init__(self, method: str) -> None:
            assert method == "spawn"
            self.Process = Process

    monkeypatch.setattr(check.multiprocessing, "get_context", Context)
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert main(["--multiprocessing_distributed", "true", *words]) == 0
    assert [one.dist_rank for one in started] == ranks
    assert [one.local_rank for one in started] == list(range(given["ngpu"]))
    assert {one.dist_world_size for one in started} == {
        given["ngpu"] * given.get("dist_world_size", 1)
    }
    if "dist_rank" not in given:
        assert {one.dist_master_addr for one in started} == {"localhost"}
        assert len({one.dist_master_port for one in started} - {None}) == 1

    Process.exitcode = 1
    assert main(["--multiprocessing_distributed", "true", *words]) == 1
