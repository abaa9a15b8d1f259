"""Composer, ranks of different lengths: it stops all of them at the shortest, and countoff reports what that lost."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from countoff.core.messages import names_of
from integration_tests.composer_jobs import Job, fit, fit_several, needs_composer, outcome, said
from integration_tests.digits import own_rank
from integration_tests.output import assert_named, verdict_lines

pytestmark = needs_composer


def short(ranks: int, rank: int, batches: int = 5) -> list[int]:
    return [batches - 1 if each == rank else batches for each in range(ranks)]


@pytest.mark.ranks(2, nightly=(4,))
def test_what_uneven_ranks_lose_is_reported(run_ranks, ranks):
    """Composer ends at the shortest rank; the warning names it and what the other ranks lost."""
    places = [0, ranks // 2, ranks - 1] if ranks > 2 else [0, 1]
    jobs = [Job(train=short(ranks, rank), reported=[5] * ranks) for rank in places]
    jobs += [Job(even=64, evals=short(ranks, rank, 3)) for rank in places]
    both = Job(train=short(ranks, 1), reported=[5] * ranks, evals=short(ranks, 0, 3))
    several = Job(even=64, evals=[[2, each] for each in short(ranks, 1, 3)])
    far = Job(train=[1 if rank else 4 for rank in range(ranks)], reported=[5] * ranks, trainer={"max_duration": "1ep"})
    results = run_ranks(fit_several, ranks, [*jobs, both, several, far], deadline_seconds=150)
    words = said(results[0])

    def lost(span: str, used: int, rank: int) -> str:
        others = [each for each in range(ranks) if each != rank]
        each = " each" if len(others) > 1 else ""
        return (
            f"countoff: Truncated: {span} ended on every rank after {used} batches, where rank {rank} ran out of data: "
            f"{names_of(others)} lost at least 1 batch (4 samples){each}."
        )

    for place, rank in enumerate(places):
        assert lost("train epoch 0", 4, rank) in words[place]
        assert lost("evaluation digits0", 2, rank) in words[len(places) + place]
    assert lost("train epoch 0", 4, 1) in words[-3]
    assert lost("evaluation digits0", 2, 0) in words[-3]
    assert lost("evaluation digits1", 2, 1) in words[-2]
    assert all(text.count("countoff: ") == (2 if text is words[-3] else 1) for text in words)
    assert "ended on every rank after 1 batch, where" in words[-1]
    assert "drop_last=True does not make such ranks even" in words[0]
    assert [line for result in results[1:] for line in verdict_lines(result)] == []
    assert len({result.value[0]["weights"] for result in results}) == 1


@pytest.mark.usefixtures("one_streaming_job")
def test_device_per_stream_is_reported_before_the_first_batch(run_ranks):
    """Uneven `device_per_stream` shares are reported before the first batch, with what was lost after the epoch."""
    streams = {"streams": [52], "streaming": {"batching_method": "device_per_stream"}}
    even = {"streams": [52], "streaming": {"batching_method": "random"}}
    capped = {**streams, "trainer": {"train_subset_num_batches": 3}}
    results = run_ranks(fit_several, 4, [Job(**streams), Job(**even), Job(**capped)], deadline_seconds=120)
    uneven, remedied, meant = said(results[0])
    assert "with batching_method='device_per_stream' ranks have from 3 to 4 batches of train data per epoch" in uneven
    assert "Composer ends every epoch after 3 on all of them" in uneven
    assert "StreamingDataset(batching_method='random')" in uneven
    assert "train epoch 0 ended on every rank after 3 batches, where ranks 1–3 ran out of data: rank 0 lost " in uneven
    assert "rank 0 lost 1 batch (4 samples)." in uneven
    assert [remedied, meant] == ["", ""]
    assert results[0].value[0]["batches"] == 6
    assert results[0].value[1]["batches"] == 8


@pytest.mark.parametrize("policy", ["raise", pytest.param("allow", marks=pytest.mark.nightly)])
def test_uneven_evaluations_can_be_a_verdict_or_allowed(run_ranks, policy):
    """`uneven_eval` makes an uneven evaluation a verdict, or gives no warning."""
    job = Job(even=160, evals=[3, 2], trainer={"max_duration": "3ep"}, options={"uneven_eval": policy})
    results = run_ranks(fit, 2, job, expect=None, deadline_seconds=60)
    if policy == "raise":
        assert_named(results, "UnevenBatches", [1], "evaluation digits0 ended on every rank after 2 batches")
    else:
        assert [verdict_lines(result) for result in results] == [[], []]
        assert [result.exit_code for result in results] == [0, 0]


def scheduled(job: Job, t_max: str) -> Any:
    """Trains with a schedule of Composer's whose end is given as a time."""
    from composer.optim import LinearWithWarmupScheduler

    trainer = job.make_trainer(schedulers=LinearWithWarmupScheduler(t_warmup="2ba", t_max=t_max))
    trainer.fit()
    result = outcome(trainer)
    trainer.close()
    return result


