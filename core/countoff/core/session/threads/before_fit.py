"""Finds a stall outside a fit: ranks that wait for others, by samples of where each main thread is.

Each rank has one daemon thread, from its process group on until a fit begins, if one does. It sleeps, and samples the
main thread a few times in `stall_seconds`. Only if no fit has begun after half of that time, it connects to the job's
store and tells where it is. Rank 0 reads what all have told while one of them waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from countoff.core.at_exit import at_exit
from countoff.core.checks.stalled import IN_NCCL, STALLED, judge_before_fit
from countoff.core.ending.shutdown import print_to_stderr
from countoff.core.messages import clip
from countoff.core.protocol.records import Records
from countoff.core.session.liveness import collectives, stacks
from countoff.core.session.store.channel import Channel, probe
from countoff.core.session.store.rendezvous import default_store, tcp_store
from countoff.core.session.threads import first_fit
from countoff.core.session.threads.guard_status import STORE_ENDED
from countoff.core.session.threads.join import join
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict, remedy_for

__all__ = ["Gathered", "TimeInPlace", "place", "watch"]

_log = logging.getLogger("countoff")
_LOOKS = 8
"""Samples of the main thread in `stall_seconds`."""
_NOWHERE: dict[str, Any] = {"call": "", "at": "", "seconds": 0.0, "looks": 0}
"""What is known of a rank that tells nothing any more."""
_watched: weakref.ref[Any] | None = None
"""The process group that is watched."""


def watch(settings: Settings) -> None:
    """Watches the default process group until a fit begins or the group is destroyed; a second call does nothing.

    It does nothing either where there is no other rank, no TCPStore, or a fit has begun already.

    Args:
        settings: The user's choices.
    """
    global _watched
    off = not settings.enabled or settings.levels.get(STALLED.name) == "off"
    store = None if off or first_fit.begun() else default_store()
    server = None if store is None else tcp_store(store)
    group = dist.group.WORLD
    if server is None or group is None or dist.get_world_size() == 1 or (_watched and _watched() is group):
        return
    _watched = weakref.ref(group)
    _Watch(_watched, server.host, server.port, settings.stall_seconds).start()


def place() -> stacks.Place:
    """Where the main thread is; where it waits for its device, that is in a collective of NCCL."""
    found = stacks.main_thread()
    waits = found.state == "code" and not found.call and collectives.unfinished()
    return replace(found, call=IN_NCCL) if waits else found


class TimeInPlace:
    """For how long a main thread has been where it is, as far as samples show that."""

    def __init__(self) -> None:
        self._where: object = None
        self._since = 0.0

    def look(self, place: stacks.Place, issued: object, now: float) -> dict[str, Any]:
        """Returns what a rank tells of itself, as `judge_before_fit` reads it.

        A call lasts as long as nothing in the stack has moved, and no other collective was issued: a loop may be in the
        same call at each sample. Elsewhere, the lines of the user's own code count.

        Args:
            place: Where the thread is now.
            issued: What this rank has issued in each of its process groups.
            now: The time in seconds, by any clock.
        """
        where = (place.call, place.token, issued) if place.call else place.frames
        if where != self._where:
            self._where, self._since = where, now
        at = place.frames[0] if place.frames else ""
        return {"call": clip(place.call, 110), "at": clip(at, 110), "seconds": now - self._since}


class Gathered:
    """What rank 0 makes of what all ranks have told.

    After a stall that was reported and has ended, only one that lasts more than twice as long is reported.

    Args:
        seconds: For how long a rank must have waited.
    """

    def __init__(self, seconds: float) -> None:
        self._patience = seconds
        self._before: Records = {}
        self._heard: dict[int, tuple[int, float]] = {}  # by rank, its last number of looks, and when that was new
        self._reported_at = 0.0

    def judge(self, records: Records, now: float) -> Verdict | None:
        """Returns the report of a stall, once.

        Ranks do not tell at one moment, and one that waited may have been let go since. So this takes two looks at all
        ranks: those that wait must wait in both of them, and any other one was where it is said to be in between.

        Args:
            records: What each rank has told, with its number of `looks`.
            now: The time in seconds, by any clock.
        """
        before, silent = self._before, self._silent(records, now)
        told = {rank: record for rank, record in records.items() if rank not in silent}
        if before and any(record["looks"] == before[rank]["looks"] for rank, record in told.items()):
            return None  # a rank has told nothing since
        self._before = records = {**told, **{rank: {**_NOWHERE, "silent": each} for rank, each in silent.items()}}
        if self._reported_at or not before:
            return None
        moved = {rank for rank, record in told.items() if record["seconds"] <= before[rank]["seconds"]}
        if any(before[rank]["call"] and before[rank]["seconds"] >= self._patience / 2 for rank in moved):
            return None  # it was let go
        verdict = judge_before_fit({**records, **{rank: before[rank] for rank in moved}}, self._patience)
        if verdict is not None:
            self._reported_at = now
        return verdict

    def _silent(self, records: Records, now: float) -> dict[int, float]:
        """The ranks that have told nothing for long, as those whose process is gone; with the seconds since then."""
        for rank, record in records.items():
            if self._heard.get(rank, (None, 0.0))[0] != record["looks"]:
                self._heard[rank] = record["looks"], now
        since = {rank: now - heard for rank, (_, heard) in self._heard.items()}
        return {rank: seconds for rank, seconds in since.items() if seconds >= self._patience / 2}

    def nobody_waits(self, now: float) -> None:
        """Takes note that no rank waits any more."""
        self._before = {}
        if self._reported_at:
            self._patience = round(2 * (self._patience + now - self._reported_at))
            self._reported_at = 0.0


class _Watch:
    """The thread of one rank.

    Args:
        group: The process group.
        host: The host of its store.
        port: The store's port.
        seconds: The setting `stall_seconds`.
    """

    def __init__(self, group: weakref.ref[Any], host: str, port: int, seconds: float) -> None:
        self._group = group
        self._rank, self._ranks = dist.get_rank(), range(dist.get_world_size())
        self._host, self._port = host, port
        self._seconds = seconds
        self._clock = 0.0
        self._time_in_place = TimeInPlace()
        self._gathered = Gathered(seconds)
        self._looks = self._waits = 0
        self._channel: Channel | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="countoff before the fit", daemon=True)

    def start(self) -> None:
        """Starts the thread. It ends when a fit begins, and at the end of the program at the latest."""
        with contextlib.suppress(RuntimeError):  # no thread can be started: nobody watches
            self._thread.start()
        first_fit.call(self._ending.set)
        at_exit(self._close)

    def _close(self) -> None:
        self._ending.set()
        join(self._thread, lambda: self._channel)

    def _run(self) -> None:
        looked, pause = time.monotonic(), self._seconds / _LOOKS
        try:
            while not self._ending.wait(pause) and dist.group.WORLD is self._group() is not None:
                late, looked = time.monotonic() - looked, time.monotonic()
                self._clock += min(late, 2 * pause)  # the job may have been stopped: no rank stood still for so long
                self._look(self._clock)
            if self._channel is not None and first_fit.begun():  # the store is still there
                self._channel.delete(str(self._rank))
        except Exception:  # whatever the store does, the program goes on
            _log.debug("rank %d is not watched before its fit any more", self._rank, exc_info=True)
        finally:
            if self._channel is not None:
                self._channel.release()

    def _look(self, now: float) -> None:
        own = self._time_in_place.look(place(), collectives.numbers(), now)
        self._looks += 1
        if now < self._seconds / 2:
            return
        if self._channel is None:
            self._channel = self._connect()
        channel = self._channel
        if channel.is_over():
            raise ConnectionError(STORE_ENDED)
        channel.set(str(self._rank), {**own, "looks": self._looks})
        may_wait = bool(own["call"]) and own["seconds"] >= self._seconds / 2
        waits, self._waits = self._waits, channel.add("waits", int(may_wait))
        if self._rank != 0:
            return
        if waits == self._waits:
            self._gathered.nobody_waits(now)
            return
        keys = [str(rank) for rank in self._ranks]
        verdict = self._gathered.judge(dict(enumerate(channel.get_many(keys))), now) if channel.has(*keys) else None
        if verdict is not None:
            print_to_stderr(replace(verdict, remedy=remedy_for(verdict, {})), self._rank, goes_on=True)

    def _connect(self) -> Channel:
        if probe(self._host, self._port) != "open":  # torch would print a warning, and try again
            raise ConnectionError("the job's store does not answer")
        return Channel(self._host, self._port, "countoff/before_fit/", self._ending.is_set)
