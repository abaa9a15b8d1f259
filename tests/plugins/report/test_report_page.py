"""The page of `countoff report` in a real browser: headless Chromium, without network."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from countoff.report.reader import read
from tests import example_traces
from tests.browser import chromium, is_installed
from tests.example_traces import BEGAN, HOSTILE, RankWriter

pytest.importorskip("bokeh", reason="the page needs countoff[report]")
webdriver = pytest.importorskip("selenium.webdriver", reason="a browser is driven by selenium")
pytestmark = pytest.mark.skipif(
    not is_installed(), reason="there is no Chromium here: apt-get install chromium chromium-driver"
)

_SECONDS = 60.0
_RANGE = "Bokeh.documents.flatMap((each) => each.roots()).find((each) => each.name === 'lanes').x_range"
_TOOLTIPS = """
const found = [];
const walk = (node) => {
  if (node.classList?.contains("hover")) found.push(node.innerText);
  for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) walk(child);
};
walk(document.body);
return found;
"""
_BARRIERS = """
axe.run({resultTypes: ["violations"]}).then(({violations}) => arguments[0](
  violations.flatMap(({id, nodes}) => nodes.map((node) => `${id}: ${node.target}: ${node.failureSummary}`))));
"""


class Page:
    """A page in the browser.

    Args:
        driver: The browser.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Waits for the browser, and returns what it waited for."""
        deadline = time.monotonic() + _SECONDS
        while not (found := condition()):
            assert time.monotonic() < deadline, "the browser did not get so far"
            time.sleep(0.02)
        return found

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText)", selector)

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def hover(self, x: float, y: float) -> None:
        """Moves the mouse over the lanes: shares of their width and height."""
        element = self.driver.find_element("id", "lanes")
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        size = element.size
        actions = webdriver.ActionChains(self.driver)
        actions.move_to_element_with_offset(element, (x - 0.5) * size["width"], (y - 0.5) * size["height"]).perform()

    @contextlib.contextmanager
    def seen(self, *, scheme: str = "", width: int) -> Iterator[None]:
        """Shows the page in a colour scheme of the system, on a screen of that width."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        try:
            self.until(lambda: self.run("return innerWidth") == width)
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def range(self) -> tuple[float, float]:
        """What the time axis shows, in seconds since the beginning of the job."""
        start, end = self.run(f"const range = {_RANGE}; return [range.start, range.end]")
        return start / 1000 - BEGAN, end / 1000 - BEGAN


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[[Path], Page]]:
    """Opens the page of a trace; then checks that it asked for nothing and complained of nothing."""
    from countoff.report.page import render

    def load(directory: Path) -> Page:
        file = tmp_path / "page.html"
        file.write_text(render(read([str(directory)])), "utf-8")
        browser.get(file.as_uri())
        page = Page(browser)
        page.until(lambda: page.run("return document.documentElement.dataset.drawn === 'yes'"))
        return page

    for kind in ("browser", "performance"):
        browser.get_log(kind)
    yield load
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    # Chromium's own first tab asks for its own pages.
    asked = [each["request"]["url"] for each in requests if each["documentURL"].startswith("file:")]
    assert asked
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_the_lanes_are_in_the_document_with_the_odd_one_first(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.texts("#labels b") == ["rank 2", "rank 0", "rank 1", *(f"rank {rank}" for rank in range(3, 8))]
    assert page.texts("#labels li.odd em") == ["named by the verdict; other counts"]
    assert page.texts("#labels small") == ["node0", "node0", "node0", "node0", *["node1"] * 4]
    assert page.texts("p.parting") == [
        "15:07:25: the ranks' counts begin to differ in train epoch 0: rank 2: 90 batches; ranks 0, 1, 3–7: 91 batches"
    ]
    assert page.texts("td.odd") == ["≠ 90 batches, 90 steps"]


def test_an_open_span_is_drawn_to_the_end_of_its_rank_and_a_lost_rank_as_uncertain(tmp_path: Path) -> None:
    from countoff.report.page.lanes import lanes_of, rests_of

    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        if rank == 0:
            writer.tick(5, 10)
            writer.time += 3
            writer.line("verdict", verdict=example_traces.verdict("LostRank", [1], rows=[], time=BEGAN + 7))
            writer.line("end", how="verdict")
        writer.save()
    lanes = lanes_of(read([str(tmp_path)]))
    assert [(lane.label, lane.ends) for lane in lanes] == [("rank 1", (BEGAN + 7,)), ("rank 0", (BEGAN + 8,))]
    (known,) = rests_of(lanes, certain=True, evaluations=False)
    assert known[:3] == (1, BEGAN + 5, BEGAN + 8)
    (unknown,) = rests_of(lanes, certain=False, evaluations=False)
    assert unknown[:3] == (0, BEGAN, BEGAN + 7)
    assert rests_of(lanes, certain=True, evaluations=True) == []


def test_lanes_without_a_reason_are_in_order(tmp_path: Path) -> None:
    """With `uneven_train`, the rank that has the fewest batches is a class of its own, and not odd."""
    from countoff.report.page.lanes import lanes_of

    example_traces.made_even(tmp_path)
    assert [lane.label for lane in lanes_of(read([str(tmp_path)]))] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_a_job_that_ended_at_once_has_whole_seconds_on_its_axis(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.different_plans(tmp_path / "trace")
    assert show(tmp_path / "trace").range() == (-5, 5)


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("healthy", ["train", "evaluation"]),
        ("slow", ["train", "evaluation", "loader"]),
        ("stall", ["train", "collective", "code", "end"]),
        ("killed", ["train", "unknown", "end"]),
        ("verdict", ["train", "collective", "parting", "end"]),
        ("resumed", ["train", "gap", "end"]),
    ],
)
def test_the_legend_has_what_is_in_the_picture(tmp_path: Path, kind: str, kinds: list[str]) -> None:
    from countoff.report.page import render

    example_traces.KINDS[kind](tmp_path)
    text = render(read([str(tmp_path)])).partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert re.findall('<i class="([a-z]+)">', text) == kinds


