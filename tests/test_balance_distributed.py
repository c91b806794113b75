"""Two real ranks make the same deal from the same files, and tell when a file differs."""

from pathlib import Path

import torch
import torch.distributed

from espnet_sync.balance import ChunkOptions, deal, read_corpus
from tests.ranks import run_ranks

LENGTHS = [900, 40, 310, 505, 77, 620, 180, 233, 412, 95]


def fingerprints_of(rank: int, world_size: int, shape_files: list[str]) -> list[list[int]]:
    """Gather what each rank's deal is called, for each case."""
    found = []
    for shape_file in shape_files:
        corpus, reason = read_corpus(shape_file.format(rank=rank))
        assert corpus is not None, reason
        options = ChunkOptions(world_size=world_size, batch_size=3, chunk_length="30,50")
        mine = torch.tensor([deal(options, corpus).fingerprint])
        everyones = [torch.empty_like(mine) for _ in range(world_size)]
        torch.distributed.all_gather(everyones, mine)
        found.append([int(one) for one in everyones])
    return found


def write_shapes(path: Path, lengths: list[int]) -> str:
    lines = [f"utt{number} {length},2\n" for number, length in enumerate(lengths)]
    path.write_text("".join(lines))
    return str(path)


def test_ranks_make_the_same_deal_and_differ_where_their_files_do(tmp_path: Path) -> None:
    cases = [write_shapes(tmp_path / "shape", LENGTHS)]
    for name, changed in (
        ("one is longer", [*LENGTHS[:-1], LENGTHS[-1] + 1]),
        ("one is missing", LENGTHS[:-1]),
        ("two change places", [*LENGTHS[1::-1], *LENGTHS[2:]]),
    ):
        write_shapes(tmp_path / f"{name}.0", LENGTHS)
        write_shapes(tmp_path / f"{name}.1", changed)
        cases.append(str(tmp_path / f"{name}.{{rank}}"))
    for found in run_ranks(2, fingerprints_of, cases):
        same, *different = found
        assert len(set(same)) == 1
        assert all(len(set(each)) == 2 for each in different)
        # Rank 0 reads equal files in all cases.
        assert len({each[0] for each in found}) == 1
