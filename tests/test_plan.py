"""Plans of epochs, against real factories of which one made every batch, and what is refused."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
import yaml

from espnet_sync.balance import ChunkOptions, Corpus, deal
from espnet_sync.epoch_plan import EpochPlan
from espnet_sync.plan import main
from espnet_sync.process_groups import played_rank
from tests.ranks import run_ranks
from tests.speech import ENHANCEMENT, ENHANCEMENT_SOURCES, data_words, write_speech
from tests.test_balance import apply, batches_of, build_factory

CHUNKS = ["--iterator_type", "chunk", "--chunk_length", "16", "--num_cache_chunks", "1024"]


def write_shapes(file: Path, number: int, seed: int = 3) -> dict[str, int]:
    """Write a shape file of log-normal lengths, and return them."""
    draw = random.Random(seed)
    lengths = {f"utt{index:03}": int(draw.lognormvariate(4.6, 0.7)) for index in range(number)}
    file.write_text("".join(f"{name} {length},80\n" for name, length in lengths.items()))
    return lengths


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    write_shapes(tmp_path / "speech_shape", 120)
    write_shapes(tmp_path / "valid_shape", 5, seed=4)
    return tmp_path / "speech_shape"


@pytest.fixture
def plan(shapes: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return a function that plans, by a command line, and returns what `--json` prints."""

    def plan(*words: str, file: Path = shapes) -> dict[str, Any]:
        assert main(["--shape_file", str(file), "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return plan


def batches(found: dict[str, Any], deal: str, mode: str = "train") -> list[list[int]]:
    """Return each rank's batches, epoch by epoch."""
    epochs = [epoch for epoch in found[mode]["epochs"] if epoch["deal"] == deal]
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, len(epochs) + 1))
    return [epoch["batches"] for epoch in epochs]


# --- The counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_length": "16,24"},
        {"chunk_length": 150},  # many are shorter
        {"num_samples_per_epoch": 10},
    ],
    ids=str,
)
def test_the_batches_are_those_of_real_factories(
    plan: Callable[..., dict[str, Any]], shapes: Path, options: dict[str, Any]
) -> None:
    words = [*CHUNKS, "--batch_size", "8", "--world_size", "3", "--epochs", "2"]
    for name, value in options.items():
        key = "num_iters_per_epoch" if name == "num_samples_per_epoch" else name
        words += [f"--{key}", str(value)]
    found = plan(*words)
    lines = [line.replace(",", " ").split() for line in shapes.read_text().splitlines()]
    corpus = Corpus(lengths={name: int(length) for name, length, _ in lines})
    chunks = ChunkOptions(**{"world_size": 3, "batch_size": 8, "chunk_length": 16, **options})
    plain = [build_factory(chunks, corpus, rank) for rank in range(3)]
    dealt = apply(deal(chunks, corpus), chunks, corpus)
    for epoch in (1, 2):
        assert batches(found, "file order")[epoch - 1] == batches_of(plain, epoch)
        assert batches(found, "chunk_balance")[epoch - 1] == batches_of(dealt, epoch)


def test_sampling_rates_and_categories_count(
    plan: Callable[..., dict[str, Any]], shapes: Path, tmp_path: Path
) -> None:
    names = [line.split()[0] for line in shapes.read_text().splitlines()]
    data = {
        "wav.scp": ("speech,sound", lambda index: f"{index}.wav"),  # there is none
        "utt2fs": ("fs,text_int", lambda index: 8000 * (1 + index % 2)),
        "utt2category": ("category,text", lambda index: "abc"[index % 3]),
    }
    words = [*CHUNKS, "--batch_size", "8", "--world_size", "2", "--chunk_default_fs", "8000"]
    for file, (name, value) in data.items():
        rows = [f"{utterance} {value(index)}\n" for index, utterance in enumerate(names)]
        (tmp_path / file).write_text("".join(rows))
        words += ["--train_data_path_and_name_and_type", f"{tmp_path / file},{name}"]
    lines = [line.replace(",", " ").split() for line in shapes.read_text().splitlines()]
    corpus = Corpus(
        lengths={name: int(length) for name, length, _ in lines},
        sampling_rates={name: 8000 * (1 + index % 2) for index, name in enumerate(names)},
        categories={name: str(index % 3) for index, name in enumerate(names)},
    )
    chunks = ChunkOptions(world_size=2, batch_size=8, chunk_length=16, default_fs=8000)
    factories = [build_factory(chunks, corpus, rank) for rank in range(2)]
    assert batches(plan(*words), "file order") == [batches_of(factories, 1)]


