"""Stalls: when a rank reports where it is, and which ranks rank 0 names."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from countoff.core import Settings, Verdict
from countoff.core.checks.stalled import judge_before_fit, judge_stall
from countoff.core.protocol.actions import WriteEntry
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.micro_batches import MicroBatchLog, PassWork, StepWork
from countoff.core.protocol.records import record_text
from countoff.core.protocol.rows import row
from countoff.core.session.liveness.heartbeats import begin_fit, say_goodbye
from countoff.core.session.liveness.stacks import Place
from countoff.core.session.state import State
from countoff.core.session.store.channel import encode
from countoff.core.session.threads import stall as module
from countoff.core.session.threads.stall import Stall
from countoff.core.verdict import Level
from tests.fake_store import FakeStore, FakeWriter
from tests.outbox import drain, printed, written

EPOCH = "train epoch 0"
WORDS = {"nccl": "waiting for NCCL", "loader": "in its loader", "collective": "in a collective", "code": "in its code"}


@pytest.mark.parametrize(
    ("states", "culprits"),
    [
        (["collective", "loader", "code"], (1,)),
        (["collective", "code", "collective"], (1,)),
        (["collective", "collective", "collective"], (0, 1, 2)),
        (["loader", "loader", "collective"], (0, 1)),
        (["nccl", "code", "nccl"], (1,)),
        (["nccl", "collective", "nccl"], (0, 1, 2)),
    ],
)
def test_a_loader_comes_before_code_before_a_collective(states: list[str], culprits: tuple[int, ...]) -> None:
    """A stall names the ranks in their loaders; without any, those in their own code; else those in a collective."""
    records = {
        rank: {"rank": rank, "state": WORDS[state], "frames": [], "collectives": {}}
        for rank, state in enumerate(states)
    }
    found = judge_stall(records, 180.0)
    assert found.ranks == culprits
    assert found.why == "no rank is in a line of the user's own."


def test_a_stall_shows_lines_and_collectives() -> None:
    """A stall shows each rank's line of code and its number of collectives, the named ranks first."""
    record = {"frames": ["train.py:9 in main"], "collectives": {"0": 5}}
    records = {rank: {**row(rank, None, 0, "in a collective"), **record} for rank in range(3)}
    records[2] |= {"state": "in its loader", "frames": ["data.py:7 in read"], "collectives": {"0": 4}}
    found = judge_stall(records, 180.0)
    assert found.sentence == "no rank has made progress for 180 s; rank 2 is in its loader."
    counts = "Collectives issued in process group 0: 4 by rank 2, 5 by ranks 0, 1."
    assert found.why == f"rank 2 is at data.py:7 in read; ranks 0, 1 are at train.py:9 in main. {counts}"
    assert (found.ranks, [line["rank"] for line in found.rows]) == ((2,), [2, 0, 1])


def test_ranks_that_wait_for_nccl_wait_for_one_another() -> None:
    """With NCCL, a rank that waits for another one is blocked where it reads a value from its GPU."""
    record = {"frames": ["train.py:9 in main"], "collectives": {}}
    states = ["waiting for NCCL", "in a collective", "waiting for NCCL"]
    records = {rank: {**row(rank, None, 0, state), **record, "state": state} for rank, state in enumerate(states)}
    sentence = "no rank has made progress for 180 s; ranks 0–2 are in a collective or waiting for NCCL."
    assert judge_stall(records, 180.0).sentence == sentence


def test_a_stall_shows_which_collectives_the_ranks_issued_last() -> None:
    """As many collectives on each rank are no evidence where one of them is another one."""
    record = {"frames": [], "collectives": {"0": 5, "1": 2}}
    records = {
        rank: {**row(rank, None, 0, ""), **record, "state": "in a collective", "last": {"0": last, "1": "barrier"}}
        for rank, last in enumerate(["all_reduce of [3]", "all_reduce of [3]", "broadcast of [1]"])
    }
    assert judge_stall(records, 180.0).why == (
        "no rank is in a line of the user's own. Collectives issued in process group 0: 5 (the last: broadcast of [1]) "
        "by rank 2, 5 (the last: all_reduce of [3]) by ranks 0, 1."
    )


