"""Do the batches of the loop come from the loader that is watched? `UnseenLoader`. Adapters look for it."""

from __future__ import annotations

from countoff.core.verdict import VerdictKind

__all__ = ["UNSEEN_LOADER"]

UNSEEN_LOADER = VerdictKind(
    "UnseenLoader",
    "for 64 optimizer steps, no batch has come from the attached loader: the loop iterates another one. With "
    "`uneven_train`, also where a shorter fit has counted no batch at all",
    ends=False,
)
