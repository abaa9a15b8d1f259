"""Counts the forward passes of modules for training, with hooks that are the modules' own until they are removed.

A copy or a pickle of a module has hooks that do nothing, and that can be loaded where countoff is not installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

__all__ = ["Hook", "count_forward_passes"]


def count_forward_passes(modules: Iterable[Any], count: Callable[[], None]) -> Callable[[], None]:
    """Calls a function after each forward pass of modules for training; returns a function that ends that.

    A pass is one for training if the module is in training mode and gradients are enabled. A pass inside of another
    one, of the same module or of another, is not counted. Nor is one inside a backward pass, where activation
    checkpointing runs the forward pass again. Once torch.compile has compiled one of the modules with its hooks, as it
    does with a module inside of the one that the loop calls, nothing is counted: compiled code runs no hook, and goes
    back to Python code at different passes on each rank.

    Args:
        modules: The modules, wrapped as the loop calls them.
        count: Called without arguments.

    Raises:
        TypeError: If one is not a `torch.nn.Module`, or takes no hooks; then none is observed.
    """
    passes = _Passes(count)
    with contextlib.ExitStack() as stack:
        for module in modules:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"attach(model=…) takes a module or a list of modules, got a {type(module).__name__}")
            try:
                stack.callback(module.register_forward_pre_hook(Hook(passes, passes.begin)).remove)
                stack.callback(module.register_forward_hook(Hook(passes, passes.end), always_call=True).remove)
            except (RuntimeError, NotImplementedError) as error:  # a module of TorchScript
                raise TypeError(f"attach(model=…) cannot observe a {type(module).__name__}: {error}") from None
        return stack.pop_all().close


class _Passes:
    """The passes of modules that one handle observes."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._depth = 0
        self.compiled = False

    def begin(self, *_: Any) -> None:
        self._depth += 1

    def end(self, module: Any, _: Any, result: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if (
            not (self._depth or self.compiled)
            and result is not None  # else the pass has raised
            and module.training
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1  # no backward pass runs
        ):
            self._count()


class _Observes(Protocol):
    """What observes passes.

    Attributes:
        compiled: Whether compiled code has run a hook, or may have.
    """

    compiled: bool


class Hook:
    """A hook of a module.

    Args:
        passes: What observes the passes of the module.
        call: What the hook does.
    """

    def __init__(self, passes: _Observes, call: Callable[..., None]) -> None:
        self._passes = passes
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            self._passes.compiled = True  # compiled code does this too
        else:
            self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes what a hook takes, and does nothing
