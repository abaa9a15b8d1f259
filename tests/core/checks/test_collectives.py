"""Collectives: what a rank notices of another one's, and what the answers of all ranks prove."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from countoff.core.checks.check import TickPart
from countoff.core.checks.collectives import (
    CollectiveCheck,
    Interval,
    Issued,
    Question,
    Recorded,
    Trail,
    first_unpaired,
    judge_collectives,
    numbers_of,
)
from countoff.core.protocol.counters import SpanCounters, TickPlace
from countoff.core.protocol.records import RECORD_BYTES, record_text
from countoff.core.settings import Settings
from countoff.core.state import State
from countoff.core.verdict import Verdict
from tests.other_ranks import KeptRecords

TICKS = 40
Program = list[list[int]]
"""How many collectives each rank issues in each interval."""


def group(ranks: int, *, messages: bool = True) -> Issued:
    return Issued(0, tuple(range(ranks)), "in the group of all ranks", messages)


def found_in(
    program: Program, choice: random.Random, *, messages: bool = True, mixed: Sequence[int] = ()
) -> Verdict | None:
    """What the ranks of a program find; at each tick another rank may be the first one.

    Args:
        program: The program.
        choice: Chooses that rank.
        messages: Whether messages count for both of their ranks.
        mixed: Intervals in which an epoch begins.
    """
    ranks = range(len(program))
    trails, asked = [Trail() for _ in ranks], False
    for tick in range(TICKS):
        interval, first = Interval(1, 64 * (tick + 2)), choice.choice(ranks)
        for rank in ranks:
            trails[rank].keep(interval, program[rank][tick], mixed=tick in mixed)
        for rank in ranks:
            if trails[rank].is_suspect(interval, program[first][tick] == program[rank][tick]) and not asked:
                asked, doubted = True, trails[rank].doubted
                assert doubted is not None
                answers = {each: numbers_of(trails[each].answer(doubted)) for each in ranks}
                found = judge_collectives("here", doubted, answers, group(len(program), messages=messages))
                if found is not None:
                    return found
    return None


def even_program(ranks: int, choice: random.Random) -> Program:
    numbers = [64 + choice.choice((0, 0, 0, 1)) for _ in range(TICKS)]
    return [list(numbers) for _ in range(ranks)]


def send(program: Program, choice: random.Random) -> None:
    """Two ranks exchange something in some interval."""
    one, other = choice.sample(range(len(program)), 2)
    tick = choice.randrange(TICKS)
    program[one][tick] += 1
    program[other][tick] += 1


def gather_now_and_then(program: Program, choice: random.Random) -> None:
    """The first rank receives from all others, every so many intervals."""
    for tick in range(choice.randrange(TICKS), TICKS, choice.randrange(1, 15)):
        for rank in range(1, len(program)):
            program[0][tick] += 1
            program[rank][tick] += 1


def pipeline(program: Program, choice: random.Random) -> None:
    """Each rank sends to the next one, in each interval as often."""
    often = choice.randrange(1, 64)
    for one, other in itertools.pairwise(program):
        for tick in range(TICKS):
            one[tick] += often
            other[tick] += often


def late_thread(program: Program, choice: random.Random) -> None:
    """A thread of each rank issues one collective, up to four intervals after that of another rank."""
    begin = choice.randrange(TICKS - 4)
    for numbers in program:
        numbers[begin + choice.randrange(5)] += 1


def other_place(program: Program, choice: random.Random) -> None:
    """One rank issues a collective of each interval before the tick, the others after it."""
    rank = choice.randrange(len(program))
    for tick in range(choice.randrange(2), TICKS - 1, choice.randrange(1, 6)):
        program[rank][tick] += 1
        program[rank][tick + 1] -= 1


def extra_of_one_rank(program: Program, choice: random.Random) -> None:
    """One rank issues something alone at regular intervals, as in a group that counts what only it does."""
    often = choice.randrange(1, 16)
    rank = choice.randrange(len(program))
    for tick in range(often, TICKS, often + 1):
        program[rank][tick] += 1


HEALTHY: Sequence[Callable[[Program, random.Random], None]] = [
    send,
    gather_now_and_then,
    pipeline,
    late_thread,
    other_place,
]


def healthy_programs(count: int) -> Iterator[tuple[Program, random.Random]]:
    for seed in range(count):
        choice = random.Random(seed)
        program = even_program(choice.choice((2, 3, 4, 5, 8)), choice)
        for oddity in choice.sample(HEALTHY, choice.randrange(3)):
            oddity(program, choice)
        yield program, choice


def test_ten_thousand_healthy_programs_are_silent() -> None:
    found = [
        (program, verdict) for program, choice in healthy_programs(10_000) if (verdict := found_in(program, choice))
    ]
    assert found == []


def test_what_is_made_up_for_where_an_epoch_begins_is_silent() -> None:
    """A thread of one rank writes longer, and issues its collective before or after the place that is not judged."""
    for seed in range(1_000):
        choice = random.Random(seed)
        program = even_program(choice.choice((2, 4, 8)), choice)
        begins = choice.randrange(4, TICKS - 4)
        late = choice.randrange(len(program))
        for rank, numbers in enumerate(program):
            numbers[begins + (choice.choice((-2, -1, 1, 2)) if rank == late else 0)] += 1
        assert found_in(program, choice, messages=False, mixed=[begins]) is None, seed


def test_what_one_rank_does_alone_at_regular_intervals_is_part_of_its_program() -> None:
    for seed in range(1_000):
        choice = random.Random(seed)
        program = even_program(choice.choice((2, 3, 4, 5, 8)), choice)
        extra_of_one_rank(program, choice)
        assert found_in(program, choice, messages=False) is None, seed


@pytest.mark.parametrize("messages", [True, False], ids=["gloo", "nccl"])
def test_every_collective_that_one_rank_leaves_out_is_found(messages: bool) -> None:
    """With gloo, an odd number of ranks and one message explain the same; so these are not judged."""
    for seed in range(2_000):
        choice = random.Random(seed)
        ranks = choice.choice((2, 4, 8) if messages else (2, 3, 4, 8))
        program = even_program(ranks, choice)
        odd, tick = choice.randrange(ranks), choice.randrange(2, 20)
        program[odd][tick] += choice.choice((-1, 1))
        found = found_in(program, choice, messages=messages)
        assert found is not None, (seed, program)
        assert found.ranks == ((0, 1) if ranks == 2 else (odd,))


def answers_of(*numbers: int, before: int = 4, after: int = 5) -> Mapping[int, Mapping[Interval, int]]:
    """Answers of ranks that have issued so many in the interval in doubt, and as many in all others."""
    ticks = [Interval(1, 8 * tick) for tick in range(1, before + after + 2)]
    return {
        rank: {tick: number if place == before else 65 for place, tick in enumerate(ticks)}
        for rank, number in enumerate(numbers)
    }


@pytest.mark.parametrize(
    ("numbers", "sentence", "ranks", "standing"),
    [
        ((65, 65, 65, 64), "rank 3 issued 1 collective fewer than ranks 0–2 {}", (3,), "out of step"),
        ((68, 65, 65, 65), "rank 0 issued 3 collectives more than ranks 1–3 {}", (0,), "out of step"),
        ((65, 64), "ranks issued different numbers of collectives {}: 65 on rank 0, 64 on rank 1", (0, 1), "differ"),
        (
            (65, 65, 65, 65, 65, 66, 64, 64),
            "rank 5 issued 1 collective more, ranks 6, 7 issued 1 collective fewer than ranks 0–4 {}",
            (5, 6, 7),
            "out of step",
        ),
    ],
)
def test_the_sentence(numbers: Sequence[int], sentence: str, ranks: tuple[int, ...], standing: str) -> None:
    found = judge_collectives("here", Interval(1, 40), answers_of(*numbers), group(len(numbers)))
    assert found is not None
    assert found.sentence == f"here, {sentence.format('in the group of all ranks')}."
    assert (found.ranks, found.standing) == (ranks, standing)


def test_what_messages_explain_is_no_proof() -> None:
    doubted, even, nccl = Interval(1, 40), group(4), group(4, messages=False)
    assert judge_collectives("", doubted, answers_of(66, 66, 65, 65), nccl) is None
    assert judge_collectives("", doubted, answers_of(67, 66, 65, 65), nccl) is None
    assert judge_collectives("", doubted, answers_of(64, 65, 65, 65), nccl) is not None
    assert judge_collectives("", doubted, answers_of(66, 66, 65, 65), even) is None
    assert judge_collectives("", doubted, answers_of(68, 66, 66, 66), even) is None
    assert judge_collectives("", doubted, answers_of(64, 65, 65), group(3)) is None
    assert judge_collectives("", doubted, answers_of(64, 65, 65, 65), even) is not None


def test_an_answer_that_lacks_the_interval_or_differs_elsewhere_is_no_proof() -> None:
    doubted = Interval(1, 40)
    answers = {rank: dict(told) for rank, told in answers_of(65, 65, 65, 64).items()}
    del answers[1][doubted]
    assert judge_collectives("", doubted, answers, group(4)) is None
    answers = {rank: dict(told) for rank, told in answers_of(65, 65, 65, 64).items()}
    answers[2][Interval(1, 64)] += 1
    assert judge_collectives("", doubted, answers, group(4)) is None
    assert judge_collectives("", doubted, answers_of(65, 65, 65, 64, after=1), group(4)) is None
    assert judge_collectives("", doubted, answers_of(65, 65, 65, 64, before=1), group(4)) is None


def test_an_answer_fits_into_a_record() -> None:
    trail = Trail()
    for tick in range(200):
        trail.keep(Interval(123_456, 64 * tick + 10_000_000), 12_345)
    text = record_text(trail.answer(Interval(0, 0)))
    assert len(text) <= RECORD_BYTES
    assert list(numbers_of(json.loads(text)))[-1] == Interval(123_456, 64 * 199 + 10_000_000)


def test_a_question_is_read_as_it_was_written() -> None:
    question = Question("ab12", Interval(3, 64), Interval(3, 448), 1)
    assert Question.from_json(json.loads(record_text(question.to_json())), range(2)) == question
    for wrong in ({"group": 5}, {"group": "x" * 65}, {"interval": [3, -1]}, {"last": ["3", 4]}, {"rank": 2}):
        with pytest.raises(ValueError, match="expected"):
            Question.from_json({**question.to_json(), **wrong}, range(2))


class Rank:
    """One rank's check, and the ticks that it writes."""

    def __init__(self, **levels: str) -> None:
        self.others, self.made = KeptRecords(), 0
        self.others.groups = {"a": group(2)}
        settings = Settings.resolve(levels=levels)
        self.state = State(0, 2, settings, {})
        self.check = CollectiveCheck(self.state)
        self.check.fit_started(None, self.others)  # pyright: ignore[reportArgumentType]
        self.span = SpanCounters("train epoch 0", opened=1)
        self.check.span_opening(self.span)

    def hear(self, entry: Mapping[str, Any]) -> None:
        """The log has an entry."""
        self.state.readers["collectives"](json.loads(record_text(entry)))()

    def found(self) -> list[str]:
        """The sentences of what was found by now."""
        actions = [self.state.outbox.get_nowait() for _ in range(self.state.outbox.qsize())]
        return [action.entry["verdict"]["sentence"] for action in actions]  # pyright: ignore[reportAttributeAccessIssue]

    def tick(self, issued: int) -> Mapping[str, object] | None:
        """What this rank writes at its next tick, with so many collectives issued by then."""
        part = self.part(issued)
        return None if part is None else part.record

    def part(self, issued: int) -> TickPart | None:
        """What it compares there."""
        self.others.groups = {"a": group(2)._replace(number=issued, made=self.made)}
        self.span.started += 64
        make = self.check.tick(self.span)
        self.others.groups = {}  # what a rank issues while its speaker is busy does not count
        return None if make is None else make(TickPlace(self.span.opened, self.span.started, self.span.name))


