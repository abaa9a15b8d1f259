"""The options of countoff: their defaults, their environment variables, and the check of every value.

Four requirements shaped this module. Every adapter has the same options under the same names. Jobs are often started by
scripts that the user cannot change, so every option that is no function has an environment variable. A misspelt option
must not look as if it were set, so unknown names are refused in code and in the environment. An error is one line,
because hundreds of ranks print it.

Precedence: an argument in code, then ``COUNTOFF_<NAME>`` in the environment, then the default. An argument of None
means "not given"; an empty variable means "not set". The only variable of ``enabled`` is ``COUNTOFF``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, cast

from countoff.core.finding import Finding
from countoff.core.flag import FLAG, FLAG_TEXTS
from countoff.core.levels import checked, parsed
from countoff.core.messages import nearest
from countoff.core.verdict import Level

__all__ = ["SECRET_OPTIONS", "OptionValues", "Settings", "SettingsError", "variable_of"]

# Kubernetes sets these in every pod if a Service is named countoff; they are not options.
_SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?")
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://\S")
_NEEDED_TO_BE_EVEN: tuple[str, ...] = ("PlanMismatch", "UnevenBatches", "LostRank", "LateRank")
"""Kinds that must end a job in which ranks wait for one another's batches."""


class SettingsError(ValueError):
    """An option has an unknown name or a bad value; the message is one line and names the argument or variable."""


class OptionValues(TypedDict, total=False):
    """The options as keyword arguments, for type checkers: ``**options: Unpack[OptionValues]``.

    Each has the meaning that it has in `Settings`, and None means that it is not given.
    """

    enabled: bool | None
    on_divergence: Literal["raise", "warn"] | None
    levels: Mapping[str, Level] | None
    totals: Literal["show", "fix", "off"] | None
    uneven_train: Literal["raise", "stop"] | None
    uneven_eval: Literal["warn", "raise", "allow", "off", "stop"] | None
    stall_seconds: float | None
    lost_seconds: float | None
    deadline_seconds: float | None
    compare_data: bool | None
    weights_every: int | None
    verdict_file: str | os.PathLike[str] | None
    trace_dir: str | os.PathLike[str] | None
    notify: str | Iterable[str] | None
    on_finding: Callable[[Finding], object] | None


class _Rule(NamedTuple):
    """The values that one option accepts.

    Attributes:
        good: The accepted values, in words.
        check: Returns a value in the form that the option keeps; raises ValueError if it is not accepted.
        parse: Returns the value of an environment variable's text; raises ValueError if there is none. None: the option
            has no variable.
        secret: Whether a value is shown nowhere, because it may hold a secret.
    """

    good: str
    check: Callable[[object], object]
    parse: Callable[[str], object] | None
    secret: bool = False


def _check_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _parse_flag(text: str) -> bool:
    try:
        return FLAG_TEXTS[text.strip().lower()]
    except KeyError:
        raise ValueError from None


def _check_seconds(value: object) -> float:
    # bool is a subclass of int, but True is not a duration.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError
    return seconds


