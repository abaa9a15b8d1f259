"""The house: which module may import which, and what an import must not load."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT, SOURCE_ROOTS

CORE, PLUGINS, TOOLS = (root / "countoff" for root in SOURCE_ROOTS)
HEAVY = {"torch", "numpy", "lightning", "pytorch_lightning", "composer", "accelerate", "transformers"}

LADDER = [
    {
        "at_exit",
        "constants",
        "flag",
        "forgotten",
        "formats",
        "messages",
        "packages",
        "software",
        "waiting",
        "whole_file",
    },
    {"arithmetic"},
    {"verdict"},
    {"protocol"},
    {"data"},
    {"checks"},
    {"levels", "finding"},
    {"settings"},
    {"alerts"},
    {"session.state", "session.subgroup"},
    {"session.store"},
    {"session.liveness"},
    {"ending"},
    {"trace"},
    {"session.threads"},
    {"guard"},
]
"""Rooms of the core, from the ground up: each imports only from the rooms before it, and from itself."""

OWNERS = {
    "_lightning": {"lightning", "pytorch_lightning"},
    "_fabric": {"fabric"},
    "_composer": {"composer"},
    "_accelerate": {"accelerate", "transformers", "_transformers"},  # the Trainer stands on Accelerate
    "_transformers": {"transformers"},
    "_torch": {"torch"},
    "_torchtitan": {"torchtitan"},
    "_lingua": {"lingua"},
}
"""The private package of each framework, and the public modules that may import it."""

OF_TOOLS = {
    "cli": {"plan", "report", "_run", "_terminal"},
    "plan": {"_terminal"},
    "report": {"_terminal"},
    "_terminal": set[str](),
    "__main__": {"cli"},
    "run": {"_run"},
    "_run": {"_adapter", "transformers", "composer"},
}
"""What each tool may import besides the core."""
ENTRY_POINTS = {"_entry_points": {"lightning", "pytorch_lightning"}}
"""What frameworks call where countoff is installed, and the adapters that it may import."""
USES_PLAN = {"torchtitan", "_torchtitan"}
"""The adapter that reads its framework's configurations."""

THEIRS = {"_", "_fields", "_replace", "_schedulers"}
"""Private names of ours that also are names of Python's named tuples and of torch's schedulers."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of countoff by its dotted name."""
    found: dict[str, Path] = {}
    for root in SOURCE_ROOTS:
        for path in sorted((root / "countoff").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_lazy_type(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(path: Path, known: set[str], *, types: bool) -> set[str]:
    """The modules of countoff that a module imports, wherever in it, with what serves types alone or without."""

    def statements(tree: ast.AST) -> Iterator[ast.AST]:
        for node in ast.iter_child_nodes(tree):
            if types or not is_lazy_type(node):
                yield node
                yield from statements(node)

    names: set[str] = set()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(inner & known or {node.module})
    return names & known


@functools.cache
def graph(*, types: bool = False) -> dict[str, set[str]]:
    known = modules()
    return {name: imported(path, set(known), types=types) - {name} for name, path in known.items()}


def room(name: str) -> str:
    """The room of core in which a module lies: ``protocol`` for ``countoff.core.protocol.log``.

    Those of a session are rooms of their own, as what ends a job stands between them.
    """
    parts = name.split(".")
    if parts[:2] != ["countoff", "core"] or parts[2:] == ["session"]:
        return ""
    return ".".join(parts[2:4] if parts[2:3] == ["session"] else parts[2:3])


def packages_imported_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after the statement."""
    path = list(map(str, SOURCE_ROOTS))
    script = f"import sys; sys.path[:0] = {path}\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.splitlines()[-1].split())


def test_no_source_root_has_an_init() -> None:
    """An `__init__.py` directly under `countoff/` would close the namespace that the roots share."""
    for root in SOURCE_ROOTS:
        assert (root / "countoff").is_dir()
        assert not (root / "countoff" / "__init__.py").exists()


def test_no_module_lies_in_two_source_roots() -> None:
    names = [path.name for root in SOURCE_ROOTS for path in (root / "countoff").iterdir() if path.name != "__pycache__"]
    assert len(names) == len(set(names))


def test_each_root_holds_what_its_name_says() -> None:
    """The core alone, the adapters alone, and what runs beside a job."""
    core, plugins, tools = (
        {path.stem for path in (root / "countoff").iterdir()} - {"__pycache__", "py"} for root in SOURCE_ROOTS
    )
    assert core == {"core"}
    assert tools == set(OF_TOOLS)
    assert plugins - OWNERS.keys() - {"_adapter"} - ENTRY_POINTS.keys() == {
        "accelerate",
        "composer",
        "fabric",
        "lightning",
        "lingua",
        "mesh",
        "pytorch_lightning",
        "torch",
        "torchtitan",
        "transformers",
    }


def test_no_circle_of_imports() -> None:
    """A module that imports another is never imported by it, not even through others, in a function or for a type."""
    list(graphlib.TopologicalSorter(graph(types=True)).static_order())


FRAMEWORKS = re.compile("lightning|composer|accelerate|transformers|torchtitan|lingua|fabric", re.IGNORECASE)
NAMES_THEM = {
    "packages.py",  # whose code is not the user's own
    "dim_orders.py",  # the orders of mesh dims that `RankMap.of` knows by name
}


def named_in(path: Path) -> list[str]:
    """The frameworks that a module's code names; its docstrings and comments may name where a rule comes from."""
    tree = tree_of(path)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [
        *(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in texts),
        *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)),
        *(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        *(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias)),
    ]
    return [each for each in found if isinstance(each, str) and FRAMEWORKS.search(each)]


