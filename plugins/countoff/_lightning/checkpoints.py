"""The record in Lightning's checkpoints of how far a run has come, and where Lightning goes on after it has loaded one.

It stands beside Lightning's own keys. A state in `callbacks` would make Lightning warn where countoff is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.checkpoints import without_data
from countoff._adapter.even_loaders import saves_state
from countoff.core import Guard
from countoff.core.checks.resume import Restored

__all__ = ["KEY", "record_of", "restore"]

KEY = "countoff"


def record_of(trainer: Any, guard: Guard, batch: Any) -> dict[str, Any]:
    """Returns this rank's record for a checkpoint that Lightning writes.

    Args:
        trainer: Lightning's Trainer.
        guard: The guard of the fit.
        batch: The batch that is being trained on; None if that is not at hand.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    begun, restored = progress.current.ready, _restored_batches(progress)
    length = trainer.num_training_batches
    left = None if math.isinf(length) else max(0, int(length) - restored)
    record = guard.resumes.record(
        batch if restored == begun else None, left=0 if progress.is_last_batch else left, steps=trainer.global_step
    )
    return {**record, "batches": restored} if record["batches"] == begun else record


def restore(trainer: Any, guard: Guard, record: Any) -> None:
    """Takes the record of the checkpoint that Lightning has loaded for a fit that has begun.

    Args:
        trainer: Lightning's Trainer.
        guard: The guard of the fit.
        record: What stood in the checkpoint.
    """
    if isinstance(record, Mapping):
        written = cast("Mapping[str, Any]", record)
        # With max_steps and no max_epochs, Lightning restores the end of an epoch as that epoch, and not as the next.
        if written.get("batches") == 0 and written.get("epoch") == trainer.current_epoch + 1:
            record = {**without_data(written), "epoch": trainer.current_epoch, "left": None, "order": None}
    begins_again = _begins_again(trainer.train_dataloader)
    if not begins_again and isinstance(record, Mapping) and record.get("dp_degree") != guard.data.dp_degree:
        record = without_data(record)  # whoever restores its position may count in other numbers
    guard.resumes.restore(record, Restored(steps=trainer.global_step, samples=0 if begins_again else None))


def _begins_again(loader: Any) -> bool:
    """Whether a loader is sure to begin each pass with the epoch's first batch, also where Lightning has resumed."""
    return type(loader) is DataLoader and type(loader.sampler) is DistributedSampler and not saves_state(loader)


def _restored_batches(progress: Any) -> int:
    """Returns the batches of the epoch that Lightning takes for done when it restores this progress.

    It does again a batch in which an exception was raised, but not one after which the checkpoint was written.
    """
    total = progress.total
    after_training = total.ready == total.started == total.processed
    return progress.current.ready if after_training else progress.current.completed
