"""The messages of the adapter for Composer."""

from __future__ import annotations

from dataclasses import replace

from countoff._adapter.messages import Messages, data_remedies, uneven_remedies
from countoff.core import Verdict
from countoff.core.arithmetic.plan import BatchPlan
from countoff.core.checks.even import TRUNCATED
from countoff.core.checks.horizon import Stepping
from countoff.core.checks.resume import AGAIN, POSITION, RATE

__all__ = [
    "MESSAGES",
    "consequences",
    "consequences_in_evaluation",
    "equal_for_interval",
    "equal_for_schedule",
    "remedy_of_length",
    "uneven_by_design",
    "with_correction",
]

_OPTION = "Countoff({})"
_EQUAL_LENGTHS = (
    "give every rank the same number of batches: StreamingDataset(batching_method='random').\n"
    "where the dataset is whole on every rank: DataLoader(sampler=dist.get_sampler(dataset)) of composer.utils."
)
_ACCEPTED = "if you accept the loss, give a number that every rank has: Trainer(train_subset_num_batches=N)"
_RIGHT_LENGTH = "make len(loader) one rank's number of batches (of a StreamingDataset the length, not the size)"

MESSAGES = Messages(
    framework="Composer",
    option=_OPTION,
    remedies={
        "UnevenBatches": uneven_remedies(
            train=_EQUAL_LENGTHS,
            option=_OPTION,
            goes_on=False,
            together=(
                "no eval_interval that depends on the rank. Composer lets all ranks meet after each of its batches"
            ),
            alone=False,
        ),
        "Truncated": (
            f"{_EQUAL_LENGTHS} drop_last=True does not make such ranks even.\n"
            f"{_ACCEPTED}, or eval_subset_num_batches=N."
        ),
        "PlanMismatch": (
            "give every rank the same number of batches. Otherwise a schedule in epochs gives each rank a learning "
            "rate of its own, and max_duration in batches ends an epoch on some ranks only.\n"
            f"{_ACCEPTED}."
        ),
        "StepMismatch": (
            "let all ranks step after the same batches: no algorithm, and no condition of one rank around the step."
        ),
        "LearningRateMismatch": "compare state.dataloader_len on the ranks: the scheduler's length follows from it.",
        "WrongLength": f"{_RIGHT_LENGTH}.",
        "ResumeMismatch": {
            POSITION: (
                "load the whole State with Trainer(load_path=…), and resume with as many ranks of the same batch "
                "size.\n"
                "use a StreamingDataset, which goes by samples."
            ),
            AGAIN: (
                "make the data set's load_state_dict() go on behind the samples that it is given; without that method "
                "Composer skips them by itself."
            ),
            RATE: (
                "leave state/schedulers out of load_ignore_keys, so that Composer restores the scheduler.\n"
                "if you have begun a new schedule on purpose, ignore this."
            ),
        },
        **data_remedies(
            shares=(
                "give every rank its own share: DataLoader(sampler=dist.get_sampler(dataset)) of composer.utils. "
                "Composer adds no sampler.\n"
                "use a StreamingDataset, with `replication` only where ranks share their batches."
            ),
            order="let Composer call set_epoch(epoch): your sampler must be the loader's own, and follow the call.",
            option=_OPTION,
            dealer="dist.get_sampler(dataset)",
            undo="leave out the DistributedSampler",
        ),
    },
    stepping=Stepping(
        per_step="let Composer step {} after every batch: Trainer(step_schedulers_every_batch=True)",
        per_epoch="let Composer step {} after every epoch: Trainer(step_schedulers_every_batch=False)",
    ),
    cannot={
        "WrongTotal": "Composer tells no number of samples that countoff could prove wrong",
        "NotDistributed": "Composer's launcher sets torch.distributed up",
    },
    names={"batches_per_epoch": "dataloader_len", "global_batch_size": "global_train_batch_size"},
)


