"""Lightning 2.6 on two CPU ranks: unequal loaders end, validate and step as one (cases 4, 5)."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from torch.utils.data import DataLoader

from espnet_sync.synced_iter_factory import SyncedIterFactory
from tests.ranks import run_ranks

#: Batches of each rank.
TRAIN = (6, 4)
VALID = (3, 5)
EPOCHS = 2

#: accumulate_grad_batches, whether the loaders are sized, lookahead.
CASES = [
    (accumulate, sized, lookahead)
    for accumulate in (1, 3)
    for sized, lookahead in ((True, 4), (True, 2), (True, 1), (False, 4), (False, 0))
]


class Batches(AbsIterFactory):
    """Hands out batches of one row: as a sized DataLoader, or as a generator."""

    def __init__(self, count: int, sized: bool) -> None:
        self.count = count
        self.sized = sized
        self.epochs: list[int] = []

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Any:
        self.epochs.append(epoch)
        rows = torch.arange(float(self.count)).reshape(-1, 1)
        if self.sized:
            return DataLoader(rows, batch_size=1)  # type: ignore[arg-type]
        return self._generate(rows)

    def _generate(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        for row in rows:
            yield row.reshape(1, 1)


def fit_all(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    return [fit(rank, world_size, folder, *case) for case in CASES]


def fit(
    rank: int, world_size: int, folder: Path, accumulate: int, sized: bool, lookahead: int
) -> dict[str, Any]:
    """Train and validate for some epochs; gives what was done in each."""
    # Takes seconds to import: not when a rank of another test imports this module.
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    inner = {"train": Batches(TRAIN[rank], sized), "valid": Batches(VALID[rank], sized)}
    factories = {
        label: SyncedIterFactory(
            factory, label=label, epoch_offset=1, lookahead=lookahead, timeout=60
        )
        for label, factory in inner.items()
    }
    iterators: list[tuple[str, int, Any]] = []
    seen: dict[str, Any] = {"train": [], "valid": [], "steps": [], "weights": []}

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def _loader(self, label: str) -> Any:
            iterator = factories[label].build_iter(self.current_epoch)
            iterators.append((label, self.current_epoch, iterator))
            return iterator

        def train_dataloader(self) -> Any:
            return self._loader("train")

        def val_dataloader(self) -> Any:
            return self._loader("valid")

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            seen["train"].append((self.current_epoch, int(batch.item())))
            return self.layer(batch + rank).mean()

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            seen["valid"].append((self.current_epoch, int(batch.item())))
            self.log("loss", self.layer(batch).mean(), sync_dist=True, batch_size=1)

        def on_train_epoch_end(self) -> None:
            seen["steps"].append(self.trainer.global_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    warnings.filterwarnings("ignore")
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        # The ranks run and their default group is initialised: Lightning takes both as they are.
        strategy=DDPStrategy(
            cluster_environment=LightningEnvironment(), process_group_backend="gloo"
        ),
        devices=world_size,
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=folder,
    )
    model = Model()
    trainer.fit(model)
    seen["weights"] = [value.tolist() for value in model.layer.parameters()]
    seen["epochs"] = {label: factory.epochs for label, factory in inner.items()}
    seen["reports"] = [(label, epoch, one.report) for label, epoch, one in iterators]
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    seen["tail"] = total.item()
    return seen


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("lightning")
    seen = run_ranks(2, fit_all, folder, deadline=240, group_timeout=120)
    assert [*folder.iterdir()] == []
    return seen


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "accumulate {}, sized {}, W {}".format(*case)
)
def test_lightning_trains_validates_steps_and_finishes_with_unequal_loaders(
    case: tuple[int, bool, int], fitted: list[list[dict[str, Any]]]
) -> None:
    accumulate = case[0]
    both = [seen[CASES.index(case)] for seen in fitted]
    for rank, seen in enumerate(both):
        for label, counts in (("train", TRAIN), ("valid", VALID)):
            expected = [(epoch, index) for epoch in range(EPOCHS) for index in range(min(counts))]
            assert seen[label] == expected, f"rank {rank}: {label}"
            assert sorted(set(seen["epochs"][label])) == [1, 2], f"rank {rank}: {label}"
            reports = [(epoch, one) for mode, epoch, one in seen["reports"] if mode == label]
            assert {epoch for epoch, _ in reports} == {0, 1}
            for epoch, report in reports:
                where = f"rank {rank}: {label} epoch {epoch}"
                assert report is not None, where
                assert (report.label, report.epoch) == (label, epoch + 1), where
                assert report.batches == min(counts), where
                assert report.ended_by == ((1,) if label == "train" else (0,)), where
        # The last window of an epoch steps, also where accumulation leaves it short.
        steps = -(-min(TRAIN) // accumulate)
        assert seen["steps"] == [steps, 2 * steps], f"rank {rank}"
        assert seen["tail"] == 2.0
    assert both[0]["weights"] == both[1]["weights"]
