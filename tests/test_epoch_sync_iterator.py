"""The bare iterator in one process: alone, and against a fake that plays all other ranks."""

import gc
import itertools
import logging
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from espnet_sync import EpochSyncIterator, PeerFailedError, RankReport
from espnet_sync import epoch_sync_iterator as module


class FakeDistributed:
    """Stands in for `torch.distributed`: has what section 3 allows, and nothing else.

    It notes this rank's `flags`, the `devices` where they were made, and its `lookups` of the
    backend.
    """

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, peers: Iterable[int] = (), backend: str = "gloo") -> None:
        self.peers = iter(peers)
        self.backend = backend
        self.available = True
        self.initialized = True
        self.fails: Exception | None = None
        self.flags: list[int] = []
        self.devices: list[torch.device] = []
        self.lookups = 0

    def is_available(self) -> bool:
        return self.available

    def is_initialized(self) -> bool:
        assert self.available, "a torch without distributed has no is_initialized()"
        return self.initialized

    def get_backend(self) -> str:
        self.lookups += 1
        return self.backend

    def all_reduce(self, flag: torch.Tensor, *, op: Any) -> None:
        assert op == self.ReduceOp.MIN
        assert flag.shape == (1,)
        self.flags.append(int(flag.item()))
        if self.fails is not None:
            raise self.fails
        flag.fill_(min(int(flag.item()), next(self.peers, 1)))

    def maker(self, value: float) -> Callable[..., torch.Tensor]:
        def make(*size: object, **options: Any) -> torch.Tensor:
            assert size == (1,)
            assert set(options) == {"device"}
            self.devices.append(torch.device(options["device"]))
            return torch.full((1,), value)

        return make


@contextmanager
def peers_that_offer(*flags: int, backend: str = "gloo") -> Iterator[FakeDistributed]:
    """Play a job whose other ranks offer these flags, one an agreement, and 1 from then on."""
    fake = FakeDistributed(flags, backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "distributed", fake)
        patch.setattr(torch, "ones", fake.maker(1.0))
        patch.setattr(torch, "zeros", fake.maker(0.0))
        yield fake


def numbers(count: int) -> Callable[[], Iterator[int]]:
    return lambda: iter(range(count))


def drain(iterator: Iterable[Any]) -> list[Any]:
    """Return the batches of one pass, without the look at `len()` that `list()` takes."""
    return [batch for batch in iterator]


class Counted:
    """A source that counts its calls."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.calls = 0

    def __call__(self) -> Any:
        """Return a fresh iterable."""
        self.calls += 1
        return self.make()


class Indexed:
    """A container of the old kind, which `iter()` takes and which has no `__iter__`."""

    def __getitem__(self, index: int) -> int:
        """Return one of three numbers."""
        if index == 3:
            raise IndexError(index)
        return index


class Resetting:
    """An iterator that starts over when it has run out, under its old identity."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.index = 0

    def __iter__(self) -> "Resetting":
        """Start over."""
        self.index = 0
        return self

    def __next__(self) -> int:
        """Return the next number."""
        if self.index == self.count:
            raise StopIteration
        self.index += 1
        return self.index - 1


class OneWay:
    """An iterator of one's own that stays exhausted."""

    def __init__(self, count: int) -> None:
        self.rest = list(range(count))

    def __iter__(self) -> "OneWay":
        """Go on."""
        return self

    def __next__(self) -> int:
        """Return the next number."""
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)


# --- What comes out ---------------------------------------------------------------------------


def test_batches_come_unchanged_and_in_order() -> None:
    batches = [object() for _ in range(5)]
    for source in (batches, tuple(batches), lambda: batches, lambda: iter(batches)):
        out = drain(EpochSyncIterator(source))
        assert len(out) == len(batches)
        assert all(one is other for one, other in zip(out, batches, strict=True))


def test_batches_come_unchanged_among_ranks_too() -> None:
    batches = [object(), None, False, {}, ("ids", {"speech": 1})]
    with peers_that_offer():
        out = drain(EpochSyncIterator(lambda: iter(batches)))
    assert all(one is other for one, other in zip(out, batches, strict=True))


