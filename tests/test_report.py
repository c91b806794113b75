"""The report of a pass: its fields and the line for the log."""

import dataclasses
import pickle

import pytest

import espnet_sync
from espnet_sync.report import RankReport, SyncReport


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
