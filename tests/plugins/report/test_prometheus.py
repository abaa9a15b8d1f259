"""`countoff top --prometheus`: the metrics by the client library's own parser, the address, and the dashboard."""

from __future__ import annotations

import contextlib
import json
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from countoff.core.checks import KINDS
from countoff.report.model import Trace
from countoff.report.reader import Reader
from countoff.report.top.exporter import Address
from countoff.report.top.metrics import MOST_RANKS, JobCollector
from countoff.report.top.rows import STATES, LiveRanks
from countoff.report.top.watch import WatchedJob
from tests import example_traces
from tests.example_traces import BEGAN, HOSTILE, RankWriter, verdict
from tests.paths import ROOT

SCRIPT = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
sys.path[:0] = {[str(ROOT / "core"), str(ROOT / "plugins")]}
from countoff.cli.__main__ import main
main()
"""
SECONDS = 30.0


class Scrape:
    """What a scrape has given.

    Args:
        text: The exposition.
    """

    def __init__(self, text: str) -> None:
        self.types = {family.name: family.type for family in text_string_to_metric_families(text)}
        self.samples = [each for family in text_string_to_metric_families(text) for each in family.samples]

    def values(self, name: str, label: str = "rank") -> dict[str, float]:
        """The values of a metric by one of its labels."""
        return {each.labels[label]: each.value for each in self.samples if each.name == name}

    def value(self, name: str, **labels: str) -> float | None:
        """The only value of a metric with these labels; None if there is none."""
        found = [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        assert len(found) < 2, found
        return found[0] if found else None


class Exporter:
    """`countoff top --prometheus`, as a process."""

    def __init__(self, *arguments: str, address: str = ":0", before: str = "") -> None:
        command = [sys.executable, "-c", before + SCRIPT, "top", "--every", "0.2", "--prometheus", address, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def line(self) -> str:
        """Its next line on standard output; waits for it."""
        return self._next(self.process.stdout)

    @property
    def complaint(self) -> str:
        """Its next line on standard error; waits for it."""
        return self._next(self.process.stderr)

    def _next(self, stream: Any) -> str:
        ready, _, _ = select.select([stream], [], [], SECONDS)
        assert ready, "it has said nothing"
        return stream.readline()

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        """Ends it; returns its exit code, and what else it has said."""
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output, errors


@pytest.fixture
def exporters() -> Iterator[Callable[..., Exporter]]:
    """Starts exporters, and kills those that a test has left."""
    with contextlib.ExitStack() as started:

        def start(*arguments: object, **options: Any) -> Exporter:
            exporter = Exporter(*map(str, arguments), **options)
            started.callback(exporter.process.communicate)
            started.callback(exporter.process.kill)
            return exporter

        yield start


def scrape(url: str) -> Scrape:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return Scrape(answer.read().decode())


def url_in(line: str) -> str:
    found = re.search(r"http://\S+?(?=;)", line)
    assert found, line
    return found[0]


def until(url: str, is_so: Callable[[Scrape], bool]) -> Scrape:
    """Scrapes until something is so."""
    deadline = time.monotonic() + SECONDS
    while not is_so(seen := scrape(url)):
        assert time.monotonic() < deadline, seen.samples
        time.sleep(0.05)
    return seen


def looked(*directories: Path, after: float = 65, most_records: int = 20_000) -> Scrape:
    """What one look at a trace serves, so many seconds after the beginning of the job."""
    reader, collector = Reader([str(each) for each in directories], most_records=most_records), JobCollector("today")
    return look(reader, collector, LiveRanks(), after)


def look(reader: Reader, collector: JobCollector, live: LiveRanks, after: float) -> Scrape:
    trace = reader.read()
    collector.update(trace, live.rows(trace.runs[-1], BEGAN + after) if trace.runs else [], BEGAN + after)
    registry = CollectorRegistry()
    registry.register(collector)
    return Scrape(generate_latest(registry).decode())


def running(directory: Path, *, ranks: int = 4, size: int | None = 8) -> list[RankWriter]:
    """A job in its second epoch; rank 2 waits for its loader, and rank 3 is at another place in its file."""
    plan = {} if size is None else {"batch_size": size}
    writers: list[RankWriter] = []
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks, begin={"host": f"node{rank // 2}", "plan": plan})
        for epoch in range(2):
            writer.open(f"train epoch {epoch}")
            for _ in range(6):
                writer.tick(5, 10, steps=5, loader=3.0 if rank == 2 else 0.1)
            if not epoch:
                writer.time += rank % 4
                writer.close("train epoch 0")
                writer.time -= rank % 4
        writer.save()
        writers.append(writer)
    return writers


def end(writers: list[RankWriter]) -> None:
    for writer in writers:
        writer.line("end", how="finished")
        writer.save()


def test_each_rank_has_its_counts(tmp_path: Path) -> None:
    running(tmp_path)
    seen = looked(tmp_path)
    labels = next(each.labels for each in seen.samples if each.name == "countoff_batches_total")
    assert labels == {"run": "today", "rank": "0", "host": "node0"}
    ranks = ["0", "1", "2", "3"]
    assert seen.values("countoff_batches_total") == dict.fromkeys(ranks, 120)
    assert seen.values("countoff_samples_total") == dict.fromkeys(ranks, 960)
    assert seen.values("countoff_steps_total") == dict.fromkeys(ranks, 60)
    assert seen.values("countoff_evaluation_batches_total") == dict.fromkeys(ranks, 0)
    assert seen.values("countoff_epoch") == dict.fromkeys(ranks, 1)
    assert seen.values("countoff_epoch_batches") == dict.fromkeys(ranks, 60)
    loader = seen.values("countoff_loader_seconds_total")
    assert (loader["2"], loader["3"]) == (pytest.approx(36), pytest.approx(1.2))
    assert seen.values("countoff_late_seconds") == {"0": 0, "1": 1, "2": 2, "3": 3}
    lasts = seen.values("countoff_last_record_timestamp_seconds")
    assert lasts == dict.fromkeys(ranks, pytest.approx(BEGAN + 60, rel=0, abs=0.01))
    assert seen.value("countoff_last_look_timestamp_seconds") == BEGAN + 65
    assert seen.values("countoff_ranks", "state") == {
        **dict.fromkeys(STATES, 0),
        "in a span": 3,
        "slow loader": 1,
    }


def test_without_a_batch_size_there_are_no_samples(tmp_path: Path) -> None:
    running(tmp_path, size=None)
    assert looked(tmp_path).values("countoff_samples_total") == {}


def test_evaluations_are_counted_apart(tmp_path: Path) -> None:
    example_traces.healthy(tmp_path, ranks=2, epochs=2)
    seen = looked(tmp_path, after=300)
    assert seen.values("countoff_batches_total") == {"0": 240, "1": 240}
    assert seen.values("countoff_evaluation_batches_total") == {"0": 20, "1": 20}
    assert seen.value("countoff_ranks", state="finished") == 2


def test_how_late_ranks_are_is_told_of_the_span_that_has_ended_last(tmp_path: Path) -> None:
    """An evaluation within an epoch ends before it. A rank that is still in the epoch is compared in the evaluation."""
    for rank in range(3):
        writer = RankWriter(tmp_path, rank, 3)
        writer.open("evaluation before", eval=True)
        writer.time += 9 - rank
        writer.close("evaluation before")
        writer.time = BEGAN + 10
        writer.open("train epoch 0")
        writer.tick(5, 10)
        writer.open("evaluation", eval=True)
        writer.tick(5 + rank, 10)
        writer.close("evaluation")
        writer.time += rank
        if rank < 2:
            writer.close("train epoch 0")
        writer.save()
    assert looked(tmp_path).values("countoff_late_seconds") == {"0": 0, "1": 2, "2": 2}


def test_counters_do_not_fall_where_old_spans_are_dropped(tmp_path: Path) -> None:
    """A counter that falls is a restart to Prometheus."""
    writer = RankWriter(tmp_path)
    reader, collector, live = Reader([str(tmp_path)], most_records=100), JobCollector("today"), LiveRanks()
    for epoch in range(150):
        for name, more in ((f"train epoch {epoch}", {}), ("evaluation", {"eval": True})):
            writer.open(name, **more)
            writer.tick(5, 10, loader=1)
            writer.close(name)
        writer.save()
        if epoch % 7 == 0:
            seen = look(reader, collector, live, writer.time - BEGAN)
            done = 10 * (epoch + 1)
            assert seen.value("countoff_batches_total") == done
            assert seen.value("countoff_evaluation_batches_total") == done
            assert seen.value("countoff_loader_seconds_total") == pytest.approx(2 * (epoch + 1))
            assert seen.value("countoff_epoch") == epoch


def test_ranks_are_compared_at_one_moment(tmp_path: Path) -> None:
    """A rank that has written a moment ago is not ahead of one whose next line is due."""
    for rank in range(4):
        writer = RankWriter(tmp_path, rank, 4)
        writer.open("train epoch 0")
        writer.tick(rank, 2 * rank)
        for _ in range(6):
            writer.tick(5, 7 if rank == 3 else 10)
        writer.save()
    behind = looked(tmp_path, after=34).values("countoff_behind_batches")
    assert behind == {"0": 0, "1": 0, "2": 0, "3": pytest.approx(16.2)}


def test_a_rank_that_is_silent_holds_nothing_up(tmp_path: Path) -> None:
    """The others are compared at their last moment, and it lacks what it has not written."""
    for rank in range(3):
        writer = RankWriter(tmp_path, rank, 3)
        writer.open("train epoch 0")
        for _ in range(2 if rank == 1 else 10):
            writer.tick(5, 10)
        writer.save()
    seen = looked(tmp_path, after=52)
    assert seen.values("countoff_behind_batches") == {"0": 0, "1": 80, "2": 0}
    assert seen.value("countoff_ranks", state="silent") == 1


def test_what_a_verdict_has_counted_is_newer_than_the_last_line(tmp_path: Path) -> None:
    example_traces.uneven(tmp_path)
    seen = looked(tmp_path)
    assert seen.value("countoff_behind_batches", rank="2") is None  # it has closed its epoch
    assert seen.values("countoff_batches_total") == {str(rank): 90 if rank == 2 else 91 for rank in range(8)}
    assert seen.value("countoff_verdicts_total", kind="UnevenBatches") == 1


def test_how_far_a_rank_is_behind_is_exact_after_a_verdict(tmp_path: Path) -> None:
    """The verdict's table has counts of one moment, also of ranks that wrote their last line at another one."""
    rows = [{"rank": rank, "where": "train epoch 0", "batches": 45 if rank == 1 else 46} for rank in range(3)]
    for rank in range(3):
        writer = RankWriter(tmp_path, rank, 3)
        writer.open("train epoch 0")
        for _ in range(3 if rank == 2 else 4):
            writer.tick(5, 10)
        writer.line("verdict", verdict=verdict(ranks=[1], world_size=3, rows=rows))
        writer.save()
    assert looked(tmp_path).values("countoff_behind_batches") == {"0": 0, "1": 1, "2": 0}


