"""The tables of docs/promises.md: what runs the jobs of each, and the figures that are made of what they return."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import detection
from benchmarks.__main__ import tables
from benchmarks.results import COUNTOFF, Table
from benchmarks.tool_jobs import COUNTOFF as COUNTED_LOOP
from integration_tests import causes, killed_table, once_resumes, remedy_jobs, shipped, soak
from integration_tests.faults.__main__ import PAUSE_SECONDS, RANKS, cells_of
from integration_tests.faults.cases import CANNOT, CASES
from integration_tests.faults.matrix import Row, run_cell
from integration_tests.harness import RankResult, run_ranks
from integration_tests.killed_script import MOMENTS, RUNS
from integration_tests.reports.cases import REPORTS
from integration_tests.reports.runner import Outcome
from integration_tests.reports.runner import run as run_reports
from integration_tests.zoo.registry import FAMILIES, programs_of
from integration_tests.zoo.runner import Findings, run_programs

FRAMEWORKS = {
    "torch": "torch",
    "lightning": "lightning",
    "fabric": "lightning",
    "composer": "composer",
    "accelerate": "accelerate",
    "transformers": "transformers",
}
"""By the name of its column: the package without which a framework's jobs cannot run."""
KILLED_RANKS = (2, 4)
RESUMES = 100
BENCHMARKS = {
    "torch": ("guard", "passes"),
    "lightning": ("lightning",),
    "composer": ("composer",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
}
_COUNTED = {COUNTOFF, COUNTED_LOOP, "counted", "observed", "`Guard.batch()`"}
"""The rows of the benchmarks' tables that are countoff's."""
Found = dict[str, Any]
"""The figures of one table in one framework: numbers by name, and under `wrong` what is not as promised, in words."""
checkouts: dict[str, Path] = {}
"""The checkouts in which shipped programs stand, by project."""


@dataclass(frozen=True)
class Part:
    """A table.

    Attributes:
        command: What prints it.
        frameworks: The frameworks in which it has jobs.
        measure: Runs its jobs of one framework.
        count: Makes figures of what that returned.
        claims: The promises: a sentence, and the names of how often it was kept, and of how often it was tried.
    """

    command: str
    frameworks: Sequence[str]
    measure: Callable[[str], Any]
    count: Callable[[Any], Found]
    claims: Sequence[tuple[str, str, str]] = ()


def _family_of(framework: str) -> Iterator[str]:
    for family, package in FAMILIES.items():
        if framework == ("fabric" if family.startswith("fabric") else package):
            yield family


def _zoo(framework: str) -> list[Findings]:
    with tempfile.TemporaryDirectory() as directory:
        return [run_programs(programs_of(family), Path(directory)) for family in _family_of(framework)]


def _count_zoo(found: Sequence[Findings]) -> Found:
    runs = [run for findings in found for run in findings.runs]
    wrong = [run for findings in found for run in findings.failures]
    programs, bad = ({run.partition("[")[0] for run in some} for some in (runs, wrong))
    return {"programs": len(programs), "silent": len(programs - bad), "wrong": wrong}


def _soak(framework: str) -> soak.KindTotals:
    where = soak.Where(hosts=1, most_ranks=8, delay_seconds=None, stall_seconds=0)
    return soak.sessions([framework], where, runs=40, minutes=12)[framework]


def _count_soak(total: soak.KindTotals) -> Found:
    wrong = [text.partition(": ")[0] for text in total.wrong]
    return {"jobs": total.runs, "silent": total.runs - soak.FITS * len(wrong), "wrong": wrong}


def _shipped(framework: str) -> list[shipped.Row]:
    programs = [
        each
        for each in shipped.PROGRAMS
        if (each.checkout or "transformers") == framework and (not each.checkout or each.checkout in checkouts)
    ]
    wrong: list[str] = []
    found = list(shipped.rows(programs, checkouts, wrong))
    print(*wrong, sep="\n\n", file=sys.stderr)
    return found


def _count_shipped(rows: Sequence[shipped.Row]) -> Found:
    uneven = [row for row in rows if row.told is not None]
    wrong = [f"{row.program.name}, {row.launcher}, {row.where}" for row in rows if not row.silent or row.told == ""]
    named = {"uneven": len(uneven), "named": sum(bool(row.told) for row in uneven)}
    return {"jobs": len(rows), "silent": sum(row.silent for row in rows), **named, "wrong": wrong}


def _faults(framework: str) -> list[Row]:
    os.environ.setdefault("FAULTS_PAUSE_SECONDS", PAUSE_SECONDS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        return [run_cell(*cell, Path(directory)) for cell in cells_of([framework], RANKS)]


def _count_faults(rows: Sequence[Row]) -> Found:
    faulty = [row for row in rows if CASES[row.fault].due(row.adapter)[0]]
    slow = [row for row in rows if row not in faulty]
    counts = {"faults": len(faulty), "named": sum(not row.wrong for row in faulty)}
    counts |= {"slow": len(slow), "silent": sum(not row.wrong for row in slow)}
    wrong = [
        f"{row.fault} {CASES[row.fault].title}, {row.ranks} ranks: {'; '.join(row.wrong)}" for row in rows if row.wrong
    ]
    times: dict[str, list[float]] = {}
    for row in rows:
        if row.milliseconds is not None and row.since == "proof":
            times.setdefault(str(row.ranks), []).append(round(row.milliseconds, 1))
    return {**counts, "wrong": wrong, "milliseconds": times}


def _count_pairs(outcomes: Sequence[causes.Outcome]) -> Found:
    wrong = [", ".join(each.pair) for each in outcomes if not each.right]
    return {"pairs": len(outcomes), "named": len(outcomes) - len(wrong), "wrong": wrong}


def _killed(framework: str) -> dict[str, killed_table.Outcome]:
    found: dict[str, killed_table.Outcome] = {}
    for ranks in KILLED_RANKS:
        for moment in MOMENTS:
            with tempfile.TemporaryDirectory() as directory:
                found[f"{moment}, {ranks} ranks"] = killed_table.kill_one(framework, moment, ranks, Path(directory))
    return found


def _count_killed(outcomes: Mapping[str, killed_table.Outcome]) -> Found:
    wrong = [f"{name}: {'; '.join(each.wrong)}" for name, each in outcomes.items() if each.wrong]
    return {"jobs": len(outcomes), "named": len(outcomes) - len(wrong), "wrong": wrong}


def _reports(framework: str) -> list[Outcome]:
    columns = {"Accelerate": "accelerate", "Lightning": "lightning", "Trainer": "transformers"}
    chosen = [each for each in REPORTS if columns.get(re.split(r"\W", each.framework)[0], "torch") == framework]
    with tempfile.TemporaryDirectory() as directory:
        return run_reports(chosen, Path(directory))


def _count_reports(outcomes: Sequence[Outcome]) -> Found:
    missed = [each.report.names for each in outcomes if each.found is None or each.faults]
    heard = [f"{each.report.names}, the right program" for each in outcomes if any(each.right)]
    named, silent = len(outcomes) - len(missed), len(outcomes) - len(heard)
    return {"reports": len(outcomes), "named": named, "silent": silent, "wrong": [*missed, *heard]}


Resumed = tuple[once_resumes.Case, list[str], str]


def _resumes(framework: str) -> list[Resumed]:
    kinds = {"torch": ("torch", "stateful")}.get(framework, (framework,))
    cases = [case for case in map(once_resumes.Case.of, range(RESUMES)) if case.kind in kinds]
    with tempfile.TemporaryDirectory() as directory:
        return list(once_resumes.run(cases, Path(directory)))


def _count_resumes(found: Sequence[Resumed]) -> Found:
    right = [not wrong for case, _, wrong in found if not case.fault]
    named = [bool(said) and not wrong for case, said, wrong in found if case.fault]
    missed = [case for case, said, wrong in found if wrong or (case.fault and not said)]
    wrong = [f"{case.kind}, {case.fault or 'resumed rightly'}, {case.ranks[2]} ranks" for case in missed]
    counts = {"right": len(right), "silent": sum(right), "wrongly": len(named), "named": sum(named)}
    return {**counts, "wrong": wrong}


def _remedies(framework: str) -> list[RankResult]:
    names = {"torch": remedy_jobs.TORCH, "accelerate": remedy_jobs.ACCELERATE}[framework]
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(remedy_jobs.mended, 2, list(names), directory=Path(directory), deadline_seconds=300)


def _count_remedies(results: Sequence[RankResult]) -> Found:
    heard = remedy_jobs.still_heard(results)
    wrong = [": ".join(job) for job, kinds in heard.items() if kinds]
    return {"remedies": len(heard), "silent": len(heard) - len(wrong), "wrong": wrong}


def _detection(framework: str) -> list[dict[str, Any]]:
    del framework  # a plain loop
    return [detection.row_of(fault, COUNTED_LOOP, ranks, 3) for fault in detection.FAULTS for ranks in (2, 4)]


def _count_detection(rows: Sequence[Mapping[str, Any]]) -> Found:
    keys = {"ranks": "ranks", "seconds": "seconds (median)", "named": "ranks naming it"}
    found = [{name: row[key] for name, key in keys.items()} for row in rows]
    return {"rows": [{"fault": detection.FAULTS[row["fault"]], **each} for row, each in zip(rows, found, strict=True)]}


def _costs(framework: str) -> list[Table]:
    return list(tables(BENCHMARKS[framework], quick=False))


def _count_costs(found: Sequence[Table]) -> Found:
    several = [table for table in found if "ranks: 1" not in table.title]  # with one rank, nothing is compared
    return {"rows": [_cost(each.title, row) for each in several for row in each.rows if row.get("what") in _COUNTED]}


def _cost(title: str, row: Mapping[str, Any]) -> dict[str, Any]:
    median, ratio, more = (next(key for key in row if key.startswith(word)) for word in ("median", "÷", "minus"))
    unit = median.removeprefix("median ")
    figures = {"median": row[median], "low": row["lower quartile"], "high": row["upper quartile"]}
    return {"what": title, "unit": unit, **figures, "against": ratio[2:], "ratio": row[ratio], "more": row[more]}


PARTS: Mapping[str, Part] = {
    "zoo": Part(
        "make zoo",
        list(FRAMEWORKS),
        _zoo,
        _count_zoo,
        [("an odd, legal, healthy program hears nothing, and computes the same", "silent", "programs")],
    ),
    "soak": Part(
        "make soak",
        list(soak.KINDS),
        _soak,
        _count_soak,
        [("a random healthy job hears nothing, and trains to the same bits", "silent", "jobs")],
    ),
    "shipped": Part(
        "make shipped",
        ["lightning", "transformers"],
        _shipped,
        _count_shipped,
        [
            ("a program of another project, unchanged, hears nothing, and learns the same", "silent", "jobs"),
            ("if one of its ranks has a batch less, that rank is named, and the job ends", "named", "uneven"),
        ],
    ),
    "faults": Part(
        "make faults",
        list(CANNOT),
        _faults,
        _count_faults,
        [
            ("a job that is only slow hears nothing", "silent", "slow"),
            ("a fault is named on each rank, with the right kind, ranks and words; nothing is left", "named", "faults"),
        ],
    ),
    "pairs": Part(
        "python -m integration_tests.causes",
        list(causes.FRAMEWORKS),
        causes.outcomes,
        _count_pairs,
        [("of two faults at once, the cause is named first, and the other one too", "named", "pairs")],
    ),
    "killed": Part(
        "make killed",
        list(RUNS),
        _killed,
        _count_killed,
        [("a killed rank is named before torchrun ends the others, and the files are written", "named", "jobs")],
    ),
    "resumes": Part(
        "make resumes",
        ["torch", "accelerate", "lightning"],
        _resumes,
        _count_resumes,
        [
            ("a run that resumes rightly hears nothing", "silent", "right"),
            ("a run that resumes wrongly is named, with the right numbers of samples", "named", "wrongly"),
        ],
    ),
    "reports": Part(
        "make reports",
        ["torch", "lightning", "accelerate", "transformers"],
        _reports,
        _count_reports,
        [
            ("a program with the fault of a public report is named", "named", "reports"),
            ("the same program without that fault hears nothing", "silent", "reports"),
        ],
    ),
    "remedies": Part(
        "pytest integration_tests/test_remedies_applied.py",
        ["torch", "accelerate"],
        _remedies,
        _count_remedies,
        [("a faulty job with the remedy of its message applied hears nothing more", "silent", "remedies")],
    ),
    "detection": Part("python -m benchmarks --only detection", ["torch"], _detection, _count_detection),
    "costs": Part(
        f"python -m benchmarks --only {' '.join(name for names in BENCHMARKS.values() for name in names)}",
        list(BENCHMARKS),
        _costs,
        _count_costs,
    ),
}
