"""Jobs in which no rank gets on: found without any I/O, reported with every rank's place in its own lines of code."""

from __future__ import annotations

import time

from countoff.core import stacks
from countoff.core.channel import Channel, sequence_numbers
from countoff.core.rollcall import Gathering, Records
from countoff.core.speaker import Speaker
from countoff.core.state import State
from countoff.core.verdict import Verdict, clip, names_of


class Stall:
    """Reports, once, a job in which no rank has got on for `stall_seconds`."""

    def __init__(self, state: State, speaker: Speaker) -> None:
        self._state = state
        self._speaker = speaker
        self._progress: object = None
        self.moved_at = time.monotonic()
        self._posted = False
        self._reported = False

    def look(self) -> None:
        """Compares this rank's progress with what it was; no I/O."""
        progress = self._state.progress()
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self.moved_at = progress, now
            if self._posted:
                self._posted = False
                # Not deleted: rank 0 may be about to read it.
                self._speaker.hand(lambda channel: channel.set(f"stall/{self._state.rank}", {"moved": True}))
        elif now - self.moved_at > self._state.settings.stall_seconds and not self._posted and not self._reported:
            self._posted = True
            self._post()

    def _post(self) -> None:
        state, place = self._state, stacks.main_thread()
        record = {
            **state.own_row(),
            "state": {"loader": "in its loader", "collective": "in a collective", "code": "in its code"}[place.state],
            "frames": [clip(frame, 120) for frame in place.frames],
            "collectives": {clip(name, 32): count for name, count in list(sequence_numbers().items())[:4]},
        }
        self._speaker.hand(lambda channel: channel.set(f"stall/{state.rank}", record))
        if state.rank == 0:
            self._speaker.hand(self._gather)

    def _gather(self, channel: Channel) -> None:
        state = self._state
        owed = [rank for rank in state.present if not channel.has(f"bye/{rank}")]  # who has left waits for nobody
        patience = time.monotonic() + max(5.0, state.settings.stall_seconds)
        self._speaker.poll(Gathering("stall", owed, patience, self._report, keep=True))

    def _report(self, records: Records, missing: list[int]) -> None:
        # Somebody gets on: slow, not stalled. Without records, the roll call of the fit's start is still under way.
        if missing or not records or not self._posted or any("moved" in record for record in records.values()):
            self._posted = False
            self.moved_at = time.monotonic() - 0.75 * self._state.settings.stall_seconds
            return
        self._reported = True
        verdict = judge_stall(records, self._state.settings.stall_seconds)
        uneven = next((notice for notice in self._state.notices if notice.kind == "UnevenBatches"), None)
        places = {(record["where"], record["batches"]) for record in records.values()}
        if uneven is not None and len(places) > 1:  # it was warned of, and now ranks wait in different places
            self._state.propose(uneven)
        else:
            self._state.say(verdict)


def judge_stall(records: Records, seconds: float) -> Verdict:
    """Who keeps the others waiting: ranks in their loaders or their own code, before ranks in a collective."""
    for state in ("in its loader", "in its code", "in a collective"):
        ranks = [rank for rank, record in records.items() if record["state"] == state]
        if ranks:
            break
    else:
        ranks, state = list(records), ""
    first = records[ranks[0]]
    frames = " < ".join(first["frames"]) or "no frame of the user's code"
    numbers = {rank: record["collectives"] for rank, record in records.items()}
    behind = "" if len({str(value) for value in numbers.values()}) == 1 else f" Collectives issued: {numbers}."
    sentence = f"no rank has got on for {seconds:g} s; {names_of(ranks)} {'is' if len(ranks) == 1 else 'are'} {state}"
    why = f"rank {ranks[0]} is at {frames}.{behind[:200]}"
    order = sorted(records, key=lambda rank: (rank not in ranks, rank))
    rows = tuple(records[rank] for rank in order)
    return Verdict("Stalled", f"{sentence}.", tuple(ranks), why=why, rows=rows, time=time.time())
