"""The transformers Trainer's own objects: facts, warnings about its settings, and where its batches are observed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from countoff._accelerate.backward import count_backward_passes
from countoff._accelerate.loader_facts import loader_facts
from countoff._accelerate.loaders import (
    even_prepared,
    followers,
    is_prepared,
    same_source,
    skipped_batches,
)
from countoff._accelerate.process import unwrapped_scheduler
from countoff._accelerate.streams import watch_stream
from countoff._adapter import torch_facts
from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.schedule_watch import Schedule
from countoff._transformers.messages import why_equal_lengths
from countoff.core import FitPlan, LoaderFacts, Settings, Verdict
from countoff.core.checks.framework import WRONG_TOTAL
from countoff.core.data.plain import attribute_of, items_of

__all__ = [
    "named_evaluation",
    "observe",
    "plan_of",
    "schedules",
    "total_warning",
    "train_facts",
]

_log = logging.getLogger("countoff")


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


def observe(loop: CountedLoop, loader: Any) -> None:
    """Counts the passes over the Trainer's loaders until the training ends.

    Args:
        loop: The training, which counts them.
        loader: The train loader.

    Raises:
        TypeError: If Accelerate has not prepared the train loader.
    """
    if not is_prepared(loader):
        raise TypeError(
            f"get_train_dataloader() returned a {type(loader).__name__}: let it return what "
            "self.accelerator.prepare() returned for a DataLoader"
        )

    def follower(iterated: Any, batches: Iterator[Any]) -> Iterator[Any]:
        skipped = skipped_batches(iterated)
        train = iterated is loader or (skipped > 0 and same_source(loader, iterated))
        name = None if train else "evaluation"
        if train:
            loop.fit.expects(iterated)
        even = even_prepared(iterated)
        return loop.passes.follow(batches, name, position=skipped, ahead=iterated, loader=iterated, even=even)

    loop.until_end(followers.add(follower))
    loop.until_end(watch_stream(lambda: loader, lambda: loop.guard.data))
    loop.until_end(count_backward_passes(loop.micro_batch))
    # The Trainer reports the end of an epoch before it lets go of its loader, unless an exception has ended training.
    loop.passes.left = loop.leave


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
        gradient_accumulation_steps=facts.gradient_accumulation_steps,
        max_epochs=facts.max_epochs,
        max_steps=int(state.max_steps),  # its own, which it computes from the loader's length where there is no limit
        position=[int(state.epoch or 0), state.global_step],
        evaluation_intervals=_intervals(args, state),
    )


def _intervals(args: Any, state: Any) -> dict[str, Any]:
    """Returns the steps between two evaluations, where the Trainer evaluates by steps and gets so far."""
    by_steps = args.eval_strategy == "steps"
    return {"eval_steps": state.eval_steps} if by_steps and state.eval_steps <= state.max_steps else {}


def named_evaluation(found: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics of countoff with the evaluation's name, where `eval_dataset` is a mapping from names.

    Args:
        found: The metrics of countoff.
        metrics: What the Trainer has measured. It tells the name: ``eval_<name>_runtime``.
    """
    names = [name for name in metrics if isinstance(name, str)]  # a Trainer of the user's may have other keys
    prefix = next((name.removesuffix("_runtime") for name in names if name.endswith("_runtime")), "eval")
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
    scheduler = unwrapped_scheduler(scheduler)
    found = Schedule.of(scheduler, Fraction(1))
    function = next(iter(items_of(attribute_of(scheduler, "lr_lambdas")) or ()), None)
    keywords = attribute_of(function, "keywords")
    if type(keywords) is dict and keywords.get("num_training_steps") == state.max_steps:  # as create_scheduler makes it
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
