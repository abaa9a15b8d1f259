"""The table of a verdict, as the ranks find it in the store."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from countoff.core import Settings
from countoff.core.checks.lost import ALIKE, LOST_RANK
from countoff.core.ending.table import print_with_table, publish_table, with_table
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.failures import Failure
from countoff.core.protocol.records import ranks_from_json, ranks_to_json, verdict_from_json, verdict_to_json
from countoff.core.protocol.rows import row
from countoff.core.session.liveness.heartbeats import Heartbeats
from countoff.core.session.state import State
from countoff.core.session.store.channel import decode, encode
from countoff.core.verdict import TABLE_ROWS, Verdict, at_hosts
from tests.fake_store import FakeStore


def with_published(counted: int, verdict: Verdict, remedies: dict[str, str], **header: Any) -> Verdict:
    """The verdict with a table of so many ranks, of which rank 2 is the outlier."""
    store = FakeStore()
    for place in range(min(counted, TABLE_ROWS)):
        store.set(f"table/{place}", row(place, SpanCounters("train epoch 0", started=5), 2, "in batch 5"))
    store.set("table", {"rows": counted, "ranks": [2], "spread": 0.002, "failed": None, **header})
    return with_table(store, verdict, remedies, counted)


def test_the_published_table_goes_into_the_verdict() -> None:
    found = with_published(3, Verdict("UnevenBatches", "they differ.", (1, 0)), {})
    assert (found.ranks, len(found.rows), found.spread_seconds) == ((2,), 3, 0.002)


def test_without_a_published_table_the_verdict_is_unchanged() -> None:
    verdict = Verdict("UnevenBatches", "they differ.", (1, 0))
    assert with_table(FakeStore(), verdict, {}, 3) == verdict


def test_a_rank_that_failed_by_itself_is_the_better_cause() -> None:
    """If a rank has failed by itself, the verdict is about that, and keeps the table."""
    failed = [1, "raised ValueError: torn shard"]
    verdict = Verdict("UnevenBatches", "they differ.", (2, 0))
    found = with_published(3, verdict, {"LostRank": "Mend it."}, failed=failed)
    assert (found.headline, found.remedy) == ("LostRank: rank 1 raised ValueError: torn shard.", "Mend it.")
    assert len(found.rows) == 3


def test_a_message_about_many_ranks_tells_their_number() -> None:
    """A message about more ranks than the table shows tells how many there are in all."""
    found = with_published(40, Verdict("UnevenBatches", "they differ.", (2, 0)), {})
    lines = found.render().splitlines()
    assert lines[1] == "  out of step: rank 2 of 40 ranks"
    assert lines[-1] == "  … and 24 ranks more"


def test_a_rank_that_has_not_looked_for_its_neighbours_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A verdict of the roll call comes before the answer with which ranks look for the others of their host."""
    store, state = FakeStore(), State(1, 2, Settings(), {})
    first, own = Heartbeats(0, range(2)), Heartbeats(1, range(2))
    own.register(store)
    own.send(store, 0)
    first.register(store)
    state.adopt(Verdict("PlanMismatch", "they differ.", (0, 1)))
    state.answered.set()
    store.set("table", {"rows": 0, "ranks": [0, 1], "spread": None, "failed": None})
    store.set("told/0", {"told": True})
    print_with_table(store, state, own)
    assert capsys.readouterr().err.splitlines() == [
        "",
        "[rank 1] countoff: PlanMismatch: they differ. See the output of rank 0.",
    ]


def test_odd_ranks_come_first_in_the_published_table() -> None:
    """Rank 0 names the minority, puts its rows first and tells how long it took until every rank knew."""
    store = FakeStore()
    verdict = Verdict("UnevenBatches", "they differ.", (1, 0), time=100.0, sync_index=4)
    rows = {
        rank: {**row(rank, None, 0, ""), "known": 100.5 + rank, "failure": "", "side": rank != 2} for rank in range(4)
    }
    publish_table(store, verdict, rows, complete=True)
    found = with_table(store, verdict, {}, 4)
    assert (found.ranks, found.standing, found.spread_seconds) == ((2,), "out of step", 3.5)
    assert [line["rank"] for line in found.rows] == [2, 0, 1, 3]


