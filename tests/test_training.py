"""ESPnet2's own training commands through the runner: tasks, iterators and trainers, two ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from espnet_sync.report import read_reports
from tests.ranks import run_ranks
from tests.speech import (
    ASR,
    ASR_SOURCES,
    ENHANCEMENT,
    ENHANCEMENT_SOURCES,
    RUNNER,
    TWO_EPOCHS,
    Ended,
    data_words,
    run,
    train,
    write_speech,
    write_splits,
)

pytestmark = pytest.mark.training


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech(tmp_path_factory.mktemp("speech"))


def passes(ended: Ended, label: str) -> list[tuple[int, int, str]]:
    """Return what the log says of each pass: its epoch, its batches, and who ran out first."""
    pattern = rf"\[{label}\] epoch (\d+): (\d+) batch(?:es)? on each of 2 ranks; ([^;]+);"
    return [(int(epoch), int(count), ended_by) for epoch, count, ended_by in ended.lines(pattern)]


def assert_in_step(ended: Ended, train_batches: int | None = None) -> None:
    """Expect a line for each of two epochs of both modes, and that ESPnet2 counted the same."""
    for label in ("train", "valid"):
        seen = passes(ended, label)
        assert [epoch for epoch, _, _ in seen] == [1, 2], ended.output[-8000:]
        pattern = rf"(\d)epoch results:.*?\[{label}\][^\[]*total_count=(\d+)"
        counts = {int(epoch): int(total) for epoch, total in ended.lines(pattern)}
        assert counts == {1: seen[0][1], 2: seen[0][1] + seen[1][1]}
    if train_batches is not None:
        assert [count for _, count, _ in passes(ended, "train")] == [train_batches] * 2


TOGETHER = "all ran out together"


def test_asr_trains_plots_resumes_and_decodes(speech: Path, tmp_path: Path) -> None:
    words = data_words(speech, ASR_SOURCES, ["speech_shape", "text_shape"])
    words += ["--token_list", str(speech / "tokens")]
    config = {**ASR, "num_att_plot": 2}
    first = train("espnet2.bin.asr_train", tmp_path, config, *words, "--max_epoch", "1")
    assert len(first.lines("espnet_sync .* ends the ranks' epochs together: .* 2 ranks")) == 1
    assert passes(first, "train") == [(1, 2, TOGETHER)]
    assert passes(first, "valid") == [(1, 2, TOGETHER)]
    # Iterated on rank 0 alone, where a synced factory would wait for the other rank.
    plots = {path.parent.name for path in (tmp_path / "exp" / "att_ws").glob("*/*.png")}
    assert len(plots) == 2

    second = train("espnet2.bin.asr_train", tmp_path, config, *words, "--resume", "true")
    assert second.lines(r"The training was resumed using .*checkpoint\.pth")
    assert passes(second, "train") == [(2, 2, TOGETHER)]
    assert passes(second, "valid") == [(2, 2, TOGETHER)]
    assert [each.epoch for each in read_reports(tmp_path / "exp")] == [1, 1, 2, 2]

    written = yaml.safe_load((tmp_path / "exp" / "config.yaml").read_text())
    assert (written["epoch_sync"], written["valid_epoch_sync_conf"]) == ("shortest", None)
    decode = [RUNNER, "-m", "espnet2.bin.asr_inference", "--output_dir", "decode", "--ngpu", "0"]
    decode += ["--asr_train_config", "exp/config.yaml", "--asr_model_file", "exp/2epoch.pth"]
    decode += ["--data_path_and_name_and_type", f"{speech / 'valid' / 'wav.scp'},speech,sound"]
    decode += ["--beam_size", "1", "--maxlenratio", "0.05"]
    decoded = run(decode, tmp_path)
    assert decoded.code == 0, decoded.output[-8000:]
    assert len((tmp_path / "decode" / "1best_recog" / "token").read_text().splitlines()) == 5


def test_asr_trains_with_a_multiple_iterator(speech: Path, tmp_path: Path) -> None:
    words = write_splits(speech, tmp_path, ASR_SOURCES, ["speech_shape", "text_shape"])
    words += ["--token_list", str(speech / "tokens"), "--multiple_iterator", "true"]
    ended = train("espnet2.bin.asr_train", tmp_path, ASR, *words)
    # One pass over both splits, and not one for each.
    assert_in_step(ended, train_batches=2)


def test_enhancement_trains_with_chunks_and_uneven_ranks(speech: Path, tmp_path: Path) -> None:
    words = data_words(speech, ENHANCEMENT_SOURCES, ["speech_shape"])
    config = {**ENHANCEMENT, "use_tensorboard": True}
    ended = train("espnet2.bin.enh_train", tmp_path, config, *words)
    assert_in_step(ended)
    for label in ("train", "valid"):
        assert {ended_by for _, _, ended_by in passes(ended, label)} == {"rank 1 ran out first"}
    line = r"\[train\] epoch 1: .* [1-9]\d* batch(?:es)? discarded.* set chunk_balance: true$"
    assert len(ended.lines(line)) == 1

    reports = read_reports(tmp_path / "exp")
    assert [(each.label, each.epoch) for each in reports] == [
        ("train", 1),
        ("valid", 1),
        ("train", 2),
        ("valid", 2),
    ]
    assert [each.batches for each in reports[::2]] == [
        batches for _, batches, _ in passes(ended, "train")
    ]
    assert (tmp_path / "exp" / "images" / "epoch_sync.png").read_bytes().startswith(b"\x89PNG")
    scalars = EventAccumulator(str(tmp_path / "exp" / "tensorboard" / "epoch_sync"))
    scalars.Reload()
    assert [event.step for event in scalars.Scalars("train/discarded")] == [1, 2]
    assert scalars.Scalars("valid/batches")[0].value == reports[1].batches


def test_enhancement_trains_with_chunks_by_category(speech: Path, tmp_path: Path) -> None:
    config = {
        **ENHANCEMENT,
        "iterator_type": "category_chunk",
        "valid_iterator_type": "chunk",
        "batch_type": "catbel",
        "category_sample_size": 2,
    }
    words = data_words(speech, ENHANCEMENT_SOURCES, ["speech_shape"])
    words += ["--use_matplotlib", "false"]
    assert_in_step(train("espnet2.bin.enh_train", tmp_path, config, *words))
    assert not list((tmp_path / "exp").rglob("*.png"))


def test_language_identification_trains_by_category(speech: Path, tmp_path: Path) -> None:
    config = {
        **TWO_EPOCHS,
        "iterator_type": "category",
        "batch_type": "catbel",
        "valid_iterator_type": "category",
        "valid_batch_type": "catbel",
        "frontend": "default",
        "frontend_conf": {"n_fft": 512, "hop_length": 256, "n_mels": 20},
        "encoder": "ecapa_tdnn",
        "encoder_conf": {"model_scale": 2, "ndim": 8, "output_size": 8},
        "pooling": "mean",
        "projector": "rawnet3",
        "projector_conf": {"output_size": 8},
        "loss": "aamsoftmax_sc_topk",
        "loss_conf": {"margin": 0.1, "scale": 10, "K": 1, "mp": 0.06, "k_top": 1},
        "lang_num": 5,
        "lang2utt": str(speech / "train" / "lang2utt"),
    }
    sources = {"wav.scp": "speech,sound", "utt2lang": "lid_labels,text"}
    words = data_words(speech, sources, ["speech_shape"])
    ended = train("espnet2.bin.lid_train", tmp_path, config, *words)
    assert_in_step(ended)
    assert {ended_by for _, _, ended_by in passes(ended, "train")} == {TOGETHER}


def test_a_gan_codec_trains_with_chunks(speech: Path, tmp_path: Path) -> None:
    scale_discriminator = {
        "in_channels": 1,
        "out_channels": 1,
        "kernel_sizes": [5, 5, 5, 3],
        "channels": 4,
        "max_downsample_channels": 8,
        "max_groups": 2,
        "bias": True,
        "downsample_scales": [4, 4],
        "nonlinear_activation": "LeakyReLU",
        "nonlinear_activation_params": {"negative_slope": 0.1},
    }
    stft_discriminator = {
        "in_channels": 1,
        "channels": 2,
        "strides": [[1, 2], [2, 2]],
        "chan_mults": [1, 2],
        "n_fft": 256,
        "hop_length": 64,
        "win_length": 256,
        "stft_normalized": False,
        "logits_abs": True,
    }
    codec = {
        "sampling_rate": 16000,
        "generator_params": {
            "hidden_dim": 8,
            "encdec_n_filters": 2,
            "encdec_ratios": [8, 5, 4],
            "encdec_lstm": 1,
            "quantizer_n_q": 2,
            "quantizer_bins": 8,
            "quantizer_kmeans_iters": 2,
            "quantizer_target_bandwidth": [1],
        },
        "discriminator_params": {
            "scales": 1,
            "scale_discriminator_params": scale_discriminator,
            "complexstft_discriminator_params": stft_discriminator,
        },
        "mel_loss_params": {
            "range_start": 6,
            "range_end": 8,
            "window": "hann",
            "n_mels": 10,
            "fmin": 0,
            "fmax": None,
            "log_base": None,
        },
    }
    config = {
        **TWO_EPOCHS,
        "optim2": "adam",
        "unused_parameters": True,
        "iterator_type": "chunk",
        "chunk_length": 3200,
        "chunk_shift_ratio": 1.0,
        "num_cache_chunks": 64,
        "batch_size": 8,
        "valid_batch_size": 8,
        "codec": "soundstream",
        "codec_conf": codec,
    }
    words = data_words(speech, {"ref.scp": "audio,sound"}, ["speech_shape"])
    ended = train("espnet2.bin.gan_codec_train", tmp_path, config, *words)
    assert_in_step(ended)
    for turn in ("generator", "discriminator"):
        assert ended.lines(rf"2epoch results: .*\b{turn}_train_time=")


# --- The speaker task's validation ------------------------------------------------------------


def write_trials(speech: Path, folder: Path) -> list[str]:
    """Write trials, i.e. pairs of utterances, and return the words that hand them over."""
    sounds = [line.split() for line in (speech / "valid" / "wav.scp").read_text().splitlines()]
    files: dict[str, list[str]] = {}
    for first, path in sounds:
        for second, other in sounds:
            trial = f"{first}*{second}"
            same = int(first.split("-")[0] == second.split("-")[0])
            for file, value in (("trial", path), ("trial2", other), ("label", same)):
                files.setdefault(file, []).append(f"{trial} {value}\n")
            files.setdefault("shape", []).append(f"{trial} 3200\n")
    for file, lines in files.items():
        (folder / file).write_text("".join(lines))
    words = []
    for file, name in (
        ("trial", "speech,sound"),
        ("trial2", "speech2,sound"),
        ("label", "spk_labels,text"),
    ):
        words += ["--valid_data_path_and_name_and_type", f"{folder / file},{name}"]
    return [*words, "--valid_shape_file", str(folder / "shape")]


def iterate_twice(rank: int, world_size: int, words: list[str]) -> list[Any]:
    # Takes seconds to import: not when a rank of another test imports this module.
    from espnet2.tasks.spk import SpeakerTask
    from espnet2.train.distributed_utils import DistributedOption

    from espnet_sync.task import synced

    task = synced(SpeakerTask)
    args = task.get_parser().parse_args(words)
    option = DistributedOption(distributed=True, dist_rank=rank, dist_world_size=world_size)
    factory = task.build_iter_factory(args, option, "valid")
    seen = []
    for epoch in (1, 2):
        iterator = factory.build_iter(epoch)
        for _ in range(2):
            seen.append(
                [
                    (ids, {name: value.tolist() for name, value in batch.items()})
                    for ids, batch in iterator
                ]
            )
            seen[-1].append(iterator.report)
    return seen


def test_the_speaker_tasks_validation_gets_the_same_batches_twice(
    speech: Path, tmp_path: Path
) -> None:
    words = [*write_trials(speech, tmp_path), "--num_workers", "0", "--valid_batch_size", "4"]
    words += ["--valid_batch_type", "unsorted", "--valid_iterator_type", "sequence"]
    words += ["--iterator_type", "category", "--preprocessor", "spk"]
    conf = "{target_duration: 0.1, sample_rate: 16000, num_eval: 2, noise_info: []}"
    words += ["--preprocessor_conf", conf]
    for passes_of_rank in run_ranks(2, iterate_twice, words, deadline=400):
        first, second, *later = passes_of_rank
        assert len(first) == 7
        assert {name for _, batch in first[:-1] for name in batch} >= {"speech", "speech2"}
        assert first[:-1] == second[:-1]
        assert later[0][:-1] == later[1][:-1]
        assert {each[-1].batches for each in passes_of_rank} == {6}


# --- Ranks that the command spawns itself -----------------------------------------------------

OWN_TRAINING = '''
"""A user's own task, and a main that spawns its workers as ESPnet2 does for several GPUs."""
import argparse
import tempfile

