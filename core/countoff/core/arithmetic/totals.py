"""The true totals of a job: from the arithmetic before the first epoch, then also from the epochs that have ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from countoff.core.arithmetic.plan import BatchPlan, LoaderFacts
from countoff.core.messages import count_of

LOGGED = (
    "batches_per_epoch",
    "steps_per_epoch",
    "total_steps",
    "global_batch_size",
    "samples_repeated",
    "samples_dropped",
    "tokens_per_step",
    "total_tokens",
)
"""What the loggers of a framework get of a plan."""


class Totals:
    """The true totals, as far as they are known until now.

    Args:
        facts: What the adapter read off the train loader of this rank.
        dp_degree: Shares into which the data is cut, at least 1.

    Attributes:
        plan: The plan of the job, as far as it is known until now.
        own: The plan of this rank's loader by itself, whatever the other ranks' loaders have.

    Raises:
        ValueError: If `dp_degree` is below 1.
    """

    def __init__(self, facts: LoaderFacts, *, dp_degree: int) -> None:
        self.plan = self.own = BatchPlan.of(facts, dp_degree=dp_degree)
        self._facts: LoaderFacts = facts
        self._dp_degree = dp_degree
        self._takes_common = self._varies = False
        self._common_batches: int | None = None

    @property
    def batch_size(self) -> int | None:
        """Samples per batch of this rank; None if that is not known."""
        return self._facts.batch_size

    @property
    def dataset_rows(self) -> int | None:
        """What `len` of this rank's train dataset gave when the facts were read; None if that is not known."""
        return self._facts.dataset_size

    def report_again(self, reported: int | None) -> None:
        """Takes note of the length that the framework reports after an epoch.

        Where it has changed, as by a sampler that grows from epoch to epoch, no length holds for all epochs.

        Args:
            reported: Batches per epoch and rank as they are reported now; None if that is not known.
        """
        if reported is not None and reported != self._facts.reported_batches and not self._varies:
            self._vary()

    def observe(self, batches: int) -> None:
        """Updates the plan after an epoch whose loader was exhausted.

        Where two epochs differ, no length holds for all epochs.

        Args:
            batches: Batches of this epoch on this rank, at least 0.
        """
        limited = self.own.reported_batches_per_epoch
        if batches == limited and limited != self.own.reported_batches:
            return  # The epoch ended at the user's limit, so its length is not that of the loader.
        if self.own.proven or not batches or self._varies:
            return
        if self._facts.known_batches in (None, batches):
            self._facts = replace(self._facts, known_batches=batches)
            self._update()
        else:
            self._vary()

    def take_common(self, batches: int | None, *, proven: bool = False) -> None:
        """Updates the plan where ranks take the same number of batches, which may not be that of this rank's loader.

        Args:
            batches: Batches of an epoch on every rank, limits included. None while they are not known: then the plan
                has no number that depends on them.
            proven: Whether they are those of every epoch. Otherwise they are those of the last one.
        """
        # What divides one dataset among the ranks gives each as many batches, so the plan holds until an epoch differs.
        divided = self._facts.one_pass is not None or self._facts.sampling == "distributed"
        if not proven and self.own.proven and divided and batches in (None, self.own.batches_per_epoch):
            if batches is not None:  # the epoch before may have differed
                self._takes_common, self._common_batches = False, None
                self._update()
            return
        self._takes_common, self._common_batches = True, batches or None
        self._update()

    @property
    def proven_batches(self) -> int | None:
        """Batches per epoch and rank if they are proven: by the arithmetic, or by an epoch that explains the report.

        An epoch proves nothing about the next one, unless the reported length is exactly dp_degree times as long. Then
        the report is the size of the whole dataset, and the epoch was this rank's share.
        """
        plan = self.own
        explained = plan.dp_degree > 1 and plan.wrong_length_factor == plan.dp_degree and plan.uneven_batches is None
        return plan.batches_per_epoch if plan.proven or explained else None

    @property
    def shorter_than_reported(self) -> int | None:
        """The proven batches per epoch if the framework expects more batches than that; else None."""
        proven, reported = self.proven_batches, self.own.reported_batches_per_epoch
        return proven if proven is not None and reported is not None and proven < reported else None

    @property
    def observed_batches(self) -> int | None:
        """Batches that every epoch has had until now, where nothing proves them; None if there is no such number."""
        return self._facts.known_batches

    @property
    def unknown_because(self) -> str:
        """Why the batches of an epoch are not known; empty if they are."""
        reason = self.plan.unknown_because
        return "it has differed between epochs" if reason and self._varies else reason

    def progress(self, batches: int) -> float | None:
        """Returns the fraction of the epoch that a rank has done after some batches, 0 to 1; None while unknown."""
        total = self.plan.batches_per_epoch
        return min(1.0, batches / total) if total else None

    def corrected(self, batches: int) -> None:
        """Updates the plan after the framework's own length was set to the given batches per epoch."""
        self._facts = replace(self._facts, reported_batches=batches, limit_batches=None)
        self._update()

    def _vary(self) -> None:
        """Takes note that no length holds for all epochs."""
        self._varies = True
        self._facts = replace(
            self._facts,
            reported_batches=None,
            samples_per_rank=None,
            dataset_size=None,
            one_pass=None,
            known_batches=None,
        )
        self._update()

    def _update(self) -> None:
        self.plan = self.own = BatchPlan.of(self._facts, dp_degree=self._dp_degree)
        if self._takes_common:
            self.plan = BatchPlan.of(self._common_facts(), dp_degree=self._dp_degree)

    def _common_facts(self) -> LoaderFacts:
        """The facts of this rank's loader without those that tell how many batches or samples it has."""
        return replace(
            self._facts,
            reported_batches=self.own.reported_batches_per_epoch,
            limit_batches=None,
            samples_per_rank=None,
            dataset_size=None,
            one_pass=None,
            known_batches=self._common_batches,
            reported_is_cap=False,
            # Lightning steps at a common end as at the end of a loader without a length.
            partial_step="applied" if self._facts.partial_step == "at_reported_end" else self._facts.partial_step,
        )


