"""Deaths among six ranks: every survivor names exactly the victims, whoever noticed first."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from espnet_sync.errors import PeerLostError
from tests.factories import NumberFactory
from tests.ranks import try_ranks
from tests.test_faults_distributed import (
    AT,
    End,
    Endless,
    LoaderFactory,
    die,
    run_epoch,
    synced,
    within,
)

RANKS = 6
#: Seconds of a busy survivor's step, and for which survivors stay alive after their error.
STEP = 4.0
STAY = 10.0


def run_deaths(
    rank: int,
    world_size: int,
    victims: tuple[int, ...],
    lookahead: int,
    how: str,
    folder: Path,
    busy: int | None,
    stay: float,
) -> tuple[End, float]:
    """Train until the victims die together; gives each survivor's end, in seconds after it."""

    def have_fault() -> None:
        if rank == busy:
            time.sleep(STEP)
            return
        (folder / f"died.{rank}").write_text(str(time.time()))
        die(how)

    inner: Any = LoaderFactory(Endless()) if how.endswith("worker") else NumberFactory(1000)
    has_fault = rank in (*victims, busy)
    end = run_epoch(
        partial(synced(lookahead, inner).build_iter, 1),
        rank,
        rank if has_fault else -1,
        have_fault,
    )
    # A survivor that left at once would hide whether the news travels.
    time.sleep(stay)
    died = max(float((folder / f"died.{victim}").read_text()) for victim in victims)
    return End(end.batches, end.error, end.at - died), died


@pytest.mark.parametrize(
    ("victims", "how", "store", "lookahead", "busy", "stay", "seconds"),
    [
        ((0,), "killed", "tcp", 4, None, 0, 2),
        ((0,), "exits", "file", 0, None, STAY, 2),
        ((3,), "killed", "file", 4, None, 0, 2),
        ((3,), "exits", "tcp", 0, None, STAY, 2),
        ((0, 3), "killed", "file", 4, None, 0, 12),
        ((1, 4), "exits", "tcp", 4, None, 0, 12),
        ((2, 3), "killed", "tcp", 0, None, 0, 12),
        ((2,), "killed", "tcp", 4, 5, 0, 12),
        ((0,), "killed with a worker", "tcp", 4, None, 0, 8),
        ((3,), "killed with a worker", "file", 0, None, 0, 8),
    ],
    ids=str,
)
def test_every_survivor_names_exactly_the_dead(
    victims: tuple[int, ...],
    how: str,
    store: str,
    lookahead: int,
    busy: int | None,
    stay: float,
    seconds: float,
    tmp_path: Path,
) -> None:
    outcomes = try_ranks(
        RANKS, run_deaths, victims, lookahead, how, tmp_path, busy, stay, store=store
    )
    for rank, outcome in enumerate(outcomes):
        if rank in victims:
            assert outcome.exit_code == (0 if how == "exits" else -9)
            continue
        assert outcome.exit_code == 0, outcome.trace
        end, _ = outcome.value
        assert type(end.error) is PeerLostError, (rank, end.error)
        assert end.error.ranks == victims, (rank, end.error)
        assert len(end.batches) > AT
        assert end.at < within(seconds), (rank, end)
        assert "[train] epoch 1, pass 1, batch" in str(end.error)
