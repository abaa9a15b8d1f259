"""What becomes of a finding: by its kind, the user's choice, and whether it is proved and does harm."""

import pytest

from countoff.core import Settings, Verdict
from countoff.core.checks import KINDS
from countoff.core.levels import effect
from countoff.core.protocol.actions import PrintWarning, WriteEntry
from countoff.core.session.state import State


def state(**options: object) -> State:
    return State(0, 2, Settings.resolve(**options), {})


def written(of: State) -> list[str]:
    """The entries that wait to be written into the log, in words."""
    actions: list[object] = []
    while not of.outbox.empty():
        actions.append(of.outbox.get_nowait())
    return [f"{each.entry['type']} {each.entry['verdict']['kind']}" for each in actions if isinstance(each, WriteEntry)]


def test_every_kind_has_levels_and_its_default_is_the_documented_one() -> None:
    for kind in KINDS.values():
        assert kind.default.startswith({"raise": "raises", "warn": "warns"}[kind.level])
        assert kind.level in kind.accepts


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_off_is_never_said(kind: str) -> None:
    for harmful in (None, True, False):
        assert effect(Verdict(kind, "…", harmful=harmful), {kind: "off"}) == "off"


def test_a_proof_ends_the_job() -> None:
    ranks = state()
    ranks.propose(Verdict("StepMismatch", "they differ."))
    assert written(ranks) == ["end StepMismatch"]


def test_a_difference_that_may_be_legitimate_warns() -> None:
    ranks = state()
    ranks.note(Verdict("StepMismatch", "they differ.", subject="micro-batches"))
    assert written(ranks) == ["notice StepMismatch"]


@pytest.mark.parametrize(
    ("level", "entries"),
    [("warn", ["notice LearningRateMismatch"]), ("off", []), ("raise", ["end LearningRateMismatch"])],
)
def test_the_user_chooses(level: str, entries: list[str]) -> None:
    ranks = state(levels={"LearningRateMismatch": level})
    ranks.propose(Verdict("LearningRateMismatch", "they differ."))
    assert written(ranks) == entries


def test_a_warning_can_end_the_job_where_the_user_wants_that() -> None:
    ranks = state(levels={"WeightsDiffer": "raise"})
    ranks.note(Verdict("WeightsDiffer", "they differ."))
    assert written(ranks) == ["end WeightsDiffer"]


def test_one_rank_alone_is_only_warned() -> None:
    alone = State(0, 1, Settings(levels={"ResumeMismatch": "raise"}), {})
    alone.note(Verdict("ResumeMismatch", "it jumps."))
    assert isinstance(alone.outbox.get_nowait(), PrintWarning)
