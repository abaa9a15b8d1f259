"""What is known of each format of configurations, so that a file or a command of it can be recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from countoff.plan.fields import Fields
from countoff.plan.job import Job
from countoff.plan.launches import Launch

__all__ = ["Format"]


@dataclass(frozen=True)
class Format:
    """The configurations of one framework.

    Attributes:
        framework: Its name, as ``--framework`` takes it.
        read: Returns the run that parsed fields describe; raises ``ConfigError``.
        endings: The endings of its files; empty if it has commands only.
        fields: Fields that hardly any other program has, unlike ``data`` or ``optim``: the format with the most wins.
        arguments: The fields of a program that a command starts; None if its programs take no such flags.
        extends: The framework of a format whose fields its files have as well: one field of its own decides.
    """

    framework: str
    read: Callable[[Mapping[str, Any]], Job]
    endings: tuple[str, ...]
    fields: tuple[str, ...]
    arguments: Callable[[Launch], Mapping[str, Any]] | None = None
    extends: str | None = None

    def count(self, data: Mapping[str, Any]) -> int:
        """Returns how many of its own fields a configuration has."""
        fields = Fields(data)
        return sum(fields.has(field) for field in self.fields)
