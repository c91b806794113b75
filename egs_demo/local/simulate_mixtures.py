"""Simulate noisy mixtures from AN4 speech as data directories.

A mixture joins 1 to 4 utterances of one speaker and adds noise at 0 to 10 dB SNR, so that
lengths differ widely. Everything random comes from the seed, the split and the mixture's number:
the result is the same with any number of jobs, byte by byte.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import soundfile

SAMPLE_RATE = 16000
SPEECH_RMS = 0.05
MAX_UTTERANCES = 4
SNR_RANGE = (0.0, 10.0)
GAIN_RANGE = (-3.0, 3.0)
GAP_RANGE = (0.05, 0.4)
EDGE_RANGE = (0.2, 0.6)
SPLITS = ("train", "valid", "test")
CORPUS_PARTS = {"train": "an4_clstk", "valid": "an4_clstk", "test": "an4test_clstk"}


class CorpusError(Exception):
    """The given speech or noise can't be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """One mixture to make.

    Attributes:
        split: `train`, `valid` or `test`.
        index: Its number within the split.
        speaker: The speaker's id.
        utterances: All utterances of that speaker.
        noises: All noises.
    """

    split: str
    index: int
    speaker: str
    utterances: tuple[Path, ...]
    noises: tuple[Path, ...]

    @property
    def utt_id(self) -> str:
        """The id, which starts with the speaker's so that sorting by either agrees."""
        return f"{self.speaker}_{self.split}{self.index:05d}"


def find_speakers(an4_dir: Path, part: str) -> dict[str, tuple[Path, ...]]:
    """List the utterances of a part of AN4.

    Args:
        an4_dir: The folder that holds `wav`, or `an4/wav`.
        part: `an4_clstk` or `an4test_clstk`.

    Returns:
        The utterances of each speaker, in a fixed order.

    Raises:
        CorpusError: If there are none.
    """
    for folder in (an4_dir / "wav" / part, an4_dir / "an4" / "wav" / part):
        speakers: dict[str, list[Path]] = {}
        for path in sorted(folder.glob("*/*.sph")):
            speakers.setdefault(path.parent.name, []).append(path)
        if speakers:
            return {speaker: tuple(paths) for speaker, paths in speakers.items()}
    raise CorpusError(
        f"no AN4 speech in {an4_dir}: expected wav/{part}/SPEAKER/*.sph "
        f"or an4/wav/{part}/SPEAKER/*.sph below it"
    )


def read(path: Path) -> np.ndarray:
    """Read a mono file.

    Args:
        path: Any file that libsndfile knows.

    Returns:
        Samples at 16 kHz, float64, shape `(time,)`.

    Raises:
        CorpusError: If the file is damaged, empty, silent or of another kind.
    """
    try:
        samples, sample_rate = soundfile.read(path, dtype="float64")
    except (RuntimeError, OSError) as error:
        raise CorpusError(f"can't read {path}: {error}") from error
    if sample_rate != SAMPLE_RATE or samples.ndim != 1:
        raise CorpusError(f"{path} must be mono at {SAMPLE_RATE} Hz")
    if not np.any(samples):
        raise CorpusError(f"{path} is empty or silent")
    return samples


def scale_to_rms(samples: np.ndarray, rms: float) -> np.ndarray:
    """Scale a signal to a root mean square.

    Args:
        samples: A signal that is not silent, shape `(time,)`.
        rms: The root mean square wanted.

    Returns:
        The scaled signal.
    """
    return samples * (rms / np.sqrt(np.mean(samples**2)))


