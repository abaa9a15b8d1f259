"""Finds weights that drift apart because an optimizer steps by gradients of `no_sync()`.

DistributedDataParallel averages no gradients there. Such a step is right in a program that averages its weights by
itself, by whatever means, or puts them back. So a step alone proves nothing: weights are compared, where DDP has
averaged gradients after it and an optimizer has stepped by these, with the first forward pass that follows. A program
that averages weights has done so by then.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from countoff._adapter.forward_passes import Hook
from countoff._adapter.torch_facts import groups_of, on_optimizer_step
from countoff._adapter.weight_hashes import PendingReplicas, is_ignored, modules_of, parameters_of
from countoff.core.data.plain import bases_of, items_of

if TYPE_CHECKING:
    from countoff._adapter.fit import Fit

__all__ = ["watch_averaging"]


def watch_averaging(fit: Fit) -> Callable[[], None]:
    """Observes each DDP among a fit's models that nothing compiles.

    Args:
        fit: The fit.

    Returns:
        A function that ends that.
    """
    compared = fit.own.world_size > 1 and fit.settings.levels.get("WeightsDiffer") != "off"
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:  # as of a parameter that takes no hook
        named = [each for model in fit.models() if compared for each in modules_of(model)]
        found = [(path, each) for path, each in named if DistributedDataParallel in bases_of(type(each))]
        for number, (path, module) in enumerate(found):
            if not _is_compiled(path, module):
                _watch(fit, number, module, stack)
        return stack.pop_all().close
    return _nothing


def _is_compiled(path: str, module: Any) -> bool:
    """Whether a module is inside of what `torch.compile(module)` returns, or compiled by `module.compile()` itself.

    A module around it that is compiled by its own `compile()`, and a compiled function that calls it, are not seen.
    """
    return "_orig_mod" in path.split(".") or getattr(module, "_compiled_call_impl", None) is not None


def _watch(fit: Fit, number: int, module: Any, stack: contextlib.ExitStack) -> None:
    parameters = parameters_of(module.module)
    trained = next((each for name, each in parameters if each.requires_grad and not is_ignored(module, name)), None)
    if trained is None:
        return
    steps = _Steps(fit, number, module, trained)
    stack.callback(steps.end)
    stack.callback(trained.register_post_accumulate_grad_hook(_Backward(steps)).remove)
    stack.callback(on_optimizer_step(steps.stepped).remove)


class _Steps:
    """What is known of the steps of one DDP.

    Args:
        fit: The fit. Its guard may change.
        number: The number of the DDP among those of the fit, which is the same on all ranks.
        module: The DDP.
        trained: One of its parameters, which stands for all.
    """

    def __init__(self, fit: Fit, number: int, module: Any, trained: Any) -> None:
        self._fit = fit
        self._number = number
        self._begun = 0
        self._module: weakref.ref[Any] = weakref.ref(module)
        self._trained: weakref.ref[Any] = weakref.ref(trained)
        self._averages: bool | None = None
        self._handle: Any = None
        self._begin_again()

    def ran_backward(self) -> None:
        """Takes note of a backward pass that has reached the parameter."""
        module = self._module()
        self._averages = averages = module is None or module.require_backward_grad_sync
        self._has_averaged |= averages and self._apart > 0

    def stepped(self, optimizer: Any) -> None:
        """Takes note of an optimizer step, which is counted already."""
        averages = self._averages
        # Another optimizer of the same model may step first, and leaves the gradient to the one that has the parameter.
        if averages is None or (averages and not self._apart) or not self._is_stepped_by(optimizer):
            return
        self._averages = None
        if self._fit.trains_apart or self._fit.guard is not self._guard:
            self._begin_again()
            return
        if not self._apart:
            self._apart = self._guard.steps
        elif self._has_averaged:
            self._has_averaged = False
            self._found += 1
            # The first one may come while the learning rate is 0. In a program that averages weights, all are in vain.
            if self._found & (self._found - 1) == 0:
                self._compare_in_next_pass()

    def end(self) -> None:
        """Takes back what may wait for the next pass."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begins_pass(self, module: Any) -> None:
        """Compares the weights, if this pass is one for training."""
        if module.training and torch.is_grad_enabled():
            self.end()
            if self._apart and not self._fit.trains_apart and self._fit.guard is self._guard:
                self._begun += 1
                unaveraged, moment = self._apart, f"ddp{self._number}.{self._begun}"
                # What this comparison does not find, a later one must not lay to these steps.
                self._apart, self._has_averaged = 0, False
                self._guard.suspect_weights(unaveraged, moment, lambda: PendingReplicas([module]))

    def _begin_again(self) -> None:
        self._guard = self._fit.guard
        self._apart = self._found = 0
        self._has_averaged = False

    def _compare_in_next_pass(self) -> None:
        module = self._module()
        if module is not None and self._handle is None:
            self._handle = module.register_forward_pre_hook(_Forward(self), prepend=True)

    def _is_stepped_by(self, optimizer: Any) -> bool:
        trained = self._trained()  # in general, among the first
        return any(each is trained for group in groups_of(optimizer) for each in items_of(group.get("params")) or ())


class _Backward(Hook):
    """Runs behind each backward pass that has added to a parameter's gradient.

    Args:
        steps: What is known of the steps of its DDP.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __call__(self, *_: Any) -> None:
        self._steps.ran_backward()


class _Forward(Hook):
    """Runs before the next forward pass.

    Args:
        steps: As above.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __call__(self, module: Any, *_: Any) -> None:
        if not is_compiling():
            self._steps.begins_pass(module)


def _nothing() -> None:
    pass