def test_a_callable_is_called_once_per_pass_and_not_before() -> None:
    source = Counted(numbers(3))
    iterator = EpochSyncIterator(source)
    assert source.calls == 0
    for passes in (1, 2, 3):
        assert drain(iterator) == [0, 1, 2]
        assert source.calls == passes
    with peers_that_offer():
        assert drain(iterator) == [0, 1, 2]
    assert source.calls == 4


@pytest.mark.parametrize(
    "container", [[0, 1, 2], (0, 1, 2), range(3), {0: "a", 1: "b", 2: "c"}, Indexed()], ids=repr
)
def test_a_container_is_iterated_afresh_in_each_pass(container: Iterable[int]) -> None:
    iterator = EpochSyncIterator(container)
    assert next(iter(iterator)) == 0
    assert drain(iterator) == [0, 1, 2]
    assert drain(iterator) == [0, 1, 2]


def test_a_dropped_pass_leaves_the_next_one_whole() -> None:
    iterator = EpochSyncIterator(numbers(4))
    assert next(iter(iterator)) == 0
    assert drain(iterator) == [0, 1, 2, 3]


def test_two_passes_at_once_do_not_mix() -> None:
    iterator = EpochSyncIterator(numbers(2))
    assert [*zip(iterator, iterator, strict=True)] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("source", [3, None, object()], ids=repr)
def test_a_source_that_is_neither_callable_nor_iterable_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match=r"source=.*zero-argument callable.*container"):
        EpochSyncIterator(source)


def test_options_are_taken_by_keyword_alone() -> None:
    with pytest.raises(TypeError, match="positional"):
        EpochSyncIterator([1], None)  # type: ignore[misc]
    assert EpochSyncIterator([1], consensus=None, label="train").label == "train"


def test_a_source_that_raises_comes_through_untouched() -> None:
    failure = ValueError("a torn file")

    def source() -> Iterator[int]:
        yield 0
        raise failure

    passing = iter(EpochSyncIterator(source))
    assert next(passing) == 0
    with pytest.raises(ValueError, match="a torn file") as caught:
        next(passing)
    assert caught.value is failure


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_callable_that_returns_nothing_is_told_what_to_return(together: bool) -> None:
    iterator = EpochSyncIterator(lambda: None, label="train")  # type: ignore[arg-type,return-value]
    with peers_that_offer() as fake:
        fake.initialized = together
        with pytest.raises(TypeError, match=r"\[train\].*returned None.*fresh iterable"):
            next(iter(iterator))
    assert fake.flags == ([-1] if together else [])


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_callable_that_raises_stop_iteration_has_failed_and_not_ended(together: bool) -> None:
    def source() -> Iterator[int]:
        raise StopIteration

    with peers_that_offer() as fake:
        fake.initialized = together
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            drain(EpochSyncIterator(source))
    assert fake.flags == ([-1] if together else [])


# --- Live iterators ---------------------------------------------------------------------------


def live_iterators() -> list[Iterator[int]]:
    return [
        (number for number in range(3)),
        iter([0, 1, 2]),
        map(int, "012"),
        itertools.islice(itertools.count(), 3),
        OneWay(3),
    ]


KINDS = [type(live).__name__ for live in live_iterators()]


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
@pytest.mark.parametrize("dropped", [False, True], ids=["whole", "dropped"])
def test_a_live_iterator_serves_one_pass_and_the_second_names_the_remedy(
    kind: int, dropped: bool
) -> None:
    iterator = EpochSyncIterator(live_iterators()[kind], label="train")
    if dropped:
        assert next(iter(iterator)) == 0
    else:
        assert drain(iterator) == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"\[train\].*callable that builds it and not its res"):
        next(iter(iterator))
    with pytest.raises(RuntimeError, match="callable"):
        next(iter(iterator))


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_a_callable_that_hands_out_an_exhausted_iterator_again_gets_the_same_error(
    kind: int,
) -> None:
    live = live_iterators()[kind]
    iterator = EpochSyncIterator(lambda: live)
    assert drain(iterator) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="callable that builds it and not its result"):
        drain(iterator)


