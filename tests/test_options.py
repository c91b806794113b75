"""The options: what is taken, and that refusals name the option, the value and what is allowed."""

import argparse
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from espnet_sync.options import SyncOptions, conf_options, sync_policy


def test_defaults_are_the_documented_ones() -> None:
    options = SyncOptions()
    assert options.stop_at == "shortest"
    assert options.timeout == 1800.0
    assert options.warn_after == 30.0
    assert options.backend == "auto"
    assert options.label == ""
    assert options.epoch_offset == 0
    assert options.lookahead is not None
    assert 0 <= options.lookahead <= 8


def test_the_default_backend_holds_nothing_ahead() -> None:
    assert SyncOptions(backend="default").lookahead == 0
    assert SyncOptions(backend="default", lookahead=0, stop_at="shortest").lookahead == 0


@pytest.mark.parametrize(
    "given",
    [
        {"stop_at": "longest"},
        {"lookahead": 0},
        {"lookahead": 1},
        {"lookahead": np.int64(3)},
        {"timeout": 60},
        {"timeout": 0.5},
        {"timeout": np.int32(60)},
        {"timeout": np.float32(1.5)},
        {"warn_after": 5},
        {"warn_after": np.int64(5)},
        {"backend": "gloo"},
        {"backend": "auto"},
        {"backend": "default"},
        {"label": "valid"},
        {"epoch_offset": 1},
        {"epoch_offset": -1},
        {"epoch_offset": np.int64(1)},
    ],
    ids=str,
)
def test_an_allowed_value_is_kept(given: dict[str, Any]) -> None:
    options = SyncOptions(**given)
    for name, value in given.items():
        assert getattr(options, name) == value


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"stop_at": "middle"}, ValueError, r"stop_at='middle'.*'shortest', 'longest'"),
        ({"stop_at": "Shortest"}, ValueError, r"stop_at='Shortest'.*'shortest', 'longest'"),
        ({"stop_at": None}, TypeError, r"stop_at=None.*'shortest', 'longest'"),
        ({"stop_at": True}, TypeError, r"stop_at=True.*'shortest', 'longest'"),
        ({"stop_at": ["shortest"]}, TypeError, r"stop_at=\['shortest'\].*'shortest'"),
        ({"backend": "nccl"}, ValueError, r"backend='nccl'.*'auto', 'gloo', 'default'"),
        ({"backend": None}, TypeError, r"backend=None.*'auto', 'gloo', 'default'"),
        ({"lookahead": -1}, ValueError, r"lookahead=-1.*must be 0 to 1,000,000 batches"),
        ({"lookahead": 2**32}, ValueError, r"lookahead=4294967296.*must be 0 to 1,000,000"),
        ({"lookahead": 2.0}, TypeError, r"lookahead=2\.0.*int"),
        ({"lookahead": "2"}, TypeError, r"lookahead='2'.*int"),
        ({"lookahead": True}, TypeError, r"lookahead=True.*int"),
        ({"timeout": 0}, ValueError, r"timeout=0.*seconds above 0"),
        ({"timeout": -1.0}, ValueError, r"timeout=-1\.0.*seconds above 0"),
        ({"timeout": float("inf")}, ValueError, r"timeout=inf.*finite"),
        ({"timeout": float("nan")}, ValueError, r"timeout=nan.*finite"),
        ({"timeout": "60"}, TypeError, r"timeout='60'.*seconds"),
        ({"timeout": None}, TypeError, r"timeout=None.*seconds"),
        ({"timeout": True}, TypeError, r"timeout=True.*seconds"),
        ({"warn_after": 0.0}, ValueError, r"warn_after=0\.0.*seconds above 0"),
        ({"warn_after": False}, TypeError, r"warn_after=False.*seconds"),
        ({"warn_after": "soon"}, TypeError, r"warn_after='soon'.*seconds"),
        ({"label": None}, TypeError, r"label=None.*str"),
        ({"label": b"train"}, TypeError, r"label=b'train'.*str"),
        ({"epoch_offset": 1.0}, TypeError, r"epoch_offset=1\.0.*int"),
        ({"epoch_offset": True}, TypeError, r"epoch_offset=True.*int"),
        ({"epoch_offset": "1"}, TypeError, r"epoch_offset='1'.*int"),
        (
            {"backend": "default", "lookahead": 1},
            ValueError,
            r"lookahead=1.*backend='default'.*lookahead=0",
        ),
        (
            {"backend": "default", "stop_at": "longest"},
            ValueError,
            r"stop_at='longest'.*backend='default'.*stop_at='shortest'",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name_value_and_what_is_allowed(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SyncOptions(**given)


def test_options_are_frozen_take_keywords_alone_and_can_be_pickled() -> None:
    options = SyncOptions(label="train", timeout=60)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.timeout = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        SyncOptions("longest")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("shortest", "shortest"),
        ("longest", "longest"),
        ("none", "none"),
        ("None", "none"),
        (None, "none"),
        (True, "shortest"),
        (False, "none"),
        ("true", "shortest"),
        ("false", "none"),
        ("True", "shortest"),
        (" Longest ", "longest"),
    ],
)
def test_a_policy_is_read_from_words_and_from_yaml_values(value: object, policy: str) -> None:
    assert sync_policy(value) == policy