def test_totals_are_those_of_most_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        writer = RankWriter(tmp_path, rank, 3)
        true = {"total_steps": 900.0 if rank else 450.0, "batches_per_epoch": 300.0, "dp_degree": 3.0}
        writer.line("totals", true=true, reported={"total_steps": 3_600.0})
        writer.save()
    seen = looked(tmp_path)
    assert (seen.value("countoff_true_steps"), seen.value("countoff_reported_steps")) == (900, 3_600)
    assert (seen.value("countoff_true_epoch_batches"), seen.value("countoff_true_epoch_samples")) == (300, None)


def test_verdicts_and_warnings_of_all_runs_are_counted_by_kind(tmp_path: Path) -> None:
    """Each kind is there from the start: without its 0, a first verdict would be no increase."""
    first = RankWriter(tmp_path)
    first.save()
    seen = looked(tmp_path)
    assert seen.values("countoff_verdicts_total", "kind") == dict.fromkeys([*KINDS, "other"], 0)
    first.line("warning", verdict=verdict("WrongLength"))
    first.line("warning", verdict=verdict("<b>"))
    first.line("verdict", verdict=verdict())
    first.save()
    again = RankWriter(tmp_path, begin={"pid": 7})
    again.lines[0] = again.lines[0].replace(f'"t":{BEGAN}', f'"t":{BEGAN + 1_000}')
    again.time += 1_000
    again.line("verdict", verdict=verdict(time=BEGAN + 1_001))
    again.save()
    seen = looked(tmp_path, after=1_005)
    assert seen.value("countoff_runs_total") == 2
    assert seen.value("countoff_verdicts_total", kind="UnevenBatches") == 2
    assert seen.value("countoff_warnings_total", kind="WrongLength") == 1
    assert seen.value("countoff_warnings_total", kind="other") == 1