def test_a_process_group_is_compared_among_its_ranks() -> None:
    """Each pair of ranks has a group of its own, in which all is well."""
    pairs = [{"0": 7, "1": 3}, {"0": 7, "1": 3}, {"0": 7, "2": 4}, {"0": 7, "2": 4}]
    records = {
        rank: {**row(rank, None, 0, ""), "state": "in a collective", "frames": [], "collectives": numbers}
        for rank, numbers in enumerate(pairs)
    }
    assert judge_stall(records, 180.0).why == "no rank is in a line of the user's own."


@pytest.mark.parametrize("lines", [(31, 31), (31, 52)])
def test_ranks_in_different_collectives_are_told_to_compare_them(lines: tuple[int, int]) -> None:
    """No rank waits for another one's code there, so the line of the first one named is no place to start."""
    record = {"state": "in a collective", "collectives": {}}
    records = {
        rank: {**row(rank, None, 0, ""), **record, "frames": [f"train.py:{line} in main"]}
        for rank, line in enumerate(lines)
    }
    assert judge_stall(records, 180.0).remedy.startswith("compare the lines above") is (lines[0] != lines[1])


IN_LIGHTNING = (
    "rank 0 is at train.py:9 in main, in lightning at result.py:0 in call; rank 1 is at train.py:9 in main, in "
    "lightning at result.py:1 in call."
)


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        (("main", "main"), IN_LIGHTNING),
        (("main", "own"), "rank 0 is at train.py:9 in main; rank 1 is at train.py:9 in own."),
        ((), "rank 0 is in lightning at result.py:0 in call; rank 1 is in lightning at result.py:1 in call."),
    ],
    ids=["all in one line", "lines that differ", "no line"],
)
def test_ranks_in_one_line_are_shown_where_they_are_in_the_framework(functions: tuple[str, ...], why: str) -> None:
    """That line says nothing then."""
    found = judge_stall(records_in_lightning(functions, {"collectives": {}}), 180.0)
    assert found.why == why
    assert found.remedy.startswith("compare the lines above")


@pytest.mark.parametrize(("last", "compare"), [("barrier", False), ("", True)], ids=["known", "not known"])
def test_ranks_in_the_same_collective_are_not_told_that_they_are_in_others(last: str, compare: bool) -> None:
    """With NCCL, a rank waits where it next reads a value, and rank 0 may read one that others do not."""
    record = {"collectives": {"0": 5}, "last": {"0": last}}
    found = judge_stall(records_in_lightning(("main", "main"), record), 180.0)
    assert found.why == IN_LIGHTNING
    assert found.remedy.startswith("compare the lines above") is compare