def test_a_live_iterator_that_was_used_fails_on_all_ranks() -> None:
    iterator = EpochSyncIterator(iter([0]))
    with peers_that_offer(1, 1, 1) as fake:
        assert drain(iterator) == [0]
        with pytest.raises(RuntimeError, match="callable"):
            drain(iterator)
    assert fake.flags == [1, 0, -1]


def test_a_callable_may_hand_out_an_iterator_that_starts_over() -> None:
    resetting = Resetting(3)
    iterator = EpochSyncIterator(lambda: resetting)
    for _ in range(3):
        assert drain(iterator) == [0, 1, 2]


def test_a_callable_may_hand_out_a_new_live_iterator_each_time() -> None:
    iterator = EpochSyncIterator(lambda: (number for number in range(3)))
    for _ in range(3):
        assert drain(iterator) == [0, 1, 2]


# --- Length -----------------------------------------------------------------------------------


def test_len_is_that_of_one_pass_over_the_source() -> None:
    assert len(EpochSyncIterator([5, 6, 7])) == 3
    assert len(EpochSyncIterator(lambda: [5, 6, 7])) == 3
    assert len(EpochSyncIterator(lambda: DataLoader(range(10), batch_size=4))) == 3
    assert len(EpochSyncIterator([])) == 0


@pytest.mark.parametrize(
    "source", [numbers(3), iter([1]), Indexed()], ids=["callable", "live", "old"]
)
def test_an_unsized_source_has_no_length(source: Any) -> None:
    iterator = EpochSyncIterator(source, label="train")
    for _ in range(2):
        with pytest.raises(TypeError, match=r"\[train\].*no length"):
            len(iterator)


def test_a_type_error_inside_a_callable_comes_through_as_it_is() -> None:
    failure = TypeError("unsupported operand")

    def source() -> list[int]:
        raise failure

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        len(EpochSyncIterator(source))
    assert caught.value is failure


@pytest.mark.parametrize(
    "make",
    [lambda: [0, 1, 2], numbers(3), lambda: DataLoader(range(3), batch_size=None)],
    ids=["list", "generator", "DataLoader"],
)
def test_the_pass_built_for_len_serves_the_next_pass(make: Callable[[], Any]) -> None:
    source = Counted(make)
    iterator = EpochSyncIterator(source)
    for _ in range(3):
        try:
            assert len(iterator) == 3
        except TypeError:
            assert not hasattr(make(), "__len__")
    assert source.calls == 1
    assert [int(batch) for batch in iterator] == [0, 1, 2]
    assert source.calls == 1
    assert [int(batch) for batch in iterator] == [0, 1, 2]
    assert source.calls == 2


def test_the_probe_is_made_once_also_between_passes() -> None:
    source = Counted(lambda: [0, 1])
    iterator = EpochSyncIterator(source)
    for passes in (1, 2, 3):
        assert len(iterator) == 2
        assert drain(iterator) == [0, 1]
        assert source.calls == passes


def test_a_dropped_pass_over_the_probe_leaves_the_next_one_whole() -> None:
    source = Counted(numbers(3))
    iterator = EpochSyncIterator(source)
    with pytest.raises(TypeError, match="no length"):
        len(iterator)
    assert next(iter(iterator)) == 0
    assert drain(iterator) == [0, 1, 2]
    assert source.calls == 2


def test_a_pass_that_was_never_started_leaves_the_probe_to_the_next() -> None:
    source = Counted(lambda: [0, 1])
    iterator = EpochSyncIterator(source)
    assert len(iterator) == 2
    iter(iterator)
    assert drain(iterator) == [0, 1]
    assert source.calls == 1


def test_len_exchanges_nothing() -> None:
    with peers_that_offer() as fake:
        assert len(EpochSyncIterator(lambda: [1, 2])) == 2
        with pytest.raises(TypeError, match="no length"):
            len(EpochSyncIterator(numbers(2)))
    assert fake.flags == []


class Boastful(list[int]):
    def __len__(self) -> int:
        """Promise too much."""
        return 5


def test_a_source_that_ends_before_its_own_length_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    iterator = EpochSyncIterator(Boastful([0, 1]), label="train")
    assert len(iterator) == 5
    for _ in range(2):
        assert drain(iterator) == [0, 1]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    for part in ("[train]", "5 batches", "after 2"):
        assert part in warnings[0]


