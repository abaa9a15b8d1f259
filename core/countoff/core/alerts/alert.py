"""An alert: a verdict in the words that a person reads who does not see the job's output."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from typing import Protocol

from countoff.core.verdict import Verdict
from countoff.core.words import clip, count_of, plain

__all__ = ["Alert", "NotTold", "Place"]

_JOBS = {"SLURM_JOB_ID": "Slurm job", "TORCHELASTIC_RUN_ID": "torchrun", "KUBEFLOW_TRAINJOB_NAME": "TrainJob"}
"""Variables by which a launcher or a scheduler names the job, and what it calls that."""
_TITLE = 120
"""Characters of a title: mail, chats and phones cut longer ones."""


@dataclass(frozen=True)
class Alert:
    """One finding, for one place.

    Attributes:
        verdict: What was found.
        ends: Whether it ends the job.
        files: Paths of what the user may look at: the verdict's file, the trace.
    """

    verdict: Verdict
    ends: bool
    files: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The kind and what has happened, in one line.

        >>> Alert(Verdict("LostRank", "rank 2 is gone."), ends=True).title
        'countoff: LostRank: rank 2 is gone.'
        """
        return clip(f"countoff: {self.verdict.headline}", _TITLE)

    @property
    def text(self) -> str:
        """What has happened, why, what to do, of which job this is, and where its files are; some lines."""
        verdict = self.verdict
        lines = [verdict.headline, "countoff ends the job." if self.ends else "This is a warning: the job goes on."]
        lines += [*verdict.reasons, f"job: {job(verdict.world_size)}"]
        if self.files:
            lines.append(f"files: {', '.join(self.files)}")
        return "\n".join(plain(line) for line in lines)


def job(world_size: int) -> str:
    """Which job this is, as far as its processes show it. Its arguments may hold secrets, so they are left out.

    Args:
        world_size: Its ranks.
    """
    script = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
    ids = [(what, os.environ.get(name, "")) for name, what in _JOBS.items()]
    named = [f"{what} {number}" for what, number in ids if number not in ("", "none")]  # torchrun's default is none
    return ", ".join([script, *([count_of(world_size, "rank")] if world_size else []), *named, f"on {platform.node()}"])


class NotTold(Exception):
    """An alert was not taken somewhere. The message is one line without a secret: it stands in the debug log."""


class Place(Protocol):
    """Where an alert is told, such as the run that a tracker has open."""

    @property
    def name(self) -> str:
        """What it is, without any secret: it stands in the debug log."""
        ...

    def tell(self, alert: Alert) -> None:
        """Tells an alert there. Called on a thread of its own, which nobody waits for longer than a few seconds.

        Whatever it raises becomes one line of the debug log: `NotTold` by its text, anything else by its type alone,
        because its text may hold an address.
        """
        ...
