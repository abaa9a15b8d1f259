"""What `countoff.accelerate.Countoff` accepts, and what it reports of the loop that it is given."""

import pytest

pytest.importorskip("accelerate")

from integration_tests import accelerate_cases as cases
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


def test_a_schedule_that_ends_half_way_is_reported(run_ranks):
    """The warning names the optimizer step at which the schedule ends, and the learning rate reaches 0 there."""
    results = run_ranks(cases.scheduled, 2, 20, 2, 2)
    (line,) = said(results)
    assert "WrongHorizon: the learning rate reaches 0 at step 10 of 20: LinearLR was made for 20 steps, and is " in line
    assert "make LinearLR for 40 steps: 20 optimizer steps × 2." in results[0].output
    rates = results[0].value
    assert rates[9] == pytest.approx(0.0)  # what was foretold has come true
    assert rates[8] > 0


@pytest.mark.parametrize(
    ("horizon", "epochs", "samples", "warmup"),
    [(19 * 9, 9, 76, 0), (19 * 3, 1, 76, 100), (30, 1, 80, 0)],
    ids=["the loader's length times the epochs", "fewer steps than the warm-up", "a limit of 15 steps"],
)
def test_a_schedule_as_in_the_examples_is_not_reported(run_ranks, horizon, epochs, samples, warmup):
    """The length before prepare() times the epochs is right, and so is a limit of steps times the processes."""
    results = run_ranks(cases.scheduled, 2, horizon, None, epochs, samples, warmup)
    assert said(results) == []


def test_a_schedule_that_has_ended_is_reported(run_ranks):
    """A schedule that has ended is reported when the next epoch begins."""
    (line,) = said(run_ranks(cases.scheduled, 2, 20, None, 2))
    assert "train epoch 1 begins with a learning rate of 0, which it has had since step 10: " in line


@pytest.mark.parametrize(
    ("horizon", "options"),
    [(40, {}), (20, {"step_scheduler_with_optimizer": False})],
    ids=["times the processes", "stepped by the loop"],
)
def test_a_schedule_that_fits_is_not_mentioned(run_ranks, horizon, options):
    """A schedule of the right length, by either way of stepping it, gives no warning."""
    results = run_ranks(cases.scheduled_with, 2, horizon, options)
    assert said(results) == []
    assert results[0].value[-1] == pytest.approx(0.0)
    assert results[0].value[-3] > 0


@pytest.mark.parametrize(("processes", "calls"), [(1, 3), (2, 6)])
def test_a_schedule_stepped_once_per_epoch_is_not_mentioned(run_ranks, processes, calls):
    """A schedule of as many calls as there are epochs gives no warning."""
    results = run_ranks(cases.scheduled_by_epoch, processes, 3, calls)
    assert said(results) == []
    assert [result.value for result in results] == pytest.approx([0.0] * processes)


def test_one_process_reads_an_undivided_loader(run_ranks):
    """One process alone has the batches, samples and dropped samples of the whole loader."""
    (result,) = run_ranks(cases.of_one_process, 1)
    assert not said([result])
    for batches, samples, foretold in result.value:
        assert foretold["countoff/batches_per_epoch"] == batches
        assert foretold["countoff/samples_per_epoch"] == samples
        assert foretold["countoff/samples_repeated"] == 0
        assert foretold["countoff/samples_dropped"] == 70 - samples
    assert [(batches, samples) for batches, samples, _ in result.value] == [(18, 70), (18, 70), (17, 68)]
