"""Puts what was proved into a verdict: who, what, both counts, and which ranks are in the minority."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from countoff.core.checks.rank_map import FORMULA_REMEDY
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.micro_batches import MICRO_BATCHES, sentence_of
from countoff.core.protocol.rates import rate_mismatch
from countoff.core.protocol.records import Mark
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import DECISION, ENDED, EXITED, WHO_EVALUATES, Remedies, Verdict, count_of, names_of

EVALUATION, REPEAT = "evaluation", "repeat"
"""Subjects of an `UnevenBatches`: evaluations differ in length, a rank has nothing to repeat. `DECISION` and
`WHO_EVALUATES` are others. The subject of any other one, about train loaders of different lengths, is empty."""
DIED, AHEAD, STOPPED, HOST, VICTIM = "died", "ahead", "stopped", "host", "victim"
"""Subjects of a `LostRank`: the process is gone, also after it has passed a place to which another rank has not come,
or does not run; a whole host does not answer; a rank has only lost its connection to another one. `EXITED` and `LEFT`
are others: it has ended by itself. The subject of any other one is empty."""
POSITION, STEPS, AGAIN, RATE, CHANGED, RECORD = "position", "steps", "data", "rate", "changed rate", "record"
"""Subjects of a `ResumeMismatch`: the restored position or number of steps is another one, batches are trained on
again, a schedule stands elsewhere, a learning rate has changed, the record cannot be read."""

SAME_MICRO_BATCHES = (
    "run as many forward and backward passes in each step on every rank. Where that number depends on the data: "
    "all-reduce it, take the maximum, and let ranks with fewer run empty micro-batches, any valid input with a loss of "
    "0 (loss * 0)."
)
GENERAL_REMEDIES: Remedies = {
    "UnevenBatches": {
        DECISION: (
            "look for a break, a limit, an exit or a condition that only some ranks meet, and let all ranks decide "
            "together (all-reduce the flag before any rank acts on it)."
        ),
        WHO_EVALUATES: (
            "let all ranks evaluate after the same batch; if only some ranks are to evaluate, say which: "
            "eval_ranks=[0], on every rank."
        ),
    },
    "WeightsDiffer": (
        "look for what only some ranks do to that parameter: an assignment or an in-place change after the model was "
        "wrapped, a checkpoint loaded there, requires_grad set or a layer added after wrapping, an optimizer step or a "
        "backward() that is left out. Then load, on all ranks, a checkpoint that was written before that. Where "
        "ranks train apart on purpose: weights_every=0."
    ),
    "StepMismatch": {
        "": "let all ranks step after the same batches: no condition of one rank around optimizer.step().",
        MICRO_BATCHES: (
            "if the ranks weight their losses by their samples, or the extra pass is no part of the training, ignore "
            f"this. If not, {SAME_MICRO_BATCHES}"
        ),
    },
    "LearningRateMismatch": {
        "": "make the scheduler with the same length on every rank, and step it on every rank.",
        "schedule": (
            "make the scheduler for one number of steps, and with one learning rate, on all ranks. If the number "
            "follows from len(loader): all-reduce it before you make the scheduler, and take the minimum (with "
            "uneven_train='repeat', the maximum)."
        ),
    },
    "RankMapError": FORMULA_REMEDY,
    "LostRank": {
        "": "read that rank's own output first: the other ranks have only lost their peer.",
        DIED: (
            "read the end of that rank's own output. If it shows no error, the rank may have been killed because its "
            "host had no memory left: look for 'Out of memory' in dmesg on that host, or for OOM in the scheduler's "
            "report on the job."
        ),
        AHEAD: (
            "look at what only some ranks do before that place: an optimizer step, a collective or an evaluation, as "
            "in a loop that steps where it takes a batch for the last one by its own len(loader). gloo aborts a "
            "process whose collective does not fit that of another rank. If all ranks do the same there, the host may "
            "have had no memory left: look for 'Out of memory' in dmesg, or for OOM in the scheduler's report on the "
            "job."
        ),
        EXITED: (
            "look for a sys.exit() that only that rank reaches, such as a time limit or a check of its own data, and "
            "let all ranks decide together (all-reduce the flag before any rank acts on it)."
        ),
        HOST: (
            "look at that host's console, and at the scheduler's report on it, for a loss of power, a kernel panic or "
            "a lack of memory that has stopped the whole host. If it is up, look at the network between it and the "
            "others. Until it is repaired, start the job without that host."
        ),
        VICTIM: (
            "if this exception comes from a collective (gloo, NCCL), look for the cause on another rank: this one has "
            "only lost its connection to it. Read the output of all ranks, and begin with one that has ended without a "
            "message. If the exception comes from anywhere else, begin with this rank's own traceback."
        ),
        STOPPED: "look for what has stopped it, such as a debugger or the scheduler. kill -CONT PID lets it go on.",
    },
    "Stalled": {
        "": (
            "start at the line of the rank that is named first: the others wait for it. This is a warning: the job is "
            "not ended, and goes on if that rank does. If such a pause is normal, raise stall_seconds above it."
        ),
        ENDED: (
            "start at the line of the rank that is named first: the others waited for it. If such a pause is normal, "
            "raise stall_seconds above it."
        ),
    },
    "ResumeMismatch": {
        POSITION: (
            "let the loop go on with the epoch and the batch of the checkpoint. If you have moved it on purpose, "
            "ignore this."
        ),
        STEPS: "restore the number of steps from the same checkpoint as the weights.",
        AGAIN: (
            "skip the batches that were trained on before the checkpoint, give the sampler its epoch, or restore the "
            "loader's own state where it has one."
        ),
        RATE: (
            "save the scheduler's state_dict() with every checkpoint, and load it before the first step. If you have "
            "begun a new schedule on purpose, ignore this."
        ),
        CHANGED: "nothing, if you have changed it for this run. If not, load the optimizer's state_dict() too.",
        RECORD: "nothing: only countoff reads this record, and the next checkpoint gets a new one.",
    },
    "VersionMismatch": "install the same versions on every host.",
    "SettingsMismatch": "give every rank the same tick_batches.",
}
"""What to do in any framework, where an adapter has no words of its own."""

EXITED_WHY = "It ended without an error (exit code 0), and the other ranks would wait for it in their next collective."
RESUME_REMEDY = (
    "resume every rank from the same checkpoint, and skip as many batches on each: compare what each rank loads."
)
STEPS_DIFFER = "Ranks that do not step after the same batches have different weights from there on."
MICRO_BATCHES_DIFFER = (
    "In one step, the ranks ran different numbers of passes. That is right where each rank weights its losses by the "
    "samples. Otherwise the step averages gradients of different amounts of data."
)
_CAUSES = {
    "": (
        "The ranks' train loaders differ in length. From the next batch on, the job would average gradients of "
        "different batches, and hang in the end."
    ),
    DECISION: (
        "One rank left the loop where the others went on: a break, a limit, an exit or a condition of that rank alone."
    ),
    EVALUATION: "The ranks' evaluation loaders differ in length. A metric that synchronises every batch hangs there.",
    WHO_EVALUATES: "Not all ranks evaluate there. A collective of the evaluation would meet one of the training.",
}


def judge(divergence: Divergence, rank: int) -> Verdict:
    """Turns a divergence that this rank has proved into a verdict that names both ranks and both counts.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    return replace(_judged(divergence, rank), guess=divergence.guess)


