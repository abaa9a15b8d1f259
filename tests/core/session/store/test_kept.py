"""Connections that one fit leaves to the next one."""

import gc
import os
import socket
import time
import weakref
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # no stubs

from countoff.core.session.store import kept
from countoff.core.session.store.channel import Channel, to_port
from countoff.core.session.store.rendezvous import StoreAddress


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of the job's default process group."""
    store = PrefixStore("default_pg", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    alive = weakref.ref(store)
    monkeypatch.setattr(kept, "default_store", alive)
    return store


def connect(job: Any) -> Channel:
    return Channel("127.0.0.1", job.underlying_store.port, "before/")


def place(job: Any) -> StoreAddress:
    return StoreAddress("127.0.0.1", job.underlying_store.port, "next")


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


def test_a_connection_that_one_side_has_closed_is_not_used_again(job: Any) -> None:
    for how in (socket.SHUT_RD, socket.SHUT_WR):
        channel = connect(job)
        kept.keep(job, channel)
        (descriptor,) = channel.sockets
        with to_port(descriptor, job.underlying_store.port) as end:
            end.shutdown(how)
        time.sleep(0.1)  # until the store has closed its side
        assert kept.take(job, place(job)) is None, how


def test_a_forked_process_uses_none_of_its_parents(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = connect(job)
    kept.keep(job, channel)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    assert kept.take(job, place(job)) is None
    kept.keep(job, channel)
    assert not kept.keeps(job)


def test_a_connection_to_another_store_is_not_kept(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that is for a group of the program's own, nor one that rank 0 hosts for a single fit."""
    group = PrefixStore("of_a_group", job.underlying_store)
    kept.keep(group, connect(job))
    assert not kept.keeps(group)
    other = HashStore()
    monkeypatch.setattr(kept, "default_store", lambda: other)
    kept.keep(other, connect(job))
    assert not kept.keeps(other)


def test_it_lives_as_long_as_the_jobs_store(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore("default_pg", job.underlying_store)
    monkeypatch.setattr(kept, "default_store", weakref.ref(store))
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