def told(number: int, since: int) -> dict[str, object]:
    return {"issued": {"a": number}, "issued_since": [1, since]}


def test_a_tick_has_what_was_issued_since_the_one_before() -> None:
    rank = Rank()
    assert [rank.tick(number) for number in (70, 134, 199)] == [None, told(64, 64), told(65, 128)]


def test_a_group_that_was_made_again_is_not_compared() -> None:
    """A group may have the name of one that is gone: its collectives are counted from 0."""
    rank = Rank()
    assert [rank.tick(number) for number in (70, 134)] == [None, told(64, 64)]
    rank.made += 1
    assert [rank.tick(number) for number in (3, 67)] == [None, told(64, 192)]


@pytest.mark.parametrize("theirs", [{}, {"issued": 3}, {"issued": {"a": -12}}, {"issued": {"a": "x"}}])
def test_a_record_of_another_version_ends_nothing(theirs: Mapping[str, object]) -> None:
    rank = Rank()
    rank.tick(70)
    part = rank.part(134)
    assert part is not None
    assert part.compare({"issued_since": [1, 64], **theirs}, (0, 1)) is None


def test_process_groups_are_looked_up_with_each_record() -> None:
    """That takes a while, so a tick itself does not: it is done where the speaker thread makes the record."""
    rank = Rank()
    make = rank.check.tick(rank.span)
    assert rank.others.groups_sought == 1  # at the epoch's start
    assert make is not None
    make(TickPlace(1, 64, "train epoch 0"))
    assert rank.others.groups_sought == 2


