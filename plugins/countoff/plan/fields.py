"""Reading numbers out of a nested mapping: where each is written, which have a wrong type, which nothing reads."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from countoff.core.words import nearest
from countoff.plan.issues import ConfigIssue, Level
from countoff.plan.job import Origin

__all__ = ["ConfigError", "Fields", "JsonObject", "misspelt", "near_miss", "note_unknown_fields"]

# More than any run has of anything, and small enough for the arithmetic of schedules, which are in floats.
_LARGEST = 10**18
# How much of two names must be the same, from 0 to 1, for one to be a slip of the other.
_NEAR = 0.9
# A value that refers to another field, as OmegaConf fills it in; and how many may follow each other.
_REFERENCE = re.compile(r"\$\{([\w-][\w.-]*)\}")
_MOST_REFERENCES = 20
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class ConfigError(ValueError):
    """A configuration that cannot be read. The message is one line and names the field."""


class JsonObject(dict[str, Any]):
    """The fields of a JSON file, in which a number is a text only if it is in quotes."""


class Fields:
    """The fields of one configuration.

    Args:
        data: The configuration, as nested mappings or objects with attributes.
        reads_exponents: Whether the framework takes 3e-4 for a number, which YAML reads as text.
        text_numbers: What the framework does with such a text otherwise, as a clause; empty if that is not known.
        references: Whether a value that is ``${a.b}`` stands for that field of the file.

    Attributes:
        origins: Where each number that was read is written, by its name in a ``Job``.
        issues: What is wrong with the fields, or worth knowing about them.
    """

    def __init__(
        self, data: object, *, reads_exponents: bool = False, text_numbers: str = "", references: bool = False
    ) -> None:
        self.origins: dict[str, Origin] = {}
        self.issues: list[ConfigIssue] = []
        self._data = data
        self._is_json = isinstance(data, JsonObject)
        self._reads_exponents = reads_exponents
        self._text_numbers = text_numbers
        self._references = references

    def has(self, path: str) -> bool:
        """Whether a field is written in the configuration, with a value other than None."""
        return self._find(path) is not None

    def section(self, path: str) -> Mapping[str, Any]:
        """Returns a section; an empty one if it is not there.

        Raises:
            ConfigError: If the value is not a section.
        """
        found = self._find(path)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise ConfigError(f"{path} must be a section with fields, got {_shown(found)}")
        return cast("Mapping[str, Any]", found)

    def parse_count(
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
            name: Its name in a ``Job``; empty if it has none there.
            paths: Where it may be written; the first path that is written wins.
            default: The value where it is not written.
            minimum: The smallest value that is allowed.
            unset: Values that mean "not set", such as -1 or ``auto``; they give the default.

        Raises:
            ConfigError: If it is not a whole number, is too small or over 10^18, or two of the paths disagree.
        """

        def check(path: str, value: object) -> int:
            if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()) and not self._is_json:
                raise ConfigError(
                    f"{path} must be a whole number of at least {minimum}, got the text {value!r}: YAML reads an "
                    f"exponent without a dot as text"
                )
            return _parse_count(path, value, minimum)

        return self._read(name, paths, default, unset, check)

    def number(self, name: str, paths: str | Iterable[str], default: float | None) -> float | None:
        """Returns a number; the arguments are those of ``parse_count``.

        A text that Python reads as a number is accepted, with a note if the framework does not.

        Raises:
            ConfigError: If it is not a finite number, or two of the paths disagree.
        """

        def check(path: str, value: object) -> float:
            if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()) and math.isfinite(float(value)):
                if not self._reads_exponents:
                    self.note("exponent", self._text_number(path, value))
                return float(value)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
                raise ConfigError(f"{path} must be a finite number, got {_shown(value)}")
            try:
                return float(value)
            except OverflowError:
                raise ConfigError(f"{path} must be a finite number, got {_shown(value)}") from None

        return self._read(name, paths, default, (), check)

    def _text_number(self, path: str, value: str) -> str:
        """Returns the text of the issue of a number that the framework reads as text."""
        so = f"{self._text_numbers}; " if self._text_numbers else ""
        if self._is_json:
            return f'{path} is "{value}", a text because of its quotes: {so}write {value.strip()}'
        return f"{path} is {value}, which YAML reads as text: {so}write {_with_dot(value.strip())}"

    def choice(self, path: str, good: Iterable[str], default: str) -> str:
        """Returns one of a few words.

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
        """Returns true or false.

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
        """Returns a field as text; None if it is not written."""
        found = self._find(path)
        return None if found is None else str(found)

    def raw(self, path: str) -> object:
        """Returns a field as it is; None if it is not written."""
        return self._find(path)

    def note(self, code: str, text: str, level: Level = "note") -> None:
        """Adds an issue."""
        self.issues.append(ConfigIssue(level, code, text))

    def _find(self, path: str) -> object:
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
        paths: str | Iterable[str],
        default: Any,
        unset: Iterable[object],
        check: Callable[[str, object], Any],
    ) -> Any:
        candidates = [paths] if isinstance(paths, str) else list(paths)
        written = [path for path in candidates if self._find(path) is not None]
        path = written[0] if written else candidates[0]
        value = self._find(path)
        # Also of the same type, because True == 1.
        is_set = value is not None and not any(type(value) is type(one) and value == one for one in unset)
        if name:
            self.origins[name] = Origin(path, given=is_set)
        found = check(path, value) if is_set else default
        for other in written[1:]:
            if self._find(other) != value:
                raise ConfigError(f"{path} is {_shown(value)} and {other} is {_shown(self._find(other))}: keep one")
        return found


