"""Forward passes for training, counted by a module's own hooks."""

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from countoff._adapter.forward_passes import count_forward_passes

X = torch.ones(3, 4)


class Counted:
    """Counts forward passes of modules inside a `with` block."""

    def __init__(self, *modules: Any) -> None:
        self.passes = 0
        self._modules = modules

    def __enter__(self) -> "Counted":
        self._end = count_forward_passes(self._modules, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for module in self._modules:
            hooks = module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called
            assert [len(each) for each in hooks] == [0, 0, 0]

    def _count(self) -> None:
        self.passes += 1


class Net(torch.nn.Module):
    """A layer behind another one, which may be run again in the backward pass."""

    def __init__(self, run: Callable[[Any, Any], Any] = lambda layer, hidden: layer(hidden)) -> None:
        super().__init__()
        self.first, self.last, self.run = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), run

    def forward(self, batch: Any) -> Any:
        return self.run(self.last, self.first(batch))


def test_a_pass_for_training_counts_once() -> None:
    """Passes without gradients, in evaluation mode, of parts of the module, and those that raise do not count."""
    net = Net()
    with Counted(net, net.first) as counted:
        net(X)
        assert counted.passes == 1
        with torch.no_grad():
            net(X)
        net.eval()(X)
        net.train()
        with pytest.raises(RuntimeError):
            net(X[:, :1])
        assert counted.passes == 1
        net.first(X)
        assert counted.passes == 2
    net(X)
    assert counted.passes == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_runs_again_in_the_backward_pass_counts_once(reentrant: bool) -> None:
    """Activation checkpointing runs the forward pass of a part again; neither that part nor the whole counts twice."""
    net = Net(lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=reentrant))
    with Counted(net) as counted:
        net(X).sum().backward()
    assert counted.passes == 1
    with Counted(net.last) as counted:
        net(X).sum().backward()
    assert counted.passes == (not reentrant)  # which runs it without gradients first


def test_a_module_that_calls_itself_counts_once() -> None:
    class Recursive(torch.nn.Module):
        def forward(self, batch: Any, depth: int = 2) -> Any:
            return self(batch, depth - 1) if depth else batch

    with Counted(net := Recursive()) as counted:
        net(X)
    assert counted.passes == 1


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_module_is_compiled_once_and_stays_whole(inside: bool) -> None:
    """Nothing is compiled again because passes are counted; inside of compiled code nothing is counted."""
    torch._dynamo.reset()
    compiler, net = CompileCounter(), Net()
    compiled: Any = torch.compile(net, backend=compiler, fullgraph=True)
    with Counted(net if inside else compiled) as counted:
        for _ in range(4):
            compiled(X).sum().backward()
        assert compiler.frame_count == 1
        net(X)
    assert counted.passes == (0 if inside else 4)


def test_copies_have_no_part_of_countoff() -> None:
    """A module can be copied and pickled during the fit; the copies count nothing and give the same."""
    net = Net(torch.nn.Module.__call__)
    with Counted(net) as counted:
        text = pickle.dumps(net)
        for each in (copy.deepcopy(net), pickle.loads(text)):
            assert torch.equal(each(X), net.last(net.first(X)))
    assert counted.passes == 0
    assert b"countoff" not in text


def test_what_is_no_module_is_refused() -> None:
    """The error says what is expected, and the modules before it are given back."""
    net = Net()
    with pytest.raises(TypeError, match="takes a module or a list of modules, got a str"):
        count_forward_passes([net, "net"], lambda: None)
    assert not net._forward_hooks


def test_a_pass_counts_while_another_thread_is_inside_of_one() -> None:
    """Each thread has passes of its own: which of them ends first is left to chance, and must not decide."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(layer: Any, hidden: Any) -> Any:
        reached.set()
        assert go_on.wait(20)
        return layer(hidden)

    def look() -> None:
        with torch.no_grad():
            waiting(X)

    net, waiting = Net(), Net(wait)
    with Counted(net, waiting) as counted:
        thread = threading.Thread(target=look)
        thread.start()
        assert reached.wait(20)
        net(X)
        assert counted.passes == 1
        go_on.set()
        thread.join()
        net(X)
    assert counted.passes == 2


def test_a_pass_in_which_the_observation_begins_does_not_hide_later_ones() -> None:
    passes: list[None] = []

    def attach_inside(layer: Any, hidden: Any) -> Any:
        net.run = torch.nn.Module.__call__
        ends.callback(count_forward_passes([net], lambda: passes.append(None)))
        return layer(hidden)

    net = Net(attach_inside)
    with contextlib.ExitStack() as ends:
        net(X)
        before = len(passes)
        net(X)
        assert len(passes) == before + 1


def test_replicas_and_shallow_copies_run_themselves() -> None:
    """As `DataParallel` makes replicas: each calls its own parts, not those of the module that is observed."""
    net = Net()
    with Counted(net) as counted:
        for each, passes in ((net._replicate_for_data_parallel(), 0), (copy.copy(net), 1)):
            each.run = lambda layer, hidden: hidden
            assert torch.equal(each(X), net.first(X))
            assert counted.passes == passes


def test_a_forward_that_the_user_replaces_is_counted() -> None:
    net = Net()
    with Counted(net) as counted:
        net.forward = lambda batch: batch
        assert net(X) is X
    assert counted.passes == 1


def test_the_users_own_hooks_run_as_before() -> None:
    """They see what they return, in their order, and stay when the passes are no longer counted."""
    seen: list[float] = []

    def double(_module: Any, inputs: Any, result: Any) -> Any:
        seen.append(inputs[0][0, 0].item())
        return result * 2

    net = Net()
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    net.register_forward_hook(double)
    bare = net(X)
    end = count_forward_passes([net], lambda: None)
    assert torch.equal(net(X), bare)
    end()
    assert torch.equal(net(X), bare)
    assert seen == [2, 2, 2]


@pytest.mark.parametrize("name", ["inner of what is compiled", "compiled later"])
def test_compiled_code_counts_nothing_from_then_on(name: str) -> None:
    """Whole, and compiled once, also where the loop had called the module itself before."""
    torch._dynamo.reset()
    compiler, net = CompileCounter(), Net()
    outer = torch.nn.Sequential(net)
    with Counted(net) as counted:
        if name == "compiled later":
            net(X).sum().backward()
        before = counted.passes
        compiled: Any = torch.compile(outer, backend=compiler, fullgraph=True)
        for _ in range(4):
            compiled(X).sum().backward()
        assert compiler.frame_count == 1
        net(X)
    assert counted.passes == before == (name == "compiled later")
