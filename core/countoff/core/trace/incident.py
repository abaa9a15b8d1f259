"""The incident: what a verdict leaves in the directory of the trace, for a look at it afterwards.

Rank 0 has the counts and the stacks of all ranks, and writes it. On a host where its file is not in the directory,
because hosts share no file system, the rank that prints the verdict whole writes what it knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from countoff.core.ending import verdict_file
from countoff.core.messages import clip, ranks_by
from countoff.core.protocol.failures import Failure
from countoff.core.protocol.records import Records
from countoff.core.session.liveness import processes, stacks
from countoff.core.settings import SECRET_OPTIONS, Settings, variable_of
from countoff.core.trace import format
from countoff.core.verdict import Verdict
from countoff.core.waiting import until
from countoff.core.whole_file import write_whole

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel

_KEY = "stack"
_RECORD_BYTES = 900
"""The frames in a record take at most as many bytes: an entry of the store has a limit."""
_READ_SECONDS = 0.2
"""Rank 0 waits so long for the stacks of all ranks, and asks so long for those of single ones."""
_POLL_SECONDS = 0.02
_COUNTED = ("rank", "host", "where", "batches", "fetched", "steps", "state", "failure")
"""What is kept of each rank's row."""
_PREFIXES = ("NCCL_", "PYTORCH_", "TORCH_", "TORCHELASTIC_")
"""The environment variables that are kept begin so, beside those of the settings. Others may hold secrets."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASS", "PWD", "CRED", "AUTH", "COOKIE", "WEBHOOK")
"""A variable whose name has one of these words is not kept either."""
_ADDRESS = re.compile(r"://.*@", re.DOTALL)
"""What may be an address with a user or a password in it; a variable with such a value is not kept either."""


def post_stack(channel: Channel, rank: int, thread: int) -> dict[str, Any]:
    """Tells rank 0 where the thread is that trains on this rank; returns what it has told.

    Args:
        channel: The guard's channel.
        rank: This rank.
        thread: The thread, by `threading.get_ident()`.
    """
    record = stack_record(thread)
    channel.report(_KEY, rank, record)
    return record


def stack_record(thread: int) -> dict[str, Any]:
    """Where a thread of this rank is, as a record: its innermost frames, as many as fit."""
    frames: list[str] = []
    left = _RECORD_BYTES
    place = stacks.thread(thread)
    for frame in place.stack:
        text = clip(frame, 160)
        left -= len(json.dumps(text)) + 2
        if left < 0:
            break
        frames.append(text)
    return {"state": place.state, "frames": frames}


def read_stacks(channel: Channel, ranks: Sequence[int]) -> Records:
    """What ranks have told of their main threads, by rank; a rank without a trace has told nothing.

    It takes about 0.4 s at most: the verdict is printed only after that.

    Args:
        channel: The guard's channel.
        ranks: The ranks.
    """
    if until(lambda: channel.has_reports(_KEY, ranks), time.monotonic() + _READ_SECONDS, _POLL_SECONDS):
        return channel.reports(_KEY, ranks)
    told: Records = {}
    deadline = time.monotonic() + _READ_SECONDS
    for rank in ranks:
        if time.monotonic() < deadline:
            told |= channel.reports(_KEY, [rank])
    return told


def is_others(directory: str, rank: int, first: int, verdict: Verdict) -> bool:
    """Whether the first rank writes the incident into this directory, and this rank must not."""
    if rank == first or (verdict.gone and first in verdict.ranks):
        return False
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(directory, format.file_name(first))).st_mtime > processes.began_at()
    return False


def _cell(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    return Failure.from_json(value).event if name == "failure" and value else value


def write(directory: str, verdict: Verdict, *, rank: int, rows: Records, found: Records) -> None:
    """Writes the incident.

    Args:
        directory: The directory of the trace.
        verdict: The verdict, with its table.
        rank: This rank.
        rows: The rows of all ranks; empty where this rank has only the table's.
        found: What ranks have told of their main threads, by rank.

    Raises:
        OSError: If it cannot be written.
    """
    counted = [rows[each] for each in sorted(rows)] or verdict.rows
    document = {
        **verdict_file.document(verdict),
        format.COUNTED: [
            {name: value for name in _COUNTED if (value := _cell(row, name)) not in (None, "")} for row in counted
        ],
        format.STACKS: grouped(found),
        format.ENVIRONMENT: environment(os.environ),
        format.WRITTEN_BY: {"rank": rank, "host": socket.gethostname()},
    }
    _write(directory, format.INCIDENT_FILE, rank, json.dumps(document, indent=2, default=str).encode() + b"\n")


class FlightRecord:
    """Writes what NCCL's flight recorder holds on this rank, if the job uses NCCL and the recorder is on.

    It does so on a thread of its own: NCCL may be stuck, and then never answers.

    Args:
        directory: The directory of the trace.
        rank: This rank.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._thread = threading.Thread(target=self._write, name="countoff flight record", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, and starts no thread any more
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; returns whether there is nothing more to wait for."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _write(self) -> None:
        with contextlib.suppress(Exception):  # evidence only
            if "torch.distributed" not in sys.modules:
                return
            from countoff.core.session.liveness import collectives  # imports torch: only where the job has

            if record := collectives.flight_record():
                _write(self._directory, format.FLIGHT_RECORDER_FILE.format(self._rank), self._rank, record)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of torch, NCCL and countoff among others; never one that may be a secret.

    >>> environment({"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "TORCH_HUB_TOKEN": "y"})
    {'NCCL_DEBUG': 'INFO'}
    """
    own = {"COUNTOFF", *(f"COUNTOFF_{field.name.upper()}" for field in dataclasses.fields(Settings))}
    own -= {variable_of(name) for name in SECRET_OPTIONS}
    return {
        name: variables[name]
        for name in sorted(variables)
        if (name in own or (name.startswith(_PREFIXES) and not any(word in name.upper() for word in _SECRET)))
        and not _ADDRESS.search(variables[name])
    }


def grouped(found: Records) -> list[dict[str, Any]]:
    """The stacks, equal ones once, those of the fewest ranks first.

    Args:
        found: What ranks have told of their main threads, by rank.
    """
    told = {rank: (str(each.get("state", "")), tuple(map(str, each.get("frames", ())))) for rank, each in found.items()}
    return [{"ranks": ranks, "state": state, "frames": frames} for (state, frames), ranks in ranks_by(told)]


def _write(directory: str, name: str, rank: int, content: bytes) -> None:
    """Several hosts may write it at the same time. Only its user can read it."""
    write_whole(os.path.join(directory, name), rank, content, mode=0o600)
