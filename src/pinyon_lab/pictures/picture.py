"""Pictures as SVG text: curves (mostly over a logarithmic x axis) and bars, with y linear from 0, and heat maps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pinyon_lab.pictures.elements import COLOURS, line, page, polyline, rect, round_ticks, text, ticks_from_zero

_WIDTH, _HEIGHT, _LEFT, _GAP, _TOP, _BOTTOM = 560, 300, 64, 78, 40, 56
_ACROSS = 2
"""The number of panels side by side."""
_LETTER = 7
"""An upper bound on the mean width of a letter."""
_DIGIT = 6
"""The width of a digit in the numbers at bars."""
_BELOW_TITLE = 10
"""The free space above a panel."""
_DAY_S = 86_400
_STEPS_S = (60, 300, 600, 1800, 3600, 7200, 14_400, 28_800, _DAY_S)
"""The distances between ticks of times."""
_CELLS_LABELLED = 12


@dataclass(frozen=True, slots=True)
class Course:
    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at ``x``."""

    label: str
    x: float


@dataclass(frozen=True, slots=True)
class Courses:
    """A panel of curves; x values are positive."""

    title: str
    x_label: str
    y_label: str
    courses: Sequence[Course]
    marks: Sequence[Mark] = ()
    form: str = ".0%"
    """The format of y's numbers."""
    linear: bool = False
    """True if the x axis is linear, from the least to the largest x."""
    time: bool = False
    """True if the x axis is linear, in seconds, with ticks as h:mm."""


@dataclass(frozen=True, slots=True)
class Bars:
    """A panel of bars with ``values[label][group]``; None leaves a gap."""

    title: str
    y_label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    form: str = ".0%"


@dataclass(frozen=True, slots=True)
class Heat:
    """A heat map with ``rows`` from the top, a label each; None: nothing to show. The colour's meaning is ``unit``."""

    title: str
    x_label: str
    unit: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    numbers: bool = False
    """True to write the values into the cells as percent."""


Panel = Courses | Bars | Heat


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    panels: Sequence[Panel]


