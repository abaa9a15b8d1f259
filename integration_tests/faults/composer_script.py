"""Composer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from composer.core import Callback, Evaluator

from integration_tests import composer_resumes
from integration_tests.composer_jobs import Job
from integration_tests.digits import BATCH_SIZE
from integration_tests.faults.rank_behavior import RankBehavior, world_size


class Acts(Callback):
    """Applies the rank's behavior in Composer's loop."""

    def __init__(self, behavior: RankBehavior) -> None:
        self._behavior = behavior

    def batch_end(self, state: Any, logger: Any) -> None:
        epoch, number = int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch) - 1
        self._behavior.after_batch(epoch, number, state.model)
        if self._behavior.breaks_after(number):
            state.stop_training()

    def epoch_end(self, state: Any, logger: Any) -> None:
        self._behavior.after_epoch(int(state.timestamp.epoch) - 1)
        dist.barrier()


def train(behavior: RankBehavior) -> None:
    """Trains one rank."""
    if behavior.resumes:
        resume_wrongly(behavior)
        return
    behavior = replace(behavior, sized=True)  # Composer counts its epochs by the length
    evals = behavior.eval_loader()
    trainer = Job(options=behavior.options).make_trainer(
        train_dataloader=behavior.train_loader(),
        eval_dataloader=None if evals is None else Evaluator(label="digits", dataloader=evals),
        eval_interval=f"{behavior.evaluates_at + 1}ba" if behavior.fault == "F8" else "1ep",
        max_duration=f"{behavior.epochs}ep",
        callbacks=[Acts(behavior)],
    )
    behavior.before_fit(trainer.state.model)
    trainer.fit()
    trainer.close()


def resume_wrongly(behavior: RankBehavior) -> None:
    """Writes a checkpoint in the middle of an epoch, and goes on elsewhere."""
    how: dict[str, Any] = {
        "F21": {"loader": "from the start"},
        "F22": {"moves": 1},
        "F23": {"then": {"load_ignore_keys": ["state/schedulers*"]}, "batch": 10},
    }[behavior.fault]
    job = Job(even=composer_resumes.BATCHES * BATCH_SIZE * world_size(), options=behavior.options)
    runs = [composer_resumes.Resume(job, **how)]
    composer_resumes.write(runs, "saved")
    composer_resumes.resume(runs, "saved")
