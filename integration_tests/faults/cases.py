"""The faults of the matrix, and what countoff must report for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from integration_tests.faults.rank_behavior import RankBehavior

Ending = Literal["silence", "warning", "raised", "held"]
_LONG = {"batches": 400, "pace_seconds": 0.01}


def last(ranks: int) -> tuple[int, ...]:
    """The rank with the fault, where it is one."""
    return (ranks - 1,)


def one_and_last(ranks: int) -> tuple[int, ...]:
    """The ranks with the fault, where they are two."""
    return (1, ranks - 1)


def first_and_last(ranks: int) -> tuple[int, ...]:
    """The two that read the same."""
    return (0, ranks - 1)


def nobody(ranks: int) -> tuple[int, ...]:
    """None: all ranks are alike."""
    return ()


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: F1, F2, …; with ``-stop`` where ranks are to stop with the shortest one.
        title: What happens.
        kind: The verdict that is due; "" for silence.
        ending: What becomes of the ranks: nothing, nothing but a warning on rank 0, an end on every rank, or they are
            held (by a loader that never returns) until somebody ends them, after a report.
        culprits: The ranks with the fault.
        two_sided: Whether the proof cannot tell who is right where half of the ranks have the fault: it names one of
            either half then, or the one whose loader ended first.
        all_named: Whether the verdict names no rank, because all are alike.
        behavior: What differs from a healthy job.
        options: Options of countoff.
        constants: Constants of countoff.
        kinds: The verdict that is due in a framework that deals with the fault in a way of its own, and its ending.
        ended_in: Frameworks in which the culprit has ended its fit by the fault, and receives nothing from its peers.
        least_ranks: Fewer make no such job.
        positional: Whether it is worth running with more ranks than the least: they have a majority.
        hosted_apart: Whether the store is a process of its own, which dies.
        said_first: Why the milliseconds are more than a moment, where they are.
        words: What the verdict must contain, beside the ranks.
        words_on_hosts: That where there are several hosts, and a rank of another one may have the proof first.
    """

    name: str
    title: str
    kind: str
    ending: Ending
    culprits: Callable[[int], tuple[int, ...]] = last
    two_sided: bool = False
    all_named: bool = False
    behavior: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, tuple[str, Ending]] = field(default_factory=dict)
    ended_in: tuple[str, ...] = ()
    least_ranks: int = 2
    positional: bool = False
    hosted_apart: bool = False
    said_first: str = ""
    words: str = ""
    words_on_hosts: str = ""

    @property
    def fault(self) -> str:
        """The fault, as the training scripts know it."""
        return self.name.partition("-")[0]

    def job(self, ranks: int) -> RankBehavior:
        """The job of so many ranks, one or more of which have the fault."""
        from integration_tests.faults.rank_behavior import (
            RankBehavior,  # which takes torch, and seconds: not for a help text
        )

        return RankBehavior(self.fault, self.culprits(ranks), options=self.options, **self.behavior)

    def due(self, adapter: str) -> tuple[str, Ending]:
        """The verdict and the ending that are due in a framework."""
        return self.kinds.get(adapter, (self.kind, self.ending))

    def are_named(self, named: Collection[int], ranks: int, behind: Collection[int] = ()) -> bool:
        """Whether a verdict that names these ranks is right; of ranks `behind` it says that nobody can know yet."""
        found, culprits = set(named), set(self.culprits(ranks))
        if found:
            culprits -= set(behind) - found
        tie = self.two_sided and 2 * len(culprits) == ranks and bool(found & culprits)
        one_of_each_half, the_first_to_end = bool(found - culprits), len(found) == 1
        return self.all_named or found == culprits or (tie and (one_of_each_half or the_first_to_end))


_EPOCH_IS_SET = "it sets the sampler's epoch itself"
_STEPS_ARE_ITS_OWN = "it steps the optimizer itself"
_PASSES_ARE_ITS_OWN = "it runs the forward and backward passes itself"
_DEALS = "Accelerate shards whatever it is given"
_OWN_STREAMS = "it lets each rank read a stream of its own, and shards none"
_NOT_DEALT = {"F19": _OWN_STREAMS, "F20": _OWN_STREAMS}
_STOPS = "it stops at the shortest rank itself"
_NOT_ASKED = "nobody asks for the length of a stream"
CANNOT: dict[str, dict[str, str]] = {
    "torch": {"F7": _NOT_ASKED, **_NOT_DEALT},
    "accelerate": {"F7": _NOT_ASKED, "F9": _DEALS, "F15": _EPOCH_IS_SET},
    "lightning": {"F15": _EPOCH_IS_SET, **_NOT_DEALT},
    "transformers": {
        "F9": _DEALS,
        "F12": _STEPS_ARE_ITS_OWN,
        "F12b": _STEPS_ARE_ITS_OWN,
        "F15": _EPOCH_IS_SET,
        "F25": _PASSES_ARE_ITS_OWN,
        "F30": "what it will evaluate on is not known when it begins",
    },
    "composer": {
        "F11": "it compares by itself where its ranks resume",
        "F12": _STEPS_ARE_ITS_OWN,
        "F12b": _STEPS_ARE_ITS_OWN,
        "F15": _EPOCH_IS_SET,
        **_NOT_DEALT,
        "F25": _PASSES_ARE_ITS_OWN,
        **dict.fromkeys(("F1-stop", "F2-stop", "F3-stop", "F5-stop", "F6-stop", "F16-stop", "F17-stop"), _STOPS),
    },
}
"""By framework, the faults that it leaves no room for, and why."""