def svg(picture: Picture) -> str:
    """Returns an SVG with one legend, in which the same label has the same colour in all panels."""
    dashed: dict[str, bool] = {}
    for panel in picture.panels:
        for label, thin in _labels(panel):
            dashed[label] = thin or dashed.get(label, False)
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(dashed)}
    across = min(_ACROSS, len(picture.panels))
    down = math.ceil(len(picture.panels) / across)
    names = [name for panel in picture.panels if isinstance(panel, Heat) for name, _ in panel.rows]
    room = max([_LEFT, *(16 + _LETTER * len(name) for name in names)])
    stride = _WIDTH + _GAP + room - _LEFT
    width = room + across * stride - (stride - _WIDTH) + 24
    places = _legend(dashed, width)
    head = places[-1][1] + 14 if places else 42
    height = head + down * (_TOP + _HEIGHT + _BOTTOM)
    out: list[str] = []
    for (label, thin), (x, y) in zip(dashed.items(), places, strict=True):
        out.append(line((x, y - 4), (x + 22, y - 4), colours[label], 2 if thin else 4, dashed=thin))
        out.append(text(x + 28, y, label))
    for number, panel in enumerate(picture.panels):
        left = room + (number % across) * stride
        top = head + _TOP + (number // across) * (_TOP + _HEIGHT + _BOTTOM)
        draw = _drawn(panel, left, top, colours)
        out += [text(left + _WIDTH / 2, top - 14, panel.title, 'text-anchor="middle" font-weight="bold"'), *draw]
    return page(picture.title, width, height, out, left=_LEFT)


def _legend(labels: Iterable[str], width: float) -> list[tuple[float, float]]:
    """Returns the positions of the legend's entries."""
    places: list[tuple[float, float]] = []
    x, y = float(_LEFT), 48.0
    for label in labels:
        entry = 48 + _LETTER * len(label)
        if places and x + entry > width:
            x, y = _LEFT, y + 20
        places.append((x, y))
        x += entry
    return places


def _labels(panel: Panel) -> list[tuple[str, bool]]:
    """Returns the labels of a panel's legend, and whether their lines are dashed."""
    if isinstance(panel, Heat):
        return []
    if isinstance(panel, Bars):
        return [(label, False) for label in panel.values]
    return [(course.label, course.dashed) for course in panel.courses]


def _drawn(panel: Panel, left: float, top: float, colours: dict[str, str]) -> list[str]:
    if isinstance(panel, Heat):
        return _heat(panel, left, top)
    return _courses(panel, left, top, colours) if isinstance(panel, Courses) else _bars(panel, left, top, colours)


def _courses(panel: Courses, left: float, top: float, colours: dict[str, str]) -> list[str]:
    xs = [x for course in panel.courses for x, _ in course.points] or [1.0]
    low, high = _on_axis(panel, min(xs)), _on_axis(panel, max(xs))
    scale = ticks_from_zero([y for course in panel.courses for _, y in course.points])

    def at_x(x: float) -> float:
        return left + _WIDTH * (_on_axis(panel, x) - low) / ((high - low) or 1)

    out = _y_axis(panel.y_label, panel.form, scale, left, top)
    for tick, shown in _x_ticks(panel, min(xs), max(xs)):
        out.append(line((at_x(tick), top + _HEIGHT), (at_x(tick), top + _HEIGHT + 5), "#444444"))
        out.append(text(at_x(tick), top + _HEIGHT + 19, shown, 'text-anchor="middle" font-size="11"'))
    out.append(text(left + _WIDTH / 2, top + _HEIGHT + 40, panel.x_label, 'text-anchor="middle"'))
    for mark in panel.marks:
        out.append(line((at_x(mark.x), top), (at_x(mark.x), top + _HEIGHT), "#444444", dashed=True))
        out.append(text(at_x(mark.x) + 4, top + 12, mark.label, 'font-size="11" fill="#444444"'))
    for course in panel.courses:
        path = [(at_x(x), top + _HEIGHT * (1 - y / scale[-1])) for x, y in course.points]
        out.append(polyline(path, colours[course.label], 2, dashed=course.dashed))
    return out


def _on_axis(panel: Courses, x: float) -> float:
    return x if panel.linear or panel.time else math.log(x)


def _x_ticks(panel: Courses, low: float, high: float) -> list[tuple[float, str]]:
    if panel.time:
        days = math.ceil((high - low) / 8 / _DAY_S)
        step = next((each for each in _STEPS_S if (high - low) / each <= 8), days * _DAY_S)
        times = [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(each, clock(each)) for each in times]
    linear = [tick for tick in ticks_from_zero([high]) if low <= tick <= high]
    return [(tick, _short(tick)) for tick in (linear if panel.linear else round_ticks(low, high))]


def clock(time_s: float) -> str:
    """Returns the time of day as ``h:mm``."""
    minutes = int(time_s % _DAY_S) // 60
    return f"{minutes // 60}:{minutes % 60:02d}"


def _bars(panel: Bars, left: float, top: float, colours: dict[str, str]) -> list[str]:
    group_width = _WIDTH / len(panel.groups)
    bar_width = 0.84 * group_width / len(panel.values)
    known = [value for values in panel.values.values() for value in values if value is not None]
    longest = max([len(format(value, panel.form)) for value in known], default=0) * _DIGIT
    upright = longest > bar_width
    """True where the numbers must stand on their bars, because they would overlap otherwise."""
    scale = ticks_from_zero(known)
    if upright and _HEIGHT * (1 - max(known) / scale[-1]) + _BELOW_TITLE < longest:
        scale = ticks_from_zero([1.1 * value for value in known])
    out = _y_axis(panel.y_label, panel.form, scale, left, top)
    for group, name in enumerate(panel.groups):
        begin = left + group * group_width
        out.append(text(begin + group_width / 2, top + _HEIGHT + 20, name, 'text-anchor="middle"'))
        for number, (label, values) in enumerate(panel.values.items()):
            value = values[group]
            if value is None:
                continue
            x, height = begin + 0.08 * group_width + number * bar_width, _HEIGHT * value / scale[-1]
            out.append(rect(x, top + _HEIGHT - height, 0.92 * bar_width, height, colours[label]))
            at, up = f'font-size="10" fill="{colours[label]}"', top + _HEIGHT - height - 4
            middle = x + 0.46 * bar_width
            if upright:
                middle += 4
                at += f' transform="rotate(-90 {middle:.1f} {up:.1f})"'
            else:
                at += ' text-anchor="middle"'
            out.append(text(middle, up, format(value, panel.form), at))
    return out


def _heat(panel: Heat, left: float, top: float) -> list[str]:
    wide, high = _WIDTH / max(1, len(panel.columns)), _HEIGHT / max(1, len(panel.rows))
    most = max((value for _, row in panel.rows for value in row if value is not None), default=0.0) or 1.0
    out = [rect(left, top, _WIDTH, _HEIGHT, "#f4f4f4")]
    for at, (name, row) in enumerate(panel.rows):
        y = top + at * high
        out.append(text(left - 6, y + high / 2 + 4, name, 'text-anchor="end" font-size="11"'))
        for column, value in enumerate(row):
            if value is None:
                continue
            x = left + column * wide
            # The cell is a little larger than its place, so that no seams show.
            out.append(rect(x, y, wide + 0.4, high + 0.4, _shade(value / most)))
            if panel.numbers:
                ink = "#fff" if value / most > 0.45 else "#222"
                middle = f'text-anchor="middle" font-size="11" fill="{ink}"'
                out.append(text(x + wide / 2, y + high / 2 + 4, f"{value:.0%}", middle))
    every = -(-len(panel.columns) // _CELLS_LABELLED) if all(panel.columns) else 1
    if any(len(name) > 8 for name in panel.columns):
        every *= 2
    for column in range(0, len(panel.columns), every):
        x, name = left + (column + 0.5) * wide, panel.columns[column]
        out.append(text(x, top + _HEIGHT + 19, name, 'text-anchor="middle" font-size="11"'))
    out.append(text(left + _WIDTH / 2, top + _HEIGHT + 40, panel.x_label, 'text-anchor="middle"'))
    steps, x, y = 24, left + _WIDTH - 110, top + _HEIGHT + 31
    shown = f"{most:.0%}" if panel.numbers else f"{most:.3g}"
    out += [rect(x + step * 3, y, 3.4, 9, _shade(step / (steps - 1))) for step in range(steps)]
    out.append(text(x - 6, y + 9, f"{panel.unit}: 0", 'text-anchor="end" font-size="11"'))
    return [*out, text(x + steps * 3 + 6, y + 9, shown, 'font-size="11"')]


def _shade(part: float) -> str:
    """Returns a colour from near white to dark blue: ever darker, so that a print without colours reads the same."""
    low, middle, high = (240, 246, 252), (66, 146, 198), (8, 40, 96)
    one, other, share = (low, middle, 2 * part) if part < 0.5 else (middle, high, 2 * part - 1)
    mixed = (round(a + (b - a) * min(1.0, max(0.0, share))) for a, b in zip(one, other, strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed)


def _y_axis(label: str, form: str, scale: Sequence[float], left: float, top: float) -> list[str]:
    out = []
    if form.endswith("f") and all(tick == round(tick) for tick in scale):
        form = ",.0f"
    for tick in scale:
        y = top + _HEIGHT * (1 - tick / scale[-1])
        out.append(line((left, y), (left + _WIDTH, y), "#dddddd" if tick else "#444444"))
        out.append(text(left - 6, y + 4, format(tick, form), 'text-anchor="end" font-size="11"'))
    x, y = left - 48, top + _HEIGHT / 2
    out.append(text(x, y, label, f'text-anchor="middle" transform="rotate(-90 {x:.1f} {y:.1f})"'))
    return out


def _short(value: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"
