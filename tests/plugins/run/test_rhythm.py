"""By the batches between its optimizer steps, a loop is known to train on what its loader gives."""

import pytest

from countoff._run.rhythm import Rhythm


def rhythm_of(*taken, gap=None):
    rhythm = Rhythm(gap)
    for batches in taken:
        rhythm.stepped(batches)
    return rhythm


@pytest.mark.parametrize(
    ("taken", "gap"),
    [
        ((1, 2, 3), 1),
        ((1, 1, 2, 2, 3), 1),  # two optimizers
        ((4, 8, 12), 4),  # an accumulation
        ((2, 3, 4), 1),  # a loader that is read ahead
        ((6, 7, 8), 1),  # the first batches are skipped
        ((2, 4, 6), 2),  # dealt out, on the last of two ranks: nothing tells it from an accumulation
    ],
)
def test_as_many_batches_for_each_step_are_a_rhythm(taken, gap):
    rhythm = rhythm_of(*taken)
    assert (rhythm.is_steady, rhythm.broken, rhythm.gap) == (True, False, gap)
    assert not rhythm_of(*dict.fromkeys(taken[:-1])).is_steady, "two steps show no rhythm yet"


@pytest.mark.parametrize(
    "taken",
    [
        (1, 3, 5),  # dealt out, on the first of two ranks
        (1, 2, 4),  # packed
        (3, 4, 6),
        (1, 2, 3, 4, 5, 7),
    ],
)
def test_other_numbers_of_batches_are_none(taken):
    rhythm = rhythm_of(*taken)
    assert (rhythm.is_steady, rhythm.broken) == (False, True)
    rhythm.stepped(taken[-1] + 1)
    assert rhythm.broken, "once broken, it stays so"


def test_a_later_pass_may_go_on_with_an_accumulation():
    assert rhythm_of(2, gap=4).is_steady
    assert rhythm_of(2, 6, 10, gap=4).is_steady
    assert rhythm_of(2, 6, 9, gap=4).broken
