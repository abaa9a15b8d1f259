"""The messages of the adapter for Accelerate, and those about its processes, which the Trainer's users need too."""

from __future__ import annotations

from countoff._adapter.messages import LOCAL_STEPS, Messages, data_remedies, uneven_remedies
from countoff.core.checks.framework import CUT_BATCHES, STEPS
from countoff.core.checks.resume import AGAIN, ISSUED, POSITION, RATE

__all__ = ["CALLS", "MESSAGES", "launch_remedy"]

_OPTION = "Countoff(..., {})"
CALLS = "accelerator.prepare() makes each scheduler.step() step the scheduler once per process."
"""Why a prepared scheduler is ahead of the optimizer."""


def launch_remedy(*, on_cpus: str) -> str:
    """Returns the remedy for a launch that makes no job of its processes.

    Args:
        on_cpus: The argument by which the framework makes a job of processes without GPUs.
    """
    return (
        "start it with torchrun or accelerate launch on GPUs.\n"
        f"on CPUs, set ACCELERATE_USE_CPU=true for torchrun, or {on_cpus}."
    )


MESSAGES = Messages(
    framework="Accelerate",
    option=_OPTION,
    remedies={
        "NotDistributed": launch_remedy(on_cpus="Accelerator(cpu=True)"),
        "UnevenBatches": uneven_remedies(
            train=(
                "give every rank the same number of batches. If the dataset has a length: even_batches=True, the "
                "default, and the same dataset on every rank.\n"
                "if it is iterable: for batch in itertools.islice(countoff.train(loader), n), with n batches that "
                "every rank has, a multiple of gradient_accumulation_steps; what is beyond them is not read."
            ),
            option=_OPTION,
        ),
        "StepMismatch": (
            "let all ranks step after the same batches: no condition of one rank around optimizer.step(), and no break "
            "of one rank. In an evaluation inside an epoch, a break hides the end of the train loader from "
            "accumulate()."
        ),
        "WrongLength": "make len() of the dataset the number of samples that it yields, which len(loader) follows.",
        "ResumeMismatch": {
            POSITION: (
                "give the resumed epoch's loader as many batches to skip as the checkpoint has: "
                "accelerator.skip_first_batches(loader, batches). If the batch size or the number of processes has "
                "changed: the samples divided by the new batch size and the new number.\n"
                "if you have moved on purpose, ignore this."
            ),
            AGAIN: (
                "iterate accelerator.skip_first_batches(loader, batches) in the resumed epoch, and call "
                "loader.set_epoch(epoch) with its number before.\n"
                "let Accelerate restore the loader: DataLoaderConfiguration(use_stateful_dataloader=True, "
                "use_seedable_sampler=True).\n"
                "if the run is to begin anew, ignore this."
            ),
            ISSUED: (
                "shuffle by a seed and an epoch: Accelerator(dataloader_config=DataLoaderConfiguration("
                "use_seedable_sampler=True, data_seed=7)), and call loader.set_epoch(epoch) with the epoch's number "
                "before each pass, also in the resumed run.\n"
                "resume at the beginning of an epoch.\n"
                "if you have chosen a new order on purpose, ignore this."
            ),
            RATE: (
                "give the scheduler to accelerator.prepare(), so that save_state() and load_state() include it.\n"
                "if you have begun a new schedule on purpose, ignore this."
            ),
        },
        "WrongTotal": {
            STEPS: (
                "put the passes of each batch, optimizer.step() and optimizer.zero_grad() inside of "
                "`with accelerator.accumulate(model):`.\n"
                "if each batch is to have a step: Accelerator(gradient_accumulation_steps=1), and a learning-rate "
                "schedule for as many steps.\n"
                "if it is meant: levels={'WrongTotal': 'off'}."
            ),
            CUT_BATCHES: (
                "keep accumulate() from stepping after each part of the last batch: "
                "GradientAccumulationPlugin(num_steps=…, sync_with_dataloader=False) for the Accelerator, where each "
                "epoch has a multiple of num_steps of these parts.\n"
                "put the passes of each part, optimizer.step() and optimizer.zero_grad() inside of "
                "`with accelerator.accumulate(model):`.\n"
                "cut up no batch: let the loader give the parts as its batches.\n"
                "if it is meant: levels={'WrongTotal': 'off'}."
            ),
        },
        "WeightsDiffer": LOCAL_STEPS,
        **data_remedies(
            shares=(
                "let accelerator.prepare() shard the loader.\n"
                "give each rank a share of its own, by accelerator.process_index, where the loader is prepared as that "
                "of one process, as a stream of ready-made batches must be."
            ),
            order="iterate the prepared loader to its end, or call its set_epoch(epoch) before every pass.",
            option=_OPTION,
            dealer="accelerator.prepare()",
            undo=(
                "prepare the train loader as that of one process: prepare_data_loader(loader, accelerator.device, "
                "num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False) of "
                "accelerate.data_loader"
            ),
        ),
    },
)
