"""The page of `countoff report` in a real browser: headless Chromium, without network."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from countoff.report.facts import headline
from countoff.report.page import render
from countoff.report.page.axis import Label, TimeAxis, apart
from countoff.report.page.lanes import Lane, lanes_of
from countoff.report.reader import read
from tests import example_traces
from tests.browser import chromium, is_installed
from tests.example_traces import BEGAN, HOSTILE, RankWriter

webdriver = pytest.importorskip("selenium.webdriver", reason="a browser is driven by selenium")
pytestmark = pytest.mark.skipif(
    not is_installed(), reason="there is no Chromium here: apt-get install chromium chromium-driver"
)

_SECONDS = 60.0
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[[Path], Page]]:
    """Opens the page of a trace; then checks that it asked for nothing and complained of nothing."""

    def load(directory: Path) -> Page:
        file = tmp_path / "page.html"
        file.write_text(render(read([str(directory)])), "utf-8")
        browser.get(file.as_uri())
        return Page(browser)

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


def lanes(directory: Path) -> list[Lane]:
    trace = read([str(directory)])
    return lanes_of(trace, TimeAxis(trace.runs))


def drawn(lane: Lane) -> list[tuple[str, float, float]]:
    """What is drawn in a lane, from where to where in percent."""
    return [(shape.kind, shape.left, shape.left + shape.width) for shape in lane.shapes]


def test_the_lanes_are_in_the_document_with_the_odd_one_first(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.texts(".lanes b") == ["rank 2", "rank 0", "rank 1", *(f"rank {rank}" for rank in range(3, 8))]
    assert page.texts(".lanes dt.outlier em") == ["named by the verdict; other counts"]
    assert page.texts(".lanes small") == ["node0", "node0", "node0", "node0", *["node1"] * 4]
    assert page.texts("#divergences p") == [
        "15:07:25 UTC: the ranks' counts begin to differ in train epoch 0: rank 2: 90 batches; ranks 0, 1, 3–7: 91 "
        "batches"
    ]
    assert page.texts("td.outlier") == ["named by the verdict; other counts", "≠ 90 batches, 90 steps"]


def test_a_lane_has_the_spans_of_its_rank_with_counts_and_times(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace", epochs=1)
    first = lanes(tmp_path / "trace")[0]
    epoch, evaluation = 100 * 60 / 70, 100.0
    assert drawn(first) == [("train", 0, pytest.approx(epoch)), ("evaluation", pytest.approx(epoch), evaluation)]
    assert first.shapes[0].text == (
        "train epoch 0: 120 batches, 120 steps; waited 1.2 s for the loader; 15:06:40 – 15:07:40"
    )
    assert (
        first.text == "rank 0; on node0; got to evaluation after epoch, 10 batches; 120 steps; waited for the loader "
        "1.2 s; end: finished"
    )
    page = show(tmp_path / "trace")
    assert page.run("return document.querySelector('.lanes rect title').textContent") == first.shapes[0].text
    lane, block = (
        page.run("return [...document.querySelectorAll('dd:not(.corner) > svg')][0].getBoundingClientRect().toJSON()"),
        page.run("return document.querySelector('.lanes rect.train').getBoundingClientRect().toJSON()"),
    )
    assert block["left"] == pytest.approx(lane["left"], abs=1)
    assert block["width"] == pytest.approx(lane["width"] * epoch / 100, abs=2)


def test_the_height_of_a_wait_is_its_share_of_the_time(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=3, epochs=1, ticks=4, evaluations=False, loader={1: 0.45})
    assert [lane.waits for lane in lanes(tmp_path)] == ["M0 100V55H1000V100z", "", ""]


def test_an_open_span_is_drawn_to_the_end_of_its_rank_and_a_lost_rank_as_uncertain(tmp_path: Path) -> None:
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 2)
        writer.open("train epoch 0")
        if rank == 0:
            writer.tick(5, 10)
            writer.time += 3
            writer.line("verdict", verdict=example_traces.verdict("LostRank", [1], rows=[], time=BEGAN + 7))
            writer.line("end", how="verdict")
        writer.save()
    lost, other = lanes(tmp_path)
    assert (lost.label, drawn(lost), lost.crosses) == ("rank 1", [("unknown", 0, 100 * 7 / 8)], [100 * 7 / 8])
    assert lost.shapes[0].text == "train epoch 0, not closed; no more data from this rank; 15:06:40 – 15:06:47"
    assert (drawn(other), other.crosses) == ([("train", 0, 100)], [100])
    assert other.shapes[0].text.startswith("train epoch 0, not closed: at least 10 batches")


def test_a_lane_of_many_spans_has_few_shapes(tmp_path: Path) -> None:
    """A page of 256 ranks in 1,000 epochs stays small; what is drawn still covers all of the time."""
    for rank in range(256):
        writer = RankWriter(tmp_path, rank, 256)
        for epoch in range(1_000 if rank == 0 else 1):
            writer.open(f"train epoch {epoch}")
            writer.tick(1, 10, steps=10, loader=epoch % 2)
            writer.close(f"train epoch {epoch}")
        writer.line("end", how="finished")
        writer.save()
    busy = lanes(tmp_path)[0]
    assert (busy.label, len(busy.shapes)) == ("rank 0", 46)
    assert (drawn(busy)[0][1], drawn(busy)[-1][2]) == (0, 100)
    assert busy.shapes[0].text.startswith("train epoch 0 – train epoch 21: 10 batches, 220 steps")


def test_lanes_without_a_reason_are_in_order(tmp_path: Path) -> None:
    """With `uneven_train`, the rank that has the fewest batches is a class of its own, and no outlier."""
    example_traces.made_even(tmp_path)
    assert [lane.label for lane in lanes(tmp_path)] == ["rank 0", "rank 1", "rank 2", "rank 3"]


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        (0.8, ["15:06:40.2", "15:06:40.4", "15:06:40.6"]),
        (45, ["15:06:50", "15:07:00", "15:07:10", "15:07:20"]),
        (4 * 86_400, ["16 Jun", "17 Jun", "18 Jun", "19 Jun"]),
    ],
)
def test_the_axis_has_round_times_and_the_job_fills_it(tmp_path: Path, seconds: float, times: list[str]) -> None:
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    writer.tick(seconds, 10)
    writer.close("train epoch 0")
    writer.save()
    trace = read([str(tmp_path)])
    axis = TimeAxis(trace.runs)
    assert [label.text for label in axis.times()] == times
    assert (axis.place(BEGAN), axis.place(BEGAN + seconds)) == (0, pytest.approx(100))


def test_the_axis_ends_with_the_last_epoch_of_a_program_that_goes_on(tmp_path: Path) -> None:
    """A loop that is not closed has finished when its program ends."""
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    writer.tick(0.8, 20)
    writer.close("train epoch 0")
    writer.time += 10
    writer.line("end", how="finished")
    writer.save()
    trace = read([str(tmp_path)])
    assert TimeAxis(trace.runs).place(BEGAN + 0.8) == pytest.approx(100)
    assert headline(trace) == "finished: 1 epoch, 1 rank, 0.8 s"


def test_labels_that_have_no_room_are_left_out() -> None:
    found = apart([Label(place, "middle", "12:00:00") for place in (10, 20, 40)])
    assert [label.place for label in found] == [10, 40]


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("healthy", ["train", "evaluation"]),
        ("slow", ["train", "evaluation", "waits"]),
        ("stall", ["train", "collective", "code", "end"]),
        ("killed", ["train", "unknown", "end"]),
        ("verdict", ["train", "collective", "divergence", "end"]),
        ("resumed", ["train", "gap", "end"]),
    ],
)
def test_the_legend_has_what_is_in_the_picture(tmp_path: Path, kind: str, kinds: list[str]) -> None:
    example_traces.KINDS[kind](tmp_path)
    text = render(read([str(tmp_path)])).partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert re.findall('<i class="([a-z]+)">', text) == kinds


def test_the_page_explains_its_words(show: Callable[[Path], Page], tmp_path: Path) -> None:
    """To somebody who has never heard of ranks; axe-core sees the open section too."""
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    about = page.run("return document.querySelector('details p').textContent")
    assert about.startswith("countoff watches a training job that runs as several processes")
    assert page.run("return document.querySelector('details dl').checkVisibility()") is False
    page.driver.find_element("css selector", "summary").click()
    assert page.run("return document.querySelector('details dl').checkVisibility()") is True
    assert page.texts("details dt") == ["rank", "batch", "fetched", "step", "span", "collective", "verdict"]
    page.run(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    assert page.driver.execute_async_script(_BARRIERS) == []


def test_the_verdict_is_text_that_can_be_selected(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    verdict = read([str(tmp_path / "trace")]).verdict
    assert verdict is not None
    selected = page.run(
        "const selection = getSelection(); selection.selectAllChildren(document.querySelector('pre.bad'));"
        "return selection.toString()"
    )
    assert selected == verdict.render()


def test_a_healthy_page_says_once_that_all_is_well(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.texts("h1.good") == ["Finished: 3 epochs, 4 ranks, 3 min 30 s"]
    assert page.run("return document.body.innerText").lower().count("finished: 3 epochs") == 1
    assert page.run("return document.querySelectorAll('pre').length") == 0


def test_every_stop_of_the_keyboard_has_a_name(show: Callable[[Path], Page], tmp_path: Path) -> None:
    """The Tab key goes through what unfolds and what scrolls; each has a name."""
    example_traces.uneven(tmp_path / "trace")
    page = show(tmp_path / "trace")
    stops: list[str] = []
    page.run("document.activeElement.blur()")
    for _ in range(40):
        page.press("\ue004")
        name = page.run(
            "const at = document.activeElement;"
            "return at === document.body ? 'end' : at.getAttribute('aria-label') ?? at.textContent"
        )
        if name == "end":
            break
        stops.append(name)
    tables = ["Ranks that behaved alike", "Who is slow", "Counts", "Hosts"]
    assert stops == ["What this page shows, and what its words mean", "Ranks", *tables]


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
    """axe-core finds nothing, in both schemes, also on the screen of a telephone."""
    example_traces.KINDS[kind](tmp_path / "trace")
    page = show(tmp_path / "trace")
    page.run(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    for scheme, width in itertools.product(["light", "dark"], [1280, 400]):
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
    assert page.run("return document.querySelectorAll('script').length") == 0
    assert page.run("return document.querySelectorAll('b:not(.lanes b)').length") == 0
    assert page.texts(".lanes b") == page.run(
        "return [...document.querySelectorAll('.lanes b')].map((b) => b.innerHTML)"
    )
    assert any("<script>document.title='owned'</script>" in text for text in page.texts("pre"))


def test_the_browser_is_told_to_run_no_script(browser: Any, tmp_path: Path) -> None:
    """Should a text ever become markup, the browser itself refuses to run it."""
    example_traces.healthy(tmp_path / "trace", ranks=1, epochs=1)
    text = render(read([str(tmp_path / "trace")]))
    (tmp_path / "page.html").write_text(text.replace("<h1", f"{HOSTILE[0]}{HOSTILE[1]}<h1"), "utf-8")
    browser.get((tmp_path / "page.html").as_uri())
    page = Page(browser)
    assert page.run("return document.querySelectorAll('script').length") == 1
    assert page.run("return document.title").startswith("countoff: ")


def test_the_page_follows_the_scheme_of_the_system(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace", ranks=2)
    page = show(tmp_path / "trace")
    for scheme, colors in [
        ("light", ["rgb(255, 255, 255)", "rgb(0, 114, 178)"]),
        ("dark", ["rgb(20, 23, 27)", "rgb(61, 143, 209)"]),
    ]:
        with page.seen(scheme=scheme, width=1280):
            assert page.run(_COLORS) == colors


@pytest.mark.parametrize("kind", ["rates", "verdict"])
def test_paper_is_white_and_cuts_nothing_off(show: Callable[[Path], Page], tmp_path: Path, kind: str) -> None:
    """Also from a dark screen."""
    example_traces.KINDS[kind](tmp_path / "trace")
    page = show(tmp_path / "trace")
    with page.seen(scheme="dark", width=1400):
        pdf = base64.b64decode(page.driver.print_page())
        assert pdf.startswith(b"%PDF-")
        assert pdf.count(b"/Type /Page\n") >= 1
    with page.seen(scheme="dark", width=718):  # A4 without its margins
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
        assert page.run(_COLORS) == ["rgb(255, 255, 255)", "rgb(0, 114, 178)"]
        assert page.run("return document.documentElement.scrollWidth") <= 718
        assert page.run(_WIDER, 718) == []
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


_COLORS = """
return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector("rect.train")).fill];
"""
_WIDER = """
return [...document.querySelectorAll("body *")].filter((each) => each.getBoundingClientRect().right > arguments[0] + 1)
  .filter((each) => !each.closest("svg")).map((each) => each.outerHTML.slice(0, 80));
