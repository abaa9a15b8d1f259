"""Real meshes: they give each rank its data rank without a process group, and every guard compares them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from countoff.core import DivergenceError, FitPlan, Guard, Settings
from countoff.lightning import Countoff
from countoff.mesh import dp_position, rank_map
from integration_tests import mesh_loops
from integration_tests.digits import digits
from integration_tests.harness import RankResult
from integration_tests.lightning_jobs import logged

RunRanks = Callable[..., list[RankResult]]

# The dims of each framework with their sizes for four ranks, and the dp_rank that each rank must find.
MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...], list[int]]] = {
    "torchtitan": (("pp", "dp_replicate", "dp_shard", "cp", "tp"), (1, 2, 1, 1, 2), [0, 0, 1, 1]),
    "torchtitan with pipelines": (("pp", "dp_shard"), (2, 2), [0, 1, 0, 1]),
    "torchtitan's experts": (("dp_shard_mod_ep", "dp_shard_in_ep"), (2, 2), [0, 1, 2, 3]),
    "lingua": (("dp_replicate", "dp_shard"), (2, 2), [0, 1, 2, 3]),
    "accelerate": (("dp_shard", "cp"), (2, 2), [0, 0, 1, 1]),
    "composer": (("data_parallel_shard", "tensor_parallel"), (2, 2), [0, 0, 1, 1]),
    "lightning": (("data_parallel", "tensor_parallel"), (4, 1), [0, 1, 2, 3]),
    "deepspeed": (("pipe", "data", "model"), (1, 2, 2), [0, 0, 1, 1]),
}


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)  # pyright: ignore[reportPrivateUsage]


def read_every_mesh() -> dict[str, Any]:
    """What this rank finds in each mesh, and how many process groups that made."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name, (dims, sizes, _) in MESHES.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=dims)
        before = groups()
        ranks = rank_map(mesh)
        found[name] = (ranks.dp_rank(rank), *(dp_position(mesh) or ()), ranks.sizes, groups() - before)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    found["a part"] = dp_position(mesh["tp"])
    found["unnamed"] = dp_position(unnamed)
    found["said"] = dp_position(unnamed, data_dims=("dim0",))
    found["refused"] = refusals(mesh)
    dist.destroy_process_group()
    return found


