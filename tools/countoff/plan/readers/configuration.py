"""Reads a configuration in whatever format it has: a file, the command that starts a program, or a Python config."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from countoff.core.messages import nearest
from countoff.plan.fields import ConfigError
from countoff.plan.files import data_of
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.launches import read_launch

__all__ = ["FORMATS", "read_command", "read_job"]

# The modules beside this one, each with its FORMAT; also the order in which the formats are listed.
_READERS = (
    "torchtitan_toml",
    "lingua",
    "deepspeed",
    "accelerate",
    "composer",
    "megatron",
    "transformers",
    "llamafactory",
)
FORMATS: dict[str, Format] = {
    found.framework: found
    for found in (importlib.import_module(f"countoff.plan.readers.{name}").FORMAT for name in _READERS)
}
"""All formats, by their framework."""


def read_job(name: str, *, framework: str | None = None) -> Job:
    """Returns the run that a configuration describes.

    Args:
        name: A file: TOML (TorchTitan), JSON (DeepSpeed, a Trainer, LLaMA-Factory) or YAML (all others); or
            ``module:function``, a Python config of TorchTitan, which is imported and called.
        framework: The framework of the file, one of ``FORMATS``; None: found by the fields of the file.

    Raises:
        ConfigError: If the configuration cannot be read, or contradicts itself; the message is one line.
    """
    _check_framework(framework)
    if ":" in name and not Path(name).exists():
        from countoff.plan.readers import torchtitan_python

        return _named_in_errors(name, lambda: torchtitan_python.read(torchtitan_python.load(name)))
    data = data_of(Path(name))
    kind = FORMATS[framework or _framework_of_file(data, name)]
    return _named_in_errors(name, lambda: kind.read(data))


def read_command(command: Sequence[str], *, framework: str | None = None) -> Job:
    """Returns the run that a command starts.

    Args:
        command: Its words, or one string with all of them.
        framework: The framework of its flags, one of ``FORMATS``; None: found by the flags.

    Raises:
        ConfigError: If the flags are those of no known framework, or contradict each other; the message is one line.
    """
    _check_framework(framework)
    launch = read_launch(command)
    launched = {name: one.arguments(launch) for name, one in FORMATS.items() if one.arguments is not None}
    found = {name: FORMATS[name].count(flags) for name, flags in launched.items()}
    best = [framework] if framework in launched else _most(found)
    if len(best) != 1:
        raise ConfigError(
            f"the command has flags of {' and '.join(best) or 'no framework that countoff knows'}: "
            f"give --framework {' | '.join(launched)}, or the numbers of the run to countoff plan as flags"
        )
    job = _named_in_errors(launch.program or "the command", lambda: FORMATS[best[0]].read(launched[best[0]]))
    if launch.size is None:
        return job
    origins = {**job.origins, "world_size": Origin(launch.size.key)}
    return replace(job, world_size=launch.size.ranks, origins=origins)


def _check_framework(framework: str | None) -> None:
    if framework is not None and framework not in FORMATS:
        raise ConfigError(f"unknown framework {framework!r}{nearest(framework, FORMATS)}; known: {', '.join(FORMATS)}")


def _named_in_errors(name: str, read: Callable[[], Job]) -> Job:
    """Returns what ``read`` returns; an error names the configuration."""
    try:
        return read()
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _framework_of_file(data: Mapping[str, Any], name: str) -> str:
    """Returns the framework of a file by its ending and its fields.

    Raises:
        ConfigError: If it is in none of the formats, or in several: it is refused, never guessed.
    """
    found = {one.framework: one.count(data) for one in FORMATS.values() if name.endswith(one.endings)}
    for one in FORMATS.values():
        if one.extends is not None and found.get(one.framework):
            found.pop(one.extends, None)
    best = _most(found)
    if len(best) != 1:
        has = f"has fields of {' and '.join(best)}" if best else "is in no format that countoff knows by its fields"
        raise ConfigError(
            f"{name} {has}: give --framework {' | '.join(best or found)}, or the numbers of the run to countoff plan "
            f"as flags"
        )
    return best[0]


def _most(counts: Mapping[str, int]) -> list[str]:
    """Returns the names with the largest count; none if that is 0."""
    largest = max(counts.values(), default=0)
    return [name for name, count in counts.items() if count == largest] if largest else []
