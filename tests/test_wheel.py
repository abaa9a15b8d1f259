"""The built wheel, installed where neither the sources nor any framework are."""

import filecmp
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import example_traces
from tests.paths import ROOT, SOURCE_ROOTS
from tests.wheel_extras import ADAPTERS, EXTRAS

METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
ADDED = {
    "countoff/cli/verdicts.md": ROOT / "docs" / "verdicts.md",
    "countoff/cli/lightning_digits.py": ROOT / "examples" / "lightning_digits.py",
}
"""What `countoff explain` prints and `countoff demo` runs: where the wheel has them, and what they are copies of."""


CALLBACKS = """
from lightning.pytorch import Trainer
print(*(type(each).__name__ for each in Trainer(accelerator="cpu", logger=False).callbacks))
"""


class Installed:
    """An environment that holds what is put into it, what that requires, and nothing else.

    Args:
        directory: Where the environment is made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bin = directory / "env" / "bin"
        venv.create(directory / "env", with_pip=False, symlinks=True)
        [self._site] = (directory / "env" / "lib").glob("python*/site-packages")

    def install(self, wheel: Path, *extras: str) -> "Installed":
        """Installs the wheel, with extras; returns itself."""
        python = str(self._bin / "python")
        install = ["-m", "uv", "pip", "install", "--quiet", "--offline", "--no-cache", "--no-deps", "--python", python]
        call([sys.executable, *install, str(wheel)])
        [own] = self._site.glob("countoff-*.dist-info")
        self._link_requirements(metadata.Distribution.at(own), extras)
        return self

    def link(self, name: str, extras: Iterable[str] = ()) -> None:
        """Links a distribution, and what it requires, from the environment of this process: no index is asked."""
        distribution = metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (self._site / part).exists():
                (self._site / part).symlink_to(str(distribution.locate_file(part)))
        self._link_requirements(distribution, extras)

    def _link_requirements(self, distribution: metadata.Distribution, extras: Iterable[str]) -> None:
        chosen = ["", *extras]
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in chosen):
                self.link(requirement.name, requirement.extras)

    def run(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs one of the environment's programs, outside the repository."""
        command = [str(self._bin / program), *arguments]
        environment = {"PATH": os.defpath, "HOME": str(self._directory), "LC_ALL": "C.UTF-8"}
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self._directory, env=environment, timeout=120, check=False
        )


def call(command: Sequence[str], place: Path = ROOT) -> None:
    """Runs a command in a directory; fails the test with its output if it does not exit with 0."""
    run = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=place, timeout=120, check=False
    )
    if run.returncode:
        pytest.fail(f"{' '.join(command)}\n{run.stdout}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this working tree, built without an index: hatchling is in the `dev` dependency group."""
    directory = tmp_path_factory.mktemp("wheel")
    call([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)])
    [built] = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel without an extra, as on a machine that trains."""
    return Installed(tmp_path_factory.mktemp("installed")).install(wheel)


@pytest.fixture(scope="module")
def with_commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel with the extra for the command line."""
    return Installed(tmp_path_factory.mktemp("with_commands")).install(wheel, "cli")


