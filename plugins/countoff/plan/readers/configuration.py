"""Reads a configuration in whatever format it has: a file, a launch script, a command line, or a Python config."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from countoff.core.words import nearest
from countoff.plan.fields import ConfigError, misspelt, near_miss
from countoff.plan.files import SCRIPTS, data_of, standard_input, text_of
from countoff.plan.formats import Format
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job, Origin
from countoff.plan.unread import is_lightning_cli, plan_of_lightning_cli, plan_of_numbers

if TYPE_CHECKING:
    from countoff.plan.scripts.launches import Launch

__all__ = ["FORMATS", "read_job"]

# The modules beside this one, each with its FORMAT; also the order in which the formats are listed.
_READERS = (
    "torchtitan_toml",
    "lingua",
    "deepspeed",
    "accelerate",
    "composer",
    "megatron",
    "transformers",
    "axolotl",
    "llamafactory",
    "litgpt",
    "nemo",
    "verl",
)
FORMATS: dict[str, Format] = {
    found.framework: found
    for found in (importlib.import_module(f"countoff.plan.readers.{name}").FORMAT for name in _READERS)
}
"""All formats, by their framework."""
_LAUNCHED = [found.framework for found in FORMATS.values() if found.arguments is not None]
_MOST_NAMED = 8
_MOST_COMPARED = 200
"""Fields that are compared with those of the formats, where a file is in none of them."""


def read_job(name: str, *, framework: str | None = None) -> Job:
    """Returns the run that a configuration describes.

    Args:
        name: A file: TOML (TorchTitan), JSON (DeepSpeed, a Trainer, LLaMA-Factory) or YAML (all others); or a launch
            script or a file of arguments (Megatron-LM, verl, NeMo, a Trainer), which is read and not run; or ``-``, a
            command line on standard input; or ``module:function``, a Python config of TorchTitan, which is imported and
            called.
        framework: The framework of the file, one of ``FORMATS``; None: found by the fields of the file.

    Raises:
        ConfigError: If the configuration cannot be read, or contradicts itself; the message is one line.
    """
    if framework is not None and framework not in FORMATS:
        raise ConfigError(f"unknown framework {framework!r}{nearest(framework, FORMATS)}; known: {', '.join(FORMATS)}")
    if ":" in name and not Path(name).exists():
        from countoff.plan.readers import torchtitan_python

        return _named_in_errors(name, lambda: torchtitan_python.read(torchtitan_python.load(name)))
    if name == "-":
        return _named_in_errors("standard input", lambda: _read_script(standard_input(), framework))
    if Path(name).suffix in SCRIPTS:
        text = text_of(Path(name))
        return _named_in_errors(name, lambda: _read_script(text, framework))
    data = data_of(Path(name))
    kind = FORMATS[framework or _framework_of_file(data, name)]
    return _named_in_errors(name, lambda: kind.read(data))


def _named_in_errors(name: str, read: Callable[[], Job]) -> Job:
    """Returns what ``read`` returns, with a note for each value that is not known; an error names the configuration."""
    try:
        job = read()
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    notes = [
        ConfigIssue(
            "note", "unknown-value", f"{job.key(name)} is {text}, which is known only when the job runs: not read"
        )
        for name, text in job.unknown.items()
    ]
    return replace(job, issues=(*job.issues, *notes)) if notes else job


def _framework_of_file(data: Mapping[str, Any], name: str) -> str:
    """Returns the framework of a file by its ending and its fields.

    Raises:
        ConfigError: If it is in none of the formats, or in several: it is refused, never guessed.
    """
    if is_lightning_cli(data, for_sure=True):
        raise ConfigError(f"{name} is {_lightning_cli(data)}")
    found = {one.framework: one.count(data) for one in FORMATS.values() if name.endswith(one.endings)}
    for one in FORMATS.values():
        if one.extends is not None and found.get(one.framework):
            found.pop(one.extends, None)
    best = _most(found)
    if not best:
        unknown = f"{name} is in no format that countoff knows by its fields"
        give = f"give --framework {' | '.join(FORMATS)}"
        if hint := _nearest_format(dict.fromkeys(found, data)):
            raise ConfigError(f"{unknown}; {hint} If it is in another one: {give}")
        if is_lightning_cli(data, for_sure=False):
            raise ConfigError(f"{name} looks like {_lightning_cli(data)}")
        raise ConfigError(f"{unknown}; it reads {_known_formats()}. If it is one of these: {give}")
    if len(best) > 1:
        raise ConfigError(f"{name} has fields of {' and '.join(best)}: give --framework {' | '.join(best)}")
    return best[0]


def _lightning_cli(data: Mapping[str, Any]) -> str:
    """Returns what is said of a configuration of the Lightning CLI."""
    plan = plan_of_lightning_cli(data)
    return f"a configuration of the Lightning CLI, which countoff does not read yet; with its numbers as flags: {plan}"


def _most(counts: Mapping[str, int]) -> list[str]:
    """Returns the names with the largest count; none if that is 0."""
    largest = max(counts.values(), default=0)
    return [name for name, count in counts.items() if count == largest] if largest else []


def _nearest_format(data: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the format that has a field which is nearly one of the configuration's; an empty text if none has.

    Args:
        data: The fields of the configuration, as each format reads them.
    """
    slips: dict[str, list[tuple[str, str]]] = {}
    for framework, fields in data.items():
        known = FORMATS[framework].fields
        pairs = [(name, misspelt(name, known) or near_miss(name, known)) for name in _paths(fields)]
        slips[framework] = [(name, meant) for name, meant in pairs if meant is not None]
    best = _most({framework: len(found) for framework, found in slips.items()})
    if not best:
        return ""
    written, meant = slips[best[0]][0]
    formats = f"format is that of {best[0]}" if len(best) == 1 else f"formats are those of {' and '.join(best)}"
    return f"the nearest {formats}: did you mean {meant} in place of {written}?"


