"""What ranks lose where a framework ends a span at the shortest of them: in words, and as the roll call finds it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

import pytest

from countoff.core import FitPlan, Guard, Settings, Verdict
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.state import State
from countoff.core.protocol.truncation import UnusedBatches, truncated
from countoff.core.runtime.roll_call import RollCall
from countoff.core.runtime.speaker import Speaker
from tests.outbox import written

EPOCH = "train epoch 0"


# Words --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (UnusedBatches(1), "1 batch"),
        (UnusedBatches(3, 12), "3 batches (12 samples)"),
        (UnusedBatches(1, 1), "1 batch (1 sample)"),
        (UnusedBatches(1, 4, exact=False), "at least 1 batch (4 samples)"),
        (UnusedBatches(2, None, exact=False), "at least 2 batches"),
    ],
)
def test_a_rest_in_words(left: UnusedBatches, words: str) -> None:
    assert str(left) == words


def said(left: Mapping[int, UnusedBatches], span: str = EPOCH, used: int = 7) -> Verdict:
    verdict = truncated(span, used, left)
    assert verdict is not None
    return verdict


def test_who_ran_out_and_what_each_other_rank_lost_is_said() -> None:
    verdict = said(
        {0: UnusedBatches(1, 4, False), 1: UnusedBatches(0), 2: UnusedBatches(2, 8), 3: UnusedBatches(1, 4, False)}
    )
    assert (verdict.kind, verdict.ranks, verdict.subject) == ("Truncated", (1,), "train")
    assert verdict.sentence == (
        "train epoch 0 ended on every rank after 7 batches, where rank 1 ran out of data: "
        "ranks 0, 3 lost at least 1 batch (4 samples) each; rank 2 lost 2 batches (8 samples)."
    )


def test_the_short_ranks_are_named_whichever_they_are() -> None:
    left = {rank: UnusedBatches(0 if rank in (0, 5) else 3) for rank in range(8)}
    verdict = said(left, used=1)
    assert verdict.ranks == (0, 5)
    assert "ended on every rank after 1 batch, where ranks 0, 5 ran out of data: ranks " in verdict.sentence
    assert verdict.sentence.endswith(" lost 3 batches each.")


def test_four_different_losses_are_listed_and_the_rest_is_hinted_at() -> None:
    shown = said({rank: UnusedBatches(rank) for rank in range(5)}).sentence
    assert shown.count(" lost ") == 4
    assert "…" not in shown
    cut = said({rank: UnusedBatches(rank) for rank in range(6)}).sentence
    assert cut.count(" lost ") == 4
    assert cut.endswith("rank 4 lost 4 batches; ….")


def test_evaluations_are_a_subject_of_their_own() -> None:
    assert said({0: UnusedBatches(0), 1: UnusedBatches(1)}, "evaluation digits").subject == "evaluation"


@pytest.mark.parametrize(
    "left",
    [{}, {0: UnusedBatches(0)}, {0: UnusedBatches(0), 1: UnusedBatches(0)}, {0: UnusedBatches(1), 1: UnusedBatches(5)}],
    ids=["nobody", "one rank", "all ran out", "a limit ended it"],
)
def test_nothing_is_said_where_no_rank_was_cut_short_by_another(left: dict[int, UnusedBatches]) -> None:
    assert truncated(EPOCH, 7, left) is None


# The roll call ------------------------------------------------------------------------------------------------------


class Desk:
    """A store, and a speaker that does at once what it is handed; polls only when it is told to."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.polls: list[Any] = []
        self.heartbeats = self

    def hand(self, act: Callable[[Any], None]) -> None:
        act(self)

    def poll(self, poll: Any) -> None:
        self.polls.append(poll)

    def find_neighbours(self, channel: Any, *, complete: bool) -> None:
        pass

    def set(self, key: str, value: Any) -> None:
        self.values[key] = json.dumps(value)

    def get(self, key: str) -> Any:
        return json.loads(self.values[key])

    def get_many(self, keys: list[str]) -> list[Any]:
        return [self.get(key) for key in keys]

    def has(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def run(self) -> bool:
        """Polls once; whether everything that was waited for has come."""
        self.polls = [poll for poll in self.polls if not poll.poll(self)]
        return not self.polls


class Ranks:
    """The roll calls of several ranks around one desk, and what rank 0 sends to the log."""

    def __init__(self, world_size: int, **chosen: Any) -> None:
        self.desk = Desk()
        self.states = [State(rank, world_size, Settings(**chosen), {}) for rank in range(world_size)]
        self.calls = [RollCall(state, cast("Speaker", self.desk)) for state in self.states]

    def count_off(self, *plans: FitPlan) -> None:
        """Has as many ranks count off as there are plans, the last ones first, and waits for those that do not."""
        calls = list(zip(self.calls, plans, strict=False))
        for call, plan in reversed(calls):
            call.count_off(plan, {})
        while not self.desk.run():
            pass

    def close(self, span: str, *unused: UnusedBatches | None, evaluation: bool = False) -> list[dict[str, Any]]:
        """Has every rank close a span after 4 batches with what it has left; returns what rank 0 sends."""
        for rank, call in reversed(list(enumerate(self.calls))):
            closed = SpanCounters(span, evaluation=evaluation, opened=1, started=4, unused=unused[rank])
            call.span_closed(closed, 0.0, Verdict("WrongLength", "there are 4.") if rank == 0 else None)
        assert self.desk.run()
        return [{"type": each["type"], **each["verdict"]} for each in self.sent()]

    def sent(self) -> list[dict[str, Any]]:
        """What all ranks have written since the last call."""
        return [entry for state in self.states for entry in written(state)]


@pytest.fixture
def ranks() -> Ranks:
    ranks = Ranks(2)
    ranks.count_off(FitPlan(), FitPlan())
    return ranks


def test_a_truncated_epoch_is_noted_in_place_of_the_adapters_own_notice(ranks: Ranks) -> None:
    (entry,) = ranks.close(EPOCH, UnusedBatches(1, 4, False), UnusedBatches(0))
    assert (entry["type"], entry["kind"]) == ("notice", "Truncated")
    assert (
        "after 4 batches, where rank 1 ran out of data: rank 0 lost at least 1 batch (4 samples)." in entry["sentence"]
    )


def test_an_even_epoch_leaves_the_adapters_notice_alone(ranks: Ranks) -> None:
    assert [each["kind"] for each in ranks.close(EPOCH, UnusedBatches(0), UnusedBatches(0))] == ["WrongLength"]


def test_nothing_is_claimed_while_a_rank_does_not_know_what_it_had_left() -> None:
    ranks = Ranks(3)
    ranks.count_off(FitPlan(), FitPlan(), FitPlan())
    assert [each["kind"] for each in ranks.close(EPOCH, UnusedBatches(1), UnusedBatches(0), None)] == ["WrongLength"]


def test_a_truncated_epoch_is_noted_once(ranks: Ranks) -> None:
    assert len(ranks.close(EPOCH, UnusedBatches(1), UnusedBatches(0))) == 1
    assert ranks.close("train epoch 1", UnusedBatches(1), UnusedBatches(0)) == []


@pytest.mark.parametrize(
    ("policy", "entries"),
    [("warn", [("notice", "Truncated")]), ("raise", [("end", "UnevenBatches")]), ("allow", [])],
)
def test_a_truncated_evaluation_is_what_the_user_wants_it_to_be(policy: str, entries: list[tuple[str, str]]) -> None:
    ranks = Ranks(2, uneven_eval=policy)
    ranks.count_off(FitPlan(), FitPlan())
    sent = ranks.close("evaluation digits", UnusedBatches(0), UnusedBatches(2), evaluation=True)
    assert [(each["type"], each["kind"]) for each in sent] == entries


def test_ranks_agree_on_the_values_of_the_plan_that_all_of_them_have() -> None:
    ranks = Ranks(3)
    same = FitPlan(batches_per_epoch=8, evaluations=5)
    ranks.count_off(same, replace(same, dp_rank=1), replace(same, loader_position=[0, 2]))
    names = {field.name for field in fields(FitPlan)}
    assert [call.agreed for call in ranks.calls] == [names - {"dp_rank", "loader_position"}] * 3
    assert ranks.sent() == []


def test_ranks_agree_on_nothing_while_one_has_not_counted_off(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(3, deadline_seconds=0.001)
    ranks.count_off(FitPlan(batches_per_epoch=8), FitPlan(batches_per_epoch=8))
    assert [call.agreed for call in ranks.calls] == [frozenset()] * 3
    assert "LateRank: rank 2 has not counted off" in capsys.readouterr().err


# The guard ----------------------------------------------------------------------------------------------------------


def test_what_is_left_over_belongs_to_the_innermost_span() -> None:
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.fit_start(FitPlan(batches_per_epoch=4))
    guard.train_start(0)
    train = guard._span
    guard.eval_start("validation")
    evaluation = guard._span
    guard.report_unused(UnusedBatches(2, 8))
    guard.eval_end("stopped")
    guard.train_end("exhausted")
    assert (train.unused, evaluation.unused) == (None, (2, 8, True))
    assert guard.notices == ()


def test_a_single_process_has_nobody_to_agree_with() -> None:
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.fit_start(FitPlan(batches_per_epoch=4))
    assert guard.agreed == frozenset()
