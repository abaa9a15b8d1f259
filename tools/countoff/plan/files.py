"""The text of a configuration and what its file format makes of it: TOML, JSON or YAML."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from countoff.plan.fields import ConfigError

__all__ = ["data_of"]

_PROGRAMS = (".py", ".sh", ".bash", ".slurm", ".sbatch")
# Real configurations have below 100,000. YAML takes seconds for this many.
_MOST_CHARACTERS = 200_000


def data_of(path: Path) -> Mapping[str, Any]:
    """Returns the fields of a file.

    Raises:
        ConfigError: If it cannot be read, or is not what its ending says.
    """
    text = _text_of(path)
    if path.suffix in _PROGRAMS:
        raise ConfigError(
            f"{path} is a program, which is not read: give its configuration, or the command that starts the training, "
            f"after --: countoff check -- torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 4"
        )
    if path.suffix not in _PARSERS:
        raise ConfigError(f"{path} must end in {', '.join(_PARSERS)}, or be module:function, or a command after --")
    try:
        data = _PARSERS[path.suffix](text)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200] if isinstance(error, ValueError) else "it is nested too deeply"
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {why}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must hold named fields, got {type(data).__name__}")
    return cast("Mapping[str, Any]", data)


def _text_of(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        ConfigError: If it is not a file, not text, empty, or larger than any real configuration.
    """
    if not path.is_file():
        raise ConfigError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    try:
        is_huge = path.stat().st_size > 4 * _MOST_CHARACTERS
        text = "" if is_huge else path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {why}") from None
    if is_huge or len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"{path} has more than {_MOST_CHARACTERS:,} characters")
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    return text


def _toml(text: str) -> object:
    # Imported by name: type checkers do not know tomllib for Python 3.10, and tomli is not installed from 3.11 on.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return parser.loads(text)


def _yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{where}{error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: a character that YAML does not allow: {text[error.position]!r}") from None


_PARSERS: dict[str, Callable[[str], object]] = {".toml": _toml, ".json": json.loads, ".yaml": _yaml, ".yml": _yaml}
