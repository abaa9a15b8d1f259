"""What the guards of a process share: each receives its own entries of the log, once and in order."""

from collections.abc import Mapping
from typing import Any

import pytest

from countoff.core import Settings, Verdict
from countoff.core.protocol.records import verdict_entry
from countoff.core.session.state import State
from countoff.core.session.threads.session import Session
from countoff.core.session.threads.writer import Writer
from tests.fake_store import FakeStore


def warning(guard: int, subject: str) -> Mapping[str, Any]:
    return {**verdict_entry("notice", Verdict("WrongLength", "there are 4.", subject=subject)), "guard": guard}


def subjects(state: State) -> list[str]:
    return [notice.subject for notice in state.notices]


def states(session: Session, *numbers: int) -> list[State]:
    made = [State(0, 2, Settings(), {}) for _ in numbers]
    for number, state in zip(numbers, made, strict=True):
        session.register(number, state)
    return made


def test_each_guard_receives_its_own_entries() -> None:
    session = Session(0, range(2))
    first, second = states(session, 0, 1)
    for index, (guard, subject) in enumerate([(0, "a"), (1, "b"), (0, "c")]):
        session.receive(index, warning(guard, subject))
    assert (subjects(first), subjects(second), session.read) == (["a", "c"], ["b"], 3)


def test_an_index_of_the_log_is_received_once() -> None:
    """Two threads may read an entry; a second entry of the same index changes nothing."""
    session = Session(0, range(2))
    (state,) = states(session, 0)
    session.receive(0, warning(0, "a"))
    session.receive(0, warning(0, "too late"))
    assert (subjects(state), session.read) == (["a"], 1)


@pytest.mark.parametrize("before", [0, 1 << 20], ids=["begun", "found"])
def test_a_guard_that_begins_late_receives_what_came_before(before: int) -> None:
    """Another rank may be ahead of this one, and have begun its next fit; what this one has found has a high number."""
    session = Session(0, range(2))
    states(session, before)
    session.receive(0, warning(1, "early"))
    session.receive(1, warning(1, "later"))
    (late,) = states(session, 1)
    assert subjects(late) == ["early", "later"]


def test_a_closed_guard_receives_nothing() -> None:
    """Nothing is kept for it either: a process may open and close guards for weeks."""
    session = Session(0, range(2))
    (closed,) = states(session, 0)
    session.remove(0)
    session.receive(0, warning(0, "after the end"))
    assert (subjects(closed), session.read, session.early) == ([], 1, {})


@pytest.mark.parametrize("entry", [{"type": "x"}, {"type": "x", "guard": None}, {"type": "x", "guard": -1}])
def test_an_entry_of_no_guard_is_refused_once(entry: dict[str, Any]) -> None:
    """It raises, and is not read a second time."""
    session = Session(0, range(2))
    with pytest.raises((KeyError, TypeError, ValueError)):
        session.receive(0, entry)
    assert session.read == 1


def test_guards_take_turns_in_one_log() -> None:
    """A guard appends behind the entries of others, and reads them on its way."""
    store, session = FakeStore(), Session(0, range(2))
    made = [State(0, 2, Settings(), {}) for _ in range(2)]
    writers = [Writer(state, number) for number, state in enumerate(made)]
    for writer in writers:
        writer.join(session)
    for place, (number, subject) in enumerate([(1, "a"), (0, "b"), (1, "c")]):
        entry = verdict_entry("notice", Verdict("WrongLength", "there are 4.", subject=subject))
        writers[number].append(entry)(store)
        assert store.get(f"log/{place}")["guard"] == number
    assert [subjects(state) for state in made] == [["b"], ["a", "c"]]


def test_a_rank_tells_of_an_entry_only_once_its_reader_has_it() -> None:
    """Others may delete the entry then, and a reader that waited for it would wait for ever."""
    session = Session(0, range(2))
    assert session.await_next() == 0
    session.receive(0, {"guard": 0})  # by the writer, while the reader waits for the same entry
    assert (session.read, session.passed) == (1, 0)
    session.arrived()
    assert session.passed == 1
    assert session.await_next() == 1
    assert session.passed == 1  # of the next entry nobody has told
