"""Even passes over 2 to 64 simulated ranks in random orders of events: all take the minimum.

The environment variable COUNTOFF_TEST_EXAMPLES multiplies the number of examples.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core import FitPlan
from countoff.core.protocol.actions import Action, AddOne
from countoff.core.protocol.credits import Credits
from tests.core.protocol.test_protocol import examples, seeds, world_sizes
from tests.simulator import Epoch, Job, Program, Rank, play

singles = st.sampled_from([range(0), range(1), range(1, 64), range(64)])
"""The ranks that fetch nothing ahead: none, the first one, all others, all."""


@st.composite
def lengths(draw: st.DrawFn) -> list[list[int]]:
    """The batches of each rank, in each epoch: often at and around the borders of blocks, and none at all."""
    ranks = draw(world_sizes)
    most = draw(st.sampled_from([1, 4, 9, 17]))
    own = st.integers(0, most) | st.just(most)
    return draw(st.lists(st.lists(own, min_size=ranks, max_size=ranks), min_size=1, max_size=3))


def job(
    epochs: list[list[int]], lookahead: int, *, synced: bool, leaves: int | None = None, single: Container[int] = ()
) -> Job:
    """The job whose ranks have so many batches in each epoch; the ranks in `single` fetch nothing ahead."""
    programs = [
        Program(
            tuple(Epoch(batches[rank], leaves=leaves if rank == 0 else None) for batches in epochs),
            plan=FitPlan(),
            prefetches=rank not in single,
        )
        for rank in range(len(epochs[0]))
    ]
    return Job(tuple(programs), synced=synced, uneven_train="stop", lookahead=lookahead)


def assert_nothing_left(ranks: list[Rank]) -> None:
    left = [key for key in ranks[0].store.values if key.startswith("even/")]
    assert left == []


@examples(40)
@given(lengths(), st.sampled_from([1, 2, 3, 4, 8]), st.booleans(), singles, seeds)
def test_every_rank_takes_the_minimum(epochs, lookahead, synced, single, seed):
    """Nobody waits for ever, and no verdict is given."""
    ranks = play(job(epochs, lookahead, synced=synced, single=single), seed)
    assert [(rank.over, rank.state.end) for rank in ranks] == [(True, None)] * len(ranks)
    for rank in ranks:
        assert rank.taken == [list(range(min(each))) for each in epochs]
    assert_nothing_left(ranks)


@examples(40)
@given(lengths(), st.booleans(), st.sampled_from([0, 1, 3, 8]), seeds)
def test_every_rank_takes_the_minimum_of_proven_lengths(epochs, synced, evaluates_after, seed):
    """All take the smallest, and no rank tells another one where its loader ends."""
    own = [max(1, length) for length in epochs[0]]
    evaluations = {evaluates_after: (2,)} if 0 < evaluates_after <= min(own) else {}
    programs = [Program((Epoch(length, evaluations=evaluations),) * 2, plan=FitPlan(), proven=length) for length in own]
    ranks = play(Job(tuple(programs), synced=synced, uneven_train="stop"), seed)
    assert [(rank.over, rank.state.end) for rank in ranks] == [(True, None)] * len(ranks)
    for rank in ranks:
        assert rank.taken == [list(range(min(own)))] * 2
    assert_nothing_left(ranks)
    store = ranks[0].store
    log = [store.get(key) for key in store.values if key.startswith("log/")]
    assert [entry for entry in log if entry["type"] in ("grant", "ends", "stop")] == []


@examples(40)
@given(world_sizes, st.integers(1, 9), st.integers(1, 9), seeds)
def test_a_rank_whose_loader_gives_less_than_proven_is_named(world_size, given_batches, missing, seed):
    """The others would wait for it in their next batch."""
    proven = given_batches + missing
    programs = [
        Program((Epoch(given_batches if rank == 0 else proven),), plan=FitPlan(), proven=proven)
        for rank in range(world_size)
    ]
    ranks = play(Job(tuple(programs), synced=True, uneven_train="stop"), seed)
    assert {rank.state.end and (rank.state.end.kind, rank.state.end.subject) for rank in ranks} == {
        ("UnevenBatches", "")
    }
    assert f"rank 0 ran out of data after {given_batches} batch" in str(
        ranks[0].state.end and ranks[0].state.end.sentence
    )


@examples(40)
@given(lengths(), st.sampled_from([1, 2, 4]), st.integers(0, 6), seeds)
def test_a_rank_that_leaves_alone_is_named(epochs, lookahead, leaves, seed):
    """A `break` on one rank ends the job: the others would wait for its credits."""
    first = [max(each, leaves + 2) for each in epochs[0]]
    ranks = play(job([first], lookahead, synced=True, leaves=leaves), seed)
    ends = {rank.state.end and rank.state.end.sentence for rank in ranks}
    assert len(ends) == 1
    verdict = ranks[0].state.end
    assert verdict is not None
    assert verdict.kind == "UnevenBatches"
    assert f"rank 0 stopped after {leaves} batch" in verdict.sentence


def granted(credits: Credits, block: int, size: int) -> list[Action]:
    """What a rank does when it receives a grant."""
    return credits.receive({"type": "grant", "block": block, "size": size})


def test_blocks_grow_where_the_store_is_slow():
    """A rank whose answers take over a quarter of a block asks for blocks twice as long, up to eight times."""
    credits, now, sizes = Credits(3, 2), 0.0, []
    for block in range(40):
        while credits.ready < sum([1, 1, *sizes[:block]][: block + 1]):
            now += 0.01
            for action in credits.fetched(now):
                assert isinstance(action, AddOne)
                sizes.append(action.entry["size"])
                credits.added(0.02)
        granted(credits, block, sizes[block])
    assert sizes[:3] == [1, 1, 1]
    assert sorted(set(sizes)) == [1, 2, 4, 8]
    assert credits.lookahead == 16


def test_a_prompt_store_leaves_blocks_as_they_are():
    """Nothing grows where the store answers at once."""
    credits = Credits(3, 4)
    actions = [action for now in range(4) for action in credits.fetched(float(now))]
    assert [action.entry["size"] for action in actions if isinstance(action, AddOne)] == [2, 2]
    assert credits.lookahead == 4


def train(
    credits: Credits, batches: int, *, batch_seconds: float, fetch_seconds: float = 0.0, grant_seconds: float = 0.0
) -> None:
    """One rank's loop, whose look-ahead is full before each batch; a credit is granted so long after it is given."""
    now, given, due = 0.0, 0, deque[tuple[float, dict[str, Any]]]()

    def carry_out(actions: Iterable[Action], at: float) -> None:
        due.extend((at + grant_seconds, action.entry) for action in actions if isinstance(action, AddOne))

    def receive_grants() -> None:
        while due and due[0][0] <= now:
            at, entry = due.popleft()
            carry_out(credits.receive(entry), at)

    while given < batches:
        while credits.ready - given < credits.lookahead:
            now += fetch_seconds
            receive_grants()
            carry_out(credits.fetched(now), now)
        if given == credits.granted:
            now = max(now, due[0][0])
        else:
            given += 1
            now += batch_seconds
        receive_grants()


