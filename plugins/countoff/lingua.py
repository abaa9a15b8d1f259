"""countoff for lingua: one line where its train loop enters the data loader, on every rank.

In ``apps/main/train.py``, after the loader has been entered::

    from countoff.lingua import watch
    data_loader = context_stack.enter_context(
        watch(data_loader, args, mesh=world_mesh, dp_rank=dp_rank, dp_degree=dp_degree,
              optimizer=optimizer, step=train_state.step)
    )

The dp_rank is the one that lingua's own line computed, so a wrong factor in that line is found before the first batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from countoff._adapter.requirements import needs

with needs("PyTorch", facade="countoff.lingua", install="'countoff[torch]'"):
    from countoff._adapter.fit import Fit, OwnRank, plan_of
    from countoff._adapter.handle import Attached
    from countoff._adapter.observed_loop import ObservedLoop
    from countoff._adapter.torch_facts import rank_and_world_size, versions
from countoff._adapter.mesh_position import rank_map
from countoff._adapter.options import cannot_make_even, own_arguments
from countoff._lingua.words import WORDS
from countoff.core import LoaderFacts, Settings, SettingsError
from countoff.core.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["watch"]


@contextlib.contextmanager
def watch(
    data_loader: Iterator[Any],
    args: Any,
    *,
    mesh: Any,
    dp_rank: int,
    dp_degree: int,
    optimizer: Any = None,
    model: Any = None,
    step: int = 0,
    **options: Unpack[OptionValues],
) -> Iterator[Iterator[Any]]:
    """Watches lingua's loop. Collective: every rank must enter it; it waits at most `deadline_seconds`.

    Args:
        data_loader: What lingua's ``build_dataloader_from_args`` gives.
        args: Its ``TrainArgs``: ``data.batch_size``, ``data.seq_len``, ``grad_acc_steps`` and ``steps`` are read.
        mesh: Its ``world_mesh``.
        dp_rank: The data rank as which this rank reads, as train.py computed it.
        dp_degree: The number of data ranks, as train.py computed it.
        optimizer: Its optimizer, whose learning rates are compared between ranks.
        model: Its model, whose weights are compared with `weights_every`.
        step: Optimizer steps that were applied before the checkpoint from which the run resumes.
        **options: The options of every adapter; see `Settings`.

    Yields:
        The loader, counted.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value, or `weights_every` has no `model`.
        RankMapError: If the ranks' dp_ranks leave data unread, or let ranks read the data of others.
        PlanMismatch: If ranks begin with different plans.
        ValueError: If dp_degree is not that of the mesh.
    """
    settings = Settings.resolve(*own_arguments(watch), **options)
    cannot_make_even(settings, WORDS.framework)
    if not settings.enabled:
        yield data_loader
        return
    rank, world_size = rank_and_world_size()
    if settings.weights_every and world_size > 1 and model is None:
        raise SettingsError("weights_every needs the model whose weights are compared: watch(…, model=model)")
    ranks = rank_map(mesh)
    if dp_degree != ranks.dp_degree:
        raise ValueError(f"rank {rank}: dp_degree is {dp_degree}, and the mesh has {ranks.dp_degree} data ranks")
    facts, own = _facts(args), OwnRank(rank, world_size, dp_rank, dp_degree)
    fit = Fit(
        settings,
        WORDS,
        own,
        Totals(facts, dp_degree=dp_degree, framework=WORDS.framework),
        optimizers=lambda: [] if optimizer is None else [optimizer],
        models=lambda: [] if model is None else [model],
    )
    loop, batches = ObservedLoop(fit), step * args.grad_acc_steps
    loop.begin(plan_of(facts, own, position=[0, batches, step]), versions())
    # To leave the context with an error reports it to the other ranks; to leave it without one ends the fit.
    with Attached(loop):
        yield loop.passes.follow(data_loader, None, position=batches)


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
