"""Samples the main thread of a process that does all that moves frames, and ends while it is sampled.

    python -m integration_tests.stack_stress --samples 100000
    python -m integration_tests.stack_stress --samples 100000 --foreign --end os._exit

It must end as it would without the samples: anything else is a crash of the interpreter. It needs nothing but Python,
and runs without torch where that is not installed, so that it can be run by each Python that countoff supports.
"""

import argparse
import contextlib
import copy
import ctypes
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from countoff.core.session.liveness import stacks

ENDS = {"return": 0, "sys.exit": 3, "os._exit": 4, "exception": 1}
"""The ways in which the process ends, with the exit code of each."""


def walked() -> None:
    """How the main thread must not be sampled: its frames are followed one by one, while it goes on."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)


WAYS: dict[str, Callable[[], object]] = {"countoff": stacks.main_thread, "walk": walked}


class _Cyclic:
    """An object that only the garbage collector can free, by code of Python's."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        sum(_numbers(3))


def _numbers(count: int) -> Iterator[int]:
    for number in range(count):
        yield (lambda: number)()


def _recurse(depth: int) -> int:
    return sum(_numbers(3)) + (_recurse(depth - 1) if depth else 0)


def _raise(depth: int) -> None:
    try:
        if not depth:
            raise ValueError
        _raise(depth - 1)
    finally:
        _Cyclic()


@functools.cache
def _torch_step() -> Callable[[], object]:
    """A training step of a small model, and a deep copy of it; nothing where torch is not installed."""
    if find_spec("torch") is None:
        return lambda: None
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=2)

    def step() -> None:
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        copy.deepcopy(model).state_dict()

    return step


def _work() -> None:
    """One turn of what the main thread does."""
    _recurse(150)
    with contextlib.suppress(ValueError):
        _raise(20)
    copy.deepcopy([{"a": [1, 2, {3: (4,)}]}] * 3)
    thread = threading.Thread(target=_recurse, args=(5,))
    thread.start()
    thread.join()
    _torch_step()()


def _begin_foreign_threads() -> None:
    """Has C code begin threads that call into Python, one after the other, until the process ends."""
    system = ctypes.CDLL(None)
    called = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

    def begin() -> None:
        thread = ctypes.c_ulong()
        while True:
            system.pthread_create(ctypes.byref(thread), None, called, None)
            system.pthread_join(thread, None)

    threading.Thread(target=begin, daemon=True).start()


class _Sampler:
    """Samples the main thread until the process ends.

    Attributes:
        samples: Samples so far.
        seconds: How long they took, with waiting for the other threads.
    """

    def __init__(self, way: Callable[[], object]) -> None:
        self.samples, self.seconds = 0, 0.0
        self._way = way
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            began = time.perf_counter()
            self._way()
            self.seconds += time.perf_counter() - began
            self.samples += 1


def main(arguments: Any = None) -> int:
    """Runs the stress; returns the exit code, or ends the process as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.stack_stress", description=__doc__)
    parser.add_argument("--samples", type=int, default=1000, help="of the main thread, before the process ends")
    parser.add_argument("--end", choices=ENDS, default="return", help="how it ends")
    parser.add_argument("--way", choices=WAYS, default="countoff", help="`walk` is how it must not be done")
    parser.add_argument("--foreign", action="store_true", help="C code begins threads of Python's all the time")
    parser.add_argument("--idle", action="store_true", help="the main thread sleeps: more samples in the same time")
    options = parser.parse_args(arguments)
    _torch_step()()
    sys.setswitchinterval(1e-5)  # threads take turns 500 times as often as by default
    if options.foreign:
        _begin_foreign_threads()
    samplers = [_Sampler(WAYS[options.way]) for _ in range(2)]
    while sum(sampler.samples for sampler in samplers) < options.samples:
        time.sleep(0.1) if options.idle else _work()
    taken, seconds = sum(each.samples for each in samplers), sum(each.seconds for each in samplers)
    version = sys.version.split()[0]
    print(f"{version}, {options.way}: {taken} samples, {seconds / taken * 1e6:.0f} µs each", flush=True)
    if options.end == "exception":
        raise ValueError("this is how it is to end")
    if options.end == "os._exit":
        os._exit(ENDS[options.end])
    return ENDS[options.end]


if __name__ == "__main__":
    sys.exit(main())