# --- generate() -------------------------------------------------------------------------------


class Doubled(EpochSyncIterator):
    def generate(self) -> Iterator[Any]:
        for batch in super().generate():
            yield 2 * batch


class EvenAlone(EpochSyncIterator):
    def generate(self) -> Iterator[Any]:
        return (batch for batch in super().generate() if batch % 2 == 0)


class WithOneMore(EpochSyncIterator):
    def generate(self) -> Iterator[Any]:
        yield from super().generate()
        yield "more"


class OfItsOwn(EpochSyncIterator):
    def generate(self) -> Any:
        return ["a", "b"]


OVERRIDES = [
    (Doubled, [0, 2, 4]),
    (EvenAlone, [0, 2]),
    (WithOneMore, [0, 1, 2, "more"]),
    (OfItsOwn, ["a", "b"]),
]


@pytest.mark.parametrize(("kind", "expected"), OVERRIDES)
def test_a_subclass_changes_drops_and_adds_batches(
    kind: type[EpochSyncIterator], expected: list[Any]
) -> None:
    iterator = kind(numbers(3))
    assert drain(iterator) == expected
    assert drain(iterator) == expected


@pytest.mark.parametrize(("kind", "expected"), OVERRIDES)
def test_a_subclass_inherits_the_synchronisation(
    kind: type[EpochSyncIterator], expected: list[Any]
) -> None:
    with peers_that_offer() as fake:
        assert drain(kind(numbers(3))) == expected
        assert fake.flags == [1] * len(expected) + [0]
    with peers_that_offer(1, 0):
        assert drain(kind(numbers(3))) == expected[:1]


def test_generate_is_called_once_per_pass() -> None:
    calls: list[int] = []

    class Noted(EpochSyncIterator):
        def generate(self) -> Iterator[Any]:
            calls.append(len(calls))
            return super().generate()

    iterator = Noted(numbers(3))
    assert drain(iterator) == [0, 1, 2]
    with peers_that_offer():
        assert drain(iterator) == [0, 1, 2]
    assert calls == [0, 1]


def test_a_generate_that_raises_fails_on_all_ranks() -> None:
    class Broken(EpochSyncIterator):
        def generate(self) -> Iterator[Any]:
            raise KeyError("no such utterance")

    with peers_that_offer() as fake, pytest.raises(KeyError, match="no such utterance"):
        drain(Broken(numbers(3)))
    assert fake.flags == [-1]


# --- request_stop() ---------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_stop_asked_for_in_a_pass_ends_it_and_no_other(together: bool) -> None:
    iterator = EpochSyncIterator(numbers(9))
    seen = []
    with peers_that_offer() as fake:
        fake.initialized = together
        for batch in iterator:
            seen.append(batch)
            if batch == 2:
                iterator.request_stop()
        assert seen == [0, 1, 2]
        assert iterator.report is not None
        assert (iterator.report.batches, iterator.report.ended_by) == (3, ())
        assert fake.flags == ([1, 1, 1, 0] if together else [])
        assert drain(iterator) == [*range(9)]
        assert iterator.report.batches == 9


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_stop_asked_for_outside_a_pass_ends_the_next_one_at_once(together: bool) -> None:
    iterator = EpochSyncIterator(numbers(4))
    with peers_that_offer() as fake:
        fake.initialized = together
        assert drain(iterator) == [0, 1, 2, 3]
        iterator.request_stop()
        assert drain(iterator) == []
        assert iterator.report is not None
        assert (iterator.report.batches, iterator.report.ended_by) == (0, ())
        assert drain(iterator) == [0, 1, 2, 3]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_break_after_asking_for_a_stop_leaves_the_next_pass_clean(together: bool) -> None:
    iterator = EpochSyncIterator(numbers(4))
    with peers_that_offer() as fake:
        fake.initialized = together
        for batch in iterator:
            if batch == 1:
                iterator.request_stop()
                break
        gc.collect()
        assert drain(iterator) == [0, 1, 2, 3]


