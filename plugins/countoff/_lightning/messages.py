"""The messages of the adapter for both Lightning packages."""

from __future__ import annotations

from dataclasses import replace

from countoff._adapter.messages import STOP, Messages, data_remedies, uneven_remedies
from countoff.core import Verdict
from countoff.core.arithmetic.plan import BatchPlan
from countoff.core.checks.horizon import Stepping
from countoff.core.checks.resume import AGAIN, POSITION, RATE
from countoff.core.checks.short import RESUMED

__all__ = ["MESSAGES", "with_remedy"]

_OPTION = "Countoff({})"
_RIGHT_LENGTH = "make len(loader) one rank's number of batches"
_FRACTION = "A fraction is one of each rank's own number of batches"
_EQUAL_LENGTHS = (
    "give every rank the same number of batches. A map-style dataset that is whole on every rank gets a "
    "DistributedSampler of Lightning's."
)

MESSAGES = Messages(
    framework="Lightning",
    length_of="Lightning",
    option=_OPTION,
    remedies={
        "UnevenBatches": uneven_remedies(
            train=(
                f"{_EQUAL_LENGTHS}\n"
                "if each rank holds a part, or the dataset is iterable: Trainer(limit_train_batches=N), with N "
                "batches that every rank has; what is beyond them is not read."
            ),
            option=_OPTION,
            together=f"give them the same Trainer(val_check_interval=N), a whole number of batches or 1.0. {_FRACTION}",
        ),
        "PlanMismatch": {
            "": (
                f"{_EQUAL_LENGTHS}\n"
                "if each rank holds a part: Trainer(limit_train_batches=N), with N batches that every rank has.\n"
                f"let the job go on: with {_OPTION.format(STOP)}, every epoch ends on all ranks with the shortest one."
            ),
            "batches_between_evaluations": (
                "set Trainer(val_check_interval=N) to a whole number of batches, at most those of the shortest rank's "
                f"loader, or to 1.0, to evaluate at the end of each epoch. {_FRACTION}."
            ),
        },
        "LearningRateMismatch": (
            "make the scheduler with the same length on every rank, and let Lightning step it on every rank.\n"
            "where it goes by a metric, as ReduceLROnPlateau: reduce the metric over all ranks with "
            "self.log(…, sync_dist=True)."
        ),
        "RankMapError": "let Lightning add the DistributedSampler.\ngive your own the data_parallel size and rank.",
        "ResumeMismatch": {
            POSITION: (
                "let trainer.fit(ckpt_path=…) restore its loops, from a checkpoint whose key 'loops' is as Lightning "
                "has written it."
            ),
            AGAIN: (
                "use a loader that saves its position (StatefulDataLoader of torchdata, or state_dict() and "
                "load_state_dict() of your own); Lightning begins any other loader again.\n"
                "resume from the end of an epoch: ModelCheckpoint(save_on_train_epoch_end=True)."
            ),
            RATE: (
                "return the scheduler from configure_optimizers(), as before the checkpoint: Lightning saves and "
                "restores it then.\n"
                "if you have begun a new schedule on purpose, ignore this."
            ),
        },
        "ShortRun": {
            RESUMED: (
                "resume from a checkpoint of the end of an epoch, as ModelCheckpoint(every_n_epochs=1, "
                "save_on_train_epoch_end=True) writes it, and not from one that was written in the last batch of an "
                "epoch, as with every_n_train_steps.\n"
                "resume from one of the middle of an epoch."
            ),
        },
        "WrongLength": f"{_RIGHT_LENGTH}.",
        **data_remedies(
            shares=(
                "leave Trainer(use_distributed_sampler=True).\n"
                "give your own sampler the num_replicas and rank of trainer.distributed_sampler_kwargs; an iterable "
                "dataset must take its share by itself."
            ),
            order="let Lightning call set_epoch(epoch): your sampler must be the loader's own, and follow the call.",
            option=_OPTION,
            dealer="Trainer(use_distributed_sampler=True)",
            undo="set Trainer(use_distributed_sampler=False)",
        ),
    },
    stepping=Stepping(
        per_step='configure {} with "interval": "step"', per_epoch='configure {} with "interval": "epoch"'
    ),
    cannot={
        "WrongTotal": "Lightning tells no number of samples",
        "NotDistributed": "Lightning launches the processes, or joins them, by itself",
    },
    names={"batches_per_epoch": "num_training_batches", "total_steps": "estimated_stepping_batches"},
)


def with_remedy(wrong: Verdict, plan: BatchPlan, *, fixes: bool) -> Verdict:
    """Returns the warning of a wrong length with what to do about it.

    Args:
        wrong: The warning.
        plan: The train loader's plan.
        fixes: Whether `totals="fix"` is set.
    """
    true, believed = plan.loader_batches, plan.reported_batches
    if fixes or true is None or believed is None or believed < true:  # Lightning reads no batch beyond len(loader)
        return wrong
    fix = _OPTION.format("totals='fix'")
    until_then = f"until then, {fix} sets Lightning's own number where the true one is proven"
    return replace(wrong, remedy=f"{_RIGHT_LENGTH}.\n{until_then}.")
