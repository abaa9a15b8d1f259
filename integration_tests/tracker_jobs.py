"""Jobs that log to TensorBoard and to W&B's offline files through their framework's own loggers, and these files."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from integration_tests.digits import own_rank
from integration_tests.lightning_jobs import quiet

Options = Mapping[str, Any] | None
_BLOCK, _BEGINS, _HEADER = 1 << 15, 7, 7
"""W&B writes records as LevelDB's log does, after 7 bytes of its own. No part of a record crosses the end of a block.

Each part follows 7 bytes: 4 of a checksum, 2 of its length, and its kind. 1 is a whole record, 4 the last part of one.
"""

Stored = dict[str, dict[str, list[Any]]]
"""All values of each name that the files of a run hold: TensorBoard's scalars, W&B's configuration and its history."""


def lightning(options: Options, directory: Path) -> None:
    """Trains with a TensorBoardLogger and a WandbLogger, 83 samples on two ranks."""
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    from integration_tests.lightning_totals_jobs import Case, fitted, whole

    loggers = [TensorBoardLogger(directory), WandbLogger(offline=True, save_dir=directory)]
    trainer = {"logger": loggers, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    fitted(Case(partial(whole, 83), [partial(whole, 20)], trainer, bar=""), options)


def transformers(options: Options, directory: Path) -> None:
    """Trains with ``report_to`` both, 70 samples on two ranks."""
    from integration_tests.trainer_jobs import Job

    args = {"report_to": ["tensorboard", "wandb"], "logging_dir": str(directory), "logging_strategy": "steps"}
    more = {"gradient_accumulation_steps": 4, "logging_steps": 1, "eval_strategy": "epoch"}
    trainer, *_ = Job(samples=70, evals=[22], args=args | more, options=options).trainer()
    trainer.train()


def composer(options: Options, directory: Path) -> None:
    """Trains with a TensorboardLogger, 66 samples on two ranks. Its WandBLogger fails with W&B from 0.19 on."""
    from composer.loggers import TensorboardLogger

    from integration_tests.composer_jobs import Job

    loggers = [TensorboardLogger(str(directory))]
    trainer = Job(even=66, evals=[2, 2], options=options).make_trainer(loggers=loggers, run_name="run")
    trainer.fit()
    trainer.close()


FRAMEWORKS: dict[str, Callable[[Options, Path], None]] = {
    "lightning": lightning,
    "transformers": transformers,
    "composer": composer,
}


def stored_by(framework: str, options: Sequence[Options]) -> list[Stored]:
    """Trains with each of the options of countoff; returns what rank 0 has stored."""
    import wandb  # pyright: ignore[reportMissingImports]

    quiet()
    found: list[Stored] = []
    for number, each in enumerate(options):
        directory = Path(f"run{number}").resolve()
        directory.mkdir(exist_ok=True)
        os.environ["WANDB_DIR"] = str(directory)
        FRAMEWORKS[framework](each, directory)
        wandb.finish()
        wandb.teardown()  # it reads its directory from the environment once
        if own_rank() == 0:
            found.append(read(directory))
    return found


def read(directory: Path) -> Stored:
    """Returns what the files below a directory hold."""
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    found: Any = {"scalars": defaultdict(list), "config": defaultdict(list), "history": defaultdict(list)}
    for path in directory.rglob("events.out.tfevents*"):
        events: Any = EventAccumulator(str(path)).Reload()
        for name in events.Tags()["scalars"]:
            found["scalars"][name] += [each.value for each in events.Scalars(name)]
    for path in directory.rglob("*.wandb"):
        for record in _records(path.read_bytes()):
            for part, items in (("config", record.config.update), ("history", record.history.item)):
                for item in items:
                    found[part][item.key or "/".join(item.nested_key)].append(json.loads(item.value_json))
    return {part: dict(names) for part, names in found.items()}


def _records(written: bytes) -> Iterator[Any]:
    """Yields the records of one of W&B's offline files."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    place, parts = _BEGINS, b""
    while place + _HEADER <= len(written):
        if _BLOCK - place % _BLOCK < _HEADER:  # what is left of a block has no room for a part
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = int.from_bytes(written[place + 4 : place + 6], "little"), written[place + 6]
        place += _HEADER + length
        parts += written[place - length : place]
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""
