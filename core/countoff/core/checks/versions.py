"""Do ranks run the same versions, and have their hosts the same variables for these? `VersionMismatch`.

Versions of packages are compared at the roll call. What a host has loaded, and its variables, each rank tells once the
roll call is over, in a record of its own.
"""

from __future__ import annotations

import contextlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from socket import gethostname
from typing import Any, NamedTuple

from countoff.core import software
from countoff.core.checks.check import Check, FitStart, Others
from countoff.core.checks.plan import first_difference
from countoff.core.messages import clip, names_of, ranks_by
from countoff.core.protocol.records import RECORD_BYTES, Records, record_text
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["VERSION_MISMATCH", "VersionCheck", "judge_hosts", "judge_versions", "record_of"]

LIBRARIES, VARIABLES = "libraries", "variables"
"""Subjects of a `VersionMismatch` about hosts."""
_INSTALL = "install the same versions on every host."
VERSION_MISMATCH = VerdictKind(
    "VersionMismatch",
    "ranks run different versions of Python, torch, countoff, the framework, NCCL, CUDA or the driver, or their hosts "
    "have other variables for these",
    causes={
        "": Cause(remedy=_INSTALL),
        LIBRARIES: Cause(
            "Ranks compute and talk with one another by these, and each version is tried only with itself.", _INSTALL
        ),
        VARIABLES: Cause(
            "Such a variable changes how a rank computes or talks. Where ranks do that in different ways, they get "
            "different numbers, hold one another up, or wait for one another for ever.",
            "give the variable one value on all hosts, or set it on none: look in the launch script, the image and "
            "the profile of each host.\n"
            "where they are to differ: levels={'VersionMismatch': 'off'}.",
        ),
    },
)
"""**Cause.** One host still has the container of last week, or a variable of an old experiment in its profile.

**Fix.** Start every host with the same image and the same variables. [What is compared](how-it-works.md#hosts) is a
fixed list.
"""
_LIBRARIES: dict[str, tuple[str, str]] = {
    "NCCL": ("load", "NCCL"),
    "CUDA": ("have", "torch for CUDA"),
    "ROCm": ("have", "torch for ROCm"),
    "cuDNN": ("load", "cuDNN"),
    "driver": ("have", "the NVIDIA driver"),
    "net": ("load", "the NCCL net plugin"),
    "tuner": ("load", "the NCCL tuner plugin"),
}
_OF_TORCH = ("NCCL", "CUDA", "ROCm", "cuDNN")
"""What comes with torch: of ranks with different versions of torch, that is said already."""
_VARIABLES = [each for group in software.VARIABLES.values() for each in group]
_NAME_BYTES, _VERSION_BYTES, _VALUE_BYTES = 66, 40, 40
_MOST_SENTENCES, _MOST_NAMED = 3, 4


class VersionCheck(Check):
    """Compares versions at the roll call, and what the ranks' hosts have once it is over.

    Args:
        off: Whether this rank tells nothing of its host.
    """

    def __init__(self, *, off: bool = False) -> None:
        self._off = off
        self._others: Others | None = None

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        self._others = others

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        return {"versions": dict(start.versions)}

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        yield judge_versions({rank: report["versions"] for rank, report in reports.items()})

    def counted_off(self) -> None:  # noqa: D102
        if self._others is not None:  # ranks may have other levels, and wait for this record
            self._others.report("hosts", dict if self._off else record_of, judge_hosts)