def test_splits_are_planned_as_one_epoch(
    plan: Callable[..., dict[str, Any]], shapes: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "splits"
    folder.mkdir()
    lines = shapes.read_text().splitlines(keepends=True)
    (folder / "num_splits").write_text("2")
    (folder / "split.0").write_text("".join(lines[:60]))
    (folder / "split.1").write_text("".join(lines[60:]))
    words = [*CHUNKS, "--batch_size", "4", "--world_size", "2"]
    whole = plan(*words, "--multiple_iterator", "true", file=folder)
    assert "120 utterances" in whole["train"]["title"]
    halves = [plan(*words, file=folder / f"split.{index}") for index in range(2)]
    for deal_name in ("file order", "chunk_balance"):
        (counted,) = batches(whole, deal_name)
        parts = [batches(half, deal_name)[0] for half in halves]
        assert counted == [sum(each) for each in zip(*parts, strict=True)]


def test_a_sequence_iterator_has_one_deal_and_drops_nothing(
    plan: Callable[..., dict[str, Any]],
) -> None:
    words = ["--batch_type", "sorted", "--batch_size", "7", "--world_size", "3"]
    found = plan(*words, "--num_iters_per_epoch", "5", "--epochs", "2")
    assert batches(found, "file order") == [[5, 5, 5]] * 2
    assert batches(found, "chunk_balance") == []
    assert found["train"]["batch_sizes"] == {}
    assert found["hints"] == []
    assert batches(plan(*words), "file order") == [[17, 17, 17]]


def test_categories_beside_the_data_are_found_and_redrawn(
    plan: Callable[..., dict[str, Any]], shapes: Path, tmp_path: Path
) -> None:
    names = [line.split()[0] for line in shapes.read_text().splitlines()]
    (tmp_path / "wav.scp").write_text("".join(f"{name} {name}.wav\n" for name in names))
    rows = [f"{kind} {' '.join(names[start:end])}\n" for kind, start, end in KINDS]
    (tmp_path / "category2utt").write_text("".join(rows))
    words = ["--train_data_path_and_name_and_type", f"{tmp_path / 'wav.scp'},speech,sound"]
    words += ["--batch_type", "catbel", "--world_size", "2", "--epochs", "3"]
    found = plan(*words, "--iterator_type", "category", "--batch_size", "6")
    counts = batches(found, "file order")
    assert all(first == second > 0 for first, second in counts)
    # Which ESPnet2's command line does not take, and a YAML does.
    (tmp_path / "conf.yaml").write_text("iterator_type: category_chunk\nchunk_length: 16\n")
    words += ["--config", str(tmp_path / "conf.yaml"), "--category_sample_size", "4"]
    found = plan(*words, "--batch_size", "8")
    assert list(found["train"]["batch_sizes"]) == ["4", "6", "8", "10", "12"]
    counts = batches(found, "file order")
    assert counts == [counts[0]] * 3
    assert counts[0][0] != counts[0][1]


KINDS = (("a", 0, 60), ("b", 60, 100), ("c", 100, 120))


def test_one_rank_has_nothing_to_lose(plan: Callable[..., dict[str, Any]]) -> None:
    found = plan(*CHUNKS, "--batch_size", "8", "--world_size", "1")
    ((counted,),) = batches(found, "file order")
    assert counted > 0
    assert found["train"]["epochs"][0]["dropped"] == found["train"]["epochs"][0]["repeated"] == 0


def test_dropped_and_repeated_are_of_all_batches() -> None:
    epoch = EpochPlan("file order", 1, (0, 4, 6))
    assert (epoch.dropped, epoch.repeated, epoch.empty_ranks) == (10, 8, (0,))
    assert (epoch.percent(epoch.dropped), epoch.percent(epoch.repeated)) == (100, 80)
    assert EpochPlan("file order", 1, (0, 0)).percent(0) == 0


def test_playing_a_rank_leaves_no_group_and_joins_none() -> None:
    with pytest.raises(ValueError, match="inside"), played_rank(2, 5):
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (2, 5)
        with pytest.raises(RuntimeError, match="is a rank already"), played_rank(0, 5):
            pass
        raise ValueError("inside")
    assert not torch.distributed.is_initialized()


# --- What is printed ----------------------------------------------------------------------------


def test_the_tables_and_what_to_change(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*CHUNKS, "--batch_size", "8", "--world_size", "6", "--epochs", "2"]
    words += ["--valid_shape_file", str(tmp_path / "valid_shape")]
    assert main(["--shape_file", str(shapes), *words]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "[train] chunk iterator, batch_size 8, 120 utterances, 6 ranks"
    assert [line.split()[:3] for line in lines[4:8]] == [
        ["file", "order", "1"],
        ["file", "order", "2"],
        ["chunk_balance", "1", lines[6].split()[2]],
        ["chunk_balance", "2", lines[7].split()[2]],
    ]
    assert [line.split()[0] for line in lines[11:15]] == ["6", "8", "12", "18"]
    assert "8 (given)" in printed.out
    assert "Every rank has " in printed.out
    train, valid = lines[-2:] if lines[-2] else (lines[-3], lines[-1])
    assert train.startswith("[train] file order drops ")
    assert "set chunk_balance: true (" in train
    assert "take batch_size: " in train
    assert "set epoch_sync: longest" in train
    assert valid == (
        "[valid] ESPnet2 will not start: Number of samples is smaller than world_size. Take fewer "
        "ranks or more data."
    )
    assert "Traceback" not in printed.err


def test_empty_ranks_are_named_in_both_modes(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    words = [*CHUNKS, "--batch_size", "8", "--valid_batch_size", "400", "--world_size", "4"]
    found = plan(*words, "--valid_shape_file", str(tmp_path / "valid_shape"))
    assert found["train"]["epochs"][0]["empty_ranks"] == []
    valid = found["valid"]["epochs"]
    assert [epoch["empty_ranks"] for epoch in valid] == [[0, 1, 2, 3]] * 2
    hint = "[valid] file order, epoch 1: ranks 0, 1, 2, 3 without a batch"
    (told,) = [line for line in found["hints"] if line.startswith(hint)]
    assert "Take fewer ranks, a smaller valid_batch_size or chunk_length" in told
    assert sum("without a batch" in line for line in found["hints"]) == 2  # one for each deal
    # A rank whose utterances are all shorter than a chunk has none but by luck of the deal.
    (tmp_path / "in_turn").write_text("".join(f"utt{n:02} {n % 2 * 90 + 9}\n" for n in range(40)))
    found = plan(*CHUNKS, "--batch_size", "4", "--world_size", "2", file=tmp_path / "in_turn")
    assert [epoch["empty_ranks"] for epoch in found["train"]["epochs"]] == [[0], []]
    assert "rank 0 without a batch" in found["hints"][0]
    assert "Set chunk_balance: true, or take fewer ranks" in found["hints"][0]


def test_hints_are_about_what_the_options_ask_for(plan: Callable[..., dict[str, Any]]) -> None:
    words = [*CHUNKS, "--batch_size", "8", "--world_size", "6"]
    assert plan(*words, "--chunk_balance", "true")["hints"] == []
    (hint,) = plan(*words, "--epoch_sync", "longest")["hints"]
    assert hint.startswith("[train] file order repeats ")
    assert "longest" not in hint


def test_a_config_is_read_with_and_without_its_task(
    plan: Callable[..., dict[str, Any]], shapes: Path, tmp_path: Path
) -> None:
    options = {"iterator_type": "chunk", "chunk_length": 16, "batch_size": 8, "lm": "seq_rnn"}
    config = tmp_path / "config.yaml"
    # As in an experiment's directory; the separator is of no language model.
    config.write_text(yaml.safe_dump({**options, "version": "202611", "distributed": True}))
    words = ["--config", str(config), "--world_size", "2"]
    without = plan(*words)
    assert without["task"] is None
    assert batches(plan(*words, "--task", "lm"), "file order") == batches(without, "file order")
    overridden = plan(*words, "--batch_size", "4")
    assert "batch_size 4" in overridden["train"]["title"]


# --- Bad input ----------------------------------------------------------------------------------

GIVEN = ["--world_size", "2", "--shape_file", "{shapes}"]
BAD: dict[str, tuple[list[str], str]] = {
    "no ranks": (["--shape_file", "{shapes}"], r"required: --world_size\. See --help"),
    "no shape file": (["--world_size", "2"], "no shape file, so no lengths.*--shape_file FILE"),
    "a missing shape file": (
        ["--world_size", "2", "--shape_file", "{folder}/none"],
        "none can't be read: No such file or directory. Give the train set's lengths",
    ),
    "an empty shape file": (
        ["--world_size", "2", "--shape_file", "{folder}/empty"],
        "empty is empty. Give the train set's lengths",
    ),
    "a foreign file": (
        ["--world_size", "2", "--shape_file", "{folder}/text"],
        "text has 'hello there' for 'utt1' where a length in samples is wanted",
    ),
    "other utterances": (
        [*GIVEN, "--train_data_path_and_name_and_type", "{folder}/text,text,text"],
        "does not match .*/text: 120 of its 120 utterances are not there, e.g. 'utt000'",
    ),
    "missing data": (
        [*GIVEN, "--train_data_path_and_name_and_type", "{folder}/wav.scp,speech,sound"],
        "wav.scp can't be read: .*Correct --train_data_path_and_name_and_type, or leave it out",
    ),
    "no ranks at all": (["--world_size", "0", "--shape_file", "{shapes}"], "must be 1 or more"),
    "a misspelt option": (
        [*GIVEN, "--batch_sise", "3"],
        "unrecognized arguments: --batch_sise 3. See --help",
    ),
    "a missing config": (
        [*GIVEN, "--config", "{folder}/none.yaml"],
        "none.yaml can't be read: No such file or directory. Give a training's YAML",
    ),
    "a config that is no YAML": (
        [*GIVEN, "--config", "{folder}/bad.yaml"],
        "bad.yaml is no YAML",
    ),
    "a config without options": (
        [*GIVEN, "--config", "{folder}/text"],
        "text holds no options",
    ),
    "a config for another task": (
        [*GIVEN, "--config", "{folder}/enh.yaml", "--task", "lm"],
        "enh.yaml: the task lm has no option 'separator'.* name the task .*--task",
    ),
    "a misspelt key": (
        [*GIVEN, "--config", "{folder}/key.yaml", "--task", "lm"],
        r"no option 'chunk_lenght' \(did you mean 'chunk_length'\?\)",
    ),
    "an unknown task": (
        [*GIVEN, "--task", "sing"],
        "--task sing: espnet2.bin.sing_train can't be imported",
    ),
    "a module without a task": (
        [*GIVEN, "--task", "json.decoder"],
        "json.decoder must hold one ESPnet2 task; it has none",
    ),
    "crops": (
        [*GIVEN, "--config", "{folder}/crop.yaml"],
        "speech_segment crops",
    ),
    "a batch size that is none": (
        [*GIVEN, "--config", "{folder}/size.yaml"],
        "batch_size=\\[8\\]: must be a number of 1 or more",
    ),
    "a task's own iterator": (
        [*GIVEN, "--iterator_type", "task"],
        "the train iterator is of type 'task'",
    ),
    "what ESPnet2 refuses": (
        [*GIVEN, "--iterator_type", "category"],
        "ESPnet2 can't build the train iterator: ValueError: category2utt mandatory",
    ),
    "a folder without splits": (
        ["--world_size", "2", "--shape_file", "{folder}", "--multiple_iterator", "true"],
        "with multiple_iterator, give a folder with split.0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_line(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("utt1 hello there\n")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    (tmp_path / "enh.yaml").write_text("separator: rnn\n")
    (tmp_path / "size.yaml").write_text("batch_size: [8]\n")
    (tmp_path / "key.yaml").write_text("chunk_lenght: 16\n")
    (tmp_path / "crop.yaml").write_text("speech_segment: 100\n")
    words, pattern = BAD[case]
    code = main([word.format(shapes=shapes, folder=tmp_path) for word in words])
    assert_told(code, capsys, pattern)


@pytest.mark.parametrize("package", ["tabulate", "tqdm"])
def test_a_missing_package_is_told(
    shapes: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code = main(["--world_size", "2", "--shape_file", str(shapes)])
    assert_told(code, capsys, f"{package} is missing: pip install {package}$")


def assert_told(code: int, capsys: pytest.CaptureFixture[str], pattern: str) -> None:
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    (line,) = [
        line for line in printed.err.splitlines() if "Flash Attention" not in line
    ]  # ESPnet2 says so when a task is imported.
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(line)
    assert line.startswith("espnet_sync.plan: error: ")


# --- Against a real run -------------------------------------------------------------------------

REAL: dict[str, dict[str, Any]] = {
    "chunk": {"batch_size": 5},
    "dealt": {"batch_size": 6, "chunk_balance": True},
    "short ones kept": {"chunk_length": 20_000, "chunk_discard_short_samples": False},
    "category_chunk": {
        "iterator_type": "category_chunk",
        "batch_type": "catbel",
        "category_sample_size": 2,
        "valid_iterator_type": "chunk",
    },
    "sequence": {"iterator_type": "sequence", "batch_type": "sorted"},
}


def iterate(rank: int, world_size: int, commands: dict[str, list[str]]) -> dict[str, Any]:
    """Run two epochs of both modes with each policy, and return the reports."""
    # Takes seconds to import: not when a rank of another test imports this module.
    from espnet2.tasks.enh import EnhancementTask
    from espnet2.train.distributed_utils import DistributedOption

    from espnet_sync.task import synced

    task = synced(EnhancementTask)
    option = DistributedOption(distributed=True, dist_rank=rank, dist_world_size=world_size)
    found: dict[str, Any] = {}
    for name, words in commands.items():
        for policy in ("shortest", "longest"):
            keys = ["--epoch_sync", policy, "--valid_epoch_sync", policy]
            args = task.get_parser().parse_args([*words, *keys])
            for mode in ("train", "valid"):
                factory = task.build_iter_factory(args, option, mode)
                for epoch in (1, 2):
                    iterator = factory.build_iter(epoch)
                    assert sum(1 for _ in iterator) == iterator.report.batches
                    found[f"{name} {policy} {mode} {epoch}"] = iterator.report
    return found


@pytest.mark.training
def test_a_real_run_has_the_batches_of_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speech = write_speech(tmp_path / "speech")
    words = data_words(speech, ENHANCEMENT_SOURCES, ["speech_shape"])
    commands = {}
    for name, options in REAL.items():
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**ENHANCEMENT, **options}))
        commands[name] = ["--config", str(config), *words]
    reports = run_ranks(2, iterate, commands, deadline=300)[0]
    for name, command in commands.items():
        ways = ["--task", "enh", "--world_size", "2", "--epochs", "2", "--json"]
        assert main([*ways, *command]) == 0
        found = json.loads(capsys.readouterr().out)
        deal_name = "chunk_balance" if name == "dealt" else "file order"
        for mode in ("train", "valid"):
            dealt = [epoch for epoch in found[mode]["epochs"] if epoch["deal"] == deal_name]
            assert len(dealt) == 2
            for epoch in dealt:
                place = f"{mode} {epoch['epoch']}"
                shortest = reports[f"{name} shortest {place}"]
                longest = reports[f"{name} longest {place}"]
                own = [longest.batches - rank.repeated for rank in longest.ranks]
                assert epoch["batches"] == own, (name, place)
                assert shortest.batches == min(own)
                assert epoch["repeated"] == sum(rank.repeated for rank in longest.ranks)
