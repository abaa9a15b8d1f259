"""Launches the programs of a family, and says of each run with countoff what differs from the run without it."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from integration_tests.harness import RankResult, RanksFailed, run_ranks
from integration_tests.zoo.inside import run_alone, run_together
from integration_tests.zoo.registry import Program

DEADLINE_SECONDS: Final = 60.0
"""Of one run of one program, whose ranks then print their stacks."""
_REPOSITORY: Final = str(Path(__file__).parents[2])
_METRIC = re.compile(r"countoff/[a-z_]+'?: ")
_LATE_RANK: Final = re.compile(r"^\[rank \d+\] countoff: LateRank: .*\n(\[rank \d+\]   .*\n)*", re.MULTILINE)
_PEERS_SECONDS: Final = 20.0
"""How long the other ranks of a run may go on after one has failed: time enough for a verdict with its table."""
Run = tuple[Program, str]
"""A program, and the mode with which it runs."""


@dataclass
class Outcome:
    """How one run of one program has ended, as its ranks saw it.

    Attributes:
        values: The digests of what each rank has computed; None for a rank that has not come to the end.
        random: The states of each rank's random generators.
        said: What each rank has printed on stderr.
        problem: An exception, a thread that is left, an exit code of a rank that should have gone on; empty: none.
        exit_codes: The ranks' exit codes, where the run had processes of its own.
    """

    values: list[list[str] | None]
    random: list[dict[str, str]]
    said: list[str]
    problem: str = ""
    exit_codes: Sequence[int | None] = ()


@dataclass(frozen=True)
class Findings:
    """What the runs of some programs have shown.

    Attributes:
        failures: What is wrong, by "program[mode]".
        runs: All runs, named in the same way.
        seconds: How long all of it took.
    """

    failures: dict[str, str]
    runs: list[str]
    seconds: float


def run_programs(programs: Sequence[Program], directory: Path, modes: Sequence[str] = ()) -> Findings:
    """Runs programs of one family on real ranks.

    Args:
        programs: The programs.
        directory: Where the files of the runs go.
        modes: Which of a program's modes to run, and "again" to run it without countoff once more; none: its own modes.
    """
    began = time.monotonic()
    outcomes: dict[tuple[str, str], Outcome] = {}
    runs = [
        (program, mode) for program in programs for mode in modes or program.modes if mode in (*program.modes, "again")
    ]
    for ranks in sorted({program.ranks for program in programs}):
        together = [run for run in runs if run[0].ranks == ranks and not run[0].alone]
        outcomes |= {(program.name, mode): outcome for (program, mode), outcome in _together(together, directory)}
    for program, mode in runs:
        if program.alone:
            outcomes[program.name, mode] = _alone(program, mode, directory)
    failures = {f"{name}[{mode}]": _failure(outcomes, name, mode) for name, mode in outcomes}
    wrong = {run: text for run, text in failures.items() if text}
    return Findings(wrong, list(failures), time.monotonic() - began)


def _together(runs: Sequence[Run], directory: Path) -> Iterator[tuple[Run, Outcome]]:
    """Yields the outcome of each run. A run that fails ends its launch; those after it go on in another one."""
    while runs:
        records = Path(tempfile.mkdtemp(prefix="records-", dir=directory))
        named = [(program.name, mode) for program, mode in runs]
        ranks = range(runs[0][0].ranks)
        call = (run_together, len(ranks), runs[0][0].family, named, str(records), DEADLINE_SECONDS)
        results = _launched(*call, directory=directory, deadline_seconds=300 + DEADLINE_SECONDS + 20 * len(runs))
        found = [_records(records / f"rank{rank}.jsonl") for rank in ranks]
        good = [list(takewhile(lambda record: not record["error"] and not record["threads"], each)) for each in found]
        ended = min(map(len, good))
        for number, run in enumerate(runs[: ended + 1]):
            mine = [each[number] if number < len(each) else None for each in found]
            said = [_text(records / f"{run[0].name}-{run[1]}-rank{rank}.err") for rank in ranks]
            problem = "" if number < ended else _problem(mine, results, said)
            if number + 1 == len(runs) and not problem:
                problem = _unended(results)
            values = [None if record is None else record["value"] for record in mine]
            yield run, Outcome(values, [record["random"] if record else {} for record in mine], said, problem)
        runs = runs[ended + 1 :]


def _unended(results: Sequence[RankResult]) -> str:
    """What ranks have printed that did not end after the last program of a launch; empty if all of them have ended."""
    wrong = [result for result in results if result.exit_code]
    return "\n".join(f"at its end, rank {each.rank} had exit code {each.exit_code}\n{each.output}" for each in wrong)


def _problem(records: Sequence[dict[str, Any] | None], results: Sequence[RankResult], said: Sequence[str]) -> str:
    words: list[str] = []
    for result, record, text in zip(results, records, said, strict=True):
        how = f"exit code {result.exit_code}" if record is None else record["error"]
        if record is not None and record["threads"]:
            how += f" threads left: {record['threads']}"
        words += [f"rank {result.rank}: {how}\n{text[-8000:]}\n{result.output[-2000:]}"] if how else []
    return "\n".join(words)


def _alone(program: Program, mode: str, directory: Path) -> Outcome:
    notes = tempfile.mktemp(prefix="notes-", dir=directory)
    call = (run_alone, program.ranks, program.family, program.name, mode, DEADLINE_SECONDS)
    results = _launched(*call, directory=directory, deadline_seconds=2 * DEADLINE_SECONDS, env={"ZOO_NOTES": notes})
    values: list[list[str] | None] = []
    random: list[dict[str, str]] = []
    for result in results:
        value, states = result.value if isinstance(result.value, tuple) else ([], {})
        values.append(_text(Path(f"{notes}-rank{result.rank}")).splitlines() + value)
        random.append(states)
    said = [result.output for result in results]
    problem = "\n".join(map(str, results)) if any("Timeout (" in each for each in said) else ""
    return Outcome(values, random, said, problem, [result.exit_code for result in results])


def _launched(function: Callable[..., Any], ranks: int, *arguments: Any, **how: Any) -> list[RankResult]:
    try:
        return run_ranks(function, ranks, *arguments, expect=None, kill_peers_after=_PEERS_SECONDS, **how)
    except RanksFailed as failed:
        return failed.results


def _failure(outcomes: dict[tuple[str, str], Outcome], name: str, mode: str) -> str:
    """Returns what is wrong with one run; empty if nothing is."""
    own, plain = outcomes[name, mode], outcomes.get((name, "off"))
    words = [own.problem] if own.problem else []
    for rank, said in enumerate(own.said):
        if lines := lines_of_countoff(said):
            words.append(f"rank {rank} said: " + "\n".join(lines))
    if plain is not None and not plain.problem and not own.problem and own is not plain:
        words += _differences(own, plain)
    return "\n".join(words)


def _differences(own: Outcome, plain: Outcome) -> list[str]:
    words: list[str] = []
    if list(own.exit_codes) != list(plain.exit_codes):
        words.append(f"exit codes {own.exit_codes}, without countoff {plain.exit_codes}")
    for rank, (mine, theirs) in enumerate(zip(own.values, plain.values, strict=True)):
        if mine != theirs:
            pairs = list(zip(mine or [], theirs or [], strict=False))
            places = [f"{number}: {pair}" for number, pair in enumerate(pairs) if pair[0] != pair[1]]
            words.append(f"rank {rank} computed other values: {places[:6] or (mine, theirs)}")
        others = [kind for kind in plain.random[rank] if own.random[rank].get(kind) != plain.random[rank][kind]]
        if others:
            words.append(f"rank {rank} has other states of the random generators: {', '.join(others)}")
    return words


def lines_of_countoff(text: str) -> list[str]:
    """Returns what countoff has printed, and each line that names it but for the places in stacks.

    A `LateRank` is left out: on a busy machine a rank may take so long to begin, and then it is true.
    """
    lines = _LATE_RANK.sub("", text.replace(_REPOSITORY, "")).splitlines()
    lines = map(without_metrics, lines)
    return [line for line in lines if line.startswith("[rank ") or ("countoff" in line and 'File "' not in line)]


def without_metrics(text: str) -> str:
    """Returns a text without the names of countoff's metrics: a framework prints its logs, and these in them."""
    return _METRIC.sub("", text)


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(path).splitlines()]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if os.path.exists(path) else ""
