"""Do ranks that must read different data do so, and do ranks that must share data read the same?

`DuplicateData`, `PeersDiffer` and `SameOrder`; with the records of `streams`, `DoubleSharded` and `StreamsDiffer`.

For the first batches of every train epoch each rank takes fingerprints of what it read and reports them in the
background. Rank 0 compares those of all ranks, so that the warning names every dp_rank concerned. Nobody waits.

Equal data can be a coincidence, and a coincidence must not cause a warning. So data counts as the same only under
three conditions. *All* batches that were looked at are equal, and there are at least two of them. The batches of one
rank differ from one another, because a loader of constants proves nothing. And they hold enough bytes that chance is
out of the question, which a few labels do not.

Ranks whose samplers give each of them a shard by construction are not compared with one another. Data that is equal
there is the dataset's own repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from countoff.core import constants
from countoff.core.checks.check import Check, FitStart, Others, RankState
from countoff.core.checks.streams import FirstElements, StreamFacts, judge_streams, parse_stream
from countoff.core.data.fingerprint import Begun, Fingerprint, PendingFingerprint, begin_fingerprint, distinct_bytes
from countoff.core.messages import names_of, ranks_by
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import Reason, Records
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = [
    "UNKNOWN",
    "WORKERS",
    "DataIdentity",
    "Sampling",
    "in_one_epoch",
    "judge_data",
    "same_on_workers",
    "same_order",
]

ENOUGH_BYTES = 64
"""Distinct bytes that the compared batches must hold before their equality is no coincidence."""
_SHOWN = 4
WORKERS = "workers"
"""Subject of a `DuplicateData` of the workers of one rank's loader."""
_MOST_WORKERS = 8
_ROUNDS = 2
"""Batches of each worker that are compared: equal ones prove nothing where all batches are equal."""

DUPLICATE_DATA = VerdictKind(
    "DuplicateData",
    "ranks that must read different data read the same data",
    causes={
        "": Cause(
            "Nothing gives the ranks different shares of the data, or all draw their samples with the same random "
            "seed. Every step averages equal gradients, so the job does the work of one rank."
        ),
        WORKERS: Cause(
            "An iterable dataset is copied into each worker of the loader, and each copy yields all of its samples. So "
            "an epoch has each sample once per worker.",
            "let each worker yield its part, in the dataset's __iter__: with info = get_worker_info() of "
            "torch.utils.data, itertools.islice(samples, info.id, None, info.num_workers).\n"
            "read with one worker: num_workers=1.",
        ),
    },
)
"""**Cause.** Nothing divides the data; each rank draws its samples with the same seed; the share is computed from
`LOCAL_RANK`; or each worker of one rank's loader yields all of an iterable dataset.

**Fix.** Use a `DistributedSampler`, or every `world_size`-th sample of a stream. Draw random samples with
`torch.Generator().manual_seed(1337 + rank)`. See [data identity](data-identity.md).
"""
PEERS_DIFFER = VerdictKind(
    "PeersDiffer",
    "ranks that share a dp_rank, and so must read the same data, read different data",
    causes={"": Cause("Ranks along tensor, pipeline and context parallel dims work on one batch together.")},
)
"""**Cause.** The data was sharded or seeded by rank, as by `DistributedSampler(dataset)` under tensor parallelism.

**Fix.** Give the sampler the [dp_rank and the dp_degree](ranks.md), and seed random transforms by dp_rank.
"""
SAME_ORDER = VerdictKind(
    "SameOrder",
    "the sampler shuffles, but two epochs had the same order: `set_epoch` was not called",
    ends=False,
    causes={
        "": Cause(
            "The sampler shuffles by its seed and its epoch, and its epoch has not changed: set_epoch was not called."
        )
    },
)
"""**Cause.** A loop over epochs without `set_epoch`. Where random transforms change the batches, it is not found.

**Fix.** Call `loader.sampler.set_epoch(epoch)` before each epoch; with Accelerate, `loader.set_epoch(epoch)` of the
prepared loader.
"""


