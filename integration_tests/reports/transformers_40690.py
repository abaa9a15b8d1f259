"""A Trainer that resumes in epoch 1 skips batches of the order of epoch 0, and goes on with that order."""

from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
from transformers import Trainer, TrainingArguments

from countoff.transformers import Countoff
from integration_tests.trainer_jobs import Digits, Linear, collate


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """What the Trainer of the report gets from Accelerate: a loader that begins with epoch 0."""
    skipped: Any = accelerate.skip_first_batches(loader, num_batches)
    skipped.iteration = 0
    return skipped


def train(wrong: bool, stage: int, folder: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2 + stage,
        max_steps=60 if stage else 28,
        save_strategy="steps",
        save_steps=28,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        optim="sgd",
        lr_scheduler_type="constant",
        use_cpu=True,
    )
    trainer = Trainer(Linear(), arguments, train_dataset=Digits(160), data_collator=collate, callbacks=[Countoff()])
    skip = skip_first_batches if wrong else accelerate.skip_first_batches
    with mock.patch("transformers.trainer.skip_first_batches", skip):
        trainer.train(resume_from_checkpoint=stage == 1)
