"""A part of a job's ranks that trains by itself, such as one of several trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Subgroup"]


@dataclass(frozen=True)
class Subgroup:
    """The ranks that one guard compares, where these are not all ranks of the job.

    Attributes:
        ranks: These ranks, by their numbers in the job, ascending.
        group: Their process group in torch, in whose store they meet.
        name: The group's name, equal on its ranks: several groups may have the same ones.
    """

    ranks: tuple[int, ...]
    group: Any
    name: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells the part from others, and holds no group."""
        return self.name, *self.ranks
