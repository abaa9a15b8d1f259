"""What this rank has issued in each process group: evidence for a stall report, read without any communication.

Torch's flight recorders keep the last collectives of each rank: ``TORCH_FR_BUFFER_SIZE`` of them
(``TORCH_NCCL_TRACE_BUFFER_SIZE`` up to torch 2.7). Where that is 0 there is nothing to read.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as dumping

from countoff.core.checks.collectives import Issued, Recorded
from countoff.core.liveness.stacks import is_users_file

_OF_NCCL = "_dump_nccl_trace_json"
_RECORDERS = ("_dump_fr_trace_json", _OF_NCCL)
"""That of gloo, in newer versions of torch, and that of NCCL: the last one counts where a group has both."""
_WITH_LINES = "_dump_fr_trace"
"""The first of these, in a form that has lines of code too."""
_OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
"""Collectives to which each rank brings a tensor of the same size, and hangs or fails where it does not."""


class GroupCounts:
    """Reads how many collectives this rank has issued in each of its process groups.

    Any thread may call `find`, also while another one reads.

    Args:
        ranks: The ranks that are compared. A group with another one in it is left out.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._known: dict[str, tuple[weakref.ref[Any], str, Issued]] = {}
        self._compared: list[tuple[weakref.ref[Any], str, Issued]] = []
        self._made = itertools.count(1)  # also where two threads take a number at once

    def __call__(self) -> dict[str, Issued]:
        """Returns what this rank has issued, by a key that is the same on all ranks of a group."""
        self.find()
        return self.read()()

    def find(self) -> None:
        """Looks which process groups there are by now."""
        with contextlib.suppress(Exception):  # read through names that torch does not promise
            self._known = {name: self._of(group, name) for group, name in process_groups().items()}
            self._compared = [each for each in self._known.values() if each[1]]

    def read(self) -> Callable[[], dict[str, Issued]]:
        """Reads the same, of the process groups that `find` has found last; returns what tells it."""
        read: list[tuple[str, Issued, int]] = []
        with contextlib.suppress(Exception):  # read through a name that torch does not promise
            for known, key, issued in self._compared:
                if (group := known()) is not None:
                    read.append((key, issued, group._get_sequence_number_for_group()))
        return lambda: {key: issued._replace(number=number) for key, issued, number in read}

    def recorded(self, group: str, begin: int) -> Recorded | None:
        """Returns what torch has recorded of this rank's collectives in a process group of gloo, with lines of code.

        It takes some ten milliseconds for 2,000 collectives, and asks no device. None where torch records none of
        gloo (before 2.13 or so), where the recorder is off, or where it has dropped those that are asked for. NCCL's
        is not read: to read it may wait for the device.

        Args:
            group: The group's key.
            begin: How many collectives this rank had issued in it before the first of them.
        """
        with contextlib.suppress(Exception):  # read through names that torch does not promise
            name = next(
                name for name, (_, known, each) in self._known.items() if known == group and each.counts_messages
            )
            entries = [each for each in _dump_with_lines() if each["process_group"][0] == name and not each["is_p2p"]]
            if any(each["op_id"] <= begin for each in entries):
                later = [each for each in entries if each["op_id"] > begin]
                return Recorded(int(later[0]["collective_seq_id"]), tuple(map(_described_with_line, later)))
        return None

    def _of(self, group: dist.ProcessGroup, name: str) -> tuple[weakref.ref[Any], str, Issued]:
        known = self._known.get(name)
        if known is not None and known[0]() is group:
            return known
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        described = getattr(group, "group_desc", "")
        own_name = name if described in ("", "undefined") else described
        where = "in the group of all ranks" if group is dist.group.WORLD else f"in process group {own_name}"
        counts_messages = "nccl" not in dist.get_backend(group)
        issued = Issued(0, ranks, where, counts_messages, made=next(self._made))
        compared = len(ranks) > 1 and set(ranks) <= set(self._ranks)
        key = hashlib.blake2b(f"{name} {ranks}".encode(), digest_size=4).hexdigest() if compared else ""
        return weakref.ref(group), key, issued


def issued() -> dict[str, tuple[int, str]]:
    """How many collectives this rank has issued in each process group, and in words which one was the last.

    A rank that is behind has fewer. The words are empty where the flight recorder is off.

    Returns:
        The number and the words, by the group's name.
    """
    found: dict[str, tuple[int, str]] = {}
    last: dict[str, str] = {}
    with contextlib.suppress(Exception):  # all of it is evidence only, read through names that torch does not promise
        last = _last_recorded()
    with contextlib.suppress(Exception):
        for group, name in process_groups().items():
            found[name] = int(group._get_sequence_number_for_group()), last.get(name, "")  # pyright: ignore[reportAttributeAccessIssue]
    return found


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


def _dump_with_lines() -> Sequence[Mapping[str, Any]]:
    """The collectives that the recorder of gloo holds, with the lines of code where they were issued, oldest first.

    Raises:
        AttributeError: If torch has no such recorder.
    """
    return pickle.loads(getattr(dumping, _WITH_LINES)())["entries"]  # torch's own bytes, of this process


def _described_with_line(entry: Mapping[str, Any]) -> str:
    """A collective in words, with the user's line of code that issued it, where that is known.

    >>> frames = [{"filename": "/usr/torch/c10d.py", "line": 7}, {"filename": "/home/me/train.py", "line": 88}]
    >>> _described_with_line({"profiling_name": "gloo:barrier", "input_sizes": [], "frames": frames})
    'barrier at train.py:88'
    """
    own = next((frame for frame in entry.get("frames", ()) if is_users_file(frame["filename"])), None)
    line = "" if own is None else f" at {own['filename'].rpartition('/')[2]}:{own['line']}"
    return f"{_describe(entry)}{line}"


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
