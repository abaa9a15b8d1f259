"""Lightning, evaluations of unequal length: legitimate where nothing is synchronised per batch, named where it is."""

from typing import Any

import pytest

from integration_tests.lightning_jobs import Job, fit
from integration_tests.output import assert_named, verdict_lines


def uneven(val: list[Any], sync: str, **options: Any) -> Job:
    return Job(train=[4] * len(val), val=val, model={"eval_sync": sync}, options=options)


# tests/core/protocol/test_protocol.py proves that the position of the odd rank changes nothing, on simulated ranks.
POSITIONS = [[2, 0], *(pytest.param(val, marks=pytest.mark.nightly) for val in ([0, 2], [3, 2])), [2, 3]]


@pytest.mark.parametrize("val", POSITIONS, ids=str)
def test_an_uneven_evaluation_that_synchronises_is_named(run_ranks, val):
    """The short rank of an evaluation that synchronises each batch is named on every rank."""
    results = run_ranks(fit, 2, uneven(val, "step", uneven_eval="raise"), expect=None, deadline_seconds=30)
    short = val.index(min(val))
    assert_named(results, "UnevenBatches", [short], f"rank {short} ran out of data after {min(val)} batches")


@pytest.mark.ranks(4)
def test_an_uneven_evaluation_on_one_of_four_ranks_is_named(run_ranks, ranks):
    """Of four ranks the short one alone is out of step."""
    results = run_ranks(fit, ranks, uneven([3, 3, 2, 3], "step", uneven_eval="raise"), expect=None, deadline_seconds=30)
    assert_named(results, "UnevenBatches", [2], "rank 2 ran out of data after 2 batches of validation")


@pytest.mark.parametrize("val", [pytest.param([2, 0], marks=pytest.mark.nightly), [3, 2]], ids=str)
def test_an_uneven_evaluation_is_named_when_it_stalls(run_ranks, val):
    """By default an uneven evaluation is warned of, and ends the job when nothing moves."""
    results = run_ranks(fit, 2, uneven(val, "step", stall_seconds=1.5), expect=None, deadline_seconds=30)
    output = "".join(result.output for result in results)
    assert all(result.exit_code != 0 for result in results), output
    for result in results:
        assert "ran out of data after" in "\n".join(verdict_lines(result)), output


@pytest.mark.nightly
def test_an_uneven_evaluation_without_sync_is_warned_of_once(run_ranks):
    """An uneven evaluation without collectives gets one warning, on rank 0, whichever rank ends first."""
    results = run_ranks(fit, 2, uneven([3, 2], "epoch"))
    (headline,) = [line for line in verdict_lines(results[0]) if "countoff: UnevenBatches: " in line]
    assert "rank 1 ran out of data after 2 batches of validation" in headline
    assert verdict_lines(results[1]) == []


@pytest.mark.nightly
def test_an_uneven_evaluation_can_be_allowed(run_ranks):
    """`uneven_eval='allow'` gives no warning."""
    results = run_ranks(fit, 2, uneven([3, 2], "epoch", uneven_eval="allow"))
    assert [line for result in results for line in verdict_lines(result)] == []


@pytest.mark.nightly
def test_an_uneven_evaluation_can_be_a_verdict(run_ranks):
    """`uneven_eval='raise'` ends every rank with the verdict, without any collective."""
    for result in run_ranks(fit, 2, uneven([3, 2], "epoch", uneven_eval="raise"), expect=None):
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, result
        assert "rank 1 ran out of data after 2 batches of validation" in text, result
        assert "rank 0 " in text, result
        assert result.exit_code != 0


def test_loaders_of_one_evaluation_are_counted_apart(run_ranks):
    """Equal sums over several loaders do not hide that each loader is uneven."""
    results = run_ranks(fit, 2, uneven([[2, 3], [3, 2]], "epoch", uneven_eval="raise"), expect=None)
    for result in results:
        assert "5 batches (2 + 3)" in result.output
        assert "5 batches (3 + 2)" in result.output
        assert result.exit_code != 0
