"""Whole lives of a program: folds and phases, loops without an end, retries, resumes, and objects that mind a touch."""

# Odd objects are what these programs are about.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportPossiblyUnboundVariable=false
# pyright: reportCallIssue=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

import collections
import gc
import itertools
import queue
import random
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks as step_hooks
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import (
    Listed,
    dataset,
    ddp,
    epochs_of,
    evaluate,
    loss_of,
    network,
    own_batches,
    sgd,
    sharded,
    tensors,
    train,
    train_on,
    with_workers,
)
from integration_tests.zoo.registry import healthy


def _endless(loader):
    while True:
        yield from loader


def _mean_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


# Folds and phases


def _folds(options, *, named, one_optimizer=False):
    """Three fits, none of which is closed, each longer than a stall; returns what is left of the earlier ones."""
    references, hooks, model, optimizer = [], [], None, None
    for fold in range(3):
        if fold == 0 or not one_optimizer:
            del model, optimizer
            gc.collect()
            model = network(fold)
            optimizer = sgd(model)
            references.append(weakref.ref(model[0].weight))
        told = {"optimizer": optimizer} if named else {}
        countoff = Countoff(**told, stall_seconds=1.0, levels={"Stalled": "raise"}, **options)
        for batch in countoff.train(own_batches(5 if fold == 0 else 50)):
            loss_of(model, batch).backward()
            _mean_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
        hooks.append(len(step_hooks))
    del countoff
    gc.collect()
    return model, [reference() is None for reference in references[:-1]], hooks[2] - hooks[0]


@healthy()
def folds_without_close(options):
    """Each fold makes a model, an optimizer and a Countoff, and closes none of them."""
    return _folds(options, named=True)


@healthy(nightly=True)
def folds_that_name_no_optimizer(options):
    """The same without a word of the optimizers."""
    return _folds(options, named=False)


@healthy(nightly=True)
def folds_of_one_optimizer(options):
    """The same with one model and one optimizer, which all folds train."""
    return _folds(options, named=True, one_optimizer=True)


@healthy(even=True)
def one_countoff_for_all_phases(options):
    """Pretraining and the main training have loaders of their own, of other lengths, and one Countoff."""
    model = ddp()
    optimizer = sgd(model)
    counts = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for samples, batch_size in ((64, 8), (96, 4), (40, 4)):
            counts += train(countoff, model, optimizer, sharded(samples, batch_size, seed=samples))
    return model, counts


@healthy(even=True)
def loop_over_another_object_each_time(options):
    """Each epoch iterates something else: a loader, a list, a generator, a loader of the user's own, a range."""
    model, own = ddp(), own_batches(6)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for source in (sharded(48), own, (batch for batch in own), Listed(own), map(own.__getitem__, range(6))):
            for batch in countoff.train(source):
                train_on(model, optimizer, batch)
        for number in countoff.train(range(6)):
            train_on(model, optimizer, own[number])
    return model


@healthy()
def fit_of_one_rank_between(options):
    """Rank 0 alone fits a probe, in a group of its own, between two fits of both ranks."""
    alone = dist.new_group([0])
    outcome = []
    for fit in range(2):
        model, loader = ddp(fit), sharded(48, seed=fit)
        optimizer = sgd(model)
        with Countoff(optimizer=optimizer, **options) as countoff:
            outcome += [train(countoff, model, optimizer, loader), model]
        if own_rank() == 0:
            probe = network(3)
            own = sgd(probe)
            with Countoff(optimizer=own, group=alone, **options) as countoff:
                outcome += [train(countoff, probe, own, Listed(own_batches(3))), probe]
        dist.barrier()
    return outcome


def _fit_in(group, options, seed, model, counts):
    loader = sharded(48 + 16 * seed, seed=seed, generator=torch.Generator())
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, group=group, **options) as countoff:
        counts[seed] = train(countoff, model, optimizer, loader, 2 + seed), model.module


