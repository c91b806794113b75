"""`synced(TaskClass)`: the class, its keys, what it refuses at start, and which modes it wraps."""

import argparse
import io
import logging
import pickle
import re
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import yaml
from espnet2.iterators.multiple_iter_factory import MultipleIterFactory
from espnet2.iterators.sequence_iter_factory import SequenceIterFactory
from espnet2.tasks.abs_task import AbsTask
from espnet2.tasks.lm import LMTask
from espnet2.train.distributed_utils import DistributedOption

import espnet_sync
from espnet_sync import EmptyRankError, PeerFailedError, SyncedIterFactory
from espnet_sync.report import RankReport, SyncReport
from espnet_sync.task import _EpochLog, synced
from tests.factories import frozen

TEXTS = ["abc", "bca", "aabb", "cab", "a", "bb", "abcabc", "ccc"]
TOKENS = ["<blank>", "<unk>", "a", "b", "c", "<sos/eos>"]


class OwnTask(LMTask):
    """A user's own task."""


class FailingTask(LMTask):
    """A task whose rank fails as it is told."""

    @classmethod
    def main_worker(cls, args: argparse.Namespace) -> None:
        raise args.error


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write a corpus of texts, whole and in two splits."""
    lines = [f"utt{number} {text}\n" for number, text in enumerate(TEXTS)]
    shapes = [f"utt{number} {len(text)}\n" for number, text in enumerate(TEXTS)]
    for name, rows in (("text", lines), ("shape", shapes)):
        (tmp_path / name).write_text("".join(rows))
        splits = tmp_path / f"{name}_splits"
        splits.mkdir()
        (splits / "num_splits").write_text("2")
        (splits / "split.0").write_text("".join(rows[:4]))
        (splits / "split.1").write_text("".join(rows[4:]))
    return tmp_path


def read_args(data: Path, *words: str, config: dict[str, Any] | None = None) -> argparse.Namespace:
    """Parse a training command line of a synced task as its `main` does."""
    given = list(words)
    if config is not None:
        (data / "config.yaml").write_text(yaml.safe_dump(config))
        given += ["--config", str(data / "config.yaml")]
    for mode in ("train", "valid"):
        given += [f"--{mode}_data_path_and_name_and_type", f"{data / 'text'},text,text"]
        given += [f"--{mode}_shape_file", str(data / "shape")]
    given += ["--token_type", "char", "--batch_type", "unsorted", "--batch_size", "2"]
    given += ["--num_workers", "0"]
    args = synced(LMTask).get_parser().parse_args(given)
    args.token_list = TOKENS
    return args


def build(args: argparse.Namespace, mode: str, task: type[AbsTask] | None = None) -> Any:
    return (task or synced(LMTask)).build_iter_factory(args, DistributedOption(), mode)


# --- The class --------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [LMTask, OwnTask])
def test_the_class_is_a_subclass_that_keeps_its_name(task: type[AbsTask]) -> None:
    made = synced(task)
    assert made is not task
    assert issubclass(made, task)
    assert (made.__name__, made.__qualname__) == (task.__name__, task.__qualname__)
    assert (made.__module__, made.__doc__) == (task.__module__, task.__doc__)
    assert made.trainer is task.trainer
    assert espnet_sync.synced is synced


def test_repeated_calls_give_the_same_class() -> None:
    assert synced(LMTask) is synced(LMTask)
    assert synced(synced(LMTask)) is synced(LMTask)
    assert synced(OwnTask) is not synced(LMTask)
    assert synced(LMTask, epoch_sync="none") is synced(LMTask, epoch_sync="none")
    assert synced(LMTask, epoch_sync="none") is not synced(LMTask)


@pytest.mark.parametrize(
    "made",
    [synced(LMTask), synced(OwnTask), synced(LMTask, epoch_sync_conf={"timeout": 60})],
    ids=["ESPnet2's", "own", "with defaults"],
)
def test_the_class_and_its_main_worker_can_be_pickled(made: type[AbsTask]) -> None:
    for dumps in (pickle.dumps, ForkingPickler.dumps):
        assert pickle.loads(dumps(made)) is made
        assert pickle.loads(dumps(made.main_worker)) == made.main_worker
        assert pickle.loads(dumps(made.main_worker)).__self__ is made


def test_the_task_itself_stays_as_it_was() -> None:
    synced(LMTask)
    assert "epoch_sync" not in vars(LMTask.get_parser().parse_args([]))
    assert pickle.loads(pickle.dumps(LMTask)) is LMTask


@pytest.mark.parametrize("task", [None, "LMTask", int, SyncedIterFactory], ids=str)
def test_what_is_no_task_is_refused(task: Any) -> None:
    with pytest.raises(TypeError, match=r"task=.*must be a subclass of .*AbsTask"):
        synced(task)


def test_a_default_for_no_key_is_refused() -> None:
    with pytest.raises(TypeError, match=r"epoch_sink='none'.*did you mean 'epoch_sync'"):
        synced(LMTask, epoch_sink="none")


# --- The keys ---------------------------------------------------------------------------------

DEFAULTS = {
    "epoch_sync": "shortest",
    "epoch_sync_conf": {},
    "valid_epoch_sync": "shortest",
    "valid_epoch_sync_conf": None,
}


def keys_of(args: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(args, key) for key in DEFAULTS}


def test_the_parser_has_the_keys_with_their_defaults(data: Path) -> None:
    assert keys_of(read_args(data)) == DEFAULTS


def test_a_default_of_ones_own_is_the_parsers() -> None:
    made = synced(LMTask, epoch_sync="none", valid_epoch_sync_conf={"timeout": 60})
    args = made.get_parser().parse_args([])
    assert keys_of(args) == {
        **DEFAULTS,
        "epoch_sync": "none",
        "valid_epoch_sync_conf": {"timeout": 60},
    }


@pytest.mark.parametrize("made", [synced(LMTask), synced(OwnTask, epoch_sync="longest")])
def test_print_config_shows_the_keys(made: type[AbsTask], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train"])  # which ESPnet2 parses here
    out = io.StringIO()
    made.print_config(file=out)
    config = yaml.safe_load(out.getvalue())
    policy = "shortest" if made is synced(LMTask) else "longest"
    assert {key: config[key] for key in DEFAULTS} == {**DEFAULTS, "epoch_sync": policy}


def test_values_come_from_the_command_line(data: Path) -> None:
    words = ["--epoch_sync", "longest", "--valid_epoch_sync", "none"]
    words += ["--epoch_sync_conf", "timeout=60", "--epoch_sync_conf", "lookahead=2"]
    words += ["--valid_epoch_sync_conf", "backend=gloo"]
    assert keys_of(read_args(data, *words)) == {
        "epoch_sync": "longest",
        "epoch_sync_conf": {"timeout": 60, "lookahead": 2},
        "valid_epoch_sync": "none",
        "valid_epoch_sync_conf": {"backend": "gloo"},
    }


def test_values_come_from_yaml_and_the_command_line_wins(data: Path) -> None:
    config = {"epoch_sync": "longest", "epoch_sync_conf": {"timeout": 60, "warn_after": 5}}
    args = read_args(data, config=config)
    assert keys_of(args) == {**DEFAULTS, **config}
    args = read_args(
        data, "--epoch_sync", "none", "--epoch_sync_conf", "timeout=90", config=config
    )
    assert args.epoch_sync == "none"
    assert args.epoch_sync_conf == {"timeout": 90, "warn_after": 5}


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("longest", "longest"),
        ("none", "none"),
        (None, "none"),
        (True, "shortest"),
        (False, "none"),
    ],
)
def test_every_way_to_write_a_policy_in_yaml_is_read(
    value: object, policy: str, data: Path
) -> None:
    args = read_args(data, config={"epoch_sync": value, "valid_epoch_sync": value})
    args.required = []
    synced(LMTask).check_required_command_args(args)
    assert (args.epoch_sync, args.valid_epoch_sync) == (policy, policy)


# --- Refused at start -------------------------------------------------------------------------

REFUSED = [
    (["--epoch_sync", "middle"], {}, ["epoch_sync", "middle", "'shortest', 'longest'"]),
    (["--valid_epoch_sync", "x"], {}, ["valid_epoch_sync", "'x'", "'shortest', 'longest'"]),
    (["--epoch_sync_conf", "lookahed=2"], {}, ["lookahed=2", "did you mean 'lookahead'"]),
    (["--epoch_sync_conf", "timeout=-1"], {}, ["epoch_sync_conf", "timeout=-1", "above 0"]),
    (["--epoch_sync_conf", "timeout=soon"], {}, ["epoch_sync_conf", "timeout='soon'", "seconds"]),
    (["--epoch_sync_conf", "label=train"], {}, ["epoch_sync_conf", "label='train'", "'backend'"]),
    (["--epoch_sync_conf", "epoch_offset=1"], {}, ["epoch_offset=1", "'lookahead'"]),
    (
        ["--valid_epoch_sync_conf", "iterator_class=x"],
        {},
        ["valid_epoch_sync_conf", "iterator_cl"],
    ),
    (
        ["--valid_epoch_sync_conf", "backend=nccl"],
        {},
        ["valid_epoch_sync_conf", "'nccl'", "'auto'"],
    ),
    ([], {"epoch_sync": "middle"}, ["epoch_sync", "'middle'", "'shortest', 'longest'"]),
    ([], {"epoch_sync": 3}, ["epoch_sync", "3", "'shortest', 'longest'"]),
    ([], {"valid_epoch_sync": ["none"]}, ["valid_epoch_sync", "none", "'shortest', 'longest'"]),
    ([], {"epoch_sync_conf": {"lookahead": 1.5}}, ["epoch_sync_conf", "lookahead=1.5", "int"]),
    ([], {"epoch_sync_conf": ["timeout"]}, ["epoch_sync_conf", "mapping", "['timeout']"]),
    ([], {"epoch_sync_conf": 60}, ["epoch_sync_conf", "mapping", "60"]),
    ([], {"epoch_sink": "none"}, ["epoch_sink"]),
    (
        ["--epoch_sync", "longest", "--epoch_sync_conf", "backend=default"],
        {},
        ["stop_at='longest'", "backend='default'"],
    ),
    (
        ["--epoch_sync", "none", "--epoch_sync_conf", "timeout=0"],
        {},
        ["epoch_sync_conf", "timeout=0"],
    ),
]


@pytest.mark.parametrize(("words", "config", "parts"), REFUSED, ids=str)
def test_a_bad_value_is_refused_at_start_with_exit_code_2(
    words: list[str],
    config: dict[str, Any],
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(config))
    output = tmp_path / "exp"
    words = [*words, "--config", str(file), "--output_dir", str(output), "--token_list", "x"]
    with pytest.raises(SystemExit) as caught:
        synced(LMTask).main(cmd=words)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    for part in parts:
        assert part in message.splitlines()[-1]
    assert not output.exists()


def test_what_the_task_itself_requires_is_still_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        synced(LMTask).main(cmd=["--epoch_sync", "none"])
    assert caught.value.code == 2
    assert "required: --output_dir, --token_list" in capsys.readouterr().err


# --- The modes --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "valid"])
def test_train_and_valid_are_wrapped_and_give_the_same_batches(mode: str, data: Path) -> None:
    args = read_args(data)
    factory = build(args, mode)
    assert type(factory) is SyncedIterFactory
    assert type(factory.inner) is SequenceIterFactory
    iterator = factory.build_iter(1)
    plain = build(args, mode, LMTask).build_iter(1)
    assert iterator.label == mode
    assert len(iterator) == len(plain) == 4
    assert frozen(iterator) == frozen(plain)


def test_plot_att_is_never_wrapped(data: Path) -> None:
    args = read_args(data, "--epoch_sync", "longest", "--valid_epoch_sync", "longest")
    assert type(build(args, "plot_att")) is SequenceIterFactory


def test_none_turns_one_mode_off_and_leaves_the_other(data: Path) -> None:
    args = read_args(data, "--epoch_sync", "none")
    assert type(build(args, "train")) is SequenceIterFactory
    assert type(build(args, "valid")) is SyncedIterFactory
    args = read_args(data, "--valid_epoch_sync", "none")
    assert type(build(args, "train")) is SyncedIterFactory
    assert type(build(args, "valid")) is SequenceIterFactory


def options_of(args: argparse.Namespace, mode: str) -> tuple[Any, ...]:
    options = build(args, mode).options
    return options.stop_at, options.timeout, options.warn_after, options.label


def test_a_conf_reaches_the_factory_and_valid_takes_that_of_train(data: Path) -> None:
    words = ["--epoch_sync", "longest", "--epoch_sync_conf", "timeout=60"]
    args = read_args(data, *words)
    assert options_of(args, "train") == ("longest", 60, 30.0, "train")
    assert options_of(args, "valid") == ("shortest", 60, 30.0, "valid")
    args = read_args(data, *words, "--valid_epoch_sync_conf", "warn_after=5")
    assert options_of(args, "train") == ("longest", 60, 30.0, "train")
    assert options_of(args, "valid") == ("shortest", 1800.0, 5, "valid")


@pytest.mark.parametrize("missing", [[*DEFAULTS], ["epoch_sync_conf"], ["valid_epoch_sync"]])
def test_a_namespace_that_lacks_keys_means_the_defaults(missing: list[str], data: Path) -> None:
    args = read_args(data)
    for key in missing:
        delattr(args, key)
    assert options_of(args, "train") == ("shortest", 1800.0, 30.0, "train")
    assert options_of(args, "valid") == ("shortest", 1800.0, 30.0, "valid")
    args.required = []
    synced(LMTask).check_required_command_args(args)


def split(args: argparse.Namespace, data: Path) -> argparse.Namespace:
    """Hand the corpus over in splits, as ESPnet2's `--multiple_iterator` takes it."""
    args.train_data_path_and_name_and_type = [(str(data / "text_splits"), "text", "text")]
    args.train_shape_file = [str(data / "shape_splits")]
    args.multiple_iterator = True
    return args