@pytest.mark.parametrize(
    ("ranks", "milliseconds", "lookahead", "size"),
    [
        (2, 1, 4, 2),
        (2, 0.4, 4, 4),  # for 2 of them, the host is busy for 0.06 ms per block, and 20 times that is 1.2 ms
        (16, 5, 4, 2),
        (20, 5, 4, 4),
        (64, 5, 4, 8),
        (64, 20, 4, 2),
        (64, 20, 2, 2),
        (64, 5, 16, 8),
        (256, 50, 4, 4),
        (4096, 200, 4, 16),
        (4096, 5, 4, 16),  # no more: eight times the first size
        (4096, 5, 2, 8),
    ],
)
@pytest.mark.parametrize(("fetch_seconds", "grant_seconds"), [(0.0, 0.0), (1e-4, 1e-4), (1e-4, 0.1)])
def test_blocks_grow_until_the_host_is_busy_for_a_twentieth(
    ranks: int, milliseconds: float, lookahead: int, size: int, fetch_seconds: float, grant_seconds: float
):
    """A block costs the store's host 30 µs for each that speaks with it. The look-ahead has two blocks.

    It is training that is measured, not how fast a look-ahead is filled. Where training waits for grants, a batch takes
    longer, and blocks are no larger for that.
    """
    credits = Credits(3, lookahead, ranks=ranks)
    train(credits, 400, batch_seconds=milliseconds / 1e3, fetch_seconds=fetch_seconds, grant_seconds=grant_seconds)
    if grant_seconds < milliseconds / 1e3:
        assert (credits.size, credits.lookahead) == (size, 2 * size)
    assert credits.size <= size


def test_blocks_grow_by_one_doubling_at_a_time():
    """A batch that seems short for once, as one that is skipped, does not take eight times the memory."""
    credits, sizes = Credits(3, 4, ranks=4096), []
    for batch in range(60):
        for action in credits.fetched(batch * 0.01):
            assert isinstance(action, AddOne)
            sizes.append(action.entry["size"])
            credits.receive(action.entry)
    assert sizes[:8] == [2, 2, 2, 2, 4, 8, 16, 16]


def test_a_look_ahead_of_one_does_not_grow():
    """A loader that hands out one memory for each batch is trained on as it is filled, whatever the store costs."""
    credits = Credits(3, 1, ranks=4096)
    for block in range(20):
        credits.fetched(block * 0.001)
        granted(credits, block, 8)
    assert credits.lookahead == 1


