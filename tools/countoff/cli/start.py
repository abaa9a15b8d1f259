"""What the console script calls. `countoff run -- COMMAND…` starts its command at once, without the other commands."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    command = sys.argv[3:]
    if command and sys.argv[1:3] == ["run", "--"] and not any(name.startswith("COUNTOFF_") for name in os.environ):
        from countoff._run.command import CommandError, run

        try:  # noqa: SIM105  # contextlib takes longer to import than what is done here
            sys.exit(run(command, {}))
        except CommandError:
            pass  # said below
    from countoff.cli import __main__

    __main__.main()
