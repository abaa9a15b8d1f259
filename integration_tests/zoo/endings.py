"""Programs that end in unusual ways, all ranks alike; each runs in processes of its own."""

import atexit
import gc
import os
import signal
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public ones)

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.inside import note
from integration_tests.zoo.parts import agreed, ddp, epochs_of, network, sgd, sharded, train, train_on
from integration_tests.zoo.registry import healthy


@healthy(alone=True)
def leaves_at_once_after_the_loop(options):
    """The process ends by os._exit after its loop, on rank 1 two seconds later, without close."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    note(train(countoff, model, optimizer, loader), model)
    time.sleep(2 * own_rank())
    note("written")
    os._exit(0)


@healthy(alone=True)
def leaves_at_once_in_an_epoch(options):
    """All ranks leave by os._exit after the same batch, rank 0 two seconds later, because it saves a checkpoint."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    for number, batch in enumerate(countoff.train(loader)):
        train_on(model, optimizer, batch)
        if number == 4:
            if own_rank() == 0:
                time.sleep(2)
            note(model)
            os._exit(0)


@healthy(alone=True)
def asks_the_scheduler_for_another_turn(options):
    """All ranks end by sys.exit(75) after the same batch, which a scheduler takes for: start me again."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    for number, batch in enumerate(countoff.train(loader)):
        train_on(model, optimizer, batch)
        if number == 4:
            note(model)
            sys.exit(75)


@healthy(alone=True, nightly=True)
def exits_inside_the_context(options):
    """All ranks call sys.exit(0) inside of the context, in the middle of an epoch."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            if number == 4:
                note(model)
                sys.exit(0)


@healthy(alone=True, nightly=True)
def exits_in_an_evaluation(options):
    """All ranks have seen enough in the middle of an evaluation, and end by sys.exit(0)."""
    model, loader, evaluation = ddp(), sharded(), sharded(32, seed=4)
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    train(countoff, model, optimizer, loader, 1)
    for number, _ in enumerate(countoff.eval(evaluation)):
        if number == 2:
            note(model)
            sys.exit(0)


@healthy(alone=True)
def preempted_by_a_signal(options):
    """A handler of SIGUSR1 sets a flag on one rank, all ranks agree to stop, and exit with code 3."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    wanted = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: wanted.set())
    countoff = Countoff(optimizer=optimizer, **options)
    for epoch in epochs_of(loader, 3):
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            if own_rank() == 1 and epoch == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            if agreed(wanted.is_set()):
                note(epoch, number, model)
                sys.exit(3)


@healthy(alone=True)
def group_destroyed_before_the_end(options):
    """The process group is destroyed after the loop while the fit goes on, and work goes on alone."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    counts = train(countoff, model, optimizer, loader)
    dist.destroy_process_group()
    time.sleep(own_rank())
    return counts, model.module


@healthy(alone=True, nightly=True)
def results_written_at_exit(options):
    """A function that the program has registered with atexit trains a probe on rank 0 and writes the result."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    counts = train(countoff, model, optimizer, loader)

    def write():
        probe = network(3)
        own = sgd(probe)
        for _ in range(3 * (own_rank() == 0)):
            own.step()
        note("end", probe)

    atexit.register(write)
    return counts, model


@healthy(alone=True)
def two_attempts_of_one_process(options):
    """The group is destroyed after a first fit, made again, and a second fit runs in it."""
    outcome = []
    for attempt in range(2):
        if not dist.is_initialized():
            store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=False)
            dist.init_process_group("gloo", store=PrefixStore(f"again{attempt}", store), rank=own_rank(), world_size=2)
        model, loader = ddp(), sharded(64, seed=attempt)
        optimizer = sgd(model)
        with Countoff(optimizer=optimizer, **options) as countoff:
            outcome += [train(countoff, model, optimizer, loader), model.module]
        del model  # torch 2.13 hangs where a DDP model is freed after its process group
        dist.destroy_process_group()
    return outcome


@healthy(alone=True, nightly=True)
def rest_of_the_epoch_on_one_rank(options):
    """The last epoch is over on all ranks; rank 0 then trains alone for three seconds, and rank 1 has exited."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        counts = train(countoff, model, optimizer, loader)
    if own_rank() == 0:
        probe = network(3)
        own = sgd(probe)
        for batch in list(loader)[:3]:
            train_on(probe, own, batch)
            time.sleep(1)
    return counts, model


@healthy(alone=True, nightly=True)
def early_stopping_and_exit_code(options):
    """The ranks agree to stop because the loss no longer falls, and exit with the number of the epoch."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model, 0.0)
    best, epochs = float("inf"), 0
    countoff = Countoff(optimizer=optimizer, **options)
    for epoch in epochs_of(loader, 9):
        losses = [train_on(model, optimizer, batch) for batch in countoff.train(loader)]
        epochs = epoch
        if agreed(sum(losses) > best - 100):
            break
        best = min(best, sum(losses))
    note(model)
    sys.exit(10 + epochs)


@healthy(alone=True, nightly=True)
def everything_collected_at_the_end(options):
    """The program drops its Countoff, loader and model, collects garbage, and ends without close."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    note(train(countoff, model, optimizer, loader), model)
    del countoff, model, loader, optimizer
    gc.collect()
    time.sleep(0.5)
