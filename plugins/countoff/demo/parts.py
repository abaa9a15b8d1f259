"""The four parts of the demo: without countoff, with countoff, fixed, and stopped. Each part checks its own result."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from countoff.core.words import count_of, names_of
from countoff.demo.all_reduces import AllReduce, all_reduces, count_so_far, excerpt
from countoff.demo.launcher import Run
from countoff.demo.show import Show
from countoff.demo.stacks import innermost

GOOD_ACCURACY = 0.9
_POLL_SECONDS = 0.1
_KNOWN = re.compile(r"known on every rank ([\d.]+) ms")


def without_countoff(run: Run, show: Show, seconds_before_cut: float) -> str:
    """Shows how the job drifts, then hangs or crashes. Returns the line for the summary.

    Raises:
        DemoFailed: If the job does anything else.
    """
    with show.status("training without countoff") as change:
        killed = _wait_or_kill(run, seconds_before_cut, change)
    recorded = all_reduces(run)
    mixed = [one for one in recorded if one.mixed]
    of_epochs = [one for one in mixed if one.epoch_count > 1]
    if not of_epochs:
        raise run.failure("the job without countoff was expected to drift, and did not")
    show.table(["all-reduce", "averaged the gradients of"], _rows(recorded))
    drift = (
        f"{len(mixed)} of {count_of(len(recorded), 'all-reduce')} averaged gradients of different batches, "
        f"{len(of_epochs)} of them of different epochs"
    )
    show.paragraph(f"{drift}. No rank reported it.")
    if not killed and not any(run.exit_codes.values()):
        raise run.failure("the job without countoff was expected to hang or to crash, and did neither")
    show.paragraph(_how_it_ended(run, killed, seconds_before_cut))
    show.table(
        ["rank", "exit", "stopped at", "Lightning was at"], [_ending(run, rank) for rank in sorted(run.exit_codes)]
    )
    ending = "hung" if killed else "crashed"
    return (
        f"{len(of_epochs)} of {len(recorded)} all-reduces averaged gradients of different epochs, then the job {ending}"
    )


def with_countoff(run: Run, show: Show) -> str:
    """Shows the verdict that rank 0 prints, and the others in one line. Returns the line for the summary.

    Raises:
        DemoFailed: If a rank ends without the verdict, or the verdict names another rank.
    """
    with show.status("training with callbacks=[Countoff()]") as change:
        _wait(run, change)
    short, recorded = run.spec.data.short_rank, all_reduces(run)
    text = _common_verdict(run)
    known = _KNOWN.search(_log(run, 0))
    delay = f"{known[1]} ms" if known else "an unknown time (a rank did not report in time)"
    mixed = sum(one.mixed for one in recorded)
    show.verbatim("\n".join(f"[rank 0] {line}" for line in text.splitlines()))
    show.paragraph(f"Each of the other ranks printed its first line. {_exit_codes(run)}")
    show.paragraph(
        f"{mixed} of the {count_of(len(recorded), 'all-reduce')} before it averaged gradients of different batches."
    )
    show.paragraph(f"Every rank had the verdict {delay} after the last batch of rank {short}.", style="bold")
    return f"rank {short} named on every rank, {delay} after its last batch"


def fixed(run: Run, show: Show) -> str:
    """Shows that the job trains when the ranks are even. Returns the line for the summary.

    Raises:
        DemoFailed: If countoff prints anything, a rank fails, or the accuracy is too low.
    """
    with show.status("training the fixed job with callbacks=[Countoff()]") as change:
        _wait(run, change)
    ranks = range(run.spec.data.ranks)
    if any(run.exit_codes.values()):
        raise run.failure("the fixed job was expected to exit with code 0 on every rank")
    if any("countoff: " in run.file(rank, "log").read_text(errors="replace") for rank in ranks):
        raise run.failure("countoff was expected to find nothing in the fixed job")
    result, recorded = _trained(run)
    show.paragraph(f"{recorded}, each of the same batch on every rank; no verdict. {_exit_codes(run)}")
    show.table(["total", "Lightning", "countoff"], _totals(run, result))
    accuracy = f"{result['accuracy']:.1%}"
    show.paragraph(f"Accuracy on held-out digits, the same on all {len(ranks)} ranks: {accuracy}.", style="bold")
    return f"no verdict, and {accuracy} of the held-out digits are classified correctly"


def stopped(run: Run, show: Show, fixed: Run) -> str:
    """Shows that the uneven job trains to its end. Returns the line for the summary.

    Args:
        run: The run.
        show: Where it is shown.
        fixed: The run of the fixed job, which has ended, for comparison.

    Raises:
        DemoFailed: If countoff does not report what was left, a rank fails, or the accuracy is too low.
    """
    with show.status('training with callbacks=[Countoff(uneven_train="stop")]') as change:
        _wait(run, change)
    data = run.spec.data
    if any(run.exit_codes.values()):
        raise run.failure('with uneven_train="stop", every rank was expected to exit with code 0')
    shortest, longest = data.batches(data.short_rank), data.batches(0)
    found = f"countoff: Truncated: train epoch 0 stopped on every rank after {count_of(shortest, 'batch')}, where "
    if not (text := _printed(run, 0)).startswith(found) or any(_printed(run, rank) for rank in range(1, data.ranks)):
        raise run.failure(f"rank 0 alone was expected to print '{found}', and it printed '{text}'")
    result, recorded = _trained(run)
    show.verbatim("\n".join(f"[rank 0] {line}" for line in text.splitlines()))
    show.paragraph(f"{recorded}, each of the same batch on every rank. {_exit_codes(run)}")
    left = f"{longest - shortest} of {longest} batches"
    accuracy, whole = (f"{each['accuracy']:.1%}" for each in (result, _trained(fixed)[0]))
    show.paragraph(
        f"Each epoch leaves {left} of every other rank. Accuracy on held-out digits: {accuracy}; fixed: {whole}.",
        style="bold",
    )
    return f"finished, with {left} left on every other rank, and {accuracy} correct"


def _trained(run: Run) -> tuple[dict[str, float], str]:
    """Returns what rank 0 has written at the end of its training, and the number of all-reduces in words.

    Raises:
        DemoFailed: If an all-reduce was of different batches, ranks differ, or the accuracy is too low.
    """
    results = [json.loads(run.file(rank, "json").read_text()) for rank in range(run.spec.data.ranks)]
    recorded, accuracy = all_reduces(run), results[0]["accuracy"]
    if any(one.mixed for one in recorded):
        raise run.failure("every all-reduce was expected to be of the same batch on every rank")
    if accuracy < GOOD_ACCURACY or any(result["accuracy"] != accuracy for result in results):
        raise run.failure(f"every rank was expected to reach {GOOD_ACCURACY:.0%}: {results}")
    return results[0], count_of(len(recorded), "all-reduce")


def _wait_or_kill(run: Run, seconds: float, change: Callable[[str], None]) -> list[int]:
    """Waits until all ranks have ended; kills and returns those that have not after `seconds` without an all-reduce."""
    seen, since = 0, time.monotonic()
    while run.wait(_POLL_SECONDS):
        idle = time.monotonic() - since
        if (now := count_so_far(run)) != seen:
            seen, since = now, time.monotonic()
        elif seen and idle > seconds:
            killed = run.running
            run.kill()
            return killed
        change(f"all-reduce {seen}, {names_of(run.running)} running, no progress for {idle:.0f} s of {seconds:g} s")
    return []


def _wait(run: Run, change: Callable[[str], None]) -> None:
    while run.wait(_POLL_SECONDS):
        change(f"all-reduce {count_so_far(run)}, {names_of(run.running)} running")


def _rows(recorded: Sequence[AllReduce]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    last = 0
    for one in excerpt(recorded):
        if last and one.number > last + 1:
            rows.append(("…", "…"))
        rows.append((str(one.number), str(one)))
        last = one.number
    return rows


def _how_it_ended(run: Run, killed: list[int], seconds: float) -> str:
    if not killed:
        return "Then the job crashed:"
    ended = sorted(set(run.exit_codes) - set(killed))
    others = f" ({names_of(ended)} had ended)" if ended else ""
    return (
        f"Then the job hung{others}. Lightning would wait for 30 minutes; "
        f"the demo killed it after {seconds:g} s without progress:"
    )


def _ending(run: Run, rank: int) -> tuple[str, str, str, str]:
    code, stacks = run.exit_codes[rank], run.file(rank, "stacks")
    stopped_at, lightning = innermost(stacks.read_text() if stacks.exists() else "")
    if not stopped_at:
        printed = run.file(rank, "log").read_text(errors="replace").strip().splitlines()
        stopped_at = printed[-1] if code and printed else ""
    return str(rank), "killed" if code == -signal.SIGKILL else f"code {code}", stopped_at, lightning


def _common_verdict(run: Run) -> str:
    """Returns the verdict as rank 0 printed it, after a check that every rank named it and left it for torchrun."""
    data = run.spec.data
    proof = (
        f"countoff: UnevenBatches: rank {data.short_rank} ran out of data after "
        f"{data.batches(data.short_rank)} batches of train epoch 0;"
    )
    texts = [_printed(run, rank) for rank in range(data.ranks)]
    for rank, text in enumerate(texts):
        if not text.startswith(proof) or not text.startswith(texts[0].splitlines()[0]):
            raise run.failure(f"rank {rank} was expected to print '{proof}', and countoff printed '{text}'")
        if not run.exit_codes[rank] or "countoff UnevenBatches: " not in _error_file(run, rank):
            raise run.failure(f"rank {rank} was expected to fail with the verdict")
    if (
        data.ranks > 2
        and _KNOWN.search(_log(run, 0))
        and f"out of step: rank {data.short_rank} of" not in texts[0]
        and f"ran out first: rank {data.short_rank} of" not in texts[0]
    ):
        raise run.failure(f"the verdict was expected to name rank {data.short_rank} alone:\n{texts[0]}")
    return texts[0]


def _printed(run: Run, rank: int) -> str:
    """Returns what countoff printed on this rank, without the rank at the start of each line."""
    prefix = f"[rank {rank}] "
    return "\n".join(line.removeprefix(prefix) for line in _log(run, rank).splitlines() if line.startswith(prefix))


def _log(run: Run, rank: int) -> str:
    """Returns all that this rank printed and logged."""
    return run.file(rank, "log").read_text(errors="replace")


def _error_file(run: Run, rank: int) -> str:
    path = run.spec.directory / f"rank{rank}-error.json"
    return path.read_text() if path.exists() else ""


def _exit_codes(run: Run) -> str:
    return f"Exit codes by rank: {', '.join(f'{rank}: {code}' for rank, code in sorted(run.exit_codes.items()))}."


def _totals(run: Run, result: Mapping[str, object]) -> list[tuple[str, str, str]]:
    logged = _logged(run.spec.directory / "log" / "metrics.csv")
    names = ("batches_per_epoch", "steps_per_epoch", "total_steps", "global_batch_size", "samples_per_epoch")
    missing = [name for name in names[:4] if f"countoff/{name}" not in logged]
    if missing or logged["countoff/total_steps"] != str(result["steps"]):
        raise run.failure(f"countoff was expected to log the totals of {result}, and logged {logged}")
    own = {name: f"unknown ({value})" if value in (-1, float("inf")) else str(value) for name, value in result.items()}
    rows = [(name, own.get(name, ""), logged.get(f"countoff/{name}", "")) for name in names]
    return [row for row in rows if row[2]]


def _logged(path: Path) -> dict[str, str]:
    """Returns the last value of each metric that Lightning's CSVLogger wrote."""
    with path.open(newline="") as file:
        return {name: value for line in csv.DictReader(file) for name, value in line.items() if value}