def test_a_stop_that_comes_while_a_batch_is_made_ends_the_pass() -> None:
    def source() -> Iterator[int]:
        for number in range(9):
            if number == 3:
                iterator.request_stop()
            yield number

    iterator = EpochSyncIterator(source)
    assert len(drain(iterator)) in (3, 4)
    with peers_that_offer():
        assert len(drain(iterator)) in (3, 4)


def test_a_signal_handler_may_ask_for_a_stop() -> None:
    iterator = EpochSyncIterator(numbers(9))

    def on_signal(number: int, frame: FrameType | None) -> None:
        iterator.request_stop()

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        for together in (False, True):
            seen = []
            with peers_that_offer() as fake:
                fake.initialized = together
                for batch in iterator:
                    seen.append(batch)
                    if batch == 4:
                        signal.raise_signal(signal.SIGUSR1)
            assert seen == [0, 1, 2, 3, 4]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_stop_never_raises_and_never_exchanges_anything() -> None:
    with peers_that_offer() as fake:
        iterator = EpochSyncIterator(numbers(2))
        for _ in range(3):
            iterator.request_stop()
        assert fake.flags == []
        assert drain(iterator) == []
        assert fake.flags == [0]
        assert drain(iterator) == [0, 1]


# --- Report -----------------------------------------------------------------------------------


def test_a_pass_in_one_process_has_a_report() -> None:
    iterator = EpochSyncIterator(numbers(3), label="train")
    assert iterator.report is None
    drain(iterator)
    report = iterator.report
    assert report is not None
    assert (report.label, report.epoch, report.batches, report.ended_by) == (
        "train",
        None,
        3,
        (0,),
    )
    assert report.ranks == (RankReport(rank=0, pulled=3),)


def test_only_a_pass_that_ended_has_a_report() -> None:
    iterator = EpochSyncIterator(numbers(3))
    next(iter(iterator))
    assert iterator.report is None
    drain(iterator)
    report = iterator.report
    next(iter(iterator))
    assert iterator.report is report


def test_the_bare_iterator_reports_on_its_own_rank_alone() -> None:
    iterator = EpochSyncIterator(numbers(5), label="train")
    with peers_that_offer(1, 1, 0):
        drain(iterator)
    report = iterator.report
    assert report is not None
    assert (report.label, report.batches, report.ended_by) == ("train", 2, ())
    (own,) = report.ranks
    assert (own.rank, own.pulled, own.discarded, own.repeated) == (None, 3, 1, 0)
    assert own.waited >= 0


# --- Agreements -------------------------------------------------------------------------------


@given(mine=st.integers(0, 6), peers=st.integers(0, 6))
def test_every_rank_stops_where_the_shortest_does(mine: int, peers: int) -> None:
    with peers_that_offer(*[1] * peers, 0) as fake:
        assert drain(EpochSyncIterator(numbers(mine))) == [*range(min(mine, peers))]
    assert fake.flags == [1] * min(mine, peers) + [int(mine > peers)]


def test_flags_are_made_one_at_a_time_and_only_as_allowed() -> None:
    with peers_that_offer() as fake:
        passing = iter(EpochSyncIterator(numbers(2)))
        for batches in (1, 2):
            next(passing)
            assert (len(fake.flags), len(fake.devices)) == (batches, batches)
        assert next(passing, None) is None
    assert (fake.flags, len(fake.devices)) == ([1, 1, 0], 3)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_rank_that_fails_says_so_and_raises_its_own_exception(index: int) -> None:
    failure = OSError("a torn file")

    def source() -> Iterator[int]:
        yield from range(index)
        raise failure

    seen = []
    with peers_that_offer() as fake:
        with pytest.raises(OSError, match="a torn file") as caught:
            for batch in EpochSyncIterator(source):
                seen.append(batch)
        assert fake.flags == [1] * index + [-1]
    assert seen == [*range(index)]
    assert caught.value is failure
    assert caught.value.__cause__ is None
    assert "source" in [frame.name for frame in traceback.extract_tb(failure.__traceback__)]


def test_a_failed_rank_keeps_its_exception_where_telling_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def source() -> Iterator[int]:
        raise ValueError("a torn file")
        yield

    with peers_that_offer() as fake:
        fake.fails = RuntimeError("connection closed by peer")
        with pytest.raises(ValueError, match="a torn file"):
            drain(EpochSyncIterator(source))
    assert "connection closed by peer" in caplog.text