def test_a_multiple_iterator_is_wrapped_once_outermost(data: Path) -> None:
    args = split(read_args(data), data)
    factory: Any = synced(LMTask).build_multiple_iter_factory(args, DistributedOption(), "train")
    assert type(factory) is SyncedIterFactory
    assert type(factory.inner) is MultipleIterFactory
    assert [type(make()) for make in factory.inner.build_funcs] == [SequenceIterFactory] * 2
    plain: Any = LMTask.build_multiple_iter_factory(args, DistributedOption(), "train")
    for epoch in (1, 2):
        batches = frozen(factory.build_iter(epoch))
        assert len(batches) == 4
        assert batches == frozen(plain.build_iter(epoch))


def test_none_turns_a_multiple_iterator_off_too(data: Path) -> None:
    args = split(read_args(data, "--epoch_sync", "none"), data)
    factory = synced(LMTask).build_multiple_iter_factory(args, DistributedOption(), "train")
    assert type(factory) is MultipleIterFactory


class CountingTask(LMTask):
    """A user's task that builds a factory of its own."""

    built: list[str] = []  # noqa: RUF012

    @classmethod
    def build_iter_factory(cls, *arguments: Any, **keywords: Any) -> Any:
        cls.built.append("factory")
        return super().build_iter_factory(*arguments, **keywords)


