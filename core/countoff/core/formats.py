"""The numbers of the formats of all that outlives a process, and what they promise.

docs/compatibility.md says it to users.

A number grows only if something that was written before would be read wrongly: a key changes its meaning, or goes.
Whoever lets it grow lets the reader read the numbers before it too. New keys, and new kinds of lines, come without a
new number, so a reader passes over what it does not know. What has a higher number than the reader knows is not read,
and one line says so.

What ranks write into the job's store for one another has no number: all ranks of a job run one version of countoff, and
a `VersionMismatch` warns where they do not.
"""

from __future__ import annotations

__all__ = ["JSON_OUTPUT", "RESUME_RECORD", "TRACE", "VERDICT_FILE", "beyond"]

TRACE = 1
"""Of the files of ranks in a trace: the `v` of each line `begin`, for all lines up to the next one."""
VERDICT_FILE = 1
"""Of the verdict file, and of the incident in a trace, which has its keys too: its `format`."""
RESUME_RECORD = 1
"""Of the record in a checkpoint, and of the fingerprints of batches in it: its `version`."""
JSON_OUTPUT = 1
"""Of the JSON that commands print: the `format` of each object."""


def beyond(found: object, known: int) -> str:
    """Says why something is not read that has this number; empty if it can be read.

    Args:
        found: The number that was found. One that is no number is that of a file which somebody has damaged.
        known: The number above which this version reads nothing.

    >>> beyond(2, 1)
    'it is in format 2 of a newer countoff, and this one reads format 1: install the newer one'
    >>> beyond(1, 1)
    ''
    """
    if type(found) is not int or found <= known:
        return ""
    return f"it is in format {found} of a newer countoff, and this one reads format {known}: install the newer one"
