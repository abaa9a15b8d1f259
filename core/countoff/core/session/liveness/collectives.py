"""What this rank has issued in each process group: evidence for a stall report, read without any communication.

Torch's flight recorders keep the last collectives of each rank: ``TORCH_FR_BUFFER_SIZE`` of them
(``TORCH_NCCL_TRACE_BUFFER_SIZE`` up to torch 2.7). Where that is 0 there is nothing to read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as dumping

_OF_NCCL = "_dump_nccl_trace_json"
_RECORDERS = ("_dump_fr_trace_json", _OF_NCCL)
"""That of gloo, in newer versions of torch, and that of NCCL: the last one counts where a group has both."""
_OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
"""Collectives to which each rank brings a tensor of the same size, and hangs or fails where it does not."""


def numbers() -> dict[str, int]:
    """Returns how many collectives this rank has issued in each process group, by the group's name."""
    with contextlib.suppress(Exception):  # read through names that torch does not promise
        return {
            name: int(group._get_sequence_number_for_group())  # pyright: ignore[reportAttributeAccessIssue]
            for group, name in process_groups().items()
        }
    return {}


def issued() -> dict[str, tuple[int, str]]:
    """How many collectives this rank has issued in each process group, and in words which one was the last.

    A rank that is behind has fewer. The words are empty where the flight recorder is off.

    Returns:
        The number and the words, by the group's name.
    """
    last: dict[str, str] = {}
    with contextlib.suppress(Exception):  # it is evidence only, read through names that torch does not promise
        last = _last_recorded()
    return {name: (number, last.get(name, "")) for name, number in numbers().items()}


def flight_record() -> bytes:
    """What NCCL's flight recorder holds on this rank, as torch's own tools read it; empty without NCCL or recorder."""
    dump = getattr(dumping, "_dump_nccl_trace", None)
    with contextlib.suppress(Exception):
        uses_nccl = any("nccl" in dist.get_backend(group) for group in process_groups())
        if uses_nccl and dump is not None and _dump(_OF_NCCL, collectives=True).get("entries"):
            return bytes(dump())
    return b""


def unfinished() -> frozenset[tuple[str, int, int]]:
    """The process groups of NCCL in which this rank has queued collectives that are not completed.

    It asks no GPU: it reads what torch's NCCL watchdog has seen, a tenth of a second ago or so. It is empty where the
    flight recorder is off.

    Returns:
        For each group its number, its last completed collective and its last queued one. The same value twice means
        that NCCL has completed nothing in between.
    """
    with contextlib.suppress(Exception):
        return _unfinished(_dump(_OF_NCCL, collectives=False).get("pg_status", {}))
    return frozenset()


def _unfinished(status: Mapping[str, Mapping[str, Any]]) -> frozenset[tuple[str, int, int]]:
    """As `unfinished`, from the status of each group in a dump.

    >>> _unfinished({"0": {"last_completed_collective": "7", "last_enqueued_collective": "9"}})
    frozenset({('0', 7, 9)})
    >>> _unfinished({"0": {"last_completed_collective": "9", "last_enqueued_collective": "9"}})
    frozenset()
    """
    found = {
        (name, int(group["last_completed_collective"]), int(group["last_enqueued_collective"]))
        for name, group in status.items()
    }
    # With TORCH_NCCL_BLOCKING_WAIT there is no watchdog, and what is completed stays -1.
    return frozenset(each for each in found if 0 <= each[1] < each[2])


def process_groups() -> dict[dist.ProcessGroup, str]:
    """The process groups that this rank belongs to, with their names; torch offers no public list of them."""
    world: Any = dist.distributed_c10d._world  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return {group: str(name) for group, name in list(world.pg_names.items()) if isinstance(group, dist.ProcessGroup)}


def _last_recorded() -> dict[str, str]:
    """The last collective in each process group that a flight recorder holds, in words, by the group's name."""
    entries = [entry for recorder in _RECORDERS for entry in _dump(recorder, collectives=True).get("entries", ())]
    # What a rank sends is another rank's to receive: these differ on healthy ranks.
    return {str(entry["process_group"][0]): _describe(entry) for entry in entries if not entry.get("is_p2p")}


def _dump(recorder: str, *, collectives: bool) -> Mapping[str, Any]:
    """What a flight recorder holds, without stacks; empty where torch has no such recorder."""
    dump = getattr(dumping, recorder, None)
    return {} if dump is None else json.loads(dump(includeCollectives=collectives))


def _describe(entry: Mapping[str, Any]) -> str:
    """A collective in words, with its size where that is the same on all ranks.

    >>> _describe({"profiling_name": "nccl:all_reduce", "input_sizes": [[32, 64]]})
    'all_reduce of [32, 64]'
    >>> _describe({"profiling_name": "nccl:all_to_all", "input_sizes": [[7]]})
    'all_to_all'
    """
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = entry.get("input_sizes") or ()
    return f"{name} of {sizes[0]}" if sizes and name in _OF_ONE_SIZE else name
