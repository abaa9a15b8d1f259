"""Draws the pictures of docs/seeing.md and README.md, with headless Chromium.

    python -m docs.draw_pictures runs/uneven

Run it from the root of the repository. `uneven.png` is a real run with uneven data, whose trace is in the directory
that is given; `slow.png` is the trace of a job that tests/example_traces.py writes.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from pathlib import Path
from typing import Any

from countoff.report.page import render
from countoff.report.reader import read
from tests import example_traces
from tests.browser import chromium

_PICTURES = Path(__file__).parent / "pictures"
_MARGIN = 12
"""Pixels around what a picture shows."""
_BOX = """
const boxes = [...document.querySelectorAll(arguments[0])].map((each) => each.getBoundingClientRect());
const top = Math.min(...boxes.map((box) => box.top)), bottom = Math.max(...boxes.map((box) => box.bottom));
const left = Math.min(...boxes.map((box) => box.left)), right = Math.max(...boxes.map((box) => box.right));
return {x: left + scrollX, y: top + scrollY, width: right - left, height: bottom - top};
"""


def main() -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uneven", metavar="DIR", type=Path, help="the trace of a job of four ranks with uneven data")
    uneven = parser.parse_args().uneven
    _PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        example_traces.healthy(directory / "slow", ranks=8, hosts=2, loader={2: 0.45})
        with chromium(directory / "profile", size="1040,1000") as browser:
            scheme = [{"name": "prefers-color-scheme", "value": "light"}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
            browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            draw(browser, uneven, "uneven", "h1, .bad, #timeline, #divergences")
            draw(
                browser,
                directory / "slow",
                "slow",
                "#timeline, #ranks, #spans h2:first-of-type, #spans .scroll:nth-of-type(1)",
            )


def draw(browser: Any, trace: Path, name: str, selector: str) -> None:
    """Writes the picture of a trace: the part of its page that has all elements that the selector finds."""
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary) / "page.html"
        page.write_text(render(read([str(trace)])), encoding="utf-8")
        browser.get(page.as_uri())
        box = browser.execute_script(_BOX, selector)
        clip = {
            "x": box["x"] - _MARGIN,
            "y": box["y"] - _MARGIN,
            "width": box["width"] + 2 * _MARGIN,
            "height": box["height"] + 2 * _MARGIN,
            "scale": 1,
        }
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        (_PICTURES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
