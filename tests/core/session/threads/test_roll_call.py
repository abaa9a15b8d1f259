"""The roll calls of several ranks: what rank 0 compares, proposes, warns of and publishes."""

import threading
import time
from dataclasses import fields, replace
from typing import Any

import pytest

from countoff.core import FitPlan, Settings
from countoff.core.checks import Checks
from countoff.core.checks.check import FitStart
from countoff.core.checks.framework import WRONG_LENGTH
from countoff.core.protocol.counters import SpanCounters, UnusedBatches
from countoff.core.protocol.credits import Credits
from countoff.core.protocol.resume_record import ScheduleState
from countoff.core.session.state import State
from countoff.core.session.threads.other_ranks import OtherRanks
from countoff.core.session.threads.roll_call import RollCall
from tests.fake_store import FakeStore, FakeWriter
from tests.outbox import written

EPOCH = "train epoch 0"


class Ranks:
    """The roll calls of several ranks around one store, and what they write into the log."""

    def __init__(self, world_size: int, **chosen: Any) -> None:
        self.store = FakeStore()
        self.states = [State(rank, world_size, Settings(**chosen), {}) for rank in range(world_size)]
        self.writers = [FakeWriter(state, self.store) for state in self.states]
        self.checks = [
            Checks.of(state, learning_rates_in_force=None, schedule=ScheduleState, hash_weights=None)
            for state in self.states
        ]
        made_of = zip(self.states, self.writers, self.checks, strict=True)
        self.calls = [RollCall(state, writer, checks) for state, writer, checks in made_of]

    def begin(self, rank: int, start: FitStart) -> threading.Event:
        """Lets one rank begin its fit and report; returns the event that its answer sets."""
        others = OtherRanks(self.states[rank], self.writers[rank], self.calls[rank])
        for check in self.checks[rank]:
            check.fit_started(start, others)
        return self.calls[rank].count_off(start)

    def count_off(self, *plans: FitPlan, versions: str = "") -> list[bool]:
        """Lets as many ranks count off as there are plans, the last ones first, until all of them are answered.

        Args:
            plans: One for each of the first ranks.
            versions: One version of torch for each of them; none: they report no versions.

        Returns:
            Whether each of them may begin to train, the last one first.
        """
        starts = [
            FitStart(plan, {"torch": versions.split()[rank]} if versions else {}) for rank, plan in enumerate(plans)
        ]
        answered = [self.begin(rank, start) for rank, start in reversed(list(enumerate(starts)))]
        while not all(writer.poll_once() for writer in self.writers):
            pass
        return [each.is_set() for each in answered]

    def close(self, span: str, *unused: UnusedBatches | None, evaluation: bool = False) -> list[dict[str, Any]]:
        """Lets every rank close a span after 4 batches with what it has not used; returns what they write."""
        for rank, call in reversed(list(enumerate(self.calls))):
            closed = SpanCounters(span, evaluation=evaluation, opened=1, started=4, unused=unused[rank])
            closed.notice = WRONG_LENGTH.found("there are 4.") if rank == 0 else None
            call.span_closed(closed, 0.0)
        assert self.writers[0].poll_once()
        return self.verdicts()

    def verdicts(self) -> list[dict[str, Any]]:
        """What all ranks have written since the last call: verdicts, each with the type of its entry."""
        entries = [entry for state in self.states for entry in written(state)]
        return [{"type": entry["type"], **entry["verdict"]} for entry in entries]


@pytest.fixture
def ranks() -> Ranks:
    ranks = Ranks(2)
    ranks.count_off(FitPlan(), FitPlan())
    return ranks


@pytest.mark.parametrize("sizes", [(8, 8), (8, 4)])
def test_no_rank_trains_before_the_verdict_on_its_plan(sizes: tuple[int, int]) -> None:
    """The answer may arrive before the verdict: a rank that went on would wait in a collective without a partner."""
    ranks = Ranks(2)
    equal = sizes[0] == sizes[1]
    assert ranks.count_off(*(FitPlan(batch_size=size) for size in sizes)) == [equal, equal]
    assert [entry["kind"] for entry in ranks.verdicts()] == ([] if equal else ["PlanMismatch"])


def test_reports_are_deleted_behind_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for the answer, and nobody for that."""
    ranks = Ranks(3)
    deleted: list[tuple[str, bool]] = []
    monkeypatch.setattr(ranks.store, "delete", lambda key: deleted.append((key, ranks.store.has("plan"))))
    ranks.count_off(*[FitPlan()] * 3)
    assert deleted == [("plan/0", True), ("plan/1", True), ("plan/2", True)]


def test_a_report_is_judged_behind_those_that_may_explain_it(ranks: Ranks) -> None:
    """The last rank's reports may all come between a look at the first name and one at the second."""
    judged = list[str]()

    def report(rank: int, name: str, *after: str) -> None:
        ranks.calls[rank].report(name, dict, lambda _: judged.append(name) or (), after=after)

    report(1, "data/1", "splits")
    report(0, "splits")
    report(0, "data/1", "splits")
    assert not ranks.writers[0].poll_once()
    assert judged == []
    report(1, "splits")
    assert ranks.writers[0].poll_once()
    assert judged == ["splits", "data/1"]


