"""Situations from public bug reports that one process is enough for: cases 2 and 3."""

import logging
from typing import Any

import pytest

from espnet_sync import SyncedIterFactory
from tests.factories import chunk, frozen, sequence


def epoch_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [message for message in messages if "epoch_offset=1" in message]


def four_batches_two_an_epoch(shuffle: bool) -> Any:
    return sequence([5, 6, 7, 8], batch_size=1, num_iters_per_epoch=2, shuffle=shuffle)


@pytest.mark.parametrize("make", [chunk, sequence])
def test_case_2_a_pass_that_was_dropped_is_followed_by_a_whole_one(make: Any) -> None:
    whole = frozen(make([24, 31, 18, 22]).build_iter(1))
    iterator = SyncedIterFactory(make([24, 31, 18, 22])).build_iter(1)
    assert frozen([next(iter(iterator))]) == whole[:1]
    assert frozen(iterator) == whole
    assert frozen(iterator) == whole


@pytest.mark.parametrize("shuffle", [False, True])
def test_case_3_epoch_offset_puts_epochs_that_count_from_0_right(
    shuffle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = four_batches_two_an_epoch(shuffle)
    factory = SyncedIterFactory(four_batches_two_an_epoch(shuffle), epoch_offset=1)
    for epoch in range(4):
        assert frozen(factory.build_iter(epoch)) == frozen(plain.build_iter(epoch + 1))
    assert epoch_warnings(caplog) == []


def test_case_3_epoch_0_without_an_offset_is_a_wrong_slice_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = four_batches_two_an_epoch(shuffle=False)
    factory = SyncedIterFactory(four_batches_two_an_epoch(shuffle=False), label="train")
    wrong = frozen(factory.build_iter(0))
    assert wrong == frozen(plain.build_iter(0))
    assert wrong != frozen(plain.build_iter(1))
    assert len(epoch_warnings(caplog)) == 1
    assert "[train]" in epoch_warnings(caplog)[0]


def test_case_3_epoch_0_without_an_offset_is_warned_of_before_its_seed_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    factory = SyncedIterFactory(four_batches_two_an_epoch(shuffle=True), label="train")
    with pytest.raises(ValueError, match="Seed"):
        frozen(factory.build_iter(0))
    assert len(epoch_warnings(caplog)) == 1
