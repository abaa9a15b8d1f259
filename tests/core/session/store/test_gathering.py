"""Records of many ranks, gathered from the store without waiting."""

from collections.abc import Sequence
from typing import Any

import pytest

from countoff.core.session.store import gathering
from countoff.core.session.store.gathering import Awaiting, Gathering
from tests.fake_store import FakeStore


def store_with(**records: dict[str, Any]) -> FakeStore:
    """A store with these records; ``plan_0`` is the key ``plan/0``."""
    store = FakeStore()
    for name, record in records.items():
        store.set(name.replace("_", "/"), record)
    return store


@pytest.mark.parametrize("deadline", [float("inf"), 0.0])
def test_a_gathering_is_done_at_its_deadline(deadline: float) -> None:
    """A gathering is done once all ranks have reported, or at its deadline with the ranks that are missing."""
    store, done = store_with(plan_0={"rank": 0}), list[Any]()
    waiting = Gathering("plan", range(2), deadline, lambda *found: done.append(found))
    assert waiting.poll(store) == (deadline == 0.0)
    assert done == ([] if deadline else [({0: {"rank": 0}}, [1])])


def test_gathered_records_are_deleted() -> None:
    store, done = store_with(plan_0={"rank": 0}, plan_1={"rank": 1}), list[Any]()
    assert Gathering("plan", range(2), float("inf"), lambda *found: done.append(found)).poll(store)
    assert done == [({0: {"rank": 0}, 1: {"rank": 1}}, [])]
    assert store.values == {}


def test_records_to_be_kept_are_not_deleted() -> None:
    """With `keep`, gathered records stay in the store."""
    store = store_with(stall_0={"rank": 0})
    assert Gathering("stall", [0], float("inf"), lambda *_: None, keep=True).poll(store)
    assert store.get("stall/0") == {"rank": 0}


def test_missing_ranks_are_reported_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the deadline the missing ranks are reported, but not at every poll."""
    missed: list[list[int]] = []
    monkeypatch.setattr(gathering, "REMINDER_SECONDS", -1)
    waiting = Gathering("plan", range(3), float("inf"), lambda *_: None, missed.append)
    monkeypatch.setattr(gathering, "REMINDER_SECONDS", 1000)
    store = store_with(plan_1={"rank": 1})
    assert not waiting.poll(store)
    assert not waiting.poll(store)
    assert missed == [[0, 2]]


def test_ranks_that_report_just_before_a_reminder_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the reports of many ranks takes a while, in which the last ones may come."""

    class Late(FakeStore):
        def has_reports(self, name: str, ranks: Sequence[int]) -> bool:
            there = super().has_reports(name, ranks)
            self.set("plan/0", {"rank": 0})
            return there

    missed: list[list[int]] = []
    monkeypatch.setattr(gathering, "REMINDER_SECONDS", -1)
    waiting = Gathering("plan", [0], float("inf"), lambda *_: None, missed.append)
    assert not waiting.poll(Late())
    assert waiting.poll(store_with(plan_0={"rank": 0}))
    assert missed == []


def test_a_gathering_is_not_done_before_the_one_that_may_explain_it() -> None:
    """The last rank's reports may all come between a look at the first name and one at the second."""
    store, done = store_with(splits_0={"rank": 0}, span_0={"rank": 0}, span_1={"rank": 1}), list[str]()
    first = Gathering("splits", range(2), float("inf"), lambda *_: done.append("splits"))
    second = Gathering("span", range(2), 0.0, lambda *_: done.append("span"), after=[first])
    assert not first.poll(store)
    store.set("splits/1", {"rank": 1})
    assert not second.poll(store)
    assert first.poll(store)
    assert second.poll(store)
    assert done == ["splits", "span"]


def test_a_gathering_of_no_rank_is_done_at_once() -> None:
    done = list[Any]()
    assert Gathering("span/1", [], float("inf"), lambda *found: done.append(found)).poll(FakeStore())
    assert done == [({}, [])]


def test_awaiting_ends_with_the_record() -> None:
    done = list[Any]()
    assert Awaiting("plan", done.append).poll(store_with(plan={"x": 1}))
    assert done == [{"x": 1}]


def test_awaiting_continues_without_the_record() -> None:
    assert not Awaiting("plan", lambda found: pytest.fail(f"done with {found}")).poll(FakeStore())
