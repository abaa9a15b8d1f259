"""Plain PyTorch loops whose ranks have different numbers of batches, and all take the same number."""

import re
import signal
import time

import pytest

from integration_tests import even_loops
from integration_tests.even_loops import Case
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.output import assert_named, ranks_in, verdict_lines

TWO = [
    Case([[5, 7], [7, 5], [6, 6]]),
    Case([[1, 100], [100, 1]]),
    Case([[0, 5], [4, 3]]),
    Case([[0, 0], [2, 1]]),
    *(Case([[9, 7], [5, 8]], accumulate=count) for count in (2, 3, 4)),
    *(Case([[9, 7]], leave_after=count) for count in (5, 7)),
    Case([[9, 7], [3, 4]], evaluate_after=2),
    Case([[6, 5], [4, 5]], sharded=True),
    *(Case([[4, 5]], kind=kind) for kind in ("dict", "encoding", "namedtuple")),
    *(Case([[9, 7]], options={"LOOKAHEAD": ahead}) for ahead in (1, 2, 3, 16)),
]
LEFT = Case([[9, 7], [5, 8]], leave_after=3, loader={"num_workers": 2, "multiprocessing_context": "fork"})
WORKERS = [  # persistent workers keep the first epoch's numbers
    Case([[9, 7], [9, 7]], loader={"num_workers": 2, "persistent_workers": kept, "multiprocessing_context": "fork"})
    for kept in (True, False)
]
PINNED = [
    Case([[9, 7], [9, 7]], loader={"pin_memory": True, "num_workers": workers, **more})
    for workers, more in ((0, {}), (2, {"multiprocessing_context": "fork"}))
]
FOUR = [Case([[13, 9, 11, 10], [9, 13, 10, 11], [13, 11, 10, 9]]), Case([[8, 8, 8, 8]])]
LAST, MIDDLE, FIRST, EMPTY = [6, 5, 6, 7, 6, 5, 6, 3], [6, 5, 7, 2, 6, 4, 6, 5], [1, 5, 4, 6, 4, 6, 5, 4], [5] * 7 + [0]
EIGHT = [Case([LAST, MIDDLE, FIRST, EMPTY]), Case([LAST], accumulate=2)]
CASES = {2: [*TWO, *WORKERS, LEFT], 4: FOUR, 8: EIGHT}
SHORTEST = {2: (5, 0), 4: (9, 1), 8: (3, 7)}
"""The batches of the first epoch of the first case, and the rank that has no more, by the number of ranks."""


def assert_even(results, cases):
    """Every rank took the common number of batches, and has the weights of the job that was cut by hand."""
    for number, case in enumerate(cases):
        for result in results:
            by_hand, made_even = result.value[number]
            assert made_even == by_hand, (case, result)
            assert made_even["workers"] == 0, case
            common = map(min, case.epochs)
            assert made_even["taken"] == [min(total, case.leave_after or total) for total in common], case
    assert len({result.value[0][1]["weights"] for result in results}) == 1


@pytest.mark.ranks(2, nightly=(4, 8))
def test_all_ranks_take_the_same_batches_as_if_cut_by_hand(run_ranks, ranks):
    """Weights are those of the same job whose loaders were cut by hand, to the bit; rank 0 says what was left."""
    cases = CASES[ranks]
    results = run_ranks(even_loops.with_twins, ranks, cases, deadline_seconds=150)
    assert_even(results, cases)
    assert [verdict_lines(result) for result in results[1:]] == [[]] * (ranks - 1)
    said = "\n".join(verdict_lines(results[0]))
    batches, short = SHORTEST[ranks]
    stopped = f"train epoch 0 stopped on every rank after {batches} batches, where rank {short} ran out of data: "
    left = re.findall(r"ranks? ([\d, –]+) left ", said.partition(stopped)[2].splitlines()[0])
    assert sorted(rank for ranks in left for rank in ranks_in(ranks)) == sorted({*range(ranks)} - {short})


@pytest.mark.gpu
def test_pinned_batches_are_taken_as_if_cut_by_hand(run_ranks):
    """Batches in the look-ahead are those that the loader's thread has pinned."""
    results = run_ranks(even_loops.with_twins, 2, PINNED, deadline_seconds=150)
    assert_even(results, PINNED)
    assert all(made_even["pinned"] == {True} for result in results for _, made_even in result.value)


JOBS = {
    # The first fit of a process connects, the later ones use its connections. The last one changes constants.
    "a reader that connects late": (even_loops.without_reader, [40, 33]),
    "two loaders and an evaluation": (even_loops.two_loaders,),
    "two passes over one loader": (even_loops.pairs, [9, 7]),
    "a slower rank": (even_loops.paced, [1, 2, 4]),
}