def test_the_page_explains_its_words(show: Callable[[Path], Page], tmp_path: Path) -> None:
    """To somebody who has never heard of ranks; axe-core sees the open section too."""
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.texts(".about p")[0].startswith("countoff watches a training job that runs as several processes")
    assert page.run("return document.querySelector('dl').checkVisibility()") is False
    page.driver.find_element("css selector", "summary").click()
    assert page.run("return document.querySelector('dl').checkVisibility()") is True
    assert page.texts("dt") == ["rank", "batch", "fetched", "step", "span", "collective", "verdict"]
    page.run(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    assert page.driver.execute_async_script(_BARRIERS) == []


def test_the_verdict_is_text_that_can_be_selected(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    verdict = read([str(tmp_path / "trace")]).verdict
    assert verdict is not None
    selected = page.run(
        "const selection = getSelection(); selection.selectAllChildren(document.querySelector('pre.verdict'));"
        "return selection.toString()"
    )
    assert selected == verdict.render()


def test_hovering_shows_counts_and_times(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    page.hover(0.4, 0.5 / 8)
    (tooltip,) = page.until(lambda: page.run(_TOOLTIPS))
    assert "rank 2, train epoch 0" in tooltip
    assert "50 batches, 50 steps" in tooltip
    assert "15:07:00 – 15:07:05" in tooltip
    assert "2 batches per second" in tooltip
    page.hover(0.9, 7.5 / 8)
    page.until(lambda: "in a collective, at distributed_c10d.py:2500 in all_reduce" in str(page.run(_TOOLTIPS)))


def test_buttons_and_keys_zoom_and_pan_and_choose_a_lane(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace", ranks=8)
    page = show(tmp_path / "trace")
    whole = page.range()
    assert whole == (pytest.approx(-2.1), pytest.approx(212.1))
    for button, expected in [("in", (51.45, 158.55)), ("right", (78.225, 185.325)), ("all", whole)]:
        page.driver.find_element("css selector", f"[data-do={button}]").click()
        assert page.range() == pytest.approx(expected)
    page.run("document.getElementById('labels').focus()")
    page.press("\ue015", "\ue015", "+")  # down twice
    assert page.texts("[aria-selected=true] b") == ["rank 1"]
    assert page.texts("#status")[0].startswith("rank 1 on node0; 3 epochs, 360 steps; last in evaluation after epoch")
    assert page.range() == pytest.approx((51.45, 158.55))
    page.press("\ue012", "-", "0", "\ue013")  # left, up
    assert page.texts("[aria-selected=true] b") == ["rank 0"]
    assert page.range() == pytest.approx(whole)


def test_every_stop_of_the_keyboard_has_a_name(show: Callable[[Path], Page], tmp_path: Path) -> None:
    """The Tab key goes through buttons, the list of lanes, and what scrolls; each has a name."""
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    stops: list[str] = []
    page.run("document.activeElement.blur()")
    for _ in range(40):
        page.press("\ue004")
        name = page.run(
            "let at = document.activeElement; while (at.shadowRoot?.activeElement) at = at.shadowRoot.activeElement;"
            "return at === document.body ? 'end' : at.getAttribute('aria-label') ?? at.textContent"
        )
        if name == "end":
            break
        stops.append(name)
    assert stops[:2] == ["What the words on this page mean", "Ranks"]
    assert [name for name in stops if name.startswith("Lanes")] == stops[7:8]
    assert stops[8:] == ["Spans", "Hosts", "Counts"]
    assert stops[2:7] == ["Earlier", "Zoom out", "Zoom in", "Later", "All"]


def test_a_small_screen_cuts_nothing_off(show: Callable[[Path], Page], tmp_path: Path) -> None:
    """Nothing is wider than the screen but what scrolls by itself; the table of the verdict keeps its columns."""
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    with page.seen(width=400):
        assert page.run("return document.documentElement.scrollWidth") == 400
        assert page.run("const rows = document.querySelector('.rows'); return rows.scrollWidth > rows.clientWidth")
        table = page.run("return document.querySelector('.rows').textContent").splitlines()
        assert [line.split()[0] for line in table] == ["rank", "2", "0,"]
        cut = "[...document.querySelectorAll('#labels li')].filter((each) => each.scrollWidth > each.clientWidth)"
        assert page.run(f"return {cut}.length") == 0


@pytest.mark.parametrize("kind", example_traces.KINDS)
def test_the_page_has_no_barrier(show: Callable[[Path], Page], tmp_path: Path, kind: str) -> None:
    """axe-core finds nothing, in both schemes and on the screen of a telephone."""
    example_traces.KINDS[kind](tmp_path / "trace")
    page = show(tmp_path / "trace")
    page.run(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    for scheme, width in [("light", 1280), ("dark", 1280), ("light", 400)]:
        with page.seen(scheme=scheme, width=width):
            found = page.driver.execute_async_script(_BARRIERS)
        assert found == [], (scheme, width)


def test_hostile_texts_stay_texts(show: Callable[[Path], Page], tmp_path: Path) -> None:
    for rank, text in enumerate(HOSTILE):
        facts = {"framework": text, "versions": {text: text}, "run": {text: text}}
        writer = RankWriter(tmp_path / "trace", rank, len(HOSTILE), begin={"host": text, **facts})
        writer.open(text)
        writer.tick(5, 10 + rank, lr=[0.1])
        writer.line("warning", verdict=example_traces.verdict("Truncated", sentence=text, why=text, remedy=text))
        writer.line("pause", s=3, **{"in": "collective"}, at=[text])
        writer.line("stacks", state=text, frames=[text, text])
        writer.line("totals", true={text: 1}, reported={text: 2})
        writer.close(text)
        hosts = {str(rank): text}
        writer.line(
            "verdict",
            verdict=example_traces.verdict(text, sentence=text, hosts=hosts, rows=[{"rank": text, "where": text}]),
        )
        writer.line("end", how="failed", what=text)
        writer.save()
    page = show(tmp_path / "trace")
    assert page.run("return document.title").startswith("countoff: ")
    assert page.run("return document.querySelectorAll('img, iframe, object, link, base, form').length") == 0
    assert page.run("return document.querySelectorAll('script').length") == 3
    assert page.run("return document.querySelectorAll('b:not(#labels b)').length") == 0
    assert page.texts("#labels b") == page.run(
        "return [...document.querySelectorAll('#labels b')].map((b) => b.innerHTML)"
    )
    assert any("<script>document.title='owned'</script>" in text for text in page.texts("pre"))
    for place in range(1, 10):
        page.hover(place / 10, 0.5 / len(HOSTILE))
        page.until(lambda: True)
    assert page.run("return document.title").startswith("countoff: ")


def test_the_page_runs_no_script_but_its_own(browser: Any, tmp_path: Path) -> None:
    """Should a text ever become markup, the browser itself refuses to run it."""
    from countoff.report.page import render

    example_traces.healthy(tmp_path / "trace", ranks=1, epochs=1)
    text = render(read([str(tmp_path / "trace")]))
    (tmp_path / "page.html").write_text(text.replace("<h1>", f"{HOSTILE[0]}{HOSTILE[1]}<h1>"), "utf-8")
    browser.get((tmp_path / "page.html").as_uri())
    page = Page(browser)
    page.until(lambda: page.run("return document.documentElement.dataset.drawn === 'yes'"))
    assert page.run("return document.querySelectorAll('script').length") == 4
    assert page.run("return document.title").startswith("countoff: ")


def test_the_page_follows_the_scheme_of_the_system(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace", ranks=2)
    page = show(tmp_path / "trace")
    lanes = "Bokeh.documents.flatMap((each) => each.roots()).find((each) => each.name === 'lanes')"
    script = f"""return [getComputedStyle(document.body).backgroundColor,
        {lanes}.renderers.find((each) => each.name === 'train').glyph.fill_color.value]"""
    for scheme, colors in [("light", ["rgb(255, 255, 255)", "#0072b2"]), ("dark", ["rgb(20, 23, 27)", "#3d8fd1"])]:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        page.until(lambda colors=colors: page.run(script) == colors)
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("width", [1400, 400])
def test_paper_is_white_and_cuts_nothing_off(show: Callable[[Path], Page], tmp_path: Path, width: int) -> None:
    """Also from a dark screen, and whatever its width."""
    example_traces.different_rates(tmp_path / "trace")
    page = show(tmp_path / "trace")
    paint = "const style = getComputedStyle(document.documentElement); return style.getPropertyValue('--page')"
    with page.seen(scheme="dark", width=width):
        assert page.run(paint) == "#14171b"
        drawn = page.run(f"{_CANVASES} return canvases();")
        pdf = base64.b64decode(page.driver.print_page())
        assert pdf.startswith(b"%PDF-")
        assert pdf.count(b"/Type /Page\n") >= 1
        assert page.run("return document.documentElement.hasAttribute('data-paper')") is False
        event = "window.dispatchEvent(new Event('beforeprint'));"
        assert page.run(f"{_CANVASES} {event} return canvases();") == drawn
        assert page.run(paint) == "#fff"
        assert page.run(f"return {_LANES}.renderers.find((each) => each.name === 'train').glyph.fill_color.value") == (
            "#0072b2"
        )
    with page.seen(width=718):  # A4 without its margins
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert page.run("return document.documentElement.scrollWidth") <= 718
        assert page.run(_WIDER, 718) == []
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page.run("window.dispatchEvent(new Event('afterprint'))")


_LANES = "Bokeh.documents.flatMap((each) => each.roots()).find((each) => each.name === 'lanes')"
_CANVASES = """
const canvases = (node = document.body) => [...(node.tagName === "CANVAS" ? [[node.width, node.height]] : []),
  ...[...(node.shadowRoot?.children ?? []), ...node.children].flatMap((each) => canvases(each))];
"""
_WIDER = """
return [...document.querySelectorAll("body *")].filter((each) => each.getBoundingClientRect().right > arguments[0] + 1)
  .map((each) => each.outerHTML.slice(0, 80));
"""
_RATES = "Bokeh.documents.flatMap((each) => each.roots()).find((each) => each.name === 'rates')"
_AXIS_LABELS = """
const found = [];
const walk = (node) => {
  for (const text of node.querySelectorAll?.("text") ?? []) found.push(text.textContent);
  for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) walk(child);
};
const axis = Bokeh.documents.flatMap((each) => each.roots()).find((each) => each.name === "axis");
return axis.above[0].formatter.doFormat(arguments[0], {loc: 0});
"""


def test_a_run_and_its_resume_are_one_training(show: Callable[[Path], Page], tmp_path: Path) -> None:
    """Twelve hours lie between the two: the axis leaves them out, and its labels and tooltips tell the real times."""
    example_traces.resumed(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.texts(".where") == ["2 ranks, 1 host, 2 runs, began 2025-06-15 15:06:40 UTC"]
    assert page.texts("#timeline .note") == [
        "2025-06-15 15:08:10 – 2025-06-16 03:08:10: no run. The time axis leaves out 11 h 59 min of it.",
        "Run 2 resumes after optimizer step 120. Its steps below go on from there; a verdict counts those since the "
        "resume.",
    ]
    labels = page.run("return document.querySelector('#figures').textContent")
    assert "12 h between runs" in labels
    start, end = page.range()
    assert end - start == pytest.approx(1.02 * (90 + 60 + 120))
    begin = 1000 * BEGAN
    assert page.run(_AXIS_LABELS, [begin + 60_000, begin + 210_000]) == ["15:07:40", "03:09:10"]
    lines = page.run(f"return {_RATES}.renderers.filter((r) => r.glyph.type === 'Line').map((r) => r.data_source.data)")
    (line,) = lines
    steps, rates = ([*map(float, line[axis].values())] if isinstance(line[axis], dict) else line[axis] for axis in "xy")
    assert steps == [float(step) for step in range(10, 361, 10)]
    assert rates == [pytest.approx(0.1 * (1 - step / 360), abs=1e-6) for step in steps]
    page.hover(0.94, 0.25)
    (tooltip,) = page.until(lambda: page.run(_TOOLTIPS))
    assert "train epoch 2" in tooltip
    assert "03:10:" in tooltip
    assert "360 steps" in tooltip or "350 steps" in tooltip
    assert page.texts("#learning-rate .note") == ["Dotted: the schedule would have ended at step 360."]


def test_each_group_of_ranks_has_its_learning_rates_where_they_differ(
    show: Callable[[Path], Page], tmp_path: Path
) -> None:
    example_traces.different_rates(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.texts("#learning-rate .differ") == ["The ranks' learning rates differ:"]
    assert page.texts("#learning-rate tbody tr") == ["rank 3\t≠ 0.0375\t≠ 0.025", "ranks 0–2\t0.075\t0.05"]
    legend = f"{_RATES}.center.find((each) => each.type === 'Legend')"
    assert page.run(f"return {legend}.items.map((each) => each.label.value)") == ["rank 3", "ranks 0–2"]
    assert page.texts("#labels li.odd em") == ["other learning rates"]


def test_equal_learning_rates_are_shown_once(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.run(f"return {_RATES}.center.filter((each) => each.type === 'Legend').length") == 0
    assert page.run("return document.querySelectorAll('#learning-rate table').length") == 0


def test_more_ranks_than_lanes_are_drawn_as_classes(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace", ranks=260, epochs=1, loader={7: 0.5}, hosts=4)
    page = show(tmp_path / "trace")
    assert page.texts("#labels b") == ["rank 7", "ranks 0–6, 8–259"]
    assert page.texts("#timeline .note") == [
        "260 ranks: each lane is a class of ranks that behaved alike, drawn as its first rank."
    ]
