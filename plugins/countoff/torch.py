"""countoff for a plain PyTorch loop: ``for batch in countoff.train(loader)`` says what is counted.

Each pass opens a span, every batch is counted as it is handed out, and the pass closes when the loader is exhausted or
the loop leaves it. Torch's own hook counts the steps of the optimizers that the loop names.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from countoff._adapter.requirements import needs

with needs("PyTorch", facade="countoff.torch", install="'countoff[torch]'"):
    from countoff._adapter.torch_facts import rank_and_world_size
    from countoff._adapter.torch_loop import TorchLoop
    from countoff.core.session.threads.before_fit import watch
from countoff._adapter.options import own_arguments
from countoff._torch.messages import MESSAGES
from countoff.core import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["Countoff", "before_fit"]


class Countoff(TorchLoop):
    """Counts what a plain training loop does. Make it on every rank, after `init_process_group`.

    Use it once per fit, in each loop over a loader::

        countoff = Countoff(model=model, optimizer=optimizer)
        for epoch in range(epochs):
            for batch in countoff.train(train_loader):
                ...
            for batch in countoff.eval(eval_loader):
                ...

    The first batch waits for the other ranks at most `deadline_seconds`; nothing later waits for one longer than 50 ms,
    but for the next batch where `uneven_train` or `uneven_eval` makes ranks take the same number. What is the user's is
    held weakly. It may be used as a context manager, which ends the fit.

    Args:
        optimizer: The optimizer, or a list of them; their steps are compared between ranks, and with `model` their
            learning rates. None: the steps of all optimizers are, and no learning rates.
        scheduler: The learning-rate scheduler, or a list of them. A warning says if one does not end where the run
            does, as soon as a few optimizer steps have shown how often it is stepped; a resumed run compares where it
            stands with its checkpoint.
        model: The model as it is trained, or a list of such: wrapped in DistributedDataParallel, or with `fully_shard`
            applied, which proves that ranks must have equal learning rates and weights. Forward passes for training are
            counted as micro-batches, and a warning names ranks that run different numbers of them per optimizer step.
            Weights are compared with `weights_every`, and after a step by gradients of `no_sync()`. None: none of this
            is done.
        epochs: Epochs of the whole run, at least 0, if known: schedules are compared with it.
        max_steps: Optimizer steps after which the whole run ends, at least 0, if there is such a limit.
        gradient_accumulation_steps: Batches of one rank per optimizer step, at least 1.
        batch_size: Samples of one rank per batch; None: what the loader shows.
        start_step: Optimizer steps that were applied before the checkpoint from which the run resumes, at least 0.
        group: The process group of the ranks that train together, where these are a part of the job: several trials,
            or ranks that only evaluate. Messages number ranks as the job does. None: all ranks of the job.
        mesh: The ``DeviceMesh`` of these ranks, where some ranks share their data (tensor, context, pipeline parallel):
            batches are then counted per data rank. None: every rank reads its own.
        data_dims: Names of the mesh's dims along which different data is read; None: those whose names frameworks use
            for data.
        options: Those of `countoff.core.Settings`.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value, or `weights_every` has no `model`.
        TypeError: If a model is no module, or an optimizer has no parameter groups.
        RuntimeError: If WORLD_SIZE announces several ranks and torch.distributed is not initialised.
        ValueError: If a number is too small, if this rank is not in `group`, if the mesh does not show which ranks
            share their data, or if this rank is not in it.
    """

    def __init__(
        self,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        model: Any = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        batch_size: int | None = None,
        start_step: int = 0,
        group: Any = None,
        mesh: Any = None,
        data_dims: Sequence[str] | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        settings = Settings.resolve(*own_arguments(Countoff), **options)
        if settings.enabled and rank_and_world_size()[1] == 1:
            _check_single_rank("Countoff")
        super().__init__(
            settings,
            MESSAGES,
            optimizer=optimizer,
            scheduler=scheduler,
            model=model,
            epochs=epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            batch_size=batch_size,
            start_step=start_step,
            group=group,
            mesh=mesh,
            data_dims=data_dims,
        )


def before_fit() -> None:
    """Watches for a stall before the fit begins, while checkpoints are loaded and data is prepared.

    Call it on every rank, after `init_process_group`; it waits for nobody. If ranks have waited for another one in the
    same call into torch.distributed for `stall_seconds`, and no fit has begun, rank 0 prints a `Stalled` with each
    rank's line of code. Nothing is ended. The settings are those of the environment. The watching ends when a fit
    begins, or the process group is destroyed. A second call does nothing, nor does the first one below
    ``python -m countoff.run``, which watches by itself.

    Raises:
        SettingsError: If a ``COUNTOFF_*`` variable has a bad value.
        RuntimeError: If WORLD_SIZE announces several ranks and torch.distributed is not initialised.

    Example:
        >>> before_fit()  # alone, there is nobody to wait for
    """
    settings = Settings.resolve()
    if settings.enabled and rank_and_world_size()[1] == 1:
        _check_single_rank("before_fit")
    watch(settings)


def _check_single_rank(caller: str) -> None:
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced not in ("", "1"):
        raise RuntimeError(
            f"WORLD_SIZE is {announced}, but torch.distributed is not initialised: call {caller}() after "
            "init_process_group()"
        )
