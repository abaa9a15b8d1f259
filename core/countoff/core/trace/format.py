"""The format of the trace: its files, the kinds of its lines, and the keys of each kind.

Each rank has a file of its own, to which it appends one JSON object per line. Keys are short, because a healthy rank
writes less than 1 KiB per minute. A new process of the rank appends to the file that is there: a line `begin` starts
each fit. A file that has passed its limit is renamed, and a new one begins.
"""

from __future__ import annotations

import re
from typing import NamedTuple

INCIDENT_FILE = "incident.json"
"""What a verdict leaves behind, beside the files of ranks: the keys of the verdict file, and those below."""
COUNTED, STACKS, ENVIRONMENT, WRITTEN_BY = "counted", "stacks", "environment", "written_by"
"""Keys of the incident: the last counts of each rank, where their main threads were, variables, who has written it."""
FLIGHT_RECORDER_FILE = "nccl_trace_rank_{}"
"""What NCCL's flight recorder has dumped for a rank, under the name that torch's own tools expect."""
TICK_SECONDS = 5.0
"""A rank writes a line `tick` at most as often."""
SILENT_SECONDS = 3 * TICK_SECONDS
"""A rank in a span that has written nothing for so long is silent: ticks do not wait for batches."""
PAUSE_SECONDS = 1.0
"""A pause is longer than that."""

COMPARED_PLAN = (
    "batches_per_epoch",
    "proven_batches_per_epoch",
    "batches_between_evaluations",
    "batch_size",
    "gradient_accumulation_steps",
    "position",
    "dp_degree",
)
COMPARED_LIMITS = ("max_epochs", "max_steps")
COMPARED_SETTINGS = ("uneven_train", "uneven_eval", "weights_every")
"""Values of `plan` and of `settings` in which a difference between ranks is a `PlanMismatch`. A limit that a rank does
not have is a value too; another value that it does not have is not known."""


class Keys(NamedTuple):
    """The keys of one kind of line, besides `k` (the kind), `t` (the time) and `g` (the number of the fit, if not 0).

    Attributes:
        required: Those of every line.
        optional: Those that a line has only where there is something to say.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


LINES: dict[str, Keys] = {
    # A fit begins: the number of this format, the rank and the ranks in the job, what the launcher calls this run
    # (as in the verdict file), versions, settings that are not the defaults, and what is known of the fit; `before`
    # is the number of optimizer steps before the checkpoint from which it resumes, `part` has the ranks that are
    # compared, if they are a part of the job.
    "begin": Keys(
        ("v", "rank", "world", "host", "pid", "run", "versions", "settings", "plan"),
        ("framework", "before", "part"),
    ),
    # How far this host's clock is ahead of rank 0's, in seconds, and by how much that may be wrong: about once a
    # minute, in the file of the lowest rank of each host but rank 0's. The last one holds for all ranks of the
    # host.
    "clock": Keys(("ahead", "error")),
    # A span opens: whether it is an evaluation; `at` is the number of batches before a resume; the learning rates,
    # where they have changed, and the optimizer steps of the fit at which they are in force.
    "open": Keys(("span",), ("eval", "at", "s", "lr")),
    # Every 5 s within a span: batches of the innermost span, optimizer steps of the fit, seconds waited for the
    # loader in the span, and the learning rates where they have changed.
    "tick": Keys(("b", "s", "l"), ("lr",)),
    # No batch began for `s` seconds from `t` on: longer than a second, and than three usual batches. `in` says
    # where the main thread was ("loader", "collective" or "code"), `at` at which lines of the user's own code.
    "pause": Keys(("s", "in", "at")),
    # A span closes; `why` is its reason ("exhausted", "stopped" or "exited"), the rest as for a tick, and what its
    # loader had left.
    "close": Keys(("span", "why", "b", "s", "l"), ("unused", "lr")),
    # A warning, as this rank has printed it.
    "warning": Keys(("verdict",)),
    # Rank 0 knows when each rank has closed a span: seconds from the first to the last, and which were the last.
    "roll": Keys(("span", "spread", "last")),
    # Rank 0 knows that all ranks have read each of so many samples once in a train epoch; how many of them once
    # more, and how many not at all, as planned.
    "once": Keys(("span", "rows"), ("repeated", "dropped")),
    # The true totals and those that the framework reports, by metric, and the optimizer steps after which the
    # learning rate's schedule ends; when they are known or change. On rank 0, and on every rank after a
    # `PlanMismatch`.
    "totals": Keys(("true", "reported"), ("horizon",)),
    # Where the main thread was, at a stall or a verdict: as `in` of a pause, and its frames, the innermost one
    # first.
    "stacks": Keys(("state", "frames")),
    # The verdict that has ended the fit, or with `on_divergence="warn"` only the comparison.
    "verdict": Keys(("verdict",)),
    # Lines were dropped, because the file system was slower than they came.
    "dropped": Keys(("lines",)),
    # The fit has ended, and how: "finished", "verdict", "failed", "signal" (SIGTERM) or "closed" (left without its
    # end); `what` is the exception or the signal. No line: its process was killed, or still runs.
    "end": Keys(("how",), ("what",)),
}
"""The kinds of lines and their keys. A reader skips a kind that it does not know."""

_NAME = re.compile(r"rank-(\d{5,9})(?:\.(\d{1,9}))?\.jsonl", re.ASCII)


def file_name(rank: int, number: int | None = None) -> str:
    """The name of a rank's file.

    Args:
        rank: The rank.
        number: Which of the files that have passed their limit, from 1; the higher the newer. None: the last file.

    >>> file_name(3), file_name(3, 1)
    ('rank-00003.jsonl', 'rank-00003.1.jsonl')
    """
    return f"rank-{rank:05d}.jsonl" if number is None else f"rank-{rank:05d}.{number}.jsonl"


def parse_name(name: str) -> tuple[int, int | None] | None:
    """The rank and the number of a file, as `file_name` takes them; None if it is no file of a trace.

    >>> parse_name("rank-00003.1.jsonl"), parse_name("rank-00003.jsonl"), parse_name("notes.txt")
    ((3, 1), (3, None), None)
    """
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), None if found[2] is None else int(found[2]))