@pytest.mark.ranks(2, nightly=(4,))
@pytest.mark.parametrize(
    ("trainer", "t_max", "words"),
    [
        ({"max_duration": "2ep"}, "1dur", "would train with different learning rates"),
        pytest.param(
            {"max_duration": "9ba"}, "2ep", "would train with different learning rates", marks=pytest.mark.nightly
        ),
        ({"max_duration": "2ep", "eval_interval": "0.5dur"}, "16ba", "would evaluate or save after different batches"),
        ({"max_duration": "14ba"}, "1dur", "Only those ranks would end that epoch too"),
    ],
)
def test_lengths_on_which_something_depends_are_refused(run_ranks, ranks, trainer, t_max, words):
    """Each rank would have a learning rate of its own, evaluate at another place, or end its epoch alone."""
    lengths = short(ranks, 1, 8)
    job = Job(train=lengths, reported=lengths, evals=[2] * ranks, trainer=trainer)
    results = run_ranks(scheduled, ranks, job, t_max, expect=None, deadline_seconds=60)
    odd = [1] if trainer["max_duration"] == "14ba" or ranks > 2 else [0, 1]
    assert_named(results, "PlanMismatch", odd, "before the first batch, ", "rank 1", words)
    assert "Trainer(train_subset_num_batches=N)" in results[0].output


@pytest.mark.ranks(2, nightly=(4,))
def test_lengths_on_which_nothing_depends_are_allowed(run_ranks, ranks):
    """Composer ends every epoch with the shortest loader; the warnings say what that cuts, and training goes on."""
    lengths = short(ranks, 1, 8)
    streams = Job(train=lengths, reported=lengths, evals=[2] * ranks)
    jobs = [streams, replace(streams, trainer={"max_duration": "10ba"}), replace(streams, options=None)]
    results = run_ranks(fit_several, ranks, jobs, deadline_seconds=120)
    words = said(results[0])
    for text in words[:2]:
        assert "countoff: Truncated: a train epoch has " in text, text
        assert "it ends after 7 on all ranks, and what the others have beyond is not trained on" in text
        assert "train epoch 0 ended on every rank after 7 batches, where rank 1 ran out of data: rank" in text
        assert text.count("countoff: ") == 2
    assert words[2] == ""
    assert [line for result in results[1:] for line in verdict_lines(result)] == []
    for result in results:
        assert [each["batches"] for each in result.value] == [14, 10, 14]
        assert result.value[0] == result.value[2]


def test_a_cap_that_every_rank_reaches_is_no_mismatch(run_ranks):
    """Different lengths are healthy where `train_subset_num_batches` cuts all of them."""
    job = Job(train=[8, 7], reported=[8, 7], trainer={"train_subset_num_batches": 7, "max_duration": "7ba"})
    results = run_ranks(fit, 2, job, deadline_seconds=60)
    assert [verdict_lines(result) for result in results] == [[], []]
    assert [result.value["epoch"] for result in results] == [1, 1]


def stop(who: Sequence[int], at: int = 3) -> None:
    """Stops training after a batch, on some ranks or on all; every rank has a look at the train data just then.

    A rank that stops alone does so once the others have asked for the next batch.
    """
    from composer.core import Callback

    from integration_tests.composer_parts import wait_for_file

    others = [rank for rank in range(2) if rank not in who]

    class Stop(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == at:
                next(iter(state.train_dataloader))
                if own_rank() in who:
                    for rank in others:
                        wait_for_file(f"asked-{rank}")
                    state.stop_training()

        def before_dataloader(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == at:
                Path(f"asked-{own_rank()}").touch()

    trainer = Job(even=64).make_trainer(callbacks=[Stop()])
    trainer.fit()
    trainer.close()


def test_a_rank_that_stops_alone_is_named(run_ranks):
    """A rank that stops training alone is named, where Composer itself hangs."""
    results = run_ranks(stop, 2, [1], expect=None, deadline_seconds=120)
    assert_named(
        results, "UnevenBatches", [1, 0], "rank 1 stopped after 3 batches of train epoch 0; rank 0 asks for batch 4"
    )


def test_ranks_that_all_stop_at_the_same_batch_are_healthy(run_ranks):
    """Ranks that all stop at one batch get no verdict."""
    results = run_ranks(stop, 2, [0, 1], deadline_seconds=120)
    assert [verdict_lines(result) for result in results] == [[], []]


def slow(number: int) -> None:
    if own_rank() == 1:
        time.sleep(0.25)


def loader_times(job: Job) -> Any:
    from countoff.composer import Countoff

    trainer = job.make_trainer()
    trainer.fit()
    trainer.close()
    (countoff,) = (each for each in trainer.state.callbacks if isinstance(each, Countoff))
    assert countoff.guard is not None
    return countoff.guard.metrics


def test_the_rank_with_the_slow_loader_is_measured(run_ranks):
    """The peer's wait is a collective, so it must not be counted as a wait for its loader.

    If it were, both ranks would have waited for as long. The peer's own loader takes a tenth of a second to open.
    """
    job = Job(train=[4, 4], reported=[4, 4], before=slow)
    results = run_ranks(loader_times, 2, job, deadline_seconds=60)
    assert [verdict_lines(result) for result in results] == [[], []]
    found = results[0].value
    assert found["countoff/loader_rank"] == 1
    assert found["countoff/loader_seconds_max"] > 10 * found["countoff/loader_seconds"] > 0
