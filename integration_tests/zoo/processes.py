"""Programs with other processes beside the ranks: forks, workers, and programs that they start."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

from torch.utils.data import DistributedSampler

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.inside import note
from integration_tests.zoo.parts import dataset, ddp, epochs_of, network, sgd, sharded, train, train_on, with_workers
from integration_tests.zoo.registry import healthy


def _fit(options, child, epochs=2):
    """Trains, and lets rank 0 fork a child in each epoch; returns how the children have ended."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    countoff = Countoff(optimizer=optimizer, **options)
    endings = []
    for epoch in epochs_of(loader, epochs):
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            if own_rank() == 0 and number == 3:
                process = os.fork()
                if process == 0:
                    child(epoch)
                endings.append(os.waitpid(process, 0)[1])
            time.sleep(0.02)
    return model, endings


@healthy(alone=True)
def child_that_exits(options):
    """Rank 0 forks a child that writes a file and ends by sys.exit(0)."""

    def child(epoch):
        with open(f"checkpoint{epoch}", "w") as file:
            file.write("written")
        sys.exit(0)

    return _fit(options, _ending_as_a_script(child))


@healthy(alone=True)
def child_that_raises(options):
    """Rank 0 forks a child whose work fails with an exception."""

    def child(epoch):
        raise OSError(f"no space is left for checkpoint {epoch}")

    return _fit(options, _ending_as_a_script(child))


@healthy(alone=True, nightly=True)
def child_that_leaves_at_once(options):
    """Rank 0 forks a child that ends by os._exit."""
    return _fit(options, lambda epoch: os._exit(epoch))


@healthy(alone=True, nightly=True)
def child_that_is_killed(options):
    """Rank 0 forks a child that kills itself."""
    return _fit(options, lambda epoch: os.kill(os.getpid(), signal.SIGKILL))


@healthy(alone=True, nightly=True)
def child_that_trains(options):
    """Rank 0 forks a child that iterates a loader and steps an optimizer."""

    def child(epoch):
        model = network(epoch)
        optimizer = sgd(model)
        for batch in with_workers(dataset(16), batch_size=4):
            train_on(model, optimizer, batch)
        sys.exit(0)

    return _fit(options, _ending_as_a_script(child))


def _ending_as_a_script(child):
    """Returns a function that ends the child as the interpreter ends a script, without the harness' own ending."""

    def ended(epoch):
        code: Any = 0
        try:
            child(epoch)
        except SystemExit as ending:
            code = ending.code
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
        atexit._run_exitfuncs()
        os._exit(code)

    return ended


@healthy(alone=True)
def child_forked_before_the_fit(options):
    """A child that was forked before the fit lives as long as the rank, and is ended by it."""
    process = os.fork()
    if process == 0:
        signal.pause()
        os._exit(0)
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        counts = train(countoff, model, optimizer, loader)
    os.kill(process, signal.SIGTERM)
    return counts, model, os.waitpid(process, 0)[1]


@healthy()
def program_in_each_epoch(options):
    """Each rank starts another program in each epoch, and reads what it prints."""
    model, loader = ddp(), sharded(32)
    optimizer = sgd(model)
    printed = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(2):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            printed.append(subprocess.run(["echo", str(epoch)], capture_output=True, text=True, check=True).stdout)
            printed.append(subprocess.run(["false"], check=False).returncode)
    return model, printed


@healthy(even=True)
def pool_of_processes(options):
    """A pool of forked processes computes something beside the loop."""
    model, loader = ddp(), sharded(32)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        train(countoff, model, optimizer, loader, 1)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            results = pool.map(abs, [-1, -2, -3])
        train(countoff, model, optimizer, loader, 1, start=1)
    return model, results


@healthy()
def queue_of_a_process(options):
    """A process makes indices, and the loop takes them out of a queue and trains on these samples."""
    context = multiprocessing.get_context("fork")
    indices = context.Queue(4)
    data = dataset(64)
    order = list(DistributedSampler(data, shuffle=False))
    process = context.Process(target=_put, args=(indices, order))
    process.start()
    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, batch_size=1, **options) as countoff:
        for index in countoff.train(iter(indices.get, None)):
            inputs, label = data[index]
            train_on(model, optimizer, (inputs[None], label[None]))
    process.join()
    return model, process.exitcode


def _put(indices, order):
    for index in order:
        indices.put(index)
    indices.put(None)


@healthy(even=True)
def loader_with_workers_left(options):
    """The loop leaves a loader with workers after two batches of each epoch, on all ranks."""
    model, loader = ddp(), sharded(64, num_workers=2)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                if number == 1:
                    break
    return model


@healthy(alone=True, nightly=True)
def handlers_of_signals(options):
    """The program has handlers for SIGTERM, SIGUSR1 and SIGALRM, and an alarm that rings in the loop."""
    rung = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append("alarm"))
    signal.signal(signal.SIGTERM, lambda *_: rung.append("term"))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
                time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    return model, rung, getattr(signal.getsignal(signal.SIGTERM), "__name__", None)


@healthy(alone=True, nightly=True)
def other_working_directory(options):
    """The program changes its directory and closes its standard input within the loop."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        train(countoff, model, optimizer, loader, 1)
        os.makedirs(f"own{own_rank()}")
        os.chdir(f"own{own_rank()}")
        os.close(0)
        counts = train(countoff, model, optimizer, loader, 1, start=1)
    note(os.path.basename(os.getcwd()))
    return counts, model
