"""The voice of a host: what it passes on to the store, what it answers itself, and what happens once it is lost."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.liveness.heartbeats import announce_signal, begin_fit, has_signal, takes_part
from countoff.core.store.channel import Channel, ChannelError
from countoff.core.store.packs import pack, unpack
from countoff.core.store.voice import Voice
from countoff.core.store.voiced import VoicedChannel, VoiceLostError, Way, tell_fallen
from tests.core.protocol.test_credits import job
from tests.core.protocol.test_protocol import (
    Fault,
    assert_silent,
    examples,
    faults,
    has_other_batches,
    jobs,
    other_length,
    seeds,
)
from tests.fake_store import FakeStore
from tests.simulator import Job, play

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=2), values, max_size=3),
    max_leaves=6,
)
records = st.dictionaries(st.sampled_from(["plan", "steps", "loader", "closed"]), json_values, max_size=4)


class CountingStore(FakeStore):
    """A store that counts what is asked of it, by the name of the method and the key."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[tuple[str, str]] = Counter()

    def set(self, key: str, record: Mapping[str, Any], most: int = 1024) -> None:
        self.asked["set", key] += 1
        super().set(key, record, most)

    def claim(self, key: str, record: Mapping[str, Any]) -> dict[str, Any]:
        self.asked["claim", key] += 1
        return super().claim(key, record)

    def has(self, *keys: str) -> bool:
        self.asked["has", " ".join(keys)] += 1
        return super().has(*keys)

    def get(self, key: str) -> dict[str, Any]:
        self.asked["get", key] += 1
        return super().get(key)

    def add(self, key: str, amount: int) -> int:
        self.asked["add", key] += 1
        return super().add(key, amount)

    def of(self, key: str) -> dict[str, int]:
        """How often each method was called with a key."""
        return {method: times for (method, asked), times in self.asked.items() if asked == key}


class Hosts:
    """Hosts of two ranks each: 0 and 1, 2 and 3, and so on. A test moves their clock, and loses their voices."""

    def __init__(self, count: int = 2, ranks_of_each: int = 2, expected: int = 1) -> None:
        self.store = CountingStore()
        self.now = 0.0
        self.wanted: list[list[int]] = [[] for _ in range(count)]
        self.voices = [
            Voice(
                self.store,
                number + 1,
                self.wanted[number].append,
                every=1.0,
                expected=expected,
                clock=lambda: self.now,
            )
            for number in range(count)
        ]
        self.store.add("voices", count)
        self.lost: set[int] = set()
        self.paused: set[int] = set()
        self.ranks = range(count * ranks_of_each)
        self.channels: list[Channel] = []
        for rank in self.ranks:
            number = rank // ranks_of_each
            self.voices[number].join(rank)
            line = Line(self, number, rank)
            self.channels.append(VoicedChannel(Way(line, rank, number + 1, ("a", "b"), lambda: self.store)))
        self.store.asked.clear()

    def later(self, seconds: float = 0.1) -> None:
        """Lets time pass, and the voices write what is due."""
        self.now += seconds
        for number, voice in enumerate(self.voices):
            if number not in self.lost:
                voice.tend()


class Line:
    """The requests of one rank."""

    def __init__(self, hosts: Hosts, number: int, rank: int) -> None:
        self._hosts, self._number, self._rank = hosts, number, rank
        self._late: list[Sequence[Any]] = []

    def ask(self, request: Sequence[Any], reply: Callable[[Any], object] | None = None) -> Any:
        if self._number in self._hosts.lost:
            raise VoiceLostError("gone")
        if self._number in self._hosts.paused:
            self._late.append(request)
            raise VoiceLostError("it does not answer in time")
        answers: list[Any] = []
        self._hosts.voices[self._number].answer(self._rank, request, reply or answers.append)
        return answers[0] if answers else None

    def leave(self) -> None:
        self._late.append(["leave"])

    def late_answers(self) -> dict[str, Any]:
        if self._number in self._hosts.lost:
            return {"over": bool(self._late)}
        if self._number in self._hosts.paused:
            return {}
        late, self._late = self._late, []
        return {request[0]: self.ask(request) for request in late}

    def shut(self) -> None:
        pass


def test_a_claim_is_made_once_per_host_and_has_one_winner():
    hosts = Hosts()
    standing = [channel.claim("log/0", {"rank": rank}) for rank, channel in enumerate(hosts.channels)]
    assert standing == [{"rank": 0}] * 4
    assert hosts.store.of("log/0") == {"claim": 2}


