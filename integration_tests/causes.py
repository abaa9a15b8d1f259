"""Two faults at once in the ranks' plans: is the cause named first, and the other one too? Prints a table.

    python -m integration_tests.causes

Rank 1 of two has both faults. Where nothing in a framework stands for a fault, the pair is left out there.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff.core import DivergenceError
from integration_tests.digits import digits, own_rank
from integration_tests.harness import run_ranks

FAULTS = {
    "rows": "the train dataset has",
    "seed": "the sampler's seed is",
    "batch size": "batch_size is",
    "limits": "limit_train_batches is|batches_per_epoch is",
    "interval": "val_check_interval is|eval_steps is|eval_interval .* is",
    "accumulation": "gradient_accumulation_steps is",
    "epochs": "max_epochs is",
    "schedule": "made for|learning rate",
}
"""By fault: how a message names it. What follows from what is in this order."""
PAIRS = (
    ("rows", "batch size"),
    ("rows", "schedule"),
    ("seed", "batch size"),
    ("seed", "accumulation"),
    ("batch size", "accumulation"),
    ("batch size", "limits"),
    ("limits", "interval"),
    ("interval", "epochs"),
    ("accumulation", "epochs"),
    ("epochs", "schedule"),
    ("rows", "accumulation"),
    ("interval", "schedule"),
)


@dataclass(frozen=True)
class Plan:
    """What a rank begins with."""

    rows: int = 96
    seed: int = 0
    batch_size: int = 8
    limit: int = 5
    interval: int = 2
    accumulation: int = 1
    epochs: int = 2
    calls: int = 20

    @classmethod
    def with_faults(cls, *faults: str) -> Plan:
        """The plan of a rank with these faults."""
        odd = {
            "rows": {"rows": 80},
            "seed": {"seed": 1},
            "batch size": {"batch_size": 4},
            "limits": {"limit": 4},
            "interval": {"interval": 3},
            "accumulation": {"accumulation": 2},
            "epochs": {"epochs": 3},
            "schedule": {"calls": 25},
        }
        return cls(**{key: value for fault in faults for key, value in odd[fault].items()})

    def dataset(self) -> TensorDataset:
        images, labels = digits()
        return TensorDataset(images[: self.rows], labels[: self.rows])

    def loader(self, *, sampled: bool = True) -> Any:
        dataset = self.dataset()
        sampler = DistributedSampler(dataset, seed=self.seed) if sampled else None
        return DataLoader(dataset, batch_size=self.batch_size, sampler=sampler)

    def layer(self) -> torch.nn.Module:
        torch.manual_seed(7)
        return torch.nn.Linear(64, 10)

    def optimizer(self, model: Any) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=self.calls)


def plain(plan: Plan) -> None:
    from countoff.torch import Countoff

    model = torch.nn.parallel.DistributedDataParallel(plan.layer())
    optimizer, scheduler = plan.optimizer(model)
    countoff = Countoff(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        epochs=plan.epochs,
        gradient_accumulation_steps=plan.accumulation,
    )
    next(countoff.train(plan.loader()))


def accelerated(plan: Plan) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from countoff.accelerate import Countoff

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulation)
    model = plan.layer()
    optimizer, scheduler = plan.optimizer(model)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, plan.loader(sampled=False))
    next(Countoff(accelerator, epochs=plan.epochs).train(loader))


def lightning(plan: Plan) -> None:
    import lightning.pytorch as pl

    from countoff.lightning import Countoff
    from integration_tests.lightning_jobs import Classifier, quiet

    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer, scheduler = plan.optimizer(self)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    quiet()
    model: Any = Scheduled()
    model.layer = plan.layer()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=plan.epochs,
        limit_train_batches=plan.limit,
        val_check_interval=plan.interval,
        accumulate_grad_batches=plan.accumulation,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Countoff()],
    )
    trainer.fit(model, plan.loader(), Plan().loader())


def transformed(plan: Plan) -> None:
    from transformers import Trainer, TrainingArguments

    from countoff.transformers import Countoff
    from integration_tests.trainer_jobs import Linear, collate

    model: Any = Linear()
    model.layer = plan.layer()
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=plan.batch_size,
        num_train_epochs=plan.epochs,
        gradient_accumulation_steps=plan.accumulation,
        eval_strategy="steps",
        eval_steps=plan.interval,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    optimizers = plan.optimizer(model)
    data = plan.dataset()
    Trainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collate,
        optimizers=optimizers,
        callbacks=[Countoff()],
    ).train()


def composed(plan: Plan) -> None:
    from composer import Trainer

    from countoff.composer import Countoff
    from integration_tests.composer_parts import Classifier, start

    start()
    model: Any = Classifier()
    model.layer = plan.layer()
    optimizer, scheduler = plan.optimizer(model)
    Trainer(
        model=model,
        train_dataloader=plan.loader(),
        eval_dataloader=Plan().loader(),
        eval_interval=f"{plan.interval - 1}ep",
        optimizers=optimizer,
        schedulers=scheduler,
        step_schedulers_every_batch=True,
        max_duration=f"{plan.epochs}ep",
        device="cpu",
        progress_bar=False,
        callbacks=[Countoff()],
    ).fit()


FRAMEWORKS: dict[str, tuple[Callable[[Plan], None], frozenset[str]]] = {
    "torch": (plain, frozenset({"limits", "interval"})),
    "accelerate": (accelerated, frozenset({"limits", "interval", "seed"})),
    "lightning": (lightning, frozenset()),
    "transformers": (transformed, frozenset({"limits", "seed"})),
    "composer": (composed, frozenset({"limits", "accumulation", "schedule"})),
}
"""By framework: a fit, and the faults for which it has nothing, or that are not known before the first step."""


def pairs_of(framework: str) -> Iterator[tuple[str, str]]:
    """The pairs that can be in a framework."""
    for pair in PAIRS:
        if not FRAMEWORKS[framework][1] & set(pair):
            yield pair


def run(framework: str) -> list[tuple[str, str]]:
    """What is found on this rank for each pair: the sentence, and all that is said."""
    dist.init_process_group("gloo")
    found: list[tuple[str, str]] = []
    for pair in pairs_of(framework):
        said, written = [], sys.stderr.write
        sys.stderr.write = lambda text, said=said: len(said.append(text) or text)  # type: ignore[method-assign]
        verdict = None
        try:
            FRAMEWORKS[framework][0](Plan.with_faults(*(pair if own_rank() == 1 else ())))
        except DivergenceError as error:
            verdict = error.verdict
        finally:
            sys.stderr.write = written  # type: ignore[method-assign]
        found.append(("" if verdict is None else verdict.sentence, "".join(said)))
        dist.barrier()
    return found


def names(pair: tuple[str, str], sentence: str, said: str) -> bool:
    """Whether the cause is in the sentence, and the other fault in what is said."""
    cause, other = (FAULTS[fault] for fault in pair)
    return re.search(cause, sentence) is not None and re.search(other, said) is not None


@dataclass(frozen=True)
class Outcome:
    """What a framework's job with a pair of faults said first, and whether both are named, the cause first."""

    pair: tuple[str, str]
    sentence: str
    right: bool


def outcomes(framework: str) -> list[Outcome]:
    """Runs all pairs of a framework."""
    with tempfile.TemporaryDirectory() as directory:
        first, _ = run_ranks(run, 2, framework, directory=Path(directory), deadline_seconds=180)
    found = zip(pairs_of(framework), first.value, strict=True)
    return [Outcome(pair, sentence, names(pair, sentence, said)) for pair, (sentence, said) in found]


def main() -> int:
    """Prints the table; returns 1 if a pair is not named as it should be."""
    wrong = 0
    print("| framework | faults | the sentence | both named, the cause first |\n|---|---|---|---|")
    for framework in FRAMEWORKS:
        for each in outcomes(framework):
            wrong += not each.right
            right = "yes" if each.right else "NO"
            print(f"| {framework} | {', '.join(each.pair)} | {each.sentence} | {right} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