def _judged(divergence: Divergence, rank: int) -> Verdict:
    standing, own = divergence.standing, divergence.own
    if standing.reason == "exited":
        return _lost_by_exit(standing, standing.rank, rank, standing.time)
    if own is not None and own.reason == "exited":
        return _lost_by_exit(own, rank, standing.rank, standing.time)
    if divergence.kind == "StepMismatch":
        return _step_mismatch(divergence, rank)
    if divergence.kind == "PlanMismatch":
        return _other_position(divergence, rank)
    if divergence.kind == "LearningRateMismatch" and own is not None:
        return rate_mismatch(
            _where_rates_differ(own), point_of(divergence.mark_index), (standing.rank, rank), standing.rates, own.rates
        )
    return _uneven_batches(divergence, rank)


def _lost_by_exit(mark: Mark, exited: int, other: int, proved: float) -> Verdict:
    sentence = f"rank {exited} {describe_mark(mark)}, where rank {other} goes on."
    return Verdict("LostRank", sentence, (exited,), why=EXITED_WHY, gone=True, time=proved, subject=EXITED)


def point_of(mark_index: int) -> str:
    """The name of a mark as a point at which learning rates are compared."""
    return f"mark/{mark_index}"


def _where_rates_differ(mark: Mark) -> str:
    if mark.kind == "train_end":
        return f"after {count_of(mark.at, 'batch')} of {mark.span}"
    if mark.kind == "train_start":
        return f"at the start of {mark.span}"
    return f"at the {'start' if mark.kind == 'eval_start' else 'end'} of {mark.span} within a train epoch"


