"""Counts the loaders that a script sets up with Fabric where the script iterates them. Imports no Fabric."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from countoff._adapter.class_swap import handle_of
from countoff._adapter.even_loaders import even_inside, proven_length
from countoff._adapter.fit import Fit, OwnRank
from countoff._adapter.loader_passes import UNSEEN_STEPS
from countoff._adapter.mesh_position import data_position
from countoff._adapter.observed_loaders import cover_state_of, share_length
from countoff._adapter.observed_loop import ObservedLoop, active_loops
from countoff._adapter.schedule_watch import Schedule
from countoff._adapter.torch_facts import loader_facts, rank_and_world_size, versions
from countoff._fabric.pass_kinds import PassKinds
from countoff._fabric.words import WORDS, unseen_loader
from countoff.core import FitPlan, LoaderFacts, Settings
from countoff.core.ending import shutdown
from countoff.core.totals import Totals
from countoff.core.verdict import remedy_for

__all__ = ["FabricLoaders"]

_fits: weakref.WeakSet[ObservedLoop] = weakref.WeakSet()


class FabricLoaders:
    """The loaders of one Fabric, counted from the first train epoch on.

    Fabric does not know which loader a script trains on, so `PassKinds` finds that out. With `uneven_train`, a pass
    outside of any other is always a train epoch.

    Args:
        settings: The user's choices.

    Attributes:
        loop: The loop whose fit goes on; None while there is none.
        aside: Whether nothing is counted here, because something else counts.
        known: Whether Fabric has set up any loaders.
    """

    def __init__(self, settings: Settings) -> None:
        self.loop: ObservedLoop | None = None
        self.aside = not settings.enabled
        self.known = False
        self._settings = settings
        self._data_position: tuple[int, int] | None = None
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps_unseen = 0
        # A train epoch that is taken for an evaluation would not be made even.
        self._kinds = PassKinds(new_loaders_evaluate=settings.uneven_train == "raise")
        self._added: weakref.WeakSet[Any] = weakref.WeakSet()
        self._planned: weakref.ref[Any] | None = None  # the loader whose length the fit's plan has
        self._schedulers: list[Any] = []
        self._run: dict[str, Any] = {}  # what the script has told of its length
        self._record: Mapping[str, Any] = {}  # of the checkpoint that was loaded, or of the last fit
        self._resumes = False  # whether the next fit goes on from that checkpoint
        self._has_trained = False

    def add(self, fabric: Any, loaders: Sequence[Any]) -> None:
        """Counts the passes over loaders from here on.

        Args:
            fabric: The Fabric that has set them up.
            loaders: What its `setup_dataloaders` returned.
        """
        mesh = getattr(fabric.strategy, "device_mesh", None)
        self._data_position = data_position(mesh, rank=fabric.global_rank, world_size=fabric.world_size)
        self.known = True
        self._added.update(loaders)

    def follow(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any] | None:
        """Returns the generator of one pass, which the script's `for` iterates; None for a loader that was not added.

        Args:
            loader: The loader.
            batches: Its own iterator.
        """
        if loader not in self._added:
            return None
        if handle_of(loader) is not None:  # the script has attached it by itself
            self.leave_to_others()
            return None
        return self._pass(loader, batches)

    def stepped(self, optimizer: Any) -> None:
        """Learns from an optimizer step what the script trains on; warns of a loop that gives nothing to count.

        Args:
            optimizer: The optimizer that Fabric has stepped.
        """
        self.add_optimizer(optimizer)
        if self.aside:
            return
        if self.loop is None:
            self._forget_record()  # the script trains on what is not counted
            self._step_unseen()
            return
        self._kinds.stepped()
        # An evaluation that is still open is over, or was none.
        self.loop.passes.close_stale(everything=False)

    def own_rank(self) -> OwnRank:
        """Returns this rank, with the share of the data that the mesh of a Fabric gives it, as far as that is known."""
        rank, world_size = rank_and_world_size()
        return OwnRank(rank, world_size, *(self._data_position or (rank, world_size)))

    def optimizers(self) -> list[Any]:
        """Returns the optimizers that Fabric has set up, in that order."""
        return [optimizer for reference in self._optimizers.values() if (optimizer := reference()) is not None]

    def add_optimizer(self, optimizer: Any) -> None:
        """Compares the learning rates of an optimizer that Fabric has set up, also with those of a checkpoint."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._optimizers.setdefault(id(optimizer), weakref.ref(optimizer))

    def add_model(self, model: Any) -> None:
        """Compares the weights of a model that Fabric has set up, with `weights_every`."""
        self._models.add(model)

    def watch_schedules(self, schedulers: Sequence[Any], **run: Any) -> None:
        """Compares where schedules end with where the run ends, in the fit that the next train epoch begins.

        Args:
            schedulers: The learning-rate schedulers.
            run: What the script tells of the run's length, as facts of the train loader.
        """
        self._schedulers, self._run = list(schedulers), run

    def models(self) -> list[Any]:
        """Returns the models that Fabric has set up, in the order of their parameters' names."""
        return sorted(self._models, key=lambda model: [name for name, _ in model.named_parameters()])

    def end(self) -> None:
        """Ends the fit, if there is one. The next train epoch begins another one.

        Raises:
            DivergenceError: If another rank goes on, or has diverged before.
        """
        loop = self._close()
        if loop is not None:
            loop.end()

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks of an exception that ends this rank's fit. The next train epoch begins another one.

        Args:
            error: The exception.
        """
        loop = self._close()
        if loop is not None:
            loop.leave_by(error)

    def leave_to_others(self) -> None:
        """Counts nothing from here on, because something else counts."""
        loop, self.loop, self.aside = self.loop, None, True
        self._forget_record()
        if loop is not None:
            loop.abandon()

    def state_dict(self) -> dict[str, Any]:
        """Returns how far this rank has come: in the fit, at the end of the last one, or in the loaded checkpoint."""
        return dict(self._record) if self.loop is None else self.loop.record()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the record of a checkpoint, for the fit that the next train epoch begins.

        Collective where a fit has begun: then every rank must call it, and another fit begins.

        Args:
            state: What `state_dict` has returned, on any rank.
        """
        if self.loop is not None:
            self.loop.resume_where_begun(state)
        elif not self.aside:
            self._record, self._resumes = state, True

    def _pass(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of one pass. What kind of pass it is is decided at its first batch."""
        kind = None if self.aside else self._kinds.begin(loader, self.loop and self.loop.guard)
        if kind == "train":
            self._train_on(loader)
        if kind is None or self.loop is None:
            yield from batches
            return
        name = None if kind == "train" else kind
        if kind == "evaluation" and not torch.is_grad_enabled():  # else it may be trained on
            self.loop.fit.evaluates(self._source_trained_on(), _source(loader))
        try:
            source, planned = _source(loader), self._planned and self._planned()
            cover_state_of(self.loop, source)
            # Made even inside of Fabric's loader, which moves each batch to the device.
            even = functools.partial(even_inside, inner=source, ahead=False, proven=planned is loader)
            yield from self.loop.passes.follow(batches, name, loader=source, even=even)
        finally:
            self._kinds.end(loader)

    def _forget_record(self) -> None:
        self._record, self._resumes = {}, False

    def _close(self) -> ObservedLoop | None:
        """Lets go of the fit, if there is one, and keeps its record for checkpoints that are written after it."""
        loop, self.loop = self.loop, None
        if loop is not None:
            self._record, self._resumes = loop.record(), False
            self._schedulers, self._run = [], {}
        return loop

    def _train_on(self, loader: Any) -> None:
        """Takes a loader for the train loader. Collective at the first train epoch, which begins the fit."""
        last = self._kinds.trained_last
        self._kinds.train_on(loader)
        if self.loop is None:
            self._begin(loader)
        elif last is not loader:
            self.loop.fit.totals = self._totals(_facts(loader, self._run))

    def _begin(self, loader: Any) -> None:
        for earlier in list(_fits):  # of another Fabric of this process, which has no hook that ends it
            earlier.abandon()
        _fits.clear()
        facts = _facts(loader, self._run)
        self._planned = weakref.ref(loader)
        own, totals = self.own_rank(), self._totals(facts)
        fit = Fit(
            self._settings,
            WORDS,
            own,
            totals,
            optimizers=self.optimizers,
            schedulers=lambda: self._schedulers,
            models=self.models,
        )
        plan = FitPlan(
            batches_per_epoch=facts.reported_batches,
            proven_batches_per_epoch=proven_length(_source(loader), totals, self._settings),
            batch_size=facts.batch_size,
            dp_rank=own.dp_rank,
            dp_degree=own.dp_degree,
            runs_to_end=False,
        )
        self.loop = loop = ObservedLoop(fit)
        loop.train_loader = self._source_trained_on
        loop.passes.expects_more = False  # the script may train on a loader that is still taken for an evaluation's
        fit.watch_schedules(map(Schedule.of, self._schedulers), source_batches=facts.reported_batches)
        _fits.add(loop)
        loop.begin(
            plan,
            versions("lightning", "lightning-fabric"),
            record=self._record if self._resumes else None,
            compare=not self._has_trained,
            loaders={None: _source(loader)},
        )
        share_length(loop, _source(loader))  # which tells the length of Fabric's
        self._forget_record()
        self._has_trained = True

    def _source_trained_on(self) -> Any:
        """The loader inside the one that was last trained on; None if that is gone."""
        last = self._kinds.trained_last
        return None if last is None else _source(last)

    def _totals(self, facts: LoaderFacts) -> Totals:
        return Totals(facts, dp_degree=self.own_rank().dp_degree, framework="len(loader)")

    def _step_unseen(self) -> None:
        self._steps_unseen += 1
        rank, world_size = rank_and_world_size()
        off = self._settings.levels.get("UnseenLoader") == "off"
        if off or self._steps_unseen != UNSEEN_STEPS or rank != 0 or world_size == 1 or active_loops():
            return
        unseen = unseen_loader(UNSEEN_STEPS)
        shutdown.print_to_stderr(replace(unseen, remedy=remedy_for(unseen, WORDS.remedies)), rank)


def _source(loader: Any) -> Any:
    """Returns the loader inside Fabric's."""
    return getattr(loader, "_dataloader", loader)


def _facts(loader: Any, run: Mapping[str, Any]) -> LoaderFacts:
    return loader_facts(_source(loader), reported_is_cap=False, partial_step="dropped", **run)
