"""The four parts of the demo: without countoff, with countoff, fixed, and stopped. Each part checks its own result.

Each returns its line of the summary, and raises `DemoFailed` if the job does not do what the part is to show.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from countoff.core.words import count_of, names_of
from countoff.demo.data import Data
from countoff.demo.ranks import Run
from countoff.demo.records import AllReduce, all_reduces, count_so_far, excerpt, innermost, logged, printed
from countoff.demo.show import Show

GOOD_ACCURACY = 0.9
_POLL_SECONDS = 0.1
_KNOWN = re.compile(r"known on every rank ([\d.]+) ms")


Start = Callable[..., AbstractContextManager[Run]]
"""`ranks.started` with all but what differs from part to part."""


def without_countoff(start: Start, data: Data, show: Show, seconds_before_cut: float) -> str:
    """Shows how the job drifts, then hangs or crashes."""
    show.part(
        "1. The job without countoff",
        f"Each rank reads whole shards: rank {data.short_rank} has {data.batches(data.short_rank)} batches per epoch, "
        f"every other rank has {data.batches(0)}. Each rank sends its epoch and batch along with its gradients, so the "
        "demo can show which batches were averaged together.",
    )
    with start("without", callback=None) as run, show.waiting("training without countoff") as change:
        killed = _wait_or_kill(run, seconds_before_cut, change)
    recorded = all_reduces(run)
    mixed = [one for one in recorded if one.mixed]
    of_epochs = [one for one in mixed if one.epoch_count > 1]
    if not of_epochs:
        raise run.failure("the job without countoff was expected to drift, and did not")
    show.table(["all-reduce", "averaged the gradients of"], _rows(recorded))
    show.print(
        f"{len(mixed)} of {count_of(len(recorded), 'all-reduce')} averaged gradients of different batches, "
        f"{len(of_epochs)} of them of different epochs. No rank reported it."
    )
    if not killed and not any(run.exit_codes.values()):
        raise run.failure("the job without countoff was expected to hang or to crash, and did neither")
    show.print(_how_it_ended(run, killed, seconds_before_cut))
    endings = [_ending(run, rank, rank in killed) for rank in range(data.ranks)]
    show.table(["rank", "exit", "stopped at", "Lightning was at"], endings)
    ending = "hung" if killed else "crashed"
    return (
        f"{len(of_epochs)} of {len(recorded)} all-reduces averaged gradients of different epochs, then the job {ending}"
    )


def with_countoff(start: Start, show: Show, trace: Path) -> str:
    """Shows the verdict that rank 0 prints, and the others in one line. Its trace goes to the directory `trace`."""
    show.part(
        "2. The same job with callbacks=[Countoff(trace_dir=…)]",
        "Nothing else is changed. The trace is for the report at the end; the verdict is the same without it.",
    )
    with start("with", callback={"trace_dir": trace}) as run:
        _wait(run, show, "training with callbacks=[Countoff()]")
    short, recorded = run.data.short_rank, all_reduces(run)
    known = _KNOWN.search(run.read(0, "log"))
    text = _common_verdict(run, known is not None)
    delay = f"{known[1]} ms" if known else "an unknown time (a rank did not report in time)"
    mixed = sum(one.mixed for one in recorded)
    show.verbatim(text)
    show.print(f"Each of the other ranks printed its first line. {_exit_codes(run)}")
    show.print(
        f"{mixed} of the {count_of(len(recorded), 'all-reduce')} before it averaged gradients of different batches."
    )
    show.print(f"Every rank had the verdict {delay} after the last batch of rank {short}.", style="bold")
    return f"rank {short} named on every rank, {delay} after its last batch"


def fixed(start: Start, data: Data, show: Show) -> tuple[str, str]:
    """Shows that the job trains when the ranks are even. Returns the accuracy, too."""
    show.part(
        "3. The fixed job, with callbacks=[Countoff()]",
        f"Every rank reads all shards and keeps 1 of {data.ranks} samples. An incomplete last round is dropped.",
    )
    with start("fixed", even=True, callback={}) as run:
        _wait(run, show, "training the fixed job with callbacks=[Countoff()]")
    if any(run.exit_codes.values()):
        raise run.failure("the fixed job was expected to exit with code 0 on every rank")
    if any("countoff: " in run.read(rank, "log") for rank in range(data.ranks)):
        raise run.failure("countoff was expected to find nothing in the fixed job")
    totals, recorded, accuracy = _trained(run)
    show.print(f"{recorded}, each of the same batch on every rank; no verdict. {_exit_codes(run)}")
    show.table(["total", "Lightning", "countoff"], _totals(run, totals))
    show.print(f"Accuracy on held-out digits, the same on all {data.ranks} ranks: {accuracy}.", style="bold")
    return f"no verdict, and {accuracy} of the held-out digits are classified correctly", accuracy


def stopped(start: Start, data: Data, show: Show, accuracy_if_fixed: str) -> str:
    """Shows that the uneven job trains to its end."""
    show.part(
        '4. The job of part 1, with callbacks=[Countoff(uneven_train="stop")]',
        "The data is uneven again. Every epoch ends on all ranks with the shortest one.",
    )
    with start("stopped", callback={"uneven_train": "stop"}) as run:
        _wait(run, show, 'training with callbacks=[Countoff(uneven_train="stop")]')
    if any(run.exit_codes.values()):
        raise run.failure('with uneven_train="stop", every rank was expected to exit with code 0')
    shortest, longest = data.batches(data.short_rank), data.batches(0)
    found = f"countoff: Truncated: train epoch 0 stopped on every rank after {count_of(shortest, 'batch')}, where "
    if not (text := printed(run, 0)).startswith(found) or any(printed(run, rank) for rank in range(1, data.ranks)):
        raise run.failure(f"rank 0 alone was expected to print '{found}', and it printed '{text}'")
    _, recorded, accuracy = _trained(run)
    show.verbatim(text)
    show.print(f"{recorded}, each of the same batch on every rank. {_exit_codes(run)}")
    left = f"{longest - shortest} of {longest} batches"
    show.print(
        f"Each epoch leaves {left} of every other rank. Accuracy on held-out digits: {accuracy}; "
        f"fixed: {accuracy_if_fixed}.",
        style="bold",
    )
    return f"finished, with {left} left on every other rank, and {accuracy} correct"


def _trained(run: Run) -> tuple[dict[str, float], str, str]:
    """Returns the totals of rank 0 at the end of its training, and the number of all-reduces and accuracy in words.

    Raises:
        DemoFailed: If an all-reduce was of different batches, ranks differ, or the accuracy is too low.
    """
    results = [json.loads(run.read(rank, "json")) for rank in range(run.data.ranks)]
    recorded, accuracy = all_reduces(run), results[0]["accuracy"]
    if any(one.mixed for one in recorded):
        raise run.failure("every all-reduce was expected to be of the same batch on every rank")
    if accuracy < GOOD_ACCURACY or any(result["accuracy"] != accuracy for result in results):
        raise run.failure(f"every rank was expected to reach {GOOD_ACCURACY:.0%}: {results}")
    return results[0], count_of(len(recorded), "all-reduce"), f"{accuracy:.1%}"


def _wait_or_kill(run: Run, seconds: float, change: Callable[[str], None]) -> list[int]:
    """Waits until all ranks have ended; kills and returns those that have not after `seconds` without an all-reduce."""
    seen, since = 0, time.monotonic()
    while run.wait(_POLL_SECONDS):
        idle = time.monotonic() - since
        if (now := count_so_far(run)) != seen:
            seen, since = now, time.monotonic()
        elif seen and idle > seconds:
            return run.kill()
        change(f"all-reduce {seen}, {names_of(run.running)} running, no progress for {idle:.0f} s of {seconds:g} s")
    return []


def _wait(run: Run, show: Show, text: str) -> None:
    with show.waiting(text) as change:
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


def _ending(run: Run, rank: int, killed: bool) -> tuple[str, str, str, str]:
    code = run.exit_codes[rank]
    stopped_at, lightning = innermost(run.read(rank, "stacks"))
    if not stopped_at and code:
        stopped_at = run.read(rank, "log").strip().rpartition("\n")[-1]
    return str(rank), "killed" if killed else f"code {code}", stopped_at, lightning


def _common_verdict(run: Run, known: bool) -> str:
    """Returns the verdict as rank 0 printed it, after a check that every rank named it and left it for torchrun.

    Args:
        run: The run.
        known: Whether every rank knew the verdict in time, so that it must name the short rank alone if it can.
    """
    data = run.data
    proof = (
        f"countoff: UnevenBatches: rank {data.short_rank} ran out of data after "
        f"{data.batches(data.short_rank)} batches of train epoch 0;"
    )
    texts = [printed(run, rank) for rank in range(data.ranks)]
    for rank, text in enumerate(texts):
        if not text.startswith(proof) or not text.startswith(texts[0].splitlines()[0]):
            raise run.failure(f"rank {rank} was expected to print '{proof}', and countoff printed '{text}'")
        if not run.exit_codes[rank] or "countoff UnevenBatches: " not in run.read(rank, "error"):
            raise run.failure(f"rank {rank} was expected to fail with the verdict")
    named = (f"{how}: rank {data.short_rank} of" for how in ("out of step", "ran out first"))
    if known and data.ranks > 2 and not any(words in texts[0] for words in named):
        raise run.failure(f"the verdict was expected to name rank {data.short_rank} alone:\n{texts[0]}")
    return texts[0]


def _exit_codes(run: Run) -> str:
    return f"Exit codes by rank: {', '.join(f'{rank}: {code}' for rank, code in sorted(run.exit_codes.items()))}."


def _totals(run: Run, own: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Returns each total with Lightning's number and the one that countoff logged, where it logged one."""
    found = logged(run)
    names = ("batches_per_epoch", "steps_per_epoch", "total_steps", "global_batch_size", "samples_per_epoch")
    missing = [name for name in names[:4] if f"countoff/{name}" not in found]
    if missing or found["countoff/total_steps"] != str(own["steps"]):
        raise run.failure(f"countoff was expected to log the totals of {own}, and logged {found}")
    shown = {name: f"unknown ({value})" if value in (-1, float("inf")) else str(value) for name, value in own.items()}
    rows = [(name, shown.get(name, ""), found.get(f"countoff/{name}", "")) for name in names]
    return [row for row in rows if row[2]]
