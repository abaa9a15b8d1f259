"""What stands around a loop: modes of torch, tracers, hooks of the interpreter, and objects that are copied."""

import copy
import gc
import logging
import pickle
import sys
import traceback
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import (
    Listed,
    Unsized,
    ddp,
    loss_of,
    network,
    own_batches,
    sgd,
    sharded,
    train,
    train_on,
)
from integration_tests.zoo.registry import healthy


class Dispatched(TorchDispatchMode):
    """Counts the operations that reach the dispatcher."""

    count = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Counts the calls of torch's functions."""

    count = 0

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@healthy(even=True)
def dispatch_mode(options):
    """A mode counts the operations that reach the dispatcher while the loop runs."""
    model, loader = ddp(), Listed(own_batches())
    with Countoff(**options) as countoff, Dispatched() as counted:
        for batch in countoff.train(loader):
            loss_of(model.module, batch)
    return counted.count


@healthy(even=True)
def function_mode(options):
    """A mode counts the calls of torch's functions while the loop runs."""
    model, loader = ddp(), Listed(own_batches())
    with Countoff(**options) as countoff, Called() as counted:
        for batch in countoff.train(loader):
            loss_of(model.module, batch)
    return counted.count


@healthy()
def profiler_around_the_loop(options):
    """A profiler with a schedule records some of the steps, and the program counts its own events."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    steps = []
    with (
        Countoff(optimizer=optimizer, **options) as countoff,
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=2),
            on_trace_ready=lambda profiler: steps.append(profiler.step_num),
        ) as profiler,
    ):
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)
            profiler.step()
    return model, steps


@healthy()
def inference_mode(options):
    """The whole program runs under inference mode, and trains nothing."""
    with torch.inference_mode():
        model, loader = network().eval(), sharded(32)
        with Countoff(**options) as countoff:
            return [model(inputs) for inputs, _ in countoff.train(loader)]


@healthy(alone=True)
def deterministic_algorithms(options):
    """Torch is told to use deterministic algorithms only, and to fill what is empty."""
    torch.use_deterministic_algorithms(True)
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, model=model, weights_every=4, **options) as countoff:
        return train(countoff, model, optimizer, loader), model


@healthy(alone=True, nightly=True)
def another_default_type(options):
    """The default type is double precision."""
    torch.set_default_dtype(torch.float64)
    model = torch.nn.parallel.DistributedDataParallel(network())
    loader = Listed([(inputs.double(), labels) for inputs, labels in own_batches()])
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, model=model, **options) as countoff:
        return train(countoff, model, optimizer, loader), model


@healthy()
def another_default_device(options):
    """The default device is the meta device while the loop runs, and each batch is on the CPU."""
    model, loader = ddp(), Listed(own_batches())
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, model=model, weights_every=4, **options) as countoff:
        for batch in countoff.train(loader):
            with torch.device("meta"):
                torch.empty(3)
                loss = loss_of(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@healthy()
def anomaly_detection(options):
    """Autograd looks for anomalies, and saved tensors go through hooks of the program."""
    saved = []
    model, loader = ddp(), sharded(32)
    optimizer = sgd(model)

    def pack(tensor):
        saved.append(tensor.shape)
        return tensor

    with (
        Countoff(optimizer=optimizer, **options) as countoff,
        torch.autograd.detect_anomaly(check_nan=True),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        train(countoff, model, optimizer, loader)
    return model, len(saved)


@healthy()
def recomputed_activations(options):
    """Each forward pass is recomputed in the backward pass, with the random state kept."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, model=model, **options) as countoff:
        for inputs, labels in countoff.train(loader):
            hidden: Any = checkpoint(model.module, inputs, use_reentrant=False)
            loss = torch.nn.functional.cross_entropy(hidden, labels) + model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@healthy()
