"""Where a framework deals one stream out to the ranks, do all ranks hold that one? `DoubleSharded`, `StreamsDiffer`.

A framework's loader and a DistributedSampler give each rank a part of what that rank's own sampler or dataset yields.
This is right only if all ranks yield the same. Each rank reports what its objects declare
about the data and fingerprints of the first elements that it was about to deal out. Rank 0 compares them.

Streams that differ prove that samples are lost, but not why. So the reason is given only where there is evidence: an
object that says that it is a share, a length, an element that several streams have at different places, a seed. Random
transforms make equal samples look different, so samples that no two ranks have in common prove nothing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from countoff.core.data.fingerprint import fingerprint, parts_of
from countoff.core.messages import names_of, ranks_by
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = [
    "ELEMENTS",
    "LENGTHS",
    "STREAMING",
    "FirstElements",
    "StreamFacts",
    "column_digest",
    "judge_streams",
    "parse_stream",
]

ELEMENTS = 12
"""Elements at the start of a stream that are compared."""
LENGTHS = "lengths"
"""Subject of a `StreamsDiffer` where the ranks' streams are not even equally long."""
STREAMING = "StreamingDataset"
"""Subject of a `DoubleSharded` of the class of mosaicml-streaming that gives each rank its share by itself."""
DIGEST = 8
"""Hexadecimal digits of each digest in a record."""
DOUBLE_SHARDED = VerdictKind(
    "DoubleSharded",
    "data that is already one rank's share is sharded again, so most of it is never read",
    causes=dict.fromkeys(
        ("", STREAMING), Cause("What a rank leaves out of its share, no other rank has: it is never read.")
    ),
)
"""**Cause.** The dataset or its sampler takes the rank's share (`split_dataset_by_node`, a `StreamingDataset`, a rank
in your own sampler), and the framework or a `DistributedSampler` shards that again. The loss looks normal.

**Fix.** Give the framework all of the data on every rank, or turn its sharding off, as by
`Trainer(use_distributed_sampler=False)` in Lightning. See [data identity](data-identity.md#data-that-is-sharded-twice).
"""
STREAMS_DIFFER = VerdictKind(
    "StreamsDiffer",
    "the framework deals one stream out to the ranks, but the ranks' streams are not the same: ranks read some "
    "samples several times, and others never",
    causes={"": Cause(), LENGTHS: Cause()},
)
"""**Cause.** `shuffle(seed=rank)`, no seed at all, a generator that Accelerate does not synchronise (`rng_types`
without `"generator"`), or a random split by another seed on each rank.

**Fix.** Shuffle with the same seed on all ranks. With Accelerate, call `set_seed(seed)` without `device_specific`
before you make the loader.
"""
_PARTS = 4
_MOST_PARTS = 16
_NOTHING = "-" * DIGEST


class StreamFacts(NamedTuple):
    """What one rank knows of the stream that its framework deals out.

    Attributes:
        dealer: Who deals it out.
        ways: Parts into which it is dealt, at least 2.
        first_only: Whether only rank 0's stream is read, for all ranks.
        shares: Shares of the data of which this rank's is one, as the object says that `said_by` names; 0 if none does.
        said_by: The function or class that made the share.
        prints: Digests of the first elements, one after the other; none if they were not seen.
        parts: Digests of the first parts of these elements (the fields of a sample), each over all elements.
        contents: Digests of the columns of a map-style dataset, each over some rows.
        seed: Digest of the generator by which the dataset shuffles.
        length: Elements of this rank's stream, or rows of its dataset.
        whole: Elements of all data, where that is known.
        shuffled: Whether the object says that it holds all data, in a random order.
        sampler: Whether the elements are indices, not samples.
        begin: Place of the first row in the table in memory that the rows of the dataset are a part of.
    """

    dealer: str
    ways: int
    first_only: bool = False
    shares: int = 0
    said_by: str = ""
    prints: str = ""
    parts: str = ""
    contents: str = ""
    seed: str = ""
    length: int | None = None
    whole: int | None = None
    shuffled: bool = False
    sampler: bool = False
    begin: int | None = None

    def to_json(self) -> list[Any]:
        """These facts as JSON types, for a record."""
        return list(self)


_TEXTS = {"dealer": 40, "said_by": 40, "seed": DIGEST}