@pytest.fixture
def counting() -> Iterator[type[CountingTask]]:
    CountingTask.built.clear()
    yield CountingTask
    CountingTask.built.clear()


def test_a_users_own_factory_is_built_once_and_wrapped(
    counting: type[CountingTask], data: Path
) -> None:
    factory = build(read_args(data), "train", synced(counting))
    assert type(factory) is SyncedIterFactory
    assert counting.built == ["factory"]


# --- A rank's last error ----------------------------------------------------------------------


def test_a_rank_that_another_one_takes_down_logs_one_line_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = argparse.Namespace(error=PeerFailedError("rank 2: no such wav", ranks=(2,)))
    with pytest.raises(SystemExit) as leaving:
        synced(FailingTask).main_worker(args)
    assert leaving.value.code == 1
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("ERROR", "rank 2: no such wav")
    ]


def test_a_rank_that_fails_by_itself_keeps_its_exception(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = ValueError("no such wav")
    with pytest.raises(ValueError, match="no such wav") as raised:
        synced(FailingTask).main_worker(argparse.Namespace(error=error))
    assert raised.value is error
    assert not caplog.records


def test_a_run_without_sync_keeps_every_error(caplog: pytest.LogCaptureFixture) -> None:
    off = {"epoch_sync": "none", "valid_epoch_sync": "none"}
    args = argparse.Namespace(error=PeerFailedError("rank 2: no such wav"), **off)
    with pytest.raises(PeerFailedError):
        synced(FailingTask).main_worker(args)
    assert not caplog.records


# --- An epoch without a batch -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "valid"])
def test_an_epoch_without_a_batch_is_an_error_that_says_what_to_do(mode: str, data: Path) -> None:
    factory = build(read_args(data, "--iterator_type", "chunk", "--chunk_length", "1000"), mode)
    epoch = factory.build_iter(1)
    with pytest.raises(
        EmptyRankError, match=rf"\[{mode}\] epoch 1 has no batch: rank 0"
    ) as raised:
        list(epoch)
    assert raised.value.ranks == (0,)
    for remedy in ("fewer ranks", "batch_size", "chunk_length", "more data"):
        assert remedy in str(raised.value)
    facts = (
        f"There are 1 rank, batch_size=2, chunk_length=1000, and 8 utterances of 1 to 6 in {data}"
    )
    assert facts in str(raised.value)


def test_an_epoch_that_was_stopped_before_its_first_batch_is_no_error(data: Path) -> None:
    epoch = build(read_args(data), "train").build_iter(1)
    epoch.request_stop()
    assert list(epoch) == []
    assert len(list(epoch)) == 4


# --- The line of an epoch ---------------------------------------------------------------------


def make_report(batches: int, discarded: int) -> SyncReport:
    ranks = (
        RankReport(rank=0, pulled=batches + discarded, discarded=discarded),
        RankReport(rank=1, pulled=batches),
    )
    return SyncReport(label="train", epoch=1, batches=batches, ended_by=(1,), ranks=ranks)


@pytest.mark.parametrize(
    ("words", "batches", "discarded", "percent"),
    [
        (["--iterator_type", "chunk"], 10, 4, "17"),
        # 13 and 11 chunks, by the lengths of the texts.
        (["--iterator_type", "chunk"], 1000, 4, "8"),
        (["--iterator_type", "chunk"], 10, 0, None),
        (["--iterator_type", "chunk", "--chunk_balance", "true"], 10, 4, None),
        (["--iterator_type", "sequence"], 10, 4, None),
    ],
    ids=["seen", "by the lengths", "nothing discarded", "balanced", "no chunks"],
)
def test_the_line_names_the_key_where_the_deal_loses_data(
    words: list[str],
    batches: int,
    discarded: int,
    percent: str | None,
    data: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("espnet_sync.task.count_ranks", lambda: 2)
    caplog.set_level("INFO")
    args = read_args(data, *words, "--chunk_length", "1", "--chunk_shift_ratio", "1")
    options = synced(LMTask).build_iter_options(args, DistributedOption(), "train")
    log = _EpochLog(args, "train", lambda: [options], logging.getLogger())
    log(make_report(batches, discarded))
    (line,) = [message for message in caplog.messages if message.startswith("[train] epoch 1: ")]
    hint = re.search(r"an uneven deal loses (\d+) % of the data, set chunk_balance: true$", line)
    assert (hint and hint[1]) == percent
