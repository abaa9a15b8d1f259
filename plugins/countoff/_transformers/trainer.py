"""The transformers Trainer's own objects: facts, warnings about its settings, and where its batches are observed."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from countoff._accelerate.backward import count_backward_passes
from countoff._accelerate.loader_facts import loader_facts
from countoff._accelerate.loaders import (
    even_prepared,
    follow,
    holds_prepared,
    is_prepared,
    same_source,
    skipped_batches,
)
from countoff._accelerate.process import process_remedies
from countoff._accelerate.streams import watch_stream
from countoff._adapter import torch_facts
from countoff._adapter.handle import Attached
from countoff._adapter.remedies import data_remedies, uneven_remedies
from countoff._adapter.schedule_watch import Schedule
from countoff.core import FitPlan, LoaderFacts, Settings, Verdict
from countoff.core.checks.horizon import Stepping
from countoff.core.checks.resume import AGAIN, POSITION, RATE
from countoff.core.checks.totals import WRONG_TOTAL
from countoff.core.verdict import Remedies

__all__ = [
    "REMEDIES",
    "STEPPING",
    "named_evaluation",
    "observe",
    "plan_of",
    "schedules",
    "total_warning",
    "train_facts",
]

_log = logging.getLogger("countoff")

REMEDIES: Remedies = {
    **process_remedies(on_cpus="TrainingArguments(use_cpu=True)"),
    "UnevenBatches": uneven_remedies(
        train=(
            "give every rank as many batches. If the dataset has a length: accelerator_config={'even_batches': True}, "
            "the default, and the same dataset on every rank; a get_train_dataloader() of your own must return what "
            "self.accelerator.prepare() returns. If it is iterable, let it end after as many batches on every rank; "
            "what is beyond them is not read."
        ),
        option="Countoff({})",
        together=(
            "no callback that sets control.should_evaluate on one rank. The Trainer gathers each batch of all ranks"
        ),
        alone=False,
    ),
    "PlanMismatch": (
        "give every rank the same dataset, and let the Trainer make the ranks even: "
        "TrainingArguments(accelerator_config={'even_batches': True}), the default. A get_train_dataloader() of your "
        "own must return what self.accelerator.prepare() returns. If the dataset is iterable: the same len() on every "
        "rank, or no len() and TrainingArguments(max_steps=N)."
    ),
    "StepMismatch": "let all ranks decide alike: no callback that sets control.should_training_stop on one rank.",
    "ResumeMismatch": {
        POSITION: (
            "resume with as many processes, and the per_device_train_batch_size and gradient_accumulation_steps of the "
            "checkpoint: the Trainer skips by its number of steps. Leave trainer_state.json as it was written."
        ),
        AGAIN: (
            "let the Trainer skip what was trained on: trainer.train(resume_from_checkpoint=…), and a data set that "
            "begins with its first sample in every pass."
        ),
        RATE: (
            "keep scheduler.pt and optimizer.pt in the checkpoint, and give the Trainer no scheduler that was stepped "
            "before. If you have begun a new schedule on purpose, ignore this."
        ),
    },
    "WrongLength": "make len() of the dataset what it yields; the Trainer's epochs and max_steps follow from it.",
    "WrongTotal": (
        "leave split_batches off: per_device_train_batch_size is then what each process takes at once. With it, go by "
        "countoff's totals: the Trainer's own number of samples stays wrong."
    ),
    **data_remedies(
        shares="give the Trainer the whole dataset on every rank, not sharded: it shards it by itself.",
        order="let the Trainer make the sampler, or change its epoch in a callback's on_epoch_begin.",
        off="Countoff(fingerprint_batches=0)",
        dealer="the Trainer",
        undo="return a loader that is not prepared from get_train_dataloader()",
    ),
}


STEPPING = Stepping(per_step=None, per_epoch=None)
"""The Trainer steps its scheduler by itself, once per optimizer step."""


def train_facts(loader: Any, args: Any, process: Any) -> LoaderFacts:
    """Returns the facts of the train loader, with the limits of TrainingArguments.

    Args:
        loader: The train loader.
        args: TrainingArguments.
        process: Accelerate's PartialState.
    """
    limited = args.max_steps > 0
    known: dict[str, Any] = {
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "max_epochs": None if limited else math.ceil(args.num_train_epochs),
        "max_steps": args.max_steps if limited else None,
        "partial_step": "applied",
    }
    if is_prepared(loader):
        facts = loader_facts(loader, num_processes=process.num_processes, process_index=process.process_index, **known)
    else:  # returned by a subclass's get_train_dataloader() without prepare(), so nothing divides it between ranks
        facts = torch_facts.loader_facts(loader, **known)
    shared = process.num_processes if args.accelerator_config.split_batches else 1
    if facts.batch_size is not None and facts.batch_size * shared != args.train_batch_size:
        # What the loader yields is not what one forward pass takes: TRL's GRPO reads the prompts of several steps at
        # once. So its samples tell nothing about those of a step.
        facts = replace(facts, batch_size=None)
    if facts.reported_batches is None:
        _log.info("the train loader has no length: the Trainer's `epoch` is a fraction of max_steps, not of the data")
    return facts


def observe(handle: Attached, loader: Any, *, resumes_inside: bool) -> Callable[[], None]:
    """Counts the passes over the Trainer's loaders from here on; returns a function that restores the loaders.

    Args:
        handle: The handle that counts them.
        loader: The train loader, prepared by Accelerate or not.
        resumes_inside: Whether the Trainer resumes in the middle of an epoch.

    Raises:
        TypeError: If the passes over the train loader cannot be observed, with the reason.
    """
    prepared, stack = is_prepared(loader), contextlib.ExitStack()
    if not prepared:
        stack.callback(_observe_unprepared(handle, loader, resumes_inside))

    def follower(iterated: Any, batches: Iterator[Any]) -> Iterator[Any]:
        skipped = skipped_batches(iterated)
        train = prepared and (iterated is loader or (skipped > 0 and same_source(loader, iterated)))
        name = None if train else "evaluation"
        even = even_prepared(iterated)
        return handle.passes.follow(batches, name, position=skipped, ahead=iterated, loader=iterated, even=even)

    stack.callback(follow(follower))
    if prepared:
        stack.callback(watch_stream(loader, lambda: handle.guard.data))
    stack.callback(count_backward_passes(handle.micro_batch))
    # The Trainer reports the end of an epoch before it lets go of its loader, unless an exception has ended training.
    handle.passes.left = handle.leave
    return stack.close


def _observe_unprepared(handle: Attached, loader: Any, resumes_inside: bool) -> Callable[[], None]:
    """Counts the passes over a train loader that Accelerate has not prepared."""
    reason = ""
    if holds_prepared(loader):
        reason = "which wraps a prepared loader"  # whose passes would be counted as evaluations
    elif resumes_inside:
        reason = "of which the Trainer makes a copy to resume within an epoch"
    else:
        with contextlib.suppress(TypeError):
            return handle.observe_loaders({None: loader})
    raise TypeError(
        f"get_train_dataloader() returned a {type(loader).__name__}, {reason or 'whose passes cannot be observed'}: "
        "let it return what self.accelerator.prepare() returned for a DataLoader"
    )


def why_equal_lengths(uneven_train: str) -> str:
    """Returns why the ranks' loaders must report one length, as a sentence.

    Args:
        uneven_train: The setting.
    """
    kept = "" if uneven_train == "raise" else f"; uneven_train='{uneven_train}' does not change that"
    return f"Each rank's Trainer steps, and ends its epochs, by the length that its own loader reports{kept}."


def plan_of(facts: LoaderFacts, args: Any, state: Any, settings: Settings) -> FitPlan:
    """Returns what all ranks must agree on before the first batch.

    Args:
        facts: The facts of the train loader.
        args: TrainingArguments.
        state: The TrainerState, with the restored position.
        settings: The user's choices.
    """
    return FitPlan(
        batches_per_epoch=facts.reported_batches,
        why_equal_lengths=why_equal_lengths(settings.uneven_train),
        batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        max_epochs=facts.max_epochs,
        max_steps=state.max_steps,  # its own, which it computes from the loader's length where there is no limit
        position=[int(state.epoch or 0), state.global_step],
    )


def named_evaluation(found: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics of countoff with the evaluation's name, where `eval_dataset` is a mapping from names.

    Args:
        found: The metrics of countoff.
        metrics: What the Trainer has measured. It tells the name: ``eval_<name>_runtime``.
    """
    prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "eval")
    name = prefix.removeprefix("eval").removeprefix("_")
    return {f"{metric}/{name}" if name else metric: value for metric, value in found.items()}