def test_nothing_is_read_where_the_level_is_off() -> None:
    rank = Rank(CollectivesDiffer="off")
    assert [rank.tick(number) for number in (70, 134)] == [None, None]


GRADIENTS, METRIC = "all_reduce of [650] at train.py:80", "all_reduce of [650] at metrics.py:12"


def recorded_by(*ranks: Sequence[str], first: int = 64) -> dict[int, Recorded]:
    return {rank: Recorded(first, tuple(names)) for rank, names in enumerate(ranks)}


def test_the_first_collectives_that_do_not_pair_are_quoted() -> None:
    program = [GRADIENTS, METRIC] * 8
    left_out = [*program[:5], *program[6:]]
    said = f"From there on, rank 2 issued {GRADIENTS} where ranks 0, 1 issued {METRIC}."
    assert first_unpaired({0: 65, 1: 65, 2: 64}, recorded_by(program, program, left_out)) == said
    alone = [*program[:4], "barrier at log.py:3", *program[4:]]
    said = f"From there on, rank 0 issued barrier at log.py:3 where ranks 1, 2 issued {GRADIENTS}."
    assert first_unpaired({0: 66, 1: 65, 2: 65}, recorded_by(alone, program, program)) == said


def test_only_what_the_rank_that_began_last_has_recorded_too_is_compared() -> None:
    program = [GRADIENTS, METRIC] * 8
    told = recorded_by(program, [*program[:5], *program[6:]])
    later = {**told, 1: Recorded(67, told[1].names[3:])}
    assert first_unpaired({0: 65, 1: 64}, later) == first_unpaired({0: 65, 1: 64}, told) != ""