@healthy(even=True)
def two_fits_in_two_threads(options):
    """Two threads of each rank fit two models, of other lengths, at once; each has a group of all ranks."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    found = {}
    # Without dropout, which draws from one generator.
    models = [DistributedDataParallel(network(seed).eval(), process_group=group) for seed, group in enumerate(groups)]
    threads = [
        threading.Thread(target=_fit_in, args=(group, options, seed, model, found))
        for seed, (group, model) in enumerate(zip(groups, models, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[seed] for seed in range(2)]


# Loops without an end


@healthy(even=True)
def endless_over_unequal_shares(options):
    """The shares have eight and seven batches, each rank begins its own again, and the loop takes 24 steps."""
    model, loader = ddp(), Listed(own_batches(8 - own_rank()))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, max_steps=24, **options) as countoff:
        for batch in itertools.islice(countoff.train(_endless(loader)), 24):
            train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def endless_shuffled_shares(options):
    """The same over a DataLoader that shuffles, and the loop is left by a break."""
    share = Subset(dataset(), range(own_rank(), 64 - 8 * own_rank(), 2))
    model, loader = ddp(), with_workers(share, batch_size=4, shuffle=True)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for number, batch in enumerate(countoff.train(_endless(loader)), 1):
            train_on(model, optimizer, batch)
            if number == 24:
                break
    return model


@healthy(even=True)
def steps_are_what_is_counted(options):
    """The loop counts a range of steps, and takes its batches from an iterator that begins again at its end."""
    model, loader = ddp(), Listed(own_batches(8 - own_rank()))
    optimizer = sgd(model)
    iterator = iter(loader)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in countoff.train(range(24)):
            try:
                batch = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                batch = next(iterator)
            train_on(model, optimizer, batch)
    return model


@healthy()
def endless_with_evaluations(options):
    """An endless pass is stopped by the loop for an evaluation after each sixth step."""
    model, loader, evaluation = ddp(), Listed(own_batches(5 - own_rank())), sharded(16, seed=4)
    optimizer = sgd(model)
    losses = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        batches = countoff.train(_endless(loader))
        for _ in range(3):
            for batch in itertools.islice(batches, 6):
                train_on(model, optimizer, batch)
            losses.append(evaluate(model.module, countoff.eval(evaluation)))
    return model, losses


# Loaders that fail, and are begun again


class Unready(Dataset):
    """Samples that rank 1 cannot read for the first few times, from one sample on."""

    def __init__(self, failures=2, index=None):
        self.inputs, self.labels = tensors()
        self.failures, self.index = failures * own_rank(), index

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.failures and self.index in (None, index):
            self.failures -= 1
            raise OSError("not mounted yet")
        return self.inputs[index], self.labels[index]


class Weather(IterableDataset):
    """An endless stream whose storage fails twice on rank 1."""

    def __init__(self, failures=(9, 23)):
        self.asked, self.failures = 0, failures

    def __iter__(self):
        generator = torch.Generator().manual_seed(100 * own_rank() + self.asked)
        while True:
            self.asked += 1
            if own_rank() == 1 and self.asked in self.failures:
                raise ConnectionError("storage does not answer")
            inputs = torch.randn(8, generator=generator)
            yield inputs, (inputs.sum() > 0).long()


@healthy(even=True)
def first_batch_tried_again_on_one_rank(options):
    """Rank 1 cannot read its first batch twice, and begins the pass again each time."""
    data = Unready()
    model, loader = ddp(), with_workers(data, batch_size=4, sampler=DistributedSampler(data))
    optimizer = sgd(model)
    tries = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            while True:
                try:
                    for batch in countoff.train(loader):
                        train_on(model, optimizer, batch)
                    break
                except OSError:
                    tries += 1
                    time.sleep(0.2)
    return model, tries


@healthy(even=True)
def rest_of_the_epoch_tried_again_on_one_rank(options):
    """Rank 1 cannot read a sample in the middle of an epoch, and begins a pass over the rest of that epoch."""
    data = Unready(index=41)
    model, loader = ddp(), with_workers(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    optimizer = sgd(model)
    tries = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(3):
            done = 0
            while True:
                try:
                    for batch in countoff.train(itertools.islice(loader, done, None) if done else loader):
                        train_on(model, optimizer, batch)
                        done += 1
                    break
                except OSError:
                    tries += 1
    return model, tries


@healthy(even=True)
def endless_stream_begun_again(options):
    """Rank 1's storage fails twice, and the loop makes another iterator of the endless stream each time."""
    model, loader = ddp(), DataLoader(Weather(), batch_size=2)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        iterator = iter(countoff.train(loader))
        for _ in range(40):
            while True:
                try:
                    batch = next(iterator)
                    break
                except ConnectionError:
                    iterator = iter(countoff.train(loader))
            train_on(model, optimizer, batch)
    return model


def _patiently(loader):
    while True:
        try:
            yield from loader
        except ConnectionError:
            time.sleep(0.1)


@healthy(even=True)
def endless_stream_that_begins_itself_again(options):
    """The same inside of a generator, which is what is counted."""
    model, loader = ddp(), DataLoader(Weather(), batch_size=2)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in itertools.islice(countoff.train(_patiently(loader)), 40):
            train_on(model, optimizer, batch)
    return model


