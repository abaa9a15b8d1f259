"""The words about spans that a framework ended on every rank at the shortest one."""

from collections.abc import Mapping

import pytest

from countoff.core import Verdict
from countoff.core.checks.even import truncated
from countoff.core.protocol.counters import UnusedBatches

EPOCH = "train epoch 0"


def truncation_of(unused: Mapping[int, UnusedBatches], span: str = EPOCH, used: int = 7) -> Verdict:
    """The warning about these unused batches, which must exist."""
    verdict = truncated(span, used, unused)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("unused", "words"),
    [
        (UnusedBatches(1), "1 batch"),
        (UnusedBatches(3, 12), "3 batches (12 samples)"),
        (UnusedBatches(1, 1), "1 batch (1 sample)"),
        (UnusedBatches(1, 4, exact=False), "at least 1 batch (4 samples)"),
        (UnusedBatches(2, None, exact=False), "at least 2 batches"),
    ],
)
def test_unused_batches_in_words(unused: UnusedBatches, words: str) -> None:
    assert str(unused) == words


def test_a_truncation_tells_who_ran_out_and_who_lost_what() -> None:
    verdict = truncation_of(
        {0: UnusedBatches(1, 4, False), 1: UnusedBatches(0), 2: UnusedBatches(2, 8), 3: UnusedBatches(1, 4, False)}
    )
    assert (verdict.kind, verdict.ranks, verdict.subject) == ("Truncated", (1,), "train")
    assert verdict.sentence == (
        "train epoch 0 ended on every rank after 7 batches, where rank 1 ran out of data: "
        "ranks 0, 3 lost at least 1 batch (4 samples) each; rank 2 lost 2 batches (8 samples)."
    )


def test_the_short_ranks_are_named_whichever_they_are() -> None:
    left = {rank: UnusedBatches(0 if rank in (0, 5) else 3) for rank in range(8)}
    verdict = truncation_of(left, used=1)
    assert verdict.ranks == (0, 5)
    assert "ended on every rank after 1 batch, where ranks 0, 5 ran out of data: ranks " in verdict.sentence
    assert verdict.sentence.endswith(" lost 3 batches each.")


def test_four_different_losses_are_listed() -> None:
    """Four different losses are listed; an ellipsis stands for the others."""
    shown = truncation_of({rank: UnusedBatches(rank) for rank in range(5)}).sentence
    assert shown.count(" lost ") == 4
    assert "…" not in shown
    cut = truncation_of({rank: UnusedBatches(rank) for rank in range(6)}).sentence
    assert cut.count(" lost ") == 4
    assert cut.endswith("rank 4 lost 4 batches; ….")


def test_evaluations_are_a_subject_of_their_own() -> None:
    assert truncation_of({0: UnusedBatches(0), 1: UnusedBatches(1)}, "evaluation digits").subject == "evaluation"


@pytest.mark.parametrize(
    "unused",
    [{}, {0: UnusedBatches(0)}, {0: UnusedBatches(0), 1: UnusedBatches(0)}, {0: UnusedBatches(1), 1: UnusedBatches(5)}],
    ids=["nobody", "one rank", "all ran out", "a limit ended it"],
)
def test_without_a_shorter_rank_there_is_no_truncation(unused: dict[int, UnusedBatches]) -> None:
    """There is no truncation unless some ranks ran out and others did not."""
    assert truncated(EPOCH, 7, unused) is None


def stopped(span: str, used: int) -> Verdict:
    """What is said where countoff has stopped rank 0 with rank 1."""
    verdict = truncated(span, used, {0: UnusedBatches(4, 16, False), 1: UnusedBatches(0)}, by_countoff=True)
    assert verdict is not None
    return verdict


def test_what_countoff_stopped_was_left_and_not_lost() -> None:
    verdict = stopped(EPOCH, 90)
    assert "stopped on every rank after 90 batches" in verdict.sentence
    assert verdict.sentence.endswith("rank 0 left at least 4 batches (16 samples).")
    assert "uneven_train='stop'" in verdict.why
    assert "countoff/batches_left" in verdict.remedy
    assert "uneven_eval='stop'" in stopped("validation", 3).why
    assert "uneven_train" not in stopped("validation", 3).remedy  # it changes no evaluation


def test_an_epoch_without_a_batch_is_no_acceptable_loss() -> None:
    assert stopped(EPOCH, 0).remedy.startswith("give every rank data")
