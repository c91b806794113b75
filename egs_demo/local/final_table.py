"""Judge how the two loops of stage 5 ended and draw the closing table.

Without synchronisation, ranks that are uneven must end in a deadlock and even ranks must finish.
With it, all ranks must finish after the same number of batches. Anything else is an error.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate


class UnexpectedEndError(Exception):
    """A loop did not end as it has to; the message says how."""


def read_outcomes(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Read how each rank ended.

    Args:
        folder: Holds rank.N.json.
        ranks: How many there must be.

    Returns:
        The outcomes, in the order of the ranks.

    Raises:
        UnexpectedEndError: If a rank wrote nothing.
    """
    outcomes = []
    for rank in range(ranks):
        path = folder / f"rank.{rank}.json"
        if not path.is_file():
            raise UnexpectedEndError(f"rank {rank} left no {path}")
        outcomes.append(json.loads(path.read_text(encoding="utf-8")))
    return outcomes


def join(counts: Sequence[int]) -> str:
    """Write the batches of several epochs.

    Args:
        counts: The batches of each epoch.

    Returns:
        For example `20 + 20`.
    """
    return " + ".join(map(str, counts))


def judge_unsynced(
    outcomes: Sequence[dict[str, Any]], plain: Sequence[Sequence[int]], timeout: float
) -> None:
    """Check the end of the loop without synchronisation.

    Args:
        outcomes: How each rank ended.
        plain: The batches of each rank, for each epoch of the loop.
        timeout: The group's timeout, in seconds.

    Raises:
        UnexpectedEndError: If it is not what must happen.
    """
    ends = [outcome["ended"] for outcome in outcomes]
    epochs = list(zip(*plain, strict=True))
    uneven = [epoch for epoch, counts in enumerate(epochs) if len(set(counts)) > 1]
    if not uneven:
        if set(ends) != {"finished"}:
            raise UnexpectedEndError(f"even ranks must finish without sync, but: {ends}")
        return
    if "finished" in ends or "timeout" not in ends:
        raise UnexpectedEndError(f"uneven ranks must deadlock without sync, but: {ends}")
    done = [*(counts[0] for counts in epochs[: uneven[0]]), min(epochs[uneven[0]])]
    if any(outcome["train"] != done for outcome in outcomes):
        raise UnexpectedEndError(
            f"all ranks must stop after {join(done)} batches without sync, but: "
            f"{[outcome['train'] for outcome in outcomes]}"
        )
    if max(outcome["seconds"] for outcome in outcomes) < timeout:
        raise UnexpectedEndError(f"no rank waited for the group's timeout of {timeout:.0f} s")


def judge_synced(outcomes: Sequence[dict[str, Any]]) -> None:
    """Check the end of the loop with synchronisation.

    Args:
        outcomes: How each rank ended.

    Raises:
        UnexpectedEndError: If it is not what must happen.
    """
    ends = [outcome["ended"] for outcome in outcomes]
    if set(ends) != {"finished"}:
        raise UnexpectedEndError(f"all ranks must finish with sync, but: {ends}")
    for mode in ("train", "valid"):
        counts = [outcome[mode] for outcome in outcomes]
        if any(count != counts[0] for count in counts):
            raise UnexpectedEndError(f"the ranks' {mode} batches differ with sync: {counts}")


def describe(outcome: dict[str, Any]) -> str:
    """Say how a rank ended, for the table.

    Args:
        outcome: How it ended.

    Returns:
        A few words.
    """
    if outcome["ended"] == "finished":
        return "finished"
    return f"deadlock in the {outcome['place']}"


def main() -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=Path, required=True, help="what stage 2 wrote")
    parser.add_argument("--unsynced", type=Path, required=True, help="outcomes of the ranks")
    parser.add_argument("--synced", type=Path, default=None, help="outcomes of the ranks")
    parser.add_argument("--epochs", type=int, required=True, help="of the loops")
    parser.add_argument("--timeout", type=float, required=True, help="of the group, in seconds")
    args = parser.parse_args()

    counts = json.loads(args.counts.read_text(encoding="utf-8"))
    plain = [count["train"][: args.epochs] for count in counts]
    try:
        unsynced = read_outcomes(args.unsynced, len(counts))
        judge_unsynced(unsynced, plain, args.timeout)
        if args.synced is None:
            for outcome in unsynced:
                # Without the place in torch's own source, and without its advice.
                message = re.sub(r"^\[[^\]]*\] |\. .*$", "", outcome["error"])
                print(
                    f"rank {outcome['rank']}: {describe(outcome)}"
                    + f" ({message})" * bool(message)
                )
            return 0
        synced = read_outcomes(args.synced, len(counts))
        judge_synced(synced)
    except UnexpectedEndError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1

    headers = [
        "rank",
        "batches without sync",
        "batches with sync",
        "stage 5 without sync",
        "stage 5 with sync",
    ]
    rows = [
        [
            rank,
            join(plain[rank]),
            join(synced[rank]["train"]),
            describe(unsynced[rank]),
            "finished",
        ]
        for rank in range(len(counts))
    ]
    print(tabulate(rows, headers, tablefmt="github"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