def metadata_of(wheel: Path, field: str) -> list[str]:
    """The values that the wheel's METADATA has of a field."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line.removeprefix(f"{field}: ") for line in lines if line.startswith(f"{field}: ")]


def test_the_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    """It has what is below each root, a page and an example: no test, no `__init__`."""
    files = {
        path.relative_to(root).as_posix()
        for root in SOURCE_ROOTS
        for path in (root / "countoff").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"countoff/py.typed", "countoff/core/py.typed"} <= files
    archive = zipfile.ZipFile(wheel)
    packed = set(archive.namelist())
    dist_info = {name for name in packed if name.partition("/")[0].endswith(".dist-info")}
    assert packed - dist_info == files | set(ADDED)
    assert {name: archive.read(name) for name in ADDED} == {name: path.read_bytes() for name, path in ADDED.items()}
    assert {name.partition("/")[2] for name in dist_info} == METADATA


def test_a_build_gives_the_same_bytes_anywhere_and_at_any_time(tmp_path: Path) -> None:
    """An unpacked source distribution, at another path and with other times, gives the same wheel, and itself."""
    build = [sys.executable, "-m", "hatchling", "build", "--directory"]
    call([*build, str(tmp_path / "built")])
    [source] = (tmp_path / "built").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    (unpacked / "PKG-INFO").unlink()  # made by the build; it would go in twice
    for path in unpacked.rglob("*"):
        os.utime(path, (1e9, 1e9))
    call([*build, str(tmp_path / "again")], unpacked)
    names = sorted(path.name for path in (tmp_path / "built").iterdir())
    assert len(names) == 2
    assert filecmp.cmpfiles(tmp_path / "built", tmp_path / "again", names, shallow=False) == (names, [], [])


def test_without_an_extra_the_wheel_requires_nothing(wheel: Path) -> None:
    assert [each for each in metadata_of(wheel, "Requires-Dist") if "extra == " not in each] == []


def test_lightning_gives_a_trainer_the_same_callbacks_once_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    """Lightning 2.6 shows rich's progress bar wherever rich is installed, and each Trainer calls the wheel's factories.

    The environment first holds Lightning and what that requires; then also the wheel and what that requires. Nothing is
    hidden from Lightning: a requirement of the wheel would be linked, and found.
    """
    environment = Installed(tmp_path)
    environment.link("lightning")
    before = environment.run("python", "-c", CALLBACKS)
    assert "TQDMProgressBar" in before.stdout, before.stderr
    after = environment.install(wheel).run("python", "-c", CALLBACKS)
    assert after.stdout == before.stdout, after.stderr


def test_the_command_line_runs_from_the_wheel(with_commands: Installed) -> None:
    """It prints its help, and a plan from flags and from a file: the extra is all that it needs."""
    assert with_commands.run("countoff", "--help").stdout.startswith("usage: countoff")
    assert with_commands.run("python", "-m", "countoff", "--help").stdout.startswith("usage: python -m countoff")
    flags = with_commands.run("countoff", "plan", "--batch-size", "2", "--seq-len", "2048", "--world-size", "4")
    assert flags.stderr == ""
    assert "2 sequences × 2,048 tokens × 4 data ranks" in flags.stdout
    config = (
        "import pathlib; pathlib.Path('mpt.yaml').write_text('global_train_batch_size: 64\\nmax_duration: 10ba\\n')"
    )
    assert with_commands.run("python", "-c", config).returncode == 0
    plan = with_commands.run("countoff", "plan", "mpt.yaml", "--world-size", "8")
    assert plan.stderr == ""
    assert "8 samples × 8 data ranks" in plan.stdout


def test_the_wheel_explains_verdicts_and_knows_its_version(installed: Installed) -> None:
    """`countoff explain` needs no file of the repository, and the core has the version of the package."""
    explained = installed.run("countoff", "explain", "LostRank")
    assert explained.stderr == ""
    assert explained.stdout.startswith("LostRank\n\nA rank raised an exception")
    version = installed.run("python", "-c", "import countoff.core; print(countoff.core.__version__)")
    assert f"countoff {version.stdout}" == installed.run("countoff", "--version").stdout


def test_the_wheel_places_its_hooks(installed: Installed) -> None:
    shown = "import sys; print(*(type(each).__module__ for each in sys.meta_path))"
    hooked = installed.run("python", "-m", "countoff.run", "-m", "timeit", "-n1", "-r1", shown)
    assert "countoff._run.hooks" in hooked.stdout.split(), hooked.stderr


def test_an_editable_install_explains_verdicts_too(tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    call([sys.executable, "-c", build, str(tmp_path)])
    [wheel] = tmp_path.glob("*.whl")
    explained = Installed(tmp_path).install(wheel).run("countoff", "explain", "LostRank")
    assert explained.stderr == ""
    assert explained.stdout.startswith("LostRank\n\nA rank raised an exception")


def test_the_demo_names_the_packages_that_it_needs(installed: Installed) -> None:
    """Without them it refuses in one line, with the command that installs them."""
    run = installed.run("countoff", "demo")
    assert run.returncode == 1
    needed = "rich and torch and lightning and scikit-learn"
    assert run.stderr == f"countoff: the demo needs {needed}: pip install 'countoff[demo]'\n"


def test_a_command_names_the_extra_that_it_needs(installed: Installed) -> None:
    run = installed.run("countoff", "plan", "--batch-size", "2", "--world-size", "4")
    assert (run.returncode, run.stderr) == (2, "countoff: plan needs rich: pip install 'countoff[cli]'\n")


def test_the_extra_for_commands_draws_a_report(with_commands: Installed, tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "trace")
    page = tmp_path / "page.html"
    run = with_commands.run("countoff", "report", str(tmp_path / "trace"), "-o", str(page))
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("countoff: UnevenBatches: rank 2 ran out of data")
    assert "≠ 90 batches, 90 steps" in page.read_text("utf-8")


def test_the_factories_import_nothing_unless_asked(installed: Installed) -> None:
    """Lightning calls every installed factory in every Trainer; without COUNTOFF=1 each returns an empty list."""
    script = """
from importlib import metadata
entry_points = metadata.distribution("countoff").entry_points
factories = [one for one in entry_points if one.group.endswith(".callbacks_factory")]
print(len(factories), [one.load()() for one in factories])
"""
    run = installed.run("python", "-c", script)
    assert run.stdout == "2 [[], []]\n", run.stderr


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_names_its_missing_framework(installed: Installed, adapter: str) -> None:
    """Its import fails with one line that names the module and the command that installs what it needs."""
    run = installed.run("python", "-c", f"import countoff.{adapter}")
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: countoff.{adapter} needs "), last
    assert last.endswith(f": {ADAPTERS[adapter]}"), last


def test_each_extra_has_its_case(wheel: Path) -> None:
    """`make wheels-extras` tries each extra of the wheel by itself, but `all`; of one adapter there is none."""
    assert set(EXTRAS) == set(metadata_of(wheel, "Provides-Extra")) - {"all"}
    assert set(ADAPTERS) - {name for each in EXTRAS.values() for name in each.adapters} == {"torchtitan"}


def test_every_adapter_has_its_case() -> None:
    """Every public module of the plugins is an adapter above, but for the mesh."""
    modules = {path.stem for path in (ROOT / "plugins" / "countoff").iterdir()} - {"__pycache__", "py"}
    assert {name for name in modules if not name.startswith("_")} - {"mesh"} == set(ADAPTERS)
