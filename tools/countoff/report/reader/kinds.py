"""What each kind of line adds to the fit of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from countoff.core.verdict import Verdict
from countoff.report.model import Ending, Fit, Pause, ReadOnce, Roll, Span, Stack, Tick
from countoff.report.ranks import ranks_in
from countoff.report.reader.record import LONG_TEXT, MOST_ENTRIES, MOST_RANKS, Record

_PAUSES, _ROLLS, _WARNINGS, _STACKS = 256, 1_000, 64, 4
"""The most that is kept of each fit."""
LONGEST_RUN = 400 * 86_400.0
"""A line that is farther from the beginning of its fit has no true time."""


def begun(record: Record, time: float, rank: int, directory: str, number: int) -> Fit:
    """The fit that a line ``begin`` is about.

    Args:
        record: The line.
        time: When it begins.
        rank: The rank.
        directory: Where the file is.
        number: The number of the fit in its process.
    """
    before = record.count("before") or 0
    return Fit(
        rank,
        time,
        time,
        directory,
        number,
        world_size=min(MOST_RANKS, record.count("world") or 0),
        part=record.ranks("part") or (),
        host=record.text("host"),
        pid=record.count("pid") or 0,
        framework=record.text("framework"),
        run=record.named_values("run"),
        versions=record.named_values("versions"),
        settings=record.named_values("settings"),
        plan=record.named_values("plan"),
        steps_before=before,
        steps=before,
    )


def _open(fit: Fit, time: float, record: Record) -> bool:
    name, before = record.text("span"), record.count("at", 0)
    if not name or before is None:
        return False
    steps, rates = record.count("s"), record.numbers("lr")
    del fit.open[MOST_ENTRIES:]
    span = Span(name, record.is_true("eval"), time, depth=len(fit.open), before=before, steps=fit.steps)
    if steps is not None and rates:
        fit.learning_rates = rates
        span.start = Tick(time, before, steps + fit.steps_before, 0.0, rates)
    fit.open.append(span)
    fit.spans.append(span)
    return True


def _close(fit: Fit, time: float, record: Record) -> bool:
    name = record.text("span")
    span = next((span for span in reversed(fit.open) if span.name == name), None)
    batches, steps = record.count("b"), record.count("s")
    if span is None or batches is None or steps is None:
        return False
    del fit.open[fit.open.index(span) :]
    steps += fit.steps_before
    span.end, span.why = max(span.begin, time), record.text("why")
    span.batches, span.steps, fit.steps = batches, steps, max(fit.steps, steps)
    span.loader_seconds = max(0.0, record.number("l") or span.loader_seconds)
    span.unused = record.count("unused")
    fit.learning_rates = record.numbers("lr") or fit.learning_rates
    fit.tick = Tick(span.end, batches, steps, span.loader_seconds, fit.learning_rates)
    span.ticks.append(fit.tick)
    return True


def _pause(fit: Fit, time: float, record: Record) -> bool:
    seconds, where = record.number("s"), record.text("in")
    if seconds is None or not 0 <= seconds <= LONGEST_RUN or where not in ("loader", "collective", "code"):
        return False
    fit.pauses.append(Pause(time, seconds, where, record.texts("at")))
    fit.last = max(fit.last, time + seconds)
    fit.pause_seconds += seconds
    if len(fit.pauses) > _PAUSES:
        fit.pauses[:] = sorted(sorted(fit.pauses, key=lambda pause: pause.seconds)[_PAUSES // 4 :])
    return True


def _warning(fit: Fit, time: float, record: Record) -> bool:
    verdict = _verdict(record, time)
    if verdict and verdict not in fit.warnings and len(fit.warnings) < _WARNINGS:
        fit.warnings.append(verdict)
    return verdict is not None


def _roll(fit: Fit, time: float, record: Record) -> bool:
    spread, last = record.number("spread"), record.ranks("last")
    if spread is None or spread < 0 or last is None:
        return False
    fit.rolls.append(Roll(time, record.text("span"), spread, last))
    del fit.rolls[:-_ROLLS]
    return True


def _once(fit: Fit, _: float, record: Record) -> bool:
    rows, repeated, dropped = record.count("rows"), record.count("repeated", 0), record.count("dropped", 0)
    if rows is None or repeated is None or dropped is None:
        return False
    fit.read_once.append(ReadOnce(record.text("span"), rows, repeated, dropped))
    del fit.read_once[:-_ROLLS]
    return True


def _totals(fit: Fit, _: float, record: Record) -> bool:
    # A line has all that are known: one that is not there any more has turned out not to be true.
    fit.true_totals = record.named_numbers("true")
    fit.reported_totals = record.named_numbers("reported")
    if (horizon := record.count("horizon")) is not None:
        fit.horizon = fit.steps_before + horizon
    return True


def _stacks(fit: Fit, time: float, record: Record) -> bool:
    if not record.is_list("frames"):
        return False
    fit.stacks.append(Stack(time, record.text("state"), record.texts("frames")))
    del fit.stacks[:-_STACKS]
    return True


def _end_of_verdict(fit: Fit, time: float, record: Record) -> bool:
    verdict = _verdict(record, time)
    fit.verdict = verdict or fit.verdict
    take_last_counts(fit, verdict.rows if verdict else ())
    return verdict is not None


def _verdict(record: Record, time: float) -> Verdict | None:
    verdict = record.record("verdict")
    return None if verdict is None else verdict.verdict(time)


def take_last_counts(fit: Fit, rows: Iterable[Mapping[str, Any]]) -> None:
    """Takes over what the rank had counted when a verdict or a stall came: its last tick is a few seconds older."""
    for row in rows:
        ranks = row.get("rank")
        is_own = ranks == fit.rank or (isinstance(ranks, str) and ranks_in(ranks, [fit.rank]))
        if is_own and fit.open and row.get("where") == fit.open[-1].name:
            span = fit.open[-1]
            counted = Record(row)
            batches = counted.count("batches") or 0
            if batches < span.batches:
                continue  # it has gone on since
            span.at_verdict, span.batches = True, batches
            span.fetched = counted.count("fetched")
            steps = fit.steps_before + (counted.count("steps") or 0)
            span.steps = fit.steps = max(span.steps, fit.steps, steps)


def _dropped(fit: Fit, _: float, record: Record) -> bool:
    lines = record.count("lines")
    fit.dropped_lines += lines or 0
    return lines is not None


def _end(fit: Fit, time: float, record: Record) -> bool:
    how = record.text("how")
    if how not in ("finished", "verdict", "failed", "closed", "signal"):
        return False
    fit.ending = Ending(time, how, record.text("what", LONG_TEXT))
    fit.last = max(fit.last, time)
    return True


KINDS: dict[str, Callable[[Fit, float, Record], bool]] = {
    "open": _open,
    "close": _close,
    "pause": _pause,
    "warning": _warning,
    "roll": _roll,
    "once": _once,
    "totals": _totals,
    "stacks": _stacks,
    "verdict": _end_of_verdict,
    "dropped": _dropped,
    "end": _end,
}


def drop_spans(fit: Fit, limit: int) -> None:
    """Drops the oldest spans: evaluations first, for an epoch is worth more."""
    old = [span for span in fit.spans if span.end is not None]
    old = [span for span in old if span.is_evaluation] or old or fit.spans
    dropped = {id(span): span for span in old[: 1 + limit // 4]}
    fit.spans[:] = [span for span in fit.spans if id(span) not in dropped]
    fit.dropped_spans += len(dropped)
    for span in dropped.values():
        if not span.is_evaluation:
            fit.dropped_batches += span.read
        fit.dropped_loader_seconds += span.loader_seconds
        if not span.depth:
            fit.dropped_span_seconds += span.last - span.begin