def test_core_names_no_framework() -> None:
    """What only one framework has is with its adapter. Arithmetic that plans need too names none in what it says."""
    files = CORE.rglob("*.py")
    assert {file.name: named_in(file) for file in files if named_in(file) and file.name not in NAMES_THEM} == {}


def test_rooms_of_core_import_only_what_lies_below() -> None:
    """Words know nothing, a verdict no check, a check no thread, and only the guard all of them."""
    level = {name: number for number, rooms in enumerate(LADDER) for name in rooms}
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in targets
        if room(name) and room(target) not in ("", room(name)) and level[room(target)] >= level[room(name)]
    ]
    assert wrong == []


def test_every_room_of_core_stands_on_the_ladder() -> None:
    assert {room(name) for name in modules()} - {""} == {name for rooms in LADDER for name in rooms}


def test_core_imports_no_plugin() -> None:
    for name, targets in graph().items():
        if name.startswith("countoff.core"):
            assert [target for target in targets if not target.startswith("countoff.core")] == [], name


def test_tools_import_what_is_listed() -> None:
    """Plans and pages know no adapter, and only that of TorchTitan knows plans."""
    for name, targets in graph().items():
        parts = name.split(".")
        allowed = (OF_TOOLS | ENTRY_POINTS).get(parts[1])
        if allowed is not None:
            others = {target.split(".")[1] for target in targets} - {"core", parts[1]}
            assert others <= allowed, name


def test_core_names_no_file_of_a_plugin() -> None:
    """A file that moves must not change what core reports: adapters register their frames."""
    plugins = {path.relative_to(root.parent).as_posix() for root in (PLUGINS, TOOLS) for path in root.rglob("*.py")}
    for path in CORE.rglob("*.py"):
        text = path.read_text("utf-8")
        assert [name for name in plugins if name in text or name.removeprefix("countoff/_") in text] == [], path


def test_adapters_keep_to_their_own_private_package() -> None:
    """A private package is imported by itself and its public modules, `_adapter` by all, and no adapter by another."""
    for name, targets in graph().items():
        parts = name.split(".")
        if parts[1] in ("core", *OF_TOOLS, *ENTRY_POINTS):
            continue
        allowed = {"core", "_adapter", parts[1]} | {private for private, owners in OWNERS.items() if parts[1] in owners}
        allowed |= {"plan"} if parts[1] in USES_PLAN else set()
        assert {target.split(".")[1] for target in targets} <= allowed, name


def test_unit_tests_need_nothing_of_the_integration_tests() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = tree_of(path)
        names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not [name for name in names if name.startswith("integration_tests")], path


def test_tests_that_run_alone_are_where_they_are_looked_for() -> None:
    """`make` collects one directory for them: to collect all takes longer than most of them run."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    found = re.search(r'^alone = \$\(call pytest,\$\(1\)\) (\S+) -m "alone ', makefile, re.MULTILINE)
    assert found is not None
    own = Path(__file__).resolve()
    marked = [
        path for path in (ROOT / "tests").rglob("*.py") if path != own and "mark.alone" in path.read_text("utf-8")
    ]
    assert marked
    assert all(path.is_relative_to(ROOT / found[1]) for path in marked), marked


def private_names(path: Path) -> set[str]:
    """The private names that a file defines: functions, classes, and what is assigned to a name or to `self`."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def names_used(path: Path) -> set[str]:
    """The names by which a file reaches into objects: attributes, imported names, and strings as for `setattr`."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("countoff._"):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_unit_tests_use_public_names() -> None:
    """No test reaches into an object of countoff by a private name, so a room may be rebuilt without its tests."""
    private = {name for path in modules().values() for name in private_names(path)} - THEIRS
    packages = {part for name in modules() for part in name.split(".")}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert sorted((names_used(path) & private) - private_names(path) - packages) == [], path


def test_importing_core_imports_no_torch_and_no_framework() -> None:
    packages = packages_imported_by(
        "from countoff.core import *; import countoff.core.arithmetic.ranks, countoff.core.arithmetic.totals"
    )
    assert "countoff" in packages
    assert not packages & HEAVY


def test_the_command_line_starts_without_torch() -> None:
    start = "import contextlib, countoff.cli.__main__ as cli; sys.argv = ['countoff', '--help']"
    packages = packages_imported_by(f"{start}\nwith contextlib.suppress(SystemExit): cli.main()")
    assert not packages & HEAVY
