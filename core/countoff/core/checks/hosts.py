"""Do all hosts run the same libraries, the same code, and the same variables for these? `HostsDiffer`.

Compared once, when the fit has begun. What a rank runs is read on a thread of its own, because files may be slow. A
record has digests; of variables also short values. The first rank knows the names, and those of its own files.
"""

from __future__ import annotations

import contextlib
import threading
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from socket import gethostname
from typing import TYPE_CHECKING, Any, NamedTuple

from countoff.core import software
from countoff.core.at_exit import at_exit
from countoff.core.checks.check import Check, FitStart, Others
from countoff.core.protocol.records import RECORD_BYTES, Records, record_text
from countoff.core.verdict import Cause, Verdict, VerdictKind
from countoff.core.words import clip, names_of, ranks_by

if TYPE_CHECKING:
    from countoff.core.state import State

__all__ = ["HOSTS_DIFFER", "HostsCheck", "judge_hosts", "record_of"]

VERSIONS, ENVIRONMENT, CODE = "versions", "environment", "code"
"""Subjects of a `HostsDiffer`: hosts differ in libraries, in variables or in files alone. The empty one: in several."""
_ALLOW = "Where they are to differ: levels={'HostsDiffer': 'off'}."
HOSTS_DIFFER = VerdictKind(
    "HostsDiffer",
    "hosts load different versions of NCCL, CUDA or the driver, or have other variables for these, or other code",
    causes={
        "": Cause(
            "Ranks that compute or talk in different ways get different numbers, hold one another up, or wait for one "
            "another for ever.",
            f"start every host with the same image, the same variables and the same copy of the code. {_ALLOW}",
        ),
        VERSIONS: Cause(
            "Ranks compute and talk with one another by these, and each version is tried only with itself.",
            f"install the same versions on every host. {_ALLOW}",
        ),
        ENVIRONMENT: Cause(
            "Such a variable changes how a rank computes or talks. Where ranks do that in different ways, they get "
            "different numbers, hold one another up, or wait for one another for ever.",
            "give the variable one value on all hosts, or set it on none: look in the launch script, the image and the "
            f"profile of each host. {_ALLOW}",
        ),
        CODE: Cause(
            "Each host runs its own copy of the code.",
            f"bring the same copy to every host: look for another commit, or an edit that was not copied. {_ALLOW}",
        ),
    },
)
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
_UNKNOWN = "???"
_NAME, _CONTENT = 5, 3
"""Digits of digests, of 6 bits each. One name is never another's by chance; one difference of 262,144 is not seen."""
_NAME_BYTES, _VERSION_BYTES, _VALUE_BYTES, _VALUES_BYTES = 66, 40, 26, 200
_MOST_SENTENCES, _MOST_NAMED = 3, 4
PAUSE_SECONDS = 0.1
"""Reading begins this long after the roll call. It takes more processor time than all else at the start of a fit, and
other ranks of this host may still be waiting for their answers, or be in their first batch."""
_SETTLE_SECONDS = 1.0
"""How long the end of a fit waits for files that are still being read."""


