"""Finds where a rank was when the demo killed it, from the stacks that its fault handler wrote."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_JOB = "countoff/demo/job.py"
# Lightning's loops and callbacks show what it was doing; the layers between them and torch do not.
_LIGHTNING = ("/lightning/pytorch/loops/", "/lightning/pytorch/callbacks/")


def innermost(stacks: str) -> tuple[str, str]:
    """Returns the training thread's innermost frame, and its innermost frame in a loop or callback of Lightning.

    Args:
        stacks: The output of `faulthandler`, with one or more threads.

    Returns:
        Two frames, such as ``distributed_c10d.py:4627 in barrier``; "" where there is none.
    """
    threads = [block for block in stacks.split("\n\n") if _JOB in block]
    frames = [match.groupdict() for match in _FRAME.finditer(threads[-1])] if threads else []
    of_lightning = [frame for frame in frames if any(part in frame["file"] for part in _LIGHTNING)]
    return _first(frames), _first(of_lightning)


def _first(frames: list[dict[str, str]]) -> str:
    if not frames:
        return ""
    file = frames[0]["file"].rsplit("/", 1)[-1]
    return f"{file}:{frames[0]['line']} in {frames[0]['name']}"
