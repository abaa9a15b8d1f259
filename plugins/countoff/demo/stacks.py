"""Where a rank was when it was cut off, in one line, from the stacks that its fault handler wrote."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_JOB = "countoff/demo/job.py"
# What Lightning wanted there: its loops and callbacks say more than the layers between them and torch.
_TELLING = ("/lightning/pytorch/loops/", "/lightning/pytorch/callbacks/")


def innermost(stacks: str) -> tuple[str, str]:
    """The innermost line of the thread that trains, and the innermost one of a loop or callback of Lightning's.

    Args:
        stacks: What `faulthandler` wrote, of one or more threads.

    Returns:
        Two lines, such as ``distributed_c10d.py:4627 in barrier``; "" where there is none.
    """
    threads = [block for block in stacks.split("\n\n") if _JOB in block]
    frames = [match.groupdict() for match in _FRAME.finditer(threads[-1])] if threads else []
    informative = [frame for frame in frames if any(part in frame["file"] for part in _TELLING)]
    return _line(frames[:1]), _line(informative[:1])


def _line(frames: list[dict[str, str]]) -> str:
    if not frames:
        return ""
    file = frames[0]["file"].rsplit("/", 1)[-1]
    return f"{file}:{frames[0]['line']} in {frames[0]['name']}"