def test_an_entry_of_the_log_is_fetched_once_and_told_to_all_who_wait():
    hosts, heard = Hosts(), list[Any]()
    for rank in (0, 1):
        Line(hosts, 0, rank).ask(["wait", "log/0"], heard.append)
    assert hosts.wanted[0] == [0]
    hosts.store.claim("log/0", {"rank": 3})
    assert heard == []
    hosts.voices[0].hear(0, hosts.store.get("log/0"))
    assert heard == [{"rank": 3}] * 2
    assert hosts.channels[1].claim("log/0", {"rank": 1}) == hosts.channels[0].get("log/0") == {"rank": 3}
    assert hosts.store.of("log/0") == {"claim": 1, "get": 1}


def test_a_claim_ends_no_wait_of_its_host_before_the_store_has_ended_it():
    """A rank whose wait has ended needs the entry no more, so others may delete it."""
    hosts, heard = Hosts(), list[Any]()
    Line(hosts, 0, 1).ask(["wait", "log/0"], heard.append)
    hosts.channels[0].claim("log/0", {"rank": 0})
    assert heard == []
    hosts.voices[0].hear(0, {"rank": 0})
    assert heard == [{"rank": 0}]


def test_a_rank_that_lags_behind_gets_an_entry_that_others_have_read():
    hosts, heard = Hosts(), list[Any]()
    hosts.store.claim("log/3", {"entry": 3})
    Line(hosts, 0, 0).ask(["wait", "log/4"], heard.append)
    Line(hosts, 0, 1).ask(["wait", "log/3"], heard.append)
    assert heard == [{"entry": 3}]
    assert hosts.wanted[0] == [4]


def test_reports_of_a_host_go_up_as_one_record():
    hosts = Hosts()
    for rank, channel in enumerate(hosts.channels):
        assert not hosts.channels[0].has_reports("0/plan", hosts.ranks)
        channel.at("0/").report("plan", rank, {"batch_size": 8, "dp_rank": rank})
    assert [hosts.store.asked["set", key] for key in ("0/plan@1", "0/plan@2")] == [1, 1]
    assert hosts.channels[0].has_reports("0/plan", hosts.ranks)
    found = hosts.channels[0].at("0/").reports("plan", hosts.ranks)
    assert found == {rank: {"batch_size": 8, "dp_rank": rank} for rank in hosts.ranks}
    hosts.channels[0].at("0/").forget("plan", hosts.ranks)
    assert [key for key in hosts.store.values if "plan" in key] == []


def test_a_report_does_not_wait_for_a_rank_that_does_not_come():
    hosts = Hosts()
    hosts.channels[3].report("row", 3, {"batches": 7})
    assert hosts.channels[0].reports("row", [3]) == {}
    hosts.later()
    assert hosts.channels[0].reports("row", hosts.ranks) == {3: {"batches": 7}}
    assert not hosts.channels[0].has_reports("row", [2, 3])
    hosts.channels[3].take_back("row", 3)
    hosts.later()
    assert not hosts.channels[0].has_reports("row", [3])


def test_what_a_rank_writes_next_comes_after_its_report():
    hosts = Hosts()
    hosts.channels[3].report("row", 3, {"batches": 7})
    hosts.channels[3].claim("log/0", {"rank": 3})
    assert hosts.channels[0].has_reports("row", [3])


def test_ranks_of_one_host_see_each_others_reports_at_once():
    hosts = Hosts()
    hosts.channels[1].report("told", 1, {"told": True})
    assert hosts.channels[0].has_reports("told", [1])
    assert hosts.store.of("told@1") == {}


def test_a_counter_goes_up_once_all_ranks_of_the_host_have_added():
    hosts = Hosts()
    first, second, third, fourth = hosts.channels
    assert first.count("even/3/0", 1) is None
    assert first.has("even/3/0")  # what is not there any more was agreed on by all
    assert third.count("even/3/0", 1) is None
    assert second.count("even/3/0", 1) == 2
    assert fourth.count("even/3/0", 1) == 4
    assert hosts.store.of("even/3/0") == {"add": 2}


def test_a_counter_does_not_wait_for_a_rank_that_has_left():
    hosts = Hosts()
    hosts.channels[0].count("passed/3", 1)
    hosts.voices[0].leave(1)
    assert hosts.store.add("passed/3", 0) == 1


