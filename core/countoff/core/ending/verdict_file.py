"""The verdict as a file, for a scheduler that decides whether to start the job again."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from countoff.core import formats
from countoff.core.messages import names_of
from countoff.core.session.liveness import processes
from countoff.core.settings import Settings, SettingsError
from countoff.core.software import own_version
from countoff.core.verdict import Verdict
from countoff.core.whole_file import temporary_beside, write_whole

_OWN_KEYS = {"format", "kind", "sentence", "restart"}
_MOST_BYTES = 1 << 20
"""No verdict is longer. A larger file is another program's, and is not read."""
WRITE_SECONDS = 2.0
"""After so long the job ends without its file: a network file system may never answer."""
_RUN = {
    "torchelastic_run_id": "TORCHELASTIC_RUN_ID",
    "torchelastic_restart_count": "TORCHELASTIC_RESTART_COUNT",
    "slurm_job_id": "SLURM_JOB_ID",
    "slurm_restart_count": "SLURM_RESTART_COUNT",
}
_GONE = (errno.ENOENT, errno.ESTALE)
"""A rank of another host has just removed the file; ESTALE is how a network file system says so of an open one."""
_STARTING_SECONDS = 1.0
"""No run of all ranks has a verdict so soon. The clocks of hosts and file systems may differ by as much."""
_begun: set[str] = set()
"""Paths of the fits that this process has begun."""
_before: dict[str, Mapping[str, Any]] = {}
"""The verdicts of the attempts before, by the paths at which they were found."""
_writing = threading.Lock()


def document(verdict: Verdict) -> dict[str, Any]:
    """The content of a verdict's file, as JSON types: the verdict, what it was found with, and in which run.

    >>> document(Verdict("UnevenBatches", "rank 1 ran out of data."))["restart"]
    'useless'
    """
    return {"format": formats.VERDICT_FILE, **verdict.to_dict(), "versions": versions(), "run": run()}


def versions() -> dict[str, str]:
    """The versions of countoff, Python and torch in this process."""
    torch = sys.modules.get("torch")  # not imported for this
    found = {"countoff": own_version(), "python": platform.python_version()}
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", "unknown"))
    return found


def run() -> dict[str, str]:
    """Which run of which job this is, as far as its launcher or its scheduler says so."""
    return {key: os.environ[variable] for key, variable in _RUN.items() if os.environ.get(variable)}


