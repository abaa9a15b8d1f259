"""What an epoch's optimizer steps prove of its gradient accumulation, and what they do not."""

from collections.abc import Iterator, Sequence

import pytest

from countoff._adapter.epoch_steps import EpochSteps

ACCUMULATION = 4


def found(batches: Sequence[str], optimizers: int = 1) -> str | None:
    """Returns what is said of an epoch.

    Args:
        batches: What each batch does, a letter each: `p` is a pass, a digit is a step of that optimizer.
        optimizers: How many there are.
    """
    steps, passes = EpochSteps(lambda: ACCUMULATION, optimizers=lambda: optimizers), 0
    for batch, does in enumerate(batches, 1):
        for each in does:
            if each == "p":
                passes += 1
            else:
                steps.step(int(each), batch)
    verdict = steps.judge("train epoch 0", batches=len(batches), passes=passes)
    return None if verdict is None else verdict.subject


@pytest.mark.parametrize(
    ("batches", "subject"),
    [
        (["p", "p", "p", "p1"] * 6, None),
        (["p1"] * 24, "steps"),
        (["p1", "p1"], "steps"),
        (["p1"], None),
        ([*["p1"] * 23, "p"], None),
        (["p1p1"] * 24, "steps"),  # twice per batch
        (["pppp1"] * 24, None),  # four parts, one step
        (["p", "p", "p", "p1", "p1"] * 6, None),  # loaders of five batches, one behind the other
        (["p", "p", "p", "p1p1", "p1p1"] * 6, None),  # the same, with an optimizer that steps twice
        (["ppppp", "pppp1p1", "ppp1"] * 8, None),  # a last part that is stepped by itself
        ([*["pppp1"] * 23, "p1p1p1p1"], "cut batches"),
        (["pppppppp1", "pppppppp1", "p1" * 8], "cut batches"),  # the last batch has more parts than there are batches
        ([*["p1"] * 8, "p11", "p11"], "steps"),  # twice per batch at the end
        ([*["pp", "pp1"] * 11, "pp", "p1p1"], None),  # two parts show nothing
        (["1"] * 24, None),  # backward passes that nobody counts
    ],
)
def test_steps_alone_prove_nothing(batches: list[str], subject: str | None) -> None:
    assert found(batches) == subject


@pytest.mark.parametrize(
    ("batches", "optimizers", "subject"),
    [
        (["pp12"] * 24, 2, "steps"),
        (["p1"] * 24, 2, None),  # a part of the model is trained for a while
        (["p1", "p1", "p1", "p12"] * 6, 2, None),  # one does not accumulate
        ([*["pppp1"] * 23, "p1p1p1p12"], 2, None),
    ],
)
def test_all_optimizers_must_show_it(batches: list[str], optimizers: int, subject: str | None) -> None:
    assert found(batches, optimizers) == subject


def numbers(*given: int) -> Iterator[int]:
    yield from given


@pytest.mark.parametrize("changes", [numbers(4, 4, 1, 4), numbers(1, 4, 4, 4), numbers(2, 2, 2, 4)])
def test_an_accumulation_that_changes_in_the_epoch_is_not_judged(changes: Iterator[int]) -> None:
    steps = EpochSteps(lambda: next(changes), optimizers=lambda: 1)
    for batch in range(1, 4):
        steps.step(1, batch)
    assert steps.judge("train epoch 0", batches=3, passes=3) is None