def judge_versions(versions: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `VersionMismatch` if ranks run different versions of a package."""
    names = sorted({name for version in versions.values() for name in version})
    difference = first_difference(versions, names)
    if difference is None:
        return None
    sentence, ranks = difference
    return VERSION_MISMATCH.found(f"{sentence}.", ranks)


def record_of() -> dict[str, Any]:
    """Returns what this rank tells of its host, as JSON types; nothing if that cannot be read."""
    with contextlib.suppress(Exception):  # whatever a program has done to its modules
        record: dict[str, Any] = {
            "name": clip(gethostname(), _NAME_BYTES),
            "on": software.processors(),
            "libraries": {name: clip(version, _VERSION_BYTES) for name, version in software.libraries().items()},
            "list": _LIST,
            "set": {},
            "told": len(_VARIABLES),
        }
        for number, variable in enumerate(_VARIABLES):
            text = software.text_of(variable)
            longer = record["set"] if text == "" else {**record["set"], str(number): _short(text)}
            if len(record_text({**record, "set": longer})) > RECORD_BYTES:
                return {**record, "told": number}
            record["set"] = longer
        return record
    return {}


def judge_hosts(records: Records) -> Iterator[Verdict]:
    """Yields a `VersionMismatch` if hosts have loaded other libraries, and one if they have other variables.

    Args:
        records: What each rank has told, by rank; nothing where its host is not compared.

    Raises:
        KeyError, TypeError, ValueError: If a record is none.

    Example:
        >>> told = record_of()
        >>> records = {rank: {**told, "name": f"node-{rank}", "libraries": {"NCCL": "2.27.3"}} for rank in range(3)}
        >>> records[2]["libraries"] = {"NCCL": "2.26.2"}
        >>> [found.sentence for found in judge_hosts(records)]
        ['node-2 loads NCCL 2.26.2, the other hosts 2.27.3.']
    """
    told = {rank: _Told.from_json(record) for rank, record in records.items() if record}
    places = _Places({rank: each.host for rank, each in told.items()})
    for subject, differ in ((LIBRARIES, _libraries), (VARIABLES, _variables)):
        outliers: list[Sequence[int]] = []
        sentences = list(differ(told, places, outliers))
        if sentences:
            minority = all(outliers)
            yield VERSION_MISMATCH.found(
                " ".join(f"{each}." for each in sentences),
                sorted({rank for ranks in outliers for rank in ranks}) if minority else sorted(told),
                subject=subject,
                standing="out of step" if minority else "differ",
            )


class _Told(NamedTuple):
    """What one rank has told.

    Attributes:
        host: The name of its host.
        on: The processors of its host.
        libraries: Versions by name.
        variables: The variables' values, in order; empty where one is not set, None where nothing is known of it.
    """

    host: str
    on: str
    libraries: Mapping[str, str]
    variables: Sequence[str | None]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> _Told:
        known = int(record["told"]) if record["list"] == _LIST else 0  # else of a version with other variables
        values = {int(number): text for number, text in dict(record["set"]).items()}
        told = [values.get(number, "") if number < known else None for number in range(len(_VARIABLES))]
        return cls(
            clip(str(record["name"]), _NAME_BYTES),
            str(record["on"]),
            {str(name): clip(str(version), _VERSION_BYTES) for name, version in dict(record["libraries"]).items()},
            [None if text is None else clip(str(text), _VALUE_BYTES) for text in told],
        )


class _Side(NamedTuple):
    """Ranks that have the same.

    Attributes:
        value: What they have.
        ranks: These ranks.
        name: The hosts, or the ranks, in words.
        several: Whether that is a plural.
    """

    value: Any
    ranks: list[int]
    name: str
    several: bool


class _Places:
    """Names the sides of a difference: by hosts where each host has one side, else by ranks.

    Args:
        hosts: The name of each rank's host.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts

    def sides(self, values: Mapping[int, Any], outliers: list[Sequence[int]]) -> list[_Side]:
        """Returns the sides, the smallest first; none if all known values are the same.

        Args:
            values: What is known, by rank; None where nothing is.
            outliers: Gets the ranks of the minority; none where no side is larger than all others together.
        """
        found = ranks_by({rank: value for rank, value in values.items() if value is not None})
        if len(found) < 2:
            return []
        few = [rank for _, ranks in found[:-1] for rank in ranks]
        outliers.append(few if len(few) < len(found[-1][1]) else [])
        there = [list(dict.fromkeys(self._hosts[rank] for rank in ranks)) for _, ranks in found]
        by_host = sum(map(len, there)) == len({host for hosts in there for host in hosts})
        sizes = [len(hosts) if by_host else len(ranks) for hosts, (_, ranks) in zip(there, found, strict=True)]
        every = len(set(self._hosts.values())) if by_host else len(self._hosts)
        names = [_listed(hosts) if by_host else names_of(ranks) for hosts, (_, ranks) in zip(there, found, strict=True)]
        if sizes[-1] > 1 and sum(sizes) == every:
            names[-1] = "the other hosts" if by_host else "the other ranks"
        return [
            _Side(value, ranks, name, size > 1) for (value, ranks), name, size in zip(found, names, sizes, strict=True)
        ]


def _libraries(told: Mapping[int, _Told], places: _Places, outliers: list[Sequence[int]]) -> Iterator[str]:
    names = list(_LIBRARIES)
    if len({each.libraries.get("torch") for each in told.values()}) > 1:
        names = [name for name in names if name not in _OF_TORCH]
    for name in names:
        sides = places.sides({rank: each.libraries.get(name) for rank, each in told.items()}, outliers)
        if sides:
            verb, noun = _LIBRARIES[name]
            first, *rest = sides
            verb = verb if first.several else {"load": "loads", "have": "has"}[verb]
            others = "".join(f", {side.name} {side.value}" for side in rest[-_MOST_SENTENCES:])
            yield f"{first.name} {verb} {noun} {first.value}{others}"


def _variables(told: Mapping[int, _Told], places: _Places, outliers: list[Sequence[int]]) -> Iterator[str]:
    alike = len({each.on for each in told.values()}) == 1
    found: dict[str, list[tuple[str, str]]] = {}
    for number, variable in enumerate(_VARIABLES):
        if variable.own_default and not alike:
            continue
        texts = {rank: text for rank, each in told.items() if (text := each.variables[number]) is not None}
        sides = places.sides({rank: software.meaning(variable, text) for rank, text in texts.items()}, outliers)
        if sides:
            values = [
                f"{_value([texts[rank] for rank in side.ranks])} on {side.name}"
                for side in sides[: _MOST_SENTENCES + 1]
            ]
            found.setdefault(_where(sides), []).append((variable.name, ", and ".join(values)))
    for where, variables in list(found.items())[:_MOST_SENTENCES]:
        if len(variables) < _MOST_SENTENCES:
            yield from (" ".join(each) for each in variables)
        else:
            yield f"{_listed([name for name, _ in variables])} differ {where}"


def _value(texts: Sequence[str]) -> str:
    """What a variable is on one side, in words."""
    text = next(filter(None, texts), "")
    return f'is "{text}"' if text else "is not set"


def _where(sides: Sequence[_Side]) -> str:
    """Between which hosts or ranks something differs: on the smaller side, if one side is larger than the rest."""
    few = [side.name for side in sides[:-1]]
    if sum(len(side.ranks) for side in sides[:-1]) < len(sides[-1].ranks):
        return f"on {_joined(few)}"
    return f"between {_joined([*few, sides[-1].name])}"


def _listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return _joined(names) if more < 2 else _joined([*names[:_MOST_NAMED], f"{more} others"])


def _joined(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _short(text: str | None) -> str | None:
    """A value, or its beginning and a digest of it."""
    if text is None or len(record_text({"": text})) <= _VALUE_BYTES:
        return text
    return f"{clip(text, _VALUE_BYTES // 2)} ({_digest(text)})"


def _digest(text: str) -> str:
    return urlsafe_b64encode(blake2b(text.encode(errors="replace"), digest_size=3).digest()).decode()


_LIST = _digest(repr(_VARIABLES))
"""Which variables a record has, and in which order."""
