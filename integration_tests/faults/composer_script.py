"""Composer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from composer.core import Callback, Evaluator

from integration_tests.composer_jobs import Job
from integration_tests.faults.conduct import Conduct


class Acts(Callback):
    """Does in Composer's loop what the conduct says."""

    def __init__(self, conduct: Conduct) -> None:
        self._conduct = conduct

    def batch_end(self, state: Any, logger: Any) -> None:
        epoch, number = int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch) - 1
        self._conduct.after_batch(epoch, number)
        if self._conduct.breaks_after(number):
            state.stop_training()

    def epoch_end(self, state: Any, logger: Any) -> None:
        self._conduct.after_epoch(int(state.timestamp.epoch) - 1)
        dist.barrier()


def train(conduct: Conduct) -> None:
    """Trains one rank."""
    conduct = replace(conduct, sized=True)  # Composer counts its epochs by the length
    evals = conduct.eval_loader()
    trainer = Job(options=conduct.options).make_trainer(
        train_dataloader=conduct.train_loader(),
        eval_dataloader=None if evals is None else Evaluator(label="digits", dataloader=evals),
        eval_interval=f"{conduct.evaluates_at + 1}ba" if conduct.fault == "F8" else "1ep",
        max_duration=f"{conduct.epochs}ep",
        callbacks=[Acts(conduct)],
    )
    trainer.fit()
    trainer.close()