def parse_stream(value: object) -> StreamFacts | None:
    """Returns the facts in a record of another rank; None if there are none, or if they are not what a rank writes."""
    if not isinstance(value, list) or len(value) != len(StreamFacts._fields):
        return None
    facts = StreamFacts(*value)
    digests = {"prints": ELEMENTS, "parts": _PARTS, "contents": _PARTS}
    texts = _TEXTS | {name: count * DIGEST for name, count in digests.items()}
    known = facts._asdict()
    good = (
        all(isinstance(known[name], str) and len(known[name]) <= most for name, most in texts.items())
        and all(len(known[name]) % DIGEST == 0 for name in digests)
        and all(type(known[name]) is int and known[name] >= 0 for name in ("ways", "shares"))
        and all(each is None or (type(each) is int and each >= 0) for each in (facts.length, facts.whole, facts.begin))
        and all(isinstance(each, bool) for each in (facts.first_only, facts.shuffled, facts.sampler))
    )
    return facts if good and facts.ways > 1 else None


class FirstElements:
    """The first elements of one rank's stream, looked at where the framework takes them.

    Attributes:
        prints: Their digests, one after the other.
    """

    def __init__(self) -> None:
        self.prints = ""
        self._left = ELEMENTS
        self._parts: list[list[str]] | None = None

    @property
    def parts(self) -> str:
        """Digests of the elements' first parts; a part that is equal in all elements has none."""
        columns = list(zip(*(self._parts or []), strict=True))[:_PARTS]
        return "".join(_digest(*column) if len(set(column)) > 1 else _NOTHING for column in columns)

    def follow(self, elements: Iterator[Any], seen: Callable[[Any], Sequence[Any]] | None = None) -> Iterator[Any]:
        """Returns an iterator over the same elements, which looks at the first ones.

        Args:
            elements: The stream. Nothing is taken from it that the caller does not ask for.
            seen: Returns what an element stands for, as the indices of a batch; None where the elements are samples.
        """
        return itertools.chain(self._first(elements, seen), elements)

    def _first(self, elements: Iterator[Any], seen: Callable[[Any], Sequence[Any]] | None) -> Iterator[Any]:
        while self._left > 0:
            try:
                element = next(elements)
            except StopIteration:
                return
            if seen is None:
                self._take(element)
            else:
                self._take_indices(element, seen)
            yield element

    def _take(self, sample: Any) -> None:
        """Takes the digest of a sample; a sample that cannot be read ends that."""
        try:
            parts = parts_of(sample)
            parts = parts if len(parts) <= _MOST_PARTS else []
            read = [fingerprint(part) for part in parts or [sample]]
        except ValueError:  # the keys of a sample may be of any class
            self._give_up()
            return
        digests = [each.digest for each in read if each is not None]
        if len(digests) < len(read) or (self._parts and len(self._parts[0]) != len(parts)):
            self._give_up()
            return
        self._left -= 1
        self.prints += _digest(*digests)
        self._parts = [*(self._parts or []), digests if parts else []]

    def _take_indices(self, batch: Any, seen: Callable[[Any], Sequence[Any]]) -> None:
        try:
            found = [fingerprint(index) for index in itertools.islice(seen(batch), self._left)]
        except Exception:  # a batch sampler of the user's may yield anything
            found = [None]
        if any(each is None for each in found):
            self._give_up()
            return
        self._left -= max(1, len(found))
        self.prints += "".join(_digest(each.digest) for each in found if each is not None)

    def _give_up(self) -> None:
        self._left, self.prints, self._parts = 0, "", None


def column_digest(values: Sequence[Any]) -> str:
    """Returns the digest of some rows of one column; dashes where they are all alike or cannot be read.

    Args:
        values: The values of these rows.

    Example:
        >>> column_digest([1, 1]), column_digest([1, 2]) == column_digest([1, 3])
        ('--------', False)
    """
    read = [fingerprint(value) for value in values]
    digests = [each.digest for each in read if each is not None]
    return _digest(*digests) if len(digests) == len(read) and len(set(digests)) > 1 else _NOTHING


