"""Reads a live ``DeviceMesh`` of torch: the map of all ranks, and this rank's data position.

Makes no process group and waits for no other rank.
"""

from __future__ import annotations

from countoff._adapter.mesh_position import data_position, dp_position, loader_position, rank_map

__all__ = ["data_position", "dp_position", "loader_position", "rank_map"]
