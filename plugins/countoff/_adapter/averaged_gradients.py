"""Finds optimizer steps by gradients that DistributedDataParallel has not averaged.

DDP averages nothing behind a forward pass inside `no_sync()`. If such a pass is the last one before a step, the step
takes the gradients of this rank's own data. A program that trains its ranks apart on purpose averages the weights
later. So a fault is proven only where DDP averages gradients again, and this rank has issued no collective meanwhile.
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
from countoff._adapter.torch_facts import on_optimizer_step
from countoff._adapter.weight_hashes import modules_of, parameters_of, synchronises_in_its_own_way
from countoff.core.checks.weights import judge_gradients
from countoff.core.data.plain import bases_of
from countoff.core.liveness.collectives import numbers

if TYPE_CHECKING:
    from countoff._adapter.fit import Fit

__all__ = ["watch_averaging"]


def watch_averaging(fit: Fit) -> Callable[[], None]:
    """Warns of steps by gradients that are not averaged, of each DDP among a fit's models that nothing compiles.

    Args:
        fit: The fit.

    Returns:
        A function that ends that.
    """
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:  # as without a process group any more
        for model in fit.models() if fit.own.world_size > 1 else ():
            for path, module in modules_of(model):
                if DistributedDataParallel in bases_of(type(module)) and "_orig_mod" not in path.split("."):
                    _watch(fit, module, stack)
        return stack.pop_all().close
    return _nothing


def _watch(fit: Fit, module: Any, stack: contextlib.ExitStack) -> None:
    trained = next((each for _, each in parameters_of(module) if each.requires_grad), None)
    # A process group that counts has counted DDP's own beginning.
    if trained is None or synchronises_in_its_own_way(module) or not numbers().get(module.process_group.group_name):
        return
    steps = _Steps(fit, trained)
    stack.callback(module.register_forward_hook(_Passed(steps)).remove)
    stack.callback(on_optimizer_step(steps.stepped).remove)


class _Steps:
    """What is known of the steps of one DDP.

    Args:
        fit: The fit. Its guard may change.
        trained: One of its parameters, which stands for all.
    """

    def __init__(self, fit: Fit, trained: Any) -> None:
        self._fit = fit
        self._trained = weakref.ref(trained)
        self._passed: tuple[Any, ...] | None = None
        self._apart: tuple[Any, int] | None = None

    def passed(self, module: Any) -> None:
        """Takes note of a forward pass for training that has ended."""
        apart = self._apart
        if self._fit.trains_apart:
            self._passed = self._apart = None
        elif not module.require_backward_grad_sync:
            self._passed = numbers(), self._gradient()
        else:
            self._passed = self._apart = None
            if apart is not None and apart[0] == numbers():
                self._fit.warn(judge_gradients(apart[1]))

    def stepped(self, optimizer: Any) -> None:
        """Takes note of an optimizer step, which is counted already."""
        if self._passed is None:
            return
        (issued, gradient), self._passed = self._passed, None
        trained = self._trained()
        has_run_backward = gradient != self._gradient()
        if not has_run_backward or not any(
            each is trained for group in optimizer.param_groups for each in group["params"]
        ):
            return
        if issued == numbers() and (self._apart is None or self._apart[0] != issued):
            self._apart = issued, self._fit.guard.steps

    def _gradient(self) -> tuple[int, int]:
        """What changes with each backward pass that adds to the parameter's gradient."""
        gradient = getattr(self._trained(), "grad", None)
        return (0, 0) if gradient is None else (id(gradient), gradient._version)


class _Passed(Hook):
    """A hook that runs behind each forward pass of a DDP.

    Args:
        steps: What is known of its steps.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps: _Steps | None = steps

    def __call__(self, module: Any, *_: Any) -> None:
        steps = self._steps
        if is_compiling():
            self._steps = None  # compiled code does this too
        elif steps is not None and module.training and torch.is_grad_enabled():
            steps.passed(module)


def _nothing() -> None:
    pass