"""


def test_a_run_and_its_resume_share_an_axis(show: Callable[[Path], Page], tmp_path: Path) -> None:
    """Twelve hours lie between the two: the axis leaves them out, and its labels tell the real times."""
    example_traces.resumed(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.texts("h1 + .note") == ["1 host, 2 runs, began 2025-06-15 15:06:40 UTC"]
    assert page.texts("#timeline .note") == [
        "2025-06-15 15:08:10 – 2025-06-16 03:08:10: no run. The time axis leaves out 11 h 59 min of it."
    ]
    assert page.texts("#steps_before-2 p")[0].startswith("It resumes after optimizer step 120.")
    labels = page.run("return [...document.querySelectorAll('dd.corner text')].map((each) => each.textContent)")
    assert labels == ["15:07:00", "15:08:00", "03:09:00", "03:10:00", "12 h between runs"]
    trace = read([str(tmp_path / "trace")])
    axis = TimeAxis(trace.runs)
    first, second = trace.runs
    assert axis.place(second.begin) - axis.place(first.end) == pytest.approx(100 * 0.04 * 210 / 218.4)
    assert page.texts("#horizons-2 p, #learning_rates-2 p") == ["The schedule would have ended at step 360."]
    last = page.run("return document.querySelector('#learning_rates-2 polyline').getAttribute('points')")
    assert last.endswith(" 1000,100")


def test_each_group_of_ranks_has_its_learning_rates_where_they_differ(
    show: Callable[[Path], Page], tmp_path: Path
) -> None:
    example_traces.different_rates(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.texts("#learning_rates h3") == ["The ranks' learning rates differ"]
    assert page.texts("#learning_rates tbody tr") == ["rank 3\t≠ 0.0375\t≠ 0.025", "ranks 0–2\t0.075\t0.05"]
    assert page.texts("#learning_rates .legend li") == ["rank 3", "ranks 0–2"]
    assert page.run("return document.querySelectorAll('#learning_rates polyline').length") == 2
    assert page.texts(".lanes dt.outlier em") == ["other learning rates"]


def test_equal_learning_rates_are_shown_once(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace")
    page = show(tmp_path / "trace")
    assert page.run("return document.querySelectorAll('#learning_rates polyline').length") == 1
    assert page.run("return document.querySelectorAll('#learning_rates table, #learning_rates ul').length") == 0


def test_more_ranks_than_lanes_are_drawn_as_classes(show: Callable[[Path], Page], tmp_path: Path) -> None:
    example_traces.healthy(tmp_path / "trace", ranks=260, epochs=1, loader={7: 0.5}, hosts=4)
    page = show(tmp_path / "trace")
    assert page.texts(".lanes b") == ["rank 7", "ranks 0–6, 8–259"]
    assert page.texts("#timeline .note") == [
        "260 ranks: each lane is a class of ranks that behaved alike, drawn as its first rank."
    ]
