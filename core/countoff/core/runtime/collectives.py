"""What this rank has issued in each process group: evidence for a stall report, read without any communication."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as _torch

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Torch's flight recorders: that of NCCL, and since torch 2.8 that of the other backends."""
_OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
"""Collectives to which each rank brings a tensor of the same size, and hangs or fails where it does not."""


def issued() -> dict[str, tuple[int, str]]:
    """How many collectives this rank has issued in each process group, and in words which one was the last.

    A rank that is behind has fewer. The words come from torch's flight recorder, and are empty where it is off:
    ``TORCH_FR_BUFFER_SIZE`` (``TORCH_NCCL_TRACE_BUFFER_SIZE`` before torch 2.8) is how many collectives it keeps.

    Returns:
        The number and the words, by the group's name.
    """
    found: dict[str, tuple[int, str]] = {}
    with contextlib.suppress(Exception):  # evidence only, read through names that torch does not promise
        last = _last_recorded()
        for group, name in process_groups().items():
            found[name] = int(group._get_sequence_number_for_group()), last.get(name, "")  # pyright: ignore[reportAttributeAccessIssue]
    return found


def process_groups() -> dict[dist.ProcessGroup, str]:
    """The process groups that this rank belongs to, with their names; torch offers no public list of them."""
    world: Any = dist.distributed_c10d._world  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return {group: str(name) for group, name in list(world.pg_names.items()) if isinstance(group, dist.ProcessGroup)}


def _last_recorded() -> dict[str, str]:
    """The last collective in each process group that a flight recorder holds, in words, by the group's name."""
    last: dict[str, str] = {}
    for entry in _entries():
        last[str(entry["process_group"][0])] = describe(entry)
    return last


def _entries() -> Iterator[Mapping[str, Any]]:
    """All that the flight recorders hold, in the order of issue in each process group."""
    for recorder in _RECORDERS:
        dump = getattr(_torch, recorder, None)
        if dump is not None:
            yield from json.loads(dump()).get("entries", ())


def describe(entry: Mapping[str, Any]) -> str:
    """A collective in words, with its size where that is the same on all ranks.

    >>> describe({"profiling_name": "nccl:all_reduce", "input_sizes": [[32, 64]]})
    'all_reduce of [32, 64]'
    >>> describe({"profiling_name": "nccl:all_to_all", "input_sizes": [[7]]})
    'all_to_all'
    """
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = entry.get("input_sizes") or ()
    return f"{name} of {sizes[0]}" if sizes and name in _OF_ONE_SIZE else name
