"""``countoff demo``: examples/lightning_digits.py, four times, on four ranks of this machine.

Importing Lightning takes longer than all four jobs. So this process imports it once, and each rank is a fork of it.
Every rank ends with this process, however that ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["DemoFailed", "run_demo"]

_EXAMPLE: Final = "lightning_digits.py"
_RANKS: Final = range(4)
_SHORT: Final = _RANKS[-1]
"""The rank that has 11 batches where the others have 12."""
_NEEDED: Final = {"rich": "rich", "torch": "torch", "lightning": "lightning", "sklearn": "scikit-learn"}
_PATIENCE: Final = 6.0
"""Seconds without a batch after which a job counts as hung."""
_LONGEST: Final = 90.0
"""Seconds after which any job is ended."""
_PR_SET_PDEATHSIG: Final = 1
_BATCH: Final = "the demo: a batch"
"""What a rank prints at each batch."""
_FRAME: Final = r'File ".*{}([^/"]+)", line (\d+) in (.+)'


class DemoFailed(Exception):
    """A job did not do what the demo is to show; the message is for the user."""


class Run(NamedTuple):
    """A job that has ended: each rank's exit code, None where the demo has killed it, and what each has printed."""

    codes: list[int | None]
    logs: list[str]

    def of_countoff(self, rank: int) -> str:
        """Returns what countoff has printed on a rank."""
        return "\n".join(line for line in self.logs[rank].splitlines() if line.startswith(f"[rank {rank}] "))

    def expect(self, is_so: bool, what: str) -> None:
        """Raises `DemoFailed`, with the end of each rank's output, unless what is expected is so."""
        if not is_so:
            ends = ["\n".join([f"rank {rank}:", *log.splitlines()[-10:]]) for rank, log in enumerate(self.logs)]
            raise DemoFailed("\n\n".join([f"expected {what}; the exit codes are {self.codes}", *ends]))


def run_demo(trace_dir: str | None) -> None:
    """Runs the demo.

    Args:
        trace_dir: Where the second job writes its trace; None: nowhere.

    Raises:
        ImportError: If a needed package is not installed; the message has the command that installs it.
        DemoFailed: If a job does not do what the demo is to show.
    """
    began = time.monotonic()
    if missing := [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]:
        raise ImportError(f"the demo needs {' and '.join(missing)}: pip install 'countoff[demo]'")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the ranks are ended then
    _say("… importing PyTorch and Lightning, once for all ranks")
    _prepare_environment()
    job = _example()
    found = [_without(job), _with(job, trace_dir), _fixed(job), _stopped(job)]
    _say(f"\nSummary, after {time.monotonic() - began:.0f} s", "bold")
    for name, line in zip(("without countoff", "with countoff", "fixed", 'uneven_train="stop"'), found, strict=True):
        _say(f"{name + ':':20} {line}")
    if trace_dir:
        _say(f"\nTo draw the trace of the second job: countoff report {trace_dir}")


def _without(job: Any) -> str:
    run = _train(job, "1. The job without countoff", COUNTOFF="0")
    run.expect(any(code != 0 for code in run.codes), "a job that hangs or fails")
    _say(f"{'rank':5} {'exit':7} {'batches':8} it was in", "bold")
    for rank, (code, log) in enumerate(zip(*run, strict=True)):
        _say(f"{rank:<5} {'killed' if code is None else code!s:7} {log.count(_BATCH):<8} {_place(log)}")
    if None not in run.codes:
        return "the job failed, and no rank said which one is short of batches"
    _say(f"No rank went on for {_PATIENCE:g} s, and the demo killed them. Lightning would wait for 30 minutes.")
    return "the job hung, and no rank said why"


def _with(job: Any, trace_dir: str | None) -> str:
    trace = {"COUNTOFF_TRACE_DIR": trace_dir} if trace_dir else {}
    run = _train(job, "2. The same job with callbacks=[Countoff()]", **trace)
    verdict = f"countoff: UnevenBatches: rank {_SHORT} ran out of data after 11 batches of train epoch 0;"
    run.expect(all(run.codes) and all(verdict in run.of_countoff(rank) for rank in _RANKS), f"'{verdict}'")
    _say(run.of_countoff(0), "yellow")
    _say(f"Each of the other ranks printed its first line. Exit codes: {', '.join(map(str, run.codes))}.")
    run.expect(not trace_dir or any(Path(trace_dir).glob("rank-*.jsonl")), f"a trace in {trace_dir}")
    known = re.search(r"known on every rank ([\d.]+) ms", run.logs[0])
    return f"every rank named rank {_SHORT}" + (f", {known[1]} ms after its last batch" if known else "")


