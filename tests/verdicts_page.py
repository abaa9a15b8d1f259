"""Writes docs/verdicts.md: ``python -m tests.verdicts_page``, from the root of the repository.

A section has what the code of its kind says (the meaning, the default, the text below the `VerdictKind`) and a message
of the golden files, which tests/test_messages.py writes.
"""

import ast
import re
import textwrap
from collections.abc import Mapping
from itertools import pairwise

from countoff.core.checks import KINDS
from countoff.core.verdict import VerdictKind
from tests.adapters import MESSAGES, ONLY
from tests.paths import DOCS, GOLDEN, ROOT

PAGE = DOCS / "verdicts.md"
SHOWN = {
    "PlanMismatch": ("torch", "batch_size differs, on 3 ranks"),
    "UnevenBatches": ("lightning", "a rank's train loader is short, on 4 ranks"),
    "LearningRateMismatch": ("torch", "schedules of different lengths, before the first batch"),
    "RankMapError": ("torch", "a sampler that counts every rank"),
    "WrongLength": ("lightning", "len(loader) counts the batches of both ranks"),
    "Truncated": ("composer", "Composer ends all ranks at the shortest"),
    "DoubleSharded": ("accelerate", "a share by split_dataset_by_node"),
    "StreamsDiffer": ("accelerate", "a shuffle with other seeds"),
    "WrongHorizon": ("transformers", "a schedule of one epoch"),
    "WrongTotal": ("transformers", "split_batches on 2 processes"),
    "VersionMismatch": ("torch", "a host has another variable"),
    "LateRank": ("torch", "a rank does not come to the roll call"),
}
"""The message that is shown of a kind, by adapter and situation; of any other kind, the first one."""
FRAME = """\
<!-- Written by `python -m tests.verdicts_page`: change the texts below the kinds, in core/countoff/core/checks. -->

# Verdicts

Every kind of [verdict](glossary.md#verdict) that countoff can give, the most severe first: a real message, the cause
and the fix. `countoff explain UnevenBatches` prints one section at a terminal, without network. A kind that raises
[ends the job](how-it-works.md#how-a-job-ends); [`levels`](settings.md) changes what a kind does.

A message has these parts. Each line begins with the rank that prints it, such as `[rank 0]`, which is left out here.

- The first line: the kind, and what happened, with both counts.
- `This is a warning: the job is not ended.` below it, where that is so.
- Who: `out of step` names the ranks of the minority. If no minority is proved, `ran out first` names the rank whose
  loader is known to have ended first, and `differ` names two ranks of which nobody can tell which is right. `lost`
  names a rank that failed or is gone, and `missing` one that has not counted off.
- A table of the ranks: where each of them is, the batches that it has started and fetched, its optimizer steps.
- `why`: the cause; `do`: the fix that most often helps first; `more`: the command that prints its section of this page.

The first living rank of each host prints a verdict that ends the job whole, and every other rank prints its first line.
Rank 0 alone prints warnings, each once per fit.

{sections}

## Errors and exit codes

### DivergenceError

The error of a verdict that ends the job, raised on every rank whose training thread runs Python code when that becomes
known. The errors that are named like kinds are based on it. `error.verdict` has the whole verdict.

**Cause.** The ranks are out of step. The message above the traceback says which ones, and why.

**Fix.** Look up the kind: `countoff explain UnevenBatches`. Do not catch the error to train on: the ranks would hang,
or average gradients of different batches. For a warning in its place, set `on_divergence="warn"`, or `levels` for one
kind.

### SettingsError

An option of countoff, in the code or in the environment, is unknown or has a value that it does not accept. It is a
`ValueError`, raised before anything is started.

**Cause.** A misspelt name or value. It is refused, because a check that is off must not look like one that is on.

**Fix.** The message names the option, what it accepts, and the nearest name. All options are in
[Settings](settings.md).

### Exit code 87

countoff has ended a process after a verdict, because its main thread was blocked where no exception could reach it. No
signal and nothing in Python uses this code.

**Cause.** The ranks are out of step, and this one waits in a collective, a lock or a read that never returns.

**Fix.** That of the verdict, which the first living rank of each host has printed above.

## Which check works where

"no" means that the framework leaves no room for the fault, or that its objects do not show it.

{table}

TorchTitan's and lingua's schedules are also checked before the job starts: see [the command line](command-line.md).
"""


def page() -> str:
    """All of docs/verdicts.md."""
    told = texts()
    sections = [section(kind, told[kind.name]) for kind in KINDS.values()]
    return FRAME.format(sections="\n\n".join(sections), table=table())


def texts() -> Mapping[str, str]:
    """The string below each `VerdictKind` in the files of the checks, by the kind's name."""
    found = dict[str, str]()
    for path in sorted((ROOT / "core" / "countoff" / "core" / "checks").glob("*.py")):
        for made, below in pairwise(ast.parse(path.read_text()).body):
            match made, below:
                case (
                    ast.Assign(value=ast.Call(func=ast.Name("VerdictKind"), args=[ast.Constant(str(name)), *_])),
                    ast.Expr(ast.Constant(str(text))),
                ):
                    found[name] = text.strip()
    return found


def section(kind: VerdictKind, text: str) -> str:
    """What the page says about one kind."""
    meaning = kind.meaning[0].upper() + kind.meaning[1:]
    return f"## {kind.name}\n\n{filled(f'{meaning}. By default: {kind.default}.')}\n\n{message(kind.name)}\n\n{text}"


def message(kind: str) -> str:
    """A golden message of a kind, as a block."""
    adapter, title = SHOWN.get(kind, ("", ""))
    golden = (GOLDEN / "messages" / f"{kind}.txt").read_text()
    found = re.search(
        rf"^# {re.escape(title)}.*?^## [^\n]*\b{adapter}\b[^\n]*\n\n(.*?)\n\n", f"{golden}\n", re.M | re.S
    )
    assert found is not None, f"no golden message of {kind}"
    return f"```\n{found[1]}\n```"


def cell(adapter: str, kind: str) -> str:
    """Whether an adapter can report a kind, and under which condition."""
    return ONLY[adapter].get(kind, "yes") if kind in MESSAGES[adapter].kinds else "no"


def table() -> str:
    """Which adapter can report which kinds; kinds that are alike share a row."""
    alike = dict[tuple[str, ...], list[str]]()
    for kind in KINDS:
        cells = tuple(cell(adapter, kind) for adapter in MESSAGES)
        alike.setdefault(cells, []).append(f"[`{kind}`](#{kind.lower()})")
    head = ("", *(words.framework for words in MESSAGES.values()))
    rows = [head, ("---",) * len(head), *((", ".join(kinds), *cells) for cells, kinds in alike.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def filled(text: str) -> str:
    """A paragraph in lines of the page's width."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