def judge_streams(span: str, records: Mapping[int, StreamFacts]) -> Verdict | None:
    """Compares the streams that the ranks' framework deals out.

    Args:
        span: Name of the train epoch.
        records: By rank, what it knows of its stream.

    Returns:
        A `DoubleSharded` or a `StreamsDiffer`; None if the streams are the same, or if nothing is proved.

    Example:
        >>> share = StreamFacts("Accelerate", 2, shares=2, said_by="split_dataset_by_node")
        >>> judge_streams("train epoch 0", {0: share, 1: share}).kind
        'DoubleSharded'
    """
    if not records:
        return None
    first = records[min(records)]
    reading = {min(records): first} if first.first_only and 0 in records else records
    declared = [facts for facts in reading.values() if facts.shares > 1]
    if declared and len(declared) == len(reading):
        return _declared(span, declared[0])
    if len(records) < 2 or len({(facts.dealer, facts.ways) for facts in records.values()}) > 1:
        return None
    if (parts := _parts_of_one_table(list(records.values()))) > 1:
        return _declared(span, first._replace(shares=parts, said_by="consecutive rows of one Dataset"))
    if first.first_only:
        return _other_contents(span, records)
    return _other_seeds(span, records) or _other_contents(span, records) or _other_elements(span, records)


def _declared(span: str, facts: StreamFacts) -> Verdict:
    how = (
        f"{facts.dealer} reads rank 0's for all ranks"
        if facts.first_only
        else f"{facts.dealer} shards it again, so that each rank reads about 1/{facts.ways} of its own"
    )
    sentence = (
        f"the train data is sharded twice: what each rank holds is already 1 of {facts.shares} shares "
        f"({facts.said_by}), and {how}. In {span}, about 1/{facts.shares} of the data is read."
    )
    subject = STREAMING if facts.said_by == STREAMING else ""
    why = None if not facts.first_only else _WAITS if subject else _OTHERS_SHARES
    return DOUBLE_SHARDED.found(sentence, subject=subject, why=why)


def _parts_of_one_table(everything: Sequence[StreamFacts]) -> int:
    """Into how many parts of consecutive rows a table is divided among the ranks; 0 if that is not what they hold."""
    known = [(facts.begin, facts.length) for facts in everything]
    parts = sorted({(begin, length) for begin, length in known if begin is not None and length})
    if any(begin is None or not length for begin, length in known):
        return 0
    consecutive = all(begin + length == after for (begin, length), (after, _) in itertools.pairwise(parts))
    return len(parts) if consecutive else 0


def _other_seeds(span: str, records: Mapping[int, StreamFacts]) -> Verdict | None:
    if not all(facts.seed for facts in records.values()):
        return None
    return _differing(span, records, lambda facts: facts.seed, "they are shuffled with different seeds")


def _other_contents(span: str, records: Mapping[int, StreamFacts]) -> Verdict | None:
    """Whether ranks take their indices from the same dataset."""
    everything = list(records.values())
    columns = [_split(facts.contents) for facts in everything]
    lengths = {(facts.length, len(digests)) for facts, digests in zip(everything, columns, strict=True)}
    if len(lengths) > 1 or not columns[0]:
        return None
    informative = [values for values in zip(*columns, strict=True) if _NOTHING not in values]
    if not informative or any(len(set(values)) == 1 for values in informative):
        return None
    if any(facts.whole is None for facts in everything):
        return None  # these may be the same rows, changed at random
    who, minority = _outliers(records, lambda facts: facts.contents)
    is_share = not minority and _may_be_share(everything[0])
    if everything[0].first_only and not is_share:
        return None  # rank 0 reads all that is read
    if not is_share:
        return _differing(
            span, records, lambda facts: facts.contents, "their datasets have different rows at the same index"
        )
    ways, dealer = everything[0].ways, everything[0].dealer
    if everything[0].first_only:
        sentence = (
            f"{dealer} reads the train dataset of rank 0 for all ranks, but the datasets of {names_of(who)} hold "
            f"different rows. In {span}, about 1/{ways} of the data is read."
        )
        return DOUBLE_SHARDED.found(sentence, who, why=_OTHERS_SHARES)
    sentence = (
        f"{dealer} takes the train dataset to be the same on all ranks, but the datasets of {names_of(who)} hold "
        f"different rows. In {span}, each rank reads about 1/{ways} of its own dataset."
    )
    return DOUBLE_SHARDED.found(sentence, who, why=_LEFT_OUT.format("dataset", "split_dataset_by_node"))


