"""Counts the loaders that a script sets up with Fabric where the script iterates them. Imports no Fabric.

Fabric has no loop, and it calls no callback when it sets up loaders. So while a callback of countoff's exists, Fabric's
class has a `setup_dataloaders` of countoff's, and the class of the loaders that it returns has an `__iter__` of
countoff's. Both call Fabric's own. The Fabric and its loaders stay as they are.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from countoff._adapter.class_swap import handle_of
from countoff._adapter.even_loaders import even_inside, keeps_length
from countoff._adapter.fit import Fit, OwnRank
from countoff._adapter.hooks import SharedHooks
from countoff._adapter.loader_passes import UNSEEN_STEPS
from countoff._adapter.mesh_position import data_position
from countoff._adapter.observed_loaders import cover_state_of, share_length
from countoff._adapter.observed_loop import ObservedLoop, active_loops
from countoff._adapter.schedule_watch import Schedule
from countoff._adapter.torch_facts import loader_facts, rank_and_world_size, versions
from countoff._fabric.words import WORDS, unseen_loader
from countoff.core import FitPlan, LoaderFacts, Settings
from countoff.core.ending import shutdown
from countoff.core.totals import Totals
from countoff.core.verdict import remedy_for

__all__ = ["FabricLoaders", "watch_fabric"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")


class _Assumed(NamedTuple):
    """A pass that is taken for an evaluation, and whether it began inside another pass."""

    loader: Any
    inside: bool


class FabricLoaders:
    """The loaders of one Fabric, counted from the first train epoch on.

    Fabric does not know which loader a script trains on. So a pass with gradients disabled is an evaluation, and the
    first other pass is a train epoch. From then on, a pass over another loader is taken for an evaluation until the
    script makes an optimizer step in it. With `uneven_train`, a pass outside of any other is always a train epoch.

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
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trained_last: weakref.ref[Any] | None = None
        self._planned: weakref.ref[Any] | None = None  # the loader whose length the fit's plan has
        self._beside: weakref.WeakSet[Any] = weakref.WeakSet()  # iterated together with a loader that is counted
        self._assumed: _Assumed | None = None
        self._schedulers: list[Any] = []
        self._run: dict[str, Any] = {}  # what the script has told of its length
        self._record: Mapping[str, Any] = {}  # of the checkpoint that was loaded, or of the last fit
        self._resumes = False  # whether the next fit goes on from that checkpoint
        self._has_trained = False
        # A train epoch that is taken for an evaluation would not be made even.
        self._new_loaders_evaluate = settings.uneven_train == "raise"

    def add(self, fabric: Any, loaders: Sequence[Any]) -> None:
        """Counts the passes over loaders from here on.

        Args:
            fabric: The Fabric that has set them up.
            loaders: What its `setup_dataloaders` returned.
        """
        mesh = getattr(fabric.strategy, "device_mesh", None)
        self._data_position = data_position(mesh, rank=fabric.global_rank, world_size=fabric.world_size)
        self.known = True
        for loader in loaders:
            _owners[loader] = weakref.ref(self)

    def follow(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the generator of one pass, which the script's `for` iterates.

        Args:
            loader: A loader that was added.
            batches: Its own iterator.
        """
        kind = self._kind_of_pass(loader)
        if kind == "train":
            self._train_on(loader)
        if kind is None or self.loop is None:
            yield from batches
            return
        name = None if kind == "train" else kind
        try:
            source, planned = _source(loader), self._planned and self._planned()
            cover_state_of(self.loop, source)
            # Made even inside of Fabric's loader, which moves each batch to the device.
            even = functools.partial(even_inside, inner=source, ahead=False, proven=planned is loader)
            yield from self.loop.passes.follow(batches, name, loader=source, even=even)
        finally:
            if self._assumed is not None and self._assumed.loader is loader:
                self._assumed = None

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
        assumed, self._assumed = self._assumed, None
        if assumed is not None and assumed.inside:
            self._beside.add(assumed.loader)
        elif assumed is not None:
            self._trained.add(assumed.loader)
            self._new_loaders_evaluate = False
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

    def _forget_record(self) -> None:
        self._record, self._resumes = {}, False

    def _close(self) -> ObservedLoop | None:
        """Lets go of the fit, if there is one, and keeps its record for checkpoints that are written after it."""
        loop, self.loop = self.loop, None
        if loop is not None:
            self._record, self._resumes = loop.record(), False
            self._schedulers, self._run = [], {}
        return loop

    def _kind_of_pass(self, loader: Any) -> Literal["train", "evaluation"] | None:
        """Returns what a pass that begins is, as far as that is known by now; None if it is not counted."""
        if self.aside or loader in self._beside:
            return None
        if self.loop is None:  # an evaluation before training is not compared
            return "train" if torch.is_grad_enabled() else None
        if not torch.is_grad_enabled():
            return "evaluation"
        inside = self.loop.guard.open_span is not None
        if loader in self._trained or not (inside or self._new_loaders_evaluate):
            return "train"
        self._assumed = _Assumed(loader, inside)
        return "evaluation"

    def _train_on(self, loader: Any) -> None:
        """Takes a loader for the train loader. Collective at the first train epoch, which begins the fit."""
        last = self._trained_last and self._trained_last()
        self._trained_last = weakref.ref(loader)
        self._trained.add(loader)
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
        # Where it tells how many batches every epoch has, it must hold for every pass.
        fixed = self._settings.uneven_train == "raise" or keeps_length(_source(loader))
        plan = FitPlan(
            batches_per_epoch=facts.reported_batches,
            proven_batches_per_epoch=totals.plan.batches_per_epoch if fixed else None,
            batch_size=facts.batch_size,
            dp_rank=own.dp_rank,
            dp_degree=own.dp_degree,
            runs_to_end=False,
        )
        self.loop = loop = ObservedLoop(fit)
        loop.passes.expects_more = False  # the script may train on a loader that is still taken for an evaluation's
        fit.watch_schedules(map(Schedule.of, self._schedulers), source_batches=facts.reported_batches)
        _fits.add(loop)
        loop.begin(
            plan,
            versions("lightning", "lightning-fabric"),
            record=self._record if self._resumes else None,
            compare=not self._has_trained,
        )
        share_length(loop, _source(loader))  # which tells the length of Fabric's
        self._forget_record()
        self._has_trained = True

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


class _Watch(NamedTuple):
    """A callback, as long as it exists, and the loaders of its Fabric."""

    callback: weakref.ref[Any]
    loaders: FabricLoaders


_owners: weakref.WeakKeyDictionary[Any, weakref.ref[FabricLoaders]] = weakref.WeakKeyDictionary()
_fits: weakref.WeakSet[ObservedLoop] = weakref.WeakSet()


def watch_fabric(callback: Any, loaders: FabricLoaders) -> None:
    """Adds what a Fabric sets up to the loaders of its callback, while that callback exists.

    It concerns the Fabric packages that are imported by now. When the last such callback is gone, their classes get
    their own methods back. Of two such callbacks of one Fabric, the first one counts.

    Args:
        callback: One of a Fabric's callbacks, now or later.
        loaders: The loaders of that Fabric.
    """
    weakref.finalize(callback, _watches.add(_Watch(weakref.ref(callback), loaders))).atexit = False


def _methods() -> dict[tuple[type, str], Callable[..., Any]]:
    """Returns what stands in for methods of Fabric's classes."""
    found: dict[tuple[type, str], Callable[..., Any]] = {}
    for package in _PACKAGES:
        fabric = getattr(sys.modules.get(package), "Fabric", None)
        loader = getattr(sys.modules.get(f"{package}.wrappers"), "_FabricDataLoader", None)
        if fabric is not None and loader is not None:
            found |= {
                (fabric, "setup_dataloaders"): _set_up_loaders,
                (fabric, "backward"): _backward,
                (fabric, "setup"): _set_up,
                (fabric, "setup_module"): _set_up,
                (fabric, "setup_optimizers"): _set_up,
                (loader, "__iter__"): _iterate,
            }
    return found


_watches: SharedHooks[_Watch] = SharedHooks(_methods)


def _watching(fabric: Any) -> list[FabricLoaders]:
    """Returns what watches a Fabric, in the order of its callbacks."""
    known = {id(watch.callback()): watch.loaders for watch in _watches}  # the id of None is that of no callback
    return [known[id(each)] for each in getattr(fabric, "_callbacks", ()) if id(each) in known]


def _set_up_loaders(setup: Callable[..., Any], fabric: Any, *dataloaders: Any, **options: Any) -> Any:
    result = setup(fabric, *dataloaders, **options)
    found = _watching(fabric)
    for loaders in found[1:]:
        loaders.leave_to_others()
    for loaders in found[:1]:
        loaders.add(fabric, result if isinstance(result, list) else [result])
    return result


def _backward(backward: Callable[..., Any], fabric: Any, *arguments: Any, **options: Any) -> Any:
    result = backward(fabric, *arguments, **options)
    for loaders in _watching(fabric):
        if loaders.loop is not None:
            loaders.loop.micro_batch()
    return result


def _set_up(setup: Callable[..., Any], fabric: Any, *parts: Any, **options: Any) -> Any:
    result = setup(fabric, *parts, **options)
    for loaders in _watching(fabric)[:1]:
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, torch.nn.Module):
                loaders.add_model(part)
            else:
                loaders.add_optimizer(getattr(part, "optimizer", None))
    return result


def _iterate(iterate: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
    batches = iterate(loader)
    reference = _owners.get(loader)
    loaders = None if reference is None else reference()
    if loaders is None:
        return batches
    if handle_of(loader) is not None:  # the script has attached it by itself
        loaders.leave_to_others()
        return batches
    return loaders.follow(loader, batches)


def _source(loader: Any) -> Any:
    """Returns the loader inside Fabric's."""
    return getattr(loader, "_dataloader", loader)


def _facts(loader: Any, run: Mapping[str, Any]) -> LoaderFacts:
    return loader_facts(_source(loader), reported_is_cap=False, partial_step="dropped", **run)