@healthy()
def evaluation_begun_again_on_one_rank(options):
    """Rank 1's evaluation fails at its first batch, and is begun again."""
    data = Unready(1)
    evaluation = with_workers(data, batch_size=4, sampler=DistributedSampler(data))
    model, loader = ddp(), sharded(48, seed=3)
    optimizer = sgd(model)
    losses = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(2):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            while True:
                try:
                    losses.append(evaluate(model.module, countoff.eval(evaluation)))
                    break
                except OSError:
                    model.train()
    return model, losses


def _with_accelerate(options, index):
    from countoff.accelerate import Countoff
    from integration_tests.zoo.accelerate_loops import accelerator, prepared, step

    own = accelerator()
    data = Unready(index=index)
    model, optimizer, loader = prepared(own, with_workers(data, batch_size=4))
    tries = 0
    with Countoff(own, **options) as countoff:
        for _ in range(3):
            done = 0
            while True:
                try:
                    rest = own.skip_first_batches(loader, done) if done else loader
                    for batch in countoff.train(rest):
                        step(own, model, optimizer, batch)
                        done += 1
                    break
                except OSError:
                    tries += 1
                    time.sleep(0.2)
    return model, tries


@healthy(even=True, needs="accelerate")
def first_batch_tried_again_with_accelerate(options):
    """The first batch cannot be read twice on rank 1, which begins the pass over the prepared loader again."""
    return _with_accelerate(options, None)


@healthy(even=True, needs="accelerate")
def rest_of_the_epoch_tried_again_with_accelerate(options):
    """A sample in the middle cannot be read on rank 1, which goes on behind the batches that it has had."""
    return _with_accelerate(options, 45)


def _with_fabric(options, index):
    from lightning.fabric import Fabric

    from countoff.fabric import Countoff
    from integration_tests import devices
    from integration_tests.lightning_jobs import quiet

    quiet()
    fabric = Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    plain = network()
    model, optimizer = fabric.setup(plain, sgd(plain))
    loader = fabric.setup_dataloaders(with_workers(Unready(index=index), batch_size=4))
    tries = 0
    with Countoff(fabric, optimizer=optimizer, **options) as countoff:
        for _ in range(3):
            done = 0
            while True:
                try:
                    for batch in countoff.train(itertools.islice(loader, done, None) if done else loader):
                        fabric.backward(loss_of(model, batch))
                        optimizer.step()
                        optimizer.zero_grad()
                        done += 1
                    break
                except OSError:
                    tries += 1
                    time.sleep(0.2)
    return model, tries


@healthy(even=True, needs="lightning")
def first_batch_tried_again_with_fabric(options):
    """The first batch cannot be read twice on rank 1, which begins the pass over Fabric's loader again."""
    return _with_fabric(options, None)


@healthy(even=True, needs="lightning")
def rest_of_the_epoch_tried_again_with_fabric(options):
    """A sample in the middle cannot be read on rank 1, which goes on with the rest of the epoch."""
    return _with_fabric(options, 45)


# Looks and look-aheads


