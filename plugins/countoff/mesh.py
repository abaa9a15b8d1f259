"""A live ``DeviceMesh`` of torch as a ``RankMap``, and this rank's place in it: read only.

No process group is made, and a mesh is never flattened: ``_flatten`` makes groups, every rank would have to call it,
and some versions of torch answer with an old one. What is read here (``mesh``, ``mesh_dim_names``, ``get_coordinate``)
needs nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from countoff.core.ranks import ORDERS, RankMap

__all__ = ["data_position", "dp_position", "loader_position", "rank_map"]

_DATA_DIMS = {name for order in ORDERS.values() for name in order.data_dims} | {
    *("replicate", "shard", "ddp", "hsdp_replicate", "hsdp_shard"),
    # Where experts borrow data ranks, both parts of the borrowed dim read data.
    *("dp_shard_mod_ep", "dp_shard_in_ep"),
}
_OTHER_DIMS = {name for order in ORDERS.values() for name in order.names} - _DATA_DIMS | {"ep", "etp", "efsdp"}
# Dims that are made of a data dim and of one that shares its data: the shares cannot be told from them.
_MIXED_DIMS = {"fsdp", "dp_shard_cp", "dp_cp", "loss"}


def rank_map(mesh: Any, data_dims: Sequence[str] | None = None) -> RankMap:
    """Returns the map of all ranks that a mesh describes.

    Args:
        mesh: A ``DeviceMesh`` over all ranks of the job.
        data_dims: The dims along which different data is read; None: those that a framework is known to name so, or all
            of them if the mesh has no names.

    Raises:
        ValueError: If the mesh does not hold the ranks 0, 1, 2, … in row-major order (it is a part of a larger one), or
            a dim's name does not tell whether it reads data.
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
        ValueError: If a dim's name does not tell whether it reads data.
    """
    names, sizes = _names(mesh), _sizes(mesh)
    chosen = _chosen(names, data_dims)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    share = 0
    for name, size, position in zip(names, sizes, coordinate, strict=True):
        if name in chosen:
            share = share * size + int(position)
    return share, math.prod(size for name, size in zip(names, sizes, strict=True) if name in chosen)


def data_position(mesh: Any, *, rank: int, world_size: int) -> tuple[int, int]:
    """Returns this rank's dp_rank and the dp_degree, as an adapter gives them to the roll call.

    Args:
        mesh: The framework's ``DeviceMesh``; anything else, where it has none.
        rank: This rank.
        world_size: Ranks of the job.

    Returns:
        Those of the mesh. Without one, or where a dim's name does not tell whether it reads data: every rank its own.
    """
    try:
        position = dp_position(mesh) if hasattr(mesh, "get_coordinate") else None
    except ValueError:
        position = None
    return position or (rank, world_size)


def loader_position(loader: Any) -> tuple[int, int] | None:
    """Returns the dp_rank and the dp_degree with which a loader's distributed sampler reads; None if it has none.

    Args:
        loader: A torch DataLoader, or anything that is iterated.
    """
    for sampler in (getattr(getattr(loader, "batch_sampler", None), "sampler", None), getattr(loader, "sampler", None)):
        rank, replicas = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
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
        strange = [name for name in data_dims if name not in names]
        if strange:
            raise ValueError(f"data_dims must be dims of the mesh, {', '.join(names)}, got {', '.join(strange)}")
        return tuple(data_dims)
    if all(name == f"dim{index}" for index, name in enumerate(names)):
        return names
    for name in names:
        if name in _MIXED_DIMS:
            raise ValueError(f"the dim {name} mixes ranks that share data with others: give the mesh it was made from")
        if name not in _DATA_DIMS and name not in _OTHER_DIMS:
            raise ValueError(f"does the dim {name} read its own data? Say which dims do: data_dims=(…)")
    return tuple(name for name in names if name in _DATA_DIMS)