def test_a_report_is_settled_once_what_follows_from_it_is_written(ranks: Ranks) -> None:
    """The first rank deletes the reports behind what it has found, and the others wait for that."""
    done = threading.Event()
    for writer in ranks.writers:
        writer.session.connected = True
    for rank in (1, 0):
        ranks.calls[rank].report("once/1", dict, lambda _: [WRONG_LENGTH.found("there are 4.")])
    waiting = threading.Thread(target=lambda: (ranks.calls[1].settle_report("once/1"), done.set()))
    waiting.start()
    while not ranks.writers[1].pollables:
        pass
    assert not ranks.writers[1].poll_once()
    assert not done.is_set()
    written_then: list[list[dict[str, Any]]] = []
    ranks.writers[0].submit = lambda job: (written_then.append(ranks.verdicts()), job and job(ranks.store))  # type: ignore
    assert ranks.writers[0].poll_once()
    assert [[each["kind"] for each in found] for found in written_then] == [["WrongLength"]]
    assert ranks.writers[1].poll_once()
    waiting.join(5)
    assert done.is_set()


def test_no_report_is_waited_for_that_nobody_judges_any_more(ranks: Ranks) -> None:
    """The first rank has waited for the reports before, and judges none once it has said goodbye."""
    for writer in ranks.writers:
        writer.session.connected = True
    for rank in (1, 0):
        ranks.calls[rank].report("once/1", dict, lambda _: ())
    ranks.states[1].receive({"type": "goodbye", "rank": 0, "ended": True})
    began = time.monotonic()
    for call in ranks.calls[:2]:
        call.settle_report("once/1")
    assert time.monotonic() - began < 2


def test_a_truncated_epoch_replaces_the_adapters_notice(ranks: Ranks) -> None:
    """A truncated epoch is noted, and the adapter's own notice about it is not."""
    (entry,) = ranks.close(EPOCH, UnusedBatches(1, 4, False), UnusedBatches(0))
    assert (entry["type"], entry["kind"]) == ("notice", "Truncated")
    assert (
        "after 4 batches, where rank 1 ran out of data: rank 0 lost at least 1 batch (4 samples)." in entry["sentence"]
    )


def test_an_even_epoch_keeps_the_adapters_notice(ranks: Ranks) -> None:
    assert [each["kind"] for each in ranks.close(EPOCH, UnusedBatches(0), UnusedBatches(0))] == ["WrongLength"]


def test_an_unknown_rest_of_one_rank_is_no_truncation() -> None:
    """Nothing is claimed while one rank does not know its unused batches."""
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
def test_uneven_eval_decides_on_a_truncated_evaluation(policy: str, entries: list[tuple[str, str]]) -> None:
    """A truncated evaluation is a notice, a verdict or nothing, by the setting `uneven_eval`."""
    ranks = Ranks(2, uneven_eval=policy)
    ranks.count_off(FitPlan(), FitPlan())
    sent = ranks.close("evaluation digits", UnusedBatches(0), UnusedBatches(2), evaluation=True)
    assert [(each["type"], each["kind"]) for each in sent] == entries


def test_ranks_agree_on_the_values_that_all_plans_have() -> None:
    """Ranks agree on the fields of the plan that have one value on all of them."""
    ranks = Ranks(3)
    same = FitPlan(batches_per_epoch=8, evaluations=5)
    ranks.count_off(same, replace(same, dp_rank=1), replace(same, loader_position=[0, 2]))
    names = {field.name for field in fields(FitPlan)}
    assert [call.agreed for call in ranks.calls] == [names - {"dp_rank", "loader_position"}] * 3
    assert ranks.verdicts() == []


def test_without_one_rank_ranks_agree_on_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """As long as one rank has not counted off, ranks agree on nothing; that rank is named."""
    ranks = Ranks(3, deadline_seconds=0.001)
    ranks.count_off(FitPlan(batches_per_epoch=8), FitPlan(batches_per_epoch=8))
    assert [call.agreed for call in ranks.calls] == [frozenset()] * 3
    assert "LateRank: rank 2 has not counted off" in capsys.readouterr().err


def test_a_late_rank_may_have_a_slow_name_server(capsys: pytest.CaptureFixture[str]) -> None:
    """The remedy for a late rank names `RES_OPTIONS`, which bounds slow look-ups of names."""
    ranks = Ranks(2, deadline_seconds=0.001)
    ranks.count_off(FitPlan())
    remedies = [line for line in capsys.readouterr().err.splitlines() if " or: " in line]
    assert "RES_OPTIONS='timeout:1 attempts:1'" in remedies[0]


def test_different_plans_end_the_fit() -> None:
    """The first field in which plans differ is proposed as the verdict, by rank 0 alone."""
    ranks = Ranks(3)
    ranks.count_off(FitPlan(batch_size=8), FitPlan(batch_size=4), FitPlan(batch_size=8))
    assert [(each["type"], each["kind"], each["ranks"]) for each in ranks.verdicts()] == [("end", "PlanMismatch", [1])]


