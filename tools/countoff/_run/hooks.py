"""Places hooks that wait for a module to be imported by the program itself, and add countoff to it then.

Nothing is imported that the program does not import, and nothing is started: a process that makes no process group and
no Trainer never notices.
"""

from __future__ import annotations

import sys
from importlib import import_module

from countoff.core.flag import turned_on

TYPE_CHECKING = False  # as typing's own, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

__all__ = ["HOOKED", "place"]

HOOKED = {
    "torch.distributed.distributed_c10d": "countoff._run.process_group",
    "transformers.trainer": "countoff._run.transformers_trainer",
    "composer.trainer.trainer": "countoff._run.composer_trainer",
}
"""By module of the program's: the one of ours whose `hook` is called with it once it is there."""


def place() -> None:
    """Places the hooks in this process, once; not where ``COUNTOFF`` turns countoff off."""
    if turned_on() and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds what the other finders find, and has the hook called after a module that is hooked."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in HOOKED:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, HOOKED[name])
                return spec
        return None


class _Loader:
    """Loads a module as its own loader does, which it leaves in its place, and calls the hook."""

    def __init__(self, own: Any, hook: str) -> None:
        self._own = own
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: Any) -> Any:
        return self._own.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        try:
            import_module(self._hook).hook(module)
        except Exception as error:  # as for a version that has no such class
            from countoff._run.unobserved import say_unobserved

            say_unobserved(module.__name__, f"{type(error).__name__}: {error}")
