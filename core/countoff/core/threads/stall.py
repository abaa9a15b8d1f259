"""Stalls: jobs in which no rank makes progress. Found without I/O, reported with each rank's own line of code."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from countoff.core.levels import effect
from countoff.core.liveness import collectives, hosts, stacks
from countoff.core.liveness.heartbeats import takes_part
from countoff.core.protocol.actions import PrintWarning
from countoff.core.protocol.judgement import SAME_MICRO_BATCHES, remedy_for
from countoff.core.protocol.micro_batches import StepWork, batches_of
from countoff.core.protocol.plan_comparison import group_ranks_by_value
from countoff.core.protocol.records import Records, clip
from countoff.core.protocol.state import State
from countoff.core.store.channel import Channel
from countoff.core.store.gathering import Gathering
from countoff.core.threads.speaker import Speaker
from countoff.core.verdict import ENDED, Verdict, names_of

_PLACES = 4
_GROUPS = 3
"""Process groups of which a rank reports its collectives; its record has a limit."""
_FOR_NCCL = "waiting for NCCL"
_DOING = {"loader": "in its loader", "collective": "in a collective", "code": "in its code"}
_KEEPS_WAITING = ((_DOING["loader"],), (_DOING["code"],), (_DOING["collective"], _FOR_NCCL))
"""What ranks do, beginning with those that keep the others waiting."""
_EPOCH_AHEAD = (
    "compare the batches that the ranks had in the epoch before: the rank that is ahead had fewer, or left its loop "
    "early."
)
_OTHER_LINES = (
    "compare the lines above: the ranks wait for one another in different collectives. One of them has left its loop, "
    "or taken a branch, that the others have not."
)
_EPOCH = re.compile(r"train epoch (\d+)")


class Stall:
    """Reports, once, a job in which no rank has made progress for `stall_seconds`.

    Args:
        state: This rank's state.
        speaker: This rank's speaker.

    Attributes:
        moved_at: When this rank was last seen to make progress, by `time.monotonic()`.
    """

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
        if state.observer is not None:
            state.observer.stood_still()
        doing = _DOING[place.state]
        if place.state == "code" and collectives.unfinished():
            doing = _FOR_NCCL
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
        if (work := state.micro_batches.work()) is not None:
            record["micro"] = work
        self._speaker.hand(lambda channel: channel.set(f"stall/{state.rank}", record))
        if state.leads:
            self._speaker.hand(self._gather)

    def _gather(self, channel: Channel) -> None:
        state = self._state
        # A rank that has closed its guard waits for none.
        owed = [rank for rank in state.present if takes_part(channel, rank)]
        deadline = time.monotonic() + max(5.0, state.settings.stall_seconds)
        self._speaker.poll(Gathering("stall", owed, deadline, self._report, keep=True))

    def _report(self, records: Records, missing: list[int]) -> None:
        # Some rank makes progress: slow, not stalled. Without records, the first roll call is still under way.
        if missing or not records or not self._posted or any("moved" in record for record in records.values()):
            self._posted = False
            self.moved_at = time.monotonic() - 0.75 * self._state.settings.stall_seconds
            return
        self._reported = True
        state = self._state
        verdict = judge_stall(records, state.settings.stall_seconds)
        ends = effect(verdict, state.settings.levels, harmful=False) == "raise" and state.world_size > 1
        verdict = replace(verdict, world_size=state.world_size, subject=ENDED if ends else "")
        verdict = replace(verdict, remedy=remedy_for(verdict, state.remedies))
        uneven = next((notice for notice in state.notices if notice.kind == "UnevenBatches"), None)
        places = {(record["where"], record["batches"]) for record in records.values()}
        if uneven is not None and len(places) > 1 and any(record["evaluates"] for record in records.values()):
            # It was warned of, and a rank waits in that evaluation, or for a rank that does.
            state.propose(uneven)
        elif ends:
            state.note(verdict)
        else:  # not through the log, which has no room for all that it says
            state.outbox.put(PrintWarning(verdict))


def judge_stall(records: Records, seconds: float) -> Verdict:
    """Names the ranks that keep the others waiting: those in a loader or in their own code, else those in a collective.

    Args:
        records: What each rank reported of its main thread.
        seconds: For how long no rank has made progress.
    """
    for states in _KEEPS_WAITING:
        ranks = [rank for rank, record in records.items() if record["state"] in states]
        if ranks:
            break
    else:
        ranks, states = list(records), ()
    state = " or ".join(each for each in states if any(records[rank]["state"] == each for rank in ranks))
    ahead = _epochs_ahead(records)
    doing = f"{_are(ranks)} {state}{ahead}"
    extra = _extra_micro_batches(records) if states == _KEEPS_WAITING[-1] else None
    if extra is not None:
        ranks, doing = extra
    sentence = f"no rank has made progress for {seconds:g} s; {doing}"
    order = sorted(records, key=lambda rank: (rank not in ranks, rank))
    places: dict[str, list[int]] = {}
    for rank in order:
        if frames := records[rank]["frames"]:
            places.setdefault(" < ".join(frames), []).append(rank)
    shown = "; ".join(f"{_are(there)} at {place}" for place, there in list(places.items())[:_PLACES])
    why = shown or "no rank is in a line of the user's own"
    rows = tuple(records[rank] for rank in order)
    remedy = "" if extra is None else SAME_MICRO_BATCHES
    if extra is None and states == _KEEPS_WAITING[-1] and (ahead or len(places) > 1):
        remedy = _EPOCH_AHEAD if ahead else _OTHER_LINES
    return Verdict(
        "Stalled",
        f"{sentence}.",
        tuple(ranks),
        why=f"{why}.{_behind(records)}",
        remedy=remedy,
        rows=rows,
        time=time.time(),
    )


def _are(ranks: Sequence[int]) -> str:
    return f"{names_of(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _epochs_ahead(records: Records) -> str:
    """Which ranks are in a later train epoch than others: those have missed the end of an epoch, or another rank has.

    >>> _epochs_ahead({0: {"where": "train epoch 3"}, 1: {"where": "train epoch 4"}})
    '; rank 1 is an epoch ahead of the others, in train epoch 4'
    """
    found = {rank: _EPOCH.fullmatch(str(record.get("where"))) for rank, record in records.items()}
    epochs = {rank: int(match[1]) for rank, match in found.items() if match is not None}
    if len(set(epochs.values())) < 2:
        return ""
    last = max(epochs.values())
    ahead = [rank for rank, epoch in epochs.items() if epoch == last]
    by = last - min(epochs.values())
    return f"; {_are(ahead)} {'an epoch' if by == 1 else f'{by} epochs'} ahead of the others, in train epoch {last}"


def _extra_micro_batches(records: Records) -> tuple[list[int], str] | None:
    """The ranks in a micro-batch that the others have not run for the same step, and a sentence about it.

    >>> others, extra = StepWork("train epoch 0", 2, 2, 0, 4), StepWork("train epoch 0", 2, 2, 5, 0)
    >>> _extra_micro_batches({0: {"steps": 2, "micro": others}, 1: {"steps": 1, "micro": extra}})
    ([1], 'rank 1 is in micro-batch 5 of batch 2 of train epoch 0, and rank 0 ran 4')
    """
    if not all("micro" in record for record in records.values()):
        return None
    work = {rank: {"": (record["steps"], StepWork(*record["micro"]))} for rank, record in records.items()}
    groups = sorted((value, ranks) for value, ranks in group_ranks_by_value(work, ""))
    if len(groups) != 2:
        return None
    ((steps, inside), behind), ((ahead, done), others) = groups
    if steps + 1 != ahead or inside[:3] != done[:3] or done.since or not inside.since > done.ran > 0:
        return None
    batches = f"{batches_of(inside.first, inside.last)} of {inside.span}"
    return behind, f"{_are(behind)} in micro-batch {inside.since} of {batches}, and {names_of(others)} ran {done.ran}"


def _behind(records: Records) -> str:
    """The process groups in which ranks have issued different numbers of collectives, or different ones."""
    issued = {
        rank: {
            name: _in_words(count, record.get("last", {}).get(name, ""))
            for name, count in record["collectives"].items()
        }
        for rank, record in records.items()
    }
    found = {
        # Without the ranks that do not belong to the group.
        name: group_ranks_by_value({rank: own for rank, own in issued.items() if name in own}, name)
        for name in sorted({name for own in issued.values() for name in own})
    }
    return "".join(
        f" Collectives issued in process group {name}: "
        + ", ".join(f"{words} by {names_of(ranks)}" for words, ranks in values[:4])
        + "."
        for name, values in [each for each in found.items() if len(each[1]) > 1][:2]
    )


def _in_words(count: int, last: str) -> str:
    """What a rank has issued in a process group: how many collectives, and which was the last.

    >>> _in_words(5, "all_reduce of [3]"), _in_words(5, "")
    ('5 (the last: all_reduce of [3])', '5')
    """
    return f"{count} (the last: {last})" if last else f"{count}"