def test_what_only_the_ranks_of_a_host_ask_for_stays_there():
    hosts = Hosts()
    assert [channel.add("host/a-1", 1) for channel in hosts.channels] == [1, 2, 1, 2]
    hosts.channels[0].set("host/a-1/1", {"rank": 0})
    assert hosts.channels[1].get_many(["host/a-1/1"]) == [{"rank": 0}]
    assert not hosts.channels[2].has("host/a-1/1")
    assert [key for key in hosts.store.values if key.startswith("host/")] == []


def test_an_answer_that_is_not_there_is_looked_for_once_for_all_ranks_of_a_host():
    hosts = Hosts()
    assert [channel.find("0/plan") for channel in hosts.channels[:2]] == [None, None]
    assert hosts.store.of("0/plan") == {"has": 1}
    hosts.store.set("0/plan", {"compared": 4})
    hosts.later()
    assert [channel.find("0/plan") for channel in hosts.channels[:2]] == [{"compared": 4}] * 2
    assert hosts.store.of("0/plan") == {"has": 2, "set": 1, "get": 1}


def test_the_longer_an_answer_is_missing_the_less_often_it_is_looked_for():
    """With thousands of hosts, the looks of all would keep the store busy while the last rank is awaited."""
    hosts, looks = Hosts(), list[int]()
    for _ in range(3):
        before = hosts.store.asked["has", "0/plan"]
        for _ in range(1000):
            assert hosts.channels[0].find("0/plan") is None
            hosts.now += 0.01
        looks.append(hosts.store.asked["has", "0/plan"] - before)
    assert 40 < looks[0] < 100
    assert looks[2] == 40  # every 0.25 s


def test_the_first_look_at_the_reports_of_many_hosts_finds_them_all():
    hosts = Hosts(20)
    for rank, channel in enumerate(hosts.channels):
        channel.report("rank", rank, {"name": "a"})
        channel.report("row", rank, {"batches": rank})
    assert hosts.channels[0].reports("row", hosts.ranks) == {rank: {"batches": rank} for rank in hosts.ranks}


