"""The factory in one process: it hands on what the inner factory gives."""

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from torch.utils.data import DataLoader

import espnet_sync
from espnet_sync import EpochSyncIterator, SyncedIterFactory
from tests.factories import (
    KINDS,
    ListFactory,
    NumberFactory,
    chunk,
    frozen,
    make_factory,
    sequence,
)

LENGTHS = [31, 12, 55, 24, 8, 47, 60, 19, 40]


class Recording(AbsIterFactory):
    """Notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def build_iter(self, *arguments: Any, **keywords: Any) -> list[int]:
        self.calls.append((arguments, keywords))
        return [1, 2, 3]


class WithoutShuffle(AbsIterFactory):
    """A user's own factory, which knows no `shuffle`."""

    def build_iter(self, epoch: int) -> Iterator[int]:
        yield from range(epoch)


class EvenAlone(EpochSyncIterator):
    def generate(self) -> Iterator[Any]:
        return (batch for batch in super().generate() if batch % 2 == 0)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- Real factories ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [None, False, True])
def test_epochs_give_the_same_batches_as_the_inner_factory_twice_over(
    kind: str, shuffle: bool | None, tmp_path: Path
) -> None:
    def epochs(factory: AbsIterFactory) -> list[Any]:
        given = {} if shuffle is None else {"shuffle": shuffle}
        return [frozen(factory.build_iter(epoch, **given)) for epoch in (1, 2, 3, 1, 2, 3)]

    plain = epochs(make_factory(kind, LENGTHS, tmp_path / "a", seed=5))
    inner = make_factory(kind, LENGTHS, tmp_path / "b", seed=5)
    assert all(plain)
    assert epochs(SyncedIterFactory(inner, label="train")) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_gives_the_same_batches_in_each_pass(kind: str, tmp_path: Path) -> None:
    iterator = SyncedIterFactory(make_factory(kind, LENGTHS, tmp_path, shuffle=True)).build_iter(2)
    first = frozen(iterator)
    assert first
    next(iter(iterator))
    assert frozen(iterator) == first


def test_shuffle_makes_a_difference_to_the_factories_used_here(tmp_path: Path) -> None:
    for kind in KINDS:
        factory = SyncedIterFactory(make_factory(kind, LENGTHS, tmp_path))
        plain, shuffled = (frozen(factory.build_iter(1, shuffle=s)) for s in (False, True))
        assert plain != shuffled, kind


@pytest.mark.parametrize("kind", KINDS)
def test_len_is_that_of_the_inner_iterator_or_missing_with_it(kind: str, tmp_path: Path) -> None:
    factory = SyncedIterFactory(make_factory(kind, LENGTHS, tmp_path), label="train")
    iterator = factory.build_iter(1)
    if kind in ("sequence", "category"):
        assert len(iterator) == len(frozen(iterator)) == 5
    else:
        with pytest.raises(TypeError, match=r"\[train\].*no length"):
            len(iterator)


# --- How the inner factory is called ----------------------------------------------------------


def test_it_is_a_factory_and_so_can_be_wrapped_and_exported() -> None:
    factory = SyncedIterFactory(ListFactory({1: [1, 2]}))
    assert isinstance(factory, AbsIterFactory)
    assert isinstance(factory.build_iter(1), EpochSyncIterator)
    assert [*SyncedIterFactory(factory).build_iter(1)] == [1, 2]
    assert espnet_sync.SyncedIterFactory is SyncedIterFactory


def test_the_inner_factory_is_built_once_per_pass() -> None:
    inner = ListFactory({1: [1, 2], 2: [3]})
    factory = SyncedIterFactory(inner)
    iterator = factory.build_iter(1)
    assert inner.built == []
    assert [batch for batch in iterator] == [1, 2]
    assert inner.built == [1]
    assert [batch for batch in iterator] == [1, 2]
    assert inner.built == [1, 1]
    assert [*factory.build_iter(epoch=2)] == [3]
    assert inner.built == [1, 1, 2]


def test_a_look_at_len_builds_no_second_pass() -> None:
    inner = ListFactory({1: [1, 2]}, sized=True)
    iterator = SyncedIterFactory(inner).build_iter(1)
    assert len(iterator) == 2
    assert [*iterator] == [1, 2]
    assert inner.built == [1]


