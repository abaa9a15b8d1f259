"""The file for Perfetto, read back by the schema of Perfetto's own package, and by the rules that Perfetto has."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from countoff.report.perfetto import write_perfetto
from countoff.report.reader import read
from tests import example_traces
from tests.example_traces import BEGAN, HOSTILE, RankWriter
from tests.tools.report.test_cli_report import call

Event = schema.TrackEvent.Type


@dataclass
class Slice:
    begin: float
    end: float
    name: str
    category: str
    depth: int
    facts: dict[str, Any]


@dataclass
class Track:
    """One track; times are in seconds since the job began."""

    descriptor: Any
    slices: list[Slice] = field(default_factory=list)
    instants: list[tuple[float, str, str, dict[str, Any]]] = field(default_factory=list)
    counts: list[tuple[float, float]] = field(default_factory=list)


def write(directory: Path) -> dict[str, Track]:
    """Writes the file for a directory's trace, and reads it back."""
    path = directory / "job.pftrace"
    write_perfetto(read([str(directory)]), str(path))
    return load(path)


def load(path: Path) -> dict[str, Track]:
    """The tracks of a file, by their names and those of the tracks around them. Checks what Perfetto asks for."""
    trace = schema.Trace.FromString(path.read_bytes())
    tracks: dict[int, Track] = {}
    names: dict[int, str] = {}
    open_slices: dict[int, list[Slice]] = {}
    last: dict[int, int] = {}
    for packet in trace.packet:
        assert len(UnknownFieldSet(packet)) == 0
        assert packet.trusted_packet_sequence_id > 0
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            assert descriptor.uuid not in tracks
            assert not descriptor.parent_uuid or descriptor.parent_uuid in tracks
            parent = f"{names[descriptor.parent_uuid]}/" if descriptor.parent_uuid else ""
            names[descriptor.uuid] = f"{parent}{descriptor.name}"
            tracks[descriptor.uuid] = Track(descriptor)
        elif packet.HasField("track_event"):
            take(packet, tracks[packet.track_event.track_uuid], open_slices, last)
        else:
            (first, second) = packet.clock_snapshot.clocks
            assert (first.clock_id, second.clock_id, first.timestamp) == (6, 1, second.timestamp)
    assert not any(open_slices.values()), "a slice has no end"
    assert len(set(names.values())) == len(names)
    return {names[uuid]: track for uuid, track in tracks.items()}


def take(packet: Any, track: Track, open_slices: dict[int, list[Slice]], last: dict[int, int]) -> None:
    event = packet.track_event
    uuid = event.track_uuid
    assert 0 <= packet.timestamp < 1 << 63
    time = round(packet.timestamp / 1e9 - BEGAN, 3)
    facts = {each.name: getattr(each, str(each.WhichOneof("value"))) for each in event.debug_annotations}
    assert (event.type == Event.TYPE_COUNTER) == track.descriptor.HasField("counter")
    if event.type == Event.TYPE_INSTANT:
        track.instants.append((time, event.name, event.categories[0], facts))
        return
    assert packet.timestamp >= last.get(uuid, 0)
    last[uuid] = packet.timestamp
    if event.type == Event.TYPE_COUNTER:
        track.counts.append((time, event.double_counter_value))
    elif event.type == Event.TYPE_SLICE_BEGIN:
        around = open_slices.setdefault(uuid, [])
        around.append(Slice(time, 0.0, event.name, event.categories[0], len(around), facts))
        track.slices.append(around[-1])
    else:
        assert event.type == Event.TYPE_SLICE_END
        open_slices[uuid].pop().end = time


def test_a_host_is_a_process_and_a_rank_is_a_track(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=12, epochs=2, hosts=3)
    tracks = write(tmp_path)
    hosts = {name: track for name, track in tracks.items() if track.descriptor.HasField("process")}
    assert list(hosts) == ["node0", "node1", "node2"]
    pids = [track.descriptor.process.pid for track in hosts.values()]
    assert len(set(pids)) == 3
    assert min(pids) > 4_194_303  # the largest that Linux gives a process
    assert [name for name in tracks if name.startswith("node1/") and name.count("/") == 1] == [
        f"node1/rank {rank:02}" for rank in range(4, 8)
    ]
    assert next(iter(tracks)) == "countoff"


