"""The handle of a training loop that is observed from outside: what every `attach` returns, from begin to end.

A loop has no hook for "an exception leaves" and none for "the program ends", so the handle listens for its departure.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from countoff._adapter.class_swap import handle_of, swap_class
from countoff._adapter.exit_hooks import ExitHooks
from countoff._adapter.loader_passes import LoaderPasses
from countoff._adapter.torch_facts import on_optimizer_step
from countoff.core import DivergenceError, Guard, Settings, Verdict
from countoff.core.runtime import shutdown
from countoff.core.totals import Totals


class Attached:
    """What `attach` returns.

    Args:
        new_guard: Makes the guard of a fit; called again when a checkpoint is loaded.
        totals: What an epoch holds.
        settings: The user's choices.
        epoch: Number of the first train epoch.
        steps_of: Whether a step of an optimizer is this loop's; None: of any.
    """

    def __init__(
        self,
        new_guard: Callable[[], Guard],
        totals: Totals,
        settings: Settings,
        *,
        epoch: int,
        steps_of: Callable[[Any], bool] | None = None,
    ) -> None:
        self.totals = totals
        self.steps_before = 0
        self._new_guard = new_guard
        self._settings = settings
        self._steps_of = steps_of
        self._release = contextlib.ExitStack()
        self._departure: ExitHooks | None = None
        self._detached = True
        self._failed = False
        self.passes = LoaderPasses(new_guard(), epoch=epoch, exhausted=self._learn_length)

    @property
    def guard(self) -> Guard:
        """The guard underneath."""
        return self.passes.guard

    def progress(self) -> dict[str, float]:
        """The true totals as known by now, and how far this rank is, under the names of the logs."""
        values: dict[str, float] = {**self.totals.plan.metrics(), **self.guard.metrics}
        done = self.totals.progress(self.guard.train_batches)
        return values if done is None else values | {"countoff/epoch_progress": done}

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context in which passes are not compared: around `Join`, or what else may legitimately be uneven."""
        self.passes.comparing = False
        try:
            yield
        finally:
            self.passes.comparing = True

    def observe_loaders(self, loaders: Mapping[str | None, Any]) -> Callable[[], None]:
        """Counts the passes over loaders from here on; returns a function that gives their own classes back.

        Another handle that still observes one of them is abandoned: the loop starts again, in a notebook, say, or after
        an exception.

        Args:
            loaders: By the evaluation's name; None for the train loader.

        Raises:
            TypeError: If a loader cannot be observed; then none of them is.
        """
        with contextlib.ExitStack() as stack:
            for loader in loaders.values():
                if (earlier := handle_of(loader)) is not None:
                    earlier.abandon()
            for name, loader in loaders.items():
                follow = functools.partial(self._follow, name)
                try:
                    stack.callback(swap_class(loader, follow, handle=self))
                except TypeError as error:
                    raise TypeError(f"attach({'train' if name is None else 'eval'}=…) {error}") from None
            return stack.pop_all().close

    def detach(self) -> None:
        """Ends the fit and gives the loaders back as they were. The second time nothing happens.

        Raises:
            DivergenceError: If another rank goes on, or has diverged before.
        """
        if self._let_go():
            self._end_guard()

    def abandon(self) -> None:
        """Gives the loaders back as they were, without a word about how the fit ended."""
        if self._let_go():
            self.guard.close()

    def begin(
        self,
        plan: Mapping[str, Any],
        versions: Mapping[str, str],
        release: Callable[[], None],
        *notices: Verdict | None,
    ) -> None:
        """Begins the fit. Collective: every rank must call it; it waits at most `deadline_seconds`.

        Args:
            plan: What the ranks must agree on.
            versions: What a difference is worth a warning of.
            release: Gives the loaders back as they were.
            notices: What there is to warn of at once.
        """
        self._detached = False
        self._release.callback(release)
        self._release.callback(on_optimizer_step(self._step, self._steps_of).remove)
        self._departure = ExitHooks(self._fail, self._at_exit)
        self._start_guard(plan, versions)
        for notice in (*notices, self.totals.wrong_length()):
            if notice is not None:
                self.guard.warn(notice)

    def begin_again(self, plan: Mapping[str, Any], versions: Mapping[str, str], *, epoch: int, steps: int) -> None:
        """Begins another fit from a checkpoint that every rank has loaded. Collective: every rank must call it.

        Args:
            plan: What the ranks must agree on, the checkpoint's position included.
            versions: What a difference is worth a warning of.
            epoch: Number of the next train epoch.
            steps: Optimizer steps that the checkpoint has behind it.
        """
        if self._detached:
            return
        self._end_guard()
        self.steps_before = steps
        self.passes.epoch = epoch
        self.passes.guard = self._new_guard()
        self._start_guard(plan, versions)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.detach()
        else:
            self._fail(error)

    def _follow(self, name: str | None, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        return self.passes.follow(batches, name, loader=loader)

    def _let_go(self) -> bool:
        """Whether there was anything to let go of."""
        if self._detached:
            return False
        self._detached = True
        if self._departure is not None:
            self._departure.cancel()
        self._release.close()
        return True

    def _start_guard(self, plan: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        self.guard.fit_start(plan, versions)
        if self._departure is not None:
            self._departure.listen_at_exit()  # after the guard's own, so that it runs before it

    def _end_guard(self) -> None:
        try:
            self.passes.close_stale(everything=True)
            self.guard.fit_end()
        finally:
            self.guard.close()

    def _step(self) -> None:
        self.guard.step()
        if self.passes.expects_train:
            self.passes.step_unseen()

    def _learn_length(self) -> Verdict | None:
        self.totals.observe(self.guard.batches)
        return self.totals.wrong_length()

    def _fail(self, error: BaseException) -> None:
        if self._detached:
            return
        self._failed = True
        self.guard.failed(error)

    def _at_exit(self) -> None:
        error = _under_way()
        if error is not None:
            self._fail(error)
        if self.guard.verdict is None and not self._failed:
            with contextlib.suppress(DivergenceError):
                self.detach()
        raised = self._failed or getattr(sys, "last_value", None) is not None
        if self.guard.verdict is not None and not raised and self._settings.on_divergence == "raise":
            shutdown.exit_now()  # found after the last line of the program: nothing else can say it by an exit code
        self.guard.close()


def _under_way() -> BaseException | None:
    """The exception that ends this process, where no excepthook is called: a child of multiprocessing."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error
