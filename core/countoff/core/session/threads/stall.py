"""Finds a job in which no rank makes progress, without I/O, and has all ranks tell where they are."""

from __future__ import annotations

import time
from dataclasses import replace

from countoff.core.checks.stalled import DOING, ENDED, FOR_NCCL, judge_stall
from countoff.core.levels import effect
from countoff.core.messages import clip
from countoff.core.protocol.actions import PrintWarning
from countoff.core.protocol.records import RECORD_BYTES, Records, record_text
from countoff.core.session.liveness import collectives, hosts, stacks
from countoff.core.session.liveness.heartbeats import takes_part
from countoff.core.session.state import State
from countoff.core.session.store.channel import Channel
from countoff.core.session.threads.writer import Writer
from countoff.core.verdict import remedy_for

_GROUPS = 3
"""Process groups of which a rank reports its collectives; its record has a limit."""
_INSIDE_BYTES = 200
"""What the frames of a framework may take of that, where the rest leaves so much."""
_LEAST_INSIDE_BYTES = 20
"""With less, they would say nothing, and `clip` needs some bytes for its ellipsis."""


class Stall:
    """Reports a job in which no rank has made progress for `stall_seconds`.

    After a stall that was reported and ended, only one that lasts more than twice as long is reported: a job may have
    pauses of its own, as to save a checkpoint, and may still hang later.

    Args:
        state: This rank's state.
        writer: This rank's writer.

    Attributes:
        moved_at: When this rank was last seen to make progress, by `time.monotonic()`.
    """

    def __init__(self, state: State, writer: Writer) -> None:
        self._state = state
        self._writer = writer
        self._progress: object = None
        self.moved_at = time.monotonic()
        self._patience = state.settings.stall_seconds
        self.posted = False
        self._reported = False

    def look(self) -> None:
        """Compares this rank's progress with what it was; no I/O."""
        progress = self._state.progress()
        now = time.monotonic()
        if progress != self._progress:
            if self._reported:
                self._patience, self._reported = max(self._patience, round(2 * (now - self.moved_at))), False
            self._progress, self.moved_at = progress, now
            if self.posted:
                self.posted = False
                # Not deleted: rank 0 may be about to read it.
                self._writer.submit(lambda channel: channel.report("stall", self._state.rank, {"moved": True}))
        elif now - self.moved_at > self._patience and not self.posted and not self._reported:
            self.posted = True
            self.post()

    def post(self) -> None:
        """Reports where this rank's main thread is."""
        state, place = self._state, stacks.thread(self._state.evidence.trainer)
        if state.observer is not None:
            state.observer.stood_still()
        doing = DOING[place.state]
        if place.state == "code" and collectives.unfinished():
            doing = FOR_NCCL
        issued = [(clip(name, 24), each) for name, each in list(collectives.issued().items())[:_GROUPS]]
        record = {
            **state.own_row(),
            "host": hosts.own_name(),
            "state": doing,
            "frames": [clip(frame, 110) for frame in place.frames],
            "evaluates": bool(state.spans) and state.spans[-1].evaluation,
            "collectives": {name: count for name, (count, _) in issued},
            "last": {name: clip(last, 40) for name, (_, last) in issued},
        }
        if stacks.broadcasts_buffers(place) and (record["evaluates"] or not state.spans):
            record["buffers"] = True
        if (work := state.micro_batches.work()) is not None:
            record["micro"] = work
        if (passes := state.micro_batches.pass_work()) is not None:
            record["passes"] = passes
        left = RECORD_BYTES - len(record_text({**record, "inside": ""}))
        if place.inside and left >= _LEAST_INSIDE_BYTES:
            record["inside"] = clip(f"{place.framework} at {' < '.join(place.inside)}", min(_INSIDE_BYTES, left))
        self._writer.submit(lambda channel: channel.report("stall", state.rank, record))
        if state.leads:
            self._writer.submit(self._gather)

    def _gather(self, channel: Channel) -> None:
        state = self._state
        # A rank that has closed its guard waits for none.
        owed = [rank for rank in state.present if takes_part(channel, rank)]
        deadline = time.monotonic() + max(5.0, state.settings.stall_seconds)
        self._writer.gather("stall", owed, deadline, self.report, keep=True)

    def report(self, records: Records, missing: list[int]) -> None:
        """Names the ranks that have stalled, on rank 0, where no rank makes progress.

        Args:
            records: What the ranks have reported, by rank.
            missing: Ranks that have not reported.
        """
        # Some rank makes progress: slow, not stalled. Without records, the first roll call is still under way.
        if missing or not records or not self.posted or any("moved" in record for record in records.values()):
            self.posted = False
            self.moved_at = time.monotonic() - 0.75 * self._patience
            return
        self._reported = True
        state = self._state
        verdict = judge_stall(records, self._patience)
        ends = effect(verdict, state.settings.levels) == "raise" and state.world_size > 1
        verdict = replace(verdict, world_size=state.world_size, subject=ENDED if ends else "")
        verdict = replace(verdict, remedy=remedy_for(verdict, state.remedies))
        uneven = next((notice for notice in state.notices if notice.kind == "UnevenBatches"), None)
        places = {(record["where"], record["batches"]) for record in records.values()}
        if uneven is not None and len(places) > 1 and any(record["evaluates"] for record in records.values()):
            # It was warned of, and a rank waits in that evaluation, or for a rank that does.
            state.propose(uneven)
        elif ends:
            state.find(verdict)
        else:  # not through the log, which has no room for all that it says
            state.outbox.put(PrintWarning(verdict))