def _paths(data: Mapping[str, Any]) -> list[str]:
    """Returns the first fields of a configuration and of its sections, as ``train.max_tokens``."""
    found: list[str] = []
    for name, value in itertools.islice(data.items(), _MOST_COMPARED):
        inner = cast("Mapping[object, object]", value) if isinstance(value, Mapping) else {}
        found += [str(name), *(f"{name}.{field}" for field in itertools.islice(inner, _MOST_COMPARED))]
    return found[:_MOST_COMPARED]


def _known_formats() -> str:
    """Returns the endings that are read, each with the formats that have it."""
    kinds: dict[str, list[str]] = {}
    for one in FORMATS.values():
        for ending in one.endings:
            if ending != ".yml":  # read wherever .yaml is
                kinds.setdefault(ending, []).append(one.framework)
    kinds[".sh"] = _LAUNCHED
    return "; ".join(f"{ending} of {', '.join(names)}" for ending, names in kinds.items())


def _read_script(text: str, framework: str | None) -> Job:
    """Returns the run that a launch script starts.

    Raises:
        ConfigError: If it starts no training of a known framework, or more than one.
    """
    from countoff.plan.scripts.launches import read_launches

    launches = read_launches(text)
    found = [(launch, kind) for launch in launches for kind in _frameworks_of_launch(launch, framework)]
    if not found:
        hints = (_nearest_format({kind: _arguments(launch, kind) for kind in _LAUNCHED}) for launch in launches)
        hint = next(filter(None, hints), "")
        known = f"it starts no training that countoff knows by its arguments ({' | '.join(_LAUNCHED)})"
        raise ConfigError(f"{known}; {hint or f'with its numbers as flags: {_plan_by_flags(launches)}'}")
    if len(found) > 1:
        programs = [f"{launch.program or kind} in line {launch.line}" for launch, kind in found]
        more = f" and {len(programs) - _MOST_NAMED:,} more" if len(programs) > _MOST_NAMED else ""
        named = f"{', '.join(programs[:_MOST_NAMED])}{more}"
        raise ConfigError(f"it starts more than one training: {named}; give one of the commands to countoff check -")
    launch, kind = found[0]
    job = FORMATS[kind].read(_arguments(launch, kind))
    if job.world_size is not None or launch.size is None:
        return job
    size = launch.size
    origins = {**job.origins, "world_size": Origin(size.key)}
    return replace(job, world_size=size.ranks, ranks_per_node=size.per_node, origins=origins)


def _plan_by_flags(launches: Sequence[Launch]) -> str:
    """Returns the command that plans the last of several programs; the first ones often prepare it."""
    if not launches:
        return plan_of_numbers({}, None)
    last = launches[-1]
    return plan_of_numbers({**last.fields, **last.named_flags}, last.size.ranks if last.size else None)


def _frameworks_of_launch(launch: Launch, framework: str | None) -> list[str]:
    """Returns the framework of a program by its arguments; none if they are of none.

    Raises:
        ConfigError: If they are of several.
    """
    if framework is not None:
        return [framework] if framework in _LAUNCHED and _arguments(launch, framework) else []
    best = _most({kind: FORMATS[kind].count(_arguments(launch, kind)) for kind in _LAUNCHED})
    if len(best) > 1:
        raise ConfigError(f"it has arguments of {' and '.join(best)}: give --framework {' | '.join(best)}")
    return best


def _arguments(launch: Launch, framework: str) -> Mapping[str, Any]:
    arguments = FORMATS[framework].arguments
    return {} if arguments is None else arguments(launch)
