"""The three parts of the demo: the job adrift, the job with countoff, the job mended. Each one judges itself."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from countoff.core.verdict import count_of, names_of
from countoff.demo.launcher import Run
from countoff.demo.meetings import Meeting, count, informative, meetings
from countoff.demo.show import Show
from countoff.demo.stacks import innermost

GOOD_ACCURACY = 0.9
_POLL_SECONDS = 0.1
_KNOWN = re.compile(r"known on every rank ([\d.]+) ms")


def adrift(run: Run, show: Show, seconds_before_cut: float) -> str:
    """The job without countoff: it drifts, then it hangs or crashes. Returns its line of the summary.

    Raises:
        DemoFailed: If it does anything else.
    """
    with show.working("training without countoff") as change:
        cut = _wait_for_silence(run, seconds_before_cut, change)
    met = meetings(run)
    mixed = [meeting for meeting in met if meeting.mixed]
    of_epochs = [meeting for meeting in mixed if meeting.of_epochs > 1]
    if not of_epochs:
        raise run.failure("the job without countoff was expected to drift, and did not")
    show.table(["all-reduce", "gradients that were averaged"], _rows(met))
    drift = (
        f"{len(mixed)} of {count_of(len(met), 'all-reduce')} averaged gradients of different batches, "
        f"{len(of_epochs)} of them of different epochs"
    )
    show.say(f"{drift}. Nobody was told.")
    if not cut and not any(run.ended.values()):
        raise run.failure("the job without countoff was expected to hang or to crash, and did neither")
    show.say(_how_it_ended(run, cut, seconds_before_cut))
    show.table(
        ["rank", "exit", "innermost line", "called for Lightning's"], [_ending(run, rank) for rank in sorted(run.ended)]
    )
    met_epochs = f"{len(of_epochs)} of {len(met)} all-reduces averaged gradients of different epochs"
    return f"{met_epochs}, then it {'hung' if cut else 'crashed'} without a reason"


def guarded(run: Run, show: Show) -> str:
    """The same job with countoff: the verdict, on every rank. Returns its line of the summary.

    Raises:
        DemoFailed: If a rank ends without the verdict, or the verdict names another rank.
    """
    with show.working("training with callbacks=[Countoff()]") as change:
        _wait(run, change)
    data, met = run.order.data, meetings(run)
    text = _common_verdict(run)
    known = _KNOWN.search(text)
    when = f"{known[1]} ms" if known else "not measured, because a rank did not say in time"
    mixed = sum(meeting.mixed for meeting in met)
    show.verbatim("\n".join(f"[rank 0] {line}" for line in text.splitlines()))
    show.say(f"All {data.ranks} ranks printed it. {_exit_codes(run)}")
    show.say(f"Of {count_of(len(met), 'all-reduce')} before it, {mixed} averaged gradients of different batches.")
    show.say(f"From the last batch of rank {data.short_rank} until every rank knew: {when}.", style="bold")
    return f"rank {data.short_rank} named on every rank; from its last batch until all knew: {when}"


def mended(run: Run, show: Show) -> str:
    """The job with even ranks, and with countoff: it trains. Returns its line of the summary.

    Raises:
        DemoFailed: If countoff says anything, a rank fails, or the network has not learnt to read.
    """
    with show.working("training the mended job with callbacks=[Countoff()]") as change:
        _wait(run, change)
    ranks = range(run.order.data.ranks)
    if any(run.ended.values()):
        raise run.failure("the mended job was expected to end well")
    if any("countoff: " in run.file(rank, "log").read_text(errors="replace") for rank in ranks):
        raise run.failure("countoff was expected to find nothing in the mended job")
    results = [json.loads(run.file(rank, "json").read_text()) for rank in ranks]
    met, accuracy = meetings(run), results[0]["accuracy"]
    if any(meeting.mixed for meeting in met):
        raise run.failure("the mended job was expected to average like with like")
    if accuracy < GOOD_ACCURACY or any(result["accuracy"] != accuracy for result in results):
        raise run.failure(f"every rank was expected to reach {GOOD_ACCURACY:.0%}: {results}")
    show.say(f"{count_of(len(met), 'all-reduce')}, all of one batch each; no verdict. {_exit_codes(run)}")
    show.table(["total", "Lightning's", "logged by countoff"], _totals(run, results[0]))
    show.say(f"Accuracy on held-out digits, equal on all {len(results)} ranks: {accuracy:.1%}.", style="bold")
    return f"no verdict, and {accuracy:.1%} of the held-out digits are read rightly"


def _wait_for_silence(run: Run, seconds: float, change: Callable[[str], None]) -> list[int]:
    """Waits until all ranks have ended, or cuts off those that have not, after so long without an all-reduce."""
    seen, since = 0, time.monotonic()
    while run.wait(_POLL_SECONDS):
        silent = time.monotonic() - since
        if (now := count(run)) != seen:
            seen, since = now, time.monotonic()
        elif seen and silent > seconds:
            left = run.alive
            run.kill()
            return left
        change(f"all-reduce {seen}, {names_of(run.alive)} running, nothing new for {silent:.0f} s of {seconds:g} s")
    return []


def _wait(run: Run, change: Callable[[str], None]) -> None:
    while run.wait(_POLL_SECONDS):
        change(f"all-reduce {count(run)}, {names_of(run.alive)} running")


def _rows(met: Sequence[Meeting]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    last = 0
    for meeting in informative(met):
        if last and meeting.number > last + 1:
            rows.append(("…", "…"))
        rows.append((str(meeting.number), str(meeting)))
        last = meeting.number
    return rows


def _how_it_ended(run: Run, cut: list[int], seconds: float) -> str:
    if not cut:
        return "Then it crashed:"
    others = "" if len(cut) == run.order.data.ranks else f" ({names_of(sorted(set(run.ended) - set(cut)))} had ended)"
    return f"Then it hung{others}; Lightning would wait for 30 minutes, the demo cut it off after {seconds:g} s:"


def _ending(run: Run, rank: int) -> tuple[str, str, str, str]:
    code, stacks = run.ended[rank], run.file(rank, "stacks")
    inner, lightning = innermost(stacks.read_text() if stacks.exists() else "")
    if not inner:
        printed = run.file(rank, "log").read_text(errors="replace").strip().splitlines()
        inner = printed[-1] if code and printed else ""
    return str(rank), "cut off" if code == -signal.SIGKILL else f"code {code}", inner, lightning


def _common_verdict(run: Run) -> str:
    """What every rank has printed and left for torchrun, as rank 0 printed it.

    On a machine so busy that a rank misses the table, the ranks' tables may differ; what they say above it may not.
    """
    data = run.order.data
    proof = (
        f"countoff: UnevenBatches: rank {data.short_rank} ran out of data after "
        f"{data.batches(data.short_rank)} batches of train epoch 0;"
    )
    texts = [_printed(run, rank) for rank in range(data.ranks)]
    for rank, text in enumerate(texts):
        if not text.startswith(proof) or text.splitlines()[0] != texts[0].splitlines()[0]:
            raise run.failure(f"rank {rank} was expected to print '{proof}', and countoff printed '{text}'")
        if not run.ended[rank] or "countoff UnevenBatches: " not in _error_file(run, rank):
            raise run.failure(f"rank {rank} was expected to fail with the verdict")
    if (
        data.ranks > 2
        and "known on every rank" in texts[0]
        and f"out of step: rank {data.short_rank} of" not in texts[0]
    ):
        raise run.failure(f"the verdict was expected to name rank {data.short_rank} alone:\n{texts[0]}")
    return texts[0]


def _printed(run: Run, rank: int) -> str:
    """What countoff printed on this rank, without the rank before every line."""
    prefix = f"[rank {rank}] "
    printed = run.file(rank, "log").read_text(errors="replace").splitlines()
    return "\n".join(line.removeprefix(prefix) for line in printed if line.startswith(prefix))


def _error_file(run: Run, rank: int) -> str:
    path = run.order.directory / f"rank{rank}-error.json"
    return path.read_text() if path.exists() else ""


def _exit_codes(run: Run) -> str:
    return f"Exit codes by rank: {', '.join(f'{rank}: {code}' for rank, code in sorted(run.ended.items()))}."


def _totals(run: Run, result: dict[str, object]) -> list[tuple[str, str, str]]:
    logged = _logged(run.order.directory / "log" / "metrics.csv")
    names = ("batches_per_epoch", "steps_per_epoch", "total_steps", "global_batch_size", "samples_per_epoch")
    missing = [name for name in names[:4] if f"countoff/{name}" not in logged]
    if missing or logged["countoff/total_steps"] != str(result["steps"]):
        raise run.failure(f"countoff was expected to log the totals of {result}, and logged {logged}")
    own = {name: f"unknown ({value})" if value in (-1, float("inf")) else str(value) for name, value in result.items()}
    rows = [(name, own.get(name, ""), logged.get(f"countoff/{name}", "")) for name in names]
    return [row for row in rows if row[2]]


def _logged(path: Path) -> dict[str, str]:
    """The last value of every metric that Lightning's CSVLogger wrote."""
    with path.open(newline="") as file:
        return {name: value for line in csv.DictReader(file) for name, value in line.items() if value}