def _step_mismatch(divergence: Divergence, rank: int) -> Verdict:
    standing, own = divergence.standing, divergence.own
    if own is not None and divergence.micro_batches:
        where, ranks = f"after {count_of(standing.at, 'batch')} of {own.micro.span}", (standing.rank, rank)
        return Verdict(
            "StepMismatch",
            sentence_of(standing.micro, own.micro, ranks, where=where, steps=own.steps),
            ranks,
            why=MICRO_BATCHES_DIFFER,
            time=standing.time,
            subject=MICRO_BATCHES,
            mark_index=divergence.mark_index,
            standing="differ",
        )
    theirs, mine = count_of(standing.steps, "optimizer step"), count_of(divergence.count, "optimizer step")
    where = f"after {count_of(standing.at, 'batch')} of {standing.span}"
    sentence = f"{where}, rank {standing.rank} had applied {theirs} and rank {rank} {mine}"
    sentence += "." if standing.steps != divergence.count else ", but after other batches."
    return Verdict(
        "StepMismatch",
        sentence,
        (standing.rank, rank),
        why=STEPS_DIFFER,
        time=standing.time,
        mark_index=divergence.mark_index,
        standing="differ",
    )


def _other_position(divergence: Divergence, rank: int) -> Verdict:
    standing = divergence.standing
    theirs, mine = count_of(standing.at, "batch"), count_of(divergence.count, "batch")
    return Verdict(
        "PlanMismatch",
        f"rank {standing.rank} began {standing.span} after {theirs} of it, rank {rank} after {mine}.",
        (standing.rank, rank),
        why="They have resumed at different places, or skip different numbers of batches.",
        remedy=RESUME_REMEDY,
        time=standing.time,
        subject="position",
        mark_index=divergence.mark_index,
        standing="differ",
    )


def _uneven_batches(divergence: Divergence, rank: int) -> Verdict:
    standing, own = divergence.standing, divergence.own
    if own is not None:
        action = describe_mark(own)
    else:
        verb = "asks for" if divergence.requested else "has" if standing.reason == "exhausted" else "has begun"
        action = f"{verb} batch {divergence.count}"
    sides = [(standing.rank, describe_mark(standing)), (rank, action)]
    if own is not None and _ran_out_before(own, standing):
        sides.reverse()  # the loader that is known to have ended is what a reader needs first
    short = own is None and standing.reason == "exhausted"
    short = short or (own is not None and (_ran_out_before(own, standing) or _ran_out_before(standing, own)))
    subject = _subject(divergence)
    return Verdict(
        "UnevenBatches",
        f"{'; '.join(f'rank {who} {did}' for who, did in sides)}.",
        (sides[0][0], sides[1][0]),
        why=_CAUSES[subject],
        time=standing.time,
        subject=subject,
        mark_index=divergence.mark_index,
        announced=divergence.announced,
        standing="ran out first" if short else "differ",
    )


def uneven_apart(name: str, batches: Mapping[int, int]) -> Verdict | None:
    """Returns an `UnevenBatches` if ranks had different numbers of batches in an evaluation beside the training.

    Args:
        name: The evaluation's name.
        batches: Batches of each rank, by rank.

    >>> uneven_apart("validation", {0: 4, 1: 3}).sentence
    'rank 1 ran out of data after 3 batches of validation; rank 0 after 4.'
    """
    fewest = min(batches, key=lambda rank: batches[rank], default=0)
    most = max(batches, key=lambda rank: batches[rank], default=0)
    if not batches or batches[fewest] == batches[most]:
        return None
    return Verdict(
        "UnevenBatches",
        f"rank {fewest} ran out of data after {count_of(batches[fewest], 'batch')} of {name}; rank {most} after "
        f"{batches[most]}.",
        (fewest, most),
        why=_CAUSES[EVALUATION],
        time=time.time(),
        subject=EVALUATION,
        standing="ran out first",
    )


def _ran_out_before(mark: Mark, other: Mark) -> bool:
    """Whether a rank's loader is known to have ended where another rank had more of the same span."""
    return mark.reason == "exhausted" and (mark.kind, mark.span) == (other.kind, other.span) and mark.at < other.at


