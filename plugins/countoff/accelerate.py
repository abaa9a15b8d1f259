"""countoff for Hugging Face Accelerate: ``for batch in countoff.train(train_loader)``, after ``prepare()``.

Accelerate has no callbacks. Batches are counted where the loop takes them, optimizer steps where torch applies them.
`save_state` and `load_state` keep the record for a resumed run.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from countoff._adapter.requirements import needs

with needs("Accelerate", facade="countoff.accelerate", install="'countoff[accelerate]'"):
    from countoff._accelerate import accelerator as reading
    from countoff._accelerate.checkpoints import watch_checkpoints
    from countoff._accelerate.loader_facts import evaluation_facts
    from countoff._accelerate.loaders import epoch_length, even_prepared, is_prepared, skipped_batches, source_length
    from countoff._accelerate.messages import CALLS, MESSAGES
    from countoff._accelerate.observation import observe, watch_uneven
    from countoff._accelerate.process import not_distributed
from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.epoch_steps import EpochSteps
from countoff._adapter.evaluation_totals import EvaluationTotals
from countoff._adapter.fit import Fit, OwnRank, plan_of
from countoff._adapter.options import own_arguments
from countoff._adapter.own_loop import OwnLoop
from countoff._adapter.torch_facts import versions
from countoff._adapter.weight_hashes import Wrappers
from countoff.core import LoaderFacts, Settings
from countoff.core.arithmetic.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["Countoff"]


class Countoff(OwnLoop):
    """Counts what a loop with Accelerate does. Make it on every rank, after `accelerator.prepare()`.

    Use it once per fit, in each loop over a prepared loader::

        countoff = Countoff(accelerator)
        for epoch in range(epochs):
            for batch in countoff.train(train_loader):
                ...
            for batch in countoff.eval(eval_loader):
                ...

    The first batch waits for the other ranks at most `deadline_seconds`; nothing later waits for one longer than 50 ms,
    except that `accelerator.load_state()` in the middle of a fit begins another one at the checkpoint's position. What
    is the user's is held weakly. It may be used as a context manager, which ends the fit.

    Args:
        accelerator: The Accelerator that has prepared the loaders.
        epochs: Epochs of the run, at least 0, if known: learning-rate schedules are compared with it.
        max_steps: Optimizer steps after which the run ends, at least 0, if there is such a limit.
        options: Those of `countoff.core.Settings`.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
        ValueError: If `epochs` or `max_steps` is below 0.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        settings = Settings.resolve(*own_arguments(Countoff), **options)
        self._accelerator: weakref.ref[Any] = weakref.ref(accelerator)
        self._held = accelerator  # as long as this object: a program may have no other reference
        self._run = {"epochs": epochs, "max_steps": max_steps}
        rank, world_size = accelerator.process_index, accelerator.num_processes
        self._own = OwnRank(rank, world_size, *reading.position_of(accelerator))
        self._facts(None)  # refuses a bad number now
        super().__init__(settings)
        if settings.enabled:
            watch_checkpoints(accelerator, self)
            watch_uneven(accelerator, self)

    def _new_loop(self) -> CountedLoop:
        of, own = self._accelerator, self._own
        fit = Fit(
            self._settings,
            MESSAGES,
            own,
            optimizers=lambda: getattr(of(), "_optimizers", ()),
            schedulers=lambda: [getattr(each, "scheduler", each) for each in getattr(of(), "_schedulers", ())],
            calls_per_step=own.world_size,
            models=Wrappers(lambda: getattr(of(), "_models", ())),
        )
        loop = CountedLoop(fit, steps_of=lambda each: reading.is_prepared_optimizer(of(), each), own=True)
        facts_of = functools.partial(evaluation_facts, num_processes=own.dp_degree, process_index=own.dp_rank)
        loop.tell_evaluations(EvaluationTotals(facts_of, dp_degree=own.dp_degree))
        return loop

    def _tell_of(self, loop: CountedLoop, loader: Any) -> LoaderFacts:
        facts = self._facts(loader)
        loop.fit.totals = Totals(facts, dp_degree=self._own.dp_degree)
        of = self._accelerator
        loop.epoch_steps = EpochSteps(
            lambda: getattr(of(), "gradient_accumulation_steps", 1),
            optimizers=lambda: len(getattr(of(), "_optimizers", ())),
        )
        if is_prepared(loader):
            reference = weakref.ref(loader)
            loop.train_loader = reference
            loop.length_now = lambda: epoch_length(reference()) if facts.reported_batches is not None else None
            loop.may_resume = bool(loader.use_stateful_dataloader)
        return facts

    def _epoch_length(self, loader: Any) -> int | None:
        return reading.reported_batches(loader)

    def _begin_fit(self, loop: CountedLoop, loader: Any, facts: LoaderFacts, **known: Any) -> None:
        accelerator = self._accelerator()
        source_batches = source_length(loader) if is_prepared(loader) and facts.reported_batches is not None else None
        loop.fit.watch_schedules(reading.schedules(accelerator), source_batches=source_batches, why=CALLS)
        loop.until_end(observe(accelerator, loop))
        plan = plan_of(
            facts,
            self._own,
            batches_per_epoch=reading.common_length(facts),
            position=[loop.passes.epoch, 0, 0],
            runs_to_end=False,
        )
        reading.log_length(accelerator, source_batches, facts.reported_batches)
        loop.begin(plan, versions("accelerate"), not_distributed(accelerator), loaders={None: loader}, **known)

    def _ways(self, loader: Any, name: str | None, position: int) -> dict[str, Any]:
        if not is_prepared(loader):
            return super()._ways(loader, name, position)
        return {
            "loader": loader,
            "position": position + skipped_batches(loader),
            "ahead": loader,  # it has fetched one batch more than it handed out
            "even": even_prepared(loader, proven=self._proves(loader, name)),
        }

    def _facts(self, loader: Any) -> LoaderFacts:
        return reading.train_facts(self._accelerator(), loader, **self._run)
