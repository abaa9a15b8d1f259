"""The options of countoff: their defaults, their environment variables, and the one place that refuses a bad value.

Four requirements shaped this module. Every adapter has the same options under the same names. A job is started by a
script that somebody else wrote, so every option can be set from outside. A misspelt option must not pass for a guard
that is on, so unknown names are refused, in code and in the environment alike. And the refusal is one line, because a
hundred ranks print it.

Who wins: an argument given in code, then ``COUNTOFF_<NAME>`` in the environment, then the default. An argument of None
means "not given", an empty variable means "not set". ``enabled`` has the short name ``COUNTOFF`` and no other.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

__all__ = ["Settings", "SettingsError", "factory_enabled"]

_PREFIX = "COUNTOFF"
# What Kubernetes sets in every pod beside a Service that is called countoff: no options, and nobody's mistake.
_OTHER_VARIABLES = ("COUNTOFF_SERVICE_", "COUNTOFF_PORT")
_FLAG_TEXTS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


class SettingsError(ValueError):
    """An option has an unknown name or a bad value; the message is one line and says where it came from."""


class _Rule(NamedTuple):
    """What one option accepts: in words, from code, and from the text of an environment variable."""

    good: str
    check: Callable[[object], object]
    parse: Callable[[str], object]


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _flag_of_text(text: str) -> bool:
    try:
        return _FLAG_TEXTS[text.strip().lower()]
    except KeyError:
        raise ValueError from None


def _seconds(value: object) -> float:
    # bool is a subclass of int, and a flag that slipped into a duration is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError
    return seconds


def _at_least(minimum: int, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError
    return value


def _some_batches(value: object) -> int:
    # One batch proves nothing; the fingerprints of more do not fit into a record.
    batches = _at_least(0, value)
    if batches == 1 or batches > 32:
        raise ValueError
    return batches


def _ranks(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError
    ranks = sorted(_at_least(0, rank) for rank in cast("Iterable[object]", value))
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError
    return tuple(ranks)


def _ranks_of_text(text: str) -> list[int]:
    return [int(rank) for rank in text.split(",")]


def _choice(*good: str) -> _Rule:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in good:
            raise ValueError
        return value

    return _Rule(" or ".join(repr(one) for one in good), check, str.strip)


_SECONDS = _Rule("a finite number of seconds above 0", _seconds, float)
_RULES: dict[str, _Rule] = {
    "enabled": _Rule("True or False (in the environment: " + ", ".join(_FLAG_TEXTS) + ")", _flag, _flag_of_text),
    "on_divergence": _choice("raise", "warn"),
    "totals": _choice("log", "fix"),
    "uneven_eval": _choice("warn", "raise", "allow"),
    "eval_ranks": _Rule(
        "one or more different ranks of at least 0 (in the environment: 0,2,4)",
        _ranks,
        _ranks_of_text,
    ),
    "stall_seconds": _SECONDS,
    "grace_seconds": _SECONDS,
    "deadline_seconds": _SECONDS,
    "tick_batches": _Rule("a whole number of batches of at least 1", functools.partial(_at_least, 1), int),
    "fingerprint_batches": _Rule("0 (off) or a whole number of batches from 2 to 32", _some_batches, int),
}


@dataclass(frozen=True)
class Settings:
    """The options of one guard, checked; two of them are equal when all options are.

    Attributes:
        enabled: Whether the adapter does anything at all.
        on_divergence: What happens at a proof that ranks are out of step: an error on every rank, or a warning.
        totals: Whether true totals are only logged, or also put right in the framework where they are proven.
        uneven_eval: What unequal numbers of evaluation batches are: worth a warning, an error, or allowed.
        eval_ranks: The ranks that evaluate, ascending; None means every rank.
        stall_seconds: Seconds without progress of any rank before a stall is reported.
        grace_seconds: Seconds between a verdict and the end of a process whose main thread cannot be reached.
        deadline_seconds: Seconds for which the roll call before the first batch waits for missing ranks.
        tick_batches: Batches from one comparison of steps and learning rates to the next; equal on all ranks.
        fingerprint_batches: Batches at the beginning of every train epoch of which the data is compared; 0: none.

    Raises:
        SettingsError: If a value is outside the domain of its option.
    """

    enabled: bool = True
    on_divergence: Literal["raise", "warn"] = "raise"
    totals: Literal["log", "fix"] = "log"
    uneven_eval: Literal["warn", "raise", "allow"] = "warn"
    eval_ranks: tuple[int, ...] | None = None
    stall_seconds: float = 180.0
    grace_seconds: float = 3.0
    deadline_seconds: float = 60.0
    tick_batches: int = 64
    fingerprint_batches: int = 2

    def __post_init__(self) -> None:
        for name in _RULES:
            value: object = getattr(self, name)
            object.__setattr__(self, name, _checked(name, value, f"argument `{name}`"))

    @classmethod
    def resolve(cls, **given: object) -> Settings:
        """Returns the settings that hold for arguments given in code, the environment and the defaults, in this order.

        Every ``COUNTOFF_*`` variable is checked, also one that an argument overrides: a bad value is bad on the day on
        which the argument goes away.

        Args:
            **given: Options by name; None means that the option was not given.

        Returns:
            The settings, every value inside its domain.

        Raises:
            SettingsError: If an argument or a ``COUNTOFF_*`` variable is no option, or has a value outside its domain.

        Example:
            >>> Settings.resolve(totals="fix", tick_batches=None).totals
            'fix'
        """
        for name in given:
            if name not in _RULES:
                raise SettingsError(f"unknown argument `{name}`{_nearest(name, _RULES)}; known: {', '.join(_RULES)}")
        chosen = _from_environment(os.environ)
        chosen.update({name: value for name, value in given.items() if value is not None})
        return dataclasses.replace(cls(), **chosen)  # pyright: ignore[reportArgumentType]  # __post_init__ checks each


def factory_enabled() -> bool:
    """Returns whether an entry-point factory should put countoff into a Trainer for which nobody asked in code.

    Frameworks call such factories whenever a Trainer is made, and an exception there ends every training on the
    machine; so this raises nothing. ``COUNTOFF`` unset, empty or off gives False: installing countoff turns nothing on.
    A value that is neither on nor off gives True: who set it wanted something, and the adapter that is then made
    resolves its settings and refuses the value in one line, where silence would pass for a guard.

    Returns:
        True if ``COUNTOFF`` is set, not empty, and not one of the values for off.

    Example:
        >>> import os
        >>> os.environ["COUNTOFF"] = "off"
        >>> factory_enabled()
        False
        >>> del os.environ["COUNTOFF"]
    """
    text = os.environ.get(_PREFIX, "").strip().lower()
    return bool(text) and _FLAG_TEXTS.get(text, True)


def _variable(name: str) -> str:
    """Returns the environment variable of an option."""
    return _PREFIX if name == "enabled" else f"{_PREFIX}_{name.upper()}"


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Returns the options that the environment sets, checked, in the order of their names."""
    options = {_variable(name): name for name in _RULES}
    found: dict[str, object] = {}
    # Sorted, so that every rank complains of the same variable first.
    for variable in sorted(environ):
        if variable.startswith(_OTHER_VARIABLES) or not (variable == _PREFIX or variable.startswith(f"{_PREFIX}_")):
            continue
        if variable not in options:
            near = f"; did you mean {_PREFIX}?" if variable == f"{_PREFIX}_ENABLED" else _nearest(variable, options)
            raise SettingsError(f"unknown environment variable {variable}{near}; known: {', '.join(options)}")
        if environ[variable].strip():
            name, text = options[variable], environ[variable]
            found[name] = _checked(name, text, f"environment variable {variable}", parse=_RULES[name].parse)
    return found


def _checked(name: str, value: object, where: str, parse: Callable[[str], object] | None = None) -> object:
    """Returns a value in the form its option keeps; the one place that refuses."""
    rule = _RULES[name]
    try:
        return rule.check(parse(str(value)) if parse else value)
    except ValueError:
        shown = " ".join(repr(value).split())
        raise SettingsError(f"{where} must be {rule.good}, got {shown}") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
