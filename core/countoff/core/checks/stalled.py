"""Does no rank make progress? `Stalled`, with each rank's own line of code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from countoff.core.checks.micro_batches import batches_of
from countoff.core.checks.steps import SAME_FORWARD_PASSES, SAME_MICRO_BATCHES
from countoff.core.messages import count_of, names_of, ranks_by
from countoff.core.protocol.micro_batches import PassWork, StepWork
from countoff.core.protocol.records import Records, parse_count
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["DOING", "ENDED", "FOR_NCCL", "IN_NCCL", "STALLED", "judge_before_fit", "judge_stall"]

ENDED = "ended"
"""The subject of a `Stalled` that ends the job; a warning has none."""
DOING = {"loader": "in its loader", "collective": "in a collective", "code": "in its code"}
"""What a rank does, by the state of its main thread."""
FOR_NCCL = "waiting for NCCL"
IN_NCCL = "a collective of NCCL"
"""In what a rank waits whose thread waits for its device, before a fit."""
_RAISE = "if such a pause is normal, raise stall_seconds above it."

STALLED = VerdictKind(
    "Stalled",
    "no rank has made progress for three minutes; the report shows where each rank is, in your own lines of code",
    accuses=False,
    causes={
        "": Cause(remedy=f"start at the line of the rank that is named first: the others wait for it.\n{_RAISE}"),
        ENDED: Cause(remedy=f"start at the line of the rank that is named first: the others waited for it.\n{_RAISE}"),
    },
)
"""**Cause.** A rank in its loader or in its own code keeps those in a collective waiting. If all are in a collective,
one of them is in another one than the rest: look for a rank that is an epoch ahead.

**Fix.** Start at the line of the rank that is named first, or raise `stall_seconds` (180) above pauses that are normal,
such as that of a checkpoint.

