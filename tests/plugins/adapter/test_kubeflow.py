"""What Kubeflow is told of a fit, by a server that answers well, badly or never."""

import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from countoff._adapter import kubeflow
from countoff._adapter.fit import Fit, OwnRank
from countoff._torch.words import WORDS
from countoff.core import FitPlan, LoaderFacts, Settings
from countoff.core.totals import Totals
from tests.receiver import Receiver, accepts, hangs, receiving

TOKEN = "eyJhbGciOiJSUzI1NiJ9.secret"
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/digits/status"
TOTALS = LoaderFacts(reported_batches=4, batch_size=2, drop_last=False, samples_per_rank=8, max_epochs=3)


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the token."""
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(path))
    monkeypatch.delenv("DISABLE_KUBEFLOW_INTEGRATION", raising=False)
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", raising=False)
    return path


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Posts follow one another at once."""
    monkeypatch.setattr(kubeflow, "EVERY_SECONDS", 0.01)


@pytest.fixture
def server(token: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A server that takes each status."""
    with receiving() as receiver:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"{receiver.url}{PATH}")
        yield receiver


def begun(rank: int = 0, facts: LoaderFacts | None = TOTALS, steps_before: int = 0, **how: Any) -> Fit:
    """A fit of 12 steps, by default, that has begun its first train epoch."""
    totals = None if facts is None else Totals(facts, dp_degree=1, framework="len(loader)")
    fit = Fit(Settings(), WORDS, OwnRank(rank, 1, 0, 1), totals, steps_before=steps_before, **how)
    fit.begin(FitPlan(), {})
    fit.guard.train_start(0)
    return fit


def step(fit: Fit, steps: int) -> None:
    for _ in range(steps):
        fit.guard.batch()
        fit.guard.step()


def end(fit: Fit) -> None:
    fit.guard.train_end("exhausted")
    fit.guard.fit_end()
    fit.guard.close()


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "countoff kubeflow"]


def told(server: Receiver) -> list[dict[str, Any]]:
    return [request.content["trainerStatus"] for request in server.requests]


def seconds_of(action: Callable[[], object]) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def test_the_status_has_what_the_controller_reads(server: Receiver, soon: None) -> None:
    fit = begun()
    server.wait_for(1)
    step(fit, 6)
    first, second = server.wait_for(2)[:2]
    end(fit)
    assert (first.method, first.path) == ("POST", PATH)
    assert first.headers["authorization"] == f"Bearer {TOKEN}"
    assert first.headers["content-type"] == "application/json"
    assert list(first.content) == ["trainerStatus"]
    now = datetime.now(timezone.utc)
    assert abs((now - datetime.fromisoformat(told(server)[0].pop("lastUpdatedTime"))).total_seconds()) < 60
    metrics = first.content["trainerStatus"].pop("metrics")
    assert first.content["trainerStatus"] == {"progressPercentage": 0}
    assert {"name": "countoff/total_steps", "value": "12"} in metrics
    assert {"name": "current_step", "value": "0"} in metrics
    assert second.content["trainerStatus"]["estimatedRemainingSeconds"] >= 0


def test_progress_rises_to_100(server: Receiver, soon: None) -> None:
    fit = begun()
    for number in range(1, 13):
        step(fit, 1)
        server.wait_for(number)
    end(fit)
    progress = [status["progressPercentage"] for status in told(server)]
    assert progress == sorted(progress)
    assert progress[-1] == 100
    assert max(progress[:-1]) == 99
    assert told(server)[-1]["estimatedRemainingSeconds"] == 0
    assert threads() == []


def test_a_resumed_run_begins_where_it_was(server: Receiver, soon: None) -> None:
    fit = begun(steps_before=6)
    assert server.wait_for(1)[0].content["trainerStatus"]["progressPercentage"] == 50
    end(fit)


def test_the_remaining_time_is_that_of_this_fits_steps(
    server: Receiver, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    monkeypatch.setattr(kubeflow, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fit = begun(steps_before=6)
    server.wait_for(1)
    now[0] += 10.0
    step(fit, 2)
    server.wait_for(2)
    assert told(server)[-1]["estimatedRemainingSeconds"] == 20
    end(fit)


def test_a_fit_that_breaks_off_is_not_complete(server: Receiver, soon: None) -> None:
    fit = begun()
    step(fit, 6)
    fit.guard.close()
    assert told(server)[-1]["progressPercentage"] == 50
    assert threads() == []


def test_a_job_that_stands_still_has_an_old_status(server: Receiver, soon: None) -> None:
    fit = begun()
    server.wait_for(1)
    time.sleep(0.3)
    assert len(server.requests) == 1
    end(fit)


def test_without_a_total_there_is_no_percentage(server: Receiver, soon: None) -> None:
    fit = begun(facts=None)
    step(fit, 3)
    fit.guard.close()
    assert "progressPercentage" not in told(server)[-1]
    assert told(server)[-1]["metrics"] == [{"name": "current_step", "value": "3"}]


def test_a_name_that_the_controller_refuses_is_left_out(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the whole status otherwise."""
    monkeypatch.setattr(Fit, "metrics", property(lambda fit: {"m" * 64: 1, "m" * 65: 2}))
    end(begun())
    assert [metric["name"] for metric in told(server)[-1]["metrics"]] == ["m" * 64, "current_step"]


def test_an_evaluation_alone_is_not_told(server: Receiver) -> None:
    fit = Fit(Settings(), WORDS, OwnRank(0, 1, 0, 1))
    fit.begin(FitPlan(), {})
    fit.guard.eval_start("validation")
    assert threads() == []
    fit.guard.close()
    assert server.requests == []


def test_one_fit_of_a_process_is_told(server: Receiver) -> None:
    first, second = begun(), begun(steps_before=6)
    end(second)
    end(first)
    assert {status["progressPercentage"] for status in told(server)} == {0, 100}
    assert len(server.requests) <= 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KUBEFLOW_TRAINER_SERVER_URL", None),
        ("KUBEFLOW_TRAINER_SERVER_URL", ""),
        ("DISABLE_KUBEFLOW_INTEGRATION", "true"),
    ],
)
def test_nothing_begins_unless_asked_for(
    server: Receiver, monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    fit = begun()
    assert threads() == []
    end(fit)
    assert server.requests == []


@pytest.mark.parametrize("how", [{"rank": 1}, {"tells_kubeflow": False}])
def test_nothing_begins_elsewhere(server: Receiver, how: dict[str, Any]) -> None:
    """Neither on another rank, nor where the framework tells Kubeflow."""
    fit = begun(**how)
    assert threads() == []
    end(fit)
    assert server.requests == []


def drips(handler: BaseHTTPRequestHandler) -> None:
    """Sends a header that never ends; each byte comes in time."""
    while True:
        handler.wfile.write(b"H")
        time.sleep(0.1)


@pytest.mark.parametrize("answer", [hangs, drips])
def test_a_server_that_does_not_answer_is_left(
    token: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[BaseHTTPRequestHandler], None]
) -> None:
    """The training waits for it at its end alone, for a second, and then its thread is gone."""
    with receiving(answer) as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url)
        fit = begun()
        server.wait_for(1)
        assert seconds_of(lambda: (step(fit, 12), end(fit))) < 20  # a server that hangs does so for 60
        until = time.monotonic() + 20
        while threads():
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_server_that_refuses_is_told_of_once(
    token: Path, soon: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "countoff")
    with receiving() as server:
        url = server.url
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    fit = begun()
    time.sleep(0.2)
    end(fit)
    assert caplog.messages == ["Kubeflow was not told how far the fit is: ConnectionRefusedError, Connection refused"]


