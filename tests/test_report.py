"""The report of a pass: its fields, its line, and the table and plot of a run's epochs."""

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import espnet_sync
from espnet_sync.report import (
    RankReport,
    SyncReport,
    append_report,
    format_table,
    main,
    plot_reports,
    read_reports,
)


def make_report(
    batches: int = 5, ended_by: tuple[int, ...] = (1,), **changes: object
) -> SyncReport:
    fields: dict[str, object] = {
        "label": "train",
        "epoch": 3,
        "batches": batches,
        "ended_by": ended_by,
        "ranks": (
            RankReport(rank=0, pulled=7, discarded=2, waited=0.25),
            RankReport(rank=1, pulled=5, waited=1.5),
        ),
    }
    return SyncReport(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_classes_are_exported_at_the_top() -> None:
    assert espnet_sync.SyncReport is SyncReport
    assert espnet_sync.RankReport is RankReport


def test_a_report_has_the_documented_fields() -> None:
    report = make_report()
    assert (report.label, report.epoch, report.batches, report.ended_by) == ("train", 3, 5, (1,))
    first = report.ranks[0]
    assert (first.rank, first.pulled, first.discarded, first.repeated, first.waited) == (
        0,
        7,
        2,
        0,
        0.25,
    )


def test_a_report_cannot_be_changed_and_can_be_pickled_and_compared() -> None:
    report = make_report()
    assert pickle.loads(pickle.dumps(report)) == report == make_report()
    assert report != make_report(batches=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.batches = 6  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.ranks[0].pulled = 6  # type: ignore[misc]


def test_the_line_is_one_line_that_says_where_what_and_who() -> None:
    line = str(make_report())
    assert "\n" not in line
    for part in (
        "[train] epoch 3",
        "5 batches on each of 2 ranks",
        "rank 1 ran out first",
        "2 batches discarded",
        "1.5 s",
        "rank 1",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        ({"ended_by": (0, 1)}, ["all ran out together"], ["first"]),
        ({"ended_by": ()}, ["stopped on request"], ["ran out"]),
        ({"batches": 1}, ["1 batch on"], ["1 batches"]),
        ({"label": "", "epoch": None}, ["[espnet_sync]"], ["epoch None", "[]"]),
        (
            {"ranks": tuple(RankReport(rank=rank, pulled=5) for rank in range(3))},
            ["each of 3 ranks"],
            ["discarded", "repeated"],
        ),
        (
            {
                "ended_by": (0, 2),
                "ranks": tuple(RankReport(rank=rank, pulled=9, repeated=1) for rank in range(3)),
            },
            ["ranks 0, 2 ran out", "3 batches repeated"],
            ["discarded"],
        ),
        (
            {
                "ended_by": (0, 2),
                "ranks": tuple(RankReport(rank=rank, pulled=5 + rank % 2) for rank in range(3)),
            },
            ["ranks 0, 2 ran out first"],
            ["repeated"],
        ),
    ],
    ids=["together", "stopped", "singular", "bare", "nothing lost", "repeated", "two first"],
)
def test_the_line_tells_each_kind_of_end(
    changes: dict[str, object], present: list[str], absent: list[str]
) -> None:
    line = str(make_report(**changes))  # type: ignore[arg-type]
    for part in present:
        assert part in line
    for part in absent:
        assert part not in line


def test_the_line_of_a_lone_rank_speaks_of_no_others() -> None:
    alone = make_report(ended_by=(0,), ranks=(RankReport(rank=0, pulled=5),))
    assert str(alone) == "[train] epoch 3: 5 batches"
    stopped = dataclasses.replace(alone, ended_by=())
    assert str(stopped) == "[train] epoch 3: 5 batches; stopped on request"


# --- The file, the table and the plot ---------------------------------------------------------


def write_run(folder: Path, epochs: int = 3, ranks: int = 2) -> Path:
    """Write a run's file, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for epoch in range(1, epochs + 1):
        for label, batches in (("train", 20), ("valid", 4)):
            rows = tuple(
                RankReport(
                    rank=rank, pulled=batches + rank, discarded=rank, waited=0.5 * rank + epoch
                )
                for rank in range(ranks)
            )
            report = make_report(batches, (0,), label=label, epoch=epoch, ranks=rows)
            append_report(folder / "epoch_sync.jsonl", report)
    return folder / "epoch_sync.jsonl"


def test_reports_come_back_as_they_were_written(tmp_path: Path) -> None:
    report = make_report()
    append_report(tmp_path / "epoch_sync.jsonl", report)
    assert read_reports(tmp_path / "epoch_sync.jsonl") == [report]
    assert read_reports(tmp_path) == [report]


@pytest.mark.parametrize("length", [1, 5, 40])
def test_a_line_that_was_cut_off_costs_nothing_else(tmp_path: Path, length: int) -> None:
    file = write_run(tmp_path, epochs=2)
    whole = file.read_bytes()
    last_line = whole.rstrip(b"\n").rindex(b"\n") + 1
    file.write_bytes(whole[: last_line + length])
    assert len(read_reports(file)) == 3
    # A rerun goes on after it.
    append_report(file, make_report(epoch=9))
    assert [each.epoch for each in read_reports(file)] == [1, 1, 2, 9]


def test_of_an_epoch_that_was_run_again_the_last_report_counts(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    again = make_report(7, label="train", epoch=2)
    append_report(file, again)
    assert [each for each in read_reports(file) if (each.label, each.epoch) == ("train", 2)] == [
        again
    ]


def test_a_training_that_starts_again_begins_there(tmp_path: Path) -> None:
    file = write_run(tmp_path, epochs=3)
    append_report(file, make_report(label="train", epoch=1))
    rows = [(each.label, each.epoch) for each in read_reports(file)]
    assert rows == [("train", 1), ("valid", 1), ("valid", 2), ("valid", 3)]


def test_a_line_of_anything_else_is_passed_over_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_run(tmp_path, epochs=1)
    for line in (b"\0\0\0", b'{"label": "train", "epoch": "1"}', b"[" * 100_000, b"7"):
        with open(file, "ab") as opened:
            opened.write(line + b"\n")
    append_report(file, make_report(epoch=2))
    assert [each.epoch for each in read_reports(file)] == [1, 1, 2]
    (line,) = caplog.messages
    assert "line 3: " in line
    assert line.endswith("is no report of an epoch: passed over, 4 in all")


def test_runs_of_other_sizes_are_drawn_on_one_scale(tmp_path: Path) -> None:
    drawn: list[Figure] = []
    runs = []
    for name, waited, ranks in (("a", 0.1, 4), ("b", 100.0, 2)):
        rows = tuple(RankReport(rank=rank, pulled=5, waited=waited) for rank in range(ranks))
        runs.append((name, [make_report(ranks=rows)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        plot_reports(runs, tmp_path / "plot.png")
    waits = drawn[0].axes[4:6]
    assert waits[0].get_ylim() == waits[1].get_ylim()
    assert waits[0].get_ylim()[1] > 100
    legend = drawn[0].axes[1].get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 5  # four ranks, and what was handed out


def test_the_table_has_a_row_for_each_epoch_and_names_what_was_slow(tmp_path: Path) -> None:
    table = format_table([("a", read_reports(write_run(tmp_path)))])
    head, _, *rows = table.splitlines()
    assert "run" not in head.split()
    assert len(rows) == 6
    assert " ".join(rows[0].split()) == "train 1 2 20 rank 0 1 0 1.5 s (rank 1)"


def test_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / name, epochs=2).parent) for name in ("first", "second")]
    assert main([*paths, "--plot", str(tmp_path / "plot.png")]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[:3] for row in rows[:4]] == [
        ["train", "1", "first"],
        ["train", "1", "second"],
        ["train", "2", "first"],
        ["train", "2", "second"],
    ]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_any_number_of_ranks_can_be_drawn(tmp_path: Path, ranks: int) -> None:
    plot_reports([("a", read_reports(write_run(tmp_path, 1, ranks)))], tmp_path / "plot.pdf")
    assert (tmp_path / "plot.pdf").stat().st_size > 1000


BAD_FILES = {
    "missing": (None, "does not exist: give the epoch_sync.jsonl"),
    "empty": ("", "holds no epoch"),
    "foreign": ("%PDF-1.4\n", "line 1: '%PDF-1.4' is no report of an epoch"),
    "json of another kind": ('{"epoch": 1}\n', "line 1: .* is no report of an epoch"),
    "binary": ("\udcff", "can't be read as text"),
    "wrong types": (
        '{"label": "a", "epoch": 1, "batches": "x", "ended_by": [], "ranks": []}',
        "is no report",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_exit_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BAD_FILES[name]
    file = tmp_path / "epoch_sync.jsonl"
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    assert main([str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("espnet_sync.report: error: ")
    assert re.search(message, line)


def test_a_plot_of_an_unknown_kind_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_run(tmp_path)), "--plot", str(tmp_path / "plot.doc")]) == 2
    assert "not supported" in capsys.readouterr().err


def test_it_is_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "espnet_sync.report", str(write_run(tmp_path))]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "batches per rank" in shown.stdout
    row = json.loads((tmp_path / "epoch_sync.jsonl").read_text().splitlines()[0])
    assert row["ranks"][1] == {
        "rank": 1,
        "pulled": 21,
        "discarded": 1,
        "repeated": 0,
        "waited": 1.5,
    }
