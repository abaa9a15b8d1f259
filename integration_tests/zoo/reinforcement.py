"""Loops of reinforcement learning: buffers that are filled and read again, rollouts, and self-play."""

import random
from collections import deque

import torch
import torch.distributed as dist

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import (
    ddp,
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


@healthy(even=True)
def buffer_filled_before_each_pass(options):
    """The list behind the loader is filled with new samples before each pass."""
    buffer = list(zip(*tensors(64), strict=True))
    model, loader = ddp(), sharded(data=buffer)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for rollout in range(3):
            buffer[:] = zip(*tensors(64, seed=rollout), strict=True)
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
    return model


@healthy()
def tensor_filled_before_each_pass(options):
    """The tensors behind the loader are overwritten in place before each pass."""
    inputs, labels = tensors(64)
    model, loader = ddp(), sharded(data=torch.utils.data.TensorDataset(inputs, labels))
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for rollout in range(3):
            new_inputs, new_labels = tensors(64, seed=rollout)
            inputs.copy_(new_inputs)
            labels.copy_(new_labels)
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
    return model


@healthy()
def replay_of_old_samples(options):
    """Samples are drawn at random out of a bounded memory, by a function."""
    memory = deque(maxlen=20)
    model = ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, batch_size=4, **options) as countoff:
        samples = countoff.train(iter(lambda: random.choice(memory), None))
        for batch in own_batches(24):
            memory.append(batch)
            if len(memory) > 8:
                train_on(model, optimizer, next(samples))
    return model


@healthy()
def several_epochs_per_rollout(options):
    """Each rollout makes a loader and a Countoff, and is read four times in other orders."""
    model = ddp()
    optimizer = sgd(model)
    with torch.random.fork_rng():
        torch.manual_seed(own_rank())
        for rollout in range(3):
            data = list(zip(*tensors(32, seed=rollout * 2 + own_rank()), strict=True))
            loader = with_workers(data, batch_size=4, shuffle=True)
            with Countoff(optimizer=optimizer, **options) as countoff:
                train(countoff, model, optimizer, loader, 4)
    return model


@healthy()
def rollouts_of_different_lengths(options):
    """Episodes have other lengths on each rank, and both ranks train on as many batches of them."""
    actor, model = network(3), ddp()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(own_batches(9)):
            with torch.no_grad():
                for _ in range(random.randrange(1, 6)):
                    actor(batch[0])
            train_on(model, optimizer, batch)
    return model


@healthy()
def actor_and_critic(options):
    """The critic is trained four times for each step of the actor, on rollouts without a loader."""
    actor, critic = ddp(1), ddp(2)
    first, second = sgd(actor), sgd(critic)
    with Countoff(optimizer=[first, second], **options) as countoff:
        for batch in countoff.train(own_batches(6)):
            for _ in range(4):
                train_on(critic, second, batch)
            train_on(actor, first, batch)
    return actor, critic


@healthy()
def reference_model_beside_the_policy(options):
    """A frozen model gives logits on each batch, and the policy generates several samples per prompt."""
    policy, reference, loader = ddp(), network(3).eval().requires_grad_(False), sharded(48)
    optimizer = sgd(policy)
    with Countoff(optimizer=optimizer, model=policy, **options) as countoff:
        for inputs, labels in countoff.train(loader):
            with torch.no_grad():
                logits = reference(inputs)
                samples = [policy.module(inputs).argmax(1) for _ in range(2)]
            loss = loss_of(policy, (inputs, labels)) + 0 * (logits.sum() + torch.stack(samples).sum())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return policy


@healthy()
def early_stop_of_an_inner_loop(options):
    """The passes over one rollout end as soon as the mean change of all ranks is too large."""
    model, loader = ddp(), sharded(64)
    optimizer = sgd(model)
    passes = []
    with Countoff(optimizer=optimizer, **options) as countoff:
        for rollout in range(3):
            passes.append(0)
            for inner in range(4):
                loader.sampler.set_epoch(10 * rollout + inner)
                change = torch.tensor(sum(train_on(model, optimizer, batch) for batch in countoff.train(loader)))
                passes[-1] += 1
                dist.all_reduce(change)
                if change > 20.0 - inner:
                    break
    return model, passes


@healthy()
def learner_that_broadcasts(options):
    """Rank 0 broadcasts its weights after each step, as a learner does to its actors."""
    model, loader = network(), sharded(48)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
    return model
