"""Data that is sharded twice, and streams that differ where a framework deals one out; on real ranks."""

import re
import time
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("accelerate")

from integration_tests import stream_jobs
from integration_tests.harness import RankResult, Watch
from integration_tests.in_turn import in_turn
from integration_tests.nightly import nightly_but
from integration_tests.output import verdict_lines
from integration_tests.stream_jobs import CASES, SAMPLES

NAMES = [name for name in CASES if "StreamingDataset" not in name or find_spec("streaming")]
FAULTY = [name for name in NAMES if CASES[name].kind]
HEALTHY = [name for name in NAMES if not CASES[name].kind]


def by_name(results: list[RankResult], names: list[str]) -> dict[str, list[Any]]:
    """What each rank returned, by case."""
    return {name: [result.value[place] for result in results] for place, name in enumerate(names)}


def test_wrong_streams_in_accelerate_are_warned_of(run_ranks):
    """Each gives its own warning, whose numbers are those of a count of what was read; rank 0 prints it, once."""
    results = run_ranks(stream_jobs.in_accelerate, 2, FAULTY, deadline_seconds=240)
    for name, outcomes in by_name(results, FAULTY).items():
        case, warned = CASES[name], outcomes[0]["warned"]
        assert set(warned) == {case.kind}, (name, warned)
        assert case.says in warned[case.kind], (name, warned)
        assert_count(warned[case.kind], [outcome["read"] for outcome in outcomes], halved=case.halved)
    heads = [line for line in verdict_lines(results[0]) if line.startswith("countoff: ")]
    assert len(heads) == len(FAULTY)
    assert verdict_lines(results[1]) == []


def assert_count(sentence: str, read: list[list[int]], *, halved: bool) -> None:
    """The part that the sentence names is the part of all samples that the ranks have read."""
    count = len(set().union(*read))
    if halved:
        part = re.findall(r"1/(\d+)", sentence)[-1]
        assert count * int(part) == SAMPLES, (sentence, count)
    else:  # some are read twice, and others never
        assert count < len(read[0]) + len(read[1]), (sentence, count)


def test_right_streams_in_accelerate_give_no_warning(run_ranks):
    """Nothing is said, and the job reads and trains as without countoff, with the same random numbers afterwards."""
    jobs = {"bare": (stream_jobs.in_accelerate, HEALTHY, False), "watched": (stream_jobs.in_accelerate, HEALTHY)}
    for result in run_ranks(in_turn, 2, jobs, deadline_seconds=300):
        assert verdict_lines(result) == []
        for name, watched, unwatched in zip(HEALTHY, result.value["watched"], result.value["bare"], strict=True):
            assert watched["warned"] == {}, name
            if name != "webdataset, resampled":  # whose seed is the time
                assert {**watched, "warned": {}} == {**unwatched, "warned": {}}, name


# The Trainer leaves its loader to Accelerate.
@pytest.mark.parametrize("framework", ["accelerate", pytest.param("transformers", marks=pytest.mark.nightly)])
def test_a_streaming_dataset_that_rank_0_reads_for_all_is_warned_of_before_it_hangs(run_ranks, framework):
    def end(watch: Watch) -> None:
        patience = time.monotonic() + 60
        while "countoff explain DoubleSharded" not in watch.results()[0].output and time.monotonic() < patience:
            watch.let_run(0.1)
        for rank in (0, 1):
            watch.kill(rank)

    pytest.importorskip("streaming")
    results = run_ranks(stream_jobs.hang, 2, framework, expect=None, while_running=end, deadline_seconds=90)
    head, _, why, remedy, *_ = (line.strip() for line in verdict_lines(results[0]))
    assert "(StreamingDataset), and Accelerate reads rank 0's for all ranks." in head
    assert why.endswith("so rank 0 may wait forever.")
    assert "from sharding a StreamingDataset, which gives each rank its share by itself: " in remedy


def test_the_trainer_reads_all_of_a_streaming_dataset_as_the_remedy_says(run_ranks):
    pytest.importorskip("streaming")
    results = run_ranks(stream_jobs.streams_alone, 2, deadline_seconds=90)
    assert sorted(number for result in results for number in result.value) == list(range(SAMPLES))
    assert [line for result in results for line in verdict_lines(result)] == []


@pytest.mark.parametrize("framework", nightly_but(("torch",), stream_jobs.GIVEN))
def test_the_other_frameworks_warn_of_the_same(run_ranks, framework):
    """Wrong data is warned of, with the numbers of a count, and right data is not."""
    pytest.importorskip("lightning" if framework == "fabric" else framework)
    cases = stream_jobs.GIVEN[framework]
    results = run_ranks(stream_jobs.given, 2, framework, deadline_seconds=240)
    heads = [line.removeprefix("countoff: ") for line in verdict_lines(results[0]) if line.startswith("countoff: ")]
    expected = [name for name, case in cases.items() if case.kind]
    assert len(heads) == len(expected), heads
    for name, said in zip(expected, heads, strict=True):
        case = cases[name]
        assert said.startswith(case.kind + ": "), (name, said)
        assert case.says in said, (name, said)
        assert_count(said, [result.value[list(cases).index(name)]["read"] for result in results], halved=case.halved)
    assert verdict_lines(results[1]) == []
