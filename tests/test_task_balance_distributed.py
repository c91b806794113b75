"""`chunk_balance` as a task's config sets it, on real factories of real ranks."""

import argparse
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from espnet2.tasks.lm import LMTask
from espnet2.train.distributed_utils import DistributedOption

from espnet_sync.errors import OutOfStepError
from espnet_sync.task import synced
from tests.ranks import run_ranks

TOKENS = ["<blank>", "<unk>", "a", "b", "<sos/eos>"]
UTTERANCES = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a corpus whose lengths vary, whole, in two splits, and with one length changed."""
    tmp_path = tmp_path_factory.mktemp("corpus")
    draw = random.Random(3)
    lengths = [int(draw.lognormvariate(3.4, 0.7)) + 8 for _ in range(UTTERANCES)]
    lines = [
        f"utt{number:02d} {'ab' * (n // 2)}{'a' * (n % 2)}\n" for number, n in enumerate(lengths)
    ]
    shapes = [f"utt{number:02d} {n}\n" for number, n in enumerate(lengths)]
    (tmp_path / "other_shape").write_text("".join([f"utt00 {lengths[0] + 400}\n", *shapes[1:]]))
    for name, rows in (("text", lines), ("shape", shapes)):
        (tmp_path / name).write_text("".join(rows))
        splits = tmp_path / f"{name}_splits"
        splits.mkdir()
        (splits / "num_splits").write_text("2")
        (splits / "split.0").write_text("".join(rows[: UTTERANCES // 2]))
        (splits / "split.1").write_text("".join(rows[UTTERANCES // 2 :]))
    return tmp_path


def read_args(data: Path, splits: str, shape: str, *words: str) -> argparse.Namespace:
    given = ["--token_type", "char", "--iterator_type", "chunk", "--chunk_length", "8"]
    given += [
        "--chunk_shift_ratio",
        "1.0",
        "--batch_size",
        "8",
        "--batch_type",
        "unsorted",
        "--num_workers",
        "0",
        *words,
    ]
    for mode in ("train", "valid"):
        given += [f"--{mode}_data_path_and_name_and_type", f"{data / ('text' + splits)},text,text"]
        given += [f"--{mode}_shape_file", str(data / shape)]
    args = synced(LMTask).get_parser().parse_args(given)
    args.token_list = TOKENS
    return args


@contextmanager
def messages() -> Iterator[list[str]]:
    """Collect what the root logger says."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    level = root.level
    root.setLevel("INFO")
    root.addHandler(handler)
    try:
        yield found
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def build(args: argparse.Namespace, mode: str) -> Any:
    distributed = DistributedOption(distributed=True)
    if args.multiple_iterator and mode == "train":
        return synced(LMTask).build_multiple_iter_factory(args, distributed, mode)
    return synced(LMTask).build_iter_factory(args, distributed, mode)


def play(rank: int, world_size: int, data: Path) -> dict[str, Any]:
    """Run an epoch of each kind, and return what it yielded and discarded."""
    found: dict[str, Any] = {}
    for name, splits, words in (
        ("off", "", []),
        ("on", "", ["--chunk_balance", "true"]),
        ("splits", "_splits", ["--chunk_balance", "true", "--multiple_iterator", "true"]),
        ("part", "", ["--chunk_balance", "true", "--num_iters_per_epoch", "10"]),
        ("sequence", "", ["--chunk_balance", "true", "--iterator_type", "sequence"]),
    ):
        for mode in ("train", "valid") if name in ("off", "on") else ("train",):
            args = read_args(data, splits, f"shape{splits}", *words)
            with messages() as said:
                iterator = build(args, mode).build_iter(1)
                utterances = {id_ for ids, _ in iterator for id_ in ids}
            report = iterator.report
            discarded = sum(each.discarded for each in report.ranks)
            found[f"{name} {mode}"] = (report.batches, discarded, sorted(utterances), said)
    without_lengths = read_args(data, "", "shape", "--chunk_balance", "true")
    without_lengths.train_shape_file = []
    with messages() as said:
        found["no lengths"] = (build(without_lengths, "train").build_iter(1) is not None, said)
    other = read_args(data, "", "other_shape" if rank == 1 else "shape", "--chunk_balance", "true")
    try:
        build(other, "train").build_iter(1)
    except OutOfStepError as error:
        found["other files"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(data: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_ranks(3, play, data, deadline=240)
    return found


def dealt(ranks: list[dict[str, Any]], name: str) -> list[str]:
    return [id_ for rank in ranks for id_ in rank[name][2]]


@pytest.mark.parametrize("mode", ["train", "valid"])
def test_the_chunks_of_a_task_are_dealt_evenly(ranks: list[dict[str, Any]], mode: str) -> None:
    off, on = ranks[0][f"off {mode}"], ranks[0][f"on {mode}"]
    # A batch of 8 chunks on 3 ranks: two ranks take 3, and one takes 2.
    assert off[1] > 3 * on[1]
    assert on[0] > off[0]
    assert on[1] <= 2
    assert len(dealt(ranks, f"on {mode}")) == len(set(dealt(ranks, f"on {mode}")))


def test_a_batch_size_that_does_not_divide_is_warned_of(ranks: list[dict[str, Any]]) -> None:
    (warning,) = [text for text in ranks[0]["off train"][3] if "does not divide" in text]
    assert "a batch size of 8 does not divide by 3 ranks" in warning
    assert "% of the data" in warning
    assert "chunk_balance: true" in warning
    assert not any("does not divide" in text for text in ranks[0]["on train"][3])


def test_a_multiple_iterator_is_dealt_split_by_split(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["splits train"][1] <= 4
    assert len(dealt(ranks, "splits train")) == len(set(dealt(ranks, "splits train")))


def test_a_part_of_the_corpus_per_epoch_is_even_too(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["part train"][0] < ranks[0]["on train"][0]
    assert ranks[0]["part train"][1] <= 2


def test_another_iterator_type_is_left_alone(ranks: list[dict[str, Any]]) -> None:
    said = ranks[0]["sequence train"][3]
    assert sum("chunk_balance leaves a sequence iterator alone" in text for text in said) == 1


def test_missing_lengths_fall_back_with_one_warning(ranks: list[dict[str, Any]]) -> None:
    built, said = ranks[0]["no lengths"]
    assert built
    assert sum("chunk_balance is off for this iterator" in text for text in said) == 1


def test_ranks_that_read_different_files_fail_at_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "the ranks are out of step" in rank["other files"]
        assert "deal " in rank["other files"]