def test_the_cost_is_that_of_all_ranks_that_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Every rank adds to the counters of a job in which nobody speaks for others."""
    costs: set[float] = set()
    fetched = Credits.fetched

    def note(credits: Credits, now: float) -> list[Action]:
        costs.add(credits.host_seconds)
        return fetched(credits, now)

    monkeypatch.setattr(Credits, "fetched", note)
    play(job([[9] * 5], 4, synced=True), 0)
    assert costs == {Credits(0, 4, ranks=5).host_seconds}


@examples(20)
@given(world_sizes, st.sampled_from([32, 50]), st.data(), st.sampled_from([2, 3, 4]), seeds)
def test_ranks_stay_even_while_blocks_grow(world, most, data, lookahead, seed):
    """Growth moves borders and look-aheads; no rank takes a batch more or less, or waits for ever."""
    own = data.draw(st.lists(st.integers(most // 2, most), min_size=world, max_size=world))
    added = Credits.added
    with mock.patch.object(Credits, "added", lambda credits, seconds: added(credits, 1e9)):
        ranks = play(job([own] * 2, lookahead, synced=True), seed)
    assert [(rank.over, rank.state.end) for rank in ranks] == [(True, None)] * world
    for rank in ranks:
        assert rank.taken == [list(range(min(own)))] * 2
    assert_nothing_left(ranks)


def keys_of(actions: list[Action]) -> list[str]:
    """The counters to which a rank adds."""
    return [action.key for action in actions if isinstance(action, AddOne)]


def test_blocks_take_turns_with_two_counters():
    """No rank adds to a counter for another block before all ranks have: it gives credit for two blocks at most."""
    credits = Credits(3, 8)
    actions = [action for _ in range(20) for action in credits.fetched(0.0)]
    assert keys_of(actions) == ["even/3/0", "even/3/1"]
    for block in range(3):
        actions += granted(credits, block, 2)
    assert keys_of(actions) == ["even/3/0", "even/3/1", "even/3/0", "even/3/1", "even/3/0"]
    assert credits.left_keys() == ["even/3/0", "even/3/1"]


@pytest.mark.parametrize(("lookahead", "ahead"), [(4, False), (1, True)])
def test_a_rank_that_fetches_nothing_ahead_says_so_once_to_each_counter(lookahead: int, ahead: bool):
    """A counter keeps it, and no sum grows with the number of batches beyond what the store can hold."""
    credits, told = Credits(3, lookahead, ahead=ahead), []
    for block in range(5):
        told += [action.single for action in credits.fetched(0.0) if isinstance(action, AddOne)]
        granted(credits, block, 1)
    assert told == [True, True, False, False, False]


def test_the_next_pass_begins_with_blocks_as_large_as_the_last_ones(monkeypatch: pytest.MonkeyPatch):
    """A store that was slow in one epoch is slow in the next one too: nobody waits while blocks grow again."""
    sizes: dict[int, list[int]] = {}
    added, receive = Credits.added, Credits.receive

    def note(credits: Credits, entry: Mapping[str, Any]) -> list[Action]:
        if entry["type"] == "grant":
            sizes.setdefault(entry["opened"], []).append(entry["size"])
        return receive(credits, entry)

    monkeypatch.setattr(Credits, "added", lambda credits, seconds: added(credits, 1e9))
    monkeypatch.setattr(Credits, "receive", note)
    ranks = play(job([[200] * 2] * 2, 4, synced=True), 0)
    assert [(rank.over, rank.state.end) for rank in ranks] == [(True, None)] * 2
    first, second = sizes.values()
    assert set(first[:2]) == {2}
    assert max(first) == 16
    assert set(second) == {16}


def test_what_another_program_writes_grants_nothing():
    """Grants out of order, of blocks that this rank has no credit for, or without a size change nothing."""
    credits = Credits(3, 4)
    for block, size in ((0, 2), (1, 2), (7, 2)):
        granted(credits, block, size)
    assert credits.granted == 0
    credits.fetched(0.0)
    credits.fetched(0.0)
    granted(credits, 0, 0)
    assert credits.granted == 0
    granted(credits, 0, 2)
    assert credits.granted == 1


def test_a_known_end_needs_no_credits():
    """Where the common end is known before the span begins, nothing is fetched ahead and nobody is counted."""
    credits = Credits.known(3, 5)
    assert (credits.lookahead, credits.granted, credits.total) == (0, 5, 5)
    assert [credits.fetched(0.0) for _ in range(5)] == [[]] * 5
    assert credits.ended() == []


def test_a_batch_of_a_block_that_is_not_whole_cannot_come():
    """A rank that fetches no more gets the batches of its whole blocks, and those up to an end that it can reach."""
    credits = Credits(3, 4)
    for _ in range(3):
        credits.fetched(0.0)
    assert [credits.can_come(batch) for batch in (1, 2, 3, 4)] == [True, True, False, False]
    credits.receive({"type": "ends", "opened": 3, "at": 3})
    assert [credits.can_come(batch) for batch in (2, 3, 4)] == [True, True, False]
