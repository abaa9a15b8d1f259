"""A program runs as without countoff where `python -m countoff.run` or `countoff run` is in front of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from countoff._run.environment import SITE, with_hooks
from countoff.cli.__main__ import main
from countoff.core import Settings
from countoff.core.settings import SECRET_OPTIONS, variable_of
from tests.paths import SOURCE_PATH, SOURCE_ROOTS

PYTHON = [sys.executable]
COMMAND = [*PYTHON, "-m", "countoff", "run", "--"]
NOTHING = "countoff: nothing was compared: no Python process below "
WAYS = {
    "countoff.run": lambda program: [*PYTHON, "-m", "countoff.run", *program],
    "flags": lambda program: [*PYTHON, "-X", "utf8", "-Wignore", "-um", "countoff.run", *program],
    "countoff run": lambda program: [*COMMAND, *PYTHON, *program],
}

SEEN = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "file": __file__, "name": __name__, "package": __package__,
    "spec": getattr(__spec__, "name", None), "cwd": os.getcwd(), "modules": sorted(sys.modules["__main__"].__dict__),
}))
"""
SPAWNS = """
import multiprocessing, pickle, sys
class Thing:
    pass
def child(thing):
    print(type(thing).__module__, type(thing) is Thing, flush=True)
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing, flush=True)
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=child, args=(Thing(),))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
PROGRAMS: dict[str, tuple[dict[str, str | bytes], Sequence[str]]] = {
    "a script with arguments": ({"train.py": SEEN}, ["train.py", "--lr", "3e-4", "-m", "--", "x y"]),
    "a path with spaces": ({"my code/train it.py": SEEN}, ["my code/train it.py"]),
    "a module": ({"train.py": SEEN}, ["-m", "train", "-h"]),
    "a package": ({"job/__init__.py": "", "job/__main__.py": SEEN}, ["-m", "job"]),
    "a directory": ({"job/__main__.py": SEEN}, ["job", "1"]),
    "another encoding": (
        {"train.py": "# -*- coding: latin-1 -*-\nprint('\xe9' == chr(233))".encode("latin-1")},
        ["train.py"],
    ),
    "a module called torch_utils": (
        {"torch_utils.py": "x = 7", "train.py": "import torch_utils; print(torch_utils.x)"},
        ["train.py"],
    ),
    "an exit with a text": ({"train.py": "import sys; sys.exit('no data')"}, ["train.py"]),
    "an exit with a number": ({"train.py": "import sys; sys.exit(75)"}, ["train.py"]),
    "an exception": ({"train.py": "def load():\n    raise ValueError('no data')\nload()\n"}, ["train.py"]),
    "a syntax error": ({"train.py": "def load(:\n"}, ["train.py"]),
    "no such script": ({}, ["train.py"]),
    "spawn": ({"train.py": SPAWNS}, ["train.py", "spawn"]),
    "fork": ({"train.py": SPAWNS}, ["train.py", "fork"]),
    "forkserver": ({"train.py": SPAWNS}, ["train.py", "forkserver"]),
    "its own sitecustomize": (
        {"site/sitecustomize.py": "import builtins; builtins.customized = 7", "train.py": "print(customized)"},
        ["train.py"],
    ),
    "standard input": ({"train.py": "print(input()[::-1])"}, ["train.py"]),
}


def outcome(command: Sequence[str], directory: Path, **more: str) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    path = [str(directory / "site"), SOURCE_PATH]
    environment |= {"PYTHONPATH": os.pathsep.join(path), **more}
    done = subprocess.run(
        command, cwd=directory, env=environment, input="gnp\n", capture_output=True, text=True, timeout=60
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith(NOTHING)]
    return done.returncode, done.stdout, "\n".join(errors)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_runs_as_without(program: tuple[dict[str, str | bytes], Sequence[str]], tmp_path: Path) -> None:
    files, arguments = program
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    without = outcome([*PYTHON, *arguments], tmp_path)
    assert {way: outcome(make(arguments), tmp_path) for way, make in WAYS.items()} == dict.fromkeys(WAYS, without)


def hooks(command: Sequence[str], directory: Path, **more: str) -> int:
    """How many times a Python process that a command starts has the hooks; it has nothing else of countoff."""
    ask = "import sys; print([type(each).__module__ for each in sys.meta_path].count('countoff._run.hooks'), end=' '); "
    ask += "print(*sorted(name for name in sys.modules if name.startswith('countoff')))"
    (directory / "ask.py").write_text(ask)
    code, output, errors = outcome(command, directory, **more)
    assert (code, errors) == (0, ""), errors
    count, _, modules = output.partition(" ")
    light = {"countoff", "countoff._run", "countoff._run.hooks", "countoff.core", "countoff.core.flag"}
    assert not set(modules.split()) - light, modules
    return int(count)


CHILD = """
import multiprocessing, sys
def child():
    print([type(each).__module__ for each in sys.meta_path].count("countoff._run.hooks"), flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
"""


def test_processes_below_have_the_hooks_once(tmp_path: Path) -> None:
    ask = [*PYTHON, "ask.py"]
    shell = ["sh", "-c", f"{sys.executable} ask.py"]
    assert hooks(ask, tmp_path) == 0
    assert hooks([*PYTHON, "-m", "countoff.run", "ask.py"], tmp_path) == 1
    assert hooks([*COMMAND, *shell], tmp_path) == 1
    assert hooks([*COMMAND, *PYTHON, "-m", "countoff.run", "ask.py"], tmp_path) == 1
    assert hooks([*COMMAND, *COMMAND, *ask], tmp_path) == 1
    assert hooks([*COMMAND, *ask], tmp_path, COUNTOFF="0") == 0
    assert hooks([*COMMAND, *PYTHON, "-I", "ask.py"], tmp_path) == 0


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_process_of_multiprocessing_has_the_hooks_too(method: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHILD)
    assert outcome([*PYTHON, "-m", "countoff.run", "train.py", method], tmp_path) == (0, "1\n", "")


def test_a_python_that_ignores_the_environment_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    said = "countoff: nothing is observed: python -I ignores what places the hooks"
    assert outcome([*PYTHON, "-I", "-m", "countoff.run", "train.py"], tmp_path) == (0, "trained\n", said)


def test_a_python_that_runs_another_program_first_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    start = f"import sys; sys.path[:0] = {list(map(str, SOURCE_ROOTS))}; "
    start += "import runpy; runpy.run_module('countoff.run', run_name='__main__')"
    code, output, errors = outcome([*PYTHON, "-c", start, "train.py"], tmp_path)
    assert (code, output) == (2, "")
    assert errors == (
        "countoff.run: start it as python -m countoff.run; a profiler or a debugger comes behind it: "
        "python -m countoff.run -m cProfile train.py"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--uneven-train", "stopp", "--", "true"], 2, "--uneven-train must be 'raise' or 'stop', got 'stopp'"),
        (
            ["--uneven-trian", "stop", "--", "true"],
            2,
            "there is no argument --uneven-trian; did you mean --uneven-train?",
        ),
        (["true"], 2, "there is no argument true; write the command after --: countoff run -- torchrun train.py"),
        ([], 2, "run needs a command: countoff run -- torchrun --nproc-per-node 8 train.py"),
        (
            ["--json", "--", "true"],
            2,
            "--json of countoff run needs --dry-run: the job itself prints what it prints",
        ),
        (["--"], 2, "run needs a command: countoff run -- torchrun --nproc-per-node 8 train.py"),
        (["--", "no-such-command"], 127, "there is no command 'no-such-command'"),
        (["--", "/"], 126, "cannot run '/': Permission denied"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    arguments: list[str], code: int, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert (ended.value.code, capfd.readouterr()) == (code, ("", f"countoff: {line}\n"))


def test_every_setting_is_an_option(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values: dict[str, object] = {
        "levels": "Stalled=raise",
        "verdict_file": str(tmp_path / "verdict.json"),
        "trace_dir": str(tmp_path / "trace"),
        "on_divergence": "warn",
    }
    for name, default in vars(Settings()).items():
        if name not in {"enabled", "on_finding", *SECRET_OPTIONS}:
            text = str(values.get(name, default))
            option = f"--{name.replace('_', '-')}"
            script = f"import os; print(os.environ[{variable_of(name)!r}])"
            with pytest.raises(SystemExit):
                main(["run", option, text, "--", sys.executable, "-c", script])
            assert capfd.readouterr().out == f"{text}\n", f"{option} is not in _SETTINGS of countoff/cli/__main__.py"


def test_no_address_is_a_flag_or_printed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each user of a machine sees the flags of its processes."""
    with pytest.raises(SystemExit):
        main(["run", "--notify", "slack://hunter2", "--", "true"])
    assert "hunter2" not in "".join(capfd.readouterr())
    monkeypatch.setenv("COUNTOFF_NOTIFY", "slack://hunter2")
    main(["run", "--dry-run", "--", "true"])
    assert "hunter2" not in "".join(capfd.readouterr())


def test_a_dry_run_says_what_would_be_hooked(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    main(["run", "--dry-run", "--weights-every", "8", "--", "touch", "train it"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[:4] == ["would run: touch 'train it'", "  with COUNTOFF_WEIGHTS_EVERY=8", *lines[2:4]]
    assert {line.split("=")[0] for line in lines[2:4]} == {"  with PYTHONPATH", "  with COUNTOFF"}
    frameworks = {line.split()[0]: line.partition(": ")[2] for line in lines[4:]}
    assert frameworks["lightning"] == "the callback is added to every Trainer"
    assert frameworks["torch"].endswith("batches are compared only with Countoff() in the code")
    assert frameworks["accelerate"] == frameworks["torch"]
    assert not Path("train it").exists()


@pytest.mark.parametrize("is_on", [True, False])
def test_a_dry_run_as_json(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    monkeypatch.setenv("COUNTOFF", str(int(is_on)))
    main(["run", "--dry-run", "--json", "--weights-every", "8", "--", "touch", "train it"])
    found = json.loads(capfd.readouterr().out)
    assert list(found) == ["format", "command", "environment", "enabled", "frameworks"]
    assert (found["command"], found["enabled"]) == (["touch", "train it"], is_on)
    assert found["environment"]["COUNTOFF_WEIGHTS_EVERY"] == "8"
    lightning = found["frameworks"][0]
    assert (lightning["name"], lightning["version"]) == ("lightning", metadata.version("lightning"))
    assert (lightning["hooked"], lightning["text"][:12]) == (is_on, "the callback")
    assert not Path("train it").exists()


def test_a_dry_run_as_json_says_what_is_not_installed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    main(["run", "--dry-run", "--json", "--", "true"])
    frameworks = json.loads(capfd.readouterr().out)["frameworks"]
    assert {(each["version"], each["hooked"]) for each in frameworks} == {(None, False)}


def test_a_job_without_ranks_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--", "true"])
    assert capfd.readouterr().err.startswith(f"{NOTHING}`true` has made a process group with the hooks in it. ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_command(number: signal.Signals, tmp_path: Path) -> None:
    """A signal of another process is passed on, once; the exit code is the command's."""
    waits = f"""
import signal, sys, time
def count(*_):
    print("got it", flush=True)
    sys.exit(9)
signal.signal({int(number)}, count)
print("ready", flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH}
    with subprocess.Popen(
        [*COMMAND, *PYTHON, "-c", waits], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "got it\n"
        assert process.wait(30) == 9


def test_a_command_that_a_signal_ends_gives_the_shells_code(tmp_path: Path) -> None:
    assert outcome([*COMMAND, "sh", "-c", "kill -9 $$"], tmp_path)[0] == 137


def test_the_environment_keeps_what_the_user_has() -> None:
    given = {"PYTHONPATH": "mine", "COUNTOFF": "on", "OTHER": "x"}
    assert with_hooks(given) == {"PYTHONPATH": f"{SITE}{os.pathsep}mine", "COUNTOFF": "on", "OTHER": "x"}
    assert with_hooks(with_hooks({})) == {"PYTHONPATH": SITE, "COUNTOFF": "1"}
