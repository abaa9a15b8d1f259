"""A trace in the format of Perfetto (ui.perfetto.dev), so that it can be looked at there, and queried with SQL.

Written as protobuf with Perfetto's own package, not as the JSON of chrome://tracing, which Perfetto calls the legacy
one: there a counter belongs to a process, not to a track, times are fractions of microseconds, and the file is five
times as large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import IO, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from countoff.core.messages import plain
from countoff.core.verdict import Verdict
from countoff.report.model import Fit, Pause, Run, Span, Trace, Value

__all__ = ["write_perfetto"]

_BATCH = 10_000
"""Packets that are encoded at once."""
_RATES = 8
"""Parameter groups whose learning rates have a counter."""
_FIRST_PID = 1 << 22
"""No kernel gives a process such a number, so a host is never mistaken for a process of a profiler's trace."""
_BOOT_CLOCK, _REAL_CLOCK = 6, 1
"""Numbers of clocks in the format. Its times are those since the last boot unless another clock is named."""
_LAST = (1 << 63) - 1
"""The latest time in nanoseconds that Perfetto reads."""
_LEAST_SHARE = 0.001
"""A shorter wait for the loader, as a share of the time from tick to tick, has no slice."""
_PLACES = {"loader": "waits for the loader", "collective": "waits in a collective", "code": "no batch: other code"}


def write_perfetto(trace: Trace, path: str) -> None:
    """Writes a trace as a file for Perfetto.

    It has a process for each host of a run, and in it a track for each rank: its train epochs and evaluations. Below
    are its pauses, the seconds that it waited for its loader, batches per second and learning rates. Warnings,
    verdicts and stacks are instants.

    Args:
        trace: What was read.
        path: The file; it is replaced if it exists.

    Raises:
        ValueError: If it cannot be written; the message is one line.
    """
    try:
        with open(path, "wb") as file:
            writer = _Writer(file, key=f"{trace.directories} {[run.begin for run in trace.runs]}")
            for number, run in enumerate(trace.runs, start=1):
                _write_run(writer, run, f"run {number}: " if len(trace.runs) > 1 else "")
            writer.flush()
    except OSError as error:
        raise ValueError(f"{plain(path)} cannot be written: {error.strerror or type(error).__name__}") from None


class _Writer:
    """Encodes packets and writes them.

    Args:
        file: Where to.
        key: A text that no other trace has: tracks of files that are opened together must differ.
    """

    def __init__(self, file: IO[bytes], key: str) -> None:
        self._file = file
        self._builder = TraceProtoBuilder()
        self._packets = 0
        digest = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest(), "big")
        self._sequence = digest >> 32 or 1
        self._next_track = digest >> 24 << 24 | 1
        self._next_pid = _FIRST_PID
        self._clocks_are_known = False

    def flush(self) -> None:
        """Writes what is not written yet. Pieces of a trace are a trace."""
        self._file.write(self._builder.serialize())
        self._builder = TraceProtoBuilder()
        self._packets = 0

    def packet(self) -> TracePacket:
        """Adds a packet."""
        if self._packets >= _BATCH:
            self.flush()
        self._packets += 1
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = self._sequence
        return packet

    def track(self, name: str, *, parent: int = 0, order: int = 0) -> int:
        """Adds a track for slices and instants, and returns its number."""
        return self._described(name, parent, order).uuid

    def host(self, name: str) -> int:
        """Adds a process that stands for a host."""
        track = self._described(name, 0, 0)
        track.process.pid = self._next_pid
        track.process.process_name = name
        track.child_ordering = TrackDescriptor.ChildTracksOrdering.EXPLICIT
        self._next_pid += 1
        return track.uuid

    def counter(self, name: str, unit: str, parent: int) -> int:
        """Adds a track for one number over time."""
        track = self._described(name, parent, 0)
        track.counter.unit_name = unit  # empty: a counter without a unit
        return track.uuid

    def _described(self, name: str, parent: int, order: int) -> TrackDescriptor:
        track = self.packet().track_descriptor
        track.uuid = self._next_track
        self._next_track += 1
        track.name = name
        if parent:
            track.parent_uuid = parent
        track.child_ordering = TrackDescriptor.ChildTracksOrdering.EXPLICIT
        track.sibling_order_rank = order
        return track

    def begin(self, track: int, time: float, name: str, category: str, facts: Mapping[str, Value]) -> None:
        """Begins a slice inside of those that are open on this track."""
        event = self._event(track, time, TrackEvent.Type.TYPE_SLICE_BEGIN)
        event.name = name
        event.categories.append(category)
        _annotate(event, facts)

    def end(self, track: int, time: float) -> None:
        """Ends the slice that has begun last."""
        self._event(track, time, TrackEvent.Type.TYPE_SLICE_END)

    def instant(self, track: int, time: float, name: str, category: str, facts: Mapping[str, Value]) -> None:
        """Adds a moment."""
        event = self._event(track, time, TrackEvent.Type.TYPE_INSTANT)
        event.name = name
        event.categories.append(category)
        _annotate(event, facts)

    def count(self, track: int, time: float, value: float) -> None:
        """Sets a counter from this moment on."""
        self._event(track, time, TrackEvent.Type.TYPE_COUNTER).double_counter_value = value

    def _event(self, track: int, time: float, kind: TrackEvent.Type) -> TrackEvent:
        nanoseconds = _nanoseconds(time)
        if not self._clocks_are_known:  # so that Perfetto can show the date and the time of day
            self._clocks_are_known = True
            clocks = self.packet().clock_snapshot.clocks
            for clock in (_BOOT_CLOCK, _REAL_CLOCK):
                clocks.add(clock_id=clock, timestamp=nanoseconds)
        packet = self.packet()
        packet.timestamp = nanoseconds
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event


