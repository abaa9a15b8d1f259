"""Watches the loops over torch's loaders whose optimizer steps are those of all ranks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from countoff._adapter.even_loaders import saves_state
from countoff._adapter.fit import Fit, OwnRank, plan_of
from countoff._adapter.hooks import MethodHook
from countoff._adapter.observed_loop import ObservedLoop
from countoff._adapter.sampling import asks_for_length
from countoff._adapter.torch_facts import loader_facts, rank_and_world_size, reported_length, versions
from countoff._run.rhythm import Rhythm
from countoff._run.watched_loops import FOUND, Noticed, WatchedLoops
from countoff._torch.words import WORDS
from countoff.core import LoaderFacts
from countoff.core.totals import Totals

__all__ = ["WatchedLoaders"]


class WatchedLoaders(WatchedLoops):
    """The loops of a script over torch's loaders, as far as ranks meet in their optimizer steps.

    Ranks are known to meet where an optimizer has parameters of a model that is wrapped for all ranks of the job, or
    that is sharded over all of them, and where it is the one that an engine of DeepSpeed's steps, whose data-parallel
    ranks are all of the job. The loop must take equally many batches for each step: else what it trains on is not what
    its loader gives.

    Args:
        wrappers: The wrapped models, to which later ones are added.
        engines: The engines of DeepSpeed's, likewise.
    """

    def __init__(self, wrappers: weakref.WeakSet[Any], engines: weakref.WeakSet[Any]) -> None:
        super().__init__("this loop")
        self._wrappers, self._engines = wrappers, engines
        self._process = os.getpid()
        self._rhythm = Rhythm()  # of the pass that is counted, or the last one that was
        self._together: weakref.WeakKeyDictionary[Any, tuple[tuple[int, int], bool]] = weakref.WeakKeyDictionary()
        for name, inside in (("__enter__", True), ("__exit__", False)):
            self.hooks.callback(MethodHook(Join, name, after=lambda *_, inside=inside: self.train_apart(inside)).remove)

    def noticed(self, loader: Any) -> Noticed | None:
        return Noticed(None, loader, loader) if os.getpid() == self._process else None

    def steps_together(self, noticed: Noticed, optimizer: Any) -> bool:
        del noticed
        return self._steps_together(optimizer)

    def _steps_together(self, optimizer: Any) -> bool:
        made = len(self._wrappers), len(self._engines)
        known = self._together.get(optimizer)
        if known is None or known[0] != made:
            self._together[optimizer] = known = made, self._ranks_meet(optimizer)
        return known[1]

    def trains(self, noticed: Noticed) -> bool:
        if self.loop is not None and self.loop.guard.open_span is not None:
            return True  # another loader of a loop whose epoch is counted, by whose batches nothing is judged
        rhythm = Rhythm(self._rhythm.gap)
        for each in noticed.steps:
            rhythm.stepped(each.taken)
        if rhythm.broken:
            self.close()
        elif rhythm.is_steady:
            self._rhythm = rhythm
        return rhythm.is_steady

    def counted_step(self, optimizer: Any, batches: int) -> None:
        if self._steps_together(optimizer):
            self._rhythm.stepped(batches)
            self.lost = self._rhythm.broken

    def begin(self, noticed: Noticed) -> ObservedLoop:
        rank, world_size = rank_and_world_size()
        loader, optimizers = noticed.loader, _optimizers(noticed)
        facts, settings = _facts(loader), self.settings_of_fit(rank)
        levels = {**settings.levels, "DuplicateData": "off"}  # each rank may train on its share of equal batches
        fit = Fit(
            replace(settings, levels=levels),
            WORDS,
            OwnRank(rank, world_size, rank, world_size),
            _totals(facts, world_size),
            optimizers=lambda: optimizers,
            models=lambda: [each for optimizer in optimizers for each in self._wrappers_of(optimizer)],
        )
        loop = ObservedLoop(fit, steps_of=self._steps_together, found_by=FOUND, found_at=self.steps())
        _tell_of(loop, loader)
        plan = plan_of(facts, fit.own, batches_per_epoch=facts.reported_batches, position=[0, 0, 0], runs_to_end=False)
        loop.begin(plan, versions(), loaders={None: loader})
        return loop

    def goes_on_with(self, loop: ObservedLoop, noticed: Noticed) -> None:
        loop.fit.totals = _totals(_facts(noticed.loader), loop.fit.own.world_size)
        _tell_of(loop, noticed.loader)

    def train_apart(self, inside: bool) -> None:
        super().train_apart(inside)
        if self.loop is not None:
            self.loop.compare(not inside)

    def _ranks_meet(self, optimizer: Any) -> bool:
        if not dist.is_initialized():
            return False
        if any(each.basic_optimizer is optimizer and _reduces_over_all(each) for each in list(self._engines)):
            return True
        return bool(self._wrappers_of(optimizer)) or any(map(_is_sharded_over_all, _parameters(optimizer)))

    def _wrappers_of(self, optimizer: Any) -> list[Any]:
        """The models that are wrapped for all ranks, and of which an optimizer has a parameter."""
        own, everyone = {id(each) for each in _parameters(optimizer)}, dist.get_world_size()
        return [
            each
            for each in list(self._wrappers)
            if each.process_group.size() == everyone and any(id(known) in own for known in each.parameters())
        ]


def _optimizers(noticed: Noticed) -> list[Any]:
    """The optimizers that have stepped inside of a pass, in the order of their first steps."""
    return list({id(each.optimizer): each.optimizer for each in noticed.steps}.values())


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _is_sharded_over_all(parameter: Any) -> bool:
    """Whether `fully_shard` has cut a parameter into a share for each rank of the job."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.ndim == 1 and mesh.size() == dist.get_world_size()


def _reduces_over_all(engine: Any) -> bool:
    """Whether an engine of DeepSpeed's reduces its gradients over all ranks of the job, in one loop over batches."""
    return not engine.pipeline_parallelism and engine.dp_world_size == dist.get_world_size()


def _facts(loader: Any) -> LoaderFacts:
    known: dict[str, Any] = {"reported_is_cap": False, "partial_step": "dropped"}
    if asks_for_length(loader):
        return loader_facts(loader, **known)
    return LoaderFacts(reported_batches=None, batch_size=None, drop_last=False, samples_per_rank=None, **known)


def _totals(facts: LoaderFacts, world_size: int) -> Totals:
    return Totals(facts, dp_degree=world_size, framework="len(loader)")


def _tell_of(loop: ObservedLoop, loader: Any) -> None:
    """Lets a loop that was found compare its epochs with its loader, as long as the script keeps that."""
    held = weakref.ref(loader)
    if asks_for_length(loader):
        loop.length_now = lambda: reported_length(held())
    loop.train_loader = held
    loop.may_resume = saves_state(loader)