def model_and_optimizer_copied(options):
    """The model and the optimizer are copied and pickled in the middle of an epoch."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    sizes = []
    with Countoff(optimizer=optimizer, model=model, **options) as countoff:
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            if number == 3:
                sizes.append(len(pickle.dumps(copy.deepcopy(model.module))))
                sizes.append(len(pickle.dumps(optimizer)))
    return model, sizes


@healthy()
def garbage_of_an_iterator(options):
    """An iterator that was left in an epoch is part of a cycle, which is collected at another time on each rank."""

    class State:
        own: Any = None
        iterator: Any = None

    model, loader, other = ddp(), sharded(64), sharded(160, seed=3)
    optimizer = sgd(model)

    def warm_up():
        state = State()
        state.own, state.iterator = state, iter(countoff.train(loader))
        for _ in range(4):
            train_on(model, optimizer, next(state.iterator))

    with Countoff(optimizer=optimizer, **options) as countoff:
        warm_up()
        for number, batch in enumerate(other):
            train_on(model, optimizer, batch)
            if number == (5 if own_rank() == 1 else 9):
                gc.collect()
    return model


@healthy()
def collection_disabled(options):
    """The garbage collector is off while the loop runs, and the loader is dead at the end without it."""
    gc.collect()
    gc.disable()
    try:
        model, loader = ddp(), Listed(own_batches())
        optimizer = sgd(model)
        reference = weakref.ref(loader)
        with Countoff(optimizer=optimizer, **options) as countoff:
            train(countoff, model, optimizer, loader)
        del loader, countoff
        return model, reference() is None
    finally:
        gc.enable()


@healthy()
def tracer_of_the_interpreter(options):
    """A function of sys.settrace counts the calls of the program's own functions."""
    calls = []

    def tracer(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "train_on":
            calls.append(frame.f_lineno)

    model, loader = ddp(), sharded(32)
    optimizer = sgd(model)
    before = sys.gettrace()
    with Countoff(optimizer=optimizer, **options) as countoff:
        sys.settrace(tracer)
        try:
            train(countoff, model, optimizer, loader)
        finally:
            sys.settrace(before)
    return model, len(calls)


@healthy()
def warnings_are_errors(options):
    """All warnings are errors while the program runs."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Countoff(optimizer=optimizer, model=model, **options) as countoff:
            counts = train(countoff, model, optimizer, loader)
    return model, counts


@healthy()
def logging_of_everything(options):
    """The root logger is at its lowest level, and the program keeps all records but those of countoff."""
    records = []

    class Kept(logging.Handler):
        def emit(self, record):
            if not record.name.startswith("countoff"):
                records.append(record.getMessage())

    root, handler = logging.getLogger(), Kept()
    level = root.level
    root.addHandler(handler)
    root.setLevel(1)
    try:
        model, loader = ddp(), sharded(32)
        optimizer = sgd(model)
        with Countoff(optimizer=optimizer, **options) as countoff:
            train(countoff, model, optimizer, loader)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return model, records


@healthy()
def hook_for_exceptions(options):
    """The program has a sys.excepthook of its own, which is back after the fit, and prints a stack in the loop."""
    seen = []

    def hook(kind, error, trace):
        seen.append(kind.__name__)

    before, sys.excepthook = sys.excepthook, hook
    try:
        model, loader = ddp(), sharded(32)
        optimizer = sgd(model)
        with Countoff(optimizer=optimizer, **options) as countoff:
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
                traceback.format_stack()
        return model, sys.excepthook is hook, seen
    finally:
        sys.excepthook = before


@healthy()
def subgroups_of_ranks(options):
    """The ranks make groups of their own within the loop, and reduce in them."""
    model, loader = ddp(), sharded(32)
    optimizer = sgd(model)
    sums = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            if number == 1:
                group = dist.new_group([0, 1])
                value = torch.tensor(1.0 + own_rank())
                dist.all_reduce(value, group=group)
                sums.append(value)
                dist.destroy_process_group(group)
    return model, sums


@healthy(even=True)
def two_fits_at_once(options):
    """A teacher and a student have a group and a Countoff each, and are trained in turn within one loop."""
    first, second = ddp(1), ddp(2)
    loader, other = sharded(64), sharded(64, seed=5)
    one, two = sgd(first), sgd(second)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    with (
        Countoff(optimizer=one, group=groups[0], **options) as teacher,
        Countoff(optimizer=two, group=groups[1], **options) as student,
    ):
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            other.sampler.set_epoch(epoch)
            for batch, further in zip(teacher.train(loader), student.train(other), strict=True):
                train_on(first, one, batch)
                train_on(second, two, further)
    return first, second


@healthy()
def modules_of_a_notebook(options):
    """The whole program is a text that is executed, so that its code has no file."""
    text = (
        "class Own:\n"
        "    def __init__(self, batches): self.batches = batches\n"
        "    def __iter__(self): return iter(self.batches)\n"
        "def fit():\n"
        "    model, loader = ddp(), Own(own_batches())\n"
        "    optimizer = sgd(model)\n"
        "    with Countoff(optimizer=optimizer, **options) as countoff:\n"
        "        for _ in range(2):\n"
        "            for batch in countoff.train(loader): train_on(model, optimizer, batch)\n"
        "    return model\n"
    )
    names = {"ddp": ddp, "own_batches": own_batches, "sgd": sgd, "Countoff": Countoff, "train_on": train_on}
    names["options"] = options
    exec(compile(text, "<cell 3>", "exec"), names)
    return names["fit"]()


@healthy(even=True, nightly=True)
def compiled_step(options):
    """The step is run through torch.compile with the eager backend, loop and all."""
    model, loader = network(), Unsized(own_batches())
    optimizer = sgd(model)
    step = torch.compile(lambda batch: loss_of(model, batch), backend="eager")
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(loader):
            step(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@healthy()
def weights_that_are_compared(options):
    """The weights are compared every four steps, and the traced run writes its directory."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    extra = {} if options.get("enabled") is False else {"trace_dir": "trace", "weights_every": 4}
    with Countoff(optimizer=optimizer, model=model, **options, **extra) as countoff:
        return train(countoff, model, optimizer, loader), model