def test_a_majority_names_the_odd_rank_and_those_that_have_not_got_so_far() -> None:
    """The sixth of six ranks may be short as well: nobody can know yet."""
    store = FakeStore()
    verdict = Verdict("UnevenBatches", "they differ.", (5, 0), sync_index=1, announced=True)
    rows = {
        rank: {
            **row(rank, SpanCounters("train epoch 0", started=3 if rank == 1 else 4), 0, "in batch 4"),
            **{"known": 0.0, "failure": "", "side": None if rank == 1 else rank == 5},
        }
        for rank in range(6)
    }
    publish_table(store, verdict, rows, complete=True)
    who = with_table(store, verdict, {}, 6).render().splitlines()[1]
    assert who == "  out of step: rank 5 of 6 ranks; rank 1 has not got so far"


def test_ranks_that_have_not_got_so_far_are_told_apart() -> None:
    """Where one loader has ended, one rank has more and two have not got there, only the first is named."""
    store = FakeStore()
    sentence = "rank 0 ran out of data after 4 batches of train epoch 0; rank 2 has batch 5."
    verdict = Verdict("UnevenBatches", sentence, (0, 2), sync_index=1, announced=True, standing="ran out first")
    started = {0: (4, True), 1: (3, None), 2: (4, False), 3: (3, None)}
    rows = {
        rank: {
            **row(
                rank, SpanCounters("train epoch 0", started=batches, prefetched=batches + (rank == 2)), 0, "in batch"
            ),
            **{"known": 0.0, "failure": "", "side": side},
        }
        for rank, (batches, side) in started.items()
    }
    publish_table(store, verdict, rows, complete=True)
    head, who, *_ = with_table(store, verdict, {}, 4).render().splitlines()
    assert head == f"countoff: UnevenBatches: {sentence}"
    assert who == "  ran out first: rank 0 of 4 ranks; ranks 1, 3 have not got so far"


def test_rows_that_did_not_come_are_counted() -> None:
    """The number of ranks is the job's, also where only some have reported."""
    found = with_published(2, Verdict("UnevenBatches", "they differ.", (1, 0)), {})
    assert replace(found, world_size=4).render().splitlines()[1].endswith(" of 4 ranks; 2 of 4 ranks reported")


def test_ranks_of_a_large_job_that_have_counted_the_same_share_a_line() -> None:
    """The table of 4,096 ranks on 512 hosts has a line of the rank that is out of step, and one per class of others."""
    store = FakeStore()
    verdict = Verdict("UnevenBatches", "they differ.", (77, 0), sync_index=1)

    def line(rank: int) -> dict[str, Any]:
        counters = SpanCounters("train epoch 0", started=3 if rank == 77 else 4, prefetched=4 + (rank >= 4000))
        own = row(rank, counters, 2, "in batch 4")
        return {**own, "known": 0.0, "failure": "", "side": rank != 77, "host": f"node-{rank // 8}"}

    publish_table(store, verdict, {rank: line(rank) for rank in range(4096)}, complete=True)
    found = at_hosts(with_table(store, verdict, {}, 4096), {77: "node-9"})
    assert [re.split(r"  +", each.strip()) for each in found.render().splitlines()[1:]] == [
        ["out of step: rank 77 of 4096 ranks, on node-9"],
        ["rank", "host", "where", "batches", "fetched", "steps", "state"],
        ["77", "node-9", "train epoch 0", "3", "4", "2", "in batch 4"],
        ["0–76, 78–3999", "500 hosts", "train epoch 0", "4", "4", "2", "in batch 4"],
        ["4000–4095", "12 hosts", "train epoch 0", "4", "5", "2", "in batch 4"],
    ]


def test_all_ranks_of_a_large_host_are_named() -> None:
    """A verdict that names many ranks goes through the store whole."""
    lost = Verdict("LostRank", "host b with ranks 16–39 does not answer.", tuple(range(16, 40)), gone=True)
    assert verdict_from_json(json.loads(json.dumps(verdict_to_json(lost)))).ranks == lost.ranks
    striped = tuple(range(0, 4096, 2))  # as in a layout with two pipeline stages
    assert verdict_from_json(json.loads(json.dumps(verdict_to_json(replace(lost, ranks=striped))))).ranks == striped
    found = with_published(16, lost, {}, **ranks_to_json(lost.ranks))
    assert replace(found, world_size=40).render().splitlines()[1] == "  lost: ranks 16–39 of 40 ranks"


@pytest.mark.parametrize("runs", [[[0, 1 << 40, 1]], [[0, 99999, 1]] * 12, [[0, 8, 0]], [[0, 8]], "many"])
def test_a_hostile_list_of_ranks_is_refused(runs: Any) -> None:
    """A record of a kibibyte must not become gigabytes of ranks."""
    with pytest.raises((ValueError, TypeError)):
        ranks_from_json({"ranks": [], "runs": runs})