class Sampling(NamedTuple):
    """What a loader's sampler tells about the current epoch.

    Attributes:
        is_sharded: Whether it gives this dp_rank a shard of its own by construction.
        comparable: Whether the ranks' plan tells which of them read the same data; if not, nothing is compared.
        shuffled: The epoch by which it shuffles, the samples that it shuffles, and its seed: two epochs in which these
            are equal have the same order. None where it does not shuffle by an epoch, or does not show it.
        workers: Workers of the loader that each hold a copy of an iterable dataset, and give a batch in turn; 0 where
            there are none.
    """

    is_sharded: bool = False
    comparable: bool = True
    shuffled: tuple[int, int, int] | None = None
    workers: int = 0


UNKNOWN = Sampling()
"""What is known of a loader that is no DataLoader of torch, or that has a sampler of another kind."""


class DataIdentity(Check):
    """The data identity of one guard.

    Args:
        state: This rank's state.
        datasets_differ: Returns whether the ranks' train datasets, or their choices of rows, are known to differ.

    Attributes:
        fingerprints_due: Batches of the current train epoch that are still to be read, or 1 while what was read is on
            its way from a device; 0 most of the time. An adapter checks it before every train batch, and calls `read`
            while it is not 0.
        dp_rank: This rank's dp_rank.
        dp_degree: The number of dp_ranks.
        elements: The first elements of the stream that the framework deals out, in the fit's first train epoch. An
            adapter lets them be looked at where the framework takes them. None where they are not to be.
        is_whole: Whether the open train epoch is whole though its loader is not asked for a further batch. An adapter
            sets it before the epoch ends, where the framework says so.
        order: The epoch by which the sampler shuffled the last train epoch of which a batch was read, the number of
            that train epoch, the samples that were shuffled, and the seed; None where the sampler does not show it.
        begun_as: The `order` of the open train epoch and the `prints` of its first batches, as another run that has
            begun it has left them in a checkpoint; None where there is none. Set when the epoch has been opened.
        repeats_order: Whether the train epoch that has closed last was whole, in the order of the whole one before it;
            None if that is not known.
        found: Whether ranks are known to read the same, or other streams than they should. Known on the first rank.
    """

    def __init__(self, state: RankState, datasets_differ: Callable[[], bool] = lambda: False) -> None:
        self.fingerprints_due = self._due = 0
        self.is_whole = self.found = False
        self.repeats_order: bool | None = None
        self.elements: FirstElements | None = None
        self.dp_rank = state.rank
        self._stage = 0
        self.dp_degree = state.world_size
        self.order: tuple[int, int, int, int] | None = None
        self.begun_as: tuple[tuple[int, int, int, int], tuple[str, ...]] | None = None
        self._state = state
        self._datasets_differ = datasets_differ
        self._others: Others | None = None
        self._read: list[Begun | None] = []
        self._of_workers: list[Begun | None] | None = None  # the first batches, while those of workers are compared
        self._workers = 0
        self._first = self._epoch = 0
        self._steps_before = 0
        self._ever_read = self._is_sharded = False
        self._span: SpanCounters | None = None
        self._stream: Callable[[], StreamFacts | None] = _no_stream
        self._streams_told = False
        self._last_order: tuple[int, Hashable, tuple[str, ...]] | None = None
        self._last_epoch = 0

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        plan = start.plan  # without a `dp_rank` in it, every rank reads data of its own
        self._others = others
        self._streams_told = False
        self._of_workers = []
        self.dp_rank = self._state.rank if plan.dp_rank is None else plan.dp_rank
        self.dp_degree = self._state.world_size if plan.dp_degree is None else plan.dp_degree
        self._stage = start.stage

    @property
    def complete(self) -> bool:
        """Whether nothing is still to be read of the last train epoch."""
        return not self._due

    @property
    def prints(self) -> tuple[str, ...]:
        """Digests of the first batches of the last train epoch, in order; none if one of them is not known."""
        known = self._known()
        return tuple(each.digest for each in known) if len(known) == len(self._read) else ()

    @property
    def informative(self) -> bool:
        """Whether these batches hold enough for their equality to be no coincidence."""
        return bool(self.prints) and distinct_bytes([each.excerpt for each in self._known()]) >= ENOUGH_BYTES

    def span_opened(self, span: SpanCounters, epoch: int | None) -> None:  # noqa: D102
        if epoch is None:
            return
        compared = span.compared and self._state.settings.compare_data
        self.fingerprints_due = self._due = constants.FINGERPRINT_BATCHES if compared else 0
        self._span = span if self.fingerprints_due else None
        self._epoch = epoch
        self.is_whole = False
        self._read, self._workers, self.begun_as = [], 0, None
        self._stream = _no_stream
        dealt = self.fingerprints_due and self._others is not None and not self._streams_told
        self.elements = FirstElements() if dealt else None
        self._first = span.started + 1
        self._steps_before = self._state.steps

    def read(
        self, batch: Any, sampling: Sampling = UNKNOWN, stream: Callable[[], StreamFacts | None] | None = None
    ) -> None:
        """Takes the fingerprint of a batch of the train epoch, as this rank's loader returned it. Never raises.

        It waits for no device. A fingerprint of a batch on a device is complete at a later batch, when this is called
        again. It is left out, and with it the comparison, if it is not complete at the end of the epoch.

        Args:
            batch: The batch.
            sampling: What the loader's sampler tells.
            stream: Returns what is known of the stream that the framework deals out; None where it deals out none.
        """
        if not self.fingerprints_due:
            return
        if len(self._read) < constants.FINGERPRINT_BATCHES:
            self._ever_read = True
            if stream is not None and self.elements is not None:
                self._stream = stream
            self._is_sharded = sampling.is_sharded
            if sampling.shuffled is not None:
                by, samples, seed = sampling.shuffled
                self.order = int(by), self._epoch, samples, int(seed)  # a loop may give them as numbers of numpy's
            else:
                self.order = None
            begun = begin_fingerprint(batch) if sampling.comparable else None
            if not self._read:
                self._workers = sampling.workers if 1 < sampling.workers <= _MOST_WORKERS else 0
            self._read.append(begun)
        else:
            begun = begin_fingerprint(batch) if self._batches_of_workers_due() else None
        if self._batches_of_workers_due() and self._of_workers is not None:
            self._of_workers.append(begun)
        self._collect()
        to_read = constants.FINGERPRINT_BATCHES - len(self._read)
        on_the_way = any(isinstance(each, PendingFingerprint) for each in self._read)
        self._due = to_read or int(on_the_way)
        self.fingerprints_due = self._due or self._batches_of_workers_due()
        if not self._due:
            self._report()
        if not self.fingerprints_due:
            self._judge_workers()

    def _batches_of_workers_due(self) -> int:
        """Batches that are still to be read, to compare those of the loader's workers."""
        return 0 if self._of_workers is None else max(0, _ROUNDS * self._workers - len(self._of_workers))

    def _judge_workers(self) -> None:
        """Compares the batches of the loader's workers, once in a fit."""
        of_workers, self._of_workers = self._of_workers, None
        if not self._workers or of_workers is None:
            return
        known = [each.collect() if isinstance(each, PendingFingerprint) else each for each in of_workers]
        prints = [each.digest for each in known if isinstance(each, Fingerprint)]
        excerpts = [each.excerpt for each in known if isinstance(each, Fingerprint)]
        if len(prints) == _ROUNDS * self._workers and distinct_bytes(excerpts) >= ENOUGH_BYTES:
            found = same_on_workers(f"train epoch {self._epoch}", self._state.rank, prints, self._workers, self._first)
            if found is not None:
                self._state.find(found)

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        if span.evaluation:
            return
        if self._span is span and self._ever_read:  # also of no batch: rank 0 expects a record of every rank
            self._collect()
            self._report()
        self.fingerprints_due = self._due = 0
        self._of_workers = None
        self.repeats_order = None
        if self._others is not None and self._state.steps > self._steps_before:  # else it was no training
            self.repeats_order = self._repeats_order(exhausted=reason == "exhausted")

    def _repeats_order(self, *, exhausted: bool) -> bool | None:
        """Whether a whole epoch has read the same data in the same order as the epoch before it; None if not known.

        The same order of other data is right, as where a buffer is filled again before each pass. So is a short pass in
        the order of the epoch behind it, as in a search for a learning rate. Another pass over one epoch counts for
        nothing: a loader may count itself on behind each pass.
        """
        last, order, first, prints = self._last_order, self.order, self._first, self.prints
        if last is not None and self._epoch == self._last_epoch:
            return None
        if self.begun_as is not None and self.begun_as[0] == order:
            first, prints = 1, self.begun_as[1]
        now = None
        if order is not None and (exhausted or self.is_whole) and len(prints) > 1:
            now = first, (order[0], *order[2:]), prints
        self._last_order, self._last_epoch = now, self._epoch
        return None if now is None or last is None or now[0] != last[0] else now == last

    def _known(self) -> list[Fingerprint]:
        return [each for each in self._read if isinstance(each, Fingerprint)]

    def _collect(self) -> None:
        """Takes in what has arrived from a device."""
        self._read = [each.collect() if isinstance(each, PendingFingerprint) else each for each in self._read]

    def _report(self) -> None:
        span, self._span = self._span, None
        if span is None or self._others is None:
            return
        record = {
            "dp_rank": self.dp_rank,
            "stage": self._stage,
            "is_sharded": self._is_sharded,
            "first": self._first,
            "epoch": span.name,
            "prints": list(self.prints),
            "informative": self.informative,
        }
        if self.elements is not None and (stream := self._stream()) is not None:
            record["stream"] = stream.to_json()
        self.elements, self._stream, self._streams_told = None, _no_stream, True
        name = span.name

        def judge(records: Records) -> Iterator[Verdict | None]:
            if not in_one_epoch(name, records):
                return
            streams = {rank: parse_stream(record.get("stream")) for rank, record in records.items()}
            same = judge_data(name, records)
            yield from same
            found = judge_streams(name, {rank: facts for rank, facts in streams.items() if facts is not None})
            self.found |= bool(same) or found is not None
            if found is None or found.kind != "StreamsDiffer" or not self._datasets_differ():  # it follows from that
                yield found

        # The splits are reported first, and judged first too: the last rank's reports may come between two looks.
        self._others.report(f"data/{span.opened}", lambda: record, judge, after=("splits",))


