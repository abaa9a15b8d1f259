"""How it ends: the verdict is printed once, left where torchrun looks for it, and the process ends with it.

A main thread in Python raises. One that is blocked inside a gloo collective cannot be interrupted by anything but
the end of its process (signals, async exceptions, `abort` and `destroy_process_group` were all tried), so after
`grace_seconds` the watchdog flushes and calls `os._exit`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time

from countoff.core.verdict import Verdict

EXIT_CODE = 87  # unlike any signal's or Python's own, so that a scheduler's log tells it apart


def say(verdict: Verdict, rank: int) -> None:
    """Prints a verdict on stderr in one write, so that lines of several ranks do not mix."""
    text = "\n".join(f"[rank {rank}] {line}" for line in verdict.render().splitlines())
    with contextlib.suppress(OSError, ValueError):  # a closed stderr must not hide the verdict from the exit code
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def leave_error_file(verdict: Verdict) -> None:
    """Writes the verdict where torchrun's and accelerate's "Root Cause" is read from.

    The format is that of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception`, which
    only a script decorated with `@record` would call.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = {
        "message": f"countoff {verdict.headline}",
        "extraInfo": {"py_callstack": verdict.render(), "timestamp": str(int(time.time()))},
    }
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def leave_now(code: int = EXIT_CODE) -> None:
    """Ends the process without waiting for its main thread."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
