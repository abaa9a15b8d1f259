"""What adapters read from torch's own objects: ranks, versions, loaders, optimizers."""

from __future__ import annotations

import contextlib
import math
import platform
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.class_swap import own_class
from countoff._adapter.weakly import weakly
from countoff.core import LoaderFacts
from countoff.core.data.plain import attribute_of, attributes_of, items_of
from countoff.core.data.unobserved import unobserved
from countoff.core.session.subgroup import Subgroup

_LIBRARIES = ("torch", "torchdata", "accelerate", "streaming", "lightning", "pytorch_lightning", "lightning_fabric")
"""Packages whose loaders give the batches of their samplers, each once."""
_MADE_WITH = "dataset", "batch_size", "sampler", "batch_sampler", "num_workers"
"""What the constructor of torch's DataLoader sets, and adapters read."""
_NUMBERS = (
    *("reported_batches", "samples_per_rank", "dataset_size"),
    *("gradient_accumulation_steps", "max_epochs", "max_steps", "limit_batches"),
)
"""Facts that may be numbers of a class of the user's choice, such as numpy's."""


def rank_and_world_size() -> tuple[int, int]:
    """Returns this rank and the number of ranks; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def subgroup_of(group: Any) -> Subgroup | None:
    """Returns the part of the job that a process group is; None without a group.

    Args:
        group: The process group; None for all ranks of the job.

    Raises:
        ValueError: If this rank is not in the group.
    """
    rank, world_size = rank_and_world_size()
    if group is None or world_size == 1:
        return None
    # What `new_group` returns where a rank is not in the group is no process group.
    ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in the group: make Countoff(group=…) on the ranks of the group alone")
    return Subgroup(tuple(sorted(ranks)), group, group.group_name)


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, torch, countoff and the packages; ranks that differ in one get a warning."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("countoff", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def reported_length(loader: Any) -> int | None:
    """Returns ``len(loader)``; None if it has none. Iterable loaders define `__len__` and raise anything in it."""
    try:
        return len(loader)
    except Exception:  # of a `__len__` of the user's own
        return None


def is_data_loader(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Returns whether a loader is torch's DataLoader, and has what torch's constructor gives it.

    A subclass that wraps another loader may not call that constructor.
    """
    try:
        return isinstance(loader, DataLoader) and all(hasattr(loader, name) for name in _MADE_WITH)
    except Exception:  # of a property of the user's own
        return False


def loader_facts(loader: Any, **known: Any) -> LoaderFacts:
    """Returns the facts of one loader; None stands for what the loader does not show. Raises nothing by the loader.

    Args:
        loader: A torch DataLoader, or anything that is iterated.
        known: Facts that the caller knows better; they replace what is read from the loader.
    """
    facts: dict[str, Any] = {
        "reported_batches": reported_length(loader),
        "batch_size": None,
        "drop_last": attribute_of(loader, "drop_last") is True,
        "samples_per_rank": None,
    }
    if is_data_loader(loader):
        with contextlib.suppress(Exception):  # a sampler of the user's own may have no attribute of its base class
            facts |= _facts_of_data_loader(loader)
    facts |= known
    if not _is_number(facts["batch_size"]):
        facts["batch_size"] = None
    return LoaderFacts(**counted(facts))


def shown_facts(loader: Any, length: int | None, **known: Any) -> LoaderFacts:
    """Returns the facts of the loader of a loop that a person writes, of which nothing is asked that may do anything.

    Args:
        loader: Anything that is iterated; None stands for none.
        length: Its length, where that may be asked for; None where not, and where it has none.
        known: As for `loader_facts`.
    """
    if length is not None and issubclass(type(loader), DataLoader):
        return loader_facts(loader, **known)
    batch_size = attribute_of(loader, "batch_size")
    return LoaderFacts(
        reported_batches=length,
        batch_size=batch_size if _is_number(batch_size) else None,
        drop_last=attribute_of(loader, "drop_last") is True,
        samples_per_rank=None,
        **known,
    )


def iterates_as_torch(loader: Any) -> bool:
    """Returns whether a DataLoader's pass has the batches of its sampler: its class has no `__iter__` of the user's."""
    return of_library(own_class(type(loader)).__iter__)


def of_library(defined: Any, *packages: str) -> bool:
    """Returns whether a class or a function is one of torch, of torchdata or of a framework, and not of the user's own.

    Args:
        defined: The class or the function.
        packages: Which of these; none: any.
    """
    return str(getattr(defined, "__module__", "")).partition(".")[0] in (packages or _LIBRARIES)


def has_library_methods(value: Any, names: Iterable[str], *packages: str) -> bool:
    """Returns whether an object has all these methods and properties, and `of_library` holds for each of them.

    What stands in an object in the place of a method must be of countoff.

    Args:
        value: The object.
        names: The names of the methods and the properties.
        packages: As for `of_library`.
    """
    own = attributes_of(value)
    placed = [own[name] for name in names if name in own]
    defined = [getattr(type(value), name, None) for name in names]
    return all(of_library(each, "countoff") for each in placed) and all(
        of_library(getattr(each, "fget", each), *packages) for each in defined
    )


