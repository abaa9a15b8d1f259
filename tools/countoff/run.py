"""``python -m countoff.run SCRIPT ARGS…``: runs a program as it is, with countoff in its Trainers.

It stands where ``python -m pdb`` would stand: ``torchrun --nproc-per-node 8 -m countoff.run train.py --lr 3e-4``. The
process goes on as the program, ``python train.py --lr 3e-4``, so that everything in it is as without countoff; only the
hooks are placed before. ``-m MODULE`` runs a module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from countoff._run.environment import ignores_environment, with_hooks

TYPE_CHECKING = False  # as typing's own, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]

_USAGE = """\
usage: python -m countoff.run SCRIPT ARGS…
       python -m countoff.run -m MODULE ARGS…

Runs a program, unchanged, with countoff in it. It stands in front of the script, behind any launcher:

    torchrun --nproc-per-node 8 -m countoff.run train.py --lr 3e-4
    accelerate launch -m countoff.run train.py
    composer -n 8 -m countoff.run train.py
    srun python -m countoff.run train.py

countoff is added to every Trainer of Lightning, Composer and transformers that the program makes without one. In a loop
of the program's own, only stalls are reported; batches are compared only where the code iterates
countoff.train(loader). The program says so at its end.
Options come from the environment: COUNTOFF_UNEVEN_TRAIN=stop; docs/settings.md lists them.
COUNTOFF=0 turns it off. `countoff run -- COMMAND…` does the same in front of a launcher.
"""


def main() -> None:
    """Goes on as the program that the command line names.

    Raises:
        SystemExit: With 0 after the usage, or with 2 and one line if there is no program or a setting is bad.
    """
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    if arguments[0] == "-m" and len(arguments) == 1:
        _refuse("-m needs the name of a module")
    if arguments[0].startswith("-") and arguments[0] != "-m":
        _refuse(f"expected a script or -m MODULE, got {arguments[0]}: options come from the environment")
    flags = _flags(sys.orig_argv)
    if flags is None:
        _refuse(
            "start it as python -m countoff.run; a profiler or a debugger comes behind it: "
            "python -m countoff.run -m cProfile train.py"
        )
    if any(name.startswith("COUNTOFF_") for name in os.environ):
        _check_settings()
    if flag := ignores_environment():
        print(f"countoff: nothing is observed: python {flag} ignores what places the hooks", file=sys.stderr)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.orig_argv[0], *flags, *arguments], with_hooks(os.environ))


def _flags(command: Sequence[str]) -> list[str] | None:
    """Returns the flags with which Python was started, before ``-m countoff.run``; None if it was not started so."""
    for place, each in enumerate(command[1:], 1):
        following = "" if each.endswith("countoff.run") else "".join(command[place + 1 : place + 2])
        if each.startswith("-") and f"{each}{following}".endswith("mcountoff.run"):
            others = f"{each}{following}".removesuffix("mcountoff.run")
            return [*command[1:place], *([] if others == "-" else [others])]
    return None


def _check_settings() -> None:
    from countoff.core import Settings, SettingsError

    try:
        Settings.resolve()
    except SettingsError as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    print(f"countoff.run: {reason}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