def _check_count(minimum: int, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError
    return value


def _check_path(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError
    path = os.fspath(cast("str | os.PathLike[Any]", value))
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ValueError
    return os.path.abspath(path)  # the program may change its directory later


def _check_addresses(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError
    each: tuple[object, ...] = tuple(value.split() if isinstance(value, str) else cast("Iterable[object]", value))
    # A comma may be part of an address, but not its end: it stood between two.
    addresses = tuple(one.strip(" ,") for one in each if isinstance(one, str) and _ADDRESS.match(one.strip(" ,")))
    if len(addresses) != len(each):
        raise ValueError
    return addresses


def _check_callable(value: object) -> object:
    if value is not None and not callable(value):
        raise ValueError
    return value


def _choice(*good: str) -> _Rule:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in good:
            raise ValueError
        return value

    return _Rule(" or ".join(repr(one) for one in good), check, str.strip)


_FLAG = _Rule("True or False (in the environment: " + ", ".join(FLAG_TEXTS) + ")", _check_flag, _parse_flag)
_SECONDS = _Rule("a finite number of seconds above 0", _check_seconds, float)
_RULES: dict[str, _Rule] = {
    "enabled": _FLAG,
    "on_divergence": _choice("raise", "warn"),
    "levels": _Rule(
        "a mapping from kinds to 'raise', 'warn' or 'off' (in the environment: Stalled=raise,SameOrder=off)",
        checked,
        parsed,
    ),
    "totals": _choice("show", "fix", "off"),
    "uneven_train": _choice("raise", "stop"),
    "uneven_eval": _choice("warn", "raise", "allow", "off", "stop"),
    "stall_seconds": _SECONDS,
    "lost_seconds": _SECONDS,
    "deadline_seconds": _SECONDS,
    "compare_data": _FLAG,
    "weights_every": _Rule(
        "0 (off) or a whole number of optimizer steps of at least 1", functools.partial(_check_count, 0), int
    ),
    "verdict_file": _Rule("the path of a file", _check_path, str),
    "trace_dir": _Rule("the path of a directory", _check_path, str),
    "notify": _Rule(
        "one or more addresses of apprise, such as slack://… (in the environment: with spaces between them)",
        _check_addresses,
        str,
        secret=True,
    ),
    "on_finding": _Rule("a function that takes a Finding", _check_callable, None),
}
SECRET_OPTIONS = frozenset(name for name, rule in _RULES.items() if rule.secret)
"""Options whose values may hold secrets: they are written and printed nowhere."""


@dataclass(frozen=True)
class Settings:
    """The checked options of one guard.

    Attributes:
        enabled: Whether the adapter does anything at all.
        on_divergence: The effect of a proof that ranks are out of step: an error on every rank, or one warning.
        levels: By kind of verdict, whether a finding is an error, a warning or nothing, where that is not the default;
            see `countoff.core.levels.LEVELS`.
        totals: Whether the progress bars and loggers of the framework get the true totals, which changes nothing that
            trains; whether proven ones are also set as its lengths; or neither.
        uneven_train: The effect of different numbers of train batches: an error, or an epoch that stops on every rank
            with the shortest one.
        uneven_eval: The effect of different numbers of evaluation batches: a warning, an error, nothing, or an
            evaluation that stops on every rank with the shortest one. With ``"off"``, evaluations are not compared at
            all, so that only some ranks may evaluate.
        stall_seconds: Seconds without progress of any rank before a stall is reported.
        lost_seconds: Seconds without any answer of a host before its ranks are lost, and seconds for which another rank
            must have waited for a stopped rank.
        deadline_seconds: Seconds that the roll call before the first batch waits for missing ranks.
        compare_data: Whether what the ranks read is compared: the first batches of every train epoch, and the datasets.
        weights_every: Optimizer steps between two comparisons of the ranks' weights; 0: none. Must be equal on all
            ranks.
        verdict_file: Absolute path of the file for the verdict that ends the fit; None: no file.
        trace_dir: Absolute path of the directory for the trace, in which each rank has a file; None: no trace.
        notify: Addresses of apprise that are told of findings.
        on_finding: A function that is called with each `Finding`; None: there is none.

    Raises:
        SettingsError: If a value is outside the domain of its option.
    """

    enabled: bool = True
    on_divergence: Literal["raise", "warn"] = "raise"
    levels: Mapping[str, Level] = field(default_factory=dict[str, Level])
    totals: Literal["show", "fix", "off"] = "show"
    uneven_train: Literal["raise", "stop"] = "raise"
    uneven_eval: Literal["warn", "raise", "allow", "off", "stop"] = "warn"
    stall_seconds: float = 180.0
    lost_seconds: float = 15.0
    deadline_seconds: float = 60.0
    compare_data: bool = True
    weights_every: int = 0
    verdict_file: str | None = None
    trace_dir: str | None = None
    notify: tuple[str, ...] = field(default=(), repr=False)
    on_finding: Callable[[Finding], object] | None = None

    def __post_init__(self) -> None:
        for name in _RULES:
            value: object = getattr(self, name)
            object.__setattr__(self, name, _checked(name, value, f"argument `{name}`"))
        if self.keeps_even and self.on_divergence == "warn":
            raise SettingsError(
                "on_divergence='warn' cannot be combined with uneven_train='stop' or uneven_eval='stop': ranks that "
                "take the same number of batches wait for one another, so a divergence has to end the job"
            )
        lowered = [
            (kind, self.levels[kind]) for kind in _NEEDED_TO_BE_EVEN if self.levels.get(kind, "raise") != "raise"
        ]
        if self.keeps_even and lowered:
            kind, level = lowered[0]
            raise SettingsError(
                f"levels={{'{kind}': '{level}'}} cannot be combined with uneven_train='stop' or uneven_eval='stop': "
                "ranks that take the same number of batches wait for one another, so this has to end the job"
            )
        if self.notify and importlib.util.find_spec("apprise") is None:
            raise SettingsError("`notify` needs apprise: pip install 'countoff[notify]'")

    @property
    def keeps_even(self) -> bool:
        """Whether ranks with different numbers of batches take the same number, in training or in evaluations."""
        return self.uneven_train != "raise" or self.uneven_eval == "stop"

    def without_secrets(self) -> dict[str, Any]:
        """The settings by name, as they may be written into files; without functions and what may hold a secret."""
        written = [name for name, rule in _RULES.items() if not rule.secret and rule.parse is not None]
        return {name: getattr(self, name) for name in written}

    def __deepcopy__(self, memo: object) -> Settings:
        """The settings themselves: they do not change, and a copy of `on_finding` might tell somebody else."""
        return self

    @classmethod
    def resolve(cls, *arguments: str, **given: object) -> Settings:
        """Returns the settings: arguments win over the environment, and the environment wins over the defaults.

        Every ``COUNTOFF_*`` variable is checked, also one that an argument overrides, so that removing the argument
        never brings up an error.

        Args:
            *arguments: Names of the caller's own arguments, which an error about an unknown one lists too.
            **given: Options by name; None means that the option is not given.

        Returns:
            The settings, every value inside its domain.

        Raises:
            SettingsError: If an argument or ``COUNTOFF_*`` variable is not an option, or its value is outside its
                domain.

        Example:
            >>> Settings.resolve(totals="fix", stall_seconds=None).totals
            'fix'
        """
        for name in given:
            if name not in _RULES:
                known = (*arguments, *_RULES)
                raise SettingsError(f"unknown argument `{name}`{nearest(name, known)}; known: {', '.join(known)}")
        chosen = _from_environment(os.environ)
        chosen.update({name: value for name, value in given.items() if value is not None})
        return dataclasses.replace(cls(), **chosen)  # pyright: ignore[reportArgumentType]  # __post_init__ checks each

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Returns the settings of an environment and the defaults.

        Args:
            environ: Its variables.

        Raises:
            SettingsError: As `resolve`, of a ``COUNTOFF_*`` variable.
        """
        return dataclasses.replace(cls(), **_from_environment(environ))  # pyright: ignore[reportArgumentType]  # __post_init__ checks each


def variable_of(name: str) -> str:
    """Returns the environment variable of an option."""
    return FLAG if name == "enabled" else f"{FLAG}_{name.upper()}"


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Returns the options that the environment sets, checked, in the order of their names."""
    options = {variable_of(name): name for name, rule in _RULES.items() if rule.parse is not None}
    found: dict[str, object] = {}
    # Sorted, so that every rank refuses the same variable first.
    for variable in sorted(environ):
        if _SERVICE_LINK.fullmatch(variable) or not (variable == FLAG or variable.startswith(f"{FLAG}_")):
            continue
        if variable not in options:
            near = f"; did you mean {FLAG}?" if variable == f"{FLAG}_ENABLED" else nearest(variable, options)
            raise SettingsError(f"unknown environment variable {variable}{near}; known: {', '.join(options)}")
        if environ[variable].strip():
            name, text = options[variable], environ[variable]
            found[name] = _checked(name, text, f"environment variable {variable}", parse=_RULES[name].parse)
    return found


def _checked(name: str, value: object, where: str, parse: Callable[[str], object] | None = None) -> object:
    """Returns a value in the form that its option keeps.

    Raises:
        SettingsError: If the option does not accept the value.
    """
    rule = _RULES[name]
    try:
        return rule.check(parse(str(value)) if parse else value)
    except ValueError as error:
        shown = (
            "a value that is not shown, because it may hold a secret" if rule.secret else " ".join(repr(value).split())
        )
        reason = f": {error}" if rule.check is checked and error.args else ""
        raise SettingsError(f"{where} must be {rule.good}, got {shown}{reason}") from None