def test_shuffle_is_handed_on_only_when_it_is_given() -> None:
    inner = Recording()
    factory = SyncedIterFactory(inner)
    for given in ({}, {"shuffle": None}, {"shuffle": True}, {"shuffle": False}):
        [*factory.build_iter(4, **given)]
    assert [*factory.build_iter(5, True)] == [1, 2, 3]
    assert inner.calls == [
        ((4,), {}),
        ((4,), {}),
        ((4,), {"shuffle": True}),
        ((4,), {"shuffle": False}),
        ((5,), {"shuffle": True}),
    ]


def test_an_inner_factory_without_shuffle_works() -> None:
    assert [*SyncedIterFactory(WithoutShuffle()).build_iter(3)] == [0, 1, 2]


def test_epoch_offset_is_added_before_the_inner_factory_sees_the_epoch() -> None:
    inner = ListFactory({epoch: [epoch] for epoch in range(-1, 9)})
    for offset in (1, 3, np.int64(2), 0, -2):
        iterator = SyncedIterFactory(inner, epoch_offset=offset).build_iter(1)
        assert [*iterator] == [1 + offset]
        assert iterator.report is not None
        assert iterator.report.epoch == 1 + offset


def test_epoch_0_is_handed_on_with_one_warning_that_names_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    factory = SyncedIterFactory(ListFactory({0: [7], 1: [8]}), label="train")
    for _ in range(3):
        assert [*factory.build_iter(0)] == [7]
    assert [*factory.build_iter(1)] == [8]
    (message,) = warnings(caplog)
    for part in ("[train]", "epoch 0", "epoch_offset=1"):
        assert part in message
    SyncedIterFactory(ListFactory({0: [7]})).build_iter(0)
    assert len(warnings(caplog)) == 2, "one a factory"


def test_an_offset_puts_epoch_0_right_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert [*SyncedIterFactory(ListFactory({1: [8]}), epoch_offset=1).build_iter(0)] == [8]
    assert warnings(caplog) == []


def test_an_iterator_class_of_ones_own_is_used() -> None:
    factory = SyncedIterFactory(NumberFactory(5), iterator_class=EvenAlone, label="train")
    iterator = factory.build_iter(1)
    assert type(iterator) is EvenAlone
    assert iterator.label == "train"
    assert [*iterator] == [0, 2, 4]


def test_an_inner_build_iter_that_raises_comes_through_untouched() -> None:
    class Broken(AbsIterFactory):
        def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[int]:
            raise KeyError("no such epoch")

    with pytest.raises(KeyError, match="no such epoch"):
        [*SyncedIterFactory(Broken()).build_iter(1)]


def test_a_live_generator_cannot_be_passed_by_mistake() -> None:
    live = chunk(LENGTHS).build_iter(1)
    with pytest.raises(TypeError, match=r"inner=<generator.*AbsIterFactory"):
        SyncedIterFactory(live)  # type: ignore[arg-type]