def in_words(known: Mapping[str, float], unknown_because: str = "", *, of: str = "each rank") -> str:
    """Returns what is known of a run as sentences, a line for each.

    Args:
        known: The totals, under the names of the metrics.
        unknown_because: Why the batches of an epoch are not known.
        of: Whose batches they are.

    Example:
        >>> print(in_words({"countoff/batches_per_epoch": 8, "countoff/steps_per_epoch": 3, "countoff/total_steps": 6,
        ...     "countoff/global_batch_size": 24, "countoff/samples_repeated": 1, "countoff/samples_dropped": 0}))
        An epoch has 8 batches on each rank and 3 optimizer steps; the run has 6 steps.
        A step has 24 samples over all ranks.
        In an epoch, 1 sample is read again, and 0 samples are not read.
    """
    numbers = {name.removeprefix("countoff/"): int(value) for name, value in known.items()}

    def counted(name: str, noun: str) -> str:
        return count_of(numbers[name], noun) if name in numbers else ""

    of_epoch = [counted("batches_per_epoch", "batch"), counted("steps_per_epoch", "optimizer step")]
    epoch = " and ".join(filter(None, (of_epoch[0] and f"{of_epoch[0]} on {of}", of_epoch[1])))
    run = " and ".join(filter(None, (counted("total_steps", "step"), counted("total_tokens", "token"))))
    step = " and ".join(filter(None, (counted("global_batch_size", "sample"), counted("tokens_per_step", "token"))))
    lines = [
        "; ".join(filter(None, (epoch and f"an epoch has {epoch}", run and f"the run has {run}"))),
        step and f"a step has {step} over all ranks",
        _reading(numbers),
        f"how many batches an epoch has is not known yet: {unknown_because}" if unknown_because else "",
    ]
    return "\n".join(f"{line[0].upper()}{line[1:]}." for line in lines if line) or "Nothing is known yet."


def _reading(numbers: Mapping[str, int]) -> str:
    again, never = numbers.get("samples_repeated"), numbers.get("samples_dropped")
    if again is None or never is None:
        return ""
    words = [f"{count_of(number, 'sample')} {'is' if number == 1 else 'are'}" for number in (again, never)]
    return f"in an epoch, {words[0]} read again, and {words[1]} not read"


def evaluation_metrics(facts: LoaderFacts, *, batches: int, dp_degree: int, name: str = "") -> dict[str, float]:
    """Returns how many samples an evaluation has read, under the names with which every adapter logs them.

    Args:
        facts: What the adapter read off the evaluation's loader on this rank.
        batches: Batches that this rank has read, at least 0.
        dp_degree: Shares into which the data is cut, at least 1.
        name: The evaluation's name, where there are several; empty where there is one.

    Returns:
        The different samples that all dp_ranks have read, those read again, and those of the dataset that none has
        read. Empty if they are not proven, or if batches is not the number that the arithmetic gives.

    Example:
        >>> facts = LoaderFacts(reported_batches=2, batch_size=2, drop_last=False, samples_per_rank=3,
        ...     dataset_size=10, sampling="distributed")
        >>> evaluation_metrics(facts, batches=2, dp_degree=4)
        {'countoff/eval_samples': 10, 'countoff/eval_samples_repeated': 2, 'countoff/eval_samples_dropped': 0}
    """
    plan = BatchPlan.of(facts, dp_degree=dp_degree)
    if not plan.proven or batches != plan.batches_per_epoch:
        return {}
    unique, repeated, dropped = plan.samples_unique, plan.samples_repeated, plan.samples_dropped
    if unique is None or repeated is None or dropped is None:
        return {}
    values = {"eval_samples": unique, "eval_samples_repeated": repeated, "eval_samples_dropped": dropped}
    return {f"countoff/{metric}/{name}" if name else f"countoff/{metric}": value for metric, value in values.items()}