import torch
from espnet2.tasks.lm import LMTask
from torch.multiprocessing.spawn import ProcessContext

RANKS = 4


class OwnTask(LMTask):
    @classmethod
    def build_model(cls, args):
        print("OwnTask builds the model", flush=True)
        return super().build_model(args)


def main(cmd=None):
    args = OwnTask.get_parser().parse_args(cmd)
    args.version = "0"
    OwnTask.check_required_command_args(args)
    args.distributed = True
    args.dist_world_size = RANKS
    context = torch.multiprocessing.get_context("spawn")
    processes, error_files = [], []
    for rank in range(RANKS):
        own = argparse.Namespace(**vars(args))
        own.local_rank = own.dist_rank = rank
        process = context.Process(target=OwnTask.main_worker, args=(own,), daemon=False)
        process.start()
        processes.append(process)
        error_files.append(tempfile.mktemp(dir=args.output_dir))
    while not ProcessContext(processes, error_files).join():
        pass


if __name__ == "__main__":
    main()
'''


def test_spawned_workers_of_a_users_own_task_are_synced(speech: Path, tmp_path: Path) -> None:
    package = tmp_path / "mypkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_train.py").write_text(OWN_TRAINING)
    (tmp_path / "exp").mkdir()
    config = {
        **TWO_EPOCHS,
        "token_type": "char",
        "token_list": str(speech / "tokens"),
        "lm": "seq_rnn",
        "lm_conf": {"unit": 4, "nlayers": 1},
        "batch_type": "unsorted",
        "batch_size": 4,
        "valid_batch_size": 4,
        "ngpu": 0,
        "dist_backend": "gloo",
        "dist_init_method": f"file://{tmp_path / 'meeting'}",
    }
    words = data_words(speech, {"text": "text,text"}, ["text_shape"])
    ended = train("mypkg.my_train", tmp_path, config, *words, ranks=1)
    assert ended.output.count("OwnTask builds the model") == 4
    pattern = r"\[(train|valid)\] epoch (\d): \d+ batch(?:es)? on each of 4 ranks"
    assert ended.lines(pattern) == [
        ("train", "1"),
        ("valid", "1"),
        ("train", "2"),
        ("valid", "2"),
    ]
    assert re.search("ends the ranks' epochs together: .* 4 ranks, a Gloo group", ended.output)