class HostsCheck(Check):
    """Compares what the ranks' hosts run once the roll call is over.

    Args:
        state: This rank's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._others: Others | None = None
        self._reading: threading.Thread | None = None
        self._cancel: Callable[[], None] = lambda: None
        self._closed = False
        self._due = threading.Event()  # the pause is over, or the fit

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        self._others = others

    def counted_off(self) -> None:  # noqa: D102
        if self._others is None or self._closed or self._state.end is not None:
            return
        if self._state.settings.levels.get(HOSTS_DIFFER.name) == "off":
            self._tell({}, ())  # ranks may have other levels, and wait for this record
            return
        self._reading = threading.Thread(target=self._read_host, args=(self._others.began,), daemon=True)
        self._reading.name = "countoff software"
        self._cancel = at_exit(self.closed)  # a program may end without closing its guard
        self._reading.start()

    def settle(self) -> None:  # noqa: D102
        self._due.set()
        if self._reading is not None:
            self._reading.join(_SETTLE_SECONDS)

    def closed(self) -> None:  # noqa: D102
        self._closed = True
        self._cancel()
        self.settle()  # no thread is left behind, but for one that waits for a file system

    def _read_host(self, began: float) -> None:
        self._due.wait(PAUSE_SECONDS)
        if self._closed:
            return
        record, files = dict[str, Any](), dict[str, str]()
        with contextlib.suppress(Exception):  # whatever a program has done to its modules
            files = software.own_files()
            record = record_of(files, began, stopped=lambda: self._closed)
        self._tell(record, list(files))

    def _tell(self, record: Mapping[str, Any], files: Sequence[str]) -> None:
        if self._others is not None and not self._closed:
            self._others.report("hosts", record, lambda records: judge_hosts(records, files))


def record_of(files: Mapping[str, str], began: float, stopped: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Returns what this rank tells of its host, as JSON types.

    Args:
        files: The files of the user's own modules: paths by name, the main script first.
        began: When this process began, in seconds since the epoch.
        stopped: Whether nobody waits for the record any more: then no further file is read.
    """
    texts = [software.text_of(each) for each in _VARIABLES]
    record: dict[str, Any] = {
        "name": clip(gethostname(), _NAME_BYTES),
        "on": software.processors(),
        "libraries": {name: clip(version, _VERSION_BYTES) for name, version in software.libraries().items()},
        "list": _LIST,
        "variables": "".join(
            _UNKNOWN if text is None else _digest(software.meaning(each, text), _CONTENT)
            for each, text in zip(_VARIABLES, texts, strict=True)
        ),
        "values": {},
        "files": "",
    }
    room = min(_VALUES_BYTES, RECORD_BYTES - len(record_text(record)))
    for number, text in enumerate(texts):
        size = len(record_text({str(number): text}))
        if text and size <= min(room, _VALUE_BYTES):
            record["values"][str(number)] = text
            room -= size
    room = (RECORD_BYTES - len(record_text(record))) // (_NAME + _CONTENT)
    first = list(files)[:1]
    named = {name: _digest(name, _NAME) for name in files}
    for name in [*first, *sorted(named.keys() - first, key=lambda each: named[each])][:room]:
        if stopped():
            break
        if content := software.content_of(files[name], began):
            record["files"] += named[name] + _digest(content, _CONTENT)
    return record


def judge_hosts(records: Records, known: Sequence[str] = ()) -> Iterator[Verdict]:
    """Yields a `HostsDiffer` if the ranks that have told anything differ in it.

    Args:
        records: What each rank has told, by rank.
        known: The names of the judging rank's own files.

    Raises:
        KeyError, TypeError, ValueError: If a record is none.

    Example:
        >>> told = record_of({}, 0.0)
        >>> records = {rank: {**told, "name": f"node-{rank}", "libraries": {"NCCL": "2.27.3"}} for rank in range(3)}
        >>> records[2]["libraries"] = {"NCCL": "2.26.2"}
        >>> [found.sentence for found in judge_hosts(records)]
        ['node-2 loads NCCL 2.26.2, the other hosts 2.27.3.']
    """
    told = {rank: _Told.from_json(record) for rank, record in records.items() if record}
    places = _Places({rank: each.host for rank, each in told.items()})
    found = {VERSIONS: [], ENVIRONMENT: [], CODE: []}
    odd: list[Sequence[int]] = []
    for subject, sentences in (
        (VERSIONS, _libraries(told, places, odd)),
        (ENVIRONMENT, _variables(told, places, odd)),
        (CODE, _files(told, places, known, odd)),
    ):
        found[subject] = list(sentences)
    subjects = [subject for subject, sentences in found.items() if sentences]
    if not subjects:
        return
    minority = all(odd)
    named = sorted({rank for ranks in odd for rank in ranks}) if minority else sorted(told)
    yield HOSTS_DIFFER.found(
        " ".join(f"{each}." for sentences in found.values() for each in sentences),
        named,
        subject=subjects[0] if len(subjects) == 1 else "",
        standing="out of step" if minority else "differ",
    )