def test_the_verdict_of_an_incident_is_counted(tmp_path: Path) -> None:
    RankWriter(tmp_path).save()
    (tmp_path / "incident").mkdir()
    (tmp_path / "incident" / "verdict.json").write_text(json.dumps(verdict("LostRank")))
    assert looked(tmp_path).value("countoff_verdicts_total", kind="LostRank") == 1


def test_a_job_with_many_ranks_has_series_for_the_first_and_the_odd_ones(tmp_path: Path) -> None:
    """A rank that was odd once stays: its series has no gaps. The others are counted."""
    ranks = MOST_RANKS + 44
    writers = running(tmp_path, ranks=ranks)
    reader, collector, live = Reader([str(tmp_path)]), JobCollector("today"), LiveRanks()
    assert set(look(reader, collector, live, 61).values("countoff_batches_total")) == {"0", "2"}
    for rank, writer in enumerate(writers):
        for _ in range(8):
            writer.tick(5, 10, loader=3.0 if rank == 7 else 0.1)
        writer.save()
    seen = look(reader, collector, live, 101)
    assert set(seen.values("countoff_batches_total")) == {"0", "2", "7"}
    writers[9].line("verdict", verdict=verdict(ranks=[8], world_size=ranks))
    writers[9].save()
    assert set(look(reader, collector, live, 101).values("countoff_batches_total")) == {"0", "2", "7", "8"}
    assert sum(seen.values("countoff_ranks", "state").values()) == ranks
    for writer in writers[10:]:
        writer.line("end", how="failed", what="ValueError: no")
        writer.save()
    assert len(look(reader, collector, live, 101).values("countoff_batches_total")) == MOST_RANKS


