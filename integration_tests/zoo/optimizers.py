"""Optimizers and schedules: several of them, few steps, many steps, and steps that are no steps of training."""

import contextlib
import copy
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.zoo.parts import (
    Listed,
    ddp,
    epochs_of,
    evaluate,
    loss_of,
    network,
    own_batches,
    sgd,
    sharded,
    train,
    train_on,
)
from integration_tests.zoo.registry import healthy


@healthy(even=True)
def generator_and_discriminator(options):
    """Two models train in turn: the discriminator twice per batch, the generator in every third batch."""
    first, second, loader = ddp(1), ddp(2), sharded()
    slow, fast = sgd(first), torch.optim.Adam(second.parameters(), 1e-3)
    with Countoff(optimizer=[slow, fast], **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(second, fast, batch)
                train_on(second, fast, batch)
                if number % 3 == 2:
                    train_on(first, slow, batch)
    return first, second


@healthy(even=True)
def accumulation_with_a_remainder(options):
    """Gradients of three batches are accumulated with no_sync, and the last two batches are a step of their own."""
    model, loader = ddp(), sharded(64)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, gradient_accumulation_steps=3, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader), 1):
                if number % 3 and number < len(loader):
                    with model.no_sync():
                        loss_of(model, batch).backward()
                else:
                    train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def accumulation_over_the_end_of_an_epoch(options):
    """Steps are taken after each third batch of the run, whatever the epoch."""
    model, loader = ddp(), sharded(64)
    optimizer = sgd(model)
    count = 0
    with Countoff(optimizer=optimizer, gradient_accumulation_steps=3, **options) as countoff:
        for _ in epochs_of(loader, 3):
            for batch in countoff.train(loader):
                loss_of(model, batch).backward()
                count += 1
                if count % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return model


@healthy()
def learning_rate_range_test(options):
    """A range test runs over some batches, the state is put back, and training begins on the same data."""
    model, loader = ddp(), sharded(128)
    optimizer = sgd(model, 1e-4)
    with Countoff(optimizer=optimizer, **options) as countoff:
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        rates = []
        for number, batch in enumerate(countoff.train(loader)):
            optimizer.param_groups[0]["lr"] = 1e-4 * 2**number
            rates.append(train_on(model, optimizer, batch))
            if number == 9:
                break
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        optimizer.param_groups[0]["lr"] = 0.1
        train(countoff, model, optimizer, loader)
    return model, rates


@healthy()
def warm_restarts(options):
    """The learning rate is a cosine with warm restarts, stepped by fractions of epochs."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    with Countoff(optimizer=optimizer, scheduler=scheduler, epochs=4, **options) as countoff:
        for epoch in epochs_of(loader, 4):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                scheduler.step(epoch + number / len(loader))  # pyright: ignore[reportArgumentType]  (as documented)
    return model


@healthy()
def rate_that_falls_on_a_plateau(options):
    """The learning rate falls where the mean loss of all ranks does not."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    rates = []
    with Countoff(optimizer=optimizer, scheduler=scheduler, epochs=4, **options) as countoff:
        for epoch in range(4):
            train(countoff, model, optimizer, loader, 1, start=epoch)
            loss = torch.tensor(evaluate(model.module, own_batches(3)))
            dist.all_reduce(loss)
            scheduler.step(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
    return model, rates


@healthy()
def schedules_one_after_the_other(options):
    """A linear warm-up, a constant and a cosine follow each other, stepped per batch, to the end of the run."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.ConstantLR(optimizer, 1.0),
        lr_scheduler.CosineAnnealingLR(optimizer, 16),
    ]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, [4, 8])
    with Countoff(optimizer=optimizer, scheduler=scheduler, epochs=3, **options) as countoff:
        for _ in epochs_of(loader, 3):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
                scheduler.step()
    return model


@healthy()
def rate_set_by_hand(options):
    """The loop computes the learning rate of each step and writes it into the optimizer."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    step = 0
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 * (1 + math.cos(math.pi * step / 16))
                train_on(model, optimizer, batch)
                step += 1
    return model


@healthy(even=True)
def closure_that_runs_many_times(options):
    """LBFGS calls its closure as often as it likes, on one model that is averaged after each step."""
    model, loader = network().eval(), sharded(32)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(loader):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
    return model


@healthy(even=True)
def averaged_weights(options):
    """An exponential mean of the weights is kept, and the statistics of its norm are made over the loader."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    mean = swa_utils.AveragedModel(model.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
                mean.update_parameters(model.module)
        loader.sampler.set_epoch(2)
        swa_utils.update_bn(loader, mean)
    return model, mean


@healthy()
def local_steps(options):
    """The ranks train apart for three steps and then average their weights."""
    model, loader = network(), sharded(96)
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader), 1):
                train_on(model, optimizer, batch)
                if number % 3 == 0:
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.data)
                        parameter.data /= 2
    return model


@healthy()
def join_with_uneven_inputs(options):
    """DDP's join lets ranks train on eight and six batches, and the program says that this is not compared."""
    model, loader = ddp(), Listed(own_batches(8 - 2 * own_rank()))
    optimizer = sgd(model)
    with (
        Countoff(optimizer=optimizer, **options) as countoff,
        countoff.uncounted(),
        model.join(),
    ):
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)
    return model


