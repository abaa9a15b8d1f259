"""What happened, in one line, and whether all is well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from countoff.core.trace.format import SILENT_SECONDS
from countoff.core.words import count_of, names_of
from countoff.report.facts.paces import paces_of
from countoff.report.facts.spans import is_evaluation, spans_of
from countoff.report.model import Fit, Run, Trace
from countoff.report.ranks import ranks_by
from countoff.report.words import duration

_TOLD_FAILURES, _TOLD_CHARACTERS = 2, 200
"""Different failures that a headline tells, and characters of each."""


def headline(trace: Trace) -> str:
    """What happened, in one line: the verdict, or how much was trained without one, and which ranks did not finish.

    >>> headline(Trace(directories=[]))
    'no verdict: 0 epochs, 0 ranks, 0 s'
    """
    if (verdict := trace.verdict) is not None:
        return verdict.headline
    epochs = {key for run in trace.runs for key, spans in spans_of(run).items() if not is_evaluation(spans)}
    ranks = max((run.world_size for run in trace.runs), default=0)
    seconds = sum(run.end - run.begin for run in trace.runs)
    earlier = any(run.verdict for run in trace.runs[:-1])
    where = f"no verdict in run {len(trace.runs)} of {len(trace.runs)}" if earlier else "no verdict"
    trained = f"{where}: {count_of(len(epochs), 'epoch')}, {count_of(ranks, 'rank')}, {duration(seconds)}"
    return "; ".join([trained, *(_unfinished(trace.runs[-1]) if trace.runs else ())])


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


def title_of(trace: Trace) -> str:
    """The headline as a title, with what is worth a look.

    It is the verdict's sentence; or how much was trained, whether all ranks have finished, how many warnings there
    are, and the rank that was slowest, if one was clearly slower than most.
    """
    if (verdict := trace.verdict) is not None:
        return verdict.sentence[:1].upper() + verdict.sentence[1:]
    said = headline(trace)
    run = trace.runs[-1] if trace.runs else Run()
    endings = [fit.ending.how if fit.ending else "" for fit in run.fits.values()]
    if set(endings) == {"finished"} and not run.missing:
        said = f"finished: {said.partition(': ')[2]}"
    if run.warnings:
        said += f", {count_of(len(run.warnings), 'warning')}"
    paces = paces_of(run)
    if slow := {rank for pace in paces for rank in pace.slow}:
        shares = {rank: _loader_share(run.fits[rank]) for rank in slow}
        rank = max(shares, key=lambda rank: shares[rank])
        said += f"; rank {rank} waited {shares[rank]:.0%} of the time for its loader".replace("%", " %")
    paused = [pace for pace in paces if pace.pause_is_odd]
    if paused:
        longest = max(paused, key=lambda pace: pace.pause_seconds)
        said += f"; rank {longest.paused} paused for {duration(longest.pause_seconds)} in its own code"
    return said[:1].upper() + said[1:]


def _loader_share(fit: Fit) -> float:
    """The share of the time in train epochs that a rank waited for its loader."""
    spans = [span for span in fit.spans if not span.is_evaluation]
    seconds = sum(span.last - span.begin for span in spans)
    return min(1.0, sum(span.loader_seconds for span in spans) / seconds) if seconds > 0 else 0.0
