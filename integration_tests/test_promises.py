"""docs/promises.md: its figures are those that its command has kept, and are made of what the tables return."""

import json
import shutil
from typing import Any

import pytest

from benchmarks import detection
from benchmarks.results import COUNTOFF, NO_OP, compared
from integration_tests import causes, killed_table, once_resumes, promises, shipped, soak
from integration_tests.faults.matrix import Row
from integration_tests.harness import RankResult
from integration_tests.promise_tables import COUNTED_LOOP, FRAMEWORKS, PARTS
from integration_tests.remedy_jobs import TORCH
from integration_tests.reports.cases import REPORTS
from integration_tests.reports.runner import Outcome, Said
from integration_tests.zoo.runner import Findings

SAID = Said(REPORTS[0].kind, "…", "1 batch of train epoch 1")
JOB = next((name, words) for name, case in TORCH.items() for words in case.mended)
RETURNED: dict[str, tuple[Any, dict[str, int]]] = {
    "zoo": ([Findings({"b[on]": "said"}, ["a[off]", "a[on]", "b[off]", "b[on]"], 1.0)], {"programs": 2, "silent": 1}),
    "soak": (soak.KindTotals(2 * soak.FITS, ["torch, 2 ranks: said"]), {"jobs": 2 * soak.FITS, "silent": soak.FITS}),
    "shipped": (
        [
            shipped.Row(shipped.PROGRAMS[0], "torchrun", "script", True, "rank 1 …", 1.0),
            shipped.Row(shipped.PROGRAMS[0], "torchrun", "launcher", True, "", 1.0),
            shipped.Row(shipped.PROGRAMS[1], "python", "script", False, None, 1.0),
        ],
        {"jobs": 3, "silent": 2, "uneven": 2, "named": 1},
    ),
    "faults": (
        [
            Row("F1", "torch", 2, milliseconds=1.26, since="proof"),
            Row("F1", "torch", 4, wrong=["said nothing"]),
            Row("F10", "torch", 2),
        ],
        {"faults": 2, "named": 1, "slow": 1, "silent": 1},
    ),
    "pairs": (
        [causes.Outcome(pair, "rank 1 …", right) for pair, right in zip(causes.PAIRS, (True, False), strict=False)],
        {"pairs": 2, "named": 1},
    ),
    "killed": (
        {
            "batch, 2 ranks": killed_table.Outcome((), 1, 1.0, ""),
            "start, 2 ranks": killed_table.Outcome(("no incident",), 1, 1.0, ""),
        },
        {"jobs": 2, "named": 1},
    ),
    "resumes": (
        [
            (once_resumes.Case.of(0), [], ""),
            (once_resumes.Case.of(2), ["NotReadOnce: …"], "stage 1: a right one heard"),
            (once_resumes.Case.of(1), ["NotReadOnce: …"], ""),
            (once_resumes.Case.of(3), [], ""),
        ],
        {"right": 2, "silent": 1, "wrongly": 2, "named": 1},
    ),
    "reports": (
        [Outcome(REPORTS[0], ((), (SAID,)), ((), ())), Outcome(REPORTS[1], ((), ()), ((), (SAID,)))],
        {"reports": 2, "named": 1, "silent": 1},
    ),
    "remedies": ([RankResult(0, {JOB: [("LostRank", "…")]}, 0, "", "", 1.0)], {"remedies": 1, "silent": 0}),
}
"""What a table returns, and the figures of it."""


def test_the_page_is_what_the_command_writes():
    """Written again from its figures, the page stays as it is."""
    text = (promises.DOCS / "promises.md").read_text()
    assert promises.page(text, json.loads((promises.DOCS / "promises.json").read_text())) == text


@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.claims])
def test_the_figures_are_made_of_what_the_table_returns(name):
    """What was kept and what was tried are counted, and each broken promise is in words."""
    returned, due = RETURNED[name]
    found = PARTS[name].count(returned)
    assert {key: found[key] for key in due} == due
    assert {key for _, *keys in PARTS[name].claims for key in keys} == set(due)
    assert found["wrong"]
    kept = {name: {"torch": promises.entry_of(found)}}
    assert all(f"**{found[times]} of {found[of]}**" in promises.promises(kept) for _, times, of in PARTS[name].claims)
    assert all(each in promises.broken(kept) for each in found["wrong"])


def test_the_times_and_costs_of_a_table_are_in_the_page():
    """The milliseconds of the fault table, the seconds of a real job, and a comparison of a benchmark."""
    detected = [detection.row_of("F1", COUNTED_LOOP, 2, 1)]
    compares = [compared("A dispatch", "µs", {NO_OP: [2e-6], COUNTOFF: [3e-6]}, against=NO_OP)]
    found = {"faults": RETURNED["faults"][0], "detection": detected, "costs": compares}
    kept = {name: {"torch": promises.entry_of(PARTS[name].count(each))} for name, each in found.items()}
    assert "| 2 | 1 | 1.3 | 1.3 to 1.3 | 1.3 |" in promises.times(kept)
    row = detected[0]  # gloo may abort the rank at fault before it can say so
    line = f"| {detection.FAULTS['F1']} | 2 | {row['seconds (median)']:.3g} | {row['ranks naming it']} |"
    assert line in promises.detected(kept)
    assert "| A dispatch | 3 µs (3 to 3) | no-op callback | 1.5 | 1 µs |" in promises.costs(kept)


def test_a_part_that_does_not_run_keeps_its_figures(tmp_path):
    """One table in one framework: its figures are new, the others stay, and the page has both."""
    shutil.copy(promises.DOCS / "promises.md", tmp_path)
    other = promises.entry_of(PARTS["zoo"].count(RETURNED["zoo"][0]))
    (tmp_path / "promises.json").write_text(json.dumps({"zoo": {"torch": other}}))
    assert promises.main(["--only", "pairs", "--frameworks", "accelerate"], tmp_path) == 0
    kept = json.loads((tmp_path / "promises.json").read_text())
    assert kept["zoo"]["torch"] == other
    pairs = len(list(causes.pairs_of("accelerate")))
    assert kept["pairs"]["accelerate"]["found"] == {"pairs": pairs, "named": pairs, "wrong": []}
    text = (tmp_path / "promises.md").read_text()
    assert "**1 of 2**" in text
    assert f"**{pairs} of {pairs}**" in text


def test_each_table_has_its_frameworks():
    assert {framework for part in PARTS.values() for framework in part.frameworks} == set(FRAMEWORKS)