@pytest.mark.parametrize("cut", range(17))
def test_a_record_that_ends_early_says_the_same_or_nothing(cut: int) -> None:
    program = [GRADIENTS, METRIC] * 8
    left_out = [*program[:5], *program[6:]]
    whole = first_unpaired({0: 65, 1: 64}, recorded_by(program, left_out))
    assert first_unpaired({0: 65, 1: 64}, recorded_by(program[:cut], left_out)) == (whole if cut >= 10 else "")


def test_records_that_another_difference_explains_say_nothing() -> None:
    """Each rank has lines of its own in the programs that are left out here; none of that is a fault."""
    program, numbers = [GRADIENTS, METRIC] * 8, {0: 65, 1: 64}
    own_line = [name.replace("metrics.py:12", "metrics.py:14") for name in program]
    for other in (program, own_line, own_line[1:], [*program[:5], *own_line[6:]]):
        assert first_unpaired(numbers, recorded_by(program, other)) == "", other
    assert first_unpaired({0: 65, 1: 64, 2: 63}, recorded_by(program, program[1:], program[2:])) == ""
    assert first_unpaired({0: 65, 1: 65, 2: 64}, recorded_by(program, own_line, program[1:])) == ""
    assert first_unpaired(numbers, recorded_by(program)) == ""


def test_what_is_recorded_fits_into_a_record() -> None:
    for names in (["ä" * 300 + str(line) for line in range(200)], [GRADIENTS] * 5_000, [str(n) for n in range(99)]):
        recorded = Recorded(2**52, tuple(names))
        text = record_text(recorded.to_json())
        read = Recorded.from_json(json.loads(text))
        assert len(text) <= RECORD_BYTES
        assert read.first == 2**52
        assert len(read.names) > 8
        assert all(name[:3] == own[:3] for name, own in zip(read.names, names, strict=False))


@pytest.mark.parametrize(
    "wrong", [{}, {"order": "01"}, {"first": -1}, {"names": 5}, {"order": 5}, {"order": "?"}], ids=str
)
def test_a_record_of_another_form_is_refused(wrong: dict[str, object]) -> None:
    whole = {"first": 3, "names": ["barrier"], "order": "00"}
    assert Recorded.from_json(whole) == Recorded(3, ("barrier", "barrier"))
    with pytest.raises((KeyError, TypeError, ValueError)):
        Recorded.from_json({**whole, **wrong} if wrong else {})


