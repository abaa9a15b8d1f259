"""Installs the wheel of dist/ with each of its extras alone, and prints as a table what is there and works.

    python -m tests.wheel_extras
    python -m tests.wheel_extras --pythons 3.10 3.13 --only torch cli

Each environment is empty before, and is deleted after it. The adapters of the extra must import there, each other one
must name the command that it needs, no other framework may be there, and what the extra is for must work. The exit code
is 1 where something did not. It needs uv, and no framework itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT
from tests.receiver import receiving

TRACE = str(ROOT / "tests" / "data_0_1" / "trace")
ADAPTERS = {
    "accelerate": "pip install 'countoff[accelerate]'",
    "composer": "pip install 'countoff[composer]'",
    "fabric": "pip install 'countoff[lightning]'",
    "lightning": "pip install 'countoff[lightning]'",
    "lingua": "pip install 'countoff[torch]'",
    "pytorch_lightning": "pip install pytorch-lightning",
    "torch": "pip install 'countoff[torch]'",
    "torchtitan": "pip install torchtitan",
    "transformers": "pip install 'countoff[transformers]'",
}
"""Each adapter, and the command that installs what it needs."""
IMPORTS = """
import importlib, json, sys
lines = {}
for adapter in sys.argv[1:]:
    try:
        importlib.import_module(f"countoff.{adapter}")
    except ImportError as error:
        lines[adapter] = str(error)
print(json.dumps(lines))
"""


class Wrong(Exception):
    """What is not as it should be in an environment."""


@dataclass(frozen=True)
class Environment:
    """An environment that the wheel is in.

    Attributes:
        directory: Its directory. Its programs run there, outside the checkout.
    """

    directory: Path

    def run(self, program: str, *arguments: str, **variables: str) -> str:
        """What one of its programs prints. Raises `Wrong` if its exit code is not 0."""
        done = subprocess.run(
            [str(self.directory / "bin" / program), *arguments],
            cwd=self.directory,
            env={"PATH": os.defpath, "HOME": str(self.directory), "LC_ALL": "C.UTF-8", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise Wrong(f"{program} has exit code {done.returncode}:\n{done.stdout}")
        return done.stdout


def plans(environment: Environment) -> None:
    """`countoff plan` prints a table, and `countoff report` draws a page."""
    environment.run("countoff", "plan", "--batch-size", "8", "--world-size", "4")
    environment.run("countoff", "report", TRACE, "-o", "page.html")


def writes_for_perfetto(environment: Environment) -> None:
    """`countoff report` draws the page of a trace, and writes the file for Perfetto."""
    environment.run("countoff", "report", TRACE, "-o", "page.html", "--perfetto", "job.pftrace")


def sends_a_message(environment: Environment) -> None:
    """`countoff notify` sends to a server on this machine."""
    with receiving() as server:
        environment.run("countoff", "notify", COUNTOFF_NOTIFY=f"json://{server.place}")
        server.wait_for(1)


def trains(environment: Environment) -> None:
    """`countoff demo` runs Lightning on real ranks, without and with a verdict."""
    environment.run("countoff", "demo")


def hooks(environment: Environment) -> None:
    """`python -m countoff.run` runs a program with the hooks."""
    environment.run("python", "-m", "countoff.run", "-m", "timeit", "-n1", "-r1")


@dataclass(frozen=True)
class Extra:
    """What an extra brings.

    Attributes:
        works: Tries what it is for; raises `Wrong`.
        adapters: Those that import.
        frameworks: The distributions of frameworks that are there.
        constraints: The versions that are installed.
    """

    works: Callable[[Environment], None]
    adapters: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ()
    constraints: str = "latest.txt"


LIGHTNING = ("lightning", "pytorch_lightning", "fabric", "torch", "lingua")
EXTRAS: Mapping[str, Extra] = {
    "cli": Extra(plans),
    "torch": Extra(hooks, ("torch", "lingua"), ("torch",)),
    "lightning": Extra(hooks, LIGHTNING, ("lightning", "pytorch-lightning", "torch")),
    "composer": Extra(
        hooks, ("composer", "torch", "lingua"), ("mosaicml", "transformers", "torch"), constraints="torch-2.7.txt"
    ),
    "accelerate": Extra(hooks, ("accelerate", "torch", "lingua"), ("accelerate", "torch")),
    "transformers": Extra(
        hooks, ("transformers", "accelerate", "torch", "lingua"), ("transformers", "accelerate", "torch")
    ),
    "perfetto": Extra(writes_for_perfetto),
    "notify": Extra(sends_a_message),
    "demo": Extra(trains, LIGHTNING, ("lightning", "pytorch-lightning", "torch")),
}
"""Each extra but `all`, which the tests have."""


def install(python: str, extra: str, wheel: Path, directory: Path) -> Environment:
    """Makes an environment of the wheel and one extra; uv links what it has in its cache."""
    places = [word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)]
    constraints = ["--constraints", str(ROOT / "constraints" / EXTRAS[extra].constraints)]
    into = ["--python", str(directory / "bin" / "python")]
    for command in (
        ["venv", "--quiet", "--python", python, str(directory)],
        ["pip", "install", "--quiet", *into, *places, *constraints, f"{wheel}[{extra}]"],
    ):
        done = subprocess.run([sys.executable, "-m", "uv", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(done.stderr)
    return Environment(directory)


def found(environment: Environment) -> dict[str, str]:
    """The frameworks that `countoff run` finds, with their versions."""
    printed = environment.run("countoff", "run", "--dry-run", "--json", "--", "python", "train.py")
    return {each["name"]: each["version"] for each in json.loads(printed)["frameworks"] if each["version"]}


def check(environment: Environment, extra: Extra) -> dict[str, str]:
    """Tries what the extra is for; returns the frameworks that are there. Raises `Wrong`."""
    failed = json.loads(environment.run("python", "-W", "ignore", "-c", IMPORTS, *ADAPTERS).splitlines()[-1])
    if set(failed) != set(ADAPTERS) - set(extra.adapters):
        raise Wrong(f"these adapters do not import: {failed}")
    if silent := [line for adapter, line in failed.items() if not line.endswith(f": {ADAPTERS[adapter]}")]:
        raise Wrong(f"these lines do not name the command: {silent}")
    frameworks = found(environment)
    if set(frameworks) != set(extra.frameworks):
        raise Wrong(f"the frameworks there are {frameworks}")
    extra.works(environment)
    return frameworks


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each Python and extra. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = ".".join(platform.python_version_tuple()[:2])
    parser.add_argument("--pythons", nargs="+", default=[own], metavar="X.Y", help=f"default: {own}")
    parser.add_argument("--only", nargs="+", default=list(EXTRAS), choices=EXTRAS, metavar="EXTRA")
    given = parser.parse_args(arguments)
    [wheel] = (ROOT / "dist").glob("*.whl")
    print("| Python | extra | frameworks | wrong |\n|---|---|---|---|", flush=True)
    wrong: list[str] = []
    for python in given.pythons:
        for name in given.only:
            with tempfile.TemporaryDirectory() as directory:
                frameworks, reason = {}, ""
                try:
                    frameworks = check(install(python, name, wheel, Path(directory, "env")), EXTRAS[name])
                except Wrong as error:
                    wrong.append(f"{python}, {name}: {error}")
                    reason = str(error).splitlines()[0]
            shown = ", ".join(f"{framework} {version}" for framework, version in frameworks.items())
            print(f"| {python} | {name} | {shown} | {reason} |", flush=True)
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
