"""Reading numbers out of a nested mapping: where each is written, and which have a wrong type."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from countoff.core.arithmetic.ranks import ORDERS
from countoff.core.messages import nearest
from countoff.plan.issues import ConfigIssue, Level
from countoff.plan.job import Job, Origin

__all__ = ["ConfigError", "Count", "Fields"]

# More than any run has of anything, and small enough for the arithmetic of schedules, which are in floats.
_LARGEST = 10**18
# A value that refers to another field, as OmegaConf fills it in; and how many may follow each other.
_REFERENCE = re.compile(r"\$\{([\w-][\w.-]*)\}")
_MOST_REFERENCES = 20
# A number that PyYAML reads as text, as it has no dot or no sign. OmegaConf's own loader reads it as a number.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class ConfigError(ValueError):
    """A configuration that cannot be read. The message is one line and names the field."""


class Count(NamedTuple):
    """A whole number of a configuration.

    Attributes:
        paths: Where it may be written; the first path that is written wins.
        default: The framework's value where it is not written.
        unset: Values that mean "not set", such as -1 or ``auto``; they give the default.
        minimum: The smallest value that is allowed.
    """

    paths: str | tuple[str, ...]
    default: int | None = None
    unset: tuple[object, ...] = ()
    minimum: int = 1


class Fields:
    """The fields of one configuration.

    Args:
        data: The configuration, as nested mappings or objects with attributes.
        references: Whether a value that is ``${a.b}`` stands for that field of the file.

    Attributes:
        origins: Where each number that was read is written, by its name in a ``Job``.
        issues: What is wrong with the fields, or worth knowing about them.
    """

    def __init__(self, data: object, *, references: bool = False) -> None:
        self.origins: dict[str, Origin] = {}
        self.issues: list[ConfigIssue] = []
        self._data = data
        self._references = references

    def job(self, framework: str, order: str, mesh: Mapping[str, int | None], **numbers: Any) -> Job:
        """Returns the run that these fields describe.

        Args:
            framework: The name of the framework.
            order: The order of the dims of its mesh, a name in ``ORDERS``.
            mesh: The size of each dim by its name; a dim that is not here has one rank.
            **numbers: The other attributes of the run.
        """
        return Job(
            framework=framework,
            names=ORDERS[order].names,
            sizes=tuple(mesh.get(name) or 1 for name in ORDERS[order].names),
            data_dims=ORDERS[order].data_dims,
            **{"origins": self.origins, "issues": tuple(self.issues), **numbers},
        )

    def has(self, path: str) -> bool:
        """Whether a field is written in the configuration, with a value other than None."""
        return self.raw(path) is not None

    def section(self, path: str) -> Mapping[str, Any]:
        """Returns a section; an empty one if it is not there.

        Raises:
            ConfigError: If the value is not a section.
        """
        found = self.raw(path)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise ConfigError(f"{path} must be a section with fields, got {_shown(found)}")
        return cast("Mapping[str, Any]", found)

    def counts(self, table: Mapping[str, Count]) -> dict[str, int | None]:
        """Returns the whole numbers of a table, by their names in a ``Job``.

        Raises:
            ConfigError: As ``count`` does.
        """
        return {name: self.count(name, count) for name, count in table.items()}

    def count(self, name: str, count: Count) -> int | None:
        """Returns a whole number.

        Args:
            name: Its name in a ``Job``; empty if it has none there.
            count: Where it is written, and what is allowed.

        Raises:
            ConfigError: If it is not a whole number, is too small or over 10^18, or two of the paths disagree.
        """

        def check(path: str, value: object) -> int:
            return _parse_count(path, value, count.minimum)

        return self._read(name, count.paths, count.default, count.unset, check)

    def number(self, name: str, paths: str | tuple[str, ...], default: float | None = None) -> float | None:
        """Returns a number; the arguments are those of ``count``. A text that Python reads as a number is one.

        Raises:
            ConfigError: If it is not a finite number, or two of the paths disagree.
        """
        return self._read(name, paths, default, (), _parse_number)

    def choice(self, path: str, good: Iterable[str], default: str) -> str:
        """Returns one of a few words.

        Raises:
            ConfigError: If it is none of them.
        """
        found = self.raw(path)
        if found is None:
            return default
        allowed = list(good)
        if found not in allowed:
            hint = nearest(str(found), allowed)
            raise ConfigError(f"{path} must be one of {', '.join(allowed)}, got {_shown(found)}{hint}")
        return str(found)

    def flag(self, path: str, default: bool) -> bool:
        """Returns true or false.

        Raises:
            ConfigError: If it is neither.
        """
        found = self.raw(path)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise ConfigError(f"{path} must be true or false, got {_shown(found)}")
        return found

    def text(self, path: str) -> str | None:
        """Returns a field as text; None if it is not written."""
        found = self.raw(path)
        return None if found is None else str(found)

    def note(self, code: str, wrong: str, level: Level = "note", remedy: str = "") -> None:
        """Adds an issue."""
        self.issues.append(ConfigIssue(level, code, wrong, remedy))

    def raw(self, path: str) -> object:
        """Returns the value of a field, behind its references; None if it is not written."""
        found = self._written(path)
        for _ in range(_MOST_REFERENCES if self._references else 0):
            reference = _REFERENCE.fullmatch(found.strip()) if isinstance(found, str) else None
            if reference is None:
                return found
            found = self._written(reference[1])
            if found is None:
                raise ConfigError(f"{path}: ${{{reference[1]}}} refers to a field that is not in the file")
        if self._references:
            raise ConfigError(f"{path}: the file's ${{…}} refer to each other in a circle")
        return found

    def _written(self, path: str) -> object:
        found: object = self._data
        for part in path.split("."):
            if isinstance(found, Mapping):
                found = cast("Mapping[str, object]", found).get(part)
            else:
                found = getattr(found, part, None)
            if found is None:
                return None
        return found

    def _read(
        self,
        name: str,
        paths: str | tuple[str, ...],
        default: Any,
        unset: Iterable[object],
        check: Callable[[str, object], Any],
    ) -> Any:
        candidates = [paths] if isinstance(paths, str) else paths
        written = [path for path in candidates if self.raw(path) is not None]
        path = written[0] if written else candidates[0]
        value = self.raw(path)
        # Also of the same type, because True == 1.
        is_set = value is not None and not any(type(value) is type(one) and value == one for one in unset)
        if name:
            self.origins[name] = Origin(path, given=is_set)
        found = check(path, value) if is_set else default
        for other in written[1:]:
            if self.raw(other) != value:
                raise ConfigError(f"{path} is {_shown(value)} and {other} is {_shown(self.raw(other))}: keep one")
        return found


def _parse_count(path: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        number = value if isinstance(value, str) and _EXPONENT.fullmatch(value) else _shown(value)
        raise ConfigError(f"{path} must be a whole number of at least {minimum}, got {number}")
    if value > _LARGEST:
        raise ConfigError(f"{path} must be at most {_LARGEST:,}, got a number of {len(str(value))} digits")
    return value


def _parse_number(path: str, value: object) -> float:
    if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise ConfigError(f"{path} must be a finite number, got {_shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{path} must be a finite number, got {_shown(value)}") from None


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:60] + "…"
