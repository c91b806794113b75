"""ESPnet2's Lightning command through the runner: two ranks, and epochs that count from 1."""

from pathlib import Path
from typing import Any

import pytest
from espnet2.tasks.lm import LMTask
from espnet2.train.distributed_utils import DistributedOption

from espnet_sync.task import synced, synced_for_lightning
from tests.speech import (
    ASR,
    ASR_SOURCES,
    RUNNER,
    TORCHRUN,
    Ended,
    data_words,
    run,
    write_config,
    write_speech,
    write_splits,
)

pytestmark = pytest.mark.training

LIGHTNING: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 2,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "strategy_conf": {"process_group_backend": "gloo"},
    # NOTE: of the best models, ESPnet2 averages checkpoints which torch >= 2.6 refuses to load.
    "best_model_criterion": [],
}


#: `lightning_train` asks for a schedule and a logger.
REQUIRED: dict[str, Any] = {
    "scheduler": "warmuplr",
    "scheduler_conf": {"warmup_steps": 10},
    "use_tensorboard": True,
}


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech(tmp_path_factory.mktemp("speech"))


def train(folder: Path, speech: Path, words: list[str], launcher: list[str]) -> Ended:
    """Train two epochs of three steps with `lightning_train`."""
    (folder / "exp").mkdir()
    config = {**ASR, **REQUIRED, "num_iters_per_epoch": 3, "lightning_conf": LIGHTNING}
    # Keys of ESPnet2's own trainer.
    config.pop("max_epoch")
    write_config(folder / "train.yaml", config)
    command = [*launcher, RUNNER, "-m", "espnet2.bin.lightning_train", "--task", "asr"]
    command += ["--config", "train.yaml", "--output_dir", "exp"]
    command += ["--token_list", str(speech / "tokens"), *words]
    ended = run(command, folder)
    assert ended.code == 0, f"exit code {ended.code}: {command}\n{ended.output[-8000:]}"
    return ended


def assert_trained(ended: Ended, folder: Path) -> None:
    pattern = r"\[(train|valid)\] epoch (\d+): (\d+) batch(?:es)? on each of 2 ranks"
    assert ended.lines(pattern) == [
        ("train", "1", "3"),
        ("valid", "1", "2"),
        ("train", "2", "3"),
        ("valid", "2", "2"),
    ], ended.output[-8000:]
    assert len(ended.lines("ends the ranks' epochs together: train shortest, valid shortest")) == 1
    assert (folder / "exp" / "images" / "epoch_sync.png").exists()
    assert "`Trainer.fit` stopped: `max_epochs=2` reached." in ended.output
    assert (folder / "exp" / "last.ckpt").exists()


def test_lightning_starts_the_other_rank_synced_and_trains(speech: Path, tmp_path: Path) -> None:
    words = data_words(speech, ASR_SOURCES, ["speech_shape", "text_shape"])
    assert_trained(train(tmp_path, speech, words, []), tmp_path)


def test_a_multiple_iterator_trains_under_torchrun(speech: Path, tmp_path: Path) -> None:
    words = write_splits(speech, tmp_path, ASR_SOURCES, ["speech_shape", "text_shape"])
    words += ["--multiple_iterator", "true"]
    launcher = [*TORCHRUN, "--nproc_per_node=2"]
    ended = train(tmp_path, speech, words, launcher)
    assert_trained(ended, tmp_path)


def test_the_inner_factory_sees_epochs_from_1_and_epoch_0_is_a_seed_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"utt{number} abc\n" for number in range(8)))
    (tmp_path / "shape").write_text("".join(f"utt{number} 3\n" for number in range(8)))
    words = ["--train_data_path_and_name_and_type", f"{tmp_path / 'text'},text,text"]
    words += ["--train_shape_file", str(tmp_path / "shape"), "--token_type", "char"]
    words += ["--batch_type", "unsorted", "--batch_size", "2", "--num_workers", "0"]
    args = LMTask.get_parser().parse_args([*words, "--num_iters_per_epoch", "3"])
    args.token_list = ["<blank>", "<unk>", "a", "b", "c", "<sos/eos>"]

    def batches(task: Any, epoch: int) -> list[list[str]]:
        factory = task.build_iter_factory(args, DistributedOption(), "train")
        return [ids for ids, _ in factory.build_iter(epoch)]

    lightnings = synced_for_lightning(LMTask)
    for epoch in range(3):
        assert batches(lightnings, epoch) == batches(LMTask, epoch + 1)
    for task in (LMTask, synced(LMTask)):
        with pytest.raises(ValueError, match="Seed must be between 0"):
            batches(task, 0)
