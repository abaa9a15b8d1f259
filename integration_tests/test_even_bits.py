"""Ranks that are made even train as without countoff, wherever they were even already, whatever their loaders do."""

import pytest

from integration_tests import even_bits
from integration_tests.output import verdict_lines


def test_loaders_of_one_length_train_to_the_same_bits(run_ranks):
    """Weights, batches and random states are those of a job without countoff, with `stop` and with `repeat`."""
    results = run_ranks(even_bits.equal, 2, list(even_bits.LOADERS), deadline_seconds=150)
    for result in results:
        assert verdict_lines(result) == []
        for name, by_policy in result.value.items():
            assert by_policy["stop"] == by_policy["None"], name
            assert by_policy["repeat"] == by_policy["None"], name


@pytest.mark.parametrize("lengths", [[5, 8], [8, 5]])
def test_a_batch_is_that_of_its_turn_where_its_memory_is_filled_again(run_ranks, lengths):
    """No batch is trained on that the loader has overwritten."""
    for result in run_ranks(even_bits.uneven, 2, lengths, ["refilled"]):
        by_hand, made_even = result.value["refilled"]
        assert made_even == by_hand
        assert made_even[1] == [5] * even_bits.EPOCHS


def test_what_is_left_is_counted_without_the_users_code(run_ranks):
    """The samples of what a longer rank has left are for a message only: batches of any class are let be."""
    results = run_ranks(even_bits.unreadable, 2, [5, 8])
    assert [result.value for result in results] == [[5] * 4] * 2


@pytest.mark.parametrize(("policy", "common"), [("stop", 5), ("repeat", 8)])
def test_the_length_of_a_loader_is_the_same_on_every_rank(run_ranks, policy, common):
    """A schedule made of a pass's length ends alike everywhere; a step after the last batch is taken by all ranks."""
    results = run_ranks(even_bits.by_length, 2, [5, 8], policy)
    for result, own in zip(results, [5, 8], strict=True):
        assert result.value["length"] == common
        assert result.value["steps"] == -(-common // 2) * even_bits.EPOCHS
        assert result.value.pop("own") == own  # that of the loader itself
        assert "WrongHorizon" not in "\n".join(verdict_lines(result))
    assert results[0].value == results[1].value


def test_loaders_that_accelerate_has_divided_train_to_the_same_bits(run_ranks):
    """So they do where Accelerate gives each rank as many batches, and looks one batch ahead by itself."""
    for result in run_ranks(even_bits.accelerated, 2, deadline_seconds=120):
        for workers, by_policy in result.value.items():
            assert by_policy["stop"] == by_policy["None"], workers
            assert by_policy["repeat"] == by_policy["None"], workers
