"""What adapters share about records in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

__all__ = ["without_data"]


def without_data(record: Any) -> Any:
    """Returns a record without the batches that it knows, for a run that repeats data because the user asked for it.

    Args:
        record: What stood in the checkpoint; whatever is no record stays as it is.
    """
    if not isinstance(record, Mapping):
        return record
    return {**cast("Mapping[str, Any]", record), "batches": None, "prints": [], "last": ""}
