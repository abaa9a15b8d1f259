"""When a rank that is away is lost: the rule, and what ranks tell each other for it."""

import pytest

from countoff.core import Settings
from countoff.core.checks.lost import DIED, GONE_SECONDS, STOPPED, Need, is_lost, loss_of
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.failures import Failure
from countoff.core.protocol.records import Absence, absence_entry, absence_from_entry
from countoff.core.session.state import State
from tests.outbox import written

RAISED = Absence(1, "raised ValueError: torn", begun=4)
GONE = Absence(1, "is gone (pid 4)", "It was killed.", DIED, certain=True)
STOP = Absence(1, "is stopped (pid 4, SIGSTOP)", "", STOPPED)


@pytest.mark.parametrize(
    ("absence", "patience"), [(RAISED, 15.0), (GONE, GONE_SECONDS), (STOP, 15.0)], ids=["raised", "gone", "stopped"]
)
def test_a_rank_is_lost_once_another_one_has_waited(absence: Absence, patience: float) -> None:
    assert not is_lost(absence, Need(), Settings())
    assert not is_lost(absence, Need(waited=patience - 0.1), Settings())
    assert is_lost(absence, Need(waited=patience), Settings())


@pytest.mark.parametrize("absence", [RAISED, GONE, STOP])
def test_a_rank_is_lost_once_a_collective_of_another_one_has_failed(absence: Absence) -> None:
    assert is_lost(absence, Need(failed=True), Settings())


def test_a_rank_is_lost_once_another_one_is_beyond_it() -> None:
    """Ranks that leave alike may be one batch apart. How far a process had come that is gone is not known."""
    found = [is_lost(RAISED, Need(begun=begun, known=15.0), Settings()) for begun in (3, 4, 5, 6)]
    assert found == [False, False, False, True]
    assert not is_lost(GONE, Need(begun=1000, known=1000.0), Settings())


def test_a_rank_that_may_go_on_after_its_exception_is_waited_for() -> None:
    """It says so a moment later, and in that moment a loop without collectives may begin many batches."""
    assert not is_lost(RAISED, Need(begun=1000, known=14.9), Settings())


def test_a_rank_that_is_gone_before_all_have_begun_is_lost() -> None:
    """The roll call waits for it. An exception of that time may be caught, and the roll call begin again."""
    assert is_lost(GONE, Need(counts_off=True), Settings())
    assert not is_lost(RAISED, Need(counts_off=True), Settings())


@pytest.mark.parametrize("absence", [RAISED, GONE, STOP])
def test_an_absence_travels_through_the_log(absence: Absence) -> None:
    assert absence_from_entry(absence_entry(absence), range(2)) == absence
    with pytest.raises(ValueError, match="expected one of"):
        absence_from_entry(absence_entry(absence), range(1))


def test_nothing_waits_for_the_row_of_a_rank_that_cannot_answer() -> None:
    assert [loss_of(each).gone for each in (RAISED, GONE, STOP)] == [False, True, True]


def state_of(rank: int = 0) -> State:
    state = State(rank, 2, Settings(), {}, complete=True)
    state.spans.append(SpanCounters("train epoch 0"))
    return state


def test_a_failure_is_told_once_and_taken_back() -> None:
    """The loop that goes on is known to go on. What has not been written before needs not be."""
    state = state_of(rank=1)
    state.spans[0].started = 4
    for _ in range(2):
        state.fail(Failure("ValueError: torn"))
    (told,) = written(state)
    assert absence_from_entry(told, range(2)) == RAISED
    assert not state.is_written(told)
    state.recover()
    (back,) = written(state)
    assert state.is_written(told)
    assert state.is_written(back)
    state.receive(told)
    assert not state.is_written(back)
    assert state.failure is None


def test_a_loop_that_catches_every_exception_fills_no_log() -> None:
    state = state_of(rank=1)
    for number in range(100):
        state.fail(Failure(f"ValueError: {number}"))
        state.recover()
    assert sum(entry["type"] == "absence" for entry in written(state)) == 16