@healthy(even=True)
def looks_on_one_rank(options):
    """Rank 0 looks at a batch of the train loader before each epoch, and in the middle of it."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    seen = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader, 3):
            if own_rank() == 0:
                seen.append(next(iter(loader))[0])
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                if own_rank() == 0 and number == 3:
                    seen.append(next(iter(loader))[0])
    return model, seen


def _ahead(loader, batches):
    held = collections.deque()
    for batch in loader:
        held.append(batch)
        if len(held) > batches:
            yield held.popleft()
    yield from held


@healthy(even=True)
def look_ahead_by_rank(options):
    """Rank 0 holds two batches ahead and rank 1 three, and the loop takes what comes out of that."""
    model, loader = ddp(), sharded(200)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader, 3):
            for batch in countoff.train(_ahead(loader, 2 + own_rank())):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def look_ahead_over_the_end_of_an_epoch(options):
    """The first batch of an epoch is fetched before the last one of the epoch before is trained on."""

    def stream():
        for _ in epochs_of(loader, 4):
            yield from loader

    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(_ahead(stream(), 1)):
            train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def thread_that_is_epochs_ahead(options):
    """A thread reads epoch after epoch into a queue, longer on rank 1, and the loop takes batches of that."""

    def read():
        for _ in epochs_of(loader, 4):
            for batch in loader:
                batches.put(batch)
        batches.put(None)

    model, loader = ddp(), sharded(160, generator=torch.Generator())
    optimizer = sgd(model)
    batches = queue.Queue(5 + 4 * own_rank())
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(iter(batches.get, None)):
            train_on(model, optimizer, batch)
    thread.join()
    return model


# Learning rates that differ rightly


def _stage(batch, layers):
    """One step of a pipeline of two stages; returns the loss on the second one."""
    inputs, labels = batch
    if own_rank() == 0:
        hidden = layers(inputs)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        return torch.zeros(())
    hidden = torch.empty(len(inputs), 16)
    dist.recv(hidden, 0)
    hidden.requires_grad_()
    loss = torch.nn.functional.cross_entropy(layers(hidden), labels)
    loss.backward()
    dist.send(hidden.grad, 0)
    return loss.detach()


def _pipeline(options, groups, **told):
    whole = network()
    layers = torch.nn.Sequential(*(list(whole)[:2] if own_rank() == 0 else list(whole)[3:]))
    optimizer = torch.optim.SGD(groups(layers), lr=0.1)
    loader = with_workers(dataset(), batch_size=4)
    losses = []
    with Countoff(optimizer=optimizer, **told, **options) as countoff:
        for _ in range(2):
            for batch in countoff.train(loader):
                losses.append(_stage(batch, layers))
                optimizer.step()
                optimizer.zero_grad()
    return layers, losses


@healthy()
def rates_of_a_pipeline(options):
    """Two ranks are stages of a pipeline, whose layers have rates of their own, and the mesh says so."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    def groups(layers):
        return [{"params": layers.parameters(), "lr": 0.1 * 0.8 ** (1 - own_rank())}]

    return _pipeline(options, groups, mesh=mesh)


@healthy()
def rates_of_each_layer_of_a_pipeline(options):
    """The same where the stages have other numbers of groups."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    def groups(layers):
        parameters = list(layers.parameters())
        rated = [(parameters, 0.1)] if own_rank() else [(parameters[:1], 0.05), (parameters[1:], 0.01)]
        return [{"params": params, "lr": rate} for params, rate in rated]

    return _pipeline(options, groups, mesh=mesh)


@healthy()
def rates_of_stages_without_a_mesh(options):
    """The same where nothing says that the ranks are stages, but that they share their data."""

    def groups(layers):
        return [{"params": layers.parameters(), "lr": 0.1 * 0.8 ** (1 - own_rank())}]

    return _pipeline(options, groups, compare_data=False)


@healthy()
def rates_by_rank(options):
    """Each rank trains a model of its own with a rate of its own, and only the losses are averaged."""
    model, loader = network(own_rank()), sharded()
    optimizer = sgd(model, 0.1 / (1 + own_rank()))
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                dist.all_reduce(torch.tensor(train_on(model, optimizer, batch)))
    return model


@healthy()
def rates_of_trials_on_groups(options):
    """Each rank is a trial of its own, a group of one rank, with a rate and a number of batches of its own."""
    group = [dist.new_group([rank]) for rank in range(2)][own_rank()]
    model, loader = network(own_rank()), Listed(own_batches(6 + 3 * own_rank()))
    optimizer = sgd(model, 0.1 / (1 + own_rank()))
    with Countoff(optimizer=optimizer, group=group, **options) as countoff:
        return train(countoff, model, optimizer, loader), model


@healthy()
def experts_on_one_rank(options):
    """Rank 1 has an expert of its own, with a group of parameters and a rate of its own, beside what DDP averages."""
    model, expert, loader = ddp(), torch.nn.Linear(8, 4), sharded()
    groups = [{"params": model.parameters(), "lr": 0.1}]
    if own_rank() == 1:
        groups.append({"params": expert.parameters(), "lr": 0.01})
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for inputs, labels in countoff.train(loader):
                loss = loss_of(model, (inputs, labels))
                if own_rank() == 1:
                    loss = loss + torch.nn.functional.cross_entropy(expert(inputs), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return model, expert


@healthy()
def groups_in_another_order(options):
    """The groups of the optimizer come out of a set, and so in another order on each rank."""
    model, loader = ddp(), sharded()
    rated = [(list(model.module[0].parameters()), 0.1), (list(model.module[3].parameters()), 0.02)]
    groups = [{"params": params, "lr": rate} for params, rate in (rated if own_rank() else reversed(rated))]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with Countoff(optimizer=optimizer, **options) as countoff:
        return train(countoff, model, optimizer, loader), model


# Objects that mind a touch


class Bucketed(Sampler):
    """Batches that its length makes, if nobody has done so before, with Python's own generator."""

    def __init__(self):
        self.made = None

    def make(self):
        indices = list(range(own_rank(), 64, 2))
        random.shuffle(indices)
        self.made = [indices[start : start + 4] for start in range(0, 32, 4)]

    def __len__(self):
        if self.made is None:
            self.make()
        return len(self.made)

    def __iter__(self):
        if self.made is None:
            self.make()
        made, self.made = self.made, None
        return iter(made)


