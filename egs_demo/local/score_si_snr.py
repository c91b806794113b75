"""Score SI-SNR (scale-invariant signal-to-noise ratio) before and after enhancement."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import fast_bss_eval
import numpy as np
import soundfile
from tabulate import tabulate


def read_scp(path: Path) -> dict[str, str]:
    """Read a file of lines `utterance value`.

    Args:
        path: The file.

    Returns:
        The value of each utterance.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def si_snr(reference: np.ndarray, estimate: np.ndarray) -> float:
    """Score one signal.

    Args:
        reference: The clean speech, shape `(time,)`.
        estimate: The signal to score, of the same length.

    Returns:
        The ratio in dB, means removed.
    """
    return float(fast_bss_eval.si_sdr(reference[None], estimate[None], zero_mean=True)[0])


def score(
    mixtures: Mapping[str, str], references: Mapping[str, str], enhanced: Mapping[str, str]
) -> dict[str, tuple[float, float]]:
    """Score all utterances.

    Args:
        mixtures: The noisy file of each utterance.
        references: The clean file of each utterance.
        enhanced: The enhanced file of each utterance.

    Returns:
        SI-SNR before and after, in dB.

    Raises:
        ValueError: If utterances are missing or lengths differ.
    """
    missing = sorted(mixtures.keys() ^ enhanced.keys())
    if missing:
        raise ValueError(f"the enhanced set is not complete: {' '.join(missing)}")
    scores = {}
    for utterance in mixtures:
        noisy, clean, result = (
            soundfile.read(files[utterance], dtype="float64")[0]
            for files in (mixtures, references, enhanced)
        )
        if not len(noisy) == len(clean) == len(result):
            raise ValueError(
                f"{utterance}: lengths differ: mixture {len(noisy)}, reference {len(clean)}, "
                f"enhanced {len(result)}"
            )
        if not np.any(result):
            raise ValueError(f"{utterance}: the enhanced signal is silent")
        scores[utterance] = (si_snr(clean, noisy), si_snr(clean, result))
    return scores


def show(scores: Mapping[str, tuple[float, float]], speakers: Mapping[str, str]) -> str:
    """Draw the table.

    Args:
        scores: SI-SNR before and after, in dB.
        speakers: The speaker of each utterance.

    Returns:
        The table, with a row for each speaker and one for all.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for utterance, pair in scores.items():
        groups.setdefault(speakers[utterance], []).append(pair)
    rows = []
    for name, pairs in [*sorted(groups.items()), ("all", list(scores.values()))]:
        before, after = np.array(pairs).T
        rows.append([name, len(pairs), before.mean(), after.mean(), (after - before).mean()])
    headers = ["speaker", "utterances", "SI-SNR before", "after", "improvement (dB)"]
    return tabulate(rows, headers, tablefmt="github", floatfmt=".2f")


def main() -> int:
    """Run the command.

    Returns:
        The exit status: 1 if the improvement over all utterances is not above 0 dB.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--enhanced_scp", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()

    try:
        scores = score(
            read_scp(args.data_dir / "wav.scp"),
            read_scp(args.data_dir / "spk1.scp"),
            read_scp(args.enhanced_scp),
        )
    except (ValueError, OSError, RuntimeError) as error:
        print(f"Error: can't score {args.enhanced_scp}: {error}", file=sys.stderr)
        return 1

    table = show(scores, read_scp(args.data_dir / "utt2spk"))
    improvement = float(np.mean([after - before for before, after in scores.values()]))
    result = {"improvement": improvement, "utterances": scores}
    (args.output_dir / "si_snr.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.output_dir / "RESULTS.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    if not improvement > 0:
        print(
            f"Error: enhancement does not improve SI-SNR ({improvement:+.2f} dB on average): "
            "train longer, with a larger --max_epoch from stage 3",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
