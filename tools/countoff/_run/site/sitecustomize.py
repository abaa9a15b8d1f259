"""Python imports this module at its start, below `countoff run`: it places the hooks, and does nothing else.

It runs the `sitecustomize` that it hides, if there is one, and leaves `sys.path` as that would find it.
"""

import os
import sys


def _place_hooks() -> None:
    try:
        from countoff._run.hooks import place
    except ImportError:  # another Python, in which countoff is not installed
        return
    place()


def _run_hidden() -> None:
    """Imports the `sitecustomize` that the user has, in the place of this one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != _here]
_place_hooks()
_run_hidden()