def _subject(divergence: Divergence) -> str:
    if divergence.evaluation:
        return EVALUATION
    standing, own = divergence.standing, divergence.own
    if any(mark is not None and mark.kind == "eval_start" and mark.reason != "exhausted" for mark in (standing, own)):
        return WHO_EVALUATES
    stopped = own is not None and own.kind == standing.kind and own.reason == "stopped"
    return DECISION if standing.reason != "exhausted" or stopped else ""


def describe_mark(mark: Mark) -> str:
    """What the rank that passed this mark did, as the rest of a sentence that begins with its name."""
    batches = count_of(mark.at, "batch")
    if mark.reason == "exited":
        return "left the job (sys.exit)" + (f" in batch {mark.at} of {mark.span}" if mark.kind != "fit_end" else "")
    if mark.kind in ("train_end", "eval_end"):
        listed = f" ({' + '.join(str(count) for count in mark.counts)})" if len(mark.counts) > 1 else ""
        verb = "ran out of data" if mark.reason == "exhausted" else "stopped"
        return f"{verb} after {batches}{listed} of {mark.span}"
    if mark.kind == "eval_start":
        return f"began {mark.span}" + (f" after {count_of(mark.at, 'train batch')}" if mark.at else "")
    if mark.kind == "train_start":
        return f"began {mark.span}" + (f" after {batches} of it" if mark.at else "")
    return "ended the fit" if mark.kind == "fit_end" else "began the fit"


def lost_rank(rank: int, event: str, why: str = "", *, gone: bool = True, subject: str = "") -> Verdict:
    """Returns the verdict that a rank is gone, stopped or silent, or that it has failed and reports that itself.

    Args:
        rank: The rank.
        event: What happened to it, as the rest of a sentence that begins with its name.
        why: The cause, where it is known.
        gone: False if the rank has failed and can still answer.
        subject: `DIED`, `AHEAD`, `STOPPED`, `EXITED` or `LEFT`; empty for any other event.
    """
    sentence = f"rank {rank} {event}."
    return Verdict("LostRank", sentence, (rank,), why=why, gone=gone, time=time.time(), subject=subject)


def victim(rank: int, raised: str) -> Verdict:
    """Returns the verdict that a rank has only lost its connection to another one. It names nobody as lost.

    Args:
        rank: The victim.
        raised: Its exception, in words.
    """
    sentence = (
        f"rank {rank} is a victim: it raised {raised}, as happens when another rank is lost; nothing tells which."
    )
    return Verdict("LostRank", sentence, time=time.time(), subject=VICTIM)


def lost_host(name: str, ranks: Sequence[int], seconds: float) -> Verdict:
    """Returns the verdict that a host is gone, or the way to it.

    Args:
        name: The host's name.
        ranks: The ranks on it, ascending.
        seconds: For how long it has not answered.
    """
    return Verdict(
        "LostRank",
        f"host {name} with {names_of(ranks)} does not answer.",
        tuple(ranks),
        why=_no_answer(seconds),
        gone=True,
        time=time.time(),
        subject=HOST,
        hosts=dict.fromkeys(ranks, name),
    )


def lost_store(address: str, seconds: float) -> Verdict:
    """Returns the verdict that the host of the job's store is gone, or the way to it; no rank is known to be there.

    Args:
        address: The address at which the store was reached.
        seconds: For how long it has not answered.
    """
    sentence = f"the host of the job's store ({address}) does not answer."
    return Verdict("LostRank", sentence, why=_no_answer(seconds), gone=True, time=time.time(), subject=HOST)


def _no_answer(seconds: float) -> str:
    return (
        f"Its kernel has not answered for {seconds:g} s, so the host has stopped, or the network to it is broken. "
        "For a process that is busy or stopped, the kernel would answer."
    )


def unprotected(rank: int, reason: str) -> Verdict:
    """Returns the verdict that a rank can no longer agree with the others on the number of their batches.

    Args:
        rank: The rank that has found that.
        reason: What has happened, as one clause.
    """
    return Verdict(
        "LostRank",
        f"rank {rank} has lost contact with the other ranks: {reason}.",
        (rank,),
        why=(
            "With uneven_train='stop' or 'repeat', or uneven_eval='stop', the ranks agree through the job's store on "
            "which batches to start. Without the store, this rank could start a batch that another rank does not have."
        ),
        remedy=(
            "look at the host of the job's store (the one in MASTER_ADDR), at rank 0, and at the network between this "
            "host and that one. If ranks only start slowly, raise deadline_seconds."
        ),
        time=time.time(),
    )


