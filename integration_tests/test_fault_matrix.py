"""A part of the fault matrix: all faults in a plain loop, and some in each framework.

Faults that another test claims with real ranks are run nightly. `python -m integration_tests.faults` runs all of it.
"""

from importlib.util import find_spec

import pytest

from countoff.core.session.threads.watchdog import _ABORTED
from integration_tests.faults.cases import CANNOT, CASES
from integration_tests.faults.matrix import Row, judge, run_cell
from integration_tests.harness import RankResult
from tests.adapters import MESSAGES

PLAIN = [(name, "torch", 2) for name, case in CASES.items() if case.least_ranks <= 2 and name not in CANNOT["torch"]]
# What the frameworks' own tests leave out.
REST = [
    ("F17", "torch", 4),
    ("F5", "accelerate", 2),
    ("F12b", "accelerate", 2),
    ("F4", "transformers", 2),
    ("F11", "transformers", 2),
    ("F8", "lightning", 2),
    ("F12", "lightning", 2),
    ("F9", "composer", 2),
    ("F14", "composer", 2),
    ("F19", "accelerate", 2),
    ("F20", "accelerate", 2),
    *(("F24", adapter, 2) for adapter in ("accelerate", "transformers", "lightning", "composer")),
    *(("F26", adapter, 2) for adapter in ("accelerate", "lightning")),
]
CLAIMED_ELSEWHERE = {
    "torch": {
        "F3": "test_trace.py",
        "F4": "test_odd_loops.py",
        "F5": "test_trace.py, and the cell of F5-stop",
        **dict.fromkeys(("F11", "F14"), "test_nano_loops.py"),
        "F12": "test_torch.py",
        **dict.fromkeys(("F9", "F15"), "test_data_identity.py"),
        **dict.fromkeys(("F1-stop", "F2-stop", "F3-stop", "F16-stop"), "test_torch_even.py"),
        **dict.fromkeys(("F21", "F22", "F23"), "test_resume.py"),
        "F24": "test_weights.py",
        "F25": "test_micro_batches.py",
        "F26": "test_model.py",
        "F28": "test_host_versions.py",
        **dict.fromkeys(("F29", "F30"), "test_datasets.py"),
        "F31": "test_short.py",
    },
    "accelerate": {**dict.fromkeys(("F19", "F20"), "test_streams.py"), "F24": "test_weights.py"},
    "lightning": {"F26": "the cell of Accelerate"},
    "composer": {"F9": "test_data_identity.py"},
}
"""Where each fault is named at each merge, if not by its cell here."""
CELLS = [
    pytest.param(*cell, marks=pytest.mark.nightly if cell[0] in CLAIMED_ELSEWHERE.get(cell[1], {}) else ())
    for cell in (*PLAIN, *REST)
]
REASON = """countoff: UnevenBatches: rank 1 ran out of data after 4 batches; rank 0 has batch 5.
  ran out first: rank 1 of 2 ranks"""


@pytest.mark.parametrize(("name", "adapter", "world_size"), CELLS)
def test_a_fault_is_named_and_leaves_nothing_behind(tmp_path, name, adapter, world_size):
    """Every rank gives the verdict that is due and exits, and no process, file or thread remains."""
    if find_spec(adapter) is None:
        pytest.skip(f"{adapter} is not installed here")
    row = run_cell(CASES[name], adapter, world_size, tmp_path)
    assert not row.wrong, f"{'; '.join(row.wrong)}\n{row.output}"


def ended(*texts: str, exit_codes: tuple[int, ...] = (1, 1)) -> list[RankResult]:
    """Two ranks that have printed these texts."""
    return [
        RankResult(
            rank, None, code, "".join(f"[rank {rank}] {line}\n" for line in text.splitlines()), "countoff X", 1.0
        )
        for rank, (text, code) in enumerate(zip(texts, exit_codes, strict=True))
    ]


WRONG = {
    "silence": (ended("", ""), "said nothing, expected UnevenBatches"),
    "another kind": (ended(*[REASON.replace("UnevenBatches", "LostRank")] * 2), "said LostRank"),
    "on one rank only": (ended(REASON, ""), "not the same sentence on every rank"),
    "two sentences": (ended(REASON, REASON.replace("batch 5", "batch 6")), "not the same sentence on every rank"),
    "another rank": (
        ended(*[REASON.replace("first: rank 1", "first: rank 0")] * 2),
        "names ranks [0], the culprits are [1]",
    ),
    "a good end": (ended(REASON, REASON, exit_codes=(0, 1)), "rank 0: exit code 0"),
    "an abort": (ended(REASON, REASON, exit_codes=(1, -6)), "rank 1: exit code -6"),
}


def test_what_the_matrix_proves_is_what_adapters_declare():
    """Each verdict that is due in a framework is one that its adapter declares, and the table in the docs has it."""
    due = {
        (adapter, case.due(adapter)[0])
        for adapter in CANNOT
        for name, case in CASES.items()
        if name not in CANNOT[adapter]
    }
    assert {(adapter, kind) for adapter, kind in due if kind and kind not in MESSAGES[adapter].kinds} == set()


def test_a_job_that_ends_as_it_should_is_right():
    """The judge accepts a job with the verdict that is due."""
    row = Row("F1", "torch", 2)
    judge(row, CASES["F1"], ended(REASON, REASON), {})
    assert (row.kind, row.wrong) == ("UnevenBatches", [])


def test_what_a_rank_says_of_its_own_end_is_no_verdict():
    """The judge accepts a rank that adds how it was brought back from a wait for its GPU."""
    row = Row("F1", "torch", 2)
    judge(row, CASES["F1"], ended(REASON, f"{REASON}\ncountoff: {_ABORTED.format(3)}"), {})
    assert row.wrong == []


@pytest.mark.parametrize("how", WRONG)
def test_a_job_that_ends_otherwise_is_wrong(how):
    """The judge rejects silence, other words, another rank, and other exit codes."""
    results, words = WRONG[how]
    row = Row("F1", "torch", 2)
    judge(row, CASES["F1"], results, {})
    assert any(words in each for each in row.wrong), row.wrong


def test_a_healthy_job_that_is_accused_is_wrong():
    """The judge rejects a verdict on a healthy job."""
    row = Row("F10", "torch", 2)
    judge(row, CASES["F10"], ended(REASON, REASON), {})
    assert "said UnevenBatches, expected nothing" in row.wrong


def test_what_is_left_behind_is_wrong():
    """The judge rejects a job that left a process."""
    row = Row("F1", "torch", 2, left=["process 1234 of rank 0"])
    judge(row, CASES["F1"], ended(REASON, REASON), {})
    assert row.wrong == ["left: process 1234 of rank 0"]
