"""`stop_signal`: a signal to any one rank ends training after the epoch, and a rerun resumes."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espnet_sync.epoch_sync_iterator import EpochSyncIterator
from espnet_sync.synced_iter_factory import SyncedIterFactory
from espnet_sync.task import _hand_on, _StopSignal
from tests.factories import NumberFactory
from tests.ranks import try_ranks
from tests.speech import ENHANCEMENT, ENHANCEMENT_SOURCES, data_words, train, write_speech

#: A user's own training module, whose model signals its own rank at a given step.
SIGNALLED_TRAINING = """
import os
import signal

from espnet2.tasks.enh import EnhancementTask

RANK, MODE, STEP = os.environ["SIGNALLED"].split()


class SignalledTask(EnhancementTask):
    @classmethod
    def build_model(cls, args):
        model = super().build_model(args)
        steps = {"train": 0, "valid": 0}

        def count(module, words):
            mode = "train" if module.training else "valid"
            steps[mode] += 1
            if (os.environ.get("RANK", "0"), mode, steps[mode]) == (RANK, MODE, int(STEP)):
                os.kill(os.getpid(), signal.SIGUSR1)

        model.register_forward_pre_hook(count)
        return model


def main(cmd=None):
    SignalledTask.main(cmd=cmd)


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech(tmp_path_factory.mktemp("speech"))


@pytest.mark.training
@pytest.mark.parametrize(
    ("ranks", "signalled", "first"),
    [
        (2, "1 train 2", r"\[train\] epoch 1: 2 batches on each .*; stopped on request"),
        (1, "0 valid 1", r"\[train\] epoch 1: \d+ batches"),
    ],
    ids=["in mid-epoch, of one of two ranks", "in validation, of one rank alone"],
)
def test_a_run_ends_after_its_epoch_and_a_rerun_resumes(
    ranks: int,
    signalled: str,
    first: str,
    speech: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "signalled_train.py").write_text(SIGNALLED_TRAINING)
    words = data_words(speech, ENHANCEMENT_SOURCES, ["speech_shape"])
    words += ["--epoch_sync_conf", "stop_signal=USR1", "--epoch_sync_conf", "lookahead=0"]
    words += ["--resume", "true"]
    monkeypatch.setenv("SIGNALLED", signalled)
    ended = train("signalled_train", tmp_path, ENHANCEMENT, *words, ranks=ranks)
    assert ended.lines(first)
    assert len(ended.lines(r"kill -USR1 \d+ ends it after the epoch")) == 1
    assert ended.lines("SIGUSR1 came to a rank, so training ends here with exit code 0")
    assert (tmp_path / "exp" / "checkpoint.pth").exists()
    assert (tmp_path / "exp" / "1epoch.pth").exists()
    assert not (tmp_path / "exp" / "2epoch.pth").exists()
    assert (tmp_path / "exp" / "images" / "epoch_sync.png").exists()

    monkeypatch.setenv("SIGNALLED", "-1 none 0")
    rerun = train("signalled_train", tmp_path, ENHANCEMENT, *words, ranks=ranks)
    assert not rerun.lines(r"\[train\] epoch 1:")
    assert rerun.lines(r"\[train\] epoch 2: \d+ batches")
    assert (tmp_path / "exp" / "2epoch.pth").exists()


def stop_on_rank_1(rank: int, world_size: int, backend: str) -> list[Any]:
    """Signal rank 1 in its first epoch, and leave before the second."""
    request = _StopSignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, request)
    factory = SyncedIterFactory(NumberFactory(9), backend=backend, lookahead=0)
    factory.stop_request = request
    seen: list[Any] = []
    for index, _ in enumerate(factory.build_iter(1)):
        seen.append(index)
        if rank == 1 and index == 3:
            signal.raise_signal(signal.SIGUSR1)
    valid = SyncedIterFactory(NumberFactory(2), backend=backend, label="valid")
    seen.append(len(list(valid.build_iter(1))))
    try:
        factory.build_iter(2)
    except SystemExit as leaving:
        return [*seen, f"left with {leaving.code}"]
    return [*seen, "went on"]


@pytest.mark.parametrize("backend", ["auto", "default"])
def test_all_ranks_leave_before_the_next_training_epoch(backend: str) -> None:
    for outcome in try_ranks(3, stop_on_rank_1, backend):
        assert outcome.value == [0, 1, 2, 3, 2, "left with 0"], outcome.trace


def wait_for_a_signal(sender: Connection) -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: sender.send("handed on"))
    sender.send("ready")
    signal.pause()


def test_the_parent_of_spawned_ranks_hands_the_signal_on() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=wait_for_a_signal, args=(sender,))
    child.start()
    assert receiver.poll(30)
    assert receiver.recv() == "ready"
    until = time.monotonic() + 30
    # The child may be between its message and its pause: a signal is handled there as well.
    _hand_on(signal.SIGUSR1, None)
    assert receiver.poll(until - time.monotonic())
    assert receiver.recv() == "handed on"
    child.kill()
    child.join()


def test_a_signal_before_the_first_epoch_is_kept() -> None:
    request = _StopSignal(signal.SIGUSR1)
    assert not request.is_set()
    request(signal.SIGUSR1, None)
    assert request.is_set()
    iterator = EpochSyncIterator([1, 2, 3])
    request.note(iterator)
    assert list(iterator) == []
    assert str(os.getpid()) in str(request)
    with pytest.raises(SystemExit) as leaving:
        SyncedIterFactory.build_iter(_factory_that_stops(request), 1)
    assert leaving.value.code == 0


def _factory_that_stops(request: _StopSignal) -> SyncedIterFactory:
    factory = SyncedIterFactory(NumberFactory(3))
    factory.stop_request = request
    return factory


def test_another_module_may_ask_as_well() -> None:
    left: list[str] = []
    asked = SimpleNamespace(
        is_set=lambda: True, note=lambda iterator: None, leave=lambda: left.append("left")
    )
    factory = SyncedIterFactory(NumberFactory(3))
    factory.stop_request = asked  # type: ignore[assignment]
    factory.build_iter(1)
    assert left == ["left"]