def clear(settings: Settings, rank: int, part: Sequence[int] = ()) -> None:
    """Removes the verdict of an earlier run or fit, so that it is not taken for this one's.

    A part of the job's ranks leaves the verdict that other ranks have written in this run: they train beside it.

    Args:
        settings: The user's choices.
        rank: This rank.
        part: The ranks that begin this fit, by their numbers in the job, if they are not all of its ranks.

    Raises:
        SettingsError: If the file could not be written in the end, or something else would be overwritten by it.
    """
    path = settings.verdict_file
    if path is None:
        return
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        raise SettingsError(f"verdict_file={path!r} is in no directory of rank {rank}'s host: make {directory!r} first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SettingsError(f"verdict_file={path!r}: rank {rank} may not write in {directory!r}: choose another path")
    found = _find(path)
    if found is None:
        raise SettingsError(
            f"verdict_file={path!r} exists, and countoff has not written it: remove it, or choose another path"
        )
    with contextlib.suppress(OSError):  # what a rank left that was killed while it wrote
        os.unlink(temporary_beside(path, rank))
    if path in _begun:
        _before.pop(path, None)  # the attempt before is that of the first fit
    elif found:
        with contextlib.suppress(OSError):  # another rank may just have removed it
            if _is_of_an_earlier_run(path, part):
                _before[path] = found
    if found and (part or _is_first_of_host()):  # the host's first rank may be in no part, or in another one
        try:
            if _is_of_these_ranks(found, part) if path in _begun else _is_of_an_earlier_run(path, part):
                os.unlink(path)
        except OSError as error:
            if error.errno not in _GONE:
                raise SettingsError(
                    f"verdict_file={path!r}: rank {rank} may not replace it: {error.strerror}"
                ) from None
    _begun.add(path)


def seen_again(path: str, verdict: Verdict) -> str:
    """Says where a verdict was found, if the attempt before has ended with the same one at the same batch.

    A rank that has begun its fit later than the first one of its host knows of no attempt before.

    Args:
        path: Absolute path of the file of both.
        verdict: The verdict, with its table.

    Returns:
        The batch and the ranks, in words; empty if the attempt before ended otherwise, or has left no verdict there.
    """
    found = _before.get(path)
    if found is None or not verdict.ranks or formats.beyond(found.get("format"), formats.VERDICT_FILE):
        return ""
    told = document(verdict)
    place = _place(told)
    alike = all(found.get(key) == told[key] for key in ("kind", "ranks", "world_size"))
    alike = alike and _event(found) == _event(told) and _may_be_one_job(found, told)
    if place is None or not alike or _place(found) != place:
        return ""
    if verdict.restart == "may_help" and verdict.hosts and found.get("hosts") == told["hosts"]:
        return ""  # it may be that host: a restart without it may help
    where, batches = place
    return f"batch {batches} of {where}, {names_of(verdict.ranks)}"


def _event(verdict: Mapping[str, Any]) -> str:
    """What has happened, without the number of a process and the name of a host, which each attempt has anew."""
    sentence = re.sub(r"\(pid \d+\)", "", str(verdict.get("sentence")))
    hosts = verdict.get("hosts")
    for host in hosts.values() if isinstance(hosts, dict) else ():
        sentence = sentence.replace(f" on {host}", "")
    return sentence


def _may_be_one_job(found: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Whether nothing shows that two verdicts are of two jobs: the file of another one may lie at the same path."""
    ids = ("torchelastic_run_id", "slurm_job_id")
    runs = [verdict.get("run") for verdict in (found, told)]
    one, other = (run if isinstance(run, dict) else {} for run in runs)
    return all(one[key] == other[key] for key in ids if key in one and key in other)


def _place(verdict: Mapping[str, Any]) -> tuple[str, int] | None:
    """The span and the batch of the first row of a verdict's table that has them; a lost rank has no such row."""
    rows = verdict.get("rows")
    for row in rows if isinstance(rows, list) else ():
        where, batches = (row.get("where"), row.get("batches")) if isinstance(row, dict) else (None, None)
        if isinstance(where, str) and type(batches) is int and batches > 0:
            return where, batches
    return None


def write(path: str, verdict: Verdict, rank: int) -> str:
    """Writes a verdict's file, as a whole or not at all, within a few seconds.

    Args:
        path: Absolute path of the file; one that is there is replaced.
        verdict: The verdict.
        rank: This rank.

    Returns:
        Why it could not be written, in a few words; empty if it was.
    """
    problem = f"the file system has not answered for {WRITE_SECONDS:.0f} s"

    def attempt() -> None:
        nonlocal problem
        try:
            with _writing:
                text = json.dumps(document(verdict), indent=2, allow_nan=False)
                write_whole(path, rank, f"{text}\n".encode())
            problem = ""
        except Exception as error:  # the job must end as it would have without the file
            problem = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"

    writer = threading.Thread(target=attempt, name="countoff verdict file", daemon=True)
    try:
        writer.start()
    except RuntimeError:  # the interpreter is about to end, and starts no thread any more
        attempt()
    else:
        writer.join(WRITE_SECONDS)
    return problem


def _is_first_of_host() -> bool:
    """Whether this is the host's first rank; where no launcher says which one it is, each rank takes itself for it."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _is_of_these_ranks(found: Mapping[str, Any], part: Sequence[int]) -> bool:
    """Whether a file's verdict is about ranks that begin this fit, and about no others."""
    written = found.get("part")
    return not part or (isinstance(written, list) and all(rank in part for rank in written))


def _is_of_an_earlier_run(path: str, part: Sequence[int]) -> bool:
    """Whether a file is older than this process: the others may have a verdict before this rank begins its fit.

    Where a part of the ranks fits, they may have it at once: ranks that are forked with all imports fit in a second.
    """
    return os.stat(path).st_mtime < processes.began_at() + (0.0 if part else _STARTING_SECONDS)


def _find(path: str) -> dict[str, Any] | None:
    """The verdict at a path; empty if there is none, None if another program's file is there.

    An empty file, as `mktemp` makes it, is none.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            return None
        if not found.st_size:
            return {}
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        return {} if error.errno in _GONE else None
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.keys() >= _OWN_KEYS else None