def records_in_lightning(functions: Sequence[str], record: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What two ranks report that wait at different lines of Lightning, each called by its own function."""
    return {
        rank: {**row(rank, None, 0, ""), **record, "state": "in a collective"}
        | {
            "frames": [f"train.py:9 in {functions[rank]}"] if functions else [],
            "inside": f"lightning at result.py:{rank} in call",
        }
        for rank in range(2)
    }


@pytest.mark.parametrize("alone", [(0,), (1,), (), (0, 1)])
def test_a_rank_that_broadcasts_buffers_alone_is_told_to_call_the_module(alone: tuple[int, ...]) -> None:
    """Where all ranks do, or none does, that says nothing."""
    record = {"state": "in a collective", "collectives": {}}
    records = {
        rank: {**row(rank, None, 0, ""), **record, "frames": [f"train.py:{rank} in main"]}
        | ({"buffers": True} if rank in alone else {})
        for rank in range(2)
    }
    assert ("model.module" in judge_stall(records, 180.0).remedy) is (len(alone) == 1)


@pytest.mark.parametrize(
    ("epochs", "words"),
    [
        ((0, 0, 0), ""),
        ((0, 1, 0), "; rank 1 is an epoch ahead of the others, in train epoch 1"),
        ((2, 0, 2), "; ranks 0, 2 are 2 epochs ahead of the others, in train epoch 2"),
    ],
)
def test_a_stall_tells_which_rank_is_an_epoch_ahead(epochs: tuple[int, ...], words: str) -> None:
    """A rank that has gone on to the next epoch waits for others that have not, so the message begins with that."""
    record = {"frames": [], "collectives": {}, "state": "in a collective"}
    records = {
        rank: {**row(rank, SpanCounters(f"train epoch {epoch}"), 0, ""), **record} for rank, epoch in enumerate(epochs)
    }
    assert judge_stall(records, 3).sentence == (
        f"no rank has made progress for 3 s; ranks 0–2 are in a collective{words}."
    )


OTHERS, EXTRA = (12, StepWork(EPOCH, 12, 12, 0, 4)), (11, StepWork(EPOCH, 12, 12, 5, 0))
"""Optimizer steps and micro-batches of ranks that are done with batch 12, and of one that runs another micro-batch."""


def in_micro_batches(*ranks: tuple[int, StepWork] | None, state: str = "in a collective") -> Verdict:
    records: dict[int, dict[str, Any]] = {}
    for rank, found in enumerate(ranks):
        records[rank] = {**row(rank, None, 0, ""), "state": state, "frames": [], "collectives": {}}
        if found is not None:
            records[rank] |= {"steps": found[0], "micro": list(found[1])}
    return judge_stall(records, 3)


def test_a_rank_that_hangs_in_an_extra_micro_batch_is_named() -> None:
    found = in_micro_batches(OTHERS, EXTRA, OTHERS)
    words = "rank 1 is in micro-batch 5 of batch 12 of train epoch 0, and ranks 0, 2 ran 4"
    assert found.sentence == f"no rank has made progress for 3 s; {words}."
    assert (found.ranks, found.rows[0]["rank"]) == ((1,), 1)
    assert found.remedy.startswith("run as many forward and backward passes")
    step = [(steps, work._replace(first=9)) for steps, work in (OTHERS, EXTRA)]
    assert "of batches 9 to 12 of train epoch 0" in in_micro_batches(*step).sentence


@pytest.mark.parametrize(
    "other",
    [
        None,  # a rank that counts none
        (12, StepWork(EPOCH, 12, 12, 5, 0)),  # as many steps
        (10, StepWork(EPOCH, 12, 12, 5, 0)),  # a step was left out before
        (11, StepWork(EPOCH, 12, 12, 4, 0)),  # not more than the others ran
        (11, StepWork(EPOCH, 11, 12, 5, 0)),  # of a longer step
        (11, StepWork("train epoch 1", 12, 12, 5, 0)),
        (12, StepWork(EPOCH, 12, 12, 0, 3)),
    ],
)
def test_nothing_is_said_of_micro_batches_where_they_prove_nothing(other: tuple[int, StepWork] | None) -> None:
    assert "micro-batch" not in in_micro_batches(OTHERS, other).sentence
    assert "micro-batch" not in in_micro_batches(OTHERS, EXTRA, other).sentence


def in_passes(*ranks: tuple[int, PassWork] | None, issued: Sequence[int] = (9, 9, 9)) -> Verdict:
    records: dict[int, dict[str, Any]] = {}
    for rank, (found, number) in enumerate(zip(ranks, issued, strict=False)):
        alone = {**row(rank, None, 0, ""), "state": "in a collective", "frames": []}
        records[rank] = alone | {"collectives": {"0": number} if number else {}}
        if found is not None:
            records[rank] |= {"steps": found[0], "passes": json.loads(json.dumps(found[1]))}
    return judge_stall(records, 3)


GONE_ON, BEHIND = (12, PassWork(EPOCH, (12, 12, 4), (13, 13, 1))), (11, PassWork(EPOCH, (11, 11, 4), (12, 12, 5)))
"""Optimizer steps and forward passes of a rank that is done with batch 12, and of one that is in its fifth pass."""
IN_BATCH_12 = (11, PassWork(EPOCH, (11, 11, 4), (12, 12, 4)))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((GONE_ON, BEHIND), "in batch 12 of train epoch 0, rank 1 has begun 5 %s, rank 0 ran 4"),
        ((GONE_ON, BEHIND, BEHIND), "in batch 12 of train epoch 0, ranks 1, 2 have begun 5 %s, rank 0 ran 4"),
        ((IN_BATCH_12, BEHIND), "in batch 12 of train epoch 0, rank 1 has begun 5 %s, rank 0 4"),
        (
            (GONE_ON, (12, PassWork(EPOCH, (12, 12, 5), (13, 13, 1)))),
            "in batch 12 of train epoch 0, rank 1 ran 5 %s, rank 0 4",
        ),
        (
            (GONE_ON, (11, PassWork(EPOCH, (11, 11, 4), (12, 12, 3)))),
            "in batch 12 of train epoch 0, rank 0 ran 4 %s, rank 1 has begun 3",
        ),
        (
            ((12, PassWork(EPOCH, (12, 12, 4), (13, 12, 0))), (12, PassWork(EPOCH, (12, 12, 4), (13, 12, 2)))),
            "after batch 12 of train epoch 0, rank 1 has begun 2 %s, rank 0 none",
        ),
        (
            ((1, PassWork(EPOCH, (1, 4, 4), (5, 8, 4))), (1, PassWork(EPOCH, (1, 4, 4), (5, 8, 5)))),
            "in batches 5 to 8 of train epoch 0, rank 1 has begun 5 %s, rank 0 4",
        ),
    ],
)
def test_ranks_with_different_forward_passes_of_a_sharded_model_are_named(ranks: Any, words: str) -> None:
    found = in_passes(*ranks)
    assert found.sentence == f"no rank has made progress for 3 s; {words % 'forward passes of the sharded model'}."
    assert found.remedy.startswith("run as many forward passes of the model on every rank")


def test_passes_that_a_rank_may_still_run_are_only_told() -> None:
    """Ranks that have issued different numbers of collectives need not have got to the same place."""
    found = in_passes(IN_BATCH_12, BEHIND, issued=(8, 9))
    assert found.sentence == "no rank has made progress for 3 s; ranks 0, 1 are in a collective."
    told = "Forward passes of the sharded model begun in batch 12 of train epoch 0: 5 by rank 1, 4 by rank 0."
    assert told in found.why
    assert "forward passes" not in found.remedy


@pytest.mark.parametrize(
    "ranks",
    [
        (GONE_ON, None),  # a rank that counts none
        (GONE_ON, (11, PassWork(EPOCH, (11, 11, 4), (12, 12, 3)))),  # not more than the others ran
        (GONE_ON, (11, PassWork(EPOCH, (), (12, 12, 4)))),
        (GONE_ON, (11, PassWork("train epoch 1", (), (12, 12, 5)))),
        (GONE_ON, (11, PassWork(EPOCH, (10, 10, 4), (11, 12, 5)))),  # of a longer step
        (GONE_ON, (9, PassWork(EPOCH, (9, 9, 4), (10, 10, 5)))),
        (IN_BATCH_12, IN_BATCH_12),
    ],
)
def test_nothing_is_said_of_forward_passes_where_they_prove_nothing(ranks: Any) -> None:
    found = in_passes(*ranks, issued=(9, 8))
    assert "sharded model" not in found.sentence + (found.why or "")


def test_the_passes_of_a_rank_are_told_with_the_one_that_runs() -> None:
    log, span = MicroBatchLog(), SpanCounters(EPOCH)
    log.begin(span)
    assert log.pass_work() is None
    log.sharded = True
    span.started, span.passes, log.running = 1, 2, True
    assert log.pass_work() == PassWork(EPOCH, (), (1, 1, 3))
    span.passes, log.running = 3, False
    log.step(span)
    assert log.pass_work() == PassWork(EPOCH, (1, 1, 3), (2, 1, 0))
    assert log.work() is None
    log.begin(later := SpanCounters("train epoch 1"))
    assert log.pass_work() == PassWork(later.name, (), (1, 0, 0))


def test_a_rank_in_its_loader_comes_before_an_extra_micro_batch() -> None:
    assert "micro-batch" not in in_micro_batches(OTHERS, EXTRA, state="in its loader").sentence


NOTHING = {"evaluates": False, "collectives": {}}


class Stalled:
    """Rank 0 of a job in which it has made no progress for longer than `stall_seconds`."""

    def __init__(self, present: list[int], store: FakeStore | None = None) -> None:
        self.state = State(0, len(present) or 2, Settings(stall_seconds=0.001), {}, present=present)
        self.writer = FakeWriter(self.state, store or FakeStore())
        self.stall = Stall(self.state, self.writer)
        self.stall.look()
        self.stall.moved_at -= 1
        self.stall.look()


@pytest.mark.parametrize(
    ("batches", "evaluates", "kinds"),
    [((4, 4), True, ["Stalled"]), ((4, 3), False, ["Stalled"]), ((4, 3), True, list[str]())],
    ids=["in one place", "after the evaluation", "in the evaluation"],
)
def test_a_stall_elsewhere_is_not_due_to_an_evaluation(
    batches: tuple[int, ...], evaluates: bool, kinds: list[str]
) -> None:
    """Only a stall within an evaluation of which uneven lengths are known is that evaluation's verdict."""
    stalled = Stalled([0, 1])
    uneven = Verdict("UnevenBatches", "rank 1 ran out of data after 2 batches of validation.")
    stalled.state.notices.append(uneven)
    records = {
        rank: {
            **row(rank, SpanCounters(EPOCH, started=count), 0, ""),
            "state": "in a collective",
            "frames": [],
            "collectives": {},
            "evaluates": evaluates,
        }
        for rank, count in enumerate(batches)
    }
    stalled.stall.report(records, [])
    assert stalled.state.proposed == (None if kinds else uneven)
    assert [verdict.kind for verdict in printed(stalled.state)] == kinds


def test_a_record_of_long_names_fits_into_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    long = ("long/path.py:123 in a_function" * 9,) * 3
    place = Place("code", long, inside=long, framework="pytorch_lightning")
    monkeypatch.setattr(module.stacks, "thread", lambda _: place)
    monkeypatch.setattr(
        module.collectives, "issued", lambda: {f"{n}" + "n" * 40: (10**9, "_all_gather" * 9) for n in range(9)}
    )
    monkeypatch.setattr(module.hosts, "own_name", lambda: "h" * 64)
    monkeypatch.setattr(module.collectives, "unfinished", lambda: frozenset({("0", 1, 2)}))
    store = FakeStore()
    stalled = Stalled([0, 1], store)
    stalled.state.spans.append(SpanCounters("evaluation of loader 12 in train epoch 1234", started=10**9))
    epoch = SpanCounters("train epoch 1234", started=10**6, micro_batches=10**7)
    stalled.state.micro_batches.begin(epoch)
    epoch.micro_batches += 10**7
    epoch.started += 10**6
    stalled.stall.post()
    assert encode(store.get("stall/0"))
    log = stalled.state.micro_batches
    log.sharded = True
    log.begin(epoch)
    epoch.passes, epoch.started = 10**7, 3 * 10**6
    log.step(epoch)
    epoch.passes, epoch.started = 2 * 10**7, 4 * 10**6
    stalled.stall.post()
    record = store.get("stall/0")
    assert encode(record)
    assert record["passes"] == [
        "train epoch 1234",
        [2 * 10**6 + 1, 3 * 10**6, 10**7],
        [3 * 10**6 + 1, 4 * 10**6, 10**7],
    ]
    assert record["state"] == "waiting for NCCL"


@pytest.mark.parametrize(("left", "told"), [(-1, None), (0, None), (19, None), (20, "lightn"), (200, "result.py")])
def test_a_record_without_room_leaves_out_the_lines_of_the_framework(
    monkeypatch: pytest.MonkeyPatch, left: int, told: str | None
) -> None:
    """So that it fits into the store, whatever the rest of it takes."""
    monkeypatch.setattr(module.collectives, "issued", dict)
    inside = ("lightning/pytorch/result.py:123 in a_function",)
    store = FakeStore()
    stalled = Stalled([0, 1], store)
    place = Place("code", ("train.py:9 in main",), inside=inside, framework="lightning")
    monkeypatch.setattr(module.stacks, "thread", lambda _: place)
    stalled.stall.post()
    bare = record_text({**store.get("stall/0"), "inside": ""})
    monkeypatch.setattr(module, "RECORD_BYTES", len(bare) + left)
    stalled.stall.post()
    record = store.get("stall/0")
    assert record.get("inside") is None if told is None else told in record["inside"]
    assert len(record_text(record)) <= len(bare) + max(0, left)


def test_a_rank_that_has_said_goodbye_is_not_asked() -> None:
    """A rank that has closed its guard owes no record about a stall; rank 0 is done without it."""
    store = FakeStore()
    for rank in range(3):
        begin_fit(store, rank)
    say_goodbye(store, 1)
    stalled = Stalled([0, 1, 2], store)
    assert not stalled.writer.poll_once()
    store.set("stall/2", store.get("stall/0") | {"rank": 2})
    assert stalled.writer.poll_once()
    (verdict,) = printed(stalled.state)
    assert [line["rank"] for line in verdict.rows] == [0, 2]


def test_a_roll_call_longer_than_a_stall_is_none() -> None:
    """As long as rank 0 does not know which ranks are present, there is no stall."""
    stalled = Stalled([])
    assert stalled.writer.poll_once()
    assert (printed(stalled.state), stalled.state.proposed) == ([], None)


def test_progress_of_one_rank_makes_it_no_stall() -> None:
    """A rank that has made progress in the meantime reports that in its record, and nothing is printed."""
    stalled = Stalled([0, 1])
    store = stalled.writer.store
    assert len(stalled.writer.pollables) == 1
    store.set("stall/1", {"moved": True})
    assert stalled.writer.poll_once()
    assert printed(stalled.state) == []
    stalled.state.steps += 1
    stalled.stall.posted = True
    stalled.stall.look()
    assert store.get("stall/0") == {"moved": True}


def test_after_a_stall_only_one_that_is_twice_as_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may pause for as long as before again, and may hang for good."""
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    store = FakeStore()
    for rank in range(2):
        begin_fit(store, rank)
    stalled = Stalled([0, 1], store)
    stalled.state.settings = Settings(stall_seconds=10.0)
    stalled.stall = Stall(stalled.state, stalled.writer)
    stalled.stall.look()

    def seconds_until_reported(longest: int) -> int | None:
        nonlocal now
        stalled.state.steps += 1
        for second in range(longest):
            now += 1.0
            stalled.stall.look()
            store.set("stall/1", store.get("stall/0") | {"rank": 1})
            stalled.writer.poll_once()
            if (found := printed(stalled.state)) and second:
                assert found[0].sentence.startswith(f"no rank has made progress for {second - 1} s;")
                return second
        return None

    assert seconds_until_reported(15) == 11
    now += 8.0  # with the second until its next step it stands for 20 s in all
    assert seconds_until_reported(39) is None
    assert seconds_until_reported(60) == 41


@pytest.mark.parametrize("level", ["raise", "warn", "off"])
def test_the_user_decides_what_a_stall_does(level: Level) -> None:
    """An error says which rank is where, as the warning does, and does not say that the job goes on."""
    stalled = Stalled([0, 1])
    stalled.state.settings = Settings(stall_seconds=0.001, levels={"Stalled": level})
    records = {
        rank: {**row(rank, None, 0, ""), "state": state, "frames": [f"data.py:{7 + rank} in read"] * 3}
        for rank, state in enumerate(["in a collective", "in its loader"])
    }
    stalled.stall.report({rank: {**record, **NOTHING} for rank, record in records.items()}, [])
    (action,) = drain(stalled.state)
    assert isinstance(action, WriteEntry) is (level == "raise")
    if level != "raise":  # whoever prints it asks for the level again
        assert stalled.state.proposed is None
        return
    verdict = stalled.state.proposed
    assert verdict is not None
    assert "rank 1 is at data.py:8 in read < " in verdict.why
    assert verdict.remedy.startswith("start at the line of the rank that is named first")
    assert "warning" not in verdict.remedy


def test_the_rank_that_has_found_a_stall_prints_all_of_its_cause() -> None:
    """The other ranks read as much of it as an entry of the log can hold."""
    stalled = Stalled([0, 1])
    stalled.state.settings = Settings(levels={"Stalled": "raise"})
    places = " < ".join(f"train.py:{line} in a_function_with_a_long_name" for line in range(12))
    stalled.state.note(Verdict("Stalled", "nobody moves.", (1,), why=places, time=3.5))
    (entry,) = written(stalled.state)
    stalled.state.receive(entry)
    assert stalled.state.end is not None
    assert stalled.state.end.why == places


def before_fit(**places: tuple[str, str, float]) -> dict[int, Any]:
    """What ranks tell before a fit: the call that each is in, its line, and for how long."""
    return {
        int(rank[1:]): {"call": call and f"torch.distributed.{call}", "at": at, "seconds": seconds}
        for rank, (call, at, seconds) in places.items()
    }


IN_BARRIER = ("barrier", "train.py:33 in main", 190.0)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            before_fit(**{f"r{rank}": IN_BARRIER for rank in range(8)} | {"r5": ("", "data.py:80 in load", 190.4)}),
            "rank 5, at data.py:80 in load, for 190 s; "
            "ranks 0–4, 6, 7 wait in torch.distributed.barrier at train.py:33.",
        ),
        (
            before_fit(
                r0=("", "", 0.0), r1=IN_BARRIER, r2=("barrier", "train.py:33 in main", 1.0), r3=("recv", "", 9.0)
            ),
            "rank 0, in no line of the user's own; rank 3 waits in torch.distributed.recv; "
            "ranks 1, 2 wait in torch.distributed.barrier at train.py:33.",
        ),
        (
            before_fit(r0=IN_BARRIER, r1=("broadcast", "train.py:40 in main", 185.0)),
            "rank 0 waits in torch.distributed.barrier at train.py:33; "
            "rank 1 waits in torch.distributed.broadcast at train.py:40.",
        ),
        (
            before_fit(**{f"r{rank}": ("", f"data.py:{rank} in load", rank) for rank in range(6)}, r6=IN_BARRIER),
            "rank 0, at data.py:0 in load; rank 1, at data.py:1 in load, for 1 s; "
            "rank 2, at data.py:2 in load, for 2 s; rank 3, at data.py:3 in load, for 3 s; "
            "rank 6 waits in torch.distributed.barrier at train.py:33; "
            "ranks 4, 5 are elsewhere.",
        ),
    ],
)
def test_a_stall_before_the_fit_names_where_each_rank_is(records: dict[int, Any], said: str) -> None:
    verdict = judge_before_fit(records, 180)
    assert verdict is not None
    assert verdict.sentence == said


@pytest.mark.parametrize(
    "records",
    [
        before_fit(r0=("", "data.py:80 in load", 900.0), r1=("", "train.py:9 in main", 900.0)),
        before_fit(r0=("", "data.py:80 in load", 900.0), r1=("barrier", "train.py:33 in main", 179.0)),
        before_fit(r0=IN_BARRIER, r1=IN_BARRIER),
        before_fit(r0=IN_BARRIER, r1=("broadcast", "train.py:40 in main", 3.0)),
    ],
    ids=["all are busy", "nobody has waited for long", "all wait in one call", "one has come just now"],
)
def test_nothing_is_said_before_the_fit_without_proof_that_ranks_wait(records: dict[int, Any]) -> None:
    assert judge_before_fit(records, 180) is None
