"""Writes a file as a whole or not at all, whoever reads it or writes it at the same time."""

from __future__ import annotations

import contextlib
import os

__all__ = ["temporary_beside", "write_whole"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def temporary_beside(path: str, rank: int) -> str:
    """Returns a path beside a file for what is not complete yet; no other rank of the job uses it."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.countoff-{rank}.tmp")


def write_whole(path: str, rank: int, content: bytes, *, mode: int = 0o666) -> None:
    """Puts a new file in place of what is there.

    Args:
        path: The file.
        rank: This rank; its file that is not complete yet has a name of its own.
        content: What the file is to hold.
        mode: Its permissions, before those that the process's umask takes away.

    Raises:
        OSError: If that cannot be done; what was there is there still.
    """
    temporary = temporary_beside(path, rank)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # of a process that was killed meanwhile
    file = os.open(temporary, _NEW, mode)
    try:
        with open(file, "wb") as opened:
            opened.write(content)
        os.replace(temporary, path)
    except BaseException:  # an interrupt, too: nothing may stay beside the file
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