def _other_elements(span: str, records: Mapping[int, StreamFacts]) -> Verdict | None:
    streams = {rank: _split(facts.prints) for rank, facts in records.items()}
    common = min(len(stream) for stream in streams.values())
    begins = {tuple(stream[:common]) for stream in streams.values()}
    if common < 2 or len(begins) == 1:
        return None
    everything = list(records.values())
    first = everything[0]
    if not first.sampler and _some_part_is_equal(everything):
        return None  # the same samples in the same order, transformed at random
    what = "indices" if first.sampler else "samples"
    overlap = sum(len(set(begin)) for begin in begins) - len(set().union(*begins))
    if not first.sampler:
        repeats = any(len(set(begin)) < common for begin in begins)
        agreeing = sum(len(begins) - len(set(place)) for place in zip(*begins, strict=True))
        if repeats or (agreeing and overlap <= 2 * agreeing):
            return None  # equal samples at the same place: one stream, of which some samples were transformed

    def begin_of(facts: StreamFacts) -> tuple[str, ...]:
        return tuple(_split(facts.prints)[:common])

    if all(facts.shuffled for facts in everything) or (overlap and not first.sampler):
        if (other := _other_lengths(span, records)) is not None:
            return other  # by which a shuffle with one seed gives another order
        return _differing(span, records, begin_of, f"their first {common} {what} are not the same")
    if overlap or (first.sampler and not all(map(_may_be_share, everything))):
        return None
    who, minority = _outliers(records, begin_of)
    if minority:
        return _differing(span, records, begin_of, f"their first {common} {what} have none in common")
    if not first.sampler:
        return None  # each rank may have transformed the samples of one stream, at random
    sentence = (
        f"{first.dealer} takes the train data to be the same stream on all ranks, but {names_of(who)} have none of "
        f"their first {common} {what} in common. In {span}, each rank reads about 1/{first.ways} of its own stream."
    )
    return DOUBLE_SHARDED.found(sentence, who, why=_LEFT_OUT.format("stream", "the rank in its sampler"))


def _other_lengths(span: str, records: Mapping[int, StreamFacts]) -> Verdict | None:
    """Whether the ranks' streams differ in length."""
    lengths = {facts.length for facts in records.values()}
    if len(lengths) == 1 or None in lengths:
        return None
    shortest, *_, longest = sorted(length for length in lengths if length is not None)
    how = f"they have from {shortest} to {longest} samples"
    return _differing(span, records, lambda facts: facts.length, how, subject=LENGTHS)


_OTHERS_SHARES = "The shares of the other ranks are never read."
_WAITS = f"{_OTHERS_SHARES} A {STREAMING} waits until all ranks of its host read it, so rank 0 may wait forever."
_LEFT_OUT = "Where each rank's {} is a share already, as by {}, no rank ever reads what it leaves out of it."


def _differing(
    span: str, records: Mapping[int, StreamFacts], by: Callable[[StreamFacts], Any], how: str, subject: str = ""
) -> Verdict | None:
    """A `StreamsDiffer`, if the ranks' streams differ in what `by` returns."""
    who, minority = _outliers(records, by)
    if not who:
        return None
    dealer, ways = records[who[0]].dealer, records[who[0]].ways
    others = f"{names_of(who)} and of the other ranks" if minority else names_of(who)
    sentence = f"{dealer} deals out one stream, but those of {others} differ in {span}: {how}."
    why = (
        f"Each rank keeps about 1/{ways} of its own stream. So several ranks read some samples, and no rank reads "
        "others."
    )
    return STREAMS_DIFFER.found(sentence, who, why=why, subject=subject)


def _outliers(records: Mapping[int, StreamFacts], by: Callable[[StreamFacts], Any]) -> tuple[tuple[int, ...], bool]:
    """The ranks that differ from most others, and True; if there are no such, all ranks, or none if all agree."""
    groups = ranks_by({rank: by(facts) for rank, facts in records.items()})
    if len(groups) == 1:
        return (), False
    largest = groups[-1][1]
    if 2 * len(largest) > len(records):
        return tuple(rank for rank in sorted(records) if rank not in largest), True
    return tuple(sorted(records)), False


def _may_be_share(facts: StreamFacts) -> bool:
    """Whether what a rank holds is so short that all ranks together hold the data once."""
    if facts.length is None or facts.whole is None:
        return False
    return facts.length * facts.ways <= facts.whole + facts.ways


def _some_part_is_equal(everything: Sequence[StreamFacts]) -> bool:
    parts = [_split(facts.parts) for facts in everything]
    columns = zip(*parts, strict=False)
    return any(len(set(column)) == 1 and column[0] != _NOTHING for column in columns)


def _digest(*texts: str) -> str:
    return hashlib.blake2b("|".join(texts).encode(), digest_size=DIGEST // 2).hexdigest()


def _split(digests: str) -> list[str]:
    return [digests[start : start + DIGEST] for start in range(0, len(digests), DIGEST)]
