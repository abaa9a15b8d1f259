"""Where curves end, found by looking at their values: against brute force, and for every form that schedules have."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff.core.counts.curves import UnknownRate, ending_of

PEAK = 0.1


def line(length, *, warmup=0, lowest=0.0):
    def rate(tick):
        if tick < warmup:
            return PEAK * tick / warmup
        return lowest + (PEAK - lowest) * max(0.0, (length - tick) / (length - warmup))

    return rate


def cosine(length, *, lowest=0.0):
    return lambda tick: lowest + (PEAK - lowest) * (1 + math.cos(math.pi * tick / length)) / 2


def milestones(*ticks):
    return lambda tick: PEAK * 0.1 ** sum(tick >= each for each in ticks)


def one_cycle(length):
    def rate(tick):
        if tick > length:
            raise ValueError(f"tried to step {tick} times")
        return line(length - 1, warmup=max(1, length // 3))(tick)

    return rate


ENDS = {
    "a line": (line(250), 1000, "zero", 250),
    "a line that ends with the run": (line(1000), 1000, "zero", 1000),
    "a line that ends after the run": (line(4000), 1000, "zero", 4000),
    "a line with a warm-up": (line(5000, warmup=200), 20_000, "zero", 5000),
    "a line down to a rest": (line(500, lowest=0.01), 1000, "minimum", 500),
    "a line below 0": (lambda tick: PEAK * (1 - tick / 50), 100, "negative", 51),
    "a power": (lambda tick: PEAK * max(0.0, 1 - tick / 500) ** 2, 1000, "zero", 500),
    "a cosine that wraps": (cosine(500), 1000, "zero", 500),
    "a cosine that wraps many times": (cosine(50), 10_000, "zero", 50),
    "a cosine to a rest": (cosine(500, lowest=0.01), 1000, "minimum", 500),
    "a cosine that ends after the run": (cosine(7000), 1000, "zero", 7000),
    "milestones": (milestones(30, 60, 80), 9000, "minimum", 80),
    "milestones after the run": (milestones(3000, 6000, 8000), 90, "minimum", 8000),
    "an exponential": (lambda tick: PEAK * 0.5**tick, 1000, "vanished", 20),
    "decays without end": (lambda tick: PEAK * 0.1 ** (tick // 30), 9000, "vanished", 210),
    "an error": (one_cycle(50), 100, "error", 50),
    "an error after the run": (one_cycle(400), 100, "error", 400),
    "a warm-up that is longer than the run": (lambda tick: PEAK * min(1.0, tick / 5000), 1000, "full", 5000),
    "a stable part, and a decay": (
        lambda tick: PEAK * min(1.0, tick / 10) * min(1.0, max(0.0, (400 - tick) / 80)),
        800,
        "zero",
        400,
    ),
    "restarts, and an end": (
        lambda tick: 0.0 if tick >= 500 else cosine(167)(tick % 167),
        1000,
        "zero",
        500,
    ),
    "ten million steps": (line(2_500_000, warmup=1000), 10_000_000, "zero", 2_500_000),
}

ENDLESS = {
    "a constant rate": (lambda tick: PEAK, 1000),
    "a warm-up": (lambda tick: PEAK * min(1.0, tick / 50), 1000),
    "an exponential": (lambda tick: PEAK * 0.999**tick, 1000),
    "an inverse root": (lambda tick: PEAK / math.sqrt(max(tick, 100) / 100), 10_000),
    "restarts": (lambda tick: cosine(100)(tick % 100), 1000),
    "very short restarts in a long run": (lambda tick: cosine(7)(tick % 7), 10_000_000),
    "restarts that grow": (lambda tick: cosine(1 << tick.bit_length())(tick - (1 << tick.bit_length() >> 1)), 1000),
    "no rate at all": (lambda tick: 0.0, 1000),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_curve_is_found(name):
    """The kind of the end and its very tick are found, within the run and after it."""
    curve, ticks, kind, tick = ENDS[name]
    found = ending_of(curve, ticks=ticks)
    assert found is not None
    assert (found.kind, found.tick) == (kind, tick)
    assert found.rate == curve(tick)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_curve_without_an_end_has_none(name):
    curve, ticks = ENDLESS[name]
    assert ending_of(curve, ticks=ticks) is None


@given(st.integers(20, 3000), st.integers(0, 19), st.integers(10, 3000))
@settings(max_examples=300, deadline=None)
def test_lines_end_where_they_reach_zero(length, warmup, ticks):
    """A line ends at its length in a run of any length, and its warm-up where it is highest."""
    found = ending_of(line(length, warmup=warmup), ticks=ticks)
    assert found is not None
    assert (found.kind, found.tick, found.warmup_ticks) == ("zero", length, warmup)


@given(st.integers(3, 400), st.floats(1e-4, 0.09), st.integers(10, 3000))
@settings(max_examples=200, deadline=None)
def test_cosines_end_where_they_are_lowest(length, lowest, ticks):
    """A cosine ends at its first lowest tick, however often it wraps; that is also its lowest tick by brute force."""
    curve = cosine(length, lowest=lowest)
    found = ending_of(curve, ticks=ticks)
    assert found is not None
    assert (found.kind, found.tick) == ("minimum", length)
    assert min(range(length + 1), key=curve) == length


def test_the_forms_of_curves_are_told_apart():
    """A wrap, a cycle and a schedule of few values are seen."""
    wrap = ending_of(cosine(500), ticks=1000)
    cycles = ending_of(cosine(50), ticks=1000)
    steps = ending_of(milestones(30, 60, 80), ticks=9000)
    straight = ending_of(line(500), ticks=1000)
    assert wrap is not None
    assert cycles is not None
    assert steps is not None
    assert straight is not None
    assert [(each.rises, each.periodic, each.stepwise) for each in (wrap, cycles, steps, straight)] == [
        (True, False, False),
        (True, True, False),
        (False, False, True),
        (False, False, False),
    ]


def test_a_curve_that_cannot_be_told_has_no_end():
    def unknown_later(tick):
        if tick > 500:
            raise UnknownRate
        return line(250)(tick)

    assert ending_of(unknown_later, ticks=1000) is None


def test_a_curve_is_looked_at_in_few_places():
    """A schedule of ten million steps is asked for less than three thousand rates."""
    asked = []
    ending_of(lambda tick: asked.append(tick) or line(2_500_000)(tick), ticks=10_000_000)
    assert len(asked) < 3000


@pytest.mark.parametrize("ticks", [0, -1, 1.5])
def test_a_run_has_at_least_one_tick(ticks):
    with pytest.raises(ValueError, match="ticks must be"):
        ending_of(line(10), ticks=ticks)
