"""Connections that one fit leaves to the next one."""

import gc
import os
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # no stubs

from countoff.core.store import kept
from countoff.core.store.channel import Channel
from countoff.core.store.rendezvous import Place


@pytest.fixture
def job() -> Any:
    """The job's store."""
    return PrefixStore("default_pg", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def connect(job: Any) -> Channel:
    return Channel("127.0.0.1", job.underlying_store.port, "before/")


def place(job: Any) -> Place:
    return Place("127.0.0.1", job.underlying_store.port, "next")


def test_a_connection_is_kept_for_the_next_place(job: Any) -> None:
    """It is used again by one fit alone, with the keys of that fit."""
    channel = connect(job)
    sockets = channel.sockets
    kept.keep(job, channel)
    channel.release()
    assert kept.keeps(job)
    again = kept.take(job, place(job))
    assert again is not None
    assert again.sockets == sockets
    again.set("key", {"x": 1})
    assert job.underlying_store.check(["countoff/next/key"])
    assert (kept.keeps(job), kept.take(job, place(job))) == (False, None)


def test_a_connection_that_is_over_is_not_used_again(job: Any) -> None:
    channel = connect(job)
    kept.keep(job, channel)
    channel.shut()
    assert kept.take(job, place(job)) is None
    kept.keep(job, channel)
    assert not kept.keeps(job)


def test_a_connection_to_another_store_is_not_kept(job: Any) -> None:
    """One that a rank hosts for a single fit, where the job's own is no TCPStore."""
    other = HashStore()
    kept.keep(other, connect(job))
    kept.keep(None, connect(job))
    assert not kept.keeps(other)
    assert kept.take(None, place(job)) is None


def test_it_lives_as_long_as_the_jobs_store(job: Any) -> None:
    store = PrefixStore("of_a_group", job.underlying_store)
    channel = connect(job)
    kept.keep(store, channel)
    (descriptor,) = channel.sockets
    channel.release()
    del channel
    assert os.fstat(descriptor)
    del store
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
