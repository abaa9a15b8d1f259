"""Actions: what the protocol asks the runtime to do. They leave `State` through its outbox, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from countoff.core.verdict import Verdict


@dataclass(frozen=True)
class WriteEntry:
    """Append an entry to the log, unless the log holds its content already.

    Attributes:
        entry: The entry, as JSON types.
    """

    entry: dict[str, Any]


@dataclass(frozen=True)
class PrintWarning:
    """Print a warning on this rank.

    Attributes:
        verdict: The warning.
    """

    verdict: Verdict


Action = WriteEntry | PrintWarning