def nothing_to_repeat(rank: int, span: str, batches: int = 0) -> Verdict:
    """Returns the verdict that a rank's loader has no batch to repeat, where other ranks have more batches.

    Args:
        rank: The rank.
        span: The span's name.
        batches: Batches that its loader gave before it ended for the first time.
    """
    if batches:
        sentence = (
            f"the loader of rank {rank} ended after {count_of(batches, 'batch')} of {span}, and cannot repeat them."
        )
        why = "With uneven_train='repeat', its loader was begun again, and it gave no batch the second time."
        remedy = (
            "use a loader that starts from its first batch each time a loop begins it (iter(loader)), as a DataLoader "
            "does. A generator, an iterator and a function give their batches only once; with these, "
            "uneven_train='stop' ends the epoch on every rank with the shortest one."
        )
    else:
        sentence = f"rank {rank} has no data in {span}, so it has no batch to repeat; other ranks have batches."
        why = "With uneven_train='repeat', a short rank repeats its own batches, and the loader of this rank is empty."
        remedy = (
            "give every rank data for at least one batch: look at how files or samples are divided among the ranks, "
            "and at drop_last=True, which drops a rank's only batch if it is not full."
        )
    return Verdict(
        "UnevenBatches",
        sentence,
        (rank,),
        why=why,
        remedy=remedy,
        time=time.time(),
        subject=REPEAT,
        standing="ran out first",
    )


def remedy_for(verdict: Verdict, remedies: Remedies) -> str:
    """Returns the verdict's own remedy, or else the adapter's, or else the general one.

    A remedy for the verdict's subject comes before one for the whole kind, whoever has it.

    Args:
        verdict: The verdict.
        remedies: The adapter's remedies.

    >>> remedy_for(Verdict("StepMismatch", "they differ."), {"StepMismatch": "step together."})
    'step together.'
    """
    if verdict.remedy:
        return verdict.remedy
    known = [source.get(verdict.kind, "") for source in (remedies, GENERAL_REMEDIES)]
    special = [each.get(verdict.subject, "") for each in known if verdict.subject and not isinstance(each, str)]
    general = [each if isinstance(each, str) else each.get("", "") for each in known]
    return next(filter(None, [*special, *general]), "")


def row(rank: int, span: SpanCounters | None, steps: int, state: str) -> dict[str, Any]:
    """One rank's line in the table of a verdict, as JSON types.

    Args:
        rank: The rank.
        span: Its innermost span; None if none has been open.
        steps: Its optimizer steps since the fit began.
        state: What it is doing, in words.
    """
    where, started, fetched = ("no span", 0, 0) if span is None else (span.name, span.started, span.delivered)
    return {"rank": rank, "where": where, "batches": started, "fetched": fetched, "steps": steps, "state": state}


def odd_ranks(rows: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """The ranks in the minority: of those that agree with the disputed mark and those that do not, the fewer.

    Args:
        rows: One row per rank that answered; its `side` is None for a rank that has not reached the mark.

    Returns:
        The ranks; none where either side could still become the minority.

    >>> odd_ranks([{"rank": rank, "side": rank == 2} for rank in range(4)])
    (2,)
    """
    sides = {int(line["rank"]): line.get("side") for line in rows}
    groups = [sorted(rank for rank, side in sides.items() if side is which) for which in (True, False)]
    fewer, more = sorted(groups, key=len)
    undecided = len(sides) - len(fewer) - len(more)
    return tuple(fewer) if fewer and len(fewer) + undecided < len(more) else ()


def ranks_behind(rows: Mapping[int, Mapping[str, Any]], first: int) -> tuple[int, ...]:
    """The ranks that are in the same span as a rank that has ended it, and have begun no batch beyond.

    Args:
        rows: One row per rank that answered, by rank.
        first: The rank that has ended the span.
    """
    if first not in rows:
        return ()
    where, batches = rows[first]["where"], rows[first]["batches"]
    return tuple(
        rank
        for rank, line in sorted(rows.items())
        if rank != first
        and line.get("side") is None
        and line["where"] == where
        and line["batches"] <= batches
        and str(line["state"]).startswith("in batch")
    )
