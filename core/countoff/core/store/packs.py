"""Packs: the reports of all ranks of one host as one record, in which what they have in common stands once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from countoff.core.protocol.records import Records, parse_count

__all__ = ["PACK_BYTES", "pack", "unpack"]

PACK_BYTES = 1 << 20
"""A pack has at most as many bytes: the records of a thousand ranks that have nothing in common."""
_ABSENT = object()


def pack(records: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One record for those of several ranks; `unpack` is its inverse.

    Args:
        records: A record of each rank, as JSON types.

    Example:
        >>> pack({8: {"steps": 4, "loader": 0.5}, 9: {"steps": 4, "loader": 0.25}})
        {'same': {'steps': 4}, 'each': {'8': {'loader': 0.5}, '9': {'loader': 0.25}}}
    """
    same, rests = _split(list(records.values()))
    return {"same": same, "each": {str(rank): rest for rank, rest in zip(records, rests, strict=True)}}


def unpack(record: Mapping[str, Any]) -> Records:
    """The records of the ranks in a pack, as untrusted input.

    Raises:
        KeyError, TypeError, ValueError: If it is no pack.
    """
    same, each = record["same"], record["each"]
    if (
        not isinstance(same, dict)
        or not isinstance(each, dict)
        or not all(isinstance(rest, dict) for rest in each.values())
    ):
        raise ValueError(f"expected the reports of a host's ranks, got {str(record)[:80]}")
    return {parse_count(int(rank)): _merged(same, rest) for rank, rest in each.items()}


def _split(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all records have in common, and the rest of each."""
    same: dict[str, Any] = {}
    rests: list[dict[str, Any]] = [{} for _ in records]
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name, _ABSENT) for record in records]
        if all(value == values[0] and type(value) is type(values[0]) for value in values):
            same[name] = values[0]
        elif all(isinstance(value, dict) for value in values):
            same[name], inner = _split(values)
            for rest, left in zip(rests, inner, strict=True):
                if left:
                    rest[name] = left
        else:
            for rest, record in zip(rests, records, strict=True):
                if name in record:
                    rest[name] = record[name]
    return same, rests


def _merged(same: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**same, **rest}
    for name in same.keys() & rest.keys():
        if isinstance(same[name], dict) and isinstance(rest[name], dict):
            merged[name] = _merged(same[name], rest[name])
    return merged
