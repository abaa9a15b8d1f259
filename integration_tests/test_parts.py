"""`Countoff(group=…)`: trials on parts of a job's ranks hear nothing of each other."""

import json

import pytest

from countoff.report.reader import read
from integration_tests import part_jobs
from integration_tests.output import named_ranks, verdict_lines, whole_message


def said(results):
    return [line for result in results for line in verdict_lines(result)]


@pytest.mark.parametrize(
    ("options", "taken"),
    [({}, [4, 4, 12, 12]), pytest.param({"uneven_train": "stop"}, [4, 4, 12, 12], marks=pytest.mark.nightly)],
)
def test_trials_of_other_lengths_epochs_and_rates_hear_nothing(run_ranks, tmp_path, options, taken):
    """Their traces are two runs for each part: each has its own ranks, and no rank is missing."""
    results = run_ranks(part_jobs.trials, 4, [4, 4, 6, 6], {**options, "trace_dir": str(tmp_path / "trace")})
    assert said(results) == []
    assert [[trial[:2] for trial in result.value] for result in results] == [[(each, 2)] * 2 for each in taken]
    runs = read([str(tmp_path / "trace")]).runs
    assert sorted((sorted(run.fits), run.world_size, run.missing) for run in runs) == [
        ([0, 1], 2, []),
        ([0, 1], 2, []),
        ([2, 3], 2, []),
        ([2, 3], 2, []),
    ]


def test_uneven_ranks_of_a_part_take_the_same_number_of_batches(run_ranks):
    results = run_ranks(part_jobs.trials, 4, [4, 3, 6, 5], {"uneven_train": "stop"})
    assert [[trial[0] for trial in result.value] for result in results] == [[each] * 2 for each in (3, 3, 10, 10)]
    assert results[0].value[0][2] == results[1].value[0][2]
    assert results[2].value[0][2] == results[3].value[0][2]
    heard = {result.rank: sum("countoff: Truncated" in line for line in verdict_lines(result)) for result in results}
    assert heard == {0: 2, 1: 0, 2: 2, 3: 0}  # the first rank of each part, once in each trial


def test_an_uneven_rank_is_named_by_its_number_in_the_job(run_ranks, tmp_path):
    path = tmp_path / "verdict.json"
    results = run_ranks(part_jobs.trials, 4, [4, 4, 6, 5], {"verdict_file": str(path)}, expect=[0, 0, 1, 1])
    assert [result.value[0][0] for result in results[:2]] == [4, 4]
    assert said(results[:2]) == []
    message = whole_message(results[2:])
    assert "UnevenBatches: rank 3 ran out of data after 5 batches of train epoch 0; rank 2 " in message
    assert "ran out first: rank 3 of ranks 2, 3" in message
    verdict = json.loads(path.read_text())
    assert (verdict["ranks"][0], verdict["part"], verdict["world_size"]) == (3, [2, 3], 2)


def test_a_killed_rank_of_a_part_is_named_there_alone(run_ranks):
    results = run_ranks(part_jobs.trials, 4, [40, 40, 40, 40], {}, "killed", expect=None)
    assert [result.exit_code for result in results[:2]] == [0, 0]
    assert said(results[:2]) == []
    message = whole_message([results[2]])
    assert named_ranks(message) == [3]
    assert "LostRank: rank 3 is gone" in message


def test_ranks_that_have_begun_other_numbers_of_fits_meet_again(run_ranks):
    results = run_ranks(part_jobs.other_parts_later, 4)
    assert said(results) == []
    assert [result.value for result in results] == [[3] * 3] + [[3] * 5] * 3


def test_a_part_that_resumes_with_another_rate_is_told(run_ranks):
    lines = {each.rank: verdict_lines(each) for each in run_ranks(part_jobs.resumes_with_another_rate, 4)}
    heads = {rank: [line for line in each if line.startswith("countoff: ")] for rank, each in lines.items()}
    assert [rank for rank, each in heads.items() if each] == [2]
    assert "ResumeMismatch: " in heads[2][0]


def test_a_rank_that_is_not_in_the_group_is_told_so(run_ranks):
    results = run_ranks(part_jobs.asks_for_others, 2)
    assert [result.value for result in results] == [
        "made",
        "rank 1 is not in the group: make Countoff(group=…) on the ranks of the group alone",
    ]
