"""Has a rank been lost, and what does that mean for the others? `LostRank`.

A rank is lost as soon as another rank needs it, and not before. It may be away in several ways: its process is gone or
stopped, it has left the job, or an exception has left its loop, which its program may still catch. All of that is no
harm where every rank does the same, one of them seconds before the others. It is harm once another rank waits for the
one that is away. An exception that nothing catches is no question of need: that rank reports it as the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from countoff.core.checks.check import Choices
from countoff.core.messages import count_of, names_of
from countoff.core.protocol.records import Absence, SyncPoint
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = [
    "AHEAD",
    "ALIKE",
    "DIED",
    "EXITED",
    "HOST",
    "LEFT",
    "LOST_RANK",
    "SEVERAL",
    "STOPPED",
    "VICTIM",
    "Need",
    "absence_by_exit",
    "is_lost",
    "judge_exit",
    "loss_of",
    "lost_host",
    "lost_rank",
    "lost_store",
    "raised",
    "unprotected",
    "victim",
]

DIED, AHEAD, STOPPED, HOST, VICTIM = "died", "ahead", "stopped", "host", "victim"
"""Subjects: the process is gone, also after it has passed a place to which another rank has not come, or does not run;
a whole host does not answer; a rank has only lost its connection to another one."""
ALIKE, SEVERAL = "alike", "several"
"""Subjects: all ranks have raised the same exception; several ranks have raised, each by itself."""
EXITED, LEFT = "exited", "left"
"""Subjects: the process was not lost: it has left by `sys.exit()`, or by the end of its program. The subject of any
other loss is empty."""
GONE_SECONDS = 0.15
"""For so long a rank must have waited, where the one that is away cannot come back: no healthy collective ends then."""
_TOLD_GROUPS = 3
"""So many different exceptions are told in one sentence."""
SPARE_BATCHES = 1
"""Ranks that leave alike are at most so many batches apart, where a signal makes them leave."""

LOST_RANK = VerdictKind(
    "LostRank",
    "a rank raised an exception, exited early, was killed or stopped, or its host no longer answers",
    default="raises",
    level="raise",
    restart="may_help",
    label="lost",
    causes={
        "": Cause(remedy="read that rank's own output first: no other rank has told of an error of its own."),
        ALIKE: Cause(
            remedy=(
                "read the traceback of any rank. Look for the cause in what all ranks share: the program, its "
                "configuration, its data, the installed packages. No single rank is at fault."
            )
        ),
        SEVERAL: Cause(
            remedy=(
                "read the traceback of the rank that is named first, then those of the others that are named. No other "
                "rank has told of an error of its own."
            )
        ),
        DIED: Cause(
            remedy=(
                "read the end of that rank's own output. If it shows no error, the rank may have been killed because "
                "its host had no memory left: look for 'Out of memory' in dmesg on that host, or for OOM in the "
                "scheduler's report on the job.\n"
                "if it shows gloo::EnforceNotMet, look for a collective that only some ranks call, as in a callback of "
                "rank 0: gloo aborts a process whose collective does not fit that of another rank."
            )
        ),
        AHEAD: Cause(
            remedy=(
                "look at what only some ranks do before that place: an optimizer step, a collective or an evaluation, "
                "as in a loop that steps where it takes a batch for the last one by its own len(loader). gloo aborts a "
                "process whose collective does not fit that of another rank. If all ranks do the same there, the host "
                "may have had no memory left: look for 'Out of memory' in dmesg, or for OOM in the scheduler's report "
                "on the job."
            )
        ),
        EXITED: Cause(
            "It ended without an error (exit code 0), and the other ranks would wait for it in their next collective.",
            "look for a sys.exit() that only that rank reaches, such as a time limit or a check of its own data, and "
            "let all ranks decide together (all-reduce the flag before any rank acts on it).",
            restart="unknown",
        ),
        LEFT: Cause(
            remedy=(
                "find out why that rank was done before the others: it had fewer batches or epochs, or left its loop "
                "early. Look for a warning above, and read that rank's own output. The other ranks have only lost "
                "their peer."
            ),
            restart="unknown",
        ),
        HOST: Cause(
            remedy=(
                "look at that host's console, and at the scheduler's report on it, for a loss of power, a kernel panic "
                "or a lack of memory that has stopped the whole host. If it is up, look at the network between it and "
                "the others. Until it is repaired, start the job without that host."
            )
        ),
        VICTIM: Cause(
            remedy=(
                "if this exception comes from a collective (gloo, NCCL), look for the cause on another rank: this one "
                "has only lost its connection to it. Read the output of all ranks, and begin with one that has ended "
                "without a message. If the exception comes from anywhere else, begin with this rank's own traceback."
            )
        ),
        STOPPED: Cause(
            remedy="look for what has stopped it, such as a debugger or the scheduler. kill -CONT PID lets it go on."
        ),
    },
)
"""**Cause.** The message says which of these it was:

