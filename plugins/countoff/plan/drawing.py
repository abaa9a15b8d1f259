"""`countoff plan --curve`: the learning rate over the steps, drawn in the terminal or as numbers for a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from countoff.core.counts.samples import product
from countoff.core.words import number_of
from countoff.plan import table
from countoff.plan.curve import Curve, Ending, samples_after
from countoff.plan.job import RunPlan
from countoff.plan.ramp import ramped_steps

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Drawing", "as_json", "drawings"]

_ROWS = 13
"""Rows of a drawing: a tick at each third one."""
_LEAST_COLUMNS = 20
_BETWEEN = 2
"""Blank columns between the labels of the steps."""
_LETTERS: dict[Ending, str] = {"warm-up": "W", "decay": "D", "run": "E"}
_BLANK = "\u2800"
# Where the output's encoding lacks them.
_ASCII = str.maketrans("┤│└─┬┊–", "|||-+:-")


@dataclass(frozen=True)
class _Mark:
    """A step at which one or more parts of the curve end, and its letter in the drawing."""

    step: int
    letter: str
    text: str


@dataclass(frozen=True)
class _Unit:
    """What steps are counted in besides: epochs, or tokens.

    Attributes:
        name: The name of its column.
        of: Its number after a step; None if it cannot be known.
        whole: How a number is written in full.
    """

    name: str
    of: Callable[[int], float | None]
    whole: Callable[[float], str]


@dataclass(frozen=True)
class Drawing:
    """The curve that one or more plans have in common.

    Attributes:
        curve: The curve.
        plans: The plans, at least one.
        options: What is printed besides the plans; a ramp changes how many tokens a step is.
    """

    curve: Curve
    plans: Sequence[RunPlan]
    options: table.Options

    def print(self) -> None:
        """Prints the drawing, as wide as the terminal; in a pipe 80 columns, without colour.

        Raises:
            ValueError: If what draws is not installed; the message is one line with the command that installs it.
        """
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        for line in self._lines(console.width):
            if not _can_print("┤┊⣿", console.encoding):
                plain = "".join("*" if _BLANK <= character <= "\u28ff" else character for character in line.plain)
                line.plain = plain.translate(_ASCII)
            console.print(line)

    def _lines(self, width: int) -> Iterator[Text]:
        from rich.text import Text

        lowest, highest = self._range()
        ticks = [lowest + (highest - lowest) * quarter / 4 for quarter in range(5)]
        labels = {3 * quarter: self._rate(tick) for quarter, tick in enumerate(ticks)}
        if lowest < 0:
            row = round((_ROWS - 1) * -lowest / (highest - lowest))
            labels = {other: label for other, label in labels.items() if abs(other - row) > 1} | {row: "0"}
        units = self._units(self.plans)
        margin = max(len(text) for text in (*labels.values(), "step", *(unit.name for unit in units)))
        columns = max(width - margin - 3, _LEAST_COLUMNS)
        marks = self._marks()
        yield Text(f"\n{self._title()}", style="bold")
        yield Text(f"{'':{margin}}  {self._letters(marks, columns)}".rstrip(), style="bold")
        ends = {self._column(mark.step, columns) for mark in marks}
        for row, dots in zip(reversed(range(_ROWS)), self._canvas(columns, lowest, highest), strict=True):
            drawn = "".join(
                ("┊" if column in ends else " ") if dot == _BLANK else dot for column, dot in enumerate(dots)
            )
            axis = f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}"
            yield Text.assemble((axis, "dim"), (drawn.rstrip(), "cyan"))
        for line in self._axis(units, margin, columns):
            yield Text(line, style="dim")
        for line in self._legend(marks):
            yield Text(line)

    @property
    def _last(self) -> int:
        return self.curve.points[-1][0]

    def _range(self) -> tuple[float, float]:
        factors = [factor for _, factor in self.curve.points if not math.isnan(factor)]
        lowest, highest = min([0.0, *factors]), max([0.0, *factors])
        return lowest, highest if highest > lowest else lowest + 1.0

    def _rate(self, factor: float) -> str:
        rate = self.plans[0].job.learning_rate
        return "–" if math.isnan(factor) else number_of(factor if rate is None else factor * rate, digits=4)

    def _title(self) -> str:
        known = self.plans[0].job.learning_rate is not None
        sizes = [f"{plan.ranks.world_size:,}" for plan in self.plans]
        name = "learning rate" if known else "learning rate, as a factor of the configured one"
        return f"{name}, on {' and '.join(sizes)} rank{'' if sizes == ['1'] else 's'}"

    def _marks(self) -> list[_Mark]:
        """Returns the ends of the parts, those at the same step as one."""
        steps: dict[int, list[Ending]] = {}
        for ending, step in self.curve.endings.items():
            steps.setdefault(step, []).append(ending)
        return [
            _Mark(step, _LETTERS[parts[-1]], f"end of the {' and of the '.join(parts)}")
            for step, parts in sorted(steps.items())
        ]

    def _units(self, plans: Sequence[RunPlan]) -> list[_Unit]:
        """Returns the units in which all of these plans are known to count their steps alike."""
        epochs = {plan.batches.steps_per_epoch for plan in plans}
        per_epoch = epochs.pop() if len(epochs) == 1 else None
        found: list[_Unit] = []
        if per_epoch:
            found.append(_Unit("epoch", lambda step: step / per_epoch, lambda epoch: f"{epoch:.4g}"))
        tokens = [_tokens(plan, self.options) for plan in plans]
        if tokens[0](1) is not None and len({(of(1), of(self._last)) for of in tokens}) == 1:
            found.append(_Unit("tokens", tokens[0], lambda many: f"{many:,}"))
        return found

    def _column(self, step: int, columns: int) -> int:
        return self._dot(step, columns) // 2

    def _dot(self, step: int, columns: int) -> int:
        return round((step - 1) / max(self._last - 1, 1) * (2 * columns - 1))

    def _letters(self, marks: Sequence[_Mark], columns: int) -> str:
        """Returns the line of the marks' letters, each above its step or next to it."""
        places: dict[int, str] = {}
        for mark in marks:
            column = self._column(mark.step, columns)
            free = min((one for one in range(columns) if one not in places), key=lambda one: abs(one - column))
            places[free] = mark.letter
        return "".join(places.get(column, " ") for column in range(columns))

    def _canvas(self, columns: int, lowest: float, highest: float) -> list[str]:
        """Returns the curve as rows of braille dots, two by four in a character, from the top."""
        canvas = _canvas_of(columns)
        before: tuple[int, int] | None = None
        for step, factor in self.curve.points:
            dot = None
            if not math.isnan(factor):
                height = round((factor - lowest) / (highest - lowest) * (4 * _ROWS - 1))
                dot = self._dot(step, columns), height
                canvas.line(*(before or dot), *dot)
            before = dot
        return canvas.plot("\n").split("\n")

    def _axis(self, units: Sequence[_Unit], margin: int, columns: int) -> Iterator[str]:
        """Yields the axis with its ticks, and under it a line of labels for the steps and for each unit."""
        lines: dict[int, list[str]] = {}
        taken = -_BETWEEN
        for step in _round_steps(self._last, most=columns // 10):
            labels = [f"{step:,}", *(_short(unit.of(step)) for unit in units)]
            column, longest = self._column(step, columns), max(map(len, labels))
            begin = min(max(column - longest // 2, 0), columns - longest)
            if begin >= taken + _BETWEEN:
                lines[column] = [" " * begin + label.center(longest) for label in labels]
                taken = begin + longest
        yield f"{'':{margin}} └{''.join('┬' if column in lines else '─' for column in range(columns))}"
        for index, name in enumerate(["step", *(unit.name for unit in units)]):
            yield f"{name:>{margin}}  {_overlaid([labels[index] for labels in lines.values()])}"

    def _legend(self, marks: Sequence[_Mark]) -> Iterator[str]:
        """Yields the table of the marks; a unit that is not the same for all plans has a column for each."""
        units = self._units(self.plans)
        common = {unit.name for unit in units}
        units += [
            _Unit(f"{unit.name}, {plan.ranks.world_size:,} ranks", unit.of, unit.whole)
            for plan in self.plans
            for unit in self._units([plan])
            if unit.name not in common
        ]
        rate = "learning rate" if self.plans[0].job.learning_rate is not None else "factor"
        rows = [["", "step", *(unit.name for unit in units), rate]]
        for mark in marks:
            values = ["–" if (value := unit.of(mark.step)) is None else unit.whole(value) for unit in units]
            name = f"{mark.letter}  {mark.text}"
            rows.append([name, f"{mark.step:,}", *values, self._rate(self.curve.factor_at(mark.step))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *cells in rows:
            yield "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])


def drawings(plans: Sequence[RunPlan], options: table.Options, config: str | None) -> list[Drawing]:
    """Returns the drawings of some plans: one for all that have the same curve.

    Args:
        plans: The same run on one or more world sizes.
        options: What is printed besides the plans.
        config: The configuration, for the error.

    Raises:
        ValueError: If a plan has no curve, or what draws is not installed; the message is one line with the reason.
    """
    _canvas_of(1)
    alike: list[tuple[Curve, list[RunPlan]]] = []
    for plan in plans:
        curve = _curve_of(plan, config)
        same = next((found for other, found in alike if other == curve), None)
        if same is None:
            alike.append((curve, [plan]))
        else:
            same.append(plan)
    return [Drawing(curve, found, options) for curve, found in alike]


def as_json(plan: RunPlan, options: table.Options, config: str | None) -> dict[str, Any]:
    """Returns the curve of a plan as JSON types, under its key; None where a number is not known.

    Raises:
        ValueError: If the plan has no curve; the message is one line with the reason.
    """
    curve = _curve_of(plan, config)
    rate, per_epoch, tokens = plan.job.learning_rate, plan.batches.steps_per_epoch, _tokens(plan, options)

    def point(step: int, factor: float) -> dict[str, Any]:
        known = None if math.isnan(factor) else factor
        return {"step": step, "factor": known, "rate": None if known is None or rate is None else known * rate}

    ends = [
        {
            "end_of": ending,
            **point(step, curve.factor_at(step)),
            "epoch": step / per_epoch if per_epoch else None,
            "tokens": tokens(step),
        }
        for ending, step in curve.endings.items()
    ]
    return {"curve": {"marks": ends, "points": [point(*each) for each in curve.points]}}


def _curve_of(plan: RunPlan, config: str | None) -> Curve:
    if config is None:
        raise ValueError("--curve draws the learning-rate schedule of a configuration: give CONFIG")
    curve = Curve.of(plan)
    if curve is None:
        why = f"how many steps it has is not known: give {', or '.join(plan.length_flags)}"
        if plan.job.schedule is None:
            why = "it has no learning-rate schedule that countoff knows"
        elif plan.batches.total_steps == 0:
            why = "the run has 0 steps"
        raise ValueError(f"--curve cannot draw {config} on {plan.ranks.world_size} ranks: {why}")
    return curve


def _canvas_of(columns: int) -> Any:
    """Returns an empty canvas whose unit is a dot.

    Raises:
        ValueError: If what draws is not installed.
    """
    try:
        from plotille import Canvas
    except ModuleNotFoundError as error:
        raise ValueError(f"--curve needs {error.name}: pip install {error.name}") from None
    return Canvas(columns, _ROWS, xmax=2 * columns, ymax=4 * _ROWS)


def _tokens(plan: RunPlan, options: table.Options) -> Callable[[int], int | None]:
    """Returns how many tokens all data ranks together have seen after a step, as a function of the step."""
    ramp = None
    if options.ramp is not None:
        start, increment, samples = options.ramp
        ramp = ramped_steps(plan.batches, start=start, increment=increment, samples=samples)
    return lambda step: product(samples_after(plan, step, ramp=ramp), plan.batches.facts.sequence_length)


def _can_print(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _round_steps(last: int, *, most: int) -> list[int]:
    """Returns the first step, and the multiples of a round number of steps up to the last one.

    >>> _round_steps(1000, most=7)
    [1, 200, 400, 600, 800, 1000]
    """
    least = max(last / max(most, 1), 1)
    power = 10 ** math.floor(math.log10(least))
    between = next(size for size in (power, 2 * power, 5 * power, 10 * power) if size >= least)
    return sorted({1, *range(between, last + 1, between)})


def _short(number: float | None) -> str:
    """Writes a number in few characters, and none if it is not known.

    >>> _short(16_384_000), _short(0.25), _short(999_999)
    ('16.4M', '0.25', '1M')
    """
    if number is None:
        return ""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _overlaid(texts: Sequence[str]) -> str:
    """Returns texts in one line, each where it stands in its own line."""
    line = ""
    for text in texts:
        line += text[len(line) :]
    return line.rstrip()
