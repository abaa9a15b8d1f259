"""A finding, as whoever is told of it gets it: in the words of a person who does not see the job's output."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from typing import Any, Literal

from countoff.core.messages import clip, count_of, plain
from countoff.core.verdict import GOES_ON, Verdict

__all__ = ["Finding"]

_JOBS = {"SLURM_JOB_ID": "Slurm job", "TORCHELASTIC_RUN_ID": "torchrun"}
"""Variables by which a launcher or a scheduler names the job, and what it calls that."""
_TITLE = 120
"""Characters of a title: mail, chats and phones cut longer ones."""


@dataclass(frozen=True)
class Finding:
    """A verdict and its level, as `on_finding` gets it.

    Attributes:
        verdict: All that is known of it.
        level: ``"error"`` if it ends the job, ``"warning"`` if the job goes on.
        files: Paths of what the user may look at: the verdict's file, the trace.
    """

    verdict: Verdict
    level: Literal["error", "warning"]
    files: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of verdict, such as ``"UnevenBatches"``."""
        return self.verdict.kind

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it names, the one out of step first."""
        return self.verdict.ranks

    @property
    def title(self) -> str:
        """The kind and what has happened, in one line.

        >>> Finding(Verdict("LostRank", "rank 2 is gone."), "error").title
        'countoff: LostRank: rank 2 is gone.'
        """
        return clip(f"countoff: {self.verdict.headline}", _TITLE)

    @property
    def message(self) -> str:
        """What has happened, why, what to do, of which job this is, and where its files are; some lines."""
        verdict = self.verdict
        ends = self.level == "error"
        lines = [verdict.headline, "countoff ends the job." if ends else GOES_ON]
        lines += [*verdict.reasons, f"job: {_job(verdict.world_size)}"]
        if self.files:
            lines.append(f"files: {', '.join(self.files)}")
        return "\n".join(plain(line) for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON types: its level, and the keys of a verdict that docs/schedulers.md describes.

        >>> Finding(Verdict("LostRank", "rank 2 is gone.", (2,)), "error").to_dict()["ranks"]
        [2]
        """
        return {"level": self.level, **self.verdict.to_dict()}


def _job(world_size: int) -> str:
    """Which job this is, as far as its processes show it. Its arguments may hold secrets, so they are left out.

    Args:
        world_size: Its ranks.
    """
    script = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
    ids = [(what, os.environ.get(name, "")) for name, what in _JOBS.items()]
    named = [f"{what} {number}" for what, number in ids if number not in ("", "none")]  # torchrun's default is none
    return ", ".join([script, *([count_of(world_size, "rank")] if world_size else []), *named, f"on {platform.node()}"])
