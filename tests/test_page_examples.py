"""The Python on the pages: what needs no ranks runs, and a type checker reads all of it beside countoff's own types.

So it does a user's program, in its strict mode.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT, USER_PROGRAM
from tests.test_docs import PAGES, blocks

PYTHON = {str(page.relative_to(ROOT)): found for page in PAGES if (found := blocks(page, "python"))}
RUN = {"docs/ranks.md": [0, 1, 2]}
"""The blocks that need no ranks and nothing of the reader's, by page."""
VALUE = re.compile(r"^(?P<expression>(?:\w+\.)*\w+(?:\([^#\n]*\))?(?:, [\w.]+)*)  # (?P<shown>.*)$", re.MULTILINE)
"""A line with an expression and its value, and perhaps what that means, after a colon."""

PREAMBLE = """\
import math
from typing import Any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
def anything() -> Any: ...
the_rest = anything()
"""
"""What stands above the blocks of each page: what a program has imported that a reader adds to."""
GIVEN = {
    "docs/data-identity.md": "from countoff.torch import Countoff\ncountoff = Countoff()\n",
    "docs/write-an-adapter.md": "from countoff.core import Guard\nguard: Guard = anything()\n",
}
"""What a page says in words before its first block."""
READERS = """
MyStreamingDataset accelerator args batch_size batches build_dataloader_from_args config
context_stack data ddp dp_degree dp_rank epoch epochs eval_loader extra files_of get_batch
get_linear_schedule_with_warmup gradient_accumulation_steps iter_num loader loss_of main mesh model network optimizer
path scheduler train train_loader train_state warmup_steps webhook world_mesh writer
"""
"""Names of the reader's own program. Any other one has to be made or imported on its page."""
WRONG = """\
from countoff.torch import Countoff
countoff = Countoff()
countoff.uncount()
Countoff(train_loader=[])
CountOff()
"""
"""A page whose last three lines are wrong."""
NOT_NONE = re.compile(r'"None"|[|] None" is not assignable to type "\w+"')
"""What the checker says where a page knows that a value is not None."""
OF_FRAMEWORKS = [
    'Cannot access attribute "set_epoch" for class "DataLoader[',  # Accelerate's own loaders have it
    'Argument of type "IterableDataset" cannot be assigned to parameter "dataset"',  # torch's loader takes it
]
"""What the checker says because a framework does not declare it."""
CONFIGURATION = {
    "typeCheckingMode": "basic",
    "reportMissingImports": False,  # not every framework is in every environment
    "reportMissingModuleSource": False,
    "reportPrivateImportUsage": False,
    "reportUnusedExpression": False,
}


@pytest.mark.parametrize("page", RUN)
def test_blocks_that_need_no_ranks_run(page: str) -> None:
    """They run in the order of the page, and each expression has the value that stands behind it."""
    names: dict[str, object] = {}
    for number in RUN[page]:
        block = PYTHON[page][number]
        exec(compile(block, page, "exec"), names)
        for line in VALUE.finditer(block):
            values = eval(f"({line['expression']},)", names)
            assert f"{line['shown']}: ".startswith(", ".join(map(repr, values)) + ": "), line["expression"]


def test_every_value_on_a_page_is_compared() -> None:
    """Most of the expressions that run have a value: the lines are found."""
    found = {page: [len(VALUE.findall(PYTHON[page][number])) for number in RUN[page]] for page in RUN}
    assert found == {"docs/ranks.md": [4, 0, 0]}


def as_module(page: str) -> str:
    """The blocks of a page as one module, in which no block goes on for ever: what comes after it would not be read."""
    text = PREAMBLE + GIVEN.get(page, "") + "".join(PYTHON[page])
    return text.replace("(..., ", "(**the_rest, ").replace("while True:", "while anything():")


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the type checker says about each page and the user's program: it reads torch and the frameworks once."""
    pytest.importorskip("pyright")
    directory = tmp_path_factory.mktemp("pages")
    (directory / "pyrightconfig.json").write_text(json.dumps(CONFIGURATION))
    texts = {"wrong": WRONG, "strict": USER_PROGRAM.read_text("utf-8"), **{page: as_module(page) for page in PYTHON}}
    modules = {page: directory / f"page_{number}.py" for number, page in enumerate(texts)}
    for page, module in modules.items():
        module.write_text(texts[page])
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=directory)
    found: dict[str, list[str]] = {page: [] for page in texts}
    for each in json.loads(run.stdout)["generalDiagnostics"]:
        [page] = (page for page, module in modules.items() if module.name == Path(each["file"]).name)
        line = texts[page].splitlines()[each["range"]["start"]["line"]].strip()
        found[page].append(f"{line}: {each['message']}")
    return found


def is_allowed(complaint: str) -> bool:
    """Whether it is about a name of the reader's, about None, or about what a framework does not declare."""
    undefined = re.search(r'"(\w+)" is not defined$', complaint)
    if undefined:
        return undefined[1] in READERS.split()
    return bool(NOT_NONE.search(complaint)) or any(known in complaint for known in OF_FRAMEWORKS)


@pytest.mark.parametrize("page", PYTHON)
def test_names_and_arguments_on_a_page_exist(page: str, complaints: dict[str, list[str]]) -> None:
    """Each name of countoff's that a block uses is there, takes these arguments, and is imported on the page."""
    assert [each for each in complaints[page] if not is_allowed(each)] == []


def test_a_wrong_argument_would_be_found(complaints: dict[str, list[str]]) -> None:
    """The checker sees countoff's own types, and says what does not exist."""
    assert [each.rpartition(": ")[2] for each in complaints["wrong"] if not is_allowed(each)] == [
        'Cannot access attribute "uncount" for class "Countoff"\n\xa0\xa0Attribute "uncount" is unknown',
        'No parameter named "train_loader"',
        '"CountOff" is not defined',
    ]


def test_a_users_program_is_accepted_in_strict_mode(complaints: dict[str, list[str]]) -> None:
    """Nothing that a user calls has a type that is not known. The program says itself that it is strict."""
    assert complaints["strict"] == []
