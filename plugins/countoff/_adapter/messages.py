"""The messages of an adapter: what it tells its users in the terms of their framework, and what it cannot tell them.

What is the same in every framework is in the files of the checks. The modules `messages` of the adapters import no
framework. In a remedy, each alternative has a line of its own, and what most often fits comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from countoff.core.checks import KINDS
from countoff.core.checks.horizon import Stepping
from countoff.core.checks.streams import LENGTHS, STREAMING
from countoff.core.checks.weights import GRADIENTS, OUTSIDE
from countoff.core.verdict import Remedies

__all__ = ["LOCAL_STEPS", "READS_BY_DP_RANK", "STOP", "Messages", "data_remedies", "uneven_remedies"]

STOP = "uneven_train='stop'"
"""The option that lets a job with uneven loaders go on."""
_STOP_EVAL = "uneven_eval='stop'"
_NO_SAMPLES = "compare_data=False"

READS_BY_DP_RANK = "no sampler deals out the data: each rank reads by the dp_rank that it is given"
"""Why an adapter sees no order and no shares of the data."""
LOCAL_STEPS = {
    GRADIENTS: (
        f"{OUTSIDE}\n"
        "where ranks train apart on purpose: `with countoff.uncounted():` around that loop, or "
        "levels={'WeightsDiffer': 'off'}."
    )
}
"""The remedies of a `WeightsDiffer` in a loop of one's own, by the verdict's subject."""


@dataclass(frozen=True)
class Messages:
    """What one adapter says, and which kinds of verdict it cannot report.

    Attributes:
        framework: The framework's name, for the trace.
        option: How an option is set, with ``{}`` in its place: ``Countoff({})``.
        remedies: What to do about each kind of verdict.
        stepping: How a scheduler is stepped.
        cannot: By kind of verdict, why the adapter cannot report it.
        names: What the framework calls a total, by countoff's name for it, where it has one.
        length_of: Who counts on the number of batches that the train loader reports.
    """

    framework: str
    option: str
    remedies: Remedies
    stepping: Stepping = field(default_factory=Stepping)
    cannot: Mapping[str, str] = field(default_factory=dict[str, str])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    length_of: str = "len(loader)"

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of verdict that the adapter can report."""
        return KINDS.keys() - self.cannot.keys()


def uneven_remedies(
    *, train: str, option: str, goes_on: bool = True, together: str = "", alone: bool = True
) -> Mapping[str, str]:
    """Returns the remedies for `UnevenBatches`, by the verdict's subject.

    Args:
        train: How train loaders get as many batches on every rank, in the framework's terms.
        option: How an option is set in this framework, with ``{}`` in its place: ``Countoff({})``.
        goes_on: Whether countoff can let a job with such loaders go on there, by ``uneven_train="stop"``.
        together: How all ranks evaluate after the same batch, in the framework's terms.
        alone: Whether some ranks can evaluate without the others in this framework.
    """
    if goes_on:
        train = (
            f"{train}\n"
            f"let the job go on: with {option.format(STOP)}, every epoch ends on all ranks with the shortest one, and "
            "what longer ranks have left is not used."
        )
    stops = f"\nlet it stop on all ranks with the shortest one: {option.format(_STOP_EVAL)}." if goes_on else ""
    allowed, declared = option.format("uneven_eval='allow'"), option.format("uneven_eval='off'")
    evaluate = f"let all ranks evaluate after the same batch{together and ': '}{together}."
    apart = f"\nif only some ranks are to evaluate, say so on every rank: {declared}." if alone else ""
    return {
        "": train,
        "evaluation": (
            f"give every rank the same number of evaluation batches.{stops}\n"
            f"if the evaluation synchronises nothing batch by batch, this does no harm: {allowed}."
        ),
        "who evaluates": f"{evaluate}{apart}",
    }


def data_remedies(
    *, shares: str, option: str, order: str = "", dealer: str = "", undo: str = ""
) -> dict[str, str | Mapping[str, str]]:
    """Returns the remedies for the verdicts of data identity.

    Args:
        shares: How each rank gets a share of its own, in the framework's terms.
        option: How an option is set in this framework, with ``{}`` in its place: ``Countoff({})``.
        order: How each epoch gets an order of its own; empty where countoff does not see the order.
        dealer: What shards the data, where the framework does so by itself.
        undo: How the framework is kept from sharding it.
    """
    off = option.format(_NO_SAMPLES)
    dealt: dict[str, str | Mapping[str, str]] = {
        "DoubleSharded": {
            "": (
                f"shard the data once, by {dealer}: give it all of the data on every rank, without "
                "split_dataset_by_node, a rank in your own dataset or sampler, another DistributedSampler, or a "
                "nodesplitter of webdataset.\n"
                f"keep your own shares, which must be even, and {undo}.\n"
                f"if each rank is to read part of its own data: {off}."
            ),
            STREAMING: (
                f"keep {dealer} from sharding a StreamingDataset, which gives each rank its share by itself: {undo}.\n"
                f"if each rank is to read part of its own data: {off}."
            ),
        },
        "StreamsDiffer": {
            "": (
                f"let every rank yield the same samples in the same order, and {dealer} shards them: shuffle with the "
                "same seed on all ranks, not with one of each rank.\n"
                f"if they are to differ: {off}."
            ),
            LENGTHS: (
                f"give every rank the same dataset, and {dealer} shards it. Where it is made of files, look for some "
                "that a host does not have; where it is filtered or cut by rank, leave that out.\n"
                f"if they are to differ: {off}."
            ),
        },
    }
    same_order = f"{order}\nif one order for all epochs is what you want: shuffle=False."
    ordered: dict[str, str | Mapping[str, str]] = {"SameOrder": same_order} if order else {}
    return {
        **(dealt if dealer else {}),
        **ordered,
        "DuplicateData": (
            f"{shares}\n"
            "where each rank draws samples at random without a sampler, seed these draws by rank (seed + rank); the "
            "seeds of a DistributedSampler and of the model stay equal on all ranks.\n"
            f"if equal data is what you want: {off}."
        ),
        "PeersDiffer": (
            "shard and seed by dp_rank, not by rank: ranks that work on one batch together must read the same samples "
            "in the same order, with the same random transforms.\n"
            f"if they are to differ: {off}."
        ),
    }
