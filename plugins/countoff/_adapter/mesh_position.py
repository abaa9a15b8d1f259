"""Reads a live ``DeviceMesh`` of torch as a ``RankMap``, and this rank's data position in it. Imports no torch.

It makes no process group and never flattens a mesh: ``_flatten`` makes groups, every rank would have to call it, and
some versions of torch return an old one. Reading ``mesh``, ``mesh_dim_names`` and ``get_coordinate`` needs no other
rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from countoff.core.arithmetic.ranks import ORDERS, RankMap
from countoff.core.data.plain import attribute_of

__all__ = ["data_position", "dp_position", "loader_position", "mesh_of", "rank_map", "stage"]

_DATA_DIMS = {name for order in ORDERS.values() for name in order.data_dims} | {
    *("replicate", "shard", "ddp", "hsdp_replicate", "hsdp_shard"),
    # Where expert parallelism reuses data ranks, both parts of the reused dim read data.
    *("dp_shard_mod_ep", "dp_shard_in_ep"),
}
_OTHER_DIMS = {name for order in ORDERS.values() for name in order.names} - _DATA_DIMS | {"ep", "etp", "efsdp"}
_PIPELINE_DIMS = ("pp", "pipe", "pipeline")
# Dims that combine a data dim with one that shares its data: the data position cannot be computed from them.
_MIXED_DIMS = {"fsdp", "dp_shard_cp", "dp_cp", "loss"}


def rank_map(mesh: Any, data_dims: Sequence[str] | None = None) -> RankMap:
    """Returns the map of all ranks that a mesh describes.

    Args:
        mesh: A ``DeviceMesh`` over all ranks of the job.
        data_dims: The dims along which different data is read; None: those whose names frameworks use for data, or all
            dims if the mesh has no names.

    Raises:
        ValueError: If the mesh does not hold the ranks 0, 1, 2, … in row-major order (it is a part of a larger one), or
            a dim's name does not show whether it reads data.
    """
    names = _names(mesh)
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise ValueError(
            f"a mesh over all ranks holds 0 to {len(ranks) - 1} in order, this one begins with {ranks[:8]}: give the "
            f"whole mesh, not a part of it"
        )
    return RankMap(names, _sizes(mesh), _chosen(names, data_dims))


def dp_position(mesh: Any, data_dims: Sequence[str] | None = None) -> tuple[int, int] | None:
    """Returns this rank's dp_rank and the dp_degree of a mesh, which may be a part of a larger one.

    Args:
        mesh: A ``DeviceMesh``.
        data_dims: As for ``rank_map``.

    Returns:
        dp_rank and dp_degree; None if this rank is not in the mesh.

    Raises:
        ValueError: If a dim's name does not show whether it reads data.
    """
    names, sizes = _names(mesh), _sizes(mesh)
    chosen = _chosen(names, data_dims)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    dp_rank = 0
    for name, size, position in zip(names, sizes, coordinate, strict=True):
        if name in chosen:
            dp_rank = dp_rank * size + int(position)
    return dp_rank, math.prod(size for name, size in zip(names, sizes, strict=True) if name in chosen)


def stage(mesh: Any) -> int:
    """Returns this rank's stage of the pipeline of a ``DeviceMesh``; 0 where it has no dim of that name."""
    coordinate = mesh.get_coordinate() if mesh is not None else None
    places = dict(zip(_names(mesh), coordinate, strict=True)) if coordinate is not None else {}
    return next((int(places[name]) for name in _PIPELINE_DIMS if name in places), 0)


def data_position(mesh: Any, *, rank: int, world_size: int) -> tuple[int, int]:
    """Returns this rank's dp_rank and the dp_degree as an adapter reports them at the start of a fit.

    Args:
        mesh: The framework's ``DeviceMesh``; anything else where it has none.
        rank: This rank.
        world_size: Ranks of the job.

    Returns:
        Those of the mesh. Without a mesh, or where a dim's name does not show whether it reads data, every rank reads
        its own data: rank and world_size.
    """
    try:
        position = dp_position(mesh) if hasattr(mesh, "get_coordinate") else None
    except ValueError:
        position = None
    return position or (rank, world_size)


def mesh_of(strategy: Any) -> Any:
    """Returns the mesh of a strategy of Lightning's; None where it has none, or raises an error instead."""
    with contextlib.suppress(Exception):
        return getattr(strategy, "device_mesh", None)
    return None


def loader_position(loader: Any) -> tuple[int, int] | None:
    """Returns the rank and the number of replicas of a loader's distributed sampler; None if it has none.

    Args:
        loader: A torch DataLoader, or anything that is iterated.
    """
    for sampler in (attribute_of(attribute_of(loader, "batch_sampler"), "sampler"), attribute_of(loader, "sampler")):
        rank, replicas = attribute_of(sampler, "rank"), attribute_of(sampler, "num_replicas")
        if isinstance(rank, int) and isinstance(replicas, int):
            return rank, replicas
    return None


def _sizes(mesh: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in mesh.mesh.shape)


def _names(mesh: Any) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    return tuple(names) if names else tuple(f"dim{index}" for index in range(mesh.mesh.ndim))


def _chosen(names: tuple[str, ...], data_dims: Sequence[str] | None) -> tuple[str, ...]:
    if data_dims is not None:
        unknown = [name for name in data_dims if name not in names]
        if unknown:
            raise ValueError(f"data_dims must be dims of the mesh, {', '.join(names)}, got {', '.join(unknown)}")
        return tuple(data_dims)
    if all(name == f"dim{index}" for index, name in enumerate(names)):
        return names
    for name in names:
        if name in _MIXED_DIMS:
            raise ValueError(f"the dim {name} mixes ranks that share data with others: give the mesh it was made from")
        if name not in _DATA_DIMS and name not in _OTHER_DIMS:
            raise ValueError(f"does the dim {name} read its own data? Name the dims that do: data_dims=(…)")
    return tuple(name for name in names if name in _DATA_DIMS)
