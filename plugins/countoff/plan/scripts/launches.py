"""The training programs that a script starts: their arguments, and on how many ranks.

A program is read if its arguments are flags (``--micro-batch-size 4``), as those of
Megatron-LM and of transformers' examples, or fields of a configuration (``trainer.nnodes=2``), as Hydra takes them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from countoff.plan.fields import Unknown
from countoff.plan.scripts.commands import Command, read_commands
from countoff.plan.scripts.unknown import as_written, is_unknown, unknown_parts

__all__ = ["Launch", "read_launches"]

_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "python", "python3", "srun", "mpirun", "mpiexec", "nohup", "env")
_LAUNCH_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)(?:=(.*))?", re.DOTALL)
# More sections than any field has around it.
_DEEPEST = 20
_WHOLE = re.compile(r"[-+]?\d{1,18}")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class Size(NamedTuple):
    """A number of ranks, and the arguments that give it.

    Attributes:
        ranks: The number.
        key: The arguments.
        per_node: Ranks on each machine, where they say that.
    """

    ranks: int
    key: str
    per_node: int | None = None


@dataclass(frozen=True)
class Launch:
    """One training program that a script starts.

    Attributes:
        program: The file or module that is started; empty if its name is not known.
        flags: The arguments that begin with ``--``, as written: a value, the list of several, or True for none.
        fields: The arguments ``name=value``, as nested sections.
        size: The ranks that the launcher starts; None if that is not known.
        line: Where the command begins, counted from 1.
    """

    program: str
    flags: Mapping[str, object]
    fields: Mapping[str, Any]
    size: Size | None
    line: int

    @property
    def named_flags(self) -> Mapping[str, object]:
        """The flags by name, without dashes before it and with underscores in it, as argparse stores them."""
        return {name[2:].replace("-", "_"): value for name, value in self.flags.items()}


def read_launches(text: str) -> list[Launch]:
    """Returns the programs that a script starts with a launcher or with Python, in order, each once.

    Args:
        text: The script, or one command line, or the arguments alone.

    Raises:
        ConfigError: If the script is not well-formed.

    Example:
        >>> launch = read_launches("N=4; torchrun --nproc_per_node $((N * 2)) pretrain_gpt.py --lr 1e-4 --bf16")[0]
        >>> launch.program, launch.flags, launch.size.ranks
        ('pretrain_gpt.py', {'--lr': 0.0001, '--bf16': True}, 8)
    """
    found: dict[str, Launch] = {}
    for command in _joined(read_commands(text)):
        launch = _launch(command)
        if launch is None:
            continue
        arguments = json.dumps([launch.flags, launch.fields], sort_keys=True, default=repr)
        same = found.setdefault(arguments, launch)
        if same.size != launch.size:
            # The same program on one machine or on many, as the script decides when it runs.
            found[arguments] = replace(same, size=None)
    return list(found.values())


def _joined(commands: Iterable[Command]) -> list[Command]:
    """Returns the commands, with lines that are arguments alone joined to one."""
    found: list[Command] = []
    for command in commands:
        if found and all(one.words[0].startswith("--") for one in (found[-1], command)):
            found[-1] = found[-1]._replace(words=(*found[-1].words, *command.words))
        else:
            found.append(command)
    return found


def _launch(command: Command) -> Launch | None:
    words = command.words
    start = _program_index(words)
    is_launched = is_unknown(words[0]) or words[0].startswith("--") or start == 0
    if not is_launched and not any(_base(word) in _LAUNCHERS for word in words[:start]):
        return None
    if start is None:
        before, program, arguments = words, "", words
    else:
        before, program, arguments = words[:start], words[start], words[start + 1 :]
    flags = _flags([word for word in arguments if not _is_override(word)] if start is not None else list(arguments))
    fields = _fields(arguments)
    name = as_written(_base(program) if program.endswith(".py") else program)
    return Launch(name, flags, fields, _size(before), command.line)


def _program_index(words: Sequence[str]) -> int | None:
    """Returns where the name of the program is: a Python file, or a module after ``-m``; None if it is not there."""
    for index, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-") and " " not in word:
            return index
        if index and words[index - 1] in ("-m", "--module") and word not in _LAUNCH_MODULES and not is_unknown(word):
            return index
    return None


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _is_override(word: str) -> bool:
    return not word.startswith("-") and "=" in word and _OVERRIDE.fullmatch(word) is not None


def _flags(words: Sequence[str]) -> dict[str, object]:
    """Returns the flags with their values; the last of several equal flags counts."""
    found: dict[str, object] = {}
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--") or is_unknown(word.partition("=")[0]):
            # One with a single dash is a launcher's, or a number below 0.
            if not word.startswith("-") or _WHOLE.fullmatch(word):
                values.append(word)
            continue
        if name:
            found[name] = _value_of(values)
        name, _, value = word.partition("=")
        values = [value] if "=" in word else []
    found.pop("--", None)
    return found


def _value_of(words: Sequence[str]) -> object:
    if not words:
        return True
    if len(words) > 1 and all(is_unknown(word) for word in words[1:]):
        # What follows one value may be further arguments: the value itself is known.
        words = words[:1]
    values = [_typed(word) for word in words]
    return values[0] if len(values) == 1 else values


def _typed(word: str) -> object:
    """Returns a value as a number if it is one, an unknown one as ``Unknown``, else as text."""
    if is_unknown(word):
        return Unknown(unknown_parts(word))
    if _WHOLE.fullmatch(word):
        return int(word)
    try:
        number = float(word)
    except ValueError:
        return word
    return number if math.isfinite(number) or word.strip().lower() in ("nan", "inf", "-inf") else word


def _fields(words: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments ``a.b=value`` as nested sections.

    A choice of a file for a whole section, such as ``optim=adam``, gives way to fields of that section.
    """
    data: dict[str, Any] = {}
    for word in words:
        found = _OVERRIDE.fullmatch(word) if _is_override(word) else None
        if found is None or found[3] is None or is_unknown(found[2]):
            continue
        *sections, name = found[2].split(".")
        if len(sections) > _DEEPEST:
            continue
        place = data
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = cast("dict[str, Any]", place[section])
        value = found[3]
        if not isinstance(place.get(name), dict):
            place[name] = _WORDS[value.lower()] if value.lower() in _WORDS else _typed(value.strip("'\""))
    return data


def _size(words: Sequence[str]) -> Size | None:
    """Returns the ranks that a launcher starts; None if it does not say, or it cannot be known."""
    flags = {name.lstrip("-").replace("-", "_"): value for name, value in _flags(words).items()}
    names = [_base(word) for word in words]
    if "accelerate" in names:
        total = flags.get("num_processes")
        return Size(total, "--num_processes") if isinstance(total, int) and total >= 1 else None
    if "torchrun" in names or "torch.distributed.run" in words or "torch.distributed.launch" in words:
        per_node, nodes = flags.get("nproc_per_node"), flags.get("nnodes", 1)
        key = "--nproc_per_node × --nnodes" if "nnodes" in flags else "--nproc_per_node"
    elif "deepspeed" in names:
        per_node, nodes, key = flags.get("num_gpus"), flags.get("num_nodes", 1), "--num_gpus × --num_nodes"
    else:
        return None
    nodes = int(nodes[2:]) if isinstance(nodes, str) and re.fullmatch(r"1:1", nodes) else nodes
    if not (isinstance(per_node, int) and isinstance(nodes, int) and per_node >= 1 and nodes >= 1):
        return None
    return Size(per_node * nodes, key, per_node)