def _annotate(event: TrackEvent, facts: Mapping[str, Value]) -> None:
    for name, value in facts.items():
        if value is None or value == "":
            continue
        note = event.debug_annotations.add(name=name)
        if isinstance(value, bool):
            note.bool_value = value
        elif isinstance(value, int):
            note.int_value = value
        elif isinstance(value, float):
            note.double_value = value
        else:
            note.string_value = value


def _nanoseconds(time: float) -> int:
    return min(_LAST, max(0, round(time * 1e6) * 1000))


def _write_run(writer: _Writer, run: Run, prefix: str) -> None:
    events = writer.track(f"{prefix}countoff")
    found = run.warnings + ([run.verdict] if run.verdict else [])
    for verdict in sorted(found, key=lambda each: each.time):
        time = verdict.time or run.end
        writer.instant(
            events, time, verdict.headline, "verdict" if verdict is run.verdict else "warning", _said(verdict)
        )
    hosts: dict[str, int] = {}
    width = len(str(max(run.fits, default=0)))
    for rank, fit in run.fits.items():
        host = fit.host or "host not known"
        if host not in hosts:
            hosts[host] = writer.host(f"{prefix}{host}")
        # Padded, because Perfetto sorts tracks of a process by name where it does not heed their order.
        _write_fit(writer, fit, writer.track(f"rank {rank:0{width}}", parent=hosts[host], order=rank))


def _said(verdict: Verdict) -> dict[str, Value]:
    return {
        "why": verdict.why,
        "do": verdict.remedy,
        "ranks": ", ".join(map(str, verdict.ranks)),
        "message": verdict.render(),
    }


def _write_fit(writer: _Writer, fit: Fit, track: int) -> None:
    """Writes what one rank has recorded."""
    _write_slices(writer, track, (_of_span(fit, span) for span in fit.spans))
    for stack in fit.stacks:
        frames = {"frames": "\n".join(stack.frames)}
        writer.instant(track, stack.time, f"stack: {stack.state}", "stack", frames)
    if fit.ending is not None:
        writer.instant(track, fit.ending.time, f"end: {fit.ending.how}", "end", {"what": fit.ending.what})
    if fit.pauses:
        _write_slices(writer, writer.track("pauses", parent=track, order=1), map(_of_pause, fit.pauses))
    if waits := list(_waits(fit)):
        _write_slices(writer, writer.track("waiting for the loader", parent=track, order=2), waits)
    _write_counters(writer, fit, track)


class Slice(NamedTuple):
    """A part of a track, with what Perfetto shows of it."""

    begin: float
    end: float
    name: str
    category: str
    facts: dict[str, Value]


def _of_span(fit: Fit, span: Span) -> Slice:
    end = fit.last if span.end is None else span.end
    facts: dict[str, Value] = {
        "batches": span.batches,
        "batches before a resume": span.before or None,
        "steps": span.steps,
        "seconds waiting for the loader": span.loader_seconds,
        "unused batches": span.unused or None,
        "closed": span.why or "no",
    }
    return Slice(span.begin, end, span.name, "evaluation" if span.is_evaluation else "train", facts)


def _of_pause(pause: Pause) -> Slice:
    end = pause.begin + pause.seconds
    return Slice(pause.begin, end, _PLACES[pause.where], "pause", {"frames": "\n".join(pause.frames)})


def _waits(fit: Fit) -> Iterator[Slice]:
    """How long the rank waited for its loader from each tick to the next. When in this time is not known."""
    for span in fit.spans:
        for before, now in pairwise(span.points):
            waited, seconds = now.loader_seconds - before.loader_seconds, now.time - before.time
            if waited > _LEAST_SHARE * seconds > 0:
                end = before.time + min(waited, seconds)
                yield Slice(before.time, end, "waits for the loader", "loader", {"seconds": waited, "of": seconds})


def _write_slices(writer: _Writer, track: int, slices: Iterable[Slice]) -> None:
    """Writes slices of one track. One that would outlast the slice around it ends with that one."""
    ends: list[float] = []
    for each in sorted(slices, key=lambda each: (each.begin, -each.end)):
        while ends and ends[-1] <= each.begin:
            writer.end(track, ends.pop())
        ends.append(min([max(each.begin, each.end), *ends[-1:]]))
        writer.begin(track, each.begin, each.name, each.category, each.facts)
    for end in reversed(ends):
        writer.end(track, end)


def _write_counters(writer: _Writer, fit: Fit, track: int) -> None:
    """Writes how fast a rank was, and its learning rates."""
    speeds: list[tuple[float, float]] = []
    for span in fit.spans:
        speeds += [
            (before.time, max(0, now.batches - before.batches) / (now.time - before.time))
            for before, now in pairwise(span.points)
            if now.time > before.time
        ]
        speeds.append((span.points[-1].time, 0.0))
    _write_counter(writer, track, "batches per second", "batches/s", speeds)
    points = [point for span in fit.spans for point in span.points]
    groups = min(_RATES, max((len(point.learning_rates) for point in points), default=0))
    for group in range(groups):
        name = f"learning rate {group}" if groups > 1 else "learning rate"
        rates = [(point.time, point.learning_rates[group]) for point in points if len(point.learning_rates) > group]
        _write_counter(writer, track, name, "", rates)


def _write_counter(writer: _Writer, parent: int, name: str, unit: str, points: Sequence[tuple[float, float]]) -> None:
    if points:
        track = writer.counter(name, unit, parent)
        for value, equal in groupby(sorted(points), key=itemgetter(1)):
            time, _ = next(equal)
            writer.count(track, time, value)
