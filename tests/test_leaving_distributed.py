"""How ranks of an ESPnet2 run leave: the one to blame first, and every other with the reason."""

import logging
import os
import time

import pytest
import torch
import torch.distributed

from espnet_sync.errors import EpochSyncError
from espnet_sync.roll_call import Lookout, leave
from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.factories import NumberFactory
from tests.ranks import Outcome, try_ranks

#: What NCCL says of a fault of the rank's own.
OWN_FAULT = "NCCL error: unhandled cuda error\nFailed to CUDA calloc 608 bytes: out of memory"


class Lines(logging.Handler):
    """Keeps what is logged, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(rank: int, world_size: int, fault: str) -> tuple[str, bool, list[str], float]:
    """Train until rank 1 fails, or 0.

    Returns:
        The type of the last error, whether another rank is to blame, what was logged, and when.
    """
    logged = Lines()
    lookout = Lookout()
    lookout.start()
    fails_at = 5 if fault == "loader" and rank == 1 else None
    host_fails = fault.startswith("host")
    try:
        if fault == "data" and rank == 1:
            raise FileNotFoundError("dump/train/wav.scp")
        factory = SyncedIterFactory(NumberFactory(9, fails_at=fails_at), label="train")
        for index, _ in enumerate(factory.build_iter(1)):
            if fault == "nccl" and rank == 1 and index == 5:
                raise RuntimeError(OWN_FAULT)
            if fault not in ("loader", "nccl") and rank == (0 if host_fails else 1) and index == 5:
                raise MemoryError("no room for the gradients")
            if fault.endswith("gradients"):
                torch.distributed.all_reduce(torch.ones(4))
    except Exception as error:
        is_told = leave(error, lookout)
        ended = (type(error).__name__, is_told, logged.lines, time.time())
        if fault.endswith("gradients") and not is_told:
            os._exit(3)
        return ended
    return "nothing", False, [], time.time()


def run(fault: str) -> list[Outcome]:
    return try_ranks(3, train, fault, store="tcp", group_timeout=30)


REASON = "rank {} left [train] epoch 1, after batch 6: MemoryError: no room for the gradients"


def test_a_rank_that_fails_in_its_step_is_quoted_by_all_that_wait_for_it() -> None:
    failed, *others = (run("step")[rank].value for rank in (1, 0, 2))
    assert failed[:2] == ("MemoryError", False)
    for kind, is_told, lines, ended in others:
        assert (kind, is_told) == ("PeerLostError", True)
        assert len(lines) == 1
        assert REASON.format(1) in lines[0]
        assert ended > failed[3]


def test_a_fault_of_a_ranks_own_in_a_collective_is_its_own() -> None:
    failed, *others = (run("nccl")[rank].value for rank in (1, 0, 2))
    assert failed[:3] == ("RuntimeError", False, [])
    for kind, is_told, (line,), _ in others:
        assert (kind, is_told) == ("PeerLostError", True)
        assert f"after batch 6: RuntimeError: {OWN_FAULT}".replace("\n", " ") in line


def test_a_rank_whose_loader_fails_leaves_first() -> None:
    failed, *others = (run("loader")[rank].value for rank in (1, 0, 2))
    assert failed[1] is False
    for kind, is_told, lines, ended in others:
        assert (kind, is_told) == ("PeerFailedError", True)
        assert len(lines) == 1
        assert "rank 1" in lines[0]
        assert ended > failed[3]


def test_a_rank_that_fails_before_its_first_epoch_is_quoted_by_all_that_come_to_it() -> None:
    failed, *others = (run("data")[rank].value for rank in (1, 0, 2))
    assert failed[:2] == ("FileNotFoundError", False)
    for kind, is_told, lines, ended in others:
        assert (kind, is_told) == ("PeerLostError", True)
        assert len(lines) == 1
        assert "rank 1 left training: FileNotFoundError: dump/train/wav.scp" in lines[0]
        assert ended > failed[3]


@pytest.mark.parametrize(
    ("fault", "failed"), [("gradients", 1), ("host gradients", 0)], ids=["a rank", "the store's"]
)
def test_a_rank_that_fails_is_quoted_where_the_others_wait_for_its_gradients(
    fault: str, failed: int
) -> None:
    outcomes = run(fault)
    assert outcomes[failed].exit_code == 3
    for rank in {0, 1, 2} - {failed}:
        kind, is_told, lines, _ = outcomes[rank].value
        assert (kind, is_told) == ("RuntimeError", True)
        assert len(lines) == 1
        assert REASON.format(failed) in lines[0]


def test_alone_an_error_of_ours_is_a_line_and_any_other_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert leave(EpochSyncError("out of step"), Lookout())
    assert caplog.messages == ["out of step"]
    assert not leave(ValueError("no such wav"), Lookout())
    assert caplog.messages == ["out of step"]