@pytest.mark.parametrize("index", [0, 2])
def test_a_peers_failure_is_raised_at_once(index: int) -> None:
    seen = []
    with peers_that_offer(*[1] * index, -1) as fake:
        with pytest.raises(PeerFailedError, match=rf"\[train\].*batch {index}.*another") as caught:
            for batch in EpochSyncIterator(numbers(9), label="train"):
                seen.append(batch)
        assert len(fake.flags) == index + 1
    assert seen == [*range(index)]
    assert caught.value.ranks == ()


def test_a_failure_outranks_an_end() -> None:
    with peers_that_offer(-1), pytest.raises(PeerFailedError, match="another rank"):
        drain(EpochSyncIterator([]))


def test_an_error_of_torch_itself_is_no_end_of_data() -> None:
    with peers_that_offer() as fake:
        fake.fails = RuntimeError("timed out waiting for a peer")
        with pytest.raises(RuntimeError, match="timed out"):
            drain(EpochSyncIterator(numbers(3)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through_without_an_agreement(error: type[BaseException]) -> None:
    def source() -> Iterator[int]:
        yield 0
        raise error

    with peers_that_offer() as fake:
        with pytest.raises(error):
            drain(EpochSyncIterator(source))
        assert fake.flags == [1]


def test_a_pass_broken_off_leaves_the_next_one_clean() -> None:
    iterator = EpochSyncIterator(numbers(3))
    with peers_that_offer() as fake:
        for batch in iterator:
            if batch == 1:
                break
        assert drain(iterator) == [0, 1, 2]
    assert fake.flags == [1, 1, 1, 1, 1, 0]


# --- Where the flag lives ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("gloo", "cpu"),
        ("GLOO", "cpu"),
        ("mpi", "cpu"),
        ("undefined", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("nccl", "cuda"),
        ("cuda:nccl", "cuda"),
        ("xccl", "xpu"),
        ("hccl", "xpu"),
        ("xpu:xccl", "xpu"),
        ("cpu:gloo,xpu:xccl", "cpu"),
    ],
)
def test_the_flag_lives_where_the_group_can_reduce_it(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    accelerator = SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda *_, **__: torch.device("xpu"),
        current_device_index=lambda: 1,
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    with peers_that_offer(backend=backend) as fake:
        assert drain(EpochSyncIterator(numbers(1))) == [0]
    assert [device.type for device in fake.devices] == [kind, kind]
    if kind != "cpu":
        assert {device.index for device in fake.devices} <= {1, None}


def test_the_device_is_looked_up_when_a_pass_starts_and_never_before() -> None:
    with peers_that_offer() as fake:
        fake.initialized = False
        iterator = EpochSyncIterator(numbers(2))
        fake.initialized = True
        passing = iter(iterator)
        assert fake.lookups == 0
        next(passing)
        next(passing)
        assert fake.lookups == 1
        fake.backend = "cpu:gloo,cuda:nccl"
        assert drain(iterator) == [0, 1]
        assert fake.lookups == 2


@pytest.mark.parametrize("available", [False, True])
def test_without_a_group_nothing_else_is_asked_for(available: bool) -> None:
    with peers_that_offer() as fake:
        fake.available, fake.initialized = available, False
        iterator = EpochSyncIterator(numbers(3))
        assert drain(iterator) == [0, 1, 2]
    assert (fake.flags, fake.devices, fake.lookups) == ([], [], 0)


def test_a_group_made_after_the_iterator_counts() -> None:
    iterator = EpochSyncIterator(numbers(3))
    assert drain(iterator) == [0, 1, 2]
    with peers_that_offer(1, 0):
        assert drain(iterator) == [0]
    assert drain(iterator) == [0, 1, 2]


def test_tests_that_patch_torch_through_the_module_work(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([1, 1, 0])
    distributed = module.torch.distributed
    monkeypatch.setattr(distributed, "is_available", lambda: True)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(
        distributed, "all_reduce", lambda flag, op: flag.fill_(min(flag.item(), next(answers)))
    )
    assert drain(EpochSyncIterator(numbers(5))) == [0, 1]