def schedules(scheduler: Any, state: Any) -> Iterator[Schedule]:
    """Yields the schedule of the Trainer, if it has one; the Trainer steps it once per optimizer step.

    Args:
        scheduler: The Trainer's scheduler, which Accelerate may have prepared; None if there is none.
        state: The TrainerState.
    """
    if scheduler is None:
        return
    scheduler = getattr(scheduler, "scheduler", scheduler)
    found = Schedule.of(scheduler, Fraction(1))
    function = next(iter(getattr(scheduler, "lr_lambdas", ())), None)
    made_for = getattr(function, "keywords", {}).get("num_training_steps")
    if made_for == state.max_steps:  # as Trainer.create_scheduler makes it
        found.of_framework, found.name = True, "the Trainer's schedule (warmup_steps, warmup_ratio)"
    yield found


def total_warning(args: Any, world_size: int) -> Verdict | None:
    """Returns a warning about the Trainer's total batch size where Accelerate splits each batch over the processes."""
    if world_size == 1 or not args.accelerator_config.split_batches:
        return None
    true = args.per_device_train_batch_size * args.gradient_accumulation_steps
    sentence = (
        f"the Trainer counts {true * world_size} samples per optimizer step over {world_size} processes; with "
        f"split_batches they share each batch of {args.per_device_train_batch_size}, so there are {true}."
    )
    return WRONG_TOTAL.found(sentence)