- `raised …`: an exception of that rank, with the line of your code;
- `is gone`: its process was killed, often for its memory, or crashed in native code;
- `is stopped`: it has received SIGSTOP, for example from a debugger;
- `left the job (sys.exit)`: it exited with code 0 while the others go on;
- `host … does not answer`: the host has lost its power or its network, or its kernel has stopped;
- `has ended its fit, and rank … has not`: it has no more collectives, where another rank has one;
- `is a victim`: this rank has only lost its connection to a peer, and nothing shows which rank is lost;
- `or whoever hosts the job's store is gone`, `has lost contact with the other ranks`: the store does not answer.

**Fix.** Read that rank's own output. If it was killed, look for "Out of memory" in the host's `dmesg`, or for OOM in
the scheduler's report.

The job ends [once another rank needs that rank](how-it-works.md#when-a-rank-is-lost).
"""


@dataclass(frozen=True)
class Need:
    """How much this rank needs the other ranks at one moment.

    Attributes:
        begun: Train batches that it has begun in the fit.
        known: Seconds since it has known that the other rank is away.
        waited: Seconds that its main thread has waited for others since then.
        failed: Whether one of its collectives has failed, as happens when another rank is lost.
        counts_off: Whether it waits for all ranks to begin the fit, and does not know yet that they have.
    """

    begun: int = 0
    known: float = 0.0
    waited: float = 0.0
    failed: bool = False
    counts_off: bool = False


def is_lost(absence: Absence, need: Need, settings: Choices) -> bool:
    """Whether a rank that is away is lost, because this rank needs it.

    Args:
        absence: What is known of that rank.
        need: How this rank needs others.
        settings: The user's choices.

    >>> from countoff.core import Settings
    >>> raised = Absence(1, "raised ValueError", begun=4)
    >>> [is_lost(raised, Need(begun, known=15.0), Settings()) for begun in (4, 5, 6)]
    [False, False, True]
    """
    if need.failed or (need.counts_off and absence.certain):
        return True
    # A rank that goes on after its exception says so, but later than a loop may take for some batches.
    apart = absence.begun is not None and need.begun > absence.begun + SPARE_BATCHES
    return max(need.waited, need.known if apart else 0.0) >= patience(absence, settings)


def patience(absence: Absence, settings: Choices) -> float:
    """The seconds for which this rank must have waited for a rank that is away before that one is lost.

    A stopped rank may go on at any time. A rank may catch its exception and come back to a collective, some seconds
    later where it asks a slow storage again. If nothing catches the exception, the rank says so.

    Args:
        absence: What is known of that rank.
        settings: The user's choices.
    """
    return GONE_SECONDS if absence.certain else settings.lost_seconds


def absence_by_exit(rank: int) -> Absence:
    """Returns what is known of a rank that has ended the fit by `sys.exit()`.

    Args:
        rank: The rank.
    """
    event = "left the job (sys.exit) before its fit had ended"
    return Absence(rank, event, LOST_RANK.cause_of(EXITED).why, EXITED, certain=True)


def loss_of(absence: Absence) -> Verdict:
    """Returns the verdict that a rank is lost."""
    gone = absence.certain or absence.subject in (DIED, STOPPED, EXITED)
    return lost_rank(absence.rank, absence.event, absence.why, gone=gone, subject=absence.subject)


def lost_rank(rank: int, event: str, why: str | None = None, *, gone: bool = True, subject: str = "") -> Verdict:
    """Returns the verdict that a rank is gone, stopped or silent, or that it has failed and reports that itself.

    Args:
        rank: The rank.
        event: What happened to it, as the rest of a sentence that begins with its name.
        why: The cause; None: that of the subject.
        gone: False if the rank has failed and can still answer.
        subject: `DIED`, `AHEAD`, `STOPPED`, `EXITED` or `LEFT`; empty for any other event.
    """
    return LOST_RANK.found(f"rank {rank} {event}.", (rank,), subject=subject, why=why, gone=gone)


def raised(groups: Sequence[tuple[Sequence[int], str]], world_size: int, part: Sequence[int] = ()) -> Verdict:
    """Returns the verdict that ranks have raised exceptions of their own. What all ranks raised alike accuses nobody.

    Args:
        groups: Ranks that raised the same, and what, as the rest of a sentence that begins with them; at least one.
        world_size: Ranks that are compared.
        part: Which ranks these are, if they are a part of the job.

    >>> raised([((0, 1, 2), "raised KeyError: 'label'")], 3).sentence
    "all 3 ranks raised KeyError: 'label'."
    >>> raised([((1, 3), "raised KeyError: 'label'")], 4).sentence
    "ranks 1, 3 of 4 ranks raised KeyError: 'label'."
    """
    ((ranks, event), *others) = groups
    if others:
        told = [f"{names_of(each)} {what}" for each, what in groups[:_TOLD_GROUPS]]
        told += ["other ranks raised other exceptions"] if len(groups) > _TOLD_GROUPS else []
        named = [rank for each, _ in groups for rank in each]
        return LOST_RANK.found(f"{'; '.join(told)}.", named, subject=SEVERAL)
    if len(ranks) == 1:
        return lost_rank(ranks[0], event, gone=False)
    if len(ranks) < world_size:
        return LOST_RANK.found(f"{names_of(ranks)} of {count_of(world_size, 'rank')} {event}.", ranks, subject=SEVERAL)
    every = names_of(part) if part else "both ranks" if world_size == 2 else f"all {count_of(world_size, 'rank')}"
    return LOST_RANK.found(f"{every} {event}.", subject=ALIKE)


def judge_exit(divergence: Divergence, rank: int) -> Verdict | None:
    """Returns the verdict that one of two ranks has left by `sys.exit()`; None if neither has.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    logged, own = divergence.logged, divergence.own
    if logged.reason == "exited":
        return _lost_by_exit(logged, logged.rank, rank, logged.time)
    if own is not None and own.reason == "exited":
        return _lost_by_exit(own, rank, logged.rank, logged.time)
    return None


def _lost_by_exit(sync_point: SyncPoint, exited: int, other: int, proved: float) -> Verdict:
    sentence = f"rank {exited} {sync_point.in_words}, where rank {other} goes on."
    return LOST_RANK.found(sentence, (exited,), subject=EXITED, gone=True, time=proved)


def victim(rank: int, raised: str) -> Verdict:
    """Returns the verdict that a rank has only lost its connection to another one. It names nobody as lost.

    Args:
        rank: The victim.
        raised: Its exception, in words.
    """
    sentence = (
        f"rank {rank} is a victim: it raised {raised}, as happens when another rank is lost; nothing tells which."
    )
    return LOST_RANK.found(sentence, subject=VICTIM)


def lost_host(name: str, ranks: Sequence[int], seconds: float) -> Verdict:
    """Returns the verdict that a host is gone, or the way to it.

    Args:
        name: The host's name.
        ranks: The ranks on it, ascending.
        seconds: For how long it has not answered.
    """
    sentence = f"host {name} with {names_of(ranks)} does not answer."
    hosts = dict.fromkeys(ranks, name)
    return LOST_RANK.found(sentence, ranks, subject=HOST, why=_no_answer(seconds), gone=True, hosts=hosts)


def lost_store(address: str, seconds: float) -> Verdict:
    """Returns the verdict that the host of the job's store is gone, or the way to it; no rank is known to be there.

    Args:
        address: The address at which the store was reached.
        seconds: For how long it has not answered.
    """
    sentence = f"the host of the job's store ({address}) does not answer."
    return LOST_RANK.found(sentence, subject=HOST, why=_no_answer(seconds), gone=True)


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
    return LOST_RANK.found(
        f"rank {rank} has lost contact with the other ranks: {reason}.",
        (rank,),
        why=(
            "With uneven_train='stop' or uneven_eval='stop', the ranks agree through the job's store on which batches "
            "to start. Without the store, this rank could start a batch that another rank does not have."
        ),
        remedy=(
            "look at the host of the job's store (the one in MASTER_ADDR), at rank 0, and at the network between this "
            "host and that one. If ranks only start slowly, raise deadline_seconds."
        ),
    )
