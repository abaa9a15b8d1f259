"""Composer, a rank that fails, leaves or waits for its data for ever; streaming reads from S3 by its own downloader."""

import time
from typing import Any

import pytest

from integration_tests.composer_jobs import Job, fit, needs_composer, outcome, remove_shared_memory
from integration_tests.digits import own_rank
from integration_tests.harness import Watch
from integration_tests.output import assert_named, verdict_lines

pytestmark = needs_composer


@pytest.fixture(autouse=True)
def _clean_up(tmp_path):
    yield
    remove_shared_memory(tmp_path)


@pytest.fixture
def store():
    from integration_tests.s3_server import s3_server

    with s3_server() as running:
        yield running


def torn(number: int) -> None:
    if own_rank() == 1 and number == 13:
        raise ValueError("shard 3 is torn")


def test_a_loader_that_fails_is_named_on_every_rank(run_ranks):
    """Every rank names the rank whose loader raised, with its error."""
    job = Job(train=[8, 8], reported=[8, 8], before=torn)
    results = run_ranks(fit, 2, job, expect=None, deadline_seconds=60)
    assert_named(
        results, "LostRank", [1], "rank 1 raised ValueError: shard 3 is torn at ", "(in batch 3 of train epoch 0)"
    )


def ends_outside_of_the_loader(how: str) -> None:
    import sys

    from composer.core import Callback

    class Fail(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) != 3 or (own_rank() != 1 and how != "all leave"):
                return
            if how in ("one leaves", "all leave"):
                sys.exit(0)
            raise ValueError("loss is not finite")

    trainer = Job(even=64).make_trainer(callbacks=[Fail()])
    if how != "closes":
        trainer.fit()
        return
    try:
        trainer.fit()
    finally:
        trainer.close()  # ends in a barrier


@pytest.mark.parametrize("how", ["raises", pytest.param("closes", marks=pytest.mark.nightly)])
def test_a_rank_that_raises_is_named_on_every_rank(run_ranks, how):
    """Every rank names the rank whose callback raised, whether or not the program closes the Trainer."""
    results = run_ranks(ends_outside_of_the_loader, 2, how, expect=None, deadline_seconds=60)
    words = "rank 1 raised ValueError: loss is not finite at ", "(in batch 3 of train epoch 0)"
    assert_named(results, "LostRank", [1], *words)


def test_a_rank_that_exits_alone_is_named(run_ranks):
    """A rank that calls sys.exit() alone is named by the rank that goes on."""
    left = run_ranks(ends_outside_of_the_loader, 2, "one leaves", expect=None, deadline_seconds=60, finalise=True)[0]
    assert left.exit_code != 0
    named = "countoff: LostRank: rank 1 left the job (sys.exit) in batch 3 of train epoch 0, where rank 0 goes on."
    assert named in verdict_lines(left), left.output


def test_ranks_that_all_exit_early_are_healthy(run_ranks):
    """As after a signal that a preempted job gets: each calls `sys.exit()` at the same batch."""
    results = run_ranks(ends_outside_of_the_loader, 2, "all leave", deadline_seconds=60, finalise=True)
    assert [verdict_lines(result) for result in results] == [[], []]


def read_from_s3(options: dict[str, Any]) -> dict[str, Any]:
    """Trains on shards of a sample each, of which rank 0 reads the even and rank 1 the odd ones."""
    import os

    import boto3

    from countoff.composer import Countoff
    from integration_tests import composer_parts as parts

    parts.start()
    parts.use_own_temporary_directory()
    if own_rank() == 0:
        boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"]).create_bucket(Bucket="digits")
        parts.write_shards(("sent", "s3://digits/mds"), 32, size_limit=600)
    parts.dist.barrier()
    dataset = parts.Digits(remote="s3://digits/mds", local="cache", batch_size=4, predownload=4, download_timeout=120)
    loader = parts.StreamingDataLoader(dataset, batch_size=4)
    trainer = Job(options=options).make_trainer(train_dataloader=loader, max_duration="1ep")
    trainer.fit()
    (countoff,) = (each for each in trainer.state.callbacks if isinstance(each, Countoff))
    assert countoff.guard is not None
    result = {**outcome(trainer), **countoff.guard.metrics}
    trainer.close()
    return result


@pytest.mark.nightly
@pytest.mark.usefixtures("one_streaming_job")
def test_the_rank_whose_shards_come_late_is_measured(run_ranks, store):
    """Late shards are no fault, and the slowest loader and its rank are known."""
    store.delays = tuple(f"shard.{number:05}" for number in range(1, 32, 2))
    results = run_ranks(read_from_s3, 2, {}, env=store.environment, deadline_seconds=120)
    assert [verdict_lines(result) for result in results] == [[], []]
    assert [result.value["batches"] for result in results] == [4, 4]
    assert results[0].value["countoff/loader_rank"] == 1
    assert results[0].value["countoff/loader_seconds_max"] > results[0].value["countoff/loader_seconds"] > 0


@pytest.mark.usefixtures("one_streaming_job")
def test_a_download_that_never_ends_is_a_stall(run_ranks, store):
    """A download that does not end is reported once as a stall of that rank's loader, with streaming's line."""
    store.holds = ("shard.00013",)

    def release_once_reported(watch: Watch) -> None:
        patience = time.monotonic() + 60
        while "countoff: Stalled: " not in watch.results()[0].output and time.monotonic() < patience:
            watch.let_run(0.1)
        store.released.set()

    results = run_ranks(
        read_from_s3,
        2,
        {"stall_seconds": 2},
        env=store.environment,
        deadline_seconds=150,
        while_running=release_once_reported,
    )
    lines = verdict_lines(results[0])
    assert sum("countoff: Stalled: " in line for line in lines) == 1, results[0].output
    assert any("rank 1 is in its loader" in line for line in lines), results[0].output
    assert any("rank 1 is at dataset.py:" in line for line in lines), results[0].output  # streaming's
    assert verdict_lines(results[1]) == []
    assert len({result.value["weights"] for result in results}) == 1


@pytest.mark.usefixtures("one_streaming_job")
def test_a_download_that_fails_is_named_on_every_rank(run_ranks, store):
    """A failed download, which ends streaming's loader early, is named on every rank."""
    store.refuses = ("shard.00013",)
    results = run_ranks(read_from_s3, 2, {}, env=store.environment, expect=None, deadline_seconds=120)
    # streaming's own thread dies of it, and its loader ends as if there were no more
    ended = "of 4 batches; its own log may hold the exception of a download"
    assert_named(results, "LostRank", [1], "rank 1 raised RuntimeError: the loader ended after ", ended)
    assert "s3://digits/mds/shard.00013.mds not found" in results[1].output
