"""Entry points of Lightning: with ``COUNTOFF=1`` every Trainer gets the callback without a line of code.

An exception or a None from a factory breaks every Trainer on the machine, so a factory imports nothing and returns an
empty list unless it is enabled.
"""

from __future__ import annotations

from typing import Any

from countoff.core.flag import turned_on


def lightning_callbacks() -> list[Any]:
    """Returns the callbacks for ``lightning.pytorch.Trainer``."""
    if not turned_on():
        return []
    from countoff.lightning import Countoff

    return [Countoff()]


def pytorch_lightning_callbacks() -> list[Any]:
    """Returns the callbacks for ``pytorch_lightning.Trainer``."""
    if not turned_on():
        return []
    from countoff.pytorch_lightning import Countoff

    return [Countoff()]