class _Told(NamedTuple):
    """What one rank has told.

    Attributes:
        host: The name of its host.
        on: The processors of its host.
        libraries: Versions by name.
        variables: Digests of the variables' meanings, in order; None where nothing is known of one.
        values: Values by the number of the variable, where they are set and short.
        files: Digests of contents by those of names.
    """

    host: str
    on: str
    libraries: Mapping[str, str]
    variables: Sequence[str | None]
    values: Mapping[int, str]
    files: Mapping[str, str]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> _Told:
        known = record["list"] == _LIST  # else of a version with other variables
        variables, files = str(record["variables"]), str(record["files"])
        if known and len(variables) != _CONTENT * len(_VARIABLES):
            raise ValueError(f"expected {len(_VARIABLES)} digests, got {variables!r}")
        return cls(
            clip(str(record["name"]), _NAME_BYTES),
            str(record["on"]),
            {str(name): clip(str(version), _VERSION_BYTES) for name, version in dict(record["libraries"]).items()},
            [None if each == _UNKNOWN else each for each in _cut(variables, _CONTENT)] if known else [],
            {int(number): clip(str(text), _VALUE_BYTES) for number, text in dict(record["values"]).items()},
            {each[:_NAME]: each[_NAME:] for each in _cut(files, _NAME + _CONTENT)},
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

    def sides(self, values: Mapping[int, Any], odd: list[Sequence[int]]) -> list[_Side]:
        """Returns the sides, the smallest first; none if all known values are the same.

        Args:
            values: What is known, by rank; None where nothing is.
            odd: Gets the ranks of the minority; none where no side is larger than all others together.
        """
        found = ranks_by({rank: value for rank, value in values.items() if value is not None})
        if len(found) < 2:
            return []
        few = [rank for _, ranks in found[:-1] for rank in ranks]
        odd.append(few if len(few) < len(found[-1][1]) else [])
        there = [list(dict.fromkeys(self._hosts[rank] for rank in ranks)) for _, ranks in found]
        by_host = sum(map(len, there)) == len({host for hosts in there for host in hosts})
        sizes = [len(hosts) if by_host else len(ranks) for hosts, (_, ranks) in zip(there, found, strict=True)]
        every = len(set(self._hosts.values())) if by_host else len(self._hosts)
        names = [
            _listed(hosts, "host") if by_host else names_of(ranks)
            for hosts, (_, ranks) in zip(there, found, strict=True)
        ]
        if sizes[-1] > 1 and sum(sizes) == every:
            names[-1] = "the other hosts" if by_host else "the other ranks"
        return [
            _Side(value, ranks, name, size > 1) for (value, ranks), name, size in zip(found, names, sizes, strict=True)
        ]


def _libraries(told: Mapping[int, _Told], places: _Places, odd: list[Sequence[int]]) -> Iterator[str]:
    names = list(_LIBRARIES)
    if len({each.libraries.get("torch") for each in told.values()}) > 1:
        names = [name for name in names if name not in _OF_TORCH]
    for name in names:
        sides = places.sides({rank: each.libraries.get(name) for rank, each in told.items()}, odd)
        if sides:
            verb, noun = _LIBRARIES[name]
            first, *rest = sides
            verb = verb if first.several else {"load": "loads", "have": "has"}[verb]
            others = "".join(f", {side.name} {side.value}" for side in rest[-_MOST_SENTENCES:])
            yield f"{first.name} {verb} {noun} {first.value}{others}"


def _variables(told: Mapping[int, _Told], places: _Places, odd: list[Sequence[int]]) -> Iterator[str]:
    told = {rank: each for rank, each in told.items() if each.variables}
    alike = len({each.on for each in told.values()}) == 1
    found: dict[str, list[tuple[str, str]]] = {}
    for number, variable in enumerate(_VARIABLES):
        if variable.own_default and not alike:
            continue
        sides = places.sides({rank: each.variables[number] for rank, each in told.items()}, odd)
        if sides:
            where = _where(sides)
            values = [_value(variable, number, side, told) for side in sides[: _MOST_SENTENCES + 1]]
            sentence = ", and ".join(f"{value} on {side.name}" for value, side in zip(values, sides, strict=False))
            found.setdefault(where, []).append((variable.name, f" {sentence}" if all(values) else f" differs {where}"))
    for where, variables in list(found.items())[:_MOST_SENTENCES]:
        if len(variables) < _MOST_SENTENCES:
            yield from ("".join(each) for each in variables)
        else:
            yield f"{_listed([name for name, _ in variables], 'variable')} differ {where}"


def _value(variable: software.Variable, number: int, side: _Side, told: Mapping[int, _Told]) -> str:
    """What a variable is on one side, in words; empty where that is not known."""
    texts = [text for rank in side.ranks if (text := told[rank].values.get(number))]
    if texts:
        return f'is "{texts[0]}"'
    return "is not set" if side.value == _digest(software.meaning(variable, ""), _CONTENT) else ""


def _files(told: Mapping[int, _Told], places: _Places, known: Sequence[str], odd: list[Sequence[int]]) -> Iterator[str]:
    names = {_digest(name, _NAME): name for name in known}
    every = {name for each in told.values() for name in each.files}
    found: dict[str, list[str]] = {}
    order = {name: number for number, name in enumerate(names)}
    for name in sorted(every, key=lambda name: (order.get(name, len(order)), name)):
        sides = places.sides({rank: each.files.get(name) for rank, each in told.items()}, odd)
        if sides:
            found.setdefault(_where(sides), []).append(names.get(name, ""))
    clauses: list[str] = []
    for where, files in list(found.items())[:_MOST_SENTENCES]:
        named = [clip(name, _NAME_BYTES) for name in files if name]
        listed = _listed(named, "file", len(files)) if named else _counted(len(files), "file", "")
        clauses.append(f"{listed} {'differs' if len(files) == 1 else 'differ'} {where}")
    if clauses:
        yield "; ".join(clauses)


def _where(sides: Sequence[_Side]) -> str:
    """Between which hosts or ranks something differs: on the smaller side, if one side is larger than the rest."""
    few = [side.name for side in sides[:-1]]
    if sum(len(side.ranks) for side in sides[:-1]) < len(sides[-1].ranks):
        return f"on {_joined(few)}"
    return f"between {_joined([*few, sides[-1].name])}"


def _listed(names: Sequence[str], noun: str, count: int = 0) -> str:
    """The first of some names, and how many more there are."""
    more = max(count, len(names)) - len(names[:_MOST_NAMED])
    if more == 1 and len(names) > _MOST_NAMED:
        return _joined(names)
    return _joined([*names[:_MOST_NAMED], *([_counted(more, noun, "other ")] if more else [])])


def _counted(count: int, noun: str, other: str) -> str:
    return f"{count} {other}{noun}{'' if count == 1 else 's'}"


def _joined(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _cut(text: str, length: int) -> list[str]:
    if len(text) % length:
        raise ValueError(f"expected digests of {length} digits, got {text[:40]!r}")
    return [text[first : first + length] for first in range(0, len(text), length)]


def _digest(content: str | bytes, digits: int) -> str:
    data = content.encode(errors="replace") if isinstance(content, str) else content
    return urlsafe_b64encode(blake2b(data, digest_size=6).digest())[:digits].decode()


_LIST = _digest(repr(_VARIABLES), _NAME)
"""Which variables a record has, and in which order."""
