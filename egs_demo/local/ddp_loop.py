"""Train with a plain DistributedDataParallel loop over ESPnet2's factories. Started by torchrun.

Each epoch trains on this rank's batches, then validates and averages the loss over the ranks.
With `--sync false` the factories are ESPnet2's own: a rank that runs out first goes on to the
validation's average while the others wait for it in a gradient all-reduce. With `--sync true`
the only difference is that the factories are wrapped in SyncedIterFactory.

Every rank writes how it ended to a file of its own. A deadlock that the group's timeout reports is
such an end, with exit status 0; anything else that goes wrong is an error.
"""

import argparse
import json
import logging
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.tasks.enh import EnhancementTask
from espnet2.torch_utils.set_all_random_seed import set_all_random_seed
from espnet2.utils.types import str2bool
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from training_factories import build_iter_factory, join_ranks, parse_training_args

START_TIMEOUT = 300.0

# NOTE: Gloo reports a timeout as such to the rank that gives up first. When that rank leaves, its
# connections close, which is all that a rank still waiting for it hears.
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
LEFT_ALONE = re.compile(
    r"connection (was )?(closed|reset)|closed by peer|broken pipe|closure", re.IGNORECASE
)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How the loop of one rank went.

    Attributes:
        rank: The rank.
        train: Training batches done, for each epoch begun.
        valid: Validation batches done, for each validation begun.
        place: What the rank is doing.
        ended: `finished`, or how it was stopped: `timeout` or `peer left`.
        error: The first line of the message that told.
        seconds: How long the loop took.
    """

    rank: int
    train: list[int] = field(default_factory=list)
    valid: list[int] = field(default_factory=list)
    place: str = "start"
    ended: str = ""
    error: str = ""
    seconds: float = 0.0


def average(value: torch.Tensor, group: ProcessGroup) -> float:
    """Average a number over the ranks.

    Collective: every rank calls this.

    Args:
        value: A tensor of one element, float32.
        group: The group of the metrics.

    Returns:
        The average.
    """
    torch.distributed.all_reduce(value, group=group)
    return float(value) / torch.distributed.get_world_size(group)


def train_one_epoch(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    factory: AbsIterFactory,
    epoch: int,
    outcome: Outcome,
) -> None:
    """Train on all batches that the factory yields.

    Args:
        model: The model, which all-reduces its gradients in each backward.
        optimizer: Its optimizer.
        factory: A plain or a synced factory.
        epoch: Counts from 1.
        outcome: Kept up to date.
    """
    model.train()
    outcome.train.append(0)
    for _, batch in factory.build_iter(epoch):
        outcome.place = f"gradient all-reduce of train batch {outcome.train[-1] + 1}"
        loss, _, _ = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outcome.train[-1] += 1
        outcome.place = "train iterator"


def validate(
    model: DistributedDataParallel,
    factory: AbsIterFactory,
    epoch: int,
    group: ProcessGroup,
    outcome: Outcome,
) -> None:
    """Validate on all batches that the factory yields and average the loss over the ranks.

    Args:
        model: The model.
        factory: A plain or a synced factory.
        epoch: Counts from 1.
        group: The group of the metrics.
        outcome: Kept up to date.
    """
    model.eval()
    outcome.valid.append(0)
    outcome.place = "validation"
    total = torch.zeros(1)
    with torch.no_grad():
        for _, batch in factory.build_iter(epoch):
            loss, _, _ = model.module(**batch)
            total += loss.detach()
            outcome.valid[-1] += 1
    outcome.place = "average of the validation loss"
    loss = average(total / max(outcome.valid[-1], 1), group)
    if outcome.rank == 0:
        print(f"epoch {epoch}: valid loss {loss:.3f}", flush=True)


def run(args: argparse.Namespace, outcome: Outcome) -> None:
    """Run all epochs.

    Args:
        args: The arguments of this command.
        outcome: Kept up to date.
    """
    training_args = parse_training_args(args.training_args)
    train_factory = build_iter_factory(training_args, "train")
    valid_factory = build_iter_factory(training_args, "valid")
    if args.sync:
        from espnet_sync import SyncedIterFactory

        train_factory = SyncedIterFactory(train_factory, label="train", stop_at=args.stop_at)
        valid_factory = SyncedIterFactory(valid_factory, label="valid", stop_at=args.stop_at)

    set_all_random_seed(training_args.seed)
    network = EnhancementTask.build_model(training_args)
    # A rank that is slow to start up is not what this is about.
    torch.distributed.monitored_barrier(timeout=timedelta(seconds=START_TIMEOUT))
    model = DistributedDataParallel(network)
    optimizer = EnhancementTask.build_optimizers(training_args, model=model.module)[0]
    # NOTE: metrics have a group of their own. On one group the average would be paired with the
    # gradients of a rank that is still training, which Gloo answers with SIGABRT or garbage.
    group = torch.distributed.new_group(backend="gloo")
    for epoch in range(1, args.epochs + 1):
        train_one_epoch(model, optimizer, train_factory, epoch, outcome)
        validate(model, valid_factory, epoch, group, outcome)


def main() -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sync", type=str2bool, required=True)
    parser.add_argument("--stop_at", default="shortest", choices=["shortest", "longest"])
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="of the group, in seconds")
    parser.add_argument("--output_dir", type=Path, required=True, help="gets rank.N.json")
    parser.add_argument("training_args", nargs="+", help="after --: arguments of enh_train")
    args = parser.parse_args()

    join_ranks(args.timeout)
    if torch.distributed.get_rank() == 0:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    outcome = Outcome(rank=torch.distributed.get_rank())
    start = time.monotonic()
    try:
        run(args, outcome)
        outcome.ended = "finished"
    except RuntimeError as error:
        message = str(error)
        if TIMED_OUT.search(message):
            outcome.ended = "timeout"
        elif LEFT_ALONE.search(message):
            outcome.ended = "peer left"
        else:
            raise
        outcome.error = message.strip().splitlines()[0]
        print(f"rank {outcome.rank}: {outcome.ended} in {outcome.place}: {message}", flush=True)
    outcome.seconds = time.monotonic() - start
    path = args.output_dir / f"rank.{outcome.rank}.json"
    path.write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")
    sys.stdout.flush()
    if outcome.ended != "finished":
        # NOTE: the group is broken. Taking it apart in an orderly way would wait for it once more.
        os._exit(0)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