def test_epochs_and_evaluations_are_slices_with_their_counts(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=1, epochs=2)
    first, inside, second, _ = write(tmp_path)["node0/rank 0"].slices
    assert (first.begin, first.end, first.name, first.category, first.depth) == (0, 70, "train epoch 0", "train", 0)
    assert first.facts == {
        "batches": 120,
        "steps": 120,
        "seconds waiting for the loader": 1.2,
        "closed": "exhausted",
    }
    assert (inside.begin, inside.end, inside.category, inside.depth) == (60, 70, "evaluation", 1)
    assert (second.begin, second.end, second.name) == (70, 140, "train epoch 1")


def test_rates_and_learning_rates_are_counters(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    writer.tick(5, 10, lr=[0.1, 0.01])
    writer.tick(5, 20)
    writer.tick(5, 20, lr=[0.2, 0.01])
    writer.save()
    tracks = write(tmp_path)
    rate = tracks["node0/rank 0/batches per second"]
    assert rate.counts == [(0, 2), (5, 4), (15, 0)]
    assert rate.descriptor.counter.unit_name == "batches/s"
    assert tracks["node0/rank 0/learning rate 0"].counts == [(5, 0.1), (15, 0.2)]
    assert tracks["node0/rank 0/learning rate 1"].counts == [(5, 0.01)]


def test_waiting_for_the_loader_adds_up(tmp_path: Path) -> None:
    """Each wait is a slice from the tick before it on; when in between the rank waited is not known."""
    example_traces.healthy(tmp_path, ranks=2, loader={1: 0.5})
    tracks = write(tmp_path)
    waits = tracks["node0/rank 1/waiting for the loader"].slices
    assert (waits[1].begin, waits[1].end, waits[1].facts) == (5, 7.5, {"seconds": 2.5, "of": 5.0})
    assert sum(wait.facts["seconds"] for wait in waits) == pytest.approx(3 * 12 * 2.5)


def test_waits_in_an_evaluation_are_in_the_order_of_time(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    writer.tick(5, 10, loader=1)
    writer.open("evaluation", eval=True)
    writer.tick(5, 10, loader=2)
    writer.close("evaluation")
    writer.batches, writer.loader = 10, 1.0
    writer.tick(5, 10, loader=4)
    writer.tick(5, 10, loader=1)
    writer.save()
    waits = write(tmp_path)["node0/rank 0/waiting for the loader"].slices
    assert [(wait.begin, wait.facts["seconds"]) for wait in waits] == [(0, 1), (5, 4), (5, 2), (15, 1)]


def test_pauses_stacks_warnings_and_the_verdict_are_there(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path)
    writer = RankWriter(tmp_path, begin=None)
    writer.time += 20
    writer.line("warning", verdict=example_traces.verdict("WrongLength", sentence="It is wrong.", time=writer.time))
    writer.save()
    tracks = write(tmp_path)
    (pause,) = tracks["node0/rank 1/pauses"].slices
    assert (pause.begin, pause.end, pause.name, pause.category) == (50, 59, "waits in a collective", "pause")
    assert pause.facts == {"frames": "distributed_c10d.py:2500 in all_reduce\ntrain.py:41 in step"}
    warning, verdict = tracks["countoff"].instants
    assert warning[:3] == (20, "WrongLength: It is wrong.", "warning")
    assert (verdict[0], verdict[2], verdict[3]["do"], verdict[3]["ranks"]) == (
        60,
        "verdict",
        "Cut the data evenly.\nStop together.",
        "2",
    )
    assert verdict[1].startswith("UnevenBatches: rank 2 ran out of data")
    assert "rank       where          batches" in verdict[3]["message"]
    stack, ending = tracks["node0/rank 2"].instants
    assert (stack[1], stack[3], ending[1]) == (
        "stack: code",
        {"frames": "train.py:60 in main"},
        "end: verdict",
    )


def test_an_epoch_that_was_never_closed_ends_with_the_last_line(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    writer.tick(5, 10)
    writer.save()
    (only,) = write(tmp_path)["node0/rank 0"].slices
    assert (only.end, only.facts["closed"]) == (5, "no")


def test_times_are_those_since_the_epoch_in_nanoseconds(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=1)
    write(tmp_path)
    trace = schema.Trace.FromString((tmp_path / "job.pftrace").read_bytes())
    assert next(each.timestamp for each in trace.packet if each.timestamp) == int(BEGAN) * 1_000_000_000


def test_each_run_has_processes_of_its_own(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=2, epochs=1)
    writer = RankWriter(tmp_path, 0, 1, begin=None)
    writer.time += 600
    writer.line("begin", v=1, rank=0, world=1, host="node0", pid=77)
    writer.open("train epoch 0")
    writer.tick(5, 10)
    writer.save()
    tracks = write(tmp_path)
    assert {name.partition("/")[0] for name in tracks} == {
        "run 1: countoff", "run 1: node0", "run 2: countoff", "run 2: node0",
    }  # fmt: skip
    (only,) = tracks["run 2: node0/rank 0"].slices
    assert (only.begin, only.end) == (600, 605)


def test_tracks_of_two_files_differ(tmp_path: Path) -> None:
    """Perfetto can open several files at once."""
    numbers: list[set[int]] = []
    for name in ("one", "two"):
        example_traces.healthy(tmp_path / name, ranks=2)
        numbers.append({track.descriptor.uuid for track in write(tmp_path / name).values()})
    assert not numbers[0] & numbers[1]


def test_lines_that_contradict_each_other_still_give_a_file(tmp_path: Path) -> None:
    """Spans that overlap, times that go back, and a clock that is centuries off: slices stay inside of each other."""
    writer = RankWriter(tmp_path)
    for name in ("a", "b", "c"):
        writer.open(name)
        writer.tick(5, 10, loader=7.0, lr=[0.1])
    for name in ("a", "c", "b"):
        writer.time -= 3
        writer.close(name)
    writer.line("pause", s=30.0, **{"in": "code"}, at=[])
    writer.time += 10
    writer.line("pause", s=30.0, **{"in": "loader"}, at=[])
    writer.line("warning", verdict=example_traces.verdict("SameOrder", time=-1e12))
    writer.line("verdict", verdict=example_traces.verdict(time=1e15))
    writer.line("clock", ahead=3e10, error=0.1)
    writer.save()
    tracks = write(tmp_path)
    assert [each.name for each in tracks["node0/rank 0"].slices] == ["a", "b", "c"]
    assert len(tracks["node0/rank 0/pauses"].slices) == 2


def test_hostile_texts_are_texts(tmp_path: Path) -> None:
    for rank, text in enumerate(HOSTILE):
        writer = RankWriter(tmp_path, rank, len(HOSTILE), begin={"host": text})
        writer.open(text)
        writer.tick(5, 10)
        writer.line("stacks", state=text, frames=[text])
        writer.save()
    names = [track.slices[0].name for name, track in write(tmp_path).items() if name.count("/rank ") and track.slices]
    assert len(names) == len(HOSTILE)
    assert all(name.isprintable() for name in names)


def test_the_command_writes_the_file_and_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example_traces.healthy(tmp_path / "trace", ranks=2)
    assert call(capsys, "trace", "--perfetto", "job.pftrace") == (
        0,
        "finished: 3 epochs, 2 ranks, 3 min 30 s\nwrote job.pftrace; open it at https://ui.perfetto.dev\n",
        "",
    )
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["job.pftrace"]
    assert "node0/rank 1" in load(tmp_path / "job.pftrace")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_traces.healthy(tmp_path, ranks=1)
    code, _, errors = call(capsys, tmp_path, "--perfetto", tmp_path / "no" / "x")
    assert (code, errors) == (2, f"countoff: {tmp_path}/no/x cannot be written: No such file or directory\n")


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example_traces.healthy(tmp_path, ranks=1)
    monkeypatch.delitem(sys.modules, "countoff.report.perfetto")
    for name in [name for name in sys.modules if name.partition(".")[0] == "perfetto"]:
        monkeypatch.setitem(sys.modules, name, None)  # pyright: ignore[reportArgumentType]
    code, _, errors = call(capsys, tmp_path, "--perfetto", tmp_path / "x")
    assert (code, errors) == (1, "countoff: --perfetto needs Perfetto's package: pip install 'countoff[perfetto]'\n")
    assert not (tmp_path / "x").exists()


def test_a_record_of_every_kind_can_be_written(tmp_path: Path) -> None:
    """What the reader accepts, the file can hold."""
    from tests.tools.report.test_trace_reader import GARBAGE, KINDS

    for index, value in enumerate(GARBAGE):
        lines: list[str] = []
        for kind, fields in KINDS.items():
            for name in fields:
                record = {"k": kind, "t": BEGAN + len(lines), **fields, name: value}
                lines.append(json.dumps(record))
        (tmp_path / f"rank-{index:05}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    assert len(write(tmp_path)) > len(GARBAGE)