@pytest.mark.parametrize("value", ["", "middle", "yes", 1, 0, 1.0, ["shortest"], {}])
def test_a_wrong_policy_is_refused_with_the_value_and_what_is_allowed(value: object) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        sync_policy(value)
    for part in ("'shortest'", "'longest'", "'none'", repr(value)):
        assert part in str(caught.value)


def test_a_conf_gives_the_options() -> None:
    conf = {"lookahead": 2, "timeout": 60, "warn_after": 5.0, "backend": "gloo"}
    options = conf_options("epoch_sync_conf", conf, "longest")
    assert options == SyncOptions(stop_at="longest", **conf)
    assert conf_options("epoch_sync_conf", {}, "shortest") == SyncOptions()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("label", "train"),
        ("epoch_offset", 1),
        ("iterator_class", "EpochSyncIterator"),
        ("stop_at", "longest"),
        ("lookahed", 2),
        (1, 2),
    ],
)
def test_a_conf_refuses_what_is_not_its_own(key: Any, value: object) -> None:
    with pytest.raises(TypeError) as caught:
        conf_options("valid_epoch_sync_conf", {key: value}, "shortest")
    for part in (
        "valid_epoch_sync_conf",
        f"{key}={value!r}",
        "'lookahead'",
        "'timeout'",
        "'warn_after'",
        "'backend'",
    ):
        assert part in str(caught.value)


def test_a_misspelt_key_gets_a_suggestion() -> None:
    with pytest.raises(TypeError, match="did you mean 'lookahead'"):
        conf_options("epoch_sync_conf", {"lookahed": 2}, "shortest")


@pytest.mark.parametrize("conf", ["timeout=60", ["timeout"], 60, None])
def test_a_conf_that_is_no_mapping_is_refused(conf: object) -> None:
    with pytest.raises(TypeError, match=r"epoch_sync_conf.*mapping"):
        conf_options("epoch_sync_conf", conf, "shortest")


@pytest.mark.parametrize(
    ("conf", "policy", "error", "message"),
    [
        ({"timeout": -1}, "shortest", ValueError, r"epoch_sync_conf.*timeout=-1.*above 0"),
        ({"timeout": "long"}, "shortest", TypeError, r"epoch_sync_conf.*timeout='long'"),
        ({"lookahead": True}, "shortest", TypeError, r"epoch_sync_conf.*lookahead=True"),
        ({"backend": "default"}, "longest", ValueError, r"epoch_sync_conf.*stop_at='longest'"),
    ],
    ids=str,
)
def test_a_bad_value_in_a_conf_is_refused_under_its_key(
    conf: dict[str, Any], policy: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        conf_options("epoch_sync_conf", conf, policy)
