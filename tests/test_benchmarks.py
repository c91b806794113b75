"""The benchmarks: each is on the list, and what they count is counted right. Nothing is timed."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

from tests.benchmarks.__main__ import BENCHMARKS, run
from tests.benchmarks.gpu import (
    ESPNET3,
    NO_SYNC,
    OURS,
    OURS_FLAG,
    OURS_FORCED,
    LaunchBound,
    main,
    make_builds,
    measure,
    one_rank,
    profile_waits,
)
from tests.benchmarks.growth import time_threads
from tests.benchmarks.machine import print_table

FOLDER = Path(__file__).parent / "benchmarks"
#: What serves several benchmarks.
SHARED = {"__init__", "__main__", "machine", "rounds", "ways"}


def test_every_benchmark_is_on_the_list_and_has_a_main() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} - SHARED == set(BENCHMARKS)
    for name in BENCHMARKS:
        assert callable(importlib.import_module(f"tests.benchmarks.{name}").main), name


def test_an_unknown_benchmark_is_refused_with_those_there_are() -> None:
    with pytest.raises(SystemExit, match="unknown benchmark 'speed': there are single_process"):
        run(["speed"])


def test_the_examples_hold() -> None:
    for name in ("rounds", "added_cost", "growth", "profiling"):
        result = doctest.testmod(importlib.import_module(f"tests.benchmarks.{name}"))
        assert result.attempted > 0, name
        assert result.failed == 0, name


def test_a_table_is_markdown_with_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("way", "µs"), [("ours", "12 (3 to 45)"), ("no sync", "-1")])
    assert capsys.readouterr().out.splitlines()[:3] == [
        "| way     |           µs |",
        "|---------|--------------|",
        "| ours    | 12 (3 to 45) |",
    ]


def test_raw_ranks_as_threads_reduce() -> None:
    seconds = time_threads(3, agreements=2)
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Undo what torch's profiler sets."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("profiled")
def test_the_flag_is_read_in_the_iterator_and_ours_reads_none_there() -> None:
    device = torch.device("cpu")
    model = LaunchBound(device)
    reads = ("aten::_local_scalar_dense",)
    with one_rank(device):
        builds = make_builds([torch.randn(8, 32)] * 4)
        found = {name: profile_waits(build, model, reads) for name, build in builds.items()}
    # A flag before each batch, and one that ends the pass.
    assert {name: waits.number for name, waits in found.items()} == {
        NO_SYNC: 0,
        ESPNET3: 5,
        OURS_FLAG: 5,
        OURS_FORCED: 0,
        OURS: 0,
    }
    assert found[ESPNET3].seconds > 0


@pytest.mark.usefixtures("profiled")
def test_the_gpu_benchmark_measures_all_ways_on_any_device() -> None:
    seconds, waits = measure(torch.device("cpu"), steps=3, rounds=2)
    assert seconds.keys() == waits.keys() == {NO_SYNC, ESPNET3, OURS_FLAG, OURS_FORCED, OURS}
    assert all(len(times) == 2 for times in seconds.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU: the benchmark runs there")
def test_the_gpu_benchmark_says_that_it_did_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert "NOT RUN: torch sees no CUDA device here" in capsys.readouterr().out