def _fixed(job: Any) -> str:
    run = _train(job, "3. The fixed job: every rank has the same number of digits", "--fixed")
    run.expect(not any(map(run.of_countoff, _RANKS)), "no word of countoff")
    return f"no verdict; {_trained(run)}"


def _stopped(job: Any) -> str:
    run = _train(job, '4. The job of part 1 with Countoff(uneven_train="stop")', COUNTOFF_UNEVEN_TRAIN="stop")
    run.expect("Truncated: train epoch 0 stopped on every rank after 11 batches" in run.of_countoff(0), "Truncated")
    _say(run.of_countoff(0), "yellow")
    return f"11 batches per epoch on every rank; {_trained(run)}"


def _trained(run: Run) -> str:
    """Returns the last line of the example, which it prints where it has trained to its end."""
    last = run.logs[0].strip().rpartition("\n")[2]
    run.expect(run.codes == [0] * len(_RANKS) and last.startswith("trained "), "training to the end on every rank")
    _say(last)
    return last


def _place(log: str) -> str:
    """Returns where a rank was when it was asked: its innermost frame, and its innermost one in a loop of Lightning."""
    stack = next((part for part in log.split("most recent call first") if _EXAMPLE in part), "")
    frames = [re.search(_FRAME.format(directory), stack) for directory in ("/", "/pytorch/loops/")]
    return ", ".join(f"{name} ({file}:{line})" for file, line, name in (frame.groups() for frame in frames if frame))


def _prepare_environment() -> None:
    """Sets what all ranks inherit: no setting of the user's, and one thread per rank."""
    for name in [name for name in os.environ if name.startswith("COUNTOFF")]:
        del os.environ[name]
    # torch's store makes a reverse DNS look-up on each connection; a name server that does not answer costs 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")


def _example() -> Any:
    """Imports the example, which lies beside this file in the wheel, and has it say when it trains on a batch."""
    places = [Path(__file__).parent / _EXAMPLE, Path(__file__).parents[3] / "examples" / _EXAMPLE]
    spec = importlib.util.spec_from_file_location("lightning_digits", next(path for path in places if path.exists()))
    assert spec is not None
    assert spec.loader is not None
    job: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    step = job.Digits.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        print(_BATCH, flush=True)
        return step(self, batch, batch_idx)

    job.Digits.training_step = training_step
    return job


def _train(job: Any, heading: str, *arguments: str, **variables: str) -> Run:
    """Runs the example on all ranks until they end or hang, and leaves none running."""
    set_first = "".join(f"{name}={value} " for name, value in variables.items())
    _say(f"\n{heading}", "bold")
    _say(f"$ {set_first}torchrun --standalone --nproc-per-node {len(_RANKS)} {' '.join([_EXAMPLE, *arguments])}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="countoff-demo-") as directory:
        logs = [Path(directory, f"rank{rank}.log") for rank in _RANKS]
        try:
            for rank in _RANKS:
                logs[rank].touch()
                given = (job, rank, port, logs[rank], arguments, variables)
                ranks.append(multiprocessing.get_context("fork").Process(target=_be_rank, args=given, daemon=True))
                ranks[-1].start()
            codes = _wait(ranks, logs)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return Run(codes, [log.read_text(errors="replace") for log in logs])


def _be_rank(job: Any, rank: int, port: int, log: Path, arguments: Sequence[str], variables: dict[str, str]) -> None:
    """Runs the example as one rank of torchrun's, whose output goes to a file."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which ends all ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO)  # countoff logs how soon every rank knew a verdict
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": len(_RANKS), "MASTER_PORT": port}
    os.environ.update(variables, LOCAL_WORLD_SIZE=str(len(_RANKS)), MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="demo")
    os.environ.update({name: str(number) for name, number in numbers.items()})
    sys.argv = [_EXAMPLE, *arguments]
    job.main()


def _wait(ranks: Sequence[BaseProcess], logs: Sequence[Path]) -> list[int | None]:
    """Waits until all ranks have ended, or none prints a batch for a while. Those that are left print their stacks."""
    began = moved = told = now = time.monotonic()
    texts: list[str] = []
    while any(rank.exitcode is None for rank in ranks) and now - began < _LONGEST:
        time.sleep(0.1)
        before, texts, now = texts, [log.read_text(errors="replace") for log in logs], time.monotonic()
        moved = moved if texts == before else now
        if now - moved > _PATIENCE and all(_BATCH in text for text in texts):
            break
        if now - told > 5.0:
            print(f"… {now - began:.0f} s", file=sys.stderr, flush=True)
            told = now
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.exitcode is None:
            os.kill(rank.pid or 0, signal.SIGUSR1)
    time.sleep(0.5 if None in codes else 0.0)
    return codes


def _say(text: str, style: str | None = None) -> None:
    from countoff._terminal import console  # needs rich, which the demo has looked for

    console().print(text, style=style, markup=False, emoji=False)