def test_ranks_are_even_in_loops_of_any_form(run_ranks):
    """Each of two train loaders ends everywhere at its shortest, and so does an evaluation with a collective each.

    A rank's second connection may take long, where a name server is slow or the store's host is busy. Of two passes
    that are open at the same time, the later one is made even, and the other one goes on alone. A rank that is slower
    all the time is waited for, without a word.
    """
    results = run_ranks(in_turn, 2, JOBS, deadline_seconds=90)
    for result in results:
        assert result.value["a reader that connects late"] == 33
        assert result.value["two loaders and an evaluation"] == [5, 2, 5, 3]
        for one, other in result.value["two passes over one loader"]:
            assert len(one) == 7
            assert one == other
        assert result.value["a slower rank"] == [9] * 6
        said = said_in_turn(result)
        assert (said["two passes over one loader"], said["a slower rank"]) == ([], []), result
    stopped = "Truncated: validation stopped on every rank after 3 batches"
    assert stopped in "\n".join(said_in_turn(results[0])["two loaders and an evaluation"])


def test_an_error_in_a_loader_comes_at_its_batch_and_is_named(run_ranks):
    """The batches fetched before it are trained on, and every rank names the rank that raised."""
    results = run_ranks(even_loops.troubled, 2, even_loops.raise_error, expect=None)
    assert_named(results, "LostRank", [1], "rank 1 raised ValueError: torn shard")
    assert "trained on 4" in results[1].output


# The fault matrix has both at each merge.
@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_while_others_wait_for_it_is_named(run_ranks, number):
    """A rank that is killed or stopped in its loader is named by the ranks that wait for its credit."""

    def lose(watch):
        watch.wait_for(1, "in the loader")
        watch.kill(1, number)
        watch.wait_for_end(0)
        if number == signal.SIGSTOP:
            watch.kill(1)

    results = run_ranks(
        even_loops.troubled, 2, even_loops.wait_for_the_end, expect=None, while_running=lose, deadline_seconds=40
    )
    text = "\n".join(verdict_lines(results[0]))
    assert "countoff: LostRank: rank 1 is " in text, results
    assert results[0].exit_code != 0


def test_a_rank_that_is_interrupted_while_it_waits_is_named(run_ranks):
    """Ctrl-C ends the wait for another rank's batch, and the other rank hears of it."""

    def interrupt(watch):
        watch.wait_for(1, "in the loader")
        watch.wait_for(0, "fetches")
        watch.kill(0, signal.SIGINT)

    results = run_ranks(
        even_loops.troubled,
        2,
        even_loops.wait_for_the_end,
        0,
        expect=None,
        while_running=interrupt,
        deadline_seconds=40,
    )
    assert "countoff: LostRank: rank 0 raised KeyboardInterrupt" in "\n".join(verdict_lines(results[1])), results
    assert all(result.exit_code != 0 for result in results)


def test_a_rank_that_leaves_its_loop_alone_is_named(run_ranks):
    """Different control flow stays a verdict."""
    results = run_ranks(even_loops.leave_alone, 2, expect=None)
    assert_named(results, "UnevenBatches", [0, 1], "rank 1 stopped after 3 batches of train epoch 0")


ASLEEP = "Stalled: no rank has made progress for 2 s; rank 1 is in its loader"


def test_a_rank_asleep_in_its_loader_is_named_by_those_that_wait_for_it(run_ranks, tmp_path):
    """Rank 0 reports the stall with the line in which rank 1 sleeps, and the passes end everywhere as they should."""

    def release(watch):
        for number, name in enumerate(even_loops.STALLS, 1):
            patience = time.monotonic() + 60
            while watch.results()[0].output.count(ASLEEP) < number:
                assert time.monotonic() < patience, watch.results()
                watch.let_run(0.1)
            (directory,) = tmp_path.iterdir()
            (directory / name).touch()

    results = run_ranks(even_loops.stall, 2, 2.0, deadline_seconds=120, while_running=release)
    assert [result.value for result in results] == [{name: [1, 2, 3, 4, 5] for name in even_loops.STALLS}] * 2
    said = verdict_lines(results[0])
    assert sum(ASLEEP in line for line in said) == len(even_loops.STALLS), results[0].output
    assert all("Stalled: " in line for line in said if "countoff: " in line)  # a busy machine may add one
    assert sum(" in sleep_until < " in line for line in said) == 1  # the other one waits for a thread
    assert verdict_lines(results[1]) == []