@healthy(even=True)
def two_steps_per_batch(options):
    """Each batch takes a step up and a step down again, as sharpness-aware minimization does."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(loader):
            loss_of(model, batch).backward()
            with torch.no_grad():
                moves = [0.05 * parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter += move
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter -= move
            optimizer.step()
            optimizer.zero_grad()
    return model


@healthy()
def optimizer_made_later(options):
    """The optimizer is made after the Countoff, and made again when half of the model thaws."""
    model, loader = ddp(), sharded()
    with Countoff(**options) as countoff:
        optimizer = sgd(model)
        train(countoff, model, optimizer, loader, 1)
        optimizer = torch.optim.AdamW(model.module[3].parameters(), 1e-3)
        train(countoff, model, optimizer, loader, 1, start=1)
    return model


@healthy()
def optimizer_in_the_backward_pass(options):
    """Each parameter has an optimizer of its own, which steps in a hook of the backward pass."""
    model, loader = ddp(), sharded(32)
    own = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def step(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with Countoff(**options) as countoff:
        for batch in countoff.train(loader):
            loss_of(model, batch).backward()
    return model


@healthy()
def sharded_optimizer(options):
    """ZeroRedundancyOptimizer holds another part of the optimizer's state on each rank."""
    model, loader = ddp(), sharded()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    with Countoff(optimizer=optimizer, **options) as countoff:
        train(countoff, model, optimizer, loader)
    return model


@healthy()
def compressed_gradients(options):
    """A hook compresses the gradients of DDP, which has static graphs and small buckets."""
    model = DistributedDataParallel(network(), static_graph=True, bucket_cap_mb=0.0001)
    model.register_comm_hook(None, fp16_compress_hook)
    loader = sharded()
    optimizer = sgd(model)
    with Countoff(optimizer=optimizer, model=model, **options) as countoff:
        train(countoff, model, optimizer, loader)
    return model.module


