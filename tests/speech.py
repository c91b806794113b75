"""Small sets of real speech in ESPnet2's form, and training commands over them, each bounded."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import yaml

#: AN4 (Carnegie Mellon University, free for any use), out of espnet's own wheel.
ARCHIVE = "mini_an4/esp2_asr/downloads.tar.gz"
SAMPLE_RATE = 16000
#: Seconds that a command may take before it is ended, with its output shown.
DEADLINE = 400.0
#: Utterances of each set.
NUMBERS = {"train": 10, "valid": 5}
#: The runner, as a recipe calls it, from beside the Python that runs the tests.
RUNNER = str(Path(sys.executable).parent / "espnet_sync")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
ON_CPU_RANKS = (
    *("--ngpu", "0", "--multiprocessing_distributed", "false", "--dist_backend", "gloo"),
    *("--dist_launcher", "none"),
)


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it wrote to both streams."""

    code: int
    output: str

    def lines(self, pattern: str) -> list[str]:
        """Return what a regular expression finds, line by line."""
        return re.findall(pattern, self.output, flags=re.MULTILINE)


def run(
    command: Sequence[str],
    folder: Path,
    deadline: float = DEADLINE,
    **variables: str,
) -> Ended:
    """Run a command in a process group of its own, all of which ends at the deadline.

    Raises:
        AssertionError: If it is not done by then; with its output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with open(folder / "command.log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(deadline)
            late = False
        except subprocess.TimeoutExpired:
            late = True
            # NOTE: torchrun puts each rank in a session of its own, out of killpg's reach: asked
            # to end, it ends them, by SIGKILL after 30 s.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    output = (folder / "command.log").read_text(errors="replace")
    assert not late, f"not done after {deadline} s: {' '.join(command)}\n{output[-8000:]}"
    return Ended(process.returncode, output)


def write_config(file: Path, config: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(config))


def train(
    module: str,
    folder: Path,
    config: dict[str, Any],
    *words: str,
    ranks: int = 2,
    runner: Sequence[str] = (RUNNER,),
    output: str = "exp",
) -> Ended:
    """Run a training command on CPU ranks that torchrun starts, and expect it to succeed.

    Args:
        module: What follows `-m`.
        folder: Where it runs.
        config: Its YAML.
        *words: Further words of its command line.
        ranks: How many; with 1 there is no torchrun.
        runner: What stands where a recipe has `${python}`.
        output: The experiment's folder, in `folder`.
    """
    write_config(folder / f"{output}.yaml", config)
    command = [*runner, "-m", module, "--config", f"{output}.yaml", "--output_dir", output, *words]
    if ranks > 1:
        command = [*TORCHRUN, f"--nproc_per_node={ranks}", *command, *ON_CPU_RANKS]
    ended = run(command, folder)
    assert ended.code == 0, f"exit code {ended.code}: {' '.join(command)}\n{ended.output[-8000:]}"
    return ended


# --- The speech -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Utterance:
    """One recording: its name, speaker, words and 16-bit samples at 16 kHz."""

    name: str
    speaker: str
    words: str
    samples: np.ndarray


def read_speech() -> list[Utterance]:
    """Return the utterances of mini AN4, train and test together, by name."""
    spec = importlib.util.find_spec("egs3")
    assert spec is not None
    assert spec.submodule_search_locations
    words: dict[str, str] = {}
    sounds: dict[str, tuple[str, np.ndarray]] = {}
    with tarfile.open(Path(spec.submodule_search_locations[0]) / ARCHIVE) as archive:
        for member in archive:
            path = Path(member.name)
            file = archive.extractfile(member)
            if file is None or path.suffix not in (".sph", ".transcription"):
                continue
            if path.suffix == ".sph":
                samples, rate = soundfile.read(file, dtype="int16")
                assert rate == SAMPLE_RATE
                sounds[path.stem] = (path.parent.name, samples)
                continue
            for line in file.read().decode().splitlines():
                said, _, name = line.rpartition(" ")
                words[name.strip("()")] = said.removeprefix("<s> ").removesuffix(" </s>")
    return [
        Utterance(name, speaker, words[name], samples)
        for name, (speaker, samples) in sorted(sounds.items())
        if name in words
    ]


def write_speech(folder: Path) -> Path:
    """Write sets `train` and `valid` as a recipe leaves them, and a list of characters.

    Each set has `wav.scp` (with `ref.scp`, the same without the noise), `text`, `utt2spk`,
    `category2utt` (by speaker) and the shapes that collecting statistics gives. An utterance
    comes several times, cut to other lengths: chunk iterators make of it unequal ranks.

    Args:
        folder: Where; `folder/tokens` is the list.
    """
    speech = read_speech()
    random = np.random.default_rng(0)
    characters: set[str] = set()
    for part, number in NUMBERS.items():
        place = folder / part
        place.mkdir(parents=True)
        files: dict[str, list[str]] = {}
        categories: dict[str, list[str]] = {}
        for index in range(number):
            said = speech[index % len(speech)]
            name = f"{said.speaker}-{part}{index:02}"
            whole = said.samples
            samples = whole[: len(whole) - index * len(whole) // (4 * number)]
            noise = random.normal(scale=200, size=len(samples))
            for kind, sound in (("wav", samples + noise), ("ref", samples)):
                soundfile.write(place / f"{name}.{kind}.wav", sound.astype(np.int16), SAMPLE_RATE)
                files.setdefault(f"{kind}.scp", []).append(f"{name} {place / name}.{kind}.wav")
            files.setdefault("text", []).append(f"{name} {said.words}")
            files.setdefault("utt2spk", []).append(f"{name} {said.speaker}")
            files.setdefault("utt2lang", []).append(f"{name} {said.speaker}")
            files.setdefault("speech_shape", []).append(f"{name} {len(samples)}")
            files.setdefault("text_shape", []).append(f"{name} {len(said.words)}")
            categories.setdefault(said.speaker, []).append(name)
            characters |= set(said.words)
        for file, lines in files.items():
            (place / file).write_text("".join(f"{line}\n" for line in sorted(lines)))
        for file in ("category2utt", "spk2utt", "lang2utt"):
            rows = [
                f"{speaker} {' '.join(names)}\n" for speaker, names in sorted(categories.items())
            ]
            (place / file).write_text("".join(rows))
    tokens = ["<blank>", "<unk>", *sorted(characters - {" "}), "<space>", "<sos/eos>"]
    (folder / "tokens").write_text("".join(f"{token}\n" for token in tokens))
    return folder


def data_words(folder: Path, sources: dict[str, str], shapes: Sequence[str]) -> list[str]:
    """Return the words of a command line that hand both sets over.

    Args:
        folder: What `write_speech` filled.
        sources: From a file to what ESPnet2 calls it and its type: `{"text": "text,text"}`.
        shapes: The files of shapes.
    """
    words = []
    for part in NUMBERS:
        for file, name in sources.items():
            words += [f"--{part}_data_path_and_name_and_type", f"{folder / part / file},{name}"]
        for shape in shapes:
            words += [f"--{part}_shape_file", f"{folder / part / shape}"]
    return words


def write_splits(
    speech: Path, folder: Path, sources: dict[str, str], shapes: Sequence[str]
) -> list[str]:
    """Split the train set in two as a recipe does, and return the words that hand all over.

    Args:
        speech: What `write_speech` filled.
        folder: Where the splits are written, in `splits`.
        sources: As in `data_words`.
        shapes: As in `data_words`.
    """
    files = [str(speech / "train" / file) for file in (*sources, *shapes)]
    command = [RUNNER, "-m", "espnet2.bin.split_scps", "--scps", *files]
    ended = run([*command, "--num_splits", "2", "--output_dir", "splits"], folder)
    assert ended.code == 0, ended.output
    words = data_words(speech, sources, shapes)
    return [word.replace(f"{speech / 'train'}", f"{folder / 'splits'}") for word in words]


#: What all the trainings below share.
TWO_EPOCHS: dict[str, Any] = {
    "max_epoch": 2,
    "num_workers": 0,
    "seed": 0,
    "num_att_plot": 0,
    "use_tensorboard": False,
    "keep_nbest_models": 1,
    "log_interval": 1,
    "batch_size": 4,
    "valid_batch_size": 2,
    "optim": "adam",
    "optim_conf": {"lr": 1.0e-3},
}

#: A tiny transformer over characters; `--token_list` is still to be given.
ASR: dict[str, Any] = {
    **TWO_EPOCHS,
    "token_type": "char",
    "frontend_conf": {"n_fft": 512, "hop_length": 256, "n_mels": 20},
    "encoder": "transformer",
    "encoder_conf": {
        "output_size": 8,
        "attention_heads": 2,
        "linear_units": 8,
        "num_blocks": 1,
        "input_layer": "conv2d",
    },
    "decoder": "transformer",
    "decoder_conf": {"attention_heads": 2, "linear_units": 8, "num_blocks": 1},
    # Counting errors needs a package that espnet does not install.
    "model_conf": {"ctc_weight": 0.3, "report_cer": False, "report_wer": False},
    "batch_type": "sorted",
}
ASR_SOURCES = {"wav.scp": "speech,sound", "text": "text,text"}

#: A tiny mask over chunks of half a second, which give the ranks unequal numbers of batches.
ENHANCEMENT: dict[str, Any] = {
    **TWO_EPOCHS,
    "encoder": "stft",
    "encoder_conf": {"n_fft": 256, "hop_length": 128},
    "decoder": "stft",
    "decoder_conf": {"n_fft": 256, "hop_length": 128},
    "separator": "rnn",
    "separator_conf": {"num_spk": 1, "layer": 2, "unit": 8, "dropout": 0.2},
    "model_conf": {"loss_type": "mask_mse"},
    "criterions": [
        {"name": "si_snr", "conf": {}, "wrapper": "fixed_order", "wrapper_conf": {"weight": 1.0}}
    ],
    "iterator_type": "chunk",
    "chunk_length": 8000,
    "chunk_shift_ratio": 0.5,
    "num_cache_chunks": 64,
}
ENHANCEMENT_SOURCES = {"wav.scp": "speech_mix,sound", "ref.scp": "speech_ref1,sound"}
