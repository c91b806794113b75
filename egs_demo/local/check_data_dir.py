"""Check that data directories are sorted, complete, consistent and readable.

Every fault found is printed, one per line; the exit status is 1 if there was one.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import soundfile

SAMPLE_RATES = range(8000, 48001)


def read_table(path: Path, faults: list[str]) -> dict[str, list[str]]:
    """Read a file of lines `key field...`, checking its form.

    Args:
        path: The file.
        faults: What is wrong is appended here.

    Returns:
        The fields of each key.
    """
    if not path.is_file():
        faults.append(f"{path}: missing")
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        faults.append(f"{path}: not UTF-8 text ({error})")
        return {}
    if not text:
        faults.append(f"{path}: empty")
        return {}
    if not text.endswith("\n"):
        faults.append(f"{path}: the last line is cut off (no newline at its end)")

    table: dict[str, list[str]] = {}
    previous = b""
    for number, line in enumerate(text.splitlines(), 1):
        key, *fields = line.split() or [""]
        if not fields:
            faults.append(f"{path}:{number}: expected 'key value...', but got {line!r}")
            continue
        if key in table:
            faults.append(f"{path}:{number}: {key} is there twice")
        elif key.encode() < previous:
            faults.append(f"{path}:{number}: not sorted, {key} comes after {previous.decode()}")
        previous = max(previous, key.encode())
        table[key] = fields
    return table


def check_ids(data_dir: Path, tables: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    """Compare the ids of the four files.

    Args:
        data_dir: The directory, for messages.
        tables: The content of each file.

    Yields:
        Each fault.
    """
    known = set(tables["wav.scp"])
    for name in ("spk1.scp", "utt2spk"):
        for utt_id in sorted(known ^ set(tables[name])):
            missing = name if utt_id in known else "wav.scp"
            yield f"{data_dir / missing}: no line for {utt_id}"
    for utt_id, (speaker, *rest) in tables["utt2spk"].items():
        if rest:
            yield f"{data_dir / 'utt2spk'}: {utt_id} has more than one speaker"
        if not utt_id.startswith(speaker):
            yield f"{data_dir / 'utt2spk'}: {utt_id} does not start with its speaker {speaker}"

    inverse: dict[str, list[str]] = {}
    for utt_id, fields in tables["utt2spk"].items():
        inverse.setdefault(fields[0], []).append(utt_id)
    for speaker in sorted(inverse.keys() | tables["spk2utt"].keys()):
        if inverse.get(speaker) != tables["spk2utt"].get(speaker):
            yield f"{data_dir / 'spk2utt'}: differs from utt2spk for speaker {speaker}"


def check_audio(
    data_dir: Path, tables: dict[str, dict[str, list[str]]], sample_rate: int | None
) -> Iterator[str]:
    """Read all audio.

    Args:
        data_dir: The directory, for messages.
        tables: The content of each file.
        sample_rate: The sampling rate wanted, in Hz; None for any sane one.

    Yields:
        Each fault.
    """
    lengths: dict[str, dict[str, int]] = {"wav.scp": {}, "spk1.scp": {}}
    for name, found in lengths.items():
        for utt_id, fields in tables[name].items():
            path = " ".join(fields)
            try:
                samples, rate = soundfile.read(path, dtype="int16")
            except (RuntimeError, OSError) as error:
                yield f"{data_dir / name}: {utt_id} can't be read: {error}"
                continue
            if len(samples) == 0:
                yield f"{data_dir / name}: {utt_id} has no samples ({path})"
            if samples.ndim != 1:
                yield f"{data_dir / name}: {utt_id} is not mono ({path})"
            if rate not in ([sample_rate] if sample_rate else SAMPLE_RATES):
                yield f"{data_dir / name}: {utt_id} has a sampling rate of {rate} Hz ({path})"
            found[utt_id] = len(samples)
    for utt_id, length in lengths["wav.scp"].items():
        other = lengths["spk1.scp"].get(utt_id, length)
        if other != length:
            yield f"{data_dir}: {utt_id} has {length} samples, but {other} in its reference"


def check_data_dir(data_dir: Path, sample_rate: int | None) -> tuple[list[str], set[str], int]:
    """Check one data directory.

    Args:
        data_dir: The directory.
        sample_rate: The sampling rate wanted, in Hz; None for any sane one.

    Returns:
        The faults, the speakers and the number of utterances.
    """
    faults: list[str] = []
    if not data_dir.is_dir():
        return [f"{data_dir}: no such directory"], set(), 0
    tables = {
        name: read_table(data_dir / name, faults)
        for name in ("wav.scp", "spk1.scp", "utt2spk", "spk2utt")
    }
    faults += check_ids(data_dir, tables)
    faults += check_audio(data_dir, tables, sample_rate)
    return faults, set(tables["spk2utt"]), len(tables["wav.scp"])


def main() -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dirs", type=Path, nargs="+")
    parser.add_argument("--fs", type=int, default=None, help="the sampling rate wanted, in Hz")
    parser.add_argument(
        "--unseen", type=Path, default=None, help="a directory that shares no speaker with others"
    )
    args = parser.parse_args()

    faults: list[str] = []
    speakers: dict[Path, set[str]] = {}
    for data_dir in args.data_dirs:
        found, speakers[data_dir], number = check_data_dir(data_dir, args.fs)
        faults += found
        if not found:
            print(f"{data_dir}: {number} utterances, {len(speakers[data_dir])} speakers, all good")
    for data_dir, known in speakers.items():
        if args.unseen is not None and data_dir != args.unseen:
            shared = known & speakers.get(args.unseen, set())
            if shared:
                faults.append(f"{data_dir}: shares {' '.join(sorted(shared))} with {args.unseen}")
    for fault in faults:
        print(f"Error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
