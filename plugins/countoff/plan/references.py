"""References of a YAML file to its own fields: ``${a.b}``, as OmegaConf fills them in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from countoff.plan.fields import ConfigError, Unknown

__all__ = ["with_references"]

_ABSOLUTE = re.compile(r"\$\{([\w-][\w.-]*)\}")
_ANY = re.compile(r"\$\{(\.*)([\w-][\w.-]*)\}")
_DEEPEST = 20
_MOST_VALUES = 1_000_000


def with_references(data: Mapping[str, Any], *, relative: bool = False) -> Mapping[str, Any]:
    """Returns a file in which every text that is ``${a.b}`` is replaced by that field of the file.

    Args:
        data: The parsed file.
        relative: Whether a reference may begin with dots: ``${.a}`` is a field beside it, ``${..a}`` one beside its
            section. Then a reference to a field that is not in the file is ``Unknown``, because such a file is often
            completed by others, and so is a function, such as ``${multiply:…}``.

    Raises:
        ConfigError: If the references go round in a circle, or, if not relative, one leads to no field of the file.
    """
    return cast("Mapping[str, Any]", _Filling(data, relative).filled(data, (), 0))


class _Filling:
    """Fills in the references of one file."""

    def __init__(self, root: Mapping[str, Any], relative: bool) -> None:
        self.root = root
        self.relative = relative
        self.values = 0

    def filled(self, value: object, place: tuple[str, ...], depth: int) -> object:
        """Returns a value with all that it refers to; ``place`` is where it is in the file."""
        self.values += 1
        if depth > _DEEPEST:
            raise ConfigError("the file's ${…} refer to each other in a circle, or it is nested too deeply")
        if self.values > _MOST_VALUES:
            raise ConfigError(f"the file's ${{…}} make more than {_MOST_VALUES:,} values of it")
        if isinstance(value, Mapping):
            section = cast("Mapping[str, object]", value)
            return {key: self.filled(one, (*place, str(key)), depth + 1) for key, one in section.items()}
        if isinstance(value, list):
            return [self.filled(one, place, depth + 1) for one in cast("list[object]", value)]
        found = (_ANY if self.relative else _ABSOLUTE).fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            is_function = self.relative and isinstance(value, str) and value.startswith("${") and value.endswith("}")
            return Unknown(str(value)) if is_function else value
        path = tuple(found[found.lastindex or 1].split("."))
        if self.relative and found[1]:
            path = (*place[: max(len(place) - len(found[1]), 0)], *path)
        target: object = self.root
        for part in path:
            target = cast("Mapping[str, object]", target).get(part) if isinstance(target, Mapping) else None
        if target is None and self.relative:
            return Unknown(found[0])
        if target is None:
            raise ConfigError(f"${{{found[1]}}} refers to a field that is not in the file")
        return self.filled(target, path, depth + 1)
