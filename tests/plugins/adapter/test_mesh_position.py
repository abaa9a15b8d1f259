"""The data position of a rank, read from a mesh: with known names, with names of one's own, and without a mesh."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from countoff.mesh import data_position, dp_position, loader_position, rank_map


def mesh(shape: tuple[int, ...], names: tuple[str, ...] | None, coordinate: list[int] | None) -> Any:
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return SimpleNamespace(mesh=ranks, mesh_dim_names=names, get_coordinate=lambda: coordinate)


@pytest.mark.parametrize(
    ("names", "data_dims", "position"),
    [
        (("dp", "tp"), None, (1, 2)),
        (("tp", "dp"), None, (2, 3)),
        (("dp_replicate", "dp_shard"), None, (5, 6)),
        (None, None, (5, 6)),
        (("galaxy", "star"), ("galaxy",), (1, 2)),
    ],
)
def test_the_position_follows_from_the_dims_that_read_data(
    names: tuple[str, ...] | None, data_dims: tuple[str, ...] | None, position: tuple[int, int]
) -> None:
    assert dp_position(mesh((2, 3), names, [1, 2]), data_dims) == position


@pytest.mark.parametrize(
    ("names", "data_dims", "words"),
    [
        (("galaxy", "tp"), None, "does the dim galaxy read its own data"),
        (("dp_shard_cp", "tp"), None, "mixes ranks that share data"),
        (("dp", "tp"), ("star",), "data_dims must be dims of the mesh, dp, tp, got star"),
    ],
)
def test_a_dim_that_tells_nothing_is_refused(
    names: tuple[str, ...], data_dims: tuple[str, ...] | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        dp_position(mesh((2, 3), names, [1, 2]), data_dims)


def test_a_part_of_a_mesh_has_no_map() -> None:
    part = SimpleNamespace(mesh=torch.tensor([2, 3]), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match=r"this one begins with \[2, 3\]"):
        rank_map(part)


@pytest.mark.parametrize("given", [None, (2, 3), mesh((2, 3), ("galaxy", "tp"), [1, 2])], ids=["none", "shape", "odd"])
def test_without_a_usable_mesh_every_rank_reads_its_own(given: Any) -> None:
    assert data_position(given, rank=4, world_size=6) == (4, 6)


def test_a_mesh_without_this_rank_gives_no_position() -> None:
    outside = mesh((2, 3), ("dp", "tp"), None)
    assert dp_position(outside) is None
    assert data_position(outside, rank=7, world_size=8) == (7, 8)


def test_a_loaders_position_is_that_of_its_sampler() -> None:
    sampler = SimpleNamespace(rank=1, num_replicas=2)
    assert loader_position(SimpleNamespace(sampler=sampler)) == (1, 2)
    assert loader_position(SimpleNamespace(batch_sampler=SimpleNamespace(sampler=sampler))) == (1, 2)
    assert loader_position([1, 2]) is None