# --- Options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner", [None, [1, 2], lambda: [1], DataLoader(range(3)), ListFactory], ids=str
)
def test_an_inner_that_is_no_factory_is_refused(inner: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)inner=.*must be an .*AbsIterFactory"):
        SyncedIterFactory(inner)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stop_at": "middle"}, ValueError, r"stop_at='middle'.*'shortest', 'longest'"),
        ({"lookahead": -1}, ValueError, r"lookahead=-1.*must be 0 to 1,000,000"),
        ({"lookahead": True}, TypeError, r"lookahead=True.*int"),
        ({"timeout": 0}, ValueError, r"timeout=0.*above 0"),
        ({"warn_after": "x"}, TypeError, r"warn_after='x'.*seconds"),
        ({"backend": "nccl"}, ValueError, r"backend='nccl'.*'auto', 'gloo', 'default'"),
        ({"label": 3}, TypeError, r"label=3.*str"),
        ({"epoch_offset": 0.5}, TypeError, r"epoch_offset=0\.5.*int"),
        ({"iterator_class": list}, TypeError, r"iterator_class=.*list.*EpochSyncIterator"),
        ({"iterator_class": "mine"}, TypeError, r"iterator_class='mine'.*EpochSyncIterator"),
        ({"iterator_class": None}, TypeError, r"iterator_class=None.*EpochSyncIterator"),
        ({"backend": "default", "lookahead": 2}, ValueError, r"lookahead=2.*backend='default'"),
        ({"backend": "default", "stop_at": "longest"}, ValueError, r"stop_at='longest'.*default"),
        ({"time_out": 3}, TypeError, r"time_out=3.*did you mean 'timeout'.*'iterator_class'"),
        ({"consensus": None}, TypeError, r"consensus=None.*'stop_at', 'lookahead', 'timeout'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_at_construction(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SyncedIterFactory(ListFactory({}), **options)


def test_options_are_taken_by_keyword_alone() -> None:
    with pytest.raises(TypeError, match="positional"):
        SyncedIterFactory(ListFactory({}), "shortest")  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop_at": "shortest", "lookahead": 0, "timeout": 60, "warn_after": 5},
        {"stop_at": "longest", "lookahead": np.int64(3), "timeout": np.int64(60)},
        {"backend": "gloo"},
        {"backend": "default", "lookahead": 0},
        {"label": "train", "epoch_offset": 1, "iterator_class": EpochSyncIterator},
    ],
    ids=str,
)
def test_with_one_rank_every_allowed_option_gives_the_same_batches(
    options: dict[str, Any],
) -> None:
    factory = SyncedIterFactory(NumberFactory(4), **options)
    assert [*factory.build_iter(1)] == [0, 1, 2, 3]


def test_a_factory_can_be_pickled() -> None:
    factory = SyncedIterFactory(sequence(LENGTHS), label="train", timeout=60)
    copy = pickle.loads(pickle.dumps(factory))
    assert frozen(copy.build_iter(1)) == frozen(factory.build_iter(1))


# --- One rank ---------------------------------------------------------------------------------


def test_a_pass_logs_one_line_and_has_a_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    iterator = SyncedIterFactory(NumberFactory(3), label="train").build_iter(4)
    assert [batch for batch in iterator] == [0, 1, 2]
    lines = [r for r in caplog.records if "[train] epoch 4" in r.getMessage()]
    assert [(line.name, line.levelname) for line in lines] == [("root", "INFO")]
    assert "3 batches" in lines[0].getMessage()
    report = iterator.report
    assert report is not None
    assert (report.label, report.epoch, report.batches, report.ended_by) == ("train", 4, 3, (0,))
    assert [(rank.rank, rank.pulled, rank.discarded) for rank in report.ranks] == [(0, 3, 0)]


def test_a_pass_of_no_batches_warns_and_names_the_empty_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    factory = SyncedIterFactory(chunk([3, 4, 5]), label="valid")
    assert [*factory.build_iter(1)] == []
    messages = [message for message in warnings(caplog) if "[valid]" in message]
    assert len(messages) == 1
    for part in ("epoch 1", "rank 0", "chunk length"):
        assert part in messages[0]


def test_a_pass_stopped_before_its_first_batch_warns_of_no_empty_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    iterator = SyncedIterFactory(NumberFactory(3)).build_iter(1)
    iterator.request_stop()
    assert [batch for batch in iterator] == []
    assert warnings(caplog) == []


def test_a_logger_that_nobody_configured_stays_so() -> None:
    root = logging.getLogger()
    handlers = root.handlers[:]
    root.handlers[:] = []
    try:
        [*SyncedIterFactory(NumberFactory(0)).build_iter(0)]
        assert root.handlers == []
    finally:
        root.handlers[:] = handlers


def test_request_stop_works_and_the_next_epoch_is_whole() -> None:
    factory = SyncedIterFactory(NumberFactory(5))
    iterator = factory.build_iter(1)
    seen = []
    for batch in iterator:
        seen.append(batch)
        if batch == 1:
            iterator.request_stop()
    assert seen == [0, 1]
    assert [*factory.build_iter(2)] == [0, 1, 2, 3, 4]


def test_building_a_factory_asks_nothing_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("asked before the first epoch")

    for name in ("is_available", "is_initialized", "get_backend", "get_world_size", "new_group"):
        monkeypatch.setattr(torch.distributed, name, asked)
    factory = SyncedIterFactory(NumberFactory(5), label="train")
    monkeypatch.undo()
    assert [*factory.build_iter(1)] == [0, 1, 2, 3, 4]