def breaks(handler: BaseHTTPRequestHandler) -> None:
    handler.send_error(500, TOKEN)


def talks_nonsense(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(f"{TOKEN}\r\n\r\n".encode())
    handler.close_connection = True


def sends_elsewhere(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(302)
    handler.send_header("Location", f"http://{handler.headers['Host']}/elsewhere")
    handler.end_headers()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (breaks, "its server answered 500"),
        (talks_nonsense, "BadStatusLine"),
        (sends_elsewhere, "its server answered 302"),
    ],
)
def test_a_server_that_fails_costs_one_line(
    token: Path,
    soon: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    answer: Callable[[BaseHTTPRequestHandler], None],
    reason: str,
) -> None:
    """It is asked again, and the token goes nowhere else."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(HTTPConnection, "debuglevel", 1)  # a program's own, for what it asks itself
    with receiving(answer) as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url)
        fit = begun()
        server.wait_for(3)
        end(fit)
        assert {request.path for request in server.requests} == {"/"}
    assert caplog.messages == [f"Kubeflow was not told how far the fit is: {reason}"]
    assert "secret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("text", [f"{TOKEN}\nmore", f"{TOKEN}é☃"])
def test_a_token_that_no_header_can_have_is_not_quoted(
    server: Receiver,
    token: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    text: str,
) -> None:
    caplog.set_level(logging.DEBUG, "countoff")
    token.write_text(text)
    end(begun())
    assert server.requests == []
    assert len(caplog.messages) == 1
    assert "secret" not in "".join((caplog.text, *capfd.readouterr()))


def test_without_a_token_nothing_is_sent(server: Receiver, token: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "countoff")
    token.unlink()
    end(begun())
    assert server.requests == []
    assert caplog.messages == ["Kubeflow was not told how far the fit is: FileNotFoundError, No such file or directory"]


def test_a_renewed_token_is_read(server: Receiver, token: Path, soon: None) -> None:
    fit = begun()
    server.wait_for(1)
    token.write_text("another")
    step(fit, 1)
    assert server.wait_for(2)[1].headers["authorization"] == "Bearer another"
    end(fit)


def test_a_status_that_was_not_taken_is_posted_again(token: Path, soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_last(handler: BaseHTTPRequestHandler) -> None:
        (accepts if len(server.requests) == 3 else breaks)(handler)

    with receiving(at_last) as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url)
        fit = begun()
        server.wait_for(3)
        time.sleep(0.2)
        assert len(server.requests) == 3
        fit.guard.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_a_server_is_known_by_the_jobs_certificate(
    token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another one does not get the token."""
    caplog.set_level(logging.DEBUG, "countoff")
    key, certificate = tmp_path / "both.pem", tmp_path / "ca.crt"
    name = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *name)
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    key.write_text(key.read_text() + certificate.read_text())
    with receiving(certificate=key) as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"{server.url}{PATH}")
        end(begun())
        assert server.requests == []
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("Kubeflow was not told how far the fit is: SSLCertVerificationError")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
        end(begun())
        assert told(server)[-1]["progressPercentage"] == 100
