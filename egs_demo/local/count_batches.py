"""Count the batches that each rank's own factory yields. Started by torchrun.

This is what would happen without synchronisation: plain factories are iterated, and no rank hears
of the others until all have finished counting. Chunk iterators are counted twice: as ESPnet2 deals
the utterances to the ranks, in file order, and as espnet_sync does with `chunk_balance: true`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.tasks.enh import EnhancementTask
from tabulate import tabulate
from training_factories import (
    build_iter_factory,
    join_ranks,
    parse_balanced_args,
    parse_training_args,
)

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


def count_deal(
    args: argparse.Namespace, epochs: int, task: type[EnhancementTask] = EnhancementTask
) -> list[dict[str, Any]]:
    """Count what each rank has of one deal.

    Collective: every rank calls this.

    Args:
        args: The training arguments.
        epochs: Counts epochs 1 to this.
        task: Deals the data.

    Returns:
        The counts of all ranks, in the order of the ranks.
    """
    train = build_iter_factory(args, "train", task)
    valid = build_iter_factory(args, "valid", task)
    return gather(
        {
            "train": [count(train, epoch) for epoch in range(1, epochs + 1)],
            "valid": count(valid, 1),
        }
    )


def show(deal: str, ranks: list[dict[str, Any]]) -> str:
    """Draw a deal's table.

    Args:
        deal: How the data was dealt.
        ranks: The counts of all ranks.

    Returns:
        The table and a summary.
    """
    epochs = range(1, len(ranks[0]["train"]) + 1)
    headers = [f"rank, {deal}", *(f"train epoch {epoch}" for epoch in epochs), "valid"]
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
    counts = count_deal(training_args, args.epochs)
    tables = [show("in file order", counts)]
    if training_args.iterator_type == "chunk":
        try:
            balanced = parse_balanced_args(args.training_args)
        except ImportError:
            tables.append("pip install espnet_sync to see the deal of chunk_balance.")
        else:
            balanced_args, task = balanced
            tables.append(
                show("chunk_balance: true", count_deal(balanced_args, args.epochs, task))
            )
    if torch.distributed.get_rank() == 0:
        args.table.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        args.json.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