def refusals(mesh: Any) -> list[str]:
    """The errors on meshes that do not show which rank reads what."""
    said: list[str] = []
    mixed = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard_cp",))
    own = init_device_mesh("cpu", (4,), mesh_dim_names=("galaxy",))
    for ask in (
        lambda: rank_map(mesh["tp"]) if dist.get_rank() > 1 else rank_map(own),
        lambda: dp_position(mixed),
        lambda: dp_position(own),
        lambda: dp_position(own, data_dims=("dp",)),
    ):
        try:
            ask()
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.ranks(4)
def test_every_frameworks_mesh_gives_each_rank_its_share(run_ranks: RunRanks, ranks: int) -> None:
    """Each framework's mesh gives each rank its data rank, and no process group is made for it."""
    results = run_ranks(read_every_mesh, ranks)
    for result in results:
        for name, (_, sizes, expected) in MESHES.items():
            share = expected[result.rank]
            assert result.value[name] == (share, share, len(set(expected)), sizes, 0), name
        assert result.value["a part"] == (0, 1)
        assert result.value["unnamed"] == (result.rank, 4)
        assert result.value["said"] == (result.rank // 2, 2)
        assert len(result.value["refused"]) == 4
        assert "mixes ranks that share data" in result.value["refused"][1]
        assert "does the dim galaxy read its own data?" in result.value["refused"][2]
        assert "data_dims must be dims of the mesh, galaxy, got dp" in result.value["refused"][3]
    assert "a mesh over all ranks holds 0 to 1 in order, this one begins with [2, 3]" in results[3].value["refused"][0]


def read_a_large_mesh() -> tuple[int, int, tuple[int, int] | None]:
    """A mesh of 4,096 ranks in this one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2345, world_size=4096)
    mesh = init_device_mesh("cpu", (2, 8, 32, 1, 8), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    ranks = rank_map(mesh)
    found = ranks.dp_degree, ranks.dp_rank(2345), dp_position(mesh)
    dist.destroy_process_group()
    return found


@pytest.mark.ranks(1)
def test_a_mesh_of_thousands_is_read_in_one_process(run_ranks: RunRanks, ranks: int) -> None:
    """The share of a rank in a mesh of 4,096 ranks is read without a group."""
    share = (2345 // 8) % 256
    assert run_ranks(read_a_large_mesh, ranks)[0].value == (256, share, (share, 256))


# The dp_ranks with which four ranks count off, the dp_degree, and the verdict due on every rank.
COUNTED: list[tuple[list[int | None], int, str]] = [
    ([0, 0, 1, 1], 2, ""),
    ([0, 1, 0, 1], 2, ""),
    ([None, None, None, None], 2, ""),
    ([0, 1, 1, 2], 4, "RankMapError: 1 of 4 dp_ranks belongs to no rank (3): 25 % of the data is never read"),
    ([0, 1, 2, 3], 2, "RankMapError: 2 of 4 ranks have a dp_rank outside 0 to 1"),
    ([0, 1, 2, 0], 3, "RankMapError: dp_degree 3 must divide the number of ranks 4"),
]


def count_off() -> list[str]:
    """What was raised in one fit after the other, each with other positions of the ranks."""
    dist.init_process_group("gloo")
    said = [fit(dp_ranks[dist.get_rank()], degree) for dp_ranks, degree, _ in COUNTED]
    dist.destroy_process_group()
    return said


def fit(dp_rank: int | None, dp_degree: int) -> str:
    """One guard's fit of one batch; what was raised."""
    guard = Guard(Settings(), rank=dist.get_rank(), world_size=dist.get_world_size())
    try:
        guard.fit_start(FitPlan(batch_size=4, dp_rank=dp_rank, dp_degree=dp_degree))
        guard.train_start(0)
        guard.batch()
        guard.train_end("exhausted")
        guard.fit_end()
    except DivergenceError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        guard.close()
    return ""


@pytest.mark.ranks(4)
def test_a_wrong_map_of_ranks_is_a_verdict(run_ranks: RunRanks, ranks: int) -> None:
    """Positions that do not share out the data are a verdict on every rank."""
    for result in run_ranks(count_off, ranks):
        for said, (_, _, expected) in zip(result.value, COUNTED, strict=True):
            assert said.startswith(expected), said
            assert expected or not said


@pytest.mark.ranks(4)
def test_a_plain_loop_is_counted_by_the_data_ranks_of_its_mesh(run_ranks: RunRanks, ranks: int) -> None:
    """Totals follow the data ranks of the mesh, and loaders that do not are refused."""
    results = [result.value for result in run_ranks(mesh_loops.loop_over_shares, ranks)]
    totals = {"dp_degree": 2, "batches_per_epoch": 4, "global_batch_size": 8, "samples_per_epoch": 30}
    for name, peers in (("by the mesh", [(0, 1), (2, 3)]), ("said dims", [(0, 2), (1, 3)])):
        for first, second in peers:
            assert results[first][name]["seen"] == results[second][name]["seen"], name
        assert sorted(results[0][name]["seen"] + results[3][name]["seen"]) == sorted([*range(30), *range(30)])
        for found in results:
            assert found[name]["notices"] == ()
            assert {total: found[name][f"countoff/{total}"] for total in totals} == totals
    for found in results:
        assert (
            "RankMapError: the loaders share the data out among 4 ranks, and the mesh has 2 data ranks: ranks that "
            "must read the same batch read different ones" in found["by the world"]
        )
        assert "among 1 rank, and the mesh has 2 data ranks: every sample is read by more than" in found["by the node"]
        assert "ranks 0 and 1 must read the same data and have different dp_ranks" in found["by a wrong formula"]
        assert found["unknown dims"].startswith("ValueError: does the dim galaxy read its own data?")


class TwoDimensional(pl.LightningModule):
    """A linear classifier whose model is the same on every rank; the mesh only shares out the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(64, 10)
        self.seen: list[int] = []

    def configure_model(self) -> None:
        """Nothing to shard."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels, numbers = batch
        self.seen += numbers.tolist()
        return torch.nn.functional.cross_entropy(self.layer(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_on_a_mesh(directory: str) -> list[int]:
    """A fit of one epoch over 30 samples; what this rank read."""
    images, labels = digits()
    data = TensorDataset(images[:30], labels[:30], torch.arange(30))
    model = TwoDimensional()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
        max_epochs=1,
        logger=CSVLogger(directory, name="", version=""),
        callbacks=[Countoff()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
    return model.seen


@pytest.mark.ranks(4)
def test_a_lightning_mesh_is_counted_by_its_data_ranks(run_ranks: RunRanks, ranks: int, tmp_path: Path) -> None:
    """Lightning's mesh gives the totals, and ranks of one data rank read the same."""
    results = run_ranks(fit_on_a_mesh, ranks, str(tmp_path / "logs"))
    assert [result.exit_code for result in results] == [0] * 4
    seen = [result.value for result in results]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == list(range(30))
    found = logged(tmp_path / "logs")
    expected = {"num_training_batches": 4, "global_batch_size": 8, "samples_repeated": 0, "samples_dropped": 0}
    assert {name: found[f"countoff/{name}"] for name in expected} == expected