@healthy(even=True)
def length_that_draws(options):
    """The length of a batch sampler draws random numbers, and each epoch has a seed of its own."""
    model, loader = ddp(), DataLoader(dataset(), batch_sampler=Bucketed())
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(3):
            random.seed(100 + epoch)
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def length_that_is_an_estimate(options):
    """The length of a batch sampler is one more than it gives, on each rank."""

    class Tokens(Sampler):
        def __len__(self):
            return 8

        def __iter__(self):
            indices = list(range(own_rank(), 64, 2))
            return iter([indices[start : start + 5] for start in range(0, 32, 5)])

    model, loader = ddp(), DataLoader(dataset(), batch_sampler=Tokens())
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        return train(countoff, model, optimizer, loader, 3), model


@healthy(even=True)
def length_of_a_stream_over_workers(options):
    """A stream knows its samples, and its two workers make one batch more of them than the loader computes."""

    class Sized(IterableDataset):
        def __len__(self):
            return 32

        def __iter__(self):
            worker = get_worker_info()
            inputs, labels = tensors()
            for index in range(own_rank() + 2 * worker.id, 64, 2 * worker.num_workers):
                yield inputs[index], labels[index]

    model, loader = ddp(), with_workers(Sized(), batch_size=5, num_workers=2)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        return train(countoff, model, optimizer, loader), model


@healthy(even=True)
def length_that_raises(options):
    """The length and the truth of a loader raise, and so does the length of its dataset."""

    class Catalogue(IterableDataset):
        def __iter__(self):
            inputs, labels = tensors()
            return iter(list(zip(inputs[own_rank() :: 2], labels[own_rank() :: 2], strict=True)))

        def __len__(self):
            raise RuntimeError("the length is not known: ask the catalogue")

    class Refusing(DataLoader):
        def __len__(self):
            raise RuntimeError("the length is not known")

        def __bool__(self):
            raise RuntimeError("no truth")

    model, loader = ddp(), Refusing(Catalogue(), batch_size=4)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        return train(countoff, model, optimizer, loader, 3), model


@healthy(even=True)
def objects_that_count_what_is_called(options):
    """A dataset, a sampler, a loader, a model and an optimizer count what is asked of them."""
    asked = collections.Counter()

    class Asked:
        def __getattr__(self, name):
            asked[f"{type(self).__name__}.{name}"] += 1
            raise AttributeError(name)

        def __bool__(self):
            asked[f"bool({type(self).__name__})"] += 1
            return True

        def __eq__(self, other):
            asked[f"{type(self).__name__} =="] += 1
            return self is other

        def __hash__(self):
            asked[f"hash({type(self).__name__})"] += 1
            return id(self)

        def __reduce_ex__(self, protocol):
            asked[f"copy({type(self).__name__})"] += 1
            return super().__reduce_ex__(protocol)

        def __len__(self):
            asked[f"len({type(self).__name__})"] += 1
            return 32

    class Data(Asked, Dataset):
        def __init__(self):
            self.inputs, self.labels = tensors()

        def __getitem__(self, index):
            asked["item"] += 1
            return self.inputs[index], self.labels[index]

    class Order(Asked, Sampler):
        def __iter__(self):
            asked["iter"] += 1
            return iter(range(own_rank(), 64, 2))

    class Loader(Asked):
        def __init__(self, inner):
            self.inner = inner

        def __iter__(self):
            asked["iter of the loader"] += 1
            return iter(self.inner)

    model, counts = ddp(), []
    optimizer = sgd(model)
    for loader in (DataLoader(Data(), batch_size=4, sampler=Order()), Loader(own_batches(8))):
        asked.clear()
        with Countoff(optimizer=optimizer, **options) as countoff:
            train_losses = [train_on(model, optimizer, batch) for _ in range(3) for batch in countoff.train(loader)]
            losses = [loss_of(model.module, batch).item() for batch in countoff.eval(loader, "again")]
        counts.append((sorted(asked.items()), len(train_losses), len(losses)))
    return model, counts


