"""What countoff has printed on the ranks of a job, and whom it names."""

import json
import re
from collections.abc import Sequence

from integration_tests.harness import RankResult

_ONE_LINE = re.compile(r"(countoff: .*) See the output of rank \d+\.")
"""What a rank prints where another rank of its host prints the verdict whole."""
_ABORTED = "countoff: this rank has not ended "
"""What a rank says of itself after a verdict, where NCCL's communicators had to be aborted."""


def printed_lines(result: RankResult) -> list[str]:
    """The lines of this rank's output that countoff wrote, without the rank."""
    prefix = f"[rank {result.rank}] "
    return [line.removeprefix(prefix) for line in result.output.splitlines() if line.startswith(prefix)]


def verdict_lines(result: RankResult) -> list[str]:
    """The lines of `printed_lines` but what a rank says of itself; of one line of a verdict, all of its error file."""
    lines: list[str] = []
    for line in _of_the_job(result):
        first = _ONE_LINE.fullmatch(line)
        whole = json.loads(result.error_file)["message"]["extraInfo"]["countoff"].splitlines() if first else [line]
        assert first is None or whole[0] == first[1], result
        lines += whole
    return lines


def _of_the_job(result: RankResult) -> list[str]:
    """The lines of `printed_lines`, but what a rank says of itself after a verdict."""
    lines = printed_lines(result)
    return [line for number, line in enumerate(lines) if not (number and line.startswith(_ABORTED))]


def named_ranks(text: str) -> list[int]:
    """The ranks that the line below a verdict's headline names; none if there is no such line."""
    named = re.search(r"^  (?:out of step|ran out first|differ|lost): ranks? ([\d, –]+) of", text, re.MULTILINE)
    return [] if named is None else ranks_in(named[1])


def behind_ranks(text: str) -> list[int]:
    """The ranks of which a verdict says that they have not got as far as the place in dispute."""
    behind = re.search(r"; ranks? ([\d, –]+) ha(?:s|ve) not got so far", text)
    return [] if behind is None else ranks_in(behind[1])


def ranks_in(text: str) -> list[int]:
    """The ranks of a list such as ``0, 2–4``."""
    ends = [[int(end) for end in item.split("–")] for item in text.split(", ")]
    return [rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)]


def whole_message(results: Sequence[RankResult]) -> str:
    """What the first of these ranks on each host printed whole. Each of the others printed one line."""
    everything = "\n".join(map(str, results))
    hosts: dict[str, list[RankResult]] = {}
    for result in results:
        hosts.setdefault(result.host, []).append(result)
    texts = {"\n".join(_of_the_job(first)) for first, *_ in hosts.values()}
    assert len(texts) == 1, everything
    text = texts.pop()
    for first, *others in hosts.values():
        line = f"{text.splitlines()[0]} See the output of rank {first.rank}."
        assert all(_of_the_job(result) == [line] for result in others), everything
    return text


def assert_named(results: Sequence[RankResult], kind: str, odd: Sequence[int], *words: str | tuple[str, ...]) -> None:
    """Every rank ended badly, with the same verdict: its kind, the ranks that it names, and `words` in its text.

    Of a tuple of words one must be there: a slow rank may have ended its span as well before it received the verdict.
    """
    everything = "\n".join(map(str, results))
    text = whole_message(results)
    assert f"countoff: {kind}: " in text, everything
    assert sorted(named_ranks(text)) == sorted(odd), everything
    for word in words:
        assert any(each in text for each in (word if isinstance(word, tuple) else (word,))), everything
    assert all(result.exit_code != 0 for result in results), everything
    assert all(f"countoff {kind}: " in result.error_file for result in results), everything