@healthy()
def gradient_scaler_without_a_gpu(options):
    """Training runs under autocast in bfloat16 with a scaler that is disabled."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    scaler = GradScaler("cpu", enabled=False)
    with Countoff(optimizer=optimizer, model=model, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, batch)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=False)
    return model


@healthy()
def step_hooks_of_the_program(options):
    """The program has hooks of its own before and after each step, and a subclass that overrides step."""
    seen = []

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            seen.append("step")
            return super().step(closure)

    model, loader = ddp(), sharded(32)
    optimizer = Own(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with Countoff(optimizer=optimizer, **options) as countoff:
        train(countoff, model, optimizer, loader)
    return model, seen


@healthy()
def state_of_the_optimizer_is_loaded(options):
    """The optimizer's state is saved and loaded in the middle of each epoch."""
    model, loader = ddp(), sharded()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Countoff(optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                if number == 3:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model


def average_weights(model):
    """Gives all ranks the mean of their weights. Collective: every rank must call it."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@healthy(even=True)
def local_sgd_with_a_synchronised_step(options):
    """Three steps of each rank by itself, one by averaged gradients, and then the weights are averaged."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(model=model, optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                if number % 4 == 3:
                    train_on(model, optimizer, batch)
                    average_weights(model)
                else:
                    with model.no_sync():
                        train_on(model, optimizer, batch)
            average_weights(model)
    return model


@healthy()
def outer_and_inner_optimizer(options):
    """Ranks train apart by an inner optimizer, and an outer one steps by the mean of their ways (DiLoCo)."""
    model, loader = ddp(), sharded()
    outer_parameters = [torch.nn.Parameter(each.detach().clone()) for each in model.parameters()]
    inner, outer = sgd(model), torch.optim.SGD(outer_parameters, lr=0.7, momentum=0.9, nesterov=True)
    with Countoff(model=model, optimizer=[inner, outer], **options) as countoff:
        train_on(model, inner, next(iter(own_batches())))  # averaged, so that all begin alike
        average_weights(model)
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                with model.no_sync():
                    train_on(model, inner, batch)
                if number % 4 == 3:
                    with torch.no_grad():
                        for far, own in zip(outer_parameters, model.parameters(), strict=True):
                            far.grad = far - own
                            dist.all_reduce(far.grad)
                            far.grad /= dist.get_world_size()
                        outer.step()
                        for far, own in zip(outer_parameters, model.parameters(), strict=True):
                            own.copy_(far)
    return model


@healthy()
def inner_steps_that_are_taken_back(options):
    """The same optimizer steps by a rank's own batch; then its weights are put back, and it steps by averaged ones."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(model=model, optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                before = copy.deepcopy(model.state_dict())
                with model.no_sync():
                    train_on(model, optimizer, batch)
                adapted = loss_of(model, batch)
                adapted.backward()
                model.load_state_dict(before)
                optimizer.step()
                optimizer.zero_grad()
    return model


@healthy(even=True)
def twins_that_train_apart(options):
    """Two models of one shape run local SGD side by side, and rank 1 is late between their passes."""
    first, second, loader = ddp(1), ddp(2), sharded()
    twins = [(first, sgd(first)), (second, sgd(second))]
    with Countoff(model=[first, second], optimizer=[each for _, each in twins], **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                synchronises = number % 4 == 3
                with contextlib.ExitStack() as apart:
                    losses = []
                    for model, _ in twins:
                        if not synchronises:
                            apart.enter_context(model.no_sync())
                        time.sleep(0.02 + 0.03 * own_rank())  # so that rank 0 has compared one twin before rank 1 has
                        losses.append(loss_of(model, batch))
                    for (model, optimizer), loss in zip(twins, losses, strict=True):
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        if synchronises:
                            average_weights(model)
            average_weights(first)
            average_weights(second)
    return first, second


@healthy()
def inner_steps_for_each_of_several_tasks(options):
    """Each batch has four tasks, as in first-order MAML: a step of one's own, the gradient behind it, and back."""
    model, loader = ddp(), sharded(128)
    optimizer = sgd(model)
    with Countoff(model=model, optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for inputs, labels in countoff.train(loader):
                for task in zip(inputs.chunk(4), labels.chunk(4), strict=True):
                    before = copy.deepcopy(model.state_dict())
                    with model.no_sync():
                        train_on(model, optimizer, task)
                    loss_of(model, task).backward()
                    model.load_state_dict(before)
                    optimizer.step()
                    optimizer.zero_grad()
    return model


@healthy()
def sharpness_aware_steps(options):
    """Each rank climbs by its own gradient inside no_sync, and the step is taken by the averaged one from there."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(model=model, optimizer=optimizer, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                with model.no_sync():
                    loss_of(model, batch).backward()
                climbed = [0.05 * grad for each in model.parameters() if (grad := each.grad) is not None]
                with torch.no_grad():
                    for parameter, way in zip(model.parameters(), climbed, strict=True):
                        parameter.add_(way)
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                with torch.no_grad():
                    for parameter, way in zip(model.parameters(), climbed, strict=True):
                        parameter.sub_(way)
                optimizer.step()
                optimizer.zero_grad()
    return model


@healthy()
def generator_through_a_discriminator(options):
    """The generator's gradients go through the discriminator inside no_sync, which leaves some of its own behind."""
    first, second, loader = ddp(1), ddp(2), sharded()
    slow, fast = sgd(first), sgd(second)
    with Countoff(model=[first, second], optimizer=[slow, fast], **options) as countoff:
        for _ in epochs_of(loader):
            for inputs, labels in countoff.train(loader):
                with second.no_sync():
                    made = torch.nn.functional.pad(first(inputs), (0, 4))
                    torch.nn.functional.cross_entropy(second(made), labels).backward()
                slow.step()
                slow.zero_grad()
                fast.zero_grad()
                train_on(second, fast, (inputs, labels))
    return first, second


@healthy()
def ranks_that_adapt_for_a_while(options):
    """After some averaged steps each rank adapts to its own data; then it goes on with the weights of before."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    with Countoff(model=model, optimizer=optimizer, **options) as countoff:
        for epoch in epochs_of(loader, 3):
            before = copy.deepcopy(model.state_dict())
            for batch in countoff.train(loader):
                with model.no_sync() if epoch == 1 else contextlib.nullcontext():
                    train_on(model, optimizer, batch)
            if epoch == 1:
                model.load_state_dict(before)
    return model


@healthy(even=True)
def two_models_that_accumulate_in_turns(options):
    """Each of two models steps after four batches of its own; they have the batches in turns."""
    first, second, loader = ddp(1), ddp(2), sharded(128)
    models, seen = [(first, sgd(first)), (second, sgd(second))], [0, 0]
    with Countoff(optimizer=[each for _, each in models], gradient_accumulation_steps=4, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                model, optimizer = models[number % 2]
                loss_of(model, batch).backward()
                seen[number % 2] += 1
                if seen[number % 2] % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return first, second


@healthy(even=True)
def optimizers_that_accumulate_apart(options):
    """Three optimizers of one model step after every fourth batch, but not after the same one."""
    model, loader = ddp(), sharded(128)
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in ([*model.module[0].parameters()], [model.module[3].weight])]
    optimizers.append(torch.optim.SGD([model.module[3].bias], lr=0.1))
    with Countoff(model=model, optimizer=optimizers, gradient_accumulation_steps=4, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                loss_of(model, batch).backward()
                if number % 4 < 3:
                    optimizers[number % 4].step()
                    optimizers[number % 4].zero_grad()
    return model


@healthy(even=True)
def an_optimizer_that_does_not_accumulate(options):
    """The weights are stepped after four batches, a scale of the loss after each one."""
    model, loader = ddp(), sharded(128)
    scale = torch.nn.Parameter(torch.ones(1))
    slow, fast = sgd(model), torch.optim.SGD([scale], lr=0.01)
    with Countoff(gradient_accumulation_steps=4, **options) as countoff:
        for _ in epochs_of(loader):
            for number, batch in enumerate(countoff.train(loader)):
                (loss_of(model, batch) * scale).backward()
                dist.all_reduce(scale.grad)
                fast.step()
                fast.zero_grad()
                if number % 4 == 3:
                    slow.step()
                    slow.zero_grad()
    return model, scale


@healthy(even=True)
def micro_batches_of_each_batch(options):
    """Each batch is cut into four micro-batches, which are one step: the accumulation is one of these."""
    model, loader = ddp(), sharded(128)
    optimizer = sgd(model)
    with Countoff(model=model, optimizer=optimizer, gradient_accumulation_steps=4, **options) as countoff:
        for _ in epochs_of(loader):
            for inputs, labels in countoff.train(loader):
                for part in zip(inputs.chunk(4), labels.chunk(4), strict=True):
                    loss_of(model, part).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model


@healthy(even=True)
def closures_of_accumulated_batches(options):
    """LBFGS runs its closure many times, over the four batches that a step has."""
    model, loader = ddp(), sharded(128)
    model.eval()  # without dropout, which a line search cannot follow
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    held = []

    def closure():
        optimizer.zero_grad()
        losses = [loss_of(model, batch) / 4 for batch in held]
        for loss in losses:
            loss.backward()
        return sum(losses)

    with Countoff(model=model, optimizer=optimizer, gradient_accumulation_steps=4, **options) as countoff:
        for _ in epochs_of(loader):
            for batch in countoff.train(loader):
                held.append(batch)
                if len(held) == 4:
                    optimizer.step(closure)
                    held.clear()
    return model


class Wrapper:
    """An optimizer of the user's own around one of torch, with parameter groups that are not as torch's."""

    def __init__(self, inner, groups):
        self.inner, self.groups = inner, groups

    @property
    def param_groups(self):
        if self.groups is None:
            raise RuntimeError("the groups are not known yet")
        return self.groups

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


@healthy()
def wrappers_with_other_groups(options):
    """Wrappers around an optimizer have groups without parameters, groups that are no mappings, or none yet."""
    models = []
    for groups in ([{"lr": 0.1}], {"all": {"lr": 0.1}}, [("lr", 0.1)], None):
        model, loader = ddp(), sharded(16)
        optimizer: Any = Wrapper(sgd(model), groups)
        with Countoff(optimizer=optimizer, **options) as countoff:
            train(countoff, model, optimizer, loader)
        models.append(model)
    return models


@healthy()
def rates_that_are_no_numbers(options):
    """The optimizer of the user's own has a rate for each output, a complex one, one beyond floats, and a function."""

    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for each in self.param_groups[0]["params"]:
                each -= 0.1 * each.grad

    model, loader = ddp(), sharded()
    optimizer = Own(model.parameters(), lr=0.1)
    optimizer.param_groups += [
        {"params": [], "lr": rate, "initial_lr": rate}
        for rate in (torch.tensor([0.1, 0.2]), torch.tensor(1j), 10**400, lambda step: 0.1)
    ]
    with Countoff(model=model, optimizer=optimizer, **options) as countoff:
        return train(countoff, model, optimizer, loader), len(countoff.state_dict()) >= 0, model


@healthy()
def schedulers_that_cannot_tell(options):
    """Schedulers of the user's own raise where they are asked for what they do not have."""

    class Raising:
        @property
        def last_epoch(self):
            raise RuntimeError("it has not begun")

    class Forwarding:
        def __getattr__(self, name):
            return {}[name]

    model, loader = ddp(), sharded()
    optimizer, schedulers = sgd(model), [Raising(), Forwarding(), lambda step: 0.1]
    with Countoff(optimizer=optimizer, scheduler=schedulers, **options) as countoff:
        counts = train(countoff, model, optimizer, loader)
        countoff.state_dict()
    return counts, model
