"""Names of packages whose code is not the user's own: the one place where the core knows any."""

from __future__ import annotations

__all__ = ["PATHS", "WITH_MAPPINGS", "framework_of"]

_FRAMEWORKS = (
    "/lightning/",
    "/pytorch_lightning/",
    "/lightning_fabric/",
    "/accelerate/",
    "/site-packages/composer/",  # no shorter: a user's own directory may well be called composer
)
PATHS = ("/torch/", "/countoff/", *_FRAMEWORKS)
"""Parts of the paths of files whose frames a stall report leaves out."""
WITH_MAPPINGS = ("collections", "_collections_abc", "transformers")
"""Packages whose mappings give access to what they store, as it is."""


def framework_of(file: str) -> str:
    """Returns which framework around torch a file belongs to; empty for any other file, torch's own included.

    >>> framework_of("/lib/site-packages/composer/core/state.py"), framework_of("/me/lightning/lib/torch/nn/init.py")
    ('composer', '')
    """
    part = max(PATHS, key=file.rfind)  # the last one: those before it are directories above the package
    return part.strip("/").rpartition("/")[2] if part in _FRAMEWORKS and part in file else ""
