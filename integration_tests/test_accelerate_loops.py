"""What `countoff.accelerate.Countoff` accepts, and what it reports of the loop that it is given."""

import pytest

pytest.importorskip("accelerate")

from integration_tests import accelerate_cases as cases
from integration_tests.in_turn import in_turn
from integration_tests.output import verdict_lines


def said(results):
    return [line for result in results for line in verdict_lines(result) if line.startswith("countoff: ")]


def test_any_source_of_batches_is_counted(run_ranks):
    """Totals are foretold of the loaders whose samplers show them; of anything else, nothing is foretold."""
    results = run_ranks(cases.loaders_of_any_kind, 2)
    assert said(results) == []
    assert [result.value for result in results] == [
        {
            "prepared": (5, 5, 5),
            "prepared as for one process": (5, 5, 5),
            "not prepared": (10, 10, 10),
            "a generator": (10, 10, None),
            "steps": (7, 7, None),
        }
    ] * 2


def test_accelerates_classes_are_given_back(run_ranks):
    """Loaders keep their class and its methods in a fit; what is put on other classes goes with the fit."""
    for result in run_ranks(cases.classes_during_and_after, 2):
        assert all(result.value.values()), result.value


def test_processes_that_train_alone_are_warned_once(run_ranks):
    """Processes that Accelerate does not join into one job get one warning, with the remedy."""
    results = run_ranks(cases.alone, 2)
    (line,) = said(results)
    assert "NotDistributed: WORLD_SIZE is 2, and Accelerate has num_processes=1: each process trains" in line
    assert "ACCELERATE_USE_CPU=true" in results[0].output
    assert [result.value for result in results] == [10, 10]


def test_one_process_reads_an_undivided_loader(run_ranks):
    """One process alone has the batches, samples and dropped samples of the whole loader.

    A schedule that it steps once per epoch gives no warning; test_horizon_cases.py has that of two processes.
    """
    jobs = {"loaders": (cases.of_one_process,), "by epoch": (cases.afresh, cases.scheduled_by_epoch, 3)}
    (result,) = run_ranks(in_turn, 1, jobs)
    assert not said([result])
    assert result.value["by epoch"] == pytest.approx(0.0)
    loaders = result.value["loaders"]
    for batches, samples, foretold in loaders:
        assert foretold["countoff/batches_per_epoch"] == batches
        assert foretold["countoff/samples_per_epoch"] == samples
        assert foretold["countoff/samples_repeated"] == 0
        assert foretold["countoff/samples_dropped"] == 70 - samples
    assert [(batches, samples) for batches, samples, _ in loaders] == [(18, 70), (18, 70), (17, 68)]
