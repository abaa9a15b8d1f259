"""Where a verdict is told besides the output, in real jobs: one message of each, after the verdict, and no secret."""

import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from countoff.core import DivergenceError, Finding
from countoff.core.alerts.alerts import NOTIFY_SECONDS
from countoff.core.ending.shutdown import PRINT_SECONDS
from countoff.torch import Countoff
from integration_tests import constants, devices, loops
from integration_tests.digits import own_rank, share_loader
from integration_tests.harness import RankResult, Watch
from integration_tests.lightning_jobs import fit
from integration_tests.output import verdict_lines
from integration_tests.test_faults import long_job
from integration_tests.test_stalled_jobs import hang_beside_the_others
from integration_tests.torchrun import launched
from tests.receiver import Receiver, breaks, hangs, receiving, talks_nonsense

ROOT = Path(__file__).parents[1]
SECRET = "hunter2"
SENTENCE = "UnevenBatches: rank 3 ran out of data after 4 batches of train epoch 0"


def notify(receiver: Receiver) -> str:
    return f"json://me:{SECRET}@{receiver.place}/{SECRET}"


def bodies_of(receiver: Receiver) -> list[dict[str, Any]]:
    """What has come, once there is something."""
    receiver.wait_for(1)
    return receiver.bodies


def environment(directory: Path, address: str) -> dict[str, str]:
    """That of a job in a pod, which writes all that countoff can write."""
    (directory / "termination-log").touch()
    return {
        "COUNTOFF_NOTIFY": address,
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        **constants.environment(TERMINATION_LOG=str(directory / "termination-log")),
        "COUNTOFF_VERDICT_FILE": str(directory / "verdict.json"),
        "COUNTOFF_TRACE_DIR": str(directory / "trace"),
    }


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def assert_no_secret(results: Sequence[RankResult], directory: Path) -> None:
    """It is in no output, no error file, and no file of the job: verdict, log, trace, incident."""
    written = {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert any("trace" in path for path in written)
    for place, text in {**written, "output": "".join(f"{each}{each.error_file}" for each in results).encode()}.items():
        assert SECRET.encode() not in text, place


def log_everything_and_train(batches: list[int]) -> None:
    """A plain loop in a program that prints all debug lines, with a short rank."""
    import logging

    logging.basicConfig(level=logging.DEBUG)
    loops.uneven(batches)


def raise_everywhere() -> None:
    """All ranks fail by themselves, in the same batch."""
    devices.join()
    model, optimizer = loops.model_and_optimizer()
    loader = loops.even_loader()
    countoff = Countoff(optimizer=optimizer)
    for number, batch in enumerate(countoff.train(loader)):
        loops.train_on(model, optimizer, batch)
        if number == 3:
            raise ValueError(f"torn shard on rank {own_rank()}")


def time_the_end() -> float:
    """Seconds from the proof that rank 1 is short until this rank's loop has its exception, of countoff or of gloo."""
    devices.join()
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(5 - own_rank())
    countoff = Countoff(optimizer=optimizer)
    try:
        for _ in range(3):
            for batch in countoff.train(loader):
                loops.train_on(model, optimizer, batch)
    except (DivergenceError, RuntimeError):
        assert countoff.guard.verdict is not None
        return time.time() - countoff.guard.verdict.time
    raise AssertionError("the loop has ended")


def train_and_tell(listening: Sequence[int], batches: Sequence[int], failing: bool = False) -> list[tuple[str, str]]:
    """What `on_finding` is told on this rank, and by which thread, where it is given to some of the ranks."""
    devices.join()
    told: list[tuple[str, str]] = []

    def tell(finding: Finding) -> None:
        told.append((finding.kind, threading.current_thread().name))
        if failing:
            raise ConnectionError(SECRET)

    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(batches[own_rank()])
    countoff = Countoff(optimizer=optimizer, on_finding=tell if own_rank() in listening else None)
    try:
        for _ in range(2):
            for batch in countoff.train(loader):
                loops.train_on(model, optimizer, batch)
    except (DivergenceError, RuntimeError):
        assert countoff.guard.verdict is not None
    return told


UNEVEN = [("UnevenBatches", "countoff alert")]


def test_the_first_rank_that_can_calls_the_function_once(run_ranks):
    """Rank 0, where a tracker has its run; another one, if that has no function; and nobody in a healthy job."""
    for listening, batches, expected in [
        ([0, 1, 2], [5, 4, 5], [UNEVEN, [], []]),
        ([2], [5, 4, 5], [[], [], UNEVEN]),
        ([0, 1, 2], [5, 5, 5], [[], [], []]),
    ]:
        results = run_ranks(train_and_tell, 3, listening, batches, expect=None)
        assert [result.value for result in results] == expected, results


def test_a_function_that_raises_is_one_line(run_ranks):
    """It is named with the type of its exception, whose text may hold a secret; the verdict is as without it."""
    results = run_ranks(train_and_tell, 2, [0, 1], [5, 4], True, expect=None)
    assert [result.value for result in results] == [UNEVEN, []], results
    said = [line for result in results for line in result.output.splitlines() if "raised ConnectionError" in line]
    [line] = said
    assert line.startswith(
        "[rank 0] countoff: on_finding=train_and_tell.<locals>.tell raised ConnectionError, and was not"
    )
    assert SECRET not in "".join(result.output for result in results)


def test_one_message_and_the_log_of_a_job(run_ranks, tmp_path, receiver):
    """A launcher that ends all ranks as soon as it sees one end does not cut the message off."""
    env = environment(tmp_path, notify(receiver))
    results = run_ranks(log_everything_and_train, 4, [5, 5, 5, 4], expect=None, env=env, kill_peers_after=0)
    [body] = bodies_of(receiver)
    assert body["title"].startswith(f"countoff: {SENTENCE}"), body
    assert body["type"] == "failure"
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    lines = body["message"].splitlines()
    first, *others = verdict["remedy"].splitlines()
    told = [f"why: {verdict['why']}", f"do:  {first}", *(f"or:  {each}" for each in others)]
    assert others, body
    assert "\n".join(told) in body["message"], body
    assert lines[-1] == f"files: {tmp_path}/verdict.json, {tmp_path}/trace"
    log = (tmp_path / "termination-log").read_text().splitlines()
    assert log[0].startswith(f"countoff: {SENTENCE}")
    assert log[1:] == lines[1:]
    assert "was not told" not in "".join(result.output for result in results)
    assert_no_secret(results, tmp_path)


def test_all_ranks_fail_at_once_and_one_message_is_sent(run_ranks, tmp_path, receiver):
    env = environment(tmp_path, notify(receiver))
    results = run_ranks(raise_everywhere, 4, expect=None, env=env)
    assert [result.exit_code for result in results] == [1] * 4
    [body] = bodies_of(receiver)
    assert "all 4 ranks raised ValueError: torn shard on rank … at test_alerts.py:" in body["title"]
    assert (tmp_path / "termination-log").read_text().startswith(body["title"].removesuffix("…"))


def test_a_healthy_job_sends_nothing(run_ranks, tmp_path, receiver):
    results = run_ranks(log_everything_and_train, 2, [5, 5], env=environment(tmp_path, notify(receiver)))
    assert [verdict_lines(result) for result in results] == [[], []]
    assert receiver.bodies == []
    assert (tmp_path / "termination-log").read_text() == ""
    assert_no_secret(results, tmp_path)


# tests/core/alerts/test_notifications.py has all of them at each merge.
@pytest.mark.parametrize(
    "answer", [hangs, *(pytest.param(each, marks=pytest.mark.nightly) for each in (breaks, talks_nonsense, None))]
)
def test_what_a_receiver_does_changes_no_end(run_ranks, tmp_path, answer):
    """The ranks get their exception, later by no more than the stated limit."""
    with receiving(answer or hangs) as receiver, socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens there
        place = receiver.place if answer else f"127.0.0.1:{free.getsockname()[1]}"
        env = environment(tmp_path, f"json://me:{SECRET}@{place}")
        results = run_ranks(time_the_end, 2, expect=None, env=env)
    slack = 5.0
    assert max(result.value for result in results) < PRINT_SECONDS + NOTIFY_SECONDS + slack, results
    assert_no_secret(results, tmp_path)


def test_where_rank_0_is_gone_another_one_tells(run_ranks, tmp_path, receiver):
    def kill(watch: Watch) -> None:
        watch.wait_for(0, "training")
        watch.kill(0)

    env = environment(tmp_path, notify(receiver))
    results = run_ranks(fit, 3, long_job(3), expect=None, env=env, while_running=kill)
    assert [result.exit_code for result in results] == [-signal.SIGKILL, 1, 1], results
    [body] = bodies_of(receiver)
    assert body["title"].startswith("countoff: LostRank: rank 0 is gone")


def test_a_warning_is_sent_as_one_and_stands_in_no_log(run_ranks, tmp_path, receiver):
    env = {**environment(tmp_path, notify(receiver)), "COUNTOFF_LEVELS": "SameOrder=off"}  # of its train loader
    run_ranks(loops.uneven_eval, 2, [3, 2], "warn", env=env)
    [body] = bodies_of(receiver)
    assert body["type"] == "warning"
    assert body["title"].startswith("countoff: UnevenBatches: ")
    assert (tmp_path / "termination-log").read_text() == ""


def test_a_process_that_cannot_raise_has_its_message(run_ranks, tmp_path, receiver):
    """Rank 1 never leaves a loop of its own."""
    env = {"COUNTOFF_NOTIFY": notify(receiver)}
    results = run_ranks(hang_beside_the_others, 2, str(tmp_path), expect=None, env=env)
    assert [result.exit_code for result in results] == [1, 87], results
    assert [body["title"].split(": ")[1] for body in bodies_of(receiver)] == ["Stalled"]


@pytest.mark.nightly
@pytest.mark.torchrun
def test_torchrun_in_a_pod(tmp_path, receiver):
    """The real launcher ends the ranks as soon as one of them has ended."""
    env = environment(tmp_path, notify(receiver))
    script = tmp_path / "in_a_pod.py"
    script.write_text(
        f"import runpy, sys\nsys.path[:0] = [{str(ROOT)!r}]\nfrom integration_tests import constants\n"
        "constants.put_those_of_the_environment()\n"
        f"runpy.run_path({str(ROOT / 'examples' / 'torch_digits.py')!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    with launched(command, directory=tmp_path, env=env) as launcher:
        run = launcher.finish(time.monotonic() + 180)
    assert run.exit_code == 1, run.output
    [body] = bodies_of(receiver)
    assert re.match("countoff: UnevenBatches: rank 1 ran out of data after 23 batches", body["title"]), body
    title = body["title"].removesuffix("…")  # what rank 0 was seen to do may be too long for a title
    assert (tmp_path / "termination-log").read_text().startswith(title)
    assert SECRET not in run.output