@healthy(even=True)
def iterator_compared_by_identity(options):
    """A loader knows its present iterator, and the program compares it with the one that it iterates."""

    class Knowing(Listed):
        def __iter__(self):
            self.current = iter(self.batches)
            return self.current

    model, loader = ddp(), Knowing(own_batches(6))
    optimizer = sgd(model)
    same = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            iterator = iter(loader)
            counted = countoff.train(iterator)
            same.append(iter(counted) is counted)
            for batch in counted:
                same.append(loader.current is iterator)
                train_on(model, optimizer, batch)
    return model, same


@healthy(even=True)
def class_assigned_to_a_loader(options):
    """The class of the loader is assigned after two epochs, and passes are half as long from then on."""

    class Half(DataLoader):
        def __iter__(self):
            return itertools.islice(super().__iter__(), 4)

    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    counts = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        counts += train(countoff, model, optimizer, loader)
        loader.__class__ = Half
        counts += train(countoff, model, optimizer, loader, start=2)
    return model, counts, type(loader).__name__


@healthy(even=True)
def equality_by_type(options):
    """Two loaders are equal if they are of one type, and a dictionary is keyed by them."""

    class Equal(Listed):
        def __eq__(self, other):
            return type(self) is type(other)

        def __hash__(self):
            return hash(type(self).__name__)

    model, first, second = ddp(), Equal(own_batches(6)), Equal(own_batches(4, seed=2))
    optimizer = sgd(model)
    losses = {first: 0.0}
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(2):
            for loader in (first, second):
                for batch in countoff.train(loader):
                    losses[second] += train_on(model, optimizer, batch)
    return model, list(losses.values())


@healthy(even=True)
def attributes_that_raise(options):
    """A loader's drop_last raises, and its other attributes raise a KeyError."""

    class Touchy(DataLoader):
        @property
        def drop_last(self):
            raise RuntimeError("not now")

        @drop_last.setter
        def drop_last(self, value):
            pass

        def __getattr__(self, name):
            raise KeyError(name)

        def __iter__(self):
            return iter(self.dataset)

    class Keyed(Listed):
        def __getattr__(self, name):
            raise KeyError(name)

    model = ddp()
    optimizer = sgd(model)
    counts = []
    for loader in (Touchy(own_batches(6), batch_size=None), Keyed(own_batches(6))):
        with Countoff(optimizer=optimizer, **options) as countoff:
            for _ in range(2):
                counts.append(0)
                for batch in countoff.train(loader):
                    train_on(model, optimizer, batch)
                    counts[-1] += 1
    return model, counts


@healthy(even=True)
def loader_that_answers_everything(options):
    """Every attribute of a loader exists, can be called, and returns another such object."""

    class Anything:
        def __call__(self, *arguments, **more):
            return Anything()

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything()

        def __len__(self):
            return 7

        def __iter__(self):
            return iter([1, 2, 3])

        def __int__(self):
            return 3

    class Answering:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything()

    model, loader = ddp(), Answering(own_batches(6))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(3):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def classes_that_allow_no_others(options):
    """The class of a loader refuses subclasses, and that of another one wants a keyword for them."""

    class Final(type):
        def __new__(cls, name, bases, content):
            if any(isinstance(each, Final) for each in bases):
                raise TypeError("final")
            return super().__new__(cls, name, bases, content)

    class Closed(metaclass=Final):
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

    class Base:
        def __init_subclass__(cls, *, name, **more):
            super().__init_subclass__(**more)
            cls.name = name

    class Named(Base, name="named"):
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for loader in (Closed(own_batches(6)), Named(own_batches(6))):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
    return model


# Data that is read again on purpose


@healthy(even=True)
def two_passes_over_one_epoch(options):
    """Each epoch is read twice in one order: for the discriminator, and then for the generator."""
    first, second, loader = ddp(1), ddp(2), sharded()
    slow, fast = sgd(first), sgd(second)
    with Countoff(optimizer=[slow, fast], **options) as countoff:
        for epoch in epochs_of(loader, 3):
            for batch in countoff.train(loader, epoch=epoch):
                train_on(second, fast, batch)
            for batch in countoff.train(loader, epoch=epoch):
                train_on(first, slow, batch)
    return first, second