def test_as_many_ranks_have_series_of_their_own(tmp_path: Path) -> None:
    running(tmp_path, ranks=MOST_RANKS)
    assert len(looked(tmp_path).values("countoff_batches_total")) == MOST_RANKS


def test_hostile_values_reach_no_label_but_as_text(tmp_path: Path) -> None:
    """Neither a name of a span nor an exception is a label; any value can be parsed."""
    for rank, text in enumerate([*HOSTILE, 'a"b\\c', "train epoch 99999999999999999999", "finished"]):
        plan = {"batch_size": [True, -8, 0, 2**60, "8"][rank % 5]}
        writer = RankWriter(tmp_path, rank, 10, begin={"host": text, "plan": plan})
        writer.open(text)
        writer.tick(5, 2**52, steps=2**52, loader=1e15)
        writer.line("totals", true={text: 1.0, "total_steps": -1e300}, reported={})
        writer.line("end", how="failed", what=text)
        writer.save()
    seen = looked(tmp_path)
    assert len(seen.values("countoff_batches_total")) == 10
    assert seen.values("countoff_samples_total") == {}
    assert seen.values("countoff_epoch") == {}
    assert {name for each in seen.samples for name in each.labels} == {"run", "rank", "host", "state", "kind"}
    assert seen.value("countoff_ranks", state="failed") == 10


