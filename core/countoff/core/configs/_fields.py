"""Reading numbers out of a nested mapping: where each came from, what has the wrong type, what nobody reads."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from countoff.core.configs.issues import ConfigIssue, Level
from countoff.core.configs.job import Origin

__all__ = ["ConfigError", "Fields", "nearest", "unread"]

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class ConfigError(ValueError):
    """A configuration that cannot be read. The message is one line and names the field."""


class Fields:
    """The fields of one configuration.

    Args:
        data: The configuration, as nested mappings or objects with attributes.
        framework: What reads it, for the messages.

    Attributes:
        origins: Where each number that was asked for came from.
        findings: What was noticed.
    """

    def __init__(self, data: object, framework: str) -> None:
        self.origins: dict[str, Origin] = {}
        self.issues: list[ConfigIssue] = []
        self._data = data
        self._framework = framework

    def has(self, path: str) -> bool:
        """Whether a field is written in the configuration, with another value than nothing."""
        return self._find(path) is not None

    def section(self, path: str) -> Mapping[str, Any]:
        """Returns a section, empty if there is none.

        Raises:
            ConfigError: If it is there and no section.
        """
        found = self._find(path)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise ConfigError(f"{path} must be a section with fields, got {_shown(found)}")
        return cast("Mapping[str, Any]", found)

    def check_count(
        self,
        name: str,
        paths: str | Iterable[str],
        default: int | None,
        *,
        minimum: int = 1,
        unset: Iterable[object] = (),
    ) -> int | None:
        """Returns a whole number.

        Args:
            name: Its name in a ``Job``; empty if it is none of a job's numbers.
            paths: Where it may be written; the first that is wins.
            default: What holds where it is not.
            minimum: The smallest value that is allowed.
            unset: Values that mean that it is not set, such as -1 or ``auto``; they give the default.

        Raises:
            ConfigError: If it is no whole number, or too small.
        """
        return self._read(name, paths, default, unset, lambda path, value: _whole(path, value, minimum))

    def number(self, name: str, paths: str | Iterable[str], default: float | None) -> float | None:
        """Returns a number, as ``whole``; text that is a number to Python is taken, with a note.

        Raises:
            ConfigError: If it is no number.
        """

        def check(path: str, value: object) -> float:
            if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
                self.note("exponent", f"{path} is {value}, which YAML reads as text: write {_with_dot(value.strip())}")
                return float(value)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{path} must be a finite number, got {_shown(value)}")
            return float(value)

        return self._read(name, paths, default, (), check)

    def choice(self, path: str, good: Iterable[str], default: str) -> str:
        """Returns one of some words.

        Raises:
            ConfigError: If it is none of them.
        """
        found = self._find(path)
        if found is None:
            return default
        allowed = list(good)
        if found not in allowed:
            hint = nearest(str(found), allowed)
            raise ConfigError(f"{path} must be one of {', '.join(allowed)}, got {_shown(found)}{hint}")
        return str(found)

    def flag(self, path: str, default: bool) -> bool:
        """Returns a yes or no.

        Raises:
            ConfigError: If it is neither.
        """
        found = self._find(path)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise ConfigError(f"{path} must be true or false, got {_shown(found)}")
        return found

    def text(self, path: str) -> str | None:
        """Returns a text or number as text, None if it is not there."""
        found = self._find(path)
        return None if found is None else str(found)

    def note(self, code: str, text: str, level: Level = "note") -> None:
        """Keeps a finding."""
        self.issues.append(ConfigIssue(level, code, text))

    def _find(self, path: str) -> object:
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
        paths: str | Iterable[str],
        default: Any,
        unset: Iterable[object],
        check: Callable[[str, object], Any],
    ) -> Any:
        every = [paths] if isinstance(paths, str) else list(paths)
        written = [path for path in every if self._find(path) is not None]
        path = written[0] if written else every[0]
        value = self._find(path)
        ignored = tuple(unset)
        is_set = value is not None and not any(type(value) is type(one) and value == one for one in ignored)
        if name:
            self.origins[name] = Origin(path, given=is_set)
        found = check(path, value) if is_set else default
        for other in written[1:]:
            if self._find(other) != value:
                raise ConfigError(f"{path} is {_shown(value)} and {other} is {_shown(self._find(other))}: keep one")
        return found


def unread(
    fields: Fields,
    known: Mapping[str, Iterable[str]],
    *,
    sections: Iterable[str],
    data: Mapping[str, Any],
    consequence: str,
    level: Level = "silent",
) -> None:
    """Notes every section and field that nothing reads, with the name that was probably meant.

    Args:
        fields: Where to keep what is found.
        known: The fields of those sections whose fields are known, by section; the empty name for the top level.
        sections: All sections that there are.
        data: The configuration.
        consequence: What the framework does with such a field.
        level: How bad that is, where the name is close to a known one; any other may be a field of somebody's own, and
            is a note.

    Raises:
        ConfigError: If one of the sections whose fields are known is no section.
    """
    every = [*sections]
    top = [*every, *known.get("", ())]
    for name in data:
        if name not in top:
            _say(fields, name, nearest(name, top), consequence, level)
        elif name in known:
            good = [*known[name]]
            for field in fields.section(name):
                if field not in good:
                    hint = _elsewhere(str(field), name, known) or nearest(str(field), good)
                    _say(fields, f"{name}.{field}", hint, consequence, level)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean …?`` if something known looks like the name, else nothing.

    Example:
        >>> nearest("bacth_size", ["batch_size", "seq_len"])
        '; did you mean batch_size?'
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _say(fields: Fields, name: str, hint: str, consequence: str, level: Level) -> None:
    if hint:
        fields.note("unknown-field", f"there is no {name}{hint} {consequence}", level)
    else:
        fields.note("unknown-field", f"{name} is not a field that countoff knows: is it one of your own?")


def _elsewhere(field: str, section: str, known: Mapping[str, Iterable[str]]) -> str:
    homes = [home for home, names in known.items() if home and home != section and field in names]
    return f"; did you mean {homes[0]}.{field}?" if homes else ""


def _whole(path: str, value: object, minimum: int) -> int:
    if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
        raise ConfigError(
            f"{path} must be a whole number of at least {minimum}, got the text {value!r}: YAML reads an exponent "
            f"without a dot as text"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{path} must be a whole number of at least {minimum}, got {_shown(value)}")
    return value


def _with_dot(text: str) -> str:
    mantissa, exponent = re.split("[eE]", text)
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:60] + "…"
