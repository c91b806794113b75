"""Carries what the ranks exchange: the one file that talks to `torch.distributed`.

Who decides what to exchange, and what follows from it, is `consensus.py`.
"""

from collections.abc import Sequence

import torch
import torch.distributed

from espnet_sync.errors import require_version

require_version("torch", torch.__version__, "2.4")

#: Backends that reduce CPU tensors. "undefined" is what `get_backend()` calls a group that was
#: made without naming one: it has Gloo for the CPU.
_CPU_BACKENDS = ("gloo", "mpi", "ucc", "ccl", "fake", "undefined")


def is_distributed() -> bool:
    """Return whether this process is a rank of an initialised `torch.distributed` job."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def flag_device(backend: str) -> torch.device:
    """Return where a flag must live so that the default group can reduce it.

    Args:
        backend: What `torch.distributed.get_backend()` returns, e.g. `gloo`, `nccl` or
            `cpu:gloo,cuda:nccl`.

    Returns:
        torch.device: The CPU where the group reduces CPU tensors, CUDA for NCCL alone, else the
        current accelerator.

    Examples:
        >>> flag_device("gloo"), flag_device("cpu:gloo,cuda:nccl")
        (device(type='cpu'), device(type='cpu'))
    """
    by_device = dict(part.split(":", 1) for part in backend.lower().split(",") if ":" in part)
    if "cpu" in by_device or backend.lower() in _CPU_BACKENDS:
        return torch.device("cpu")
    if "cuda" in by_device or backend.lower() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    # NOTE: torch.accelerator came with torch 2.6.
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return torch.device("cpu")
    kind = accelerator.current_accelerator().type
    return torch.device(kind, accelerator.current_device_index())


class DefaultGroup:
    """The group that training itself uses, for one pass. Built when the pass starts.

    Raises:
        RuntimeError: If `torch.distributed` is not initialised.
    """

    def __init__(self) -> None:
        self.device = flag_device(torch.distributed.get_backend())

    def min_flag(self, flag: int) -> int:
        """Collective: every rank calls this before each batch.

        Args:
            flag: This rank's flag: 1, 0 or -1. Travels as a float32 tensor of shape (1,).

        Returns:
            int: The smallest flag of all ranks.

        Raises:
            RuntimeError: If torch lost a peer or ran into the group's timeout.
        """
        make = torch.zeros if flag == 0 else torch.ones
        tensor = make(1, device=self.device)
        if flag < 0:
            tensor.neg_()
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return int(tensor.item())


class NamedDefaultGroup(DefaultGroup):
    """The default group for a `SyncedIterFactory`: knows ranks and can name them."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

    def min_number(self, number: int) -> int:
        """Collective: every rank calls this in `build_iter`.

        Args:
            number: Any int. Travels as an int64 tensor of shape (1,).

        Returns:
            int: The smallest number of all ranks.

        Raises:
            RuntimeError: If torch lost a peer or ran into the group's timeout.
        """
        tensor = torch.tensor([number], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return int(tensor.item())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Collective: every rank calls this, right after a reduction that says so.

        Args:
            numbers: This rank's numbers, equally many on all ranks. Travel as int64.

        Returns:
            list[list[int]]: The numbers of each rank, in rank order.

        Raises:
            RuntimeError: If torch lost a peer or ran into the group's timeout.
        """
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
        torch.distributed.all_gather(everyones, mine)
        return [tensor.tolist() for tensor in everyones]
