"""Ranks that are made even train as without countoff, wherever they were even already, whatever their loaders do."""

from integration_tests import even_bits
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.output import verdict_lines


def test_loaders_of_one_length_train_to_the_same_bits(run_ranks):
    """Weights, batches and random states are those of a job without countoff, with `stop`."""
    results = run_ranks(even_bits.equal, 2, list(even_bits.LOADERS), deadline_seconds=150)
    for result in results:
        assert verdict_lines(result) == []
        for name, by_policy in result.value.items():
            assert by_policy["stop"] == by_policy["None"], name


LENGTHS = [5, 8]
JOBS = {
    "refilled, short first": (even_bits.uneven, LENGTHS, ["refilled"]),
    "refilled, short last": (even_bits.uneven, [8, 5], ["refilled"]),
    "unreadable": (even_bits.unreadable, LENGTHS),
    "by length": (even_bits.by_length, LENGTHS),
}


def test_uneven_loaders_of_any_kind_are_made_even(run_ranks):
    """No batch is trained on that the loader has overwritten, and what is left is counted without the user's code.

    The samples of what a longer rank has left are for a message only: batches of any class are let be. The length of a
    pass is the same on every rank, so that a schedule made of it ends alike everywhere, and so does a step after the
    last batch.
    """
    results = run_ranks(in_turn, 2, JOBS, deadline_seconds=120)
    for result, own in zip(results, LENGTHS, strict=True):
        for name in ("refilled, short first", "refilled, short last"):
            by_hand, made_even = result.value[name]["refilled"]
            assert made_even == by_hand, name
            assert made_even[1] == [5] * even_bits.EPOCHS, name
        assert result.value["unreadable"] == [5] * 4
        found = result.value["by length"]
        assert (found["length"], found["steps"]) == (5, 3 * even_bits.EPOCHS)
        assert found.pop("own") == own  # that of the loader itself
        assert "WrongHorizon" not in "\n".join(said_in_turn(result)["by length"])
    assert results[0].value["by length"] == results[1].value["by length"]


def test_loaders_that_accelerate_has_divided_train_to_the_same_bits(run_ranks):
    """So they do where Accelerate gives each rank as many batches, and looks one batch ahead by itself."""
    for result in run_ranks(even_bits.accelerated, 2, deadline_seconds=120):
        for workers, by_policy in result.value.items():
            assert by_policy["stop"] == by_policy["None"], workers
