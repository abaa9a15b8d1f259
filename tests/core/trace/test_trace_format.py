"""The format of the trace is documented, and its names can be read back."""

import pytest

from countoff.core.checks.check import FitStart
from countoff.core.checks.even import EvenCheck
from countoff.core.checks.plan import PROOF_FIELDS, PlanCheck, judge_plans
from countoff.core.protocol.records import FitPlan
from countoff.core.session.state import State
from countoff.core.settings import Settings
from countoff.core.trace.format import (
    COMPARED_LIMITS,
    COMPARED_PLAN,
    COMPARED_SETTINGS,
    COUNTED,
    ENVIRONMENT,
    FLIGHT_RECORDER_FILE,
    INCIDENT_FILE,
    STACKS,
    WRITTEN_BY,
    file_name,
    parse_name,
)
from tests.paths import DOCS

PAGE = (DOCS / "seeing.md").read_text()


def test_the_page_has_the_incident_and_its_keys() -> None:
    for name in (INCIDENT_FILE, COUNTED, STACKS, ENVIRONMENT, WRITTEN_BY, FLIGHT_RECORDER_FILE.format(3)):
        assert f"`{name}`" in PAGE


def test_the_values_that_ranks_compare_are_those_of_the_roll_call() -> None:
    assert {*COMPARED_PLAN, *COMPARED_LIMITS} == set(PROOF_FIELDS) - {
        "limits",
        "evaluation_intervals",
    }  # whose differences the verdict tells
    assert {*COMPARED_PLAN, *COMPARED_LIMITS} <= FitPlan().to_json().keys()
    start = FitStart(FitPlan(), {})
    even = EvenCheck(State(0, 2, Settings(uneven_train="stop"), {})).report(start, 0).keys() - {"length", "now"}
    assert {*COMPARED_SETTINGS} == even | PlanCheck(weights_every=5).report(start, 0).keys() - {"plan"}
    for name in COMPARED_LIMITS:
        unlimited = {name: None}
        assert judge_plans({0: unlimited, 1: {name: 1}}) is not None


@pytest.mark.parametrize("rank", [0, 99999, 100000])
@pytest.mark.parametrize("number", [None, 1, 12])
def test_a_name_can_be_read_back(rank: int, number: int | None) -> None:
    assert parse_name(file_name(rank, number)) == (rank, number)


@pytest.mark.parametrize("name", ["rank-3.jsonl", "rank-00003.x.jsonl", "rank-00003.jsonl.gz", "xrank-00003.jsonl", ""])
def test_another_name_is_no_file_of_a_trace(name: str) -> None:
    assert parse_name(name) is None
