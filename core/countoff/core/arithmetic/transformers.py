"""The totals that the transformers Trainer computes before training, from the length that its loader reports.

They are right if that length is right, with one exception: the Trainer multiplies the batch size by the number of
processes even if ``split_batches`` cuts each batch into one piece per process.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from countoff.core.arithmetic.batches import batches_of_samples, check_count

__all__ = ["TrainerTotals", "trainer_totals"]


@dataclass(frozen=True)
class TrainerTotals:
    """The result of ``Trainer.set_initial_training_values``, under its names, and the true batch size.

    Attributes:
        num_train_epochs: Largest number of epochs that the Trainer starts.
        num_update_steps_per_epoch: Optimizer steps per complete epoch; those of the run if the loader has no length.
        num_examples: Samples that the Trainer logs as ``Num examples``.
        num_train_samples: Samples from which the Trainer computes ``train_samples_per_second``: a product of the
            numbers above, not a count.
        steps_in_epoch: Batches per process after which the Trainer ends an epoch; a cap.
        max_steps: Optimizer steps of the run.
        total_train_batch_size: Samples per optimizer step over all processes, as the Trainer logs them.
        true_train_batch_size: Samples per full optimizer step over all processes.
    """

    num_train_epochs: int
    num_update_steps_per_epoch: int
    num_examples: int
    num_train_samples: int | float
    steps_in_epoch: int
    max_steps: int
    total_train_batch_size: int
    true_train_batch_size: int


def trainer_totals(
    reported_batches: int | None,
    *,
    dataset_size: int | None,
    batch_size: int,
    dp_degree: int,
    gradient_accumulation_steps: int,
    num_train_epochs: int | float,
    max_steps: int,
    split_batches: bool = False,
) -> TrainerTotals:
    """Returns the totals that the Trainer computes from its arguments and the length of its prepared train loader.

    Sources: transformers 5.23.0, ``trainer.py:2487`` (``set_initial_training_values``), ``:993`` (``num_examples``) and
    ``:2557`` (``get_total_train_batch_size``); in 4.57.6 the same numbers in another order, ``trainer.py:5661``.
    Sequence parallelism, for which 5.x multiplies the length first, is left out.

    Args:
        reported_batches: ``len()`` of the prepared train loader, at least 0; None if it has none.
        dataset_size: ``len(dataset)``, at least 0; None if it has none.
        batch_size: ``per_device_train_batch_size`` times the devices per process, at least 1.
        dp_degree: Processes that read different data, at least 1.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        num_train_epochs: The Trainer's argument, also a fraction, at least 0; ignored if max_steps is positive.
        max_steps: The Trainer's argument; -1 for none.
        split_batches: Whether Accelerate splits every batch among the processes.

    Raises:
        ValueError: If a count is outside its domain; or, as in the Trainer, if the loader reports no batches and
            max_steps is not positive.

    Example:
        >>> totals = trainer_totals(13, dataset_size=101, batch_size=4, dp_degree=2, gradient_accumulation_steps=4,
        ...     num_train_epochs=1.5, max_steps=-1)
        >>> totals.num_update_steps_per_epoch, totals.max_steps, totals.total_train_batch_size
        (4, 6, 32)
    """
    check_count("batch_size", batch_size, minimum=1)
    check_count("dp_degree", dp_degree, minimum=1)
    check_count("gradient_accumulation_steps", gradient_accumulation_steps, minimum=1)
    check_count("max_steps", max_steps, minimum=-1)
    for name, count in (("reported_batches", reported_batches), ("dataset_size", dataset_size)):
        if count is not None:
            check_count(name, count, minimum=0)
    if num_train_epochs < 0:
        raise ValueError(f"num_train_epochs must be at least 0, got {num_train_epochs}")
    total = batch_size * gradient_accumulation_steps * dp_degree
    true = batch_size * gradient_accumulation_steps if split_batches else total
    if not reported_batches:
        if max_steps <= 0:
            raise ValueError(
                f"max_steps must be positive, as in the Trainer, if its train loader reports "
                f"{'no length' if reported_batches is None else 'no batch'}, got {max_steps}"
            )
        batches = max_steps * gradient_accumulation_steps if reported_batches is None else 0
        samples = max_steps * total
        return TrainerTotals(sys.maxsize, max_steps, samples, samples, batches, max_steps, total, true)
    steps = batches_of_samples(reported_batches, batch_size=gradient_accumulation_steps, drop_last=False)
    examples = reported_batches * batch_size if dataset_size is None else dataset_size
    if max_steps > 0:
        epochs, samples = -(-max_steps // steps), max_steps * total
    else:
        epochs, samples = math.ceil(num_train_epochs), examples * num_train_epochs
        max_steps = math.ceil(num_train_epochs * steps) if max_steps < 0 else max_steps
    return TrainerTotals(epochs, steps, examples, samples, reported_batches, max_steps, total, true)