def mix(mixture: Mixture, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make one mixture.

    Args:
        mixture: What to mix.
        seed: The seed of the whole corpus.

    Returns:
        The noisy mixture and the clean speech in it, both of shape `(time,)`.
    """
    random = np.random.default_rng([seed, SPLITS.index(mixture.split), mixture.index])

    def silence(low: float, high: float) -> np.ndarray:
        return np.zeros(int(random.uniform(low, high) * SAMPLE_RATE))

    number = int(random.integers(1, MAX_UTTERANCES + 1))
    # A speaker of the small archive has 1 to 3 utterances: they come again, otherwise not.
    again = len(mixture.utterances) < number
    chosen = random.choice(len(mixture.utterances), size=number, replace=again)
    pieces = [silence(*EDGE_RANGE)]
    for position, utterance in enumerate(chosen):
        if position > 0:
            pieces.append(silence(*GAP_RANGE))
        gain = 10 ** (random.uniform(*GAIN_RANGE) / 20)
        pieces.append(scale_to_rms(read(mixture.utterances[utterance]), SPEECH_RMS * gain))
    pieces.append(silence(*EDGE_RANGE))
    speech = np.concatenate(pieces)

    noise = read(mixture.noises[random.integers(len(mixture.noises))])
    noise = np.resize(np.roll(noise, -int(random.integers(len(noise)))), len(speech))
    snr = random.uniform(*SNR_RANGE)
    noise = scale_to_rms(noise, float(np.sqrt(np.mean(speech**2))) / 10 ** (snr / 20))

    noisy = speech + noise
    scale = min(1.0, 0.95 / max(np.abs(noisy).max(), np.abs(speech).max()))
    return noisy * scale, speech * scale


def write_wavs(mixture: Mixture, wav_dir: Path, seed: int) -> None:
    """Make one mixture and write it and its reference.

    Args:
        mixture: What to mix.
        wav_dir: The folder of all splits.
        seed: The seed of the whole corpus.
    """
    for kind, samples in zip(("mix", "spk1"), mix(mixture, seed), strict=True):
        path = wav_dir / mixture.split / kind / f"{mixture.utt_id}.wav"
        soundfile.write(path, samples, SAMPLE_RATE, subtype="PCM_16")


def write_data_dir(mixtures: Sequence[Mixture], data_dir: Path, wav_dir: str) -> None:
    """Write the four files of a data directory.

    Args:
        mixtures: All mixtures of one split.
        data_dir: The directory to fill.
        wav_dir: The folder of this split's wavs, as it is to be written.
    """
    data_dir.mkdir(parents=True)
    ordered = sorted(mixtures, key=lambda mixture: mixture.utt_id)
    speakers: dict[str, list[str]] = {}
    for mixture in ordered:
        speakers.setdefault(mixture.speaker, []).append(mixture.utt_id)
    lines = {
        "wav.scp": [f"{m.utt_id} {wav_dir}/mix/{m.utt_id}.wav" for m in ordered],
        "spk1.scp": [f"{m.utt_id} {wav_dir}/spk1/{m.utt_id}.wav" for m in ordered],
        "utt2spk": [f"{m.utt_id} {m.speaker}" for m in ordered],
        "spk2utt": [f"{speaker} {' '.join(ids)}" for speaker, ids in sorted(speakers.items())],
    }
    for name, content in lines.items():
        (data_dir / name).write_text("\n".join(content) + "\n", encoding="utf-8")


def plan(an4_dir: Path, noise_dir: Path, minimum: dict[str, int]) -> list[Mixture]:
    """Decide on all mixtures of all splits.

    Args:
        an4_dir: AN4 speech.
        noise_dir: The folder of the noises.
        minimum: The smallest number of mixtures of each split. A corpus with more speech
            gets more: as many as use each utterance once on average.

    Returns:
        The mixtures.

    Raises:
        CorpusError: If speech or noise is missing, or a test speaker is in train.
    """
    noises = tuple(sorted(noise_dir.glob("*.wav")))
    if not noises:
        raise CorpusError(f"no noise (*.wav) in {noise_dir}")
    corpus = {part: find_speakers(an4_dir, part) for part in sorted(set(CORPUS_PARTS.values()))}
    shared = corpus["an4_clstk"].keys() & corpus["an4test_clstk"].keys()
    if shared:
        raise CorpusError(f"speakers in both train and test: {' '.join(sorted(shared))}")

    mean_utterances = (1 + MAX_UTTERANCES) / 2
    share = {"train": 0.9, "valid": 0.1, "test": 1.0}
    mixtures = []
    for split in SPLITS:
        speakers = corpus[CORPUS_PARTS[split]]
        utterances = sum(len(paths) for paths in speakers.values())
        number = max(minimum[split], round(share[split] * utterances / mean_utterances))
        names = sorted(speakers)
        for index in range(number):
            speaker = names[index % len(names)]
            mixtures.append(
                Mixture(
                    split=split,
                    index=index,
                    speaker=speaker,
                    utterances=speakers[speaker],
                    noises=noises,
                )
            )
    return mixtures


def main() -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--an4_dir", type=Path, required=True)
    parser.add_argument("--noise_dir", type=Path, required=True)
    parser.add_argument("--wav_dir", type=Path, required=True, help="where the wavs are written")
    parser.add_argument("--final_wav_dir", required=True, help="where they will be moved to")
    parser.add_argument("--data_dir", type=Path, required=True, help="holds the three splits")
    parser.add_argument("--num_train", type=int, default=72)
    parser.add_argument("--num_valid", type=int, default=16)
    parser.add_argument("--num_test", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nj", type=int, default=1)
    args = parser.parse_args()

    minimum = {"train": args.num_train, "valid": args.num_valid, "test": args.num_test}
    try:
        mixtures = plan(args.an4_dir, args.noise_dir, minimum)
        for split in SPLITS:
            for kind in ("mix", "spk1"):
                (args.wav_dir / split / kind).mkdir(parents=True)
        with ThreadPoolExecutor(args.nj) as pool:
            list(pool.map(partial(write_wavs, wav_dir=args.wav_dir, seed=args.seed), mixtures))
    except CorpusError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    for split in SPLITS:
        chosen = [mixture for mixture in mixtures if mixture.split == split]
        write_data_dir(chosen, args.data_dir / split, f"{args.final_wav_dir}/{split}")
        print(f"{split}: {len(chosen)} mixtures, {len({m.speaker for m in chosen})} speakers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
