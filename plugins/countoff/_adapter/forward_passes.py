"""Counts the forward passes of modules for training, with hooks that are the modules' own until they are removed.

A copy or a pickle of a module has hooks that do nothing, and that can be loaded where countoff is not installed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling

__all__ = ["Hook", "check_modules", "count_forward_passes"]


def check_modules(modules: Iterable[Any]) -> None:
    """Refuses what is no module.

    Raises:
        TypeError: If one is not a `torch.nn.Module`.
    """
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"Countoff(model=…) takes a module or a list of modules, got a {type(module).__name__}")


def count_forward_passes(modules: Iterable[Any], count: Callable[[], None]) -> Callable[[], None]:
    """Calls a function after each forward pass of modules for training; returns a function that ends that.

    A pass is one for training if the module is in training mode and gradients are enabled. A pass inside of another
    one of its thread, of the same module or of another, is not counted. Nor is that of a replica of `DataParallel`, nor
    one inside a backward pass, where activation checkpointing runs the forward pass again. Once torch.compile has
    compiled one of the modules with its hooks, as it does with a module inside of the one that the loop calls, nothing
    is counted: compiled code runs no hook, and goes back to Python code at different passes on each rank.

    Args:
        modules: The modules, wrapped as the loop calls them.
        count: Called without arguments.

    Raises:
        TypeError: If one is not a `torch.nn.Module`, or takes no hooks; then none is observed.
    """
    passes, modules = _ForwardPasses(count), list(modules)
    check_modules(modules)
    with contextlib.ExitStack() as stack:
        for module in modules:
            try:
                stack.callback(module.register_forward_pre_hook(_Begin(passes)).remove)
                stack.callback(module.register_forward_hook(_End(passes), always_call=True).remove)
            except (RuntimeError, NotImplementedError) as error:  # a module of TorchScript
                raise TypeError(f"Countoff(model=…) cannot observe a {type(module).__name__}: {error}") from None
        return stack.pop_all().close


_running_backward_pass = torch._C._current_graph_task_id


class Hook:
    """A hook of a module. Its copy or its pickle does nothing, and can be loaded where countoff is not installed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes what a hook takes, and does nothing


class _Thread(threading.local):
    """How many passes this thread is inside of."""

    depth = 0


class _ForwardPasses:
    """The passes of modules that one handle observes.

    Attributes:
        count: Called for each one that counts.
        thread: What is known of the thread that reads it.
        compiled: Whether compiled code has run a hook, or may have.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self.count = count
        self.thread = _Thread()
        self.compiled = False


class _OfEachPass(Hook):
    """A hook that runs in each pass, and so makes as few calls as it can.

    Args:
        passes: What is known of the passes of all modules.
    """

    def __init__(self, passes: _ForwardPasses) -> None:
        self._passes = passes


class _Begin(_OfEachPass):
    """Runs before each pass."""

    def __call__(self, *_: Any) -> None:
        passes = self._passes
        if is_compiling():
            passes.compiled = True  # compiled code does this too, and so does nothing in `_End`
        else:
            passes.thread.depth += 1


class _End(_OfEachPass):
    """Runs behind each pass, also behind one that has raised."""

    def __call__(self, *arguments: Any) -> None:
        passes = self._passes
        if passes.compiled:
            return
        module, _, result = arguments  # torch.compile, which may compile a hook alone, looks at all that has a name
        thread = passes.thread
        depth = thread.depth - 1
        if depth > 0:
            thread.depth = depth
            return
        thread.depth = 0  # also behind the pass in which the modules were given
        if (
            result is not None  # else the pass has raised
            and module.training
            and "_is_replica" not in module.__dict__  # of DataParallel, which runs them on threads of its own
            and is_grad_enabled()
            and _running_backward_pass() == -1
        ):
            passes.count()