def test_what_follows_from_a_mismatch_is_not_said_where_it_only_warns() -> None:
    """Plans that differ, of ranks that also read the same share: the user has accepted the first."""
    ranks = Ranks(2, levels={"PlanMismatch": "warn"})
    ranks.count_off(*(FitPlan(batch_size=size, dp_rank=0, dp_degree=2) for size in (8, 4)))
    assert [(each["type"], each["kind"]) for each in ranks.verdicts()] == [("notice", "PlanMismatch")]


def test_different_versions_are_a_notice() -> None:
    ranks = Ranks(2)
    ranks.count_off(FitPlan(), FitPlan(), versions="2.7 2.8")
    assert [(each["type"], each["kind"]) for each in ranks.verdicts()] == [("notice", "VersionMismatch")]


def test_a_rank_that_does_not_count_off_ends_a_job_that_keeps_ranks_even(capsys: pytest.CaptureFixture[str]) -> None:
    """It could give no credit, so the others would wait for it for ever."""
    ranks = Ranks(2, uneven_train="stop", deadline_seconds=0.01)
    ranks.count_off(FitPlan())
    (verdict,) = ranks.verdicts()
    assert (verdict["type"], verdict["kind"], verdict["ranks"]) == ("end", "LateRank", [1])
    assert "trains on" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"uneven_train": "stop", "uneven_eval": "stop"}, "uneven_eval is 'warn' on rank 0, 'stop' on rank 1"),
        ({"uneven_train": "stop", "weights_every": 8}, "weights_every is 0 on rank 0, 8 on rank 1"),
        ({}, "uneven_train is"),
    ],
)
def test_ranks_that_differ_in_how_they_are_kept_even_do_not_begin(chosen: dict[str, Any], words: str) -> None:
    """They would wait for credits that others do not give."""
    ranks = Ranks(2, uneven_train="stop")
    others = Ranks(2, **chosen)
    ranks.checks[1] = others.checks[1]
    ranks.calls[1] = RollCall(ranks.states[1], ranks.writers[1], ranks.checks[1])
    assert ranks.count_off(FitPlan(), FitPlan()) == [False, False]
    (verdict,) = ranks.verdicts()
    assert verdict["kind"] == "PlanMismatch"
    assert words in verdict["sentence"]


@pytest.mark.parametrize(("own", "lengths"), [((5, 4), (4, 5)), ((5, None), ())])
def test_proven_lengths_are_told_to_all_ranks(own: tuple[int | None, ...], lengths: tuple[int, ...]) -> None:
    """Only if those of every rank are proven; so is the shortest of what the loaders say by themselves."""
    ranks = Ranks(2, uneven_train="stop")
    for rank in (1, 0):
        ranks.begin(rank, FitStart(FitPlan(), {}, own_batches=own[rank], own_length=own[rank]))
    while not all(writer.poll_once() for writer in ranks.writers):
        pass
    told = [(checks.even.lengths, checks.even.shortest_now) for checks in ranks.checks]
    assert told == [(lengths, min(lengths, default=None))] * 2


def test_nothing_of_an_even_span_stays_in_the_store() -> None:
    """Rank 0 deletes counters of a span once all ranks have closed it, and the entries that all of them have read."""
    ranks = Ranks(2, uneven_train="stop")
    ranks.count_off(FitPlan(), FitPlan())
    credits = Credits(1, 4)
    for index, entry in enumerate(({"type": "ends", "at": 9}, {"type": "stop", "at": 9}), start=20):
        credits.receive(entry)
        ranks.store.set(f"log/{index}", entry)
    for key in ("even/1/0", "even/1/1", "even/1/end/9"):
        ranks.store.add(key, 1)
    for writer, read in zip(ranks.writers, (22, 21), strict=True):
        writer.session.read = read
    for call in reversed(ranks.calls):
        closed = SpanCounters(EPOCH, opened=1, started=9)
        closed.closed_credits = credits
        call.span_closed(closed, 0.0)
    assert ranks.writers[0].poll_once()
    ranks.writers[0].session.heartbeats.prune(ranks.store)
    assert [key for key in ranks.store.values if key.startswith(("even/", "log/"))] == ["log/21"]


def test_what_is_left_is_measured() -> None:
    """The metric of an epoch has the batches of all ranks together."""
    ranks = Ranks(3, uneven_train="stop")
    ranks.count_off(FitPlan(), FitPlan(), FitPlan())
    for rank in (2, 1, 0):
        span = SpanCounters(EPOCH, opened=1, started=9)
        span.unused = UnusedBatches(rank)
        ranks.calls[rank].span_closed(span, 0.0)
    assert ranks.writers[0].poll_once()
    assert ranks.calls[0].metrics["countoff/batches_left"] == 3
    (notice,) = ranks.verdicts()
    assert notice["kind"] == "Truncated"
