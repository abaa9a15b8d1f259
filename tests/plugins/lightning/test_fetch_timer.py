"""Lightning's fetches are timed by what its data fetchers call around each of them."""

from types import SimpleNamespace

from countoff._lightning.fetchers import FetchTimer


class Fetcher:
    """As Lightning's: two attributes that are called around each fetch."""

    def __init__(self, calls: list[str]) -> None:
        self._start_profiler = lambda: calls.append("start")
        self._stop_profiler = lambda: calls.append("stop")

    def fetch(self) -> None:
        self._start_profiler()
        self._stop_profiler()


def test_a_fetch_is_timed_until_the_timer_is_removed() -> None:
    calls, seconds = [], []
    fetcher = Fetcher(calls)
    attributes = dict(vars(fetcher))
    timer = FetchTimer(SimpleNamespace(_data_fetcher=fetcher), seconds.append)
    fetcher.fetch()
    timer.remove()
    fetcher.fetch()
    assert calls == ["start", "stop"] * 2
    assert len(seconds) == 1
    assert seconds[0] >= 0
    assert vars(fetcher) == attributes


def test_a_fetcher_that_does_not_show_its_fetches_is_left_alone() -> None:
    FetchTimer(SimpleNamespace(_data_fetcher=object()), print).remove()
    FetchTimer(SimpleNamespace(), print).remove()
