"""The exceptions: one family, exported at the top, whole after pickling."""

import copy
import pickle

import pytest

import espnet_sync
from espnet_sync import errors
from espnet_sync.errors import (
    EmptyRankError,
    EpochSyncError,
    OutOfStepError,
    PeerFailedError,
    PeerLostError,
    require_version,
)

ERRORS = [
    PeerFailedError("rank 1 failed", ranks=(1, 3), reasons={1: "ValueError: torn", 3: "?"}),
    OutOfStepError("ranks differ", positions={0: "train, batch 3", 1: "valid, batch 0"}),
    PeerLostError("rank 2 is missing", ranks=(2,), waited=31.5),
    EmptyRankError("rank 0 has no batch", ranks=(0,)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_is_an_epoch_sync_error_and_a_runtime_error(error: EpochSyncError) -> None:
    assert isinstance(error, EpochSyncError)
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, (StopIteration, TimeoutError))


@pytest.mark.parametrize("name", ["EpochSyncError", *(type(error).__name__ for error in ERRORS)])
def test_every_error_is_exported_at_the_top(name: str) -> None:
    assert getattr(espnet_sync, name) is getattr(errors, name)
    assert name in espnet_sync.__all__


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_keep_message_and_attributes_when_pickled_and_copied(
    error: EpochSyncError,
) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)


def test_attributes_have_the_documented_names() -> None:
    failed, out_of_step, lost, empty = ERRORS
    assert (failed.ranks, failed.reasons) == ((1, 3), {1: "ValueError: torn", 3: "?"})
    assert out_of_step.positions == {0: "train, batch 3", 1: "valid, batch 0"}
    assert (lost.ranks, lost.waited) == ((2,), 31.5)
    assert empty.ranks == (0,)


def test_the_bare_flag_names_no_ranks() -> None:
    error = PeerFailedError("another rank failed")
    assert (error.ranks, error.reasons) == ((), {})


def test_an_error_keeps_its_own_copy_of_the_reasons() -> None:
    reasons = {0: "torn"}
    error = PeerFailedError("rank 0 failed", ranks=(0,), reasons=reasons)
    reasons[0] = "changed"
    assert error.reasons == {0: "torn"}


@pytest.mark.parametrize("found", ["2.4", "2.4.0", "2.14.1+cu130", "3.0", "main", "2.10"])
def test_a_version_that_is_new_enough_passes(found: str) -> None:
    require_version("torch", found, "2.4")


@pytest.mark.parametrize("found", ["2.3.1", "1.13.1+cpu", "2"])
def test_a_version_that_is_too_old_is_refused_with_the_floor(found: str) -> None:
    with pytest.raises(ImportError, match=r"needs torch >= 2\.4 and found .*pip install"):
        require_version("torch", found, "2.4")
