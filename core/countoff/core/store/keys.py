"""Keys of the store that several modules must build alike."""

from __future__ import annotations

__all__ = ["heartbeat_key", "pack_key"]


def heartbeat_key(rank: int) -> str:
    """Returns the key of the heartbeats of a rank that has no voice; those of the first rank also tell its time."""
    return f"heartbeat/{rank}"


def pack_key(name: str, voice: int) -> str:
    """Returns the key of what the ranks that have one voice have reported under a name.

    >>> pack_key("span/3", 12)
    'span/3@12'
    """
    return f"{name}@{voice}"