@pytest.mark.parametrize(("before", "after"), [(2, 5), (4, 5), (8, 9), (16, 17), (100, 17)])
def test_so_many_ticks_follow_a_loss_that_is_found(before: int, after: int) -> None:
    """As docs/limits.md says: as many as came before it and one more, but 5 at least and 17 at most."""

    def is_asked(following: int) -> bool:
        trail = Trail()
        ticks = [True] * before + [False] + [True] * following
        return any(trail.is_suspect(Interval(1, tick), same) for tick, same in enumerate(ticks))

    assert is_asked(after)
    assert not is_asked(after - 1)


class Speaker:
    """Keeps what a check asks and tells, and what it waits for."""

    def __init__(self) -> None:
        self.entries: list[Mapping[str, Any]] = []
        self.told: dict[str, Any] = {}
        self.waiting: dict[str, tuple[float, Callable[[Mapping[int, Any], list[int]], None]]] = {}

    def hand(self, job: Callable[[Any], None]) -> None:
        job(SimpleNamespace(report=lambda name, rank, record: self.told.__setitem__(f"{name}/{rank}", record)))

    def append(self, entry: Mapping[str, Any], is_written: Callable[[], bool]) -> Callable[[Any], None]:
        return lambda _: None if is_written() else self.entries.append(entry)

    def gather(self, name: str, ranks: Sequence[int], deadline: float, done: Any) -> None:
        self.waiting[name.partition("/")[0]] = deadline, done


def proved_by(recorded: Recorded | None) -> tuple[Rank, Speaker]:
    """A rank that has proved that it issued one collective more than the other one, and what it has recorded."""
    rank, speaker = Rank(), Speaker()
    rank.others.speaker = speaker
    rank.others.recorded = lambda group, begin: recorded
    for tick in range(12):
        part = rank.part(64 * tick + (tick >= 4))
        if part is not None:
            part.compare({"issued": {"a": 64}, "issued_since": [1, 64 * tick]}, (1, 0))
    rank.hear(speaker.entries[0])
    own = speaker.told["collectives/a/1.320/0"]
    other = {"numbers": [[*each[:2], 64] for each in own["numbers"]]}
    speaker.waiting["collectives"][1]({0: own, 1: other}, [])
    return rank, speaker


MORE = Recorded(9, tuple([GRADIENTS, METRIC] * 8))
FEWER = Recorded(9, (GRADIENTS, METRIC, GRADIENTS, *[GRADIENTS, METRIC] * 6))
FOUND = "between batches 256 and 320 of train epoch 0, ranks issued different numbers of collectives in the group of \
all ranks: 65 on rank 0, 64 on rank 1."


def test_a_finding_does_not_wait_where_this_rank_has_recorded_nothing() -> None:
    rank, speaker = proved_by(None)
    assert (rank.found(), list(speaker.waiting), len(speaker.entries)) == ([FOUND], ["collectives"], 1)


def test_a_finding_has_what_both_ranks_have_recorded() -> None:
    rank, speaker = proved_by(MORE)
    deadline, done = speaker.waiting["recorded"]
    assert time.monotonic() < deadline <= time.monotonic() + 5
    rank.hear(speaker.entries[1])
    assert Recorded.from_json(speaker.told["recorded/a/1.320/0"]) == MORE
    assert rank.found() == []
    done({0: MORE.to_json(), 1: FEWER.to_json()}, [])
    assert rank.found() == [f"{FOUND} From there on, rank 0 issued {METRIC} where rank 1 issued {GRADIENTS}."]


@pytest.mark.parametrize("answer", [None, {}, {"first": "x"}, {"first": 9, "names": 4, "order": "0"}, [], 3])
def test_a_rank_that_has_recorded_nothing_or_does_not_answer_costs_its_sentence_alone(answer: Any) -> None:
    rank, speaker = proved_by(MORE)
    missing = [1] if answer is None else []
    speaker.waiting["recorded"][1]({0: MORE.to_json(), **({} if missing else {1: answer})}, missing)
    assert rank.found() == [FOUND]


def test_a_fit_that_ends_meanwhile_has_its_finding_once() -> None:
    rank, speaker = proved_by(MORE)
    rank.check.settle()
    speaker.waiting["recorded"][1]({0: MORE.to_json(), 1: FEWER.to_json()}, [])
    assert rank.found() == [FOUND]
