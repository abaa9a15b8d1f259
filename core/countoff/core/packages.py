"""Names of packages whose code is not the user's own: the one place where the core knows any."""

from __future__ import annotations

__all__ = ["PATHS", "WITH_MAPPINGS"]

PATHS = (
    "/torch/",
    "/lightning/",
    "/pytorch_lightning/",
    "/lightning_fabric/",
    "/countoff/",
    "/accelerate/",
    "/site-packages/composer/",  # no shorter: a user's own directory may well be called composer
)
"""Parts of the paths of files whose frames a stall report leaves out."""
WITH_MAPPINGS = ("collections", "_collections_abc", "transformers")
"""Packages whose mappings give access to what they store, as it is."""
