"""How many batches a train epoch is sure to have, and whether a loader may begin it in its middle."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from countoff._adapter.class_swap import own_class
from countoff._adapter.even_loaders import saves_state
from countoff._adapter.sampling import samplers_of
from countoff._adapter.torch_facts import is_data_loader, iterates_as_torch, of_library, reported_length
from countoff.core.arithmetic.plan import BatchPlan
from countoff.core.data.plain import ABSENT, attribute_of

__all__ = ["may_begin_inside", "whole_epoch"]


def whole_epoch(loader: Any, plan: BatchPlan) -> int | None:
    """Returns the batches that each pass over a train loader has, with the framework's limit; None if not certain.

    They are certain if nothing but torch and its like chooses the samples, and if the loader still reports what it did
    when the fit began. A dataset that has grown or shrunk meanwhile may be meant.

    Args:
        loader: The loader.
        plan: Its plan.
    """
    if not is_data_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    _, *samplers = samplers_of(loader)
    if not iterates_as_torch(loader) or not all(_draws_from(each, loader.dataset) for each in samplers):
        return None
    # The arithmetic does not know torchdata's own samplers, of which a pass has as many batches as they report.
    stateful = of_library(own_class(type(loader)), "torchdata")
    batches = plan.batches_per_epoch if plan.proven else plan.reported_batches_per_epoch if stateful else None
    return batches if reported_length(loader) == plan.reported_batches else None


def may_begin_inside(loader: Any) -> bool:
    """Returns whether a loader can be restored, so that its next pass begins in the middle or at the end of an epoch.

    Args:
        loader: A DataLoader.
    """
    own = getattr(loader, "base_dataloader", loader)  # Accelerate's have the methods, and hand them on to this one
    return any(saves_state(each) for each in (own, *samplers_of(loader)))


def _draws_from(sampler: Any, dataset: Any) -> bool:
    """Whether a sampler is none of the user's own, and has none inside, as Lightning's wrapper for such a one has."""
    drawn = attribute_of(sampler, "dataset")
    return of_library(getattr(type(sampler), "__iter__", None)) and (drawn is ABSENT or drawn is dataset)