def note_unknown_fields(
    fields: Fields,
    known: Mapping[str, Iterable[str]],
    *,
    sections: Iterable[str],
    data: Mapping[str, Any],
    consequence: str,
    level: Level = "silent",
) -> None:
    """Adds an issue for every section and field that nothing reads, with the name that was probably meant.

    Args:
        fields: The fields to which the issues are added.
        known: The fields of the sections whose fields are known, by section; the empty name is the top level.
        sections: All sections that the format has.
        data: The configuration.
        consequence: What the framework does with an unknown field.
        level: Level of the issue where the name is close to a known one. Any other name may be a field of the user's
            own, and gives a note.

    Raises:
        ConfigError: If one of the sections whose fields are known is not a section.
    """
    top = [*sections, *known.get("", ())]
    for name in data:
        if name not in top:
            _note_unknown(fields, name, nearest(name, top), consequence, level)
        elif name in known:
            good = [*known[name]]
            for field in fields.section(name):
                if field not in good:
                    hint = _in_another_section(str(field), name, known) or nearest(str(field), good)
                    _note_unknown(fields, f"{name}.{field}", hint, consequence, level)


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that differs only by dashes, underscores, ``model`` or a plural; None if there is none.

    It is strict, for formats of which only some names are known: a name that merely looks like one is left alone.

    Example:
        >>> misspelt("--micro_batch_sizes", ["--micro-batch-size"]), misspelt("--eval-iters", ["--train-iters"])
        ('--micro-batch-size', None)
    """
    good = list(known)
    plain = _plain(name)
    return None if name in good else next((one for one in good if _plain(one) == plain), None)


def near_miss(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name from which the given one differs by a letter or two; None if there is none.

    Example:
        >>> near_miss("--globl-batch-size", ["--global-batch-size"]), near_miss("--eval-iters", ["--train-iters"])
        ('--global-batch-size', None)
    """
    good = list(known)
    return None if name in good else next(iter(difflib.get_close_matches(name, good, n=1, cutoff=_NEAR)), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]|model|s(?=[-_]|$)", "", name.lower())


def _note_unknown(fields: Fields, name: str, hint: str, consequence: str, level: Level) -> None:
    if hint:
        fields.note("unknown-field", f"there is no {name}{hint} {consequence}", level)
    else:
        fields.note("unknown-field", f"{name} is not a field that countoff knows: is it one of your own?")


def _in_another_section(field: str, section: str, known: Mapping[str, Iterable[str]]) -> str:
    others = [other for other, names in known.items() if other and other != section and field in names]
    return f"; did you mean {others[0]}.{field}?" if others else ""


def _parse_count(path: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{path} must be a whole number of at least {minimum}, got {_shown(value)}")
    if value > _LARGEST:
        raise ConfigError(f"{path} must be at most {_LARGEST:,}, got a number of {len(str(value))} digits")
    return value


def _with_dot(text: str) -> str:
    mantissa, exponent = re.split("[eE]", text)
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:60] + "…"