@healthy(even=True)
def memory_made_before_each_epoch(options):
    """Each epoch is read without gradients for a bank of features, and then trained on in the same order."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader, 3):
            with torch.no_grad():
                bank = torch.stack([model.module(inputs).mean(0) for inputs, _ in loader]).mean(0)
            dist.all_reduce(bank)
            for batch in countoff.train(loader):
                train_on(model, optimizer, (batch[0] + bank.mean(), batch[1]))
    return model


@healthy(even=True)
def same_prompts_on_all_ranks(options):
    """All ranks read the same prompts, each samples completions of its own, and the program says so."""
    loader = DataLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, own = ddp(), torch.Generator().manual_seed(own_rank())
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, compare_data=False, **options) as countoff:
        for _ in range(2):
            for inputs, labels in countoff.train(loader):
                train_on(model, optimizer, (inputs + torch.randn(inputs.shape, generator=own), labels))
    return model


@healthy(even=True)
def slices_of_a_global_batch(options):
    """Every rank reads the whole batch and counts its slice of it."""
    loader = DataLoader(dataset(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, own = ddp(), slice(own_rank(), None, 2)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in range(3):
            for batch in countoff.train((inputs[own], labels[own]) for inputs, labels in loader):
                train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def train_error_on_the_train_loader(options):
    """The train loader is evaluated on after each epoch, beside the evaluation's own."""
    model, loader, evaluation = ddp(), sharded(), sharded(32, seed=4)
    optimizer = sgd(model)
    losses = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(2):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            losses.append(evaluate(model.module, countoff.eval(evaluation)))
            losses.append(evaluate(model.module, countoff.eval(loader, "train")))
    return model, losses


# Data that grows


@healthy(even=True)
def dataset_that_grows(options):
    """The indices of the train set grow in place, and each epoch has a sampler and a loader of its own."""
    model, whole, indices = ddp(), dataset(128), list(range(32))
    optimizer = sgd(model)
    counts = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(4):
            loader = sharded(data=Subset(whole, indices))
            counts += train(countoff, model, optimizer, loader, 1, start=epoch)
            indices.extend(range(len(indices), len(indices) + 16))
    return model, counts


@healthy(even=True)
def dataset_that_grows_under_its_sampler(options):
    """The same with one loader, whose sampler is of the user's own and follows the dataset."""

    class Following(DistributedSampler):
        def __len__(self):
            return len(self.dataset) // self.num_replicas

        def __iter__(self):
            generator = torch.Generator().manual_seed(self.epoch)
            order = torch.randperm(len(self.dataset), generator=generator)
            return iter(order[self.rank :: self.num_replicas].tolist())

    model, samples = ddp(), list(zip(*tensors(128), strict=True))
    data = samples[:32]
    loader = with_workers(data, batch_size=4, sampler=Following(data))
    optimizer = sgd(model)
    counts = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(4):
            counts += train(countoff, model, optimizer, loader, 1, start=epoch)
            data += samples[len(data) : len(data) + 16]
    return model, counts


@healthy(even=True)
def dataset_that_grows_in_order(options):
    """The same with a loader of torch's own sampler over this rank's list, which grows."""
    model, samples = ddp(), list(zip(*tensors(128), strict=True))[own_rank() :: 2]
    data = samples[:16]
    loader = with_workers(data, batch_size=4, shuffle=True)
    optimizer = sgd(model)
    counts = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(4):
            counts += train(countoff, model, optimizer, loader, 1, start=epoch)
            data += samples[len(data) : len(data) + 8]
    return model, counts


@healthy(even=True)
def batches_that_are_halved(options):
    """The batch sampler's size is halved in place after each epoch."""
    model, loader = ddp(), sharded(128, 16)
    optimizer = sgd(model)
    counts = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for epoch in range(3):
            counts += train(countoff, model, optimizer, loader, 1, start=epoch)
            loader.batch_sampler.batch_size //= 2
    return model, counts


@healthy(even=True, needs="lightning")
def dataset_that_grows_with_fabric(options):
    """The list behind Fabric's loader grows between the epochs."""
    from lightning.fabric import Fabric

    from countoff.fabric import Countoff
    from integration_tests import devices
    from integration_tests.lightning_jobs import quiet

    quiet()
    fabric = Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    plain = network()
    model, optimizer = fabric.setup(plain, sgd(plain))
    samples = list(zip(*tensors(128), strict=True))[own_rank() :: 2]
    data, counts = samples[:16], []
    loader = fabric.setup_dataloaders(
        with_workers(data, batch_size=4, sampler=RandomSampler(data)), use_distributed_sampler=False
    )
    with Countoff(fabric, optimizer=optimizer, **options) as countoff:
        for _ in range(4):
            counts.append(0)
            for batch in countoff.train(loader):
                fabric.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                counts[-1] += 1
            data += samples[len(data) : len(data) + 8]
    return model, counts


# Stopped and resumed


def _scheduled(model):
    optimizer = sgd(model)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 24)


