"""Collectives that one rank leaves out or issues alone, which pair wrongly in silence; on real ranks."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from torch._C import _distributed_c10d

from integration_tests import collective_jobs
from integration_tests.harness import RankResult

HEALTHY = [
    "nothing",
    "metric_each_batch",
    "message_each_batch",
    "messages_once",
    "message_of_two_ranks_once",
    "early_once",
    "thread_now_and_then",
    "two_ranks_of_a_group",
]
WHERE = "between batches 40 and 48 of train epoch 0"


def counted(found: dict[str, str]) -> dict[str, str]:
    """What was found, without the lines of code, which this torch may have recorded: see the test of those."""
    return {kind: sentence.partition(" From there on, ")[0] for kind, sentence in found.items()}


def warned(results: list[RankResult]) -> Any:
    """What the first rank has warned of in each job: it prints it, and the others may not know it yet."""
    return results[0].value


@pytest.mark.ranks(2, 4)
def test_a_collective_that_one_rank_leaves_out_or_issues_alone_is_named(run_ranks, ranks):
    """Gloo pairs it with the next one of its kind; the job would end with exit code 0 and not a word."""
    results = run_ranks(collective_jobs.train, ranks, ["metric_left_out_once", "barrier_too_many"], deadline_seconds=60)
    everyone = "in the group of all ranks"
    if ranks == 2:
        differ = f"ranks issued different numbers of collectives {everyone}"
        fewer, more = (f"{differ}: {told}" for told in ("16 on rank 0, 15 on rank 1", "8 on rank 0, 9 on rank 1"))
    else:
        fewer, more = (f"rank 3 issued 1 collective {than} than ranks 0–2 {everyone}" for than in ("fewer", "more"))
    assert list(map(counted, warned(results))) == [{"CollectivesDiffer": f"{WHERE}, {told}."} for told in (fewer, more)]


@pytest.mark.ranks(2, 4)
def test_programs_whose_ranks_issue_other_numbers_are_silent(run_ranks, ranks):
    results = run_ranks(collective_jobs.train, ranks, HEALTHY, deadline_seconds=180)
    assert [result.value for result in results] == [[{}] * len(HEALTHY)] * ranks


def test_a_level_turns_it_off(run_ranks):
    options = {"levels": {"CollectivesDiffer": "off"}}
    results = run_ranks(collective_jobs.train, 2, ["metric_left_out_once"], options)
    assert warned(results) == [{}]


def test_local_sgd_is_silent(run_ranks):
    assert warned(run_ranks(collective_jobs.train_locally, 2)) == {}


records_gloo = pytest.mark.skipif(
    not hasattr(_distributed_c10d, "_dump_fr_trace"), reason="this torch records no collectives of gloo"
)


def line_of(code: str, number: int = 0) -> str:
    lines = Path(inspect.getfile(collective_jobs)).read_text().splitlines()
    found = [line for line, text in enumerate(lines, 1) if text.strip() == code]
    return f"collective_jobs.py:{found[number]}"


@records_gloo
@pytest.mark.ranks(2, 4)
def test_the_warning_quotes_the_first_collective_that_does_not_pair(run_ranks, ranks):
    results = run_ranks(collective_jobs.train_until_warned, ranks, "metric_left_out_once")
    sentence = results[0].value["warned"]["CollectivesDiffer"]
    metric = f"all_reduce of [650] at {line_of('dist.all_reduce(self.metric)', 1)}"
    others = "rank 0 issued" if ranks == 2 else "ranks 0–2 issued"
    said = sentence.partition(" From there on, ")[2]
    assert f"{others} {metric}" in said, sentence
    assert f"rank {ranks - 1} issued all_reduce of [650] at loops.py:" in said, sentence
    assert [result.value["reads"] > 0 for result in results] == [True] * ranks


@records_gloo
@pytest.mark.ranks(4)
def test_the_recorder_is_not_read_in_a_healthy_run(run_ranks, ranks):
    """Nor where all ranks were asked for their numbers, as here, and these prove nothing."""
    results = run_ranks(collective_jobs.train_until_warned, ranks, "message_of_two_ranks_once")
    assert [result.value for result in results] == [{"warned": {}, "reads": 0}] * ranks


@pytest.mark.ranks(4)
@pytest.mark.parametrize("held", ["0", "20"], ids=["off", "wrapped"])
def test_a_recorder_that_does_not_reach_back_costs_its_sentence_alone(run_ranks, ranks, held):
    env = {"TORCH_FR_BUFFER_SIZE": held}
    results = run_ranks(collective_jobs.train_until_warned, ranks, "metric_left_out_once", env=env)
    everyone = "in the group of all ranks"
    said = f"{WHERE}, rank 3 issued 1 collective fewer than ranks 0–2 {everyone}."
    assert results[0].value["warned"] == {"CollectivesDiffer": said}