def consequences(plan: BatchPlan, *, epochs: int | None) -> str:
    """Returns the consequences of a wrong length of the train loader, as sentences.

    Args:
        plan: The loader's plan.
        epochs: `max_duration`, if it is in epochs.
    """
    true, believed = plan.loader_batches, plan.reported_batches_per_epoch
    if not true or not believed or true == believed:
        return ""
    if believed < true:
        return f"Every epoch is cut off there: {true - believed} of {true} batches are never trained on."
    words = (
        f"The console shows batch=i/{believed}, the epoch ends at {true}; "
        f"a warm-up of '1ep' takes {believed / true:.3g} epochs"
    )
    if epochs:
        run = f"{epochs} epoch{'s' if epochs > 1 else ''}"
        planned, real = epochs * believed, epochs * true
        words += f"; a decay over the {run} is laid out for {planned} batches and ends at {real} of them"
    return f"{words}."


def consequences_in_evaluation(plan: BatchPlan) -> str:
    """Returns the consequences of a wrong length of an evaluator's loader, as sentences."""
    true, believed = plan.loader_batches, plan.reported_batches_per_epoch
    if not true or not believed or true == believed:
        return ""
    if believed < true:
        return f"Every evaluation is cut off there: {true - believed} of {true} batches are never evaluated."
    return f"Its progress bar counts to {believed}, and the evaluation ends at {true}."


def uneven_by_design(batching_method: str, uneven: tuple[int, int]) -> Verdict:
    """Returns a warning, for before the first batch, that the train loader gives ranks different numbers of batches.

    Args:
        batching_method: The StreamingDataset's argument of that name.
        uneven: The fewest and the most batches of a rank in one epoch.
    """
    fewest, most = uneven
    return TRUNCATED.found(
        f"with batching_method='{batching_method}' ranks have from {fewest} to {most} batches of train data per epoch; "
        f"Composer ends every epoch after {fewest} on all of them, and what the others have beyond is not trained on.",
        why="Batches go to the ranks in turns, stream by stream, and their number is not a multiple of the ranks.",
        subject="plan",
    )


def remedy_of_length(plan: BatchPlan, *, limit: str, fixes: bool) -> str:
    """Returns what to do about a wrong length that countoff has not set.

    Args:
        plan: The loader's plan.
        limit: The argument that limits the batches of a pass, with ``N`` for their number.
        fixes: Whether `totals="fix"` is set.
    """
    true, believed = plan.loader_batches, plan.reported_batches_per_epoch
    if true is None or believed is None or believed < true:  # no limit of Composer's goes beyond len(loader)
        return f"{_RIGHT_LENGTH}."
    fix = _OPTION.format("totals='fix'")
    also = "" if fixes else f"\nuntil then, {fix} sets it where it is proven."
    return f"{_RIGHT_LENGTH}.\nuntil then, {limit} with the true number.{also}"


def with_correction(wrong: Verdict, length: int, since: str = "before the first batch") -> Verdict:
    """Returns the warning of a wrong length that countoff has set right.

    Args:
        wrong: The warning.
        length: The length that countoff has set.
        since: When that takes effect.
    """
    sentence = f"{wrong.sentence} countoff has set the length to {length}, {since}."
    return replace(wrong, sentence=sentence, remedy=f"nothing for this run. For others, {_RIGHT_LENGTH}.")


def equal_for_schedule(time: str) -> str:
    """Returns why the ranks' loaders must be equally long where a learning-rate schedule has this time."""
    return (
        f"A learning-rate schedule has the time '{time}', which Composer converts by each rank's own length: the ranks "
        "would train with different learning rates."
    )


def equal_for_interval(time: str) -> str:
    """Returns why the ranks' loaders must be equally long where something happens at an interval of this time."""
    return (
        f"An interval is '{time}', which Composer converts by each rank's own length: the ranks would evaluate or save "
        "after different batches."
    )
