"""Runs that are shorter than planned: what counts as a short epoch, and the sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.checks.short import RESUMED, EpochEnd, ShortEpochs, judge_run


def short_epochs(*ends: EpochEnd, accumulation: int = 1, partial_applied: bool = True) -> ShortEpochs:
    epochs = ShortEpochs(accumulation, partial_applied=partial_applied)
    for end in ends:
        epochs.add(end)
    return epochs


def test_a_run_whose_epochs_are_whole_is_silent_whatever_its_plan() -> None:
    epochs = short_epochs(EpochEnd(0, 40, 40), EpochEnd(1, 41, 40))
    assert judge_run(epochs, steps=40, planned=80) is None


def test_a_run_that_has_its_steps_is_silent_whatever_its_epochs_gave() -> None:
    assert judge_run(short_epochs(EpochEnd(1, 0, 40)), steps=80, planned=80) is None


def test_the_rest_of_an_epoch_at_its_end_is_rightly_empty() -> None:
    assert short_epochs(EpochEnd(0, 0, 40, position=40, resumed=True)).first is None


@pytest.mark.parametrize(
    ("ends", "sentence", "subject"),
    [
        (
            [EpochEnd(1, 0, 40, resumed=True, restored=True)],
            "train epoch 1 gave 0 of 40 batches after the resume.",
            RESUMED,
        ),
        ([EpochEnd(1, 0, 40, resumed=True)], "train epoch 1 gave 0 of 40 batches after the resume.", ""),
        ([EpochEnd(1, 3, 40)], "train epoch 1 gave 3 of 40 batches.", ""),
        ([EpochEnd(1, 0, 40, position=3)], "train epoch 1 gave 0 of 37 batches.", ""),
        (
            [EpochEnd(1, 0, 40), EpochEnd(2, 40, 40), EpochEnd(3, 0, 40), EpochEnd(4, 1, 40)],
            "train epoch 1 gave 0 of 40 batches, and 2 later epochs gave too few as well.",
            "",
        ),
    ],
    ids=["restored", "resumed", "some", "middle", "several"],
)
def test_the_first_short_epoch_is_named(ends: list[EpochEnd], sentence: str, subject: str) -> None:
    found = judge_run(short_epochs(*ends), steps=40, planned=80)
    assert found is not None
    assert (found.sentence, found.subject) == (f"the run ended after 40 of 80 steps: {sentence}", subject)


@given(
    whole=st.integers(0, 30),
    given_=st.integers(0, 30),
    position=st.integers(0, 30),
    accumulation=st.integers(1, 5),
    partial_applied=st.booleans(),
)
def test_missing_steps_are_those_of_a_loop(
    whole: int, given_: int, position: int, accumulation: int, partial_applied: bool
) -> None:
    """Counted batch by batch: an epoch that ends too early applies whole accumulations only."""

    def steps(batches: int, last: bool) -> int:
        return sum(not number % accumulation or (last and number == batches) for number in range(1, batches + 1))

    end = EpochEnd(0, given_, whole, position)
    missing = short_epochs(end, accumulation=accumulation, partial_applied=partial_applied).missing_steps
    expected = steps(whole, partial_applied) - steps(position + given_, False)
    assert missing == (max(0, expected) if position + given_ < whole else 0)