With `levels={"Stalled": "raise"}`, any longer pause ends the job. Outside of a fit, [`countoff
run`](run.md#before-the-fit) reports stalls, and never ends the job.
"""
_PLACES = 4
_KEEPS_WAITING = ((DOING["loader"],), (DOING["code"],), (DOING["collective"], FOR_NCCL))
"""What ranks do, beginning with those that keep the others waiting."""
_EPOCH_AHEAD = (
    "compare the batches that the ranks had in the epoch before: the rank that is ahead had fewer, or left its loop "
    "early. If they had as many, the ranks that are behind wait at their lines above, in a collective that the others "
    "have not reached: look for a condition around it."
)
_OTHER_LINES = (
    "compare the lines above: the ranks wait for one another in different collectives. One of them has left its loop, "
    "or taken a branch, that the others have not."
)
_EVALUATES_ALONE = (
    "let a rank that evaluates alone call model.module, not the DistributedDataParallel around it, whose forward pass "
    "broadcasts the model's buffers and so waits for all ranks.\n"
    "let all ranks evaluate."
)
_SILENT = "silent"
_EPOCH = re.compile(r"train epoch (\d+)")


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
    waiting = states == _KEEPS_WAITING[-1]
    extra = _extra_micro_batches(records) if waiting else None
    passes, begun = _forward_passes(records) if waiting else (None, "")
    if extra is not None:
        ranks, doing = extra
    elif passes is not None:
        ranks, doing = passes
    sentence = f"no rank has made progress for {seconds:g} s; {doing}"
    order = sorted(records, key=lambda rank: (rank not in ranks, rank))
    lines = _lines(records)
    places = ranks_by({place: lines[rank] for place, rank in enumerate(order) if rank in lines})
    places = [
        (line, sorted(order[place] for place in there)) for line, there in sorted(places, key=lambda group: group[1])
    ]
    shown = "; ".join(f"{_are(there)} {line}" for line, there in places[:_PLACES])
    why = shown or "no rank is in a line of the user's own"
    rows = tuple(records[rank] for rank in order)
    remedy = SAME_MICRO_BATCHES if extra is not None else SAME_FORWARD_PASSES if passes is not None else ""
    if not remedy and waiting and (ahead or (len(places) > 1 and not _in_the_same(records))):
        alone = sum(record.get("buffers") is True for record in records.values())
        remedy = _EVALUATES_ALONE if 0 < alone < len(records) else _EPOCH_AHEAD if ahead else _OTHER_LINES
    more = {"remedy": remedy, "rows": rows}
    return STALLED.found(f"{sentence}.", ranks, why=f"{why}.{begun}{_behind(records)}", **more)


def _lines(records: Records) -> dict[int, str]:
    """The place of each rank that is known: its own lines, and where in a framework it is if all have the same lines.

    Those say nothing then: they have called the framework, as `trainer.fit`, and the ranks may be anywhere in it.

    >>> fit = {"frames": ["train.py:9 in main"]}
    >>> _lines({0: fit | {"inside": "lightning at ddp.py:7 in reduce"}, 1: fit})
    {0: 'at train.py:9 in main, in lightning at ddp.py:7 in reduce', 1: 'at train.py:9 in main'}
    """
    own = {rank: " < ".join(record["frames"]) for rank, record in records.items()}
    found = {rank: [f"at {line}"] if line else [] for rank, line in own.items()}
    if len(set(own.values())) == 1:
        for rank, record in records.items():
            found[rank] += [f"in {record['inside']}"] if "inside" in record else []
    return {rank: ", ".join(parts) for rank, parts in found.items() if parts}


def judge_before_fit(records: Records, seconds: float) -> Verdict | None:
    """Names the ranks for which others wait while no fit has begun; None where it is not certain that they do.

    Args:
        records: Of every rank, where its main thread is: `call`, what waits for other ranks, empty for a rank that is
            in none; `at`, the innermost line of the user's own; and the `seconds` for which it has been there. Of a
            rank that tells nothing any more, `silent`, the seconds since then.
        seconds: For how long a rank must have been in one call, to be waiting for another one.
    """
    calls = {rank: f"{each['call']}{_at_line(each['at'])}" for rank, each in records.items() if each["call"]}
    waited = [each["seconds"] for each in records.values() if each["call"] and each["seconds"] >= seconds]
    others = {rank: _SILENT if "silent" in each else each["at"] for rank, each in records.items() if not each["call"]}
    apart = len(waited) == len(records) and len(set(calls.values())) > 1
    if not waited or not (others or apart):
        return None
    busy, waiting = ranks_by(others), ranks_by(calls)
    places = [_busy(ranks, at, records) for at, ranks in busy[:_PLACES]]
    places += [f"{names_of(ranks)} wait{'s' * (len(ranks) == 1)} in {call}" for call, ranks in waiting[:_PLACES]]
    if rest := sorted(rank for groups in (busy, waiting) for _, ranks in groups[_PLACES:] for rank in ranks):
        places.append(f"{_are(rest)} elsewhere")
    return STALLED.found(
        f"{'; '.join(places)}.",
        (busy or waiting)[0][1],
        why=f"the longest of these waits has lasted for {max(waited):.0f} s. No fit is counted here.",
        remedy=_OTHER_LINES if apart else "",
    )


def _busy(ranks: Sequence[int], at: str, records: Records) -> str:
    """Where ranks are that do not wait, and for how long all of them have been there, if that was seen."""
    if at == _SILENT:
        seconds = min(records[rank]["silent"] for rank in ranks)
        return f"{names_of(ranks)} {'has' if len(ranks) == 1 else 'have'} given no sign of life for {seconds:.0f} s"
    since = min(records[rank]["seconds"] for rank in ranks)
    there = f"at {at}" if at else "in no line of the user's own"
    return f"{names_of(ranks)}, {there}, for {since:.0f} s" if since >= 1 else f"{names_of(ranks)}, {there}"


def _at_line(at: str) -> str:
    """The line of a place, without its function.

    >>> _at_line("train.py:33 in main")
    ' at train.py:33'
    """
    return f" at {at.partition(' in ')[0]}" if at else ""


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
    groups = sorted(ranks_by({rank: (each["steps"], StepWork(*each["micro"])) for rank, each in records.items()}))
    if len(groups) != 2:
        return None
    ((steps, inside), behind), ((ahead, done), others) = groups
    if steps + 1 != ahead or inside[:3] != done[:3] or done.since or not inside.since > done.ran > 0:
        return None
    batches = f"{batches_of(inside.first, inside.last)} of {inside.span}"
    return behind, f"{_are(behind)} in micro-batch {inside.since} of {batches}, and {names_of(others)} ran {done.ran}"


def _forward_passes(records: Records) -> tuple[tuple[list[int], str] | None, str]:
    """What ranks with different numbers of forward passes of a sharded model have run in the same step.

    It is proved where the others have applied that step, or where all have issued as many collectives: then those of
    different passes have met. Otherwise a rank may only not have got there, so the numbers are told and nothing more.

    Returns:
        The ranks with more passes, and a sentence about it, if it is proved; None if it is not. And a sentence without
        proof.

    >>> done = {"steps": 12, "passes": PassWork("train epoch 0", (12, 12, 4), (13, 13, 1))}
    >>> inside = {"steps": 11, "passes": PassWork("train epoch 0", (11, 11, 4), (12, 12, 5))}
    >>> _forward_passes({0: done, 1: inside})
    (([1], 'in batch 12 of train epoch 0, rank 1 has begun 5 forward passes of the sharded model, rank 0 ran 4'), '')
    """
    if not all("passes" in record for record in records.values()):
        return None, ""
    works = {rank: PassWork(*record["passes"]) for rank, record in records.items()}
    steps = {rank: parse_count(record["steps"]) for rank, record in records.items()}
    if len({work.span for work in works.values()}) > 1:
        return None, ""
    for step in sorted({each + ahead for each in steps.values() for ahead in (0, 1)}):
        did = {rank: _in_step(step - steps[rank], work) for rank, work in works.items()}
        known = {rank: each for rank, each in did.items() if each is not None}
        places = {(first, last) for (first, last, _), _ in known.values()}
        sides = ranks_by({rank: (numbers[2], applied) for rank, (numbers, applied) in known.items()})
        if len(known) < len(works) or len(places) > 1 or len(sides) != 2:
            continue
        ((many, more_applied), more), ((few, fewer_applied), fewer) = sorted(sides, reverse=True)
        [(first, last)] = places
        where = f"in {batches_of(first, last)}" if first <= last else f"after {batches_of(last, last)}"
        where = f"{where} of {works[more[0]].span}"
        if many > few and (fewer_applied or _issued_alike(records)):
            did_more, did_fewer = _ran(more, more_applied), _ran(fewer, fewer_applied)
            counted = f"{count_of(many, 'forward pass')} of the sharded model"
            then = f" {did_fewer}" if more_applied != fewer_applied else ""
            doing = f"{where}, {names_of(more)} {did_more} {counted}, {names_of(fewer)}{then} {few or 'none'}"
            return (more, doing), ""
        if many > few and not more_applied:
            begun = f"{many} by {names_of(more)}, {few or 'none'} by {names_of(fewer)}"
            return None, f" Forward passes of the sharded model begun {where}: {begun}."
    return None, ""


def _ran(ranks: Sequence[int], applied: bool) -> str:
    return "ran" if applied else "has begun" if len(ranks) == 1 else "have begun"


def _in_step(ahead: int, work: PassWork) -> tuple[tuple[int, int, int], bool] | None:
    """The batches and the passes of a rank's last step, or since then, and whether that step was applied."""
    numbers = {0: work.done, 1: work.begun}.get(ahead, ())
    if not numbers:
        return None
    first, last, passes = map(parse_count, numbers)
    return (first, last, passes), ahead == 0


def _issued_alike(records: Records) -> bool:
    """Whether all ranks have issued as many collectives in each process group that is known of them."""
    issued = [record["collectives"] for record in records.values()]
    return bool(issued[0]) and all(each == issued[0] for each in issued)


def _in_the_same(records: Records) -> bool:
    """Whether all ranks are known to wait in the same collective, wherever in the program that shows."""
    last = [record.get("last", {}) for record in records.values()]
    known = bool(last[0]) and all(last[0].values())
    return _issued_alike(records) and known and all(each == last[0] for each in last)


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
        name: ranks_by({rank: own[name] for rank, own in issued.items() if name in own})
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
