"""countoff for lingua: two lines where its train loop enters the data loader, on every rank.

In ``apps/main/train.py``, after the loader has been entered::

    from countoff.lingua import Countoff
    countoff = context_stack.enter_context(
        Countoff(args, mesh=world_mesh, dp_rank=dp_rank, dp_degree=dp_degree, optimizer=optimizer,
                 start_step=train_state.step)
    )
    data_loader = iter(countoff.train(data_loader))

The dp_rank is the one that lingua's own line computed, so a wrong factor in that line is found before the first batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from countoff._adapter.requirements import needs

with needs("PyTorch", facade="countoff.lingua", install="'countoff[torch]'"):
    from countoff._adapter.counted_loop import CountedLoop
    from countoff._adapter.fit import Fit, OwnRank, plan_of
    from countoff._adapter.own_loop import Batch, OwnLoop, Pass
    from countoff._adapter.torch_facts import rank_and_world_size, versions
from countoff._adapter.mesh_position import rank_map
from countoff._adapter.options import cannot_make_even, own_arguments
from countoff._adapter.weakly import weakly
from countoff._lingua.messages import MESSAGES
from countoff.core import LoaderFacts, Settings, SettingsError
from countoff.core.arithmetic.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["Countoff"]


class Countoff(OwnLoop):
    """Counts what lingua's loop does. Every rank must make it; the first batch waits for the others.

    It waits at most `deadline_seconds`. As a context manager it ends the fit.

    Args:
        args: lingua's ``TrainArgs``: ``data.batch_size``, ``data.seq_len``, ``grad_acc_steps`` and ``steps`` are read.
        mesh: Its ``world_mesh``.
        dp_rank: The data rank as which this rank reads, as train.py computed it.
        dp_degree: The number of data ranks, as train.py computed it.
        optimizer: Its optimizer, whose learning rates are compared between ranks.
        model: Its model, whose weights are compared with `weights_every`.
        start_step: Optimizer steps that were applied before the checkpoint from which the run resumes.
        options: The options of every adapter; see `Settings`.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value, or `weights_every` has no `model`.
        ValueError: If dp_degree is not that of the mesh.
    """

    def __init__(
        self,
        args: Any,
        *,
        mesh: Any,
        dp_rank: int,
        dp_degree: int,
        optimizer: Any = None,
        model: Any = None,
        start_step: int = 0,
        **options: Unpack[OptionValues],
    ) -> None:
        settings = Settings.resolve(*own_arguments(Countoff), **options)
        cannot_make_even(settings, MESSAGES.framework)
        rank, world_size = rank_and_world_size()
        if settings.enabled and settings.weights_every and world_size > 1 and model is None:
            raise SettingsError("weights_every needs the model whose weights are compared: Countoff(…, model=model)")
        if settings.enabled and dp_degree != (known := rank_map(mesh).dp_degree):
            raise ValueError(f"rank {rank}: dp_degree is {dp_degree}, and the mesh has {known} data ranks")
        self._facts, self._own = _facts(args), OwnRank(rank, world_size, dp_rank, dp_degree)
        self._start_step, self._start_batches = start_step, start_step * args.grad_acc_steps
        self._optimizers = weakly([] if optimizer is None else [optimizer])
        self._models = weakly([] if model is None else [model])
        super().__init__(settings)

    def train(self, loader: Iterable[Batch], *, epoch: int | None = None, position: int | None = None) -> Pass[Batch]:
        """Returns an iterator over the data, which has no end and so is one epoch.

        Args:
            loader: What lingua's ``build_dataloader_from_args`` gives.
            epoch: As for any loop.
            position: Batches that were trained on before the checkpoint; None: those of `start_step`.

        Raises:
            RankMapError: From the iterator, if the ranks' dp_ranks leave data unread, or let ranks read that of others.
            PlanMismatch: From the iterator, if ranks begin with different plans.
        """
        return super().train(loader, epoch=epoch, position=self._start_batches if position is None else position)

    def _new_loop(self) -> CountedLoop:
        totals = Totals(self._facts, dp_degree=self._own.dp_degree)
        fit = Fit(
            self._settings,
            MESSAGES,
            self._own,
            totals,
            steps_before=self._start_step,
            optimizers=self._optimizers,
            models=self._models,
        )
        return CountedLoop(fit)

    def _tell_of(self, loop: CountedLoop, loader: Any) -> LoaderFacts:
        return self._facts

    def _epoch_length(self, loader: Any) -> int | None:
        return None  # the data has no end

    def _begin_fit(self, loop: CountedLoop, loader: Any, facts: LoaderFacts, **known: Any) -> None:
        position = [loop.passes.epoch, self._start_batches, self._start_step]
        loop.begin(plan_of(facts, self._own, position=position), versions(), **known)
        loop.fit.log_in_words()


def _facts(args: Any) -> LoaderFacts:
    """Returns the facts of lingua's loader, which has no end, by its ``TrainArgs``."""
    return LoaderFacts(
        reported_batches=None,
        batch_size=args.data.batch_size,
        drop_last=True,
        samples_per_rank=None,
        gradient_accumulation_steps=args.grad_acc_steps,
        max_steps=args.steps,
        sequence_length=args.data.seq_len,
        reported_is_cap=False,
        partial_step="dropped",
    )
