"""The harness itself: its deadline, its tracebacks, its stores."""

import os
import threading

import pytest
import torch
import torch.distributed

from tests.ranks import RanksFailedError, run_ranks, try_ranks


def add_up(rank: int, world_size: int, start: int) -> float:
    total = torch.tensor([float(start + rank)])
    torch.distributed.all_reduce(total)
    return total.item()


def wait_for_ever(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


def die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    raise ValueError("as told")


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_values_come_back_in_rank_order(store: str) -> None:
    assert run_ranks(3, add_up, 10, store=store) == [33.0, 33.0, 33.0]


def test_a_rank_that_hangs_fails_with_its_stacks() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)ranks \[1\] were not done.*wait_for_ever"):
        run_ranks(2, wait_for_ever, deadline=3)


def test_a_rank_that_raises_or_dies_fails_with_its_traceback() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0.*ValueError: as told.*code 7"):
        run_ranks(2, die)
    outcomes = try_ranks(2, die)
    assert isinstance(outcomes[0].error, ValueError)
    assert [outcome.exit_code for outcome in outcomes] == [1, 7]
