"""What to do about each kind of verdict: the sentences that several adapters share.

What is the same in every framework is in the files of the checks. An adapter has what only the words of
its framework can say. The remedy that most often fits comes first.
"""

from __future__ import annotations

from collections.abc import Mapping

from countoff.core.checks.streams import LENGTHS

__all__ = ["data_remedies", "uneven_remedies"]


_STOP = "uneven_train='stop'"
_STOP_EVAL = "uneven_eval='stop'"


def uneven_remedies(
    *, train: str, option: str, goes_on: bool = True, together: str = "", alone: bool = True
) -> Mapping[str, str]:
    """Returns the remedies for `UnevenBatches`, by the verdict's subject.

    Args:
        train: How train loaders get as many batches on every rank, in the framework's terms.
        option: How an option is set in this framework, with ``{}`` in its place: ``attach({})``.
        goes_on: Whether countoff can let a job with such loaders go on there, by ``uneven_train="stop"``.
        together: How all ranks evaluate after the same batch, in the framework's terms.
        alone: Whether some ranks can evaluate without the others in this framework.
    """
    if goes_on:
        train = (
            f"{train} Or let the job go on: with {option.format(_STOP)}, every epoch ends on all ranks "
            "with the shortest one, and what longer ranks have left is not used."
        )
    stops = f", or let it stop on all ranks with the shortest one: {option.format(_STOP_EVAL)}" if goes_on else ""
    allowed, declared = option.format("uneven_eval='allow'"), option.format("eval_ranks=[0]")
    evaluate = f"let all ranks evaluate after the same batch{together and ': '}{together}."
    apart = f"if only some ranks are to evaluate, say which, on every rank: {declared}. Otherwise " if alone else ""
    return {
        "": train,
        "evaluation": (
            f"if the evaluation synchronises nothing batch by batch, this does no harm: {allowed}. If it does, give "
            f"every rank as many evaluation batches{stops}."
        ),
        "who evaluates": f"{apart}{evaluate}",
    }


def data_remedies(
    *, shares: str, order: str, off: str, dealer: str = "", undo: str = ""
) -> dict[str, str | Mapping[str, str]]:
    """Returns the remedies for the verdicts of data identity.

    Args:
        shares: How each rank gets a share of its own, in the framework's terms.
        order: How each epoch gets an order of its own.
        off: How the check is turned off.
        dealer: What shards the data, where the framework does so by itself.
        undo: How the framework is kept from sharding it.
    """
    dealt: dict[str, str | Mapping[str, str]] = {
        "DoubleSharded": (
            f"shard the data once, by {dealer}: give it all of the data on every rank, without "
            "split_dataset_by_node, a rank in your own dataset or sampler, another DistributedSampler, or a "
            f"nodesplitter of webdataset. Or keep your own shares, which must be even, and {undo}. If each rank is to "
            f"read part of its own data: {off}."
        ),
        "StreamsDiffer": {
            "": (
                f"let every rank yield the same samples in the same order, and {dealer} shards them: shuffle with the "
                f"same seed on all ranks, not with one of each rank. If they are to differ: {off}."
            ),
            LENGTHS: (
                f"give every rank the same dataset, and {dealer} shards it. Where it is made of files, look for some "
                f"that a host does not have; where it is filtered or cut by rank, leave that out. If they are to "
                f"differ: {off}."
            ),
        },
    }
    return {
        **(dealt if dealer else {}),
        "DuplicateData": (
            f"{shares} Where each rank draws samples at random without a sampler, seed these draws by rank "
            "(seed + rank); the seeds of a DistributedSampler and of the model stay equal on all ranks. If equal data "
            f"is what you want: {off}."
        ),
        "PeersDiffer": (
            "shard and seed by dp_rank, not by rank: ranks that work on one batch together must read the same samples "
            f"in the same order, with the same random transforms. If they are to differ: {off}."
        ),
        "SameOrder": f"{order} If one order for all epochs is what you want: DistributedSampler(shuffle=False).",
    }