_STOP = {"uneven_train": "stop", "uneven_eval": "stop"}
_OWN_LOOPS = "torch", "accelerate"
"""Loops that a person writes: it is up to them who evaluates, and known only then with what."""
_TRAINERS = "lightning", "transformers"
"""Their intervals are values of the plan."""
_CUT: Mapping[str, tuple[str, Ending]] = {"composer": ("Truncated", "warning")}

CASES = {
    case.name: case
    for case in (
        Case("F1", "a rank is one batch short", "UnevenBatches", "raised", two_sided=True, kinds=_CUT, positional=True),
        Case(
            "F2",
            "a rank is one batch short in an evaluation",
            "UnevenBatches",
            "raised",
            two_sided=True,
            behavior={"eval_batches": 3},
            options={"uneven_eval": "raise"},
        ),
        Case(
            "F3",
            "a rank's loader never returns",
            "Stalled",
            "held",
            options={"stall_seconds": 2.0},
            said_first="stall_seconds, here 2",
            words="in its loader",
        ),
        Case(
            "F3w",
            "a rank's loader never returns, in a worker",
            "Stalled",
            "held",
            behavior={"workers": 1},
            options={"stall_seconds": 2.0},
            said_first="stall_seconds, here 2",
            words="in its loader",
        ),
        Case("F4", "a rank raises in its loader", "LostRank", "raised", words="shard 3 is torn"),
        Case(
            "F4w",
            "a rank raises in its loader, in a worker",
            "LostRank",
            "raised",
            behavior={"workers": 1},
            words="shard 3 is torn",
        ),
        Case(
            "F5",
            "a rank is killed",
            "LostRank",
            "raised",
            behavior={"workers": 1, **_LONG},
            words="is gone (pid",
            words_on_hosts=" is gone",
            positional=True,
        ),
        Case(
            "F6",
            "a rank is stopped",
            "LostRank",
            "raised",
            behavior=_LONG,
            options={"lost_seconds": 2.0},
            said_first="lost_seconds, here 2, in case it goes on",
            words="is stopped",
        ),
        Case(
            "F7",
            "the loaders report the batches of all ranks",
            "WrongLength",
            "warning",
            culprits=nobody,
            all_named=True,
        ),
        Case(
            "F8",
            "a rank evaluates one step early",
            "UnevenBatches",
            "raised",
            two_sided=True,
            behavior={"eval_batches": 2},
            kinds={
                **dict.fromkeys(_OWN_LOOPS, ("UnevenBatches", "warning")),
                **dict.fromkeys(_TRAINERS, ("PlanMismatch", "raised")),
            },
        ),
        Case(
            "F9",
            "two ranks read the same data",
            "DuplicateData",
            "warning",
            culprits=first_and_last,
        ),
        Case("F10", "a rank is three times slower", "", "silence", behavior={"batches": 30, "pace_seconds": 0.02}),
        Case("F11", "a rank resumes somewhere else", "PlanMismatch", "raised", two_sided=True),
        Case("F12", "a rank skips an optimizer step", "StepMismatch", "raised", two_sided=True),
        Case(
            "F12b",
            "a rank accumulates one batch out of step",
            "StepMismatch",
            "raised",
            two_sided=True,
            behavior={"accumulation": 2},
            words="but after other batches: rank ",
        ),
        Case(
            "F13",
            "the store's host dies",
            "LostRank",
            "raised",
            culprits=nobody,
            all_named=True,
            behavior=_LONG,
            hosted_apart=True,
            said_first="half a second, in case a rank died with it",
            words="whoever hosts the job's store is gone",
        ),
        Case("F14", "a rank has another batch size", "PlanMismatch", "raised", two_sided=True),
        Case(
            "F15",
            "set_epoch is never called",
            "SameOrder",
            "warning",
            culprits=nobody,
            all_named=True,
        ),
        Case(
            "F16",
            "a rank breaks out of its epoch",
            "UnevenBatches",
            "raised",
            two_sided=True,
            ended_in=("composer",),
        ),
        Case(
            "F17",
            "two ranks are many batches short from epoch 1 on",
            "UnevenBatches",
            "raised",
            culprits=one_and_last,
            two_sided=True,
            behavior={"batches": 12, "epochs": 3},
            kinds=_CUT,
            least_ranks=4,
            positional=True,
        ),
        Case("F1-stop", "a rank is one batch short, and all stop there", "Truncated", "warning", options=_STOP),
        Case(
            "F2-stop",
            "a rank is one batch short in an evaluation, and all stop there",
            "Truncated",
            "warning",
            behavior={"eval_batches": 3},
            options=_STOP,
        ),
        Case(
            "F3-stop",
            "a rank's loader never returns where others wait for its batches",
            "Stalled",
            "held",
            options={**_STOP, "stall_seconds": 2.0},
            said_first="stall_seconds, here 2",
            words="in its loader",
        ),
        Case(
            "F5-stop",
            "a rank is killed where others wait for its batches",
            "LostRank",
            "raised",
            behavior={"workers": 1, **_LONG},
            options=_STOP,
            words="is gone (pid",
            words_on_hosts=" is gone",
        ),
        Case(
            "F6-stop",
            "a rank is stopped where others wait for its batches",
            "LostRank",
            "raised",
            behavior=_LONG,
            options={**_STOP, "lost_seconds": 2.0},
            said_first="lost_seconds, here 2, in case it goes on",
            words="is stopped",
        ),
        Case(
            "F16-stop",
            "a rank breaks out of an epoch in which ranks are made even",
            "UnevenBatches",
            "raised",
            two_sided=True,
            options=_STOP,
        ),
        Case(
            "F17-stop",
            "two ranks are many batches short from epoch 1 on, and all stop there",
            "Truncated",
            "warning",
            culprits=one_and_last,
            behavior={"batches": 12, "epochs": 3},
            options=_STOP,
            least_ranks=4,
        ),
        Case("F18", "long pauses: download, compilation, collection, checkpoint", "", "silence"),
        Case(
            "F19",
            "data is sharded twice",
            "DoubleSharded",
            "warning",
            culprits=nobody,
            all_named=True,
            words="of its own dataset",
        ),
        Case(
            "F20",
            "ranks' streams differ in their order",
            "StreamsDiffer",
            "warning",
            two_sided=True,
            positional=True,
            words="are not the same",
        ),
        Case(
            "F21",
            "a resume repeats the epoch from its first batch",
            "ResumeMismatch",
            "warning",
            culprits=nobody,
            all_named=True,
            words="are trained on again",
        ),
        Case(
            "F22",
            "a resume skips batches, or the rest of an epoch",
            "ResumeMismatch",
            "warning",
            culprits=nobody,
            all_named=True,
            words="skipped",
        ),
        Case(
            "F23",
            "the learning rate jumps at a resume",
            "ResumeMismatch",
            "warning",
            culprits=nobody,
            all_named=True,
            words="the learning",
        ),
        Case(
            "F24",
            "a weight is changed on one rank",
            "WeightsDiffer",
            "warning",
            two_sided=True,
            options={"weights_every": 2},
            said_first="weights_every, here 2 steps",
            words="; the first parameter",
            positional=True,
        ),
        Case(
            "F25",
            "a rank runs an extra micro-batch",
            "StepMismatch",
            "warning",
            words="ran 2 micro-batches, rank",
        ),
        Case(
            "F26",
            "a rank's model has one more parameter",
            "PlanMismatch",
            "warning",
            two_sided=True,
            words="before the first batch, the model has ",
            positional=True,
        ),
        Case(
            "F28",
            "a rank has another variable for NCCL",
            "VersionMismatch",
            "warning",
            two_sided=True,
            words='"Ring" on rank ',
            positional=True,
        ),
        Case(
            "F29",
            "a rank's dataset has fewer rows",
            "PlanMismatch",
            "warning",
            two_sided=True,
            words="before the first batch, the train dataset has ",
            positional=True,
        ),
        Case(
            "F30",
            "ranks split one dataset with different seeds",
            "SplitLeak",
            "warning",
            all_named=True,
            behavior={"eval_batches": 3},
            kinds=dict.fromkeys(_OWN_LOOPS, ("StreamsDiffer", "warning")),
            words="validate on rank",
        ),
        Case(
            "F31",
            "the loaders give nothing in epoch 1",
            "ShortRun",
            "warning",
            culprits=nobody,
            all_named=True,
            words="the run ended after 6 of 12 steps: train epoch 1 gave 0 of 6 batches",
        ),
    )
}
