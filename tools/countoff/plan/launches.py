"""One command that starts a training program: the flags of the program, and the ranks that the launcher starts."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from countoff.plan.fields import ConfigError

__all__ = ["Launch", "read_launch"]

_WHOLE = re.compile(r"[-+]?\d{1,18}")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_LAUNCH_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
}


class Size(NamedTuple):
    """A number of ranks.

    Attributes:
        ranks: The number.
        key: The flags of the launcher that give it.
    """

    ranks: int
    key: str


@dataclass(frozen=True)
class Launch:
    """One training program, as a command starts it.

    Attributes:
        program: The file or module that is started; empty if the command has flags alone.
        flags: Its flags, as they are written: a value, the list of several, or True for none.
        size: The ranks that the launcher starts; None if it does not say.
    """

    program: str
    flags: Mapping[str, object]
    size: Size | None

    @property
    def named_flags(self) -> Mapping[str, object]:
        """The flags by name, as argparse stores them: with underscores, and without dashes before it."""
        return _named(self.flags)


def read_launch(command: Sequence[str]) -> Launch:
    """Returns what one command starts.

    Args:
        command: The words of the command; or one string with all of them, as a shell splits it.

    Raises:
        ConfigError: If the quotes of the string are not closed.

    Example:
        >>> launch = read_launch(["torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --lr 1e-4 --bf16"])
        >>> launch.program, launch.flags, launch.size.ranks
        ('pretrain_gpt.py', {'--lr': 0.0001, '--bf16': True}, 16)
    """
    words = list(command)
    if len(words) == 1:
        try:
            words = shlex.split(words[0].replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise ConfigError(f"the command is no command of a shell: {str(error).lower()}") from None
    start = _program_index(words)
    if start is None:
        return Launch("", _flags(words), None)
    return Launch(words[start], _flags(words[start + 1 :]), _size(words[:start]))


def _program_index(words: Sequence[str]) -> int | None:
    """Returns where the program is: a Python file, or a module after ``-m``; None if it is not there."""
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] in ("-m", "--module") and word not in _LAUNCH_MODULES
        if is_module or (word.endswith(".py") and not word.startswith("-")):
            return index
    return None


def _flags(words: Sequence[str]) -> dict[str, object]:
    """Returns the flags with their values; of several equal flags the last one counts."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            values = found[name] = [value] if equals else []
        elif not word.startswith("-") or _NUMBER.fullmatch(word):
            values.append(word)
    return {name: _value(values) for name, values in found.items()}


def _named(flags: Mapping[str, object]) -> dict[str, object]:
    return {name[2:].replace("-", "_"): value for name, value in flags.items()}


def _value(words: Sequence[str]) -> object:
    values = [_typed(word) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _typed(word: str) -> object:
    """Returns a value as a number, or as true or false, if it is one; else as text."""
    if _WHOLE.fullmatch(word):
        return int(word)
    if _NUMBER.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    return _WORDS.get(word, word)


def _size(words: Sequence[str]) -> Size | None:
    """Returns the ranks that a launcher starts; None if it does not say."""
    flags = _named(_flags(words))
    names = {_LAUNCH_MODULES.get(word, word.rpartition("/")[2]) for word in words}
    if "accelerate" in names:
        per_node, nodes, key = flags.get("num_processes"), 1, "--num_processes"
    elif "torchrun" in names:
        per_node, nodes = flags.get("nproc_per_node"), flags.get("nnodes", 1)
        key = "--nproc_per_node × --nnodes" if "nnodes" in flags else "--nproc_per_node"
    elif "deepspeed" in names:
        per_node, nodes, key = flags.get("num_gpus"), flags.get("num_nodes", 1), "--num_gpus × --num_nodes"
    else:
        return None
    nodes = 1 if nodes == "1:1" else nodes
    is_known = all(type(number) is int and number >= 1 for number in (per_node, nodes))
    return Size(per_node * nodes, key) if is_known else None  # pyright: ignore[reportOperatorIssue]