def test_what_one_of_many_hosts_has_not_written_yet_is_found_with_few_requests():
    hosts = Hosts(256)
    there = [rank for rank in hosts.ranks if rank // 2 != 200]
    for rank in there:
        hosts.channels[rank].report("rank", rank, {"name": "a"})
        hosts.channels[rank].report("row", rank, {"batches": rank})
    hosts.later()
    hosts.store.asked.clear()
    assert list(hosts.channels[0].reports("row", hosts.ranks)) == there
    assert hosts.store.asked.total() < 60  # one by one, they would be more than 250


@pytest.mark.parametrize("expected", [1, 2], ids=["unknown number of ranks", "known number of ranks"])
def test_ranks_that_come_after_the_first_one_of_their_host_are_found(expected: int):
    """On every host the first rank may load what the others read then: all packs have one rank at first."""
    hosts = Hosts(20, expected=expected)
    for wave in (hosts.ranks[::2], hosts.ranks):
        for rank in wave:
            hosts.channels[rank].report("rank", rank, {"name": "a"})
            hosts.channels[rank].report("plan", rank, {"of": rank})
        hosts.later()
        assert hosts.channels[0].reports("plan", hosts.ranks) == {rank: {"of": rank} for rank in wave}
    hosts.store.asked.clear()
    hosts.channels[1].reports("plan", hosts.ranks)
    looks = hosts.store.asked.total()
    hosts.channels[1].reports("plan", hosts.ranks)
    assert hosts.store.asked.total() - looks == 2  # who has lost its voice since, and whether all packs are there


def test_ranks_of_a_second_launcher_on_a_host_are_found():
    """Each launcher tells its own ranks how many they are: here, four of the eight."""
    hosts = Hosts(20, 8, expected=4)
    waves = [rank for rank in hosts.ranks if rank % 8 < 4], [rank for rank in hosts.ranks if rank % 8 >= 4]
    for number, wave in enumerate(waves):
        for rank in wave:
            hosts.channels[rank].report("rank", rank, {"name": "a"})
            hosts.channels[rank].report("plan", rank, {"of": rank})
        hosts.later()
        there = sorted([*waves[0], *(waves[1] if number else ())])
        assert list(hosts.channels[0].reports("plan", hosts.ranks)) == there


def test_a_rank_that_asks_for_a_few_others_reads_no_list_of_those_that_have_fallen():
    """A verdict has the hosts of a few ranks in its table, and all ranks ask for these at once."""
    hosts = Hosts(32, 4)
    for rank, channel in enumerate(hosts.channels):
        channel.report("rank", rank, {"name": f"host {rank // 4}"})
    hosts.later()
    assert len(hosts.channels[3].reports("rank", [5, 9])) == 2
    hosts.lost |= set(range(32))
    for rank, channel in enumerate(hosts.channels):
        channel.report("row", rank, {"batches": rank})
    hosts.store.asked.clear()
    assert hosts.channels[3].reports("row", [5, 9]) == {5: {"batches": 5}, 9: {"batches": 9}}
    assert hosts.store.asked.total() < 8
    assert not any(key.startswith("fallen/") for _, asked in hosts.store.asked for key in asked.split())


def test_a_rank_that_has_fallen_is_not_looked_up():
    """Where many voices are lost at once, each rank reads a list of who has lost one."""
    hosts = Hosts(8, 4)
    for rank, channel in enumerate(hosts.channels):
        channel.report("rank", rank, {"name": "a"})
    hosts.later()
    assert len(hosts.channels[0].reports("rank", hosts.ranks)) == 32
    hosts.lost |= set(range(8))
    for rank, channel in enumerate(hosts.channels):
        channel.report("row", rank, {"batches": rank})
    hosts.store.asked.clear()
    assert len(hosts.channels[0].reports("row", hosts.ranks)) == 32
    assert hosts.store.asked.total() == 3  # the number of those that have fallen, whether their records are there


def test_a_rank_that_ends_before_it_has_told_that_it_has_fallen_hides_no_other_one():
    hosts = Hosts(2)
    for rank, channel in enumerate(hosts.channels):
        channel.report("rank", rank, {"name": "a"})
    hosts.later()
    assert len(hosts.channels[0].reports("rank", hosts.ranks)) == 4
    assert hosts.store.add("fallen", 1) == 1
    hosts.lost.add(1)
    hosts.channels[3].report("row", 3, {"batches": 3})
    for _ in range(2):
        assert hosts.channels[0].reports("row", [3]) == {3: {"batches": 3}}


def test_a_voice_that_reads_a_greeting_too_late_hides_no_rank():
    """The rank has given up and speaks for itself; its voice says later that it speaks for it."""
    hosts = Hosts(2)
    alone = VoicedChannel.alone(3, hosts.store)
    tell_fallen(hosts.store, 3)
    hosts.voices[1].leave(3)
    hosts.voices[1].join(3)
    assert hosts.store.get("via/3") == {"via": 0}
    alone.report("plan", 3, {"of": 3})
    assert hosts.channels[0].reports("plan", [3]) == {3: {"of": 3}}


def test_the_voice_of_another_rank_is_looked_up_once_for_all_ranks_of_a_host():
    hosts = Hosts(3)
    hosts.channels[0].report("rank", 0, {"name": "a"})
    hosts.later()
    for rank in (2, 3):
        hosts.channels[rank].report("rank", rank, {"name": "b"})
        assert hosts.channels[rank].reports("rank", [0, rank]) == {0: {"name": "a"}, rank: {"name": "b"}}
    assert hosts.store.of("via/0") == {"has": 1, "get": 1}
    assert hosts.store.of("via/2") | hosts.store.of("via/3") == {}
    hosts.lost.add(0)
    hosts.channels[0].report("rank", 0, {"name": "c"})
    assert [hosts.channels[rank].reports("rank", [0])[0]["name"] for rank in (2, 3, 4)] == ["c", "c", "c"]


def test_a_host_sends_one_heartbeat_and_names_the_ranks_that_send_none():
    hosts = Hosts()
    for beat in range(1, 8):
        for rank, channel in list(enumerate(hosts.channels))[1:]:
            if rank != 3 or beat < 3:
                channel.beat(rank, {"heartbeat": beat, "read": 10 + rank})
        hosts.later(1.0)
    found = hosts.channels[0].beats(range(1, 4), known=False)
    assert [(rank, each["read"], each["of"], each["still"]) for rank, each in found.items()] == [
        (1, 11, 1, []),
        (2, 12, 2, [3]),
    ]
    assert hosts.channels[0].is_still(3, -1)
    assert not hosts.channels[0].is_still(2, found[2]["heartbeat"] - 1)
    assert hosts.channels[0].is_still(2, found[2]["heartbeat"])


def test_the_heartbeat_of_a_rank_that_has_left_its_voice_counts_once():
    """Else all ranks would seem to send one, and entries would be removed that a late rank has yet to read."""
    hosts = Hosts()
    for rank in (2, 3):
        hosts.channels[rank].beat(rank, {"heartbeat": 1, "read": 5})
    hosts.later(1.0)
    hosts.paused.add(1)
    hosts.channels[3].beat(3, {"heartbeat": 2, "read": 6})
    found = hosts.channels[0].beats(range(1, 4), known=False)
    assert {rank: (each["read"], each.get("of", 1)) for rank, each in found.items()} == {2: (5, 1), 3: (6, 1)}


@pytest.mark.parametrize("hosts_of_job", [2, 8], ids=["few ranks", "many ranks"])
def test_the_heartbeats_of_ranks_that_have_fallen_are_read_and_not_those_of_their_voice(hosts_of_job: int):
    hosts = Hosts(hosts_of_job, 4)
    others = hosts.ranks[1:]
    for rank in hosts.ranks:
        hosts.channels[rank].report("rank", rank, {"name": "a"})
    for rank in others:
        hosts.channels[rank].beat(rank, {"heartbeat": 1, "read": 0})
    hosts.later(1.0)
    assert list(hosts.channels[0].beats(others, known=False)) == [1, *range(4, len(hosts.ranks), 4)]
    hosts.lost.add(1)
    for rank in others:
        hosts.channels[rank].beat(rank, {"heartbeat": 2, "read": 0})
    found = hosts.channels[0].beats(others, known=True)
    assert {rank: found[rank]["heartbeat"] for rank in (4, 5, 6, 7)} == dict.fromkeys((4, 5, 6, 7), 2)
    assert "of" not in found[4]


def test_a_voice_that_does_not_know_that_its_first_rank_is_alone_still_counts_for_the_others():
    """It has no word of the rank that has left it: only that its connection has ended."""
    hosts = Hosts(2, 3)
    for rank in (3, 4, 5):
        hosts.channels[rank].beat(rank, {"heartbeat": 1, "read": 5})
    hosts.later(1.0)
    tell_fallen(hosts.store, 3)
    VoicedChannel.alone(3, hosts.store).beat(3, {"heartbeat": 2, "read": 6})
    found = hosts.channels[0].beats(range(1, 6), known=False)
    assert {rank: (each["read"], each.get("of", 1)) for rank, each in found.items()} == {3: (6, 1), 4: (5, 2)}


def test_ranks_of_a_host_look_at_the_first_ranks_heartbeat_once():
    hosts = Hosts()
    assert hosts.channels[2].first_beat(0, 0.5, known=False) is None
    hosts.store.set("heartbeat/0", {"heartbeat": 1, "read": 0})
    assert [hosts.channels[rank].first_beat(0, 0.5, known=False) for rank in (2, 3)] == [
        ({"heartbeat": 1, "read": 0}, 0.0)
    ] * 2
    assert hosts.store.of("heartbeat/0")["get"] == 1
    hosts.store.set("heartbeat/0", {"heartbeat": 2, "read": 0})
    hosts.later(0.25)
    assert hosts.channels[3].first_beat(0, 0.5, known=False) == ({"heartbeat": 1, "read": 0}, 0.25)
    assert hosts.channels[3].first_beat(0, 0.125, known=False) == ({"heartbeat": 2, "read": 0}, 0.0)


def test_reports_that_nobody_removes_are_kept_and_others_are_not():
    """Of ranks that take part it matters for as long as the fit lasts, of spans until they are gathered."""
    hosts = Hosts()
    for rank, channel in enumerate(hosts.channels):
        channel.report("joined", rank, {"joined": True})
    for span in range(400):
        for rank, channel in enumerate(hosts.channels):
            channel.report(f"span/{span}", rank, {"closed": 1.0})
        hosts.channels[0].forget(f"span/{span}", hosts.ranks)
    assert hosts.store.of("joined@2")["has"] > 0  # it was the oldest one
    hosts.channels[2].take_back("joined", 2)
    hosts.later()
    assert hosts.channels[0].reports("joined", [2, 3]) == {3: {"joined": True}}
    assert Line(hosts, 1, 2).ask(["held", "span/3"]) == {}


def test_a_voice_that_follows_another_one_of_its_host_knows_what_that_has_written():
    hosts = Hosts()
    for rank, channel in enumerate(hosts.channels):
        channel.report("rank", rank, {"name": "a"})
    hosts.voices[1] = Voice(hosts.store, 2, hosts.wanted[1].append, every=1.0, follows=True, clock=lambda: hosts.now)
    for rank in (2, 3):
        hosts.voices[1].join(rank)
    assert hosts.channels[2].reports("rank", [3]) == {3: {"name": "a"}}
    hosts.channels[3].report("rank", 3, {"name": "b"})
    hosts.later()
    assert hosts.channels[0].reports("rank", [2, 3]) == {2: {"name": "a"}, 3: {"name": "b"}}


def test_a_rank_that_has_lost_its_voice_speaks_for_itself():
    hosts = Hosts(3)
    for rank, channel in enumerate(hosts.channels):
        channel.report("rank", rank, {"name": "a"})
        channel.report("joined", rank, {"joined": True})
    assert hosts.channels[0].has_reports("joined", hosts.ranks)
    hosts.lost.add(1)
    hosts.channels[3].report("row", 3, {"batches": 3})
    hosts.channels[5].report("row", 5, {"batches": 5})
    hosts.later()
    assert hosts.channels[0].reports("row", [3, 5]) == {3: {"batches": 3}, 5: {"batches": 5}}
    hosts.channels[3].take_back("joined", 3)  # its voice has said that it takes part, and cannot take that back
    assert hosts.channels[0].reports("joined", [2, 3]) == {2: {"joined": True}}
    hosts.channels[3].beat(3, {"heartbeat": 1, "read": 4})
    assert hosts.channels[0].beats(range(1, 6), known=False)[3] == {"heartbeat": 1, "read": 4}


def test_a_signal_is_known_though_the_voice_ends_with_it():
    """All ranks get it at once, and a rank that was only told to end must not look lost."""
    hosts = Hosts()
    for rank, channel in enumerate(hosts.channels):
        begin_fit(channel, rank)
    announce_signal(hosts.channels[2], 2)
    hosts.lost.add(1)
    assert takes_part(hosts.channels[3], 2)
    assert has_signal(hosts.channels[3], 2)


def test_a_rank_that_has_lost_its_voice_still_takes_part_after_many_reports():
    hosts = Hosts()
    for rank, channel in enumerate(hosts.channels):
        channel.report("rank", rank, {"name": "a"})
        begin_fit(channel.at("0/"), rank)
        for epoch in range(40):
            channel.at("0/").report(f"span/{epoch}", rank, {"closed": 1.0})
    hosts.lost.add(1)
    hosts.channels[3].report("span/40", 3, {"closed": 1.0})
    assert takes_part(hosts.channels[0].at("0/"), 3)
    assert hosts.store.has("rank/3")
    assert not hosts.store.has("0/span/3/3")  # it was gathered long ago


def test_ranks_with_and_without_a_voice_see_each_others_reports():
    """A host may have one rank, or its voice may be out of reach for some."""
    hosts = Hosts()
    lonely = [VoicedChannel.alone(rank, hosts.store) for rank in (4, 5)]
    channels = [*hosts.channels, *lonely]
    for rank, channel in enumerate(channels):
        begin_fit(channel, rank)
        channel.report("plan", rank, {"of": rank})
    hosts.later()
    for channel in channels:
        assert channel.reports("plan", range(6)) == {rank: {"of": rank} for rank in range(6)}
        assert all(takes_part(channel, rank) for rank in range(6))


def test_a_count_that_may_have_been_lost_is_not_repeated():
    """Twice would say that a rank has a batch which it has not."""
    hosts = Hosts()
    hosts.lost.add(0)
    assert hosts.channels[0].count("even/3/0", 1) is None
    assert hosts.store.add("even/3/0", 0) == 0
    assert hosts.channels[0].count("even/3/1", 1) is None  # a grant must not come before the one that it follows
    assert hosts.store.add("even/3/1", 0) == 0


def test_a_count_that_was_not_done_is_done_once_the_voice_is_known_to_be_over():
    """It answers each request in its turn: what it has not answered before it closes the connection is not done."""
    hosts = Hosts(1)
    first, last = hosts.channels
    hosts.paused.add(0)
    assert [channel.count(key, 1) for channel in (first, last) for key in ("even/3/0", "even/3/1")] == [None] * 4
    assert first.late_counts() == last.late_counts() == {}
    hosts.lost.add(0)
    sums = [channel.late_counts() for channel in (first, last, first, last)]
    assert sums == [{"even/3/0": 1}, {"even/3/0": 2}, {"even/3/1": 1}, {"even/3/1": 2}]


def test_a_mark_is_not_agreed_on_as_long_as_a_lost_voice_may_hold_what_was_added():
    """A key that is not in the store means that all ranks agree, unless it has not come there yet."""
    hosts = Hosts(1)
    first, last = hosts.channels
    assert first.count("agreed/0", 1) is None
    assert first.has("agreed/0")
    hosts.paused.add(0)
    assert last.count("agreed/0", 1) is None
    for channel in (first, last):
        assert not channel.has("log/0")
        assert channel.has("agreed/0")
    hosts.paused.clear()
    assert last.late_counts() == {"agreed/0": 2}
    last.delete("agreed/0")
    assert not last.has("agreed/0")


def test_what_only_a_host_reads_is_for_its_ranks_without_a_voice_too():
    hosts = Hosts(1)
    staying, leaving = hosts.channels
    assert [channel.add("host/a-1", 1) for channel in hosts.channels] == [1, 2]
    for number, channel in enumerate(hosts.channels):
        channel.set(f"host/a-1/{number}", {"pid": number})
    staying.set("lifeline/0", {"stands": True})
    assert not hosts.store.has("host/a-1")
    hosts.paused.add(0)
    assert not leaving.has("log/0")
    hosts.paused.clear()
    assert leaving.late_counts() == {}
    assert leaving.get_many(["host/a-1/0", "host/a-1/1", "lifeline/0"]) == [{"pid": 0}, {"pid": 1}, {"stands": True}]
    staying.set("lifeline/0", {"stands": False})
    assert (leaving.add("host/a-1", 0), leaving.get("lifeline/0")) == (2, {"stands": False})
    assert staying.add("host/a-1", 1) == leaving.add("host/a-1", 0) == 3


def test_a_count_under_way_is_known_once_the_voice_goes_on():
    """The last rank of a host adds while its voice is paused: nobody else would learn that all have added."""
    hosts = Hosts(1)
    first, last = hosts.channels
    assert first.count("even/3/0", 1) is None
    hosts.paused.add(0)
    assert last.count("even/3/0", 1) is None
    assert last.late_counts() == {}
    assert last.count("even/3/1", 1) is None  # a grant must not come before the one that it follows
    hosts.paused.clear()
    assert last.late_counts() == {"even/3/0": 2}
    assert last.late_counts() == {"even/3/1": 1}
    assert last.late_counts() == {}
    assert first.count("even/3/1", 1) == 2  # its host does not wait for the rank that speaks for itself


def test_a_rank_that_goes_alone_learns_of_counts_that_waited_for_it():
    hosts = Hosts(1)
    first, last = hosts.channels
    assert first.count("even/3/0", 1) is None
    hosts.paused.add(0)
    assert last.add("hosts", 1) == 1
    assert last.count("even/3/0", 1) == 1  # what the first one has added is still with the voice
    hosts.paused.clear()
    assert last.late_counts() == {"even/3/0": 2}


def test_both_threads_of_a_rank_lose_its_voice_at_once():
    hosts = Hosts(2)
    lost = threading.Event()
    speaking = VoicedChannel(Way(Line(hosts, 1, 3), 3, 2, ("a", "b"), lambda: hosts.store, lost=lost))
    listening = VoicedChannel(Way(Line(hosts, 1, 3), 3, 2, ("a", "b"), lambda: hosts.store, tells=False, lost=lost))
    speaking.report("joined", 3, {"joined": True})
    hosts.later()
    hosts.paused.add(1)
    assert not listening.has("log/0")
    assert takes_part(hosts.channels[0], 3)  # others see it where it was until it has told that all again
    hosts.paused.clear()
    speaking.report("row", 3, {"batches": 3})
    assert takes_part(hosts.channels[0], 3)
    assert hosts.store.has("joined/3", "row/3")


def test_a_record_that_is_too_long_is_refused_where_it_is_written():
    hosts = Hosts()
    for write in (hosts.channels[0].report, lambda name, _, record: hosts.channels[0].set(name, record)):
        with pytest.raises(ChannelError, match="at most 1024 bytes"):
            write("row", 0, {"text": "x" * 2000})


@given(st.dictionaries(st.integers(0, 99), records, min_size=1, max_size=5))
def test_a_pack_has_what_was_packed(each: dict[int, dict[str, Any]]):
    assert unpack(pack(each)) == each


@pytest.mark.parametrize(
    "record",
    [{}, {"same": {}}, {"same": [], "each": {}}, {"same": {}, "each": {"x": {}}}, {"same": {}, "each": {"1": 2}}],
)
def test_what_is_no_pack_is_refused(record: dict[str, Any]):
    with pytest.raises((KeyError, TypeError, ValueError)):
        unpack(record)


def losing(draw: Any, job: Job) -> Job:
    """The job on hosts of several ranks, some of which lose their voice at some time."""
    per_host = draw(st.sampled_from([2, 4, 8]))
    places = st.integers(0, -(-len(job.programs) // per_host) - 1)
    lost = draw(st.dictionaries(places, st.integers(0, 400), min_size=1, max_size=3))
    return dataclasses.replace(job, per_host=per_host, voices_lost=lost)


def pausing(draw: Any, job: Job) -> Job:
    """The job on hosts of several ranks, of which some voices answer nothing for a while, and then go on."""
    job = losing(draw, job)
    return dataclasses.replace(job, voices_lost={}, voices_paused=job.voices_lost)


UNEVEN = (
    st.data(),
    st.lists(st.integers(1, 17), min_size=2, max_size=16),
    st.sampled_from(["stop", "repeat"]),
    st.sampled_from([1, 2, 4]),
    seeds,
)
"""Batches of each rank, the policy, and how far ranks look ahead."""


@examples(40)
@given(st.data(), jobs(), seeds)
def test_a_job_whose_voices_pause_is_healthy(data: Any, healthy: Job, seed: int):
    assert_silent(play(pausing(data.draw, healthy), seed))


@examples(100)
@given(*UNEVEN)
def test_uneven_ranks_take_as_many_batches_where_voices_pause(
    data: Any, lengths: Any, policy: str, lookahead: int, seed: int
):
    """No credit is lost, and none counts twice."""
    total = min(lengths) if policy == "stop" else max(lengths)
    for rank in play(pausing(data.draw, job([lengths], policy, lookahead, synced=True)), seed):
        assert rank.state.end is None
        assert rank.taken == [[batch % lengths[rank.state.rank] for batch in range(total)]]


@examples(10)
@given(st.data(), st.integers(17, 64), st.sampled_from(["stop", "repeat"]), seeds)
def test_many_uneven_ranks_take_as_many_batches_where_voices_pause(data: Any, size: int, policy: str, seed: int):
    """Up to 64 ranks on 3 to 32 hosts."""
    lengths = [data.draw(st.integers(1, 6)) for _ in range(size)]
    total = min(lengths) if policy == "stop" else max(lengths)
    for rank in play(pausing(data.draw, job([lengths], policy, 2, synced=True)), seed):
        assert rank.state.end is None
        assert rank.taken == [[batch % lengths[rank.state.rank] for batch in range(total)]]


@examples(40)
@given(st.data(), jobs(), seeds)
def test_a_job_that_loses_voices_is_healthy(data: Any, healthy: Job, seed: int):
    assert_silent(play(losing(data.draw, healthy), seed))


@examples(40)
@given(st.data(), faults(other_length), seeds)
def test_ranks_that_differ_are_found_where_voices_are_lost(data: Any, fault: Fault, seed: int):
    if not has_other_batches(fault):
        return
    ranks = play(losing(data.draw, fault.job), seed)
    verdict = ranks[0].guard.verdict
    assert verdict is not None
    assert [rank.guard.verdict for rank in ranks] == [verdict] * len(ranks)


@examples(40)
@given(*UNEVEN)
def test_no_rank_takes_a_batch_too_many_where_voices_are_lost(
    data: Any, lengths: Any, policy: str, lookahead: int, seed: int
):
    """Credits may be lost with a voice, and then its host's ranks are not there either. None counts twice."""
    total = min(lengths) if policy == "stop" else max(lengths)
    for rank in play(losing(data.draw, job([lengths], policy, lookahead, synced=True)), seed):
        taken = rank.taken[0] if rank.taken else []
        assert rank.state.end is None
        assert taken == [batch % lengths[rank.state.rank] for batch in range(len(taken))]
        assert len(taken) <= total
