"""What applies each remedy of the golden messages: the table in tests/golden/remedies.yaml."""

import re
from dataclasses import dataclass

import yaml

from tests.paths import GOLDEN


@dataclass(frozen=True)
class Applied:
    """Remedies, and what applies them to the letter.

    Attributes:
        remedies: Their texts, without numbers.
        jobs: Jobs of integration_tests/remedy_jobs.py.
        tests: Other tests, as ``file::function``.
        because: Why nothing applies them; empty if something does.
    """

    remedies: tuple[str, ...]
    jobs: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    because: str = ""


def without_numbers(remedy: str) -> str:
    """A remedy with each number as 0.

    >>> without_numbers("make LambdaLR for 1,800 steps.")
    'make LambdaLR for 0 steps.'
    """
    return re.sub(r"\d[\d,]*", "0", remedy)


def golden() -> set[str]:
    """All remedies of the golden messages."""
    texts = [file.read_text() for file in sorted((GOLDEN / "messages").glob("*.txt"))]
    found = [each for text in texts for each in re.findall(r"^  do:  (.+(?:\n  or:  .+)*)$", text, re.MULTILINE)]
    return {without_numbers(each.replace("\n  or:  ", "\n")) for each in found}


def _read(entry: dict[str, str | list[str]]) -> Applied:
    return Applied(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})  # pyright: ignore[reportArgumentType]


APPLIED = [_read(entry) for entry in yaml.safe_load((GOLDEN / "remedies.yaml").read_text())]
