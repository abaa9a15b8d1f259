"""Starts the headless Chromium that the page of `countoff report` is tested in, and its pictures are taken with."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def is_installed() -> bool:
    """Whether Chromium and its driver are on this machine."""
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


@contextlib.contextmanager
def chromium(profile: Path, size: str = "1400,1000") -> Iterator[Any]:
    """Yields a browser without network; ends it afterwards.

    Args:
        profile: An empty directory for the browser's own files.
        size: Width and height of its window.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    flags = "headless no-sandbox disable-gpu no-first-run disable-background-networking disable-component-update"
    for flag in [*flags.split(), "disable-sync", f"user-data-dir={profile}", f"window-size={size}"]:
        options.add_argument(f"--{flag}")
    options.add_argument("--proxy-server=127.0.0.1:9")  # whatever asks for the network fails
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()