@healthy(even=True)
def preempted_by_a_break(options):
    """All ranks break in the middle of an epoch, save after the loop, and resume at that batch."""
    model, loader = ddp(), sharded()
    optimizer, scheduler = _scheduled(model)
    countoff = Countoff(optimizer=optimizer, scheduler=scheduler, epochs=3, **options)
    for epoch in epochs_of(loader, 2):
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            scheduler.step()
            if (epoch, number) == (1, 2):
                break
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "countoff": countoff.state_dict(),
    }
    countoff.close()
    model, loader = ddp(3), sharded()
    optimizer, scheduler = _scheduled(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    with Countoff(optimizer=optimizer, scheduler=scheduler, epochs=3, start_step=11, **options) as countoff:
        countoff.load_state_dict(saved["countoff"])
        for epoch in epochs_of(loader, 2, start=1):
            skipped = 3 if epoch == 1 else 0
            rest = itertools.islice(loader, skipped, None) if skipped else loader
            for batch in countoff.train(rest, epoch=epoch, position=skipped):
                train_on(model, optimizer, batch)
                scheduler.step()
    return model, scheduler.get_last_lr()


@healthy(even=True)
def preempted_by_a_break_in_one_countoff(options):
    """The same where the loop goes on with the rest of the epoch, in the same process and with one Countoff."""
    model, loader = ddp(), sharded()
    optimizer, scheduler = _scheduled(model)
    with Countoff(optimizer=optimizer, scheduler=scheduler, epochs=3, **options) as countoff:
        for epoch in epochs_of(loader, 2):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                scheduler.step()
                if (epoch, number) == (1, 2):
                    break
        record = countoff.state_dict()
        dist.barrier()
        countoff.load_state_dict(record)
        for epoch in epochs_of(loader, 2, start=1):
            skipped = 3 if epoch == 1 else 0
            rest = itertools.islice(loader, skipped, None) if skipped else loader
            for batch in countoff.train(rest, epoch=epoch, position=skipped):
                train_on(model, optimizer, batch)
                scheduler.step()
    return model, scheduler.get_last_lr()


@healthy(even=True)
def saved_at_the_end_of_an_epoch(options):
    """A checkpoint is written in the last batch of an epoch, another one after it, and both are resumed from."""
    outcome = []
    for after in (False, True):
        model, loader = ddp(), sharded()
        optimizer = sgd(model)
        countoff, record = Countoff(optimizer=optimizer, **options), {}
        loader.sampler.set_epoch(0)
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            if number == 7 and not after:
                record = countoff.state_dict()
        record = countoff.state_dict() if after else record
        countoff.close()
        with Countoff(optimizer=optimizer, start_step=8, **options) as countoff:
            countoff.load_state_dict(record)
            for epoch in epochs_of(loader, 2, start=1):
                for batch in countoff.train(loader, epoch=epoch):
                    train_on(model, optimizer, batch)
        outcome.append(model)
    return outcome


@healthy(even=True, needs="accelerate")
def preempted_with_accelerate(options):
    """All ranks break in the middle of an epoch, save their state after the loop, and another Accelerator resumes."""
    from countoff.accelerate import Countoff
    from integration_tests.zoo.accelerate_loops import accelerator, prepared, shuffled, step

    own = accelerator(use_seedable_sampler=True, data_seed=7)
    model, optimizer, loader = prepared(own, shuffled())
    with Countoff(own, **options) as countoff:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for number, batch in enumerate(countoff.train(loader)):
                step(own, model, optimizer, batch)
                if (epoch, number) == (1, 2):
                    break
        own.save_state("preempted")
    own.wait_for_everyone()
    own = accelerator(use_seedable_sampler=True, data_seed=7)
    model, optimizer, loader = prepared(own, shuffled(), seed=3)
    with Countoff(own, **options) as countoff:
        own.load_state("preempted")
        for epoch in (1, 2):
            loader.set_epoch(epoch)
            rest = own.skip_first_batches(loader, 3) if epoch == 1 else loader
            for batch in countoff.train(rest):
                step(own, model, optimizer, batch)
    return model


@healthy()
def rounds_of_active_learning(options):
    """Each round trains on more rows, evaluates the rest of the pool, and has a Countoff that nobody closes."""
    pool, chosen = TensorDataset(*tensors(96)), list(range(32))
    model = ddp()
    optimizer = sgd(model)
    losses = []
    for number in range(3):
        rest = [index for index in range(96) if index not in chosen]
        loader, evaluation = sharded(data=Subset(pool, list(chosen))), sharded(data=Subset(pool, rest))
        countoff = Countoff(optimizer=optimizer, **options)
        train(countoff, model, optimizer, loader)
        losses.append(evaluate(model.module, countoff.eval(evaluation)))
        chosen += rest[number : number + 16]
    return model, losses
