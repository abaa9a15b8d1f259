"""The messages of the adapter for the transformers Trainer."""

from __future__ import annotations

from countoff._accelerate.messages import launch_remedy
from countoff._adapter.messages import Messages, data_remedies, uneven_remedies
from countoff.core.checks.horizon import Stepping
from countoff.core.checks.resume import AGAIN, POSITION, RATE

__all__ = ["MESSAGES", "why_equal_lengths"]

_OPTION = "Countoff({})"
_ONLY_DATA_RANKS = "the Trainer itself gives every process its share, and its callbacks get no mesh"

MESSAGES = Messages(
    framework="transformers",
    length_of="the Trainer",
    option=_OPTION,
    remedies={
        "NotDistributed": launch_remedy(on_cpus="TrainingArguments(use_cpu=True)"),
        "UnevenBatches": uneven_remedies(
            train=(
                "give every rank the same number of batches. If the dataset has a length: "
                "accelerator_config={'even_batches': True}, the default, and the same dataset on every rank; a "
                "get_train_dataloader() of your own must return what self.accelerator.prepare() returns.\n"
                "if it is iterable, let it end after the same number of batches on every rank; what is beyond them is "
                "not read."
            ),
            option=_OPTION,
            together=(
                "no callback that sets control.should_evaluate on one rank. The Trainer gathers each batch of all ranks"
            ),
            alone=False,
        ),
        "PlanMismatch": (
            "give every rank the same dataset, and let the Trainer make the ranks even: "
            "TrainingArguments(accelerator_config={'even_batches': True}), the default. A get_train_dataloader() of "
            "your own must return what self.accelerator.prepare() returns.\n"
            "if the dataset is iterable: the same len() on every rank, or no len() and TrainingArguments(max_steps=N)."
        ),
        "StepMismatch": "let all ranks decide alike: no callback that sets control.should_training_stop on one rank.",
        "ResumeMismatch": {
            POSITION: (
                "resume with as many processes, and the per_device_train_batch_size and gradient_accumulation_steps of "
                "the checkpoint: the Trainer skips by its number of steps. Leave trainer_state.json as it was written."
            ),
            AGAIN: (
                "let the Trainer skip what was trained on: trainer.train(resume_from_checkpoint=…), and a data set "
                "that begins with its first sample in every pass."
            ),
            RATE: (
                "keep scheduler.pt and optimizer.pt in the checkpoint, and give the Trainer no scheduler that was "
                "stepped before.\n"
                "if you have begun a new schedule on purpose, ignore this."
            ),
        },
        "WrongLength": "make len() of the dataset what it yields; the Trainer's epochs and max_steps follow from it.",
        "WrongTotal": (
            "leave split_batches off: per_device_train_batch_size is then what each process takes at once.\n"
            "with it, go by countoff's totals: the Trainer's own number of samples stays wrong."
        ),
        **data_remedies(
            shares="give the Trainer the whole dataset on every rank, not sharded: it shards it by itself.",
            order="let the Trainer make the sampler.\nchange your sampler's epoch in a callback's on_epoch_begin.",
            option=_OPTION,
            dealer="the Trainer",
            undo=(
                "return prepare_data_loader(loader, self.args.device, num_processes=1, process_index=0, "
                "put_on_device=True, dispatch_batches=False) of accelerate.data_loader from get_train_dataloader()"
            ),
        ),
    },
    stepping=Stepping(per_step=None, per_epoch=None),  # the Trainer steps its scheduler by itself, at each step
    cannot={
        "RankMapError": _ONLY_DATA_RANKS,
        "PeersDiffer": _ONLY_DATA_RANKS,
    },
    names={
        "batches_per_epoch": "len_dataloader",
        "steps_per_epoch": "num_update_steps_per_epoch",
        "total_steps": "max_steps",
        "global_batch_size": "total_train_batch_size",
    },
)


def why_equal_lengths(uneven_train: str) -> str:
    """Returns why the ranks' loaders must report one length, as a sentence.

    Args:
        uneven_train: The setting.
    """
    kept = "" if uneven_train == "raise" else f"; uneven_train='{uneven_train}' does not change that"
    return f"Each rank's Trainer steps, and ends its epochs, by the length that its own loader reports{kept}."