def test_a_damaged_trace_is_served_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    writers = running(tmp_path)
    (tmp_path / "rank-00000.jsonl").write_bytes(b"\x00\xff\n{}\n[1]\n")
    writers[1].line("tick", b="x", s=1, l=1)
    writers[1].tick(5, 10)
    writers[1].save(torn=7)
    (tmp_path / "rank-00004.jsonl").mkdir()
    seen = looked(tmp_path)
    assert seen.values("countoff_batches_total") == {"1": 120, "2": 120, "3": 120}
    assert seen.value("countoff_skipped_lines_total") == 4
    assert seen.value("countoff_unreadable_files") == 1
    assert seen.value("countoff_ranks", state="no trace") == 1


def test_a_job_is_served_from_before_its_begin_until_after_its_next_run(
    tmp_path: Path, exporters: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_traces, "BEGAN", time.time() - 60)
    directory = tmp_path / "runs" / "today"
    exporter = exporters(f"{directory}/")
    line = exporter.line
    assert line.startswith(f"countoff: {directory}/ is served at http://127.0.0.1:")
    url = url_in(line)
    assert scrape(url).value("countoff_runs_total", run=str(directory)) == 0
    writers = running(directory, ranks=2)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    assert (
        until(url, lambda seen: seen.value("countoff_runs_total") == 1).value("countoff_batches_total", rank="1") == 120
    )
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    end(writers)
    until(url, lambda seen: seen.value("countoff_ranks", state="finished") == 2)
    monkeypatch.setattr(example_traces, "BEGAN", time.time() - 10)
    again = RankWriter(directory, 0, 2, begin={"pid": 7})
    again.open("train epoch 0")
    again.tick(5, 3)
    again.save()
    seen = until(url, lambda seen: seen.value("countoff_runs_total") == 2)
    assert seen.value("countoff_batches_total", rank="0") == 3
    assert exporter.end() == (130, "", "")


def test_a_directory_that_vanishes_is_told_once_and_looked_for(
    tmp_path: Path, exporters: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_traces, "BEGAN", time.time() - 60)
    running(tmp_path / "trace")
    exporter = exporters(tmp_path / "trace")
    url = url_in(exporter.line)
    shutil.move(tmp_path / "trace", tmp_path / "away")
    why = f"countoff: {tmp_path / 'trace'} cannot be read: No such file or directory; it is tried again\n"
    assert exporter.complaint == why
    last = scrape(url).value("countoff_last_look_timestamp_seconds")
    time.sleep(0.5)
    seen = scrape(url)
    assert seen.value("countoff_last_look_timestamp_seconds") == last
    assert seen.value("countoff_batches_total", rank="0") == 120
    shutil.move(tmp_path / "away", tmp_path / "trace")
    until(url, lambda seen: seen.value("countoff_last_look_timestamp_seconds") != last)
    assert exporter.end() == (130, "", "")