def _no_stream() -> None:
    """What is known of a stream that the framework does not deal out."""


def in_one_epoch(span: str, records: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether ranks report of one epoch. Where some evaluate at other places, which is allowed, they may not.

    Args:
        span: Name of the epoch on the first rank.
        records: By rank: the name of its `epoch`.
    """
    return all(record.get("epoch") == span for record in records.values())


def judge_data(span: str, records: Mapping[int, Mapping[str, Any]]) -> list[Verdict]:
    """Compares what the ranks have read at the beginning of one train epoch.

    Args:
        span: Its name.
        records: By rank: its `dp_rank`, its `stage` of a pipeline where it has one, the number of the `first` batch
            read (from 1), the `prints` of the batches (none if they could not be read), whether these are
            `informative`, and whether its data `is_sharded`.

    Returns:
        At most one `DuplicateData` and one `PeersDiffer`.

    Example:
        >>> read = {"first": 1, "prints": ["5e", "a1"], "informative": True, "is_sharded": False}
        >>> print(judge_data("train epoch 0", {rank: {**read, "dp_rank": rank} for rank in (0, 1)})[0].sentence)
        ranks 0, 1 read identical data in train epoch 0: their batches 1 to 2 are equal.
    """
    found = [_duplicates(span, records), _differences(span, records)]
    return [verdict for verdict in found if verdict is not None]


def _duplicates(span: str, records: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    readers = ranks_by(
        {rank: (int(record["first"]), *record["prints"]) for rank, record in records.items() if record["informative"]}
    )

    def dp_ranks(ranks: Iterable[int]) -> list[int]:
        return sorted({int(records[rank]["dp_rank"]) for rank in ranks})

    groups = [
        (key, ranks)
        for key, ranks in sorted(readers, key=lambda group: group[1])
        if len(dp_ranks(ranks)) > 1 and not all(records[rank]["is_sharded"] for rank in ranks)
    ]
    if not groups:
        return None
    who = [_readers(ranks, dp_ranks(ranks)) for _, ranks in groups[:_SHOWN]]
    others = f", and so do {'; '.join(who[1:])}" if len(who) > 1 else ""
    folded = f"; and {len(groups) - _SHOWN} groups more" if len(groups) > _SHOWN else ""
    (first, *prints), ranks = groups[0]
    batches = f"batches {first} to {first + len(prints) - 1}"
    sentence = f"{who[0]} read identical data in {span}{others}{folded}: their {batches} are equal."
    more: dict[str, Any] = {}
    if dp_ranks(ranks) != dp_ranks(records):
        more = {
            "why": "The share that these ranks read was computed alike: a wrong dp_rank, or the rank within its host.",
            "remedy": (
                "compute the share from the rank in the whole job, not from LOCAL_RANK; where ranks share their data, "
                "from the dp_rank."
            ),
        }
    return DUPLICATE_DATA.found(sentence, [rank for _, each in groups for rank in each], **more)


def _readers(ranks: Sequence[int], dp_ranks: Sequence[int]) -> str:
    """Who read the same, in words."""
    return names_of(ranks) if list(ranks) == list(dp_ranks) else f"dp_{names_of(dp_ranks)} ({names_of(ranks)})"


def _differences(span: str, records: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    first_of: dict[tuple[int, int], int] = {}
    for rank, record in sorted(records.items()):
        prints = record["prints"]
        if not prints:
            continue
        dp_rank = int(record["dp_rank"])
        other = first_of.setdefault((dp_rank, int(record.get("stage", 0))), rank)
        logged = records[other]
        pairs = zip(logged["prints"], prints, strict=False)
        unequal = [number for number, (one, two) in enumerate(pairs) if one != two]
        if unequal and logged["first"] == record["first"]:
            sentence = (
                f"ranks {other} and {rank} share dp_rank {dp_rank} and must read the same data; in {span} their "
                f"batch {int(record['first']) + unequal[0]} is not the same."
            )
            return PEERS_DIFFER.found(sentence, (other, rank))
    return None


def same_on_workers(span: str, rank: int, prints: Sequence[str], workers: int, first: int = 1) -> Verdict | None:
    """Returns a `DuplicateData` if all workers of a rank's loader have read the same, and each has gone on.

    Args:
        span: Name of the train epoch.
        rank: The rank.
        prints: Digests of its first batches, several of each worker, which give their batches in turn.
        workers: The workers.
        first: Number of the first of these batches in the epoch, from 1.

    >>> print(same_on_workers("train epoch 0", 1, ["5e", "5e", "a1", "a1"], workers=2).sentence)
    the 2 workers of rank 1's loader read the same samples in train epoch 0: its batches 1 to 2 are equal, and so are \
3 to 4.
    >>> same_on_workers("train epoch 0", 1, ["5e", "5e", "5e", "5e"], workers=2) is None
    True
    """
    rounds = [prints[begin : begin + workers] for begin in range(0, len(prints), workers)]
    if any(len(set(each)) != 1 for each in rounds) or len({each[0] for each in rounds}) != len(rounds):
        return None
    one, other = (f"{first + number * workers} to {first + (number + 1) * workers - 1}" for number in range(2))
    sentence = (
        f"the {workers} workers of rank {rank}'s loader read the same samples in {span}: its batches {one} are equal, "
        f"and so are {other}."
    )
    return DUPLICATE_DATA.found(sentence, (rank,), subject=WORKERS)


def same_order(span: str, ranks: Sequence[int], others: Sequence[int] = ()) -> Verdict:
    """Returns a `SameOrder`: ranks have read the same data in the same order as in the epoch before.

    Args:
        span: Name of the train epoch.
        ranks: These ranks, ascending.
        others: Those that have read in another order.
    """
    again = "in the same order as the train epoch before it"
    sentence = f"{span} was read {again}, though the sampler shuffles."
    if others:
        sentence = f"{names_of(ranks)} read {span} {again}, and {names_of(others)} did not."
    return SAME_ORDER.found(sentence, tuple(ranks))
