"""How ranks of an ESPnet2 run leave: the one to blame first, and every other with the reason."""

import os
import time

import pytest
import torch
import torch.distributed

from espnet_sync.errors import EpochSyncError
from espnet_sync.roll_call import leave
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.factories import NumberFactory
from tests.ranks import Outcome, try_ranks


def train(rank: int, world_size: int, fault: str) -> tuple[str, str, float]:
    """Train until rank 1 fails; return its last error, the line in its place, and when."""
    fails_at = 5 if fault == "loader" and rank == 1 else None
    factory = SyncedIterFactory(NumberFactory(9, fails_at=fails_at), label="train")
    try:
        for index, _ in enumerate(factory.build_iter(1)):
            if fault != "loader" and rank == 1 and index == 5:
                raise MemoryError("no room for the gradients")
            if fault == "gradients":
                torch.distributed.all_reduce(torch.ones(4))
    except Exception as error:
        line = leave(error)
        ended = (type(error).__name__, line, time.time())
        if fault == "gradients" and rank == 1:
            os._exit(3)
        return ended
    return "nothing", "", time.time()


def run(fault: str) -> list[Outcome]:
    return try_ranks(3, train, fault, store="tcp", group_timeout=30)


def test_a_rank_that_fails_in_its_step_is_quoted_by_all_that_wait_for_it() -> None:
    failed, *others = (run("step")[rank].value for rank in (1, 0, 2))
    assert failed[:2] == ("MemoryError", "")
    for kind, line, _ in others:
        assert kind == "PeerLostError"
        assert "lost rank 1 after waiting" in line
        assert "rank 1 left [train] epoch 1, after batch 6: MemoryError: no room for the" in line


def test_a_rank_whose_loader_fails_leaves_first() -> None:
    failed, *others = (run("loader")[rank].value for rank in (1, 0, 2))
    assert failed[1] == ""
    for kind, line, ended in others:
        assert kind == "PeerFailedError"
        assert "rank 1: at batch 5: " in line
        assert ended > failed[2]


def test_a_rank_that_fails_is_quoted_where_a_gradient_noticed_first() -> None:
    outcomes = run("gradients")
    assert outcomes[1].exit_code == 3
    for rank in (0, 2):
        kind, line, _ = outcomes[rank].value
        assert kind == "RuntimeError"
        assert "lost rank 1" in line
        assert "rank 1 left [train] epoch 1, after batch 6: MemoryError: no room for the" in line


def test_without_a_control_group_an_error_of_ours_is_its_own_line() -> None:
    assert leave(EpochSyncError("out of step")) == "out of step"
    assert leave(ValueError("no such wav")) == ""
    with pytest.raises(TypeError):
        raise TypeError(leave(KeyError("x")))