def test_a_scrape_during_a_write_sees_whole_lines(
    tmp_path: Path, exporters: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several scrapers at once, while a rank writes its lines in pieces: counters never fall."""
    monkeypatch.setattr(example_traces, "BEGAN", time.time() - 60)
    writer = RankWriter(tmp_path)
    writer.open("train epoch 0")
    path = writer.save()
    url = url_in(exporters(tmp_path).line)
    seen: list[list[float]] = [[], [], []]
    written = threading.Event()

    def scraping(values: list[float]) -> None:
        while not written.is_set():
            values.append(scrape(url).value("countoff_batches_total") or 0.0)

    threads = [threading.Thread(target=scraping, args=(values,)) for values in seen]
    for thread in threads:
        thread.start()
    with path.open("ab", buffering=0) as file:
        for _ in range(40):
            writer.tick(0.05, 1)
            line = f"{writer.lines.pop()}\n".encode()
            for piece in (line[:9], line[9:-4], line[-4:]):
                file.write(piece)
                time.sleep(0.02)
    until(url, lambda seen: seen.value("countoff_batches_total") == 40)
    written.set()
    for thread in threads:
        thread.join()
    for values in seen:
        assert values
        assert values == sorted(values)
    assert scrape(url).value("countoff_skipped_lines_total") == 0


def test_sigterm_ends_it_too(tmp_path: Path, exporters: Callable[..., Exporter]) -> None:
    exporter = exporters(tmp_path)
    assert exporter.line
    assert exporter.end(signal.SIGTERM) == (143, "", "")


def test_a_scraper_that_hangs_up_is_no_error_to_report(tmp_path: Path, exporters: Callable[..., Exporter]) -> None:
    exporter = exporters(tmp_path)
    address = Address.parse(url_in(exporter.line).removeprefix("http://").removesuffix("/metrics"))
    for request in (b"", b"GET /met", b"\x00\xff\r\n\r\n", b"GET /metrics HTTP/1.0\r\n\r\n"):
        with socket.create_connection(address) as connection:
            connection.sendall(request)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # it ends with a reset
    assert scrape(address.url).value("countoff_runs_total") == 0
    assert exporter.end() == (130, "", "")


@pytest.mark.parametrize(
    "address", ["", "9464", "x", ":", ":x", ":-1", ":65536", "a b:1", "::1:9464", "[]:1", "[::1]", "a/b:c", ":٣"]
)
def test_a_bad_address_is_refused(address: str) -> None:
    with pytest.raises(
        ValueError, match=r"^--prometheus must be :PORT or HOST:PORT with a port of at most 65535"
    ) as raised:
        Address.parse(address)
    assert str(raised.value).endswith(f"got {address!r}")


@pytest.mark.parametrize(
    ("text", "host", "url"),
    [
        (":9464", "127.0.0.1", "http://127.0.0.1:9464/metrics"),
        ("0.0.0.0:9464", "0.0.0.0", "http://0.0.0.0:9464/metrics"),
        ("node-1.example:80", "node-1.example", "http://node-1.example:80/metrics"),
        ("[::1]:9464", "::1", "http://[::1]:9464/metrics"),
    ],
)
def test_an_address_without_a_host_is_this_machine(text: str, host: str, url: str) -> None:
    assert (Address.parse(text).host, Address.parse(text).url) == (host, url)


@pytest.mark.parametrize(
    ("arguments", "address", "reason"),
    [
        (["x"], "9464", "--prometheus must be :PORT or HOST:PORT with a port of at most 65535, as :9464, got '9464'"),
        (["x"], "192.0.2.1:9464", "--prometheus cannot serve at 192.0.2.1:9464: Cannot assign requested address"),
        (["x"], "a..b:9464", "--prometheus cannot serve at a..b:9464: it is no name of a host"),
        (["--once", "x"], ":0", "--prometheus goes on until Ctrl-C, so it does not go with --once and --json"),
        (["--json", "x"], ":0", "--prometheus goes on until Ctrl-C, so it does not go with --once and --json"),
        ([__file__], ":0", f"{__file__} cannot be read: Not a directory"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    exporters: Callable[..., Exporter], arguments: list[str], address: str, reason: str
) -> None:
    process = exporters(*arguments, address=address).process
    assert process.communicate(timeout=SECONDS) == ("", f"countoff: {reason}\n")
    assert process.returncode == 2


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, exporters: Callable[..., Exporter]) -> None:
    port = url_in(exporters(tmp_path).line).split(":")[2].split("/")[0]
    process = exporters(tmp_path, address=f":{port}").process
    why = f"countoff: --prometheus cannot serve at 127.0.0.1:{port}: Address already in use\n"
    assert process.communicate(timeout=SECONDS) == ("", why)
    assert process.returncode == 2


def test_without_its_extra_it_names_the_command(tmp_path: Path, exporters: Callable[..., Exporter]) -> None:
    process = exporters(tmp_path, before="import sys; sys.modules['prometheus_client'] = None\n").process
    why = "countoff: --prometheus needs prometheus-client: pip install 'countoff[prometheus]'\n"
    assert process.communicate(timeout=SECONDS) == ("", why)
    assert process.returncode == 1


def test_it_starts_without_torch(tmp_path: Path, exporters: Callable[..., Exporter]) -> None:
    exporter = exporters(tmp_path, before="import sys; sys.modules['torch'] = None\n")
    assert scrape(url_in(exporter.line)).value("countoff_runs_total") == 0


def test_a_job_of_4096_ranks_is_served(tmp_path: Path) -> None:
    """A scrape has some hundred series, and a look takes no longer than the rest of it allows."""
    for rank in range(4_096):
        writer = RankWriter(tmp_path, rank, 4_096, begin={"host": f"node{rank // 8}"})
        writer.open("train epoch 0")
        writer.tick(5, 10)
        writer.save()
    collector = JobCollector("today")
    job = WatchedJob([str(tmp_path)], once=False)
    rows = job.look().rows
    assert job.trace is not None
    collector.update(job.trace, rows, time.time())
    assert sum(len(each.samples) for each in collector.collect()) < 10 * MOST_RANKS + 200


DASHBOARD = json.loads((ROOT / "examples" / "grafana_countoff.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_what_is_served(tmp_path: Path) -> None:
    """Each metric of each panel has a value in a run, and each label in a query or a legend is one of its metric."""
    writers = running(tmp_path)
    writers[0].line(
        "totals", true=dict.fromkeys(["total_steps", "batches_per_epoch"], 9.0), reported={"total_steps": 36.0}
    )
    writers[0].save()
    labels = {each.name: {"", *each.labels} for each in looked(tmp_path).samples}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"countoff_\w+", target["expr"])
            assert names, target
            for name in names:
                assert name in labels, target
                used = re.findall(r"(\w+)=~?\"", target["expr"]) + re.findall(r"{{(\w*)}}", target["legendFormat"])
                assert set(used) | set(re.findall(r"by \((\w+)\)", target["expr"])) <= labels[name], target


def test_the_dashboard_rates_counters_and_no_gauges(tmp_path: Path) -> None:
    running(tmp_path)
    types = looked(tmp_path).types
    rated = {name for each in EXPRESSIONS for name in re.findall(r"rate\((\w+)", each)}
    assert {types[name.removesuffix("_total")] for name in rated} == {"counter"}


def test_the_dashboard_is_as_grafana_expects_it() -> None:
    """It has a variable for the data source and one for the run, and its panels do not overlap."""
    assert DASHBOARD["schemaVersion"] >= 39
    assert [(each["name"], each["type"]) for each in DASHBOARD["templating"]["list"]] == [
        ("datasource", "datasource"),
        ("run", "query"),
    ]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all('{run="$run"}' in each for each in EXPRESSIONS)
    sources = [each["datasource"] for panel in panels for each in (panel, *panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_page_has_each_metric() -> None:
    """Its table lists the metrics that are served, and no other."""
    collector = JobCollector("today")
    collector.update(Trace([]), [], BEGAN)
    served = {each.name + ("_total" if each.type == "counter" else "") for each in collector.collect()}
    page = (ROOT / "docs" / "seeing.md").read_text().split("\n## For Prometheus and Grafana\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`countoff_.+?) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == served
