"""What happened, in one line, and whether all is well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from countoff.core.checks.stalled import STALLED
from countoff.core.messages import count_of, names_of
from countoff.core.trace.format import SILENT_SECONDS
from countoff.report.facts.paces import paces_of
from countoff.report.facts.reads import measured_of
from countoff.report.facts.spans import is_evaluation, spans_of
from countoff.report.facts.stalls import one_line, stall_of, told
from countoff.report.model import Fit, Run, Trace
from countoff.report.ranks import ranks_by
from countoff.report.words import duration

_TOLD_FAILURES, _TOLD_CHARACTERS = 2, 200
"""Different failures that a headline tells, and characters of each."""


def headline(trace: Trace) -> str:
    """The worst that happened, in one line, with the ranks and the line of code where they are known.

    It is the verdict; or the stall in which the job still stands; or who did not finish; or how much was trained,
    whether each sample was read once, and the rank that was slowest, if one was clearly slower than most.

    >>> headline(Trace(directories=[]))
    'no verdict: 0 epochs, 0 ranks, 0 s'
    """
    if (verdict := trace.verdict) is not None:
        return one_line(verdict)
    run = trace.runs[-1] if trace.runs else Run()
    if (stall := stall_of(trace)) is not None:
        return f"stalled: {'; '.join(told(stall))}; until then {_amount(trace)}"
    said = [_trained(trace), *_unfinished(run), *(each.in_words for each in measured_of(run)), *_slow(run)]
    if run.warnings:
        said.append(count_of(len(run.warnings), "warning"))
    return "; ".join(said)


def heading(trace: Trace) -> str:
    """The headline as a heading: without the kind of a verdict, which stands below it."""
    said = headline(trace)
    if (verdict := trace.verdict) is not None:
        said = said.removeprefix(f"{verdict.kind}: ") if verdict.kind == STALLED.name else verdict.sentence
    first = said.split(" ")[0].rstrip(",:;")
    return said[:1].upper() + said[1:] if first.isalpha() else said  # batch_size and len(loader) stay as they are


def is_healthy(trace: Trace) -> bool:
    """Whether all ranks of the last run have finished without a verdict."""
    if trace.verdict is not None or not trace.runs or trace.runs[-1].missing:
        return False
    return all(fit.ending is not None and fit.ending.how == "finished" for fit in trace.runs[-1].fits.values())


def _unfinished(run: Run) -> Iterator[str]:
    """Which ranks have failed, left, were ended by a signal, or have no end."""
    endings = {rank: fit.ending for rank, fit in run.fits.items()}
    ends = ranks_by({rank: ending and ending.how for rank, ending in endings.items()})
    failed = ranks_by({rank: end.what for rank, end in endings.items() if end and end.how == "failed"})
    for what, ranks in list(failed.items())[:_TOLD_FAILURES]:
        cut = what if len(what) <= _TOLD_CHARACTERS else f"{what[:_TOLD_CHARACTERS]}…"
        yield f"{names_of(ranks)} failed{f': {cut}' if cut else ''}"
    if others := [rank for ranks in list(failed.values())[_TOLD_FAILURES:] for rank in ranks]:
        yield f"{count_of(len(others), 'other rank')} failed"
    if left := ends.get("closed"):
        yield f"{names_of(left)} left before the end"
    if signalled := ends.get("signal"):
        signals = " and ".join(sorted({ending.what for rank in signalled if (ending := endings[rank])}))
        yield f"{names_of(signalled)} {'was' if len(signalled) == 1 else 'were'} ended by {signals or 'a signal'}"
    if endless := ends.get(None):
        have = "has" if len(endless) == 1 else "have"
        named = f" ({names_of(endless)})" if len(endless) < len(run.fits) else ""
        yield f"{count_of(len(endless), 'rank')} {have} no end{named}: killed, or still running"
        yield from _ended_together(run, endless)


def _ended_together(run: Run, endless: Sequence[int]) -> Iterator[str]:
    """That all ranks of a run fell silent at the same time, as far as their ticks tell."""
    lasts = [run.fits[rank].last for rank in endless]
    if 1 < len(endless) == run.world_size and max(lasts) - min(lasts) < SILENT_SECONDS:
        yield (
            f"all ranks wrote their last lines within {duration(max(lasts) - min(lasts))}, and none wrote why: if they "
            "run no more, all were killed at once, as where a host or a container has no memory left"
        )


def _trained(trace: Trace) -> str:
    """Whether all ranks have finished, and how much was trained."""
    earlier = any(run.verdict for run in trace.runs[:-1])
    where = f"no verdict in run {len(trace.runs)} of {len(trace.runs)}" if earlier else "no verdict"
    run = trace.runs[-1] if trace.runs else Run()
    endings = {fit.ending.how if fit.ending else "" for fit in run.fits.values()}
    what = "finished" if endings == {"finished"} and not run.missing and not earlier else where
    return f"{what}: {_amount(trace)}"


def _amount(trace: Trace) -> str:
    """How much was trained, by how many ranks, in which time."""
    found = {key: spans for run in trace.runs for key, spans in spans_of(run).items() if not is_evaluation(spans)}
    whole = {key for key, spans in found.items() if all(span.end is not None for span in spans.values())}
    epochs = count_of(len(whole), "epoch")
    if len(whole) < len(found):
        epochs = f"{epochs} and a part of one" if whole else "a part of one epoch"
    ranks = max((run.world_size for run in trace.runs), default=0)
    seconds = sum(run.end - run.begin for run in trace.runs)
    return f"{epochs}, {count_of(ranks, 'rank')}, {duration(seconds)}"


def _slow(run: Run) -> Iterator[str]:
    """The rank that waited longest for its loader, and the one that paused longest in its own code."""
    paces = paces_of(run)
    if slow := {rank for pace in paces for rank in pace.slow}:
        shares = {rank: _loader_share(run.fits[rank]) for rank in slow}
        rank = max(shares, key=lambda rank: shares[rank])
        yield f"rank {rank} waited {shares[rank]:.0%} of the time for its loader".replace("%", " %")
    if paused := [pace for pace in paces if pace.pause_is_outlier]:
        longest = max(paused, key=lambda pace: pace.pause_seconds)
        yield f"rank {longest.paused} paused for {duration(longest.pause_seconds)} in its own code"


def _loader_share(fit: Fit) -> float:
    """The share of the time in train epochs that a rank waited for its loader."""
    spans = [span for span in fit.spans if not span.is_evaluation]
    seconds = sum(span.last - span.begin for span in spans)
    return min(1.0, sum(span.loader_seconds for span in spans) / seconds) if seconds > 0 else 0.0
