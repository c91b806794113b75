"""Build the iterator factories that an ESPnet2 training command would use, one rank's share.

ESPnet2 deals the data to the ranks of `torch.distributed`, so that the process group has to be
there first. Nothing here synchronises anything.
"""

import argparse
import logging
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.tasks.enh import EnhancementTask
from espnet2.train.distributed_utils import DistributedOption, resolve_distributed_mode
from espnet2.utils.build_dataclass import build_dataclass
from espnet2.utils.nested_dict_action import NestedDictAction

SYNC_KEYS = ("epoch_sync", "valid_epoch_sync", "chunk_balance")
SYNC_CONFS = ("epoch_sync_conf", "valid_epoch_sync_conf")


def parse_training_args(command: Sequence[str]) -> argparse.Namespace:
    """Parse what would be given to `espnet2.bin.enh_train`.

    Args:
        command: The arguments. Keys of espnet_sync, also in the YAML, are taken and have no
            effect: what is built here is ESPnet2's own.

    Returns:
        The arguments as ESPnet2's task knows them.
    """
    parser = EnhancementTask.get_parser()
    for key in SYNC_KEYS:
        parser.add_argument(f"--{key}")
    for key in SYNC_CONFS:
        parser.add_argument(f"--{key}", action=NestedDictAction, default={})
    args = parser.parse_args(list(command))
    resolve_distributed_mode(args)
    return args


def parse_balanced_args(
    command: Sequence[str],
) -> tuple[argparse.Namespace, type[EnhancementTask]]:
    """Parse the same for espnet_sync's deal, and for nothing else of it.

    Args:
        command: The arguments.

    Returns:
        The arguments, and the task that takes them.

    Raises:
        ImportError: If espnet_sync is not installed.
    """
    from espnet_sync import synced

    task = synced(EnhancementTask)
    deal_alone = ["--chunk_balance", "true", "--epoch_sync", "none", "--valid_epoch_sync", "none"]
    args = task.get_parser().parse_args([*command, *deal_alone])
    resolve_distributed_mode(args)
    return args, task


def join_ranks(timeout: float) -> None:
    """Join the Gloo group of the ranks that torchrun started.

    Collective: every rank calls this.

    Args:
        timeout: Seconds after which the group gives up on any of its collectives.
    """
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))


def build_iter_factory(
    args: argparse.Namespace, mode: str, task: type[EnhancementTask] = EnhancementTask
) -> AbsIterFactory:
    """Build the factory of this rank, as ESPnet2's training does.

    Args:
        args: The training arguments.
        mode: `train` or `valid`.
        task: ESPnet2's own, or one that deals the data otherwise.

    Returns:
        ESPnet2's own factory.

    Raises:
        SystemExit: If ESPnet2 refuses this number of ranks.
    """
    option = build_dataclass(DistributedOption, args)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        return task.build_iter_factory(args, option, mode)
    except RuntimeError as error:
        raise SystemExit(
            f"Error: ESPnet2 can't deal the {mode} data to "
            f"{torch.distributed.get_world_size()} ranks: {error}"
        ) from error
    finally:
        logging.getLogger().setLevel(level)