def test_a_verdict_of_any_length_fits_into_the_store() -> None:
    """Twelve runs of ranks, and texts that are as long as they may be."""
    ranks = tuple(rank for first in range(1000, 100_000, 3001) for rank in (first, first + 1, first + 7))
    verdict = Verdict("DuplicateData", "s" * 500, ranks, why="w" * 300, remedy="r" * 300, subject="x" * 50)
    assert verdict_from_json(decode(encode(verdict_to_json(verdict)).encode())).ranks[0] == 1000


def counted(rank: int, failure: Failure | None = None) -> dict[str, Any]:
    own = row(rank, SpanCounters("train epoch 0", started=3), 2, "in batch 3")
    return {**own, "known": 0.0, "side": None, "host": "a", "failure": None if failure is None else failure.to_json()}


def account(failures: dict[int, Failure], ranks: int, named: tuple[int, ...] = ()) -> Verdict:
    """The verdict of a job in which these ranks have raised, where the log names one of them."""
    store, verdict = FakeStore(), Verdict("LostRank", "rank 2 raised it.", named, begun=3)
    publish_table(store, verdict, {rank: counted(rank, failures.get(rank)) for rank in range(ranks)}, complete=True)
    return with_table(store, verdict, {}, ranks)


def missing(name: str = "a.npy", time: float = 0.0) -> Failure:
    return Failure(f"FileNotFoundError: no file '{name}'", "train.py:11", "in batch 3", time)


def test_what_all_ranks_raised_is_blamed_on_none() -> None:
    found = account(dict.fromkeys(range(3), missing()), 3, (2,))
    assert found.render().splitlines() == [
        "countoff: LostRank: all 3 ranks raised FileNotFoundError: no file 'a.npy' at train.py:11 (in batch 3).",
        "  rank  where          batches  fetched  steps  state",
        "  0     train epoch 0  3        3        2      in batch 3",
        "  1     train epoch 0  3        3        2      in batch 3",
        "  2     train epoch 0  3        3        2      in batch 3",
        f"  do:  {LOST_RANK.cause_of(ALIKE).remedy}",
        "  more: countoff explain LostRank",
    ]
    assert (found.ranks, found.restart) == ((), "unknown")


def test_ranks_that_raised_the_same_are_named_together() -> None:
    found = account({1: missing("1.npy"), 3: missing("3.npy")}, 4, (3,))
    assert found.sentence == (
        "ranks 1, 3 of 4 ranks raised FileNotFoundError: no file '…' at train.py:11 (in batch 3)."
    )
    assert found.ranks == (1, 3)
    assert [line["rank"] for line in found.rows] == [1, 3, 0, 2]


def test_each_group_of_failures_is_told_the_first_one_first() -> None:
    """The one that the log names, and then by time."""
    other = Failure("KeyError: 'label'", "train.py:30", "in batch 3", 5.0)
    failures = {0: missing(time=2.0), 1: other, 2: missing(time=3.0), 3: Failure("MemoryError", time=1.0)}
    found = account(failures, 4, (1,))
    assert found.sentence == (
        "rank 1 raised KeyError: 'label' at train.py:30 (in batch 3); rank 3 raised MemoryError; ranks 0, 2 raised "
        "FileNotFoundError: no file 'a.npy' at train.py:11 (in batch 3)."
    )
    assert found.ranks == (1, 3, 0, 2)


def test_a_failure_of_a_large_job_is_told_in_a_sentence() -> None:
    found = account(dict.fromkeys(range(4096), missing()), 4096, (77,))
    assert found.sentence.startswith("all 4096 ranks raised FileNotFoundError")
    assert len(found.rows) == 1
    found = account({rank: Failure(f"{'ABCDEFGHIJKL'[rank]}Error") for rank in range(12)}, 13)
    assert found.sentence.endswith("; other ranks raised other exceptions.")


def test_a_part_of_a_job_is_told_by_its_ranks() -> None:
    store, verdict = FakeStore(), Verdict("LostRank", "rank 4 raised it.", (4,), begun=3)
    publish_table(store, verdict, {rank: counted(rank, missing()) for rank in (4, 5)}, complete=True)
    assert with_table(store, verdict, {}, 2, (4, 5)).sentence.startswith("ranks 4, 5 raised FileNotFoundError")
