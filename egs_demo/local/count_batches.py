"""Count the batches that each rank's own factory yields. Started by torchrun.

This is what would happen without synchronisation: ESPnet2's plain factories are iterated, and
no rank hears of the others until all have finished counting.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from tabulate import tabulate
from training_factories import build_iter_factory, join_ranks, parse_training_args

TIMEOUT = 1800.0


def count(factory: AbsIterFactory, epoch: int) -> int:
    """Count the batches of an epoch.

    Args:
        factory: A plain factory.
        epoch: Counts from 1.

    Returns:
        The number of batches.
    """
    return sum(1 for _ in factory.build_iter(epoch))


def gather(counts: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather every rank's counts.

    Collective: every rank calls this.

    Args:
        counts: This rank's.

    Returns:
        The counts of all ranks, in the order of the ranks.
    """
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, counts)
    return gathered


def show(ranks: list[dict[str, Any]]) -> str:
    """Draw the table.

    Args:
        ranks: The counts of all ranks.

    Returns:
        The table and a summary.
    """
    epochs = range(1, len(ranks[0]["train"]) + 1)
    headers = ["rank", *(f"train epoch {epoch}" for epoch in epochs), "valid"]
    rows = [[rank, *counts["train"], counts["valid"]] for rank, counts in enumerate(ranks)]
    shortest = [min(column) for column in list(zip(*rows, strict=True))[1:]]
    table = tabulate([*rows, ["shortest", *shortest]], headers, tablefmt="github")

    total = sum(sum(counts["train"]) for counts in ranks)
    kept = sum(shortest[:-1]) * len(ranks)
    if total == kept:
        return f"{table}\nAll ranks have the same number of training batches in every epoch."
    return (
        f"{table}\nThe ranks run out at different batches: a loop that ends at the shortest rank "
        f"leaves {total - kept} of {total} training batches ({(total - kept) / total:.1%})."
    )


def main() -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, required=True, help="count epochs 1 to this")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("training_args", nargs="+", help="after --: arguments of enh_train")
    args = parser.parse_args()

    training_args = parse_training_args(args.training_args)
    join_ranks(TIMEOUT)
    train = build_iter_factory(training_args, "train")
    valid = build_iter_factory(training_args, "valid")
    counts = {
        "train": [count(train, epoch) for epoch in range(1, args.epochs + 1)],
        "valid": count(valid, 1),
    }
    ranks = gather(counts)
    if torch.distributed.get_rank() == 0:
        args.table.write_text(show(ranks) + "\n", encoding="utf-8")
        args.json.write_text(json.dumps(ranks, indent=2) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