def counted(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts with numbers of Python's own, where they are numpy's or floats.

    A fraction stays a float, and what is no number stays as it is. Of other numbers, only a limit may be a float that
    is not whole: it acts as the next number, and infinity as none.
    """
    return {name: _counted(name, value) if name in _NUMBERS else value for name, value in facts.items()}


def _counted(name: str, value: Any) -> Any:
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, Real):
        return value
    if name == "limit_batches":
        return float(value)
    if name in ("max_epochs", "max_steps"):
        return math.ceil(value) if math.isfinite(value) else None
    return math.floor(value) if value % 1 == 0 else value


def _is_number(batch_size: Any) -> bool:
    """Whether a batch size is one: a batch sampler of the user's own may hold anything."""
    return type(batch_size) is int and batch_size > 0


def _facts_of_data_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": bool(loader.drop_last)}
    if isinstance(loader.dataset, IterableDataset) or not iterates_as_torch(loader):
        return facts
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None and isinstance(batch_sampler, BatchSampler):
        facts |= {"batch_size": batch_sampler.batch_size, "drop_last": bool(batch_sampler.drop_last)}
        if type(batch_sampler).__iter__ is not BatchSampler.__iter__:
            return facts  # its number of batches follows rules of its own, as where it sorts samples by length
    sampler = getattr(batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        if type(sampler).__iter__ is not DistributedSampler.__iter__ and len(sampler) != sampler.num_samples:
            return facts  # a subclass that yields another number of samples
        size = reported_length(loader.dataset)
        return facts | {"samples_per_rank": sampler.num_samples, "dataset_size": size, "sampling": "distributed"}
    if isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement):
        # Ranks without a DistributedSampler may all read the same data set, or each its own share of it.
        sampling = "replicated" if rank_and_world_size()[1] == 1 else "unknown"
        size = reported_length(loader.dataset)
        return facts | {"samples_per_rank": len(sampler), "dataset_size": size, "sampling": sampling}
    return facts


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns an optimizer's parameter groups; none of a wrapper of the user's whose groups are not as torch's."""
    with contextlib.suppress(Exception):  # of a property of the user's own
        return [each for each in optimizer.param_groups if isinstance(each, dict)]
    return []


def parameters_in(optimizers: Iterable[Any]) -> set[int]:
    """Returns the ids of the parameters of optimizers."""
    groups = [group for optimizer in optimizers for group in groups_of(optimizer)]
    return {id(each) for group in groups for each in items_of(group.get("params")) or ()}


def learning_rates(optimizers: Iterable[Any]) -> list[float]:
    """Returns the learning rates of all parameter groups; not those on a device, where reading waits for the device."""
    return _on_cpu([group.get("lr") for optimizer in optimizers for group in groups_of(optimizer)])


def schedule_positions(optimizers: Iterable[Any], schedulers: Iterable[Any]) -> tuple[list[float], list[int]]:
    """Returns the base rates of learning-rate schedules, and how often each scheduler was stepped.

    Args:
        optimizers: The optimizers; torch keeps the base rate of a schedule in their parameter groups.
        schedulers: The schedulers that are known; those without torch's ``last_epoch`` are left out.
    """
    groups = [group for optimizer in optimizers for group in groups_of(optimizer)]
    base = [group["initial_lr"] for group in groups if "initial_lr" in group]
    calls = map(_calls_of, schedulers)
    return _on_cpu(base), [call for call in calls if isinstance(call, int)]


def _calls_of(scheduler: Any) -> Any:
    with contextlib.suppress(Exception):  # of a property of the user's own
        return scheduler.last_epoch
    return None


def _on_cpu(rates: Sequence[Any]) -> list[float]:
    """The rates that are numbers, or tensors of one number in the CPU's memory."""
    found: list[float] = []
    with unobserved():
        for rate in rates:
            number = rate
            if type(rate) in (torch.Tensor, torch.nn.Parameter) and rate.device.type == "cpu":
                number = rate.detach()  # torch may warn of a number that needs a gradient
            elif not isinstance(rate, Real):
                continue
            with contextlib.suppress(ArithmeticError, RuntimeError, ValueError):  # as of a rate for each parameter
                found.append(float(number))
    return found


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """Refuses what only wraps an optimizer, as a class that computes its learning rate: torch counts no steps of it.

    Raises:
        TypeError: If one has no parameter groups.
    """
    for optimizer in optimizers:
        try:
            has_groups = hasattr(optimizer, "param_groups")
        except Exception:  # of a property of the user's own, which may have them later
            has_groups = True
        if not has_groups:
            kind = type(optimizer).__name__
            raise TypeError(
                f"Countoff(optimizer=…) takes an optimizer of torch or a list of them, got a {kind} without "
                "param_groups: give the optimizer that it wraps"
            )


class NamedOptimizers:
    """Tells whether an optimizer is one of those that the user has named, or holds a parameter of theirs.

    One that wraps another one is stepped by that, as where the optimizer's state is sharded.

    Args:
        named: What the user has named.
    """

    def __init__(self, named: Iterable[Any]) -> None:
        self._named = weakly(named)
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}

    def __call__(self, optimizer: Any) -> bool:
        known = self._known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        named = self._named()
        own = parameters_in([optimizer])
        counts = any(optimizer is each for each in named) or not own.isdisjoint(parameters_in(named))
        self._known[id(optimizer)] = weakref.ref(optimizer), counts
        return counts


def on_optimizer_step(step: Callable[[Any], None], counts: Callable[[Any], bool] | None = None) -> Any:
    """Calls `step` after every optimizer step that was applied; returns a handle with `remove()`.

    Args:
        step: Called with the optimizer.
        counts: Returns whether a step of this optimizer counts; None: every step does.
    """

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if counts is None or counts(optimizer):
            step(optimizer)

    return register_optimizer_step_post_hook(hook)
