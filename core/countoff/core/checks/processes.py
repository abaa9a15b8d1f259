"""Do the processes that were launched together train together? `NotDistributed`. Adapters look for it."""

from __future__ import annotations

from countoff.core.verdict import VerdictKind

__all__ = ["NOT_DISTRIBUTED"]

NOT_DISTRIBUTED = VerdictKind(
    "NotDistributed",
    "several processes were launched, but the framework treats each as the only one",
    ends=False,
)
