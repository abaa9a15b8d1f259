"""A loop that a person writes with torch's own objects: what plain PyTorch and Fabric have in common."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.evaluation_totals import EvaluationTotals, evaluation_facts
from countoff._adapter.even_loaders import proven_length, saves_state
from countoff._adapter.fit import Fit, OwnRank, plan_of
from countoff._adapter.forward_passes import check_modules, count_forward_passes
from countoff._adapter.mesh_position import dp_position, loader_position, stage
from countoff._adapter.messages import Messages
from countoff._adapter.own_loop import OwnLoop
from countoff._adapter.sampling import known_length
from countoff._adapter.schedule_watch import Schedule
from countoff._adapter.torch_facts import (
    NamedOptimizers,
    check_optimizers,
    rank_and_world_size,
    shown_facts,
    subgroup_of,
    versions,
)
from countoff._adapter.weakly import reference, weakly
from countoff.core import LoaderFacts, Settings, SettingsError
from countoff.core.arithmetic.totals import Totals

__all__ = ["TorchLoop"]


class TorchLoop(OwnLoop):
    """The loop.

    Args:
        settings: The user's choices.
        messages: The adapter's messages.
        packages: Packages whose versions are compared besides torch's.
        optimizer: As for `countoff.torch.Countoff`; so are the others.
        scheduler: The learning-rate scheduler, or a list of them.
        model: The model as it is trained, or a list of such.
        epochs: Epochs of the whole run.
        max_steps: Optimizer steps after which the whole run ends.
        gradient_accumulation_steps: Batches of one rank per optimizer step.
        batch_size: Samples of one rank per batch.
        start_step: Optimizer steps that were applied before the checkpoint.
        group: The process group of the ranks that train together.
        mesh: The ``DeviceMesh`` of these ranks.
        data_dims: Names of the mesh's dims along which different data is read.

    Raises:
        SettingsError: If `weights_every` has no `model`.
        TypeError: If a model is no module.
        ValueError: As for `countoff.torch.Countoff`.
    """

    def __init__(
        self,
        settings: Settings,
        messages: Messages,
        packages: Sequence[str] = (),
        *,
        optimizer: Any,
        scheduler: Any,
        model: Any,
        epochs: int | None,
        max_steps: int | None,
        gradient_accumulation_steps: int,
        batch_size: int | None,
        start_step: int,
        group: Any,
        mesh: Any,
        data_dims: Sequence[str] | None,
    ) -> None:
        rank, world_size = rank_and_world_size()
        if settings.enabled and settings.weights_every and world_size > 1 and model is None:
            raise SettingsError("weights_every needs the model whose weights are compared: Countoff(model=…)")
        if settings.enabled:
            check_modules(_listed(model))
            check_optimizers(_listed(optimizer))
        part = subgroup_of(group) if settings.enabled else None
        ranks = range(world_size) if part is None else part.ranks
        dp_rank, dp_degree = _position(mesh, data_dims, rank, ranks)
        self._own = OwnRank(rank, len(ranks), dp_rank, dp_degree, part, stage(mesh))
        self._messages, self._packages = messages, packages
        self._optimizers, self._schedulers = weakly(_listed(optimizer)), weakly(_listed(scheduler))
        self._models = weakly(_listed(model))
        self._run: dict[str, Any] = {
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "max_epochs": epochs,
            "max_steps": max_steps,
            "reported_is_cap": False,
            "partial_step": "dropped",
        }
        self._batch_size, self._start_step = batch_size, start_step
        self._has_mesh = mesh is not None
        self._facts(None)  # refuses a bad number now
        super().__init__(settings)

    def _new_loop(self) -> CountedLoop:
        fit = Fit(
            self._settings,
            self._messages,
            self._own,
            steps_before=self._start_step,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            models=self._models,
        )
        named = self._optimizers()
        loop = CountedLoop(fit, steps_of=NamedOptimizers(named) if named else None, own=True)
        facts_of = functools.partial(
            evaluation_facts, dp_rank=self._own.dp_rank, dp_degree=self._own.dp_degree, reported_is_cap=False
        )
        loop.tell_evaluations(EvaluationTotals(facts_of, dp_degree=self._own.dp_degree))
        return loop

    def _tell_of(self, loop: CountedLoop, loader: Any) -> LoaderFacts:
        source = self._source(loader)
        facts = self._facts(source)
        loop.fit.totals = Totals(facts, dp_degree=self._own.dp_degree)
        of_source = reference(source)
        loop.train_loader, loop.may_resume = of_source, saves_state(source)
        loop.length_now = lambda: known_length(of_source())
        return facts

    def _begin_fit(self, loop: CountedLoop, loader: Any, facts: LoaderFacts, **known: Any) -> None:
        source, totals = self._source(loader), loop.fit.totals
        plan = plan_of(
            facts,
            self._own,
            batches_per_epoch=facts.reported_batches,
            proven_batches_per_epoch=None if totals is None else proven_length(source, totals, self._settings),
            position=[loop.passes.epoch, 0, self._start_step],
            loader_position=loader_position(source) if self._has_mesh else None,
            runs_to_end=False,
        )
        loop.fit.watch_schedules(map(Schedule.of, self._schedulers()), source_batches=facts.reported_batches)
        loop.until_end(count_forward_passes(self._models(), loop.micro_batch))
        loop.begin(plan, versions(*self._packages), loaders={None: source}, **known)

    def _epoch_length(self, loader: Any) -> int | None:
        return known_length(self._source(loader))

    def _facts(self, source: Any) -> LoaderFacts:
        facts = shown_facts(source, known_length(source), **self._run)
        size = self._batch_size
        if size is None or size == facts.batch_size:
            return facts
        # Nothing of lengths is proven where the loader shows another batch size.
        return replace(facts, batch_size=size, samples_per_rank=None, dataset_size=None, sampling="unknown")


def _listed(given: Any) -> list[Any]:
    """Returns what an argument gives that takes one object or a list of them; None stands for none."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _position(mesh: Any, data_dims: Sequence[str] | None, rank: int, ranks: Sequence[int]) -> tuple[int, int]:
    """Returns this rank's dp_rank and the dp_degree among these ranks; without a mesh each reads its own data."""
    if mesh is None:
        return ranks.index(rank), len(ranks)
    position = dp_position(mesh, data_dims)
    if position is None:
        raise ValueError(f"rank {rank} is not in the mesh: give the mesh of the whole job")
    return position
