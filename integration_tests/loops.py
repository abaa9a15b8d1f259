"""Plain PyTorch training loops for the tests of `countoff.torch`."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff.torch import Countoff
from integration_tests import devices
from integration_tests.constants import put
from integration_tests.digits import BATCH_SIZE, digits, own_rank, share_loader, weights


def model_and_optimizer() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = devices.ddp(torch.nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_on(model: Any, optimizer: Any, batch: Any) -> None:
    images, labels = devices.moved(batch)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def even_loader(samples: int = 80) -> DataLoader[Any]:
    images, labels = digits()
    dataset = TensorDataset(images[:samples], labels[:samples])
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset))


def counted(countoff: Any, loader: Any) -> Any:
    """A train epoch over a loader; counted, unless countoff is None."""
    return loader if countoff is None else countoff.train(loader)


def uneven(batches: list[int], options: dict[str, Any] | None = None) -> None:
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = share_loader(batches[own_rank()])
    countoff = Countoff(optimizer=optimizer, **(options or dict[str, Any]()))
    for _ in range(3):
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)


def uneven_eval(batches: list[int], uneven_eval: Any) -> None:
    devices.join()
    model, optimizer = model_and_optimizer()
    loader, evals = even_loader(40), share_loader(batches[own_rank()])
    countoff = Countoff(uneven_eval=uneven_eval)
    for _ in range(2):
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)
        for batch in countoff.eval(evals):
            images, labels = devices.moved(batch)
            torch.nn.functional.cross_entropy(model.module(images), labels)


def skip_a_step(at: int, tick_batches: int) -> None:
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = even_loader()
    put(TICK_BATCHES=tick_batches)
    countoff = Countoff(optimizer=optimizer)
    for number, batch in enumerate(countoff.train(loader)):
        images, labels = devices.moved(batch)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        if own_rank() == 0 or number != at:
            optimizer.step()
        optimizer.zero_grad()


def own_learning_rate() -> None:
    devices.join()
    model, optimizer = model_and_optimizer()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + own_rank())
    loader = even_loader()
    put(TICK_BATCHES=2)
    countoff = Countoff(model=model, optimizer=optimizer)
    for batch in countoff.train(loader):
        train_on(model, optimizer, batch)


def evaluates_early() -> None:
    devices.join()
    model, optimizer = model_and_optimizer()

    def wait_for_verdict(number: int) -> None:
        # Else the evaluation's collective could meet one of the training, of another size, and gloo aborts then.
        while countoff.guard.verdict is None:
            time.sleep(0.01)

    loader, evals = even_loader(), share_loader(2, before=wait_for_verdict)
    countoff = Countoff(uneven_eval="raise")
    for number, batch in enumerate(countoff.train(loader)):
        train_on(model, optimizer, batch)
        if number == 3 + own_rank():
            for _ in countoff.eval(evals):
                pass
            dist.all_reduce(torch.zeros(1, device=devices.own_device()))


def trains_one_epoch_more() -> None:
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = even_loader()
    countoff = Countoff()
    for _ in range(1 + own_rank()):
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)


def healthy_without_and_with() -> list[dict[str, Any]]:
    """The outcomes of the same loop without countoff and with it, in one process."""
    devices.join()
    return [healthy(enabled) for enabled in (False, True)]


def healthy(enabled: bool) -> dict[str, Any]:
    """A loop with what people do: breaks, evaluations in mid-epoch, nested loops, an iterator by hand."""
    model, optimizer = model_and_optimizer()
    loader, evals = even_loader(), share_loader(2)
    countoff = Countoff(optimizer=optimizer, enabled=enabled, uneven_eval="raise")
    for epoch in range(3):
        assert isinstance(loader.sampler, DistributedSampler)
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(countoff.train(loader)):
            train_on(model, optimizer, batch)
            if number == 2:
                for evaluated in countoff.eval(evals, "digits"):
                    model.module(devices.moved(evaluated)[0])
            if epoch == 1 and number == 4:
                break
        for _ in countoff.eval(evals, "digits"):
            break
    iterator = iter(countoff.train(loader))
    train_on(model, optimizer, next(iterator))
    progress = countoff.progress() if enabled else {}
    steps = countoff.guard.steps if enabled else 0
    countoff.close()
    countoff.close()
    assert type(loader) is DataLoader
    return {"weights": weights(model), "steps": steps, "progress": progress}


def joined(batches: list[int]) -> str:
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = share_loader(batches[own_rank()])
    countoff = Countoff()
    for _ in range(2):
        with countoff.uncounted(), model.join():
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
    countoff.close()
    return weights(model)


def evaluates_on_rank_0() -> str:
    devices.join()
    model, optimizer = model_and_optimizer()
    loader, evals = even_loader(), share_loader(2)
    with Countoff(uneven_eval="off") as countoff:
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
            if own_rank() == 0:
                for _ in countoff.eval(evals):
                    pass
    return weights(model)


def over_file_store(path: str, batches: list[int]) -> None:
    import os

    rank, world_size = own_rank(), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    model, optimizer = model_and_optimizer()
    loader = share_loader(batches[rank])
    countoff = Countoff()
    for batch in countoff.train(loader):
        train_on(model, optimizer, batch)


def raises_in_the_loop() -> None:
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = even_loader()
    countoff = Countoff()
    for number, batch in enumerate(countoff.train(loader)):
        train_on(model, optimizer, batch)
        if own_rank() == 1 and number == 3:
            raise ValueError("loss is not finite")
