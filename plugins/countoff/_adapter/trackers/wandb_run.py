"""W&B: an alert of the run. W&B mails it or posts it in Slack, as the user's settings there say."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from countoff.core.alerts.alert import Alert
from countoff.core.words import clip

__all__ = ["WandbRun", "find"]

_TITLE = 63
"""W&B takes fewer than 64 characters."""


@dataclass(frozen=True)
class WandbRun:
    """A run of W&B.

    Args:
        run: The run.
    """

    run: Any
    name = "W&B"

    def tell(self, alert: Alert) -> None:
        """Sends an alert of the run."""
        self.run.alert(title=clip(alert.title, _TITLE), text=alert.text, level="ERROR" if alert.ends else "WARN")


def find() -> list[WandbRun]:
    """Returns the run that is open, if it records anything: ranks often have a disabled one."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return [] if run is None or run.disabled else [WandbRun(run)]
