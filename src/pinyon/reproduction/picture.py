"""Pictures as SVG text: courses over a logarithmic x axis, and bars side by side; y axes are linear from 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bars", "Course", "Courses", "Mark", "Picture", "svg"]

_COLOURS = ("#1f6fb4", "#d1662b", "#3a8f4d", "#8a4fa3", "#7a7a7a", "#b3942b", "#2aa3a3", "#c04a6e", "#222222")
_WIDTH, _HEIGHT, _LEFT, _GAP, _TOP, _BOTTOM = 560, 300, 64, 78, 40, 56
_ACROSS = 2
"""Panels."""
_NOTHING = 1e-12
"""Values below are drawn as 0."""
_LETTER = 7
"""Width of one, on average at most."""


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
    """x values are positive."""

    title: str
    x_label: str
    y_label: str
    courses: Sequence[Course]
    marks: Sequence[Mark] = ()
    form: str = ".0%"
    """Of y's numbers."""


@dataclass(frozen=True, slots=True)
class Bars:
    """``values[label][group]``; None leaves a gap."""

    title: str
    y_label: str
    groups: Sequence[str]
    values: dict[str, Sequence[float | None]]
    form: str = ".0%"


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    panels: Sequence[Courses | Bars]


def svg(picture: Picture) -> str:
    """With one legend, in which the same label has the same colour in all panels."""
    labels = list(dict.fromkeys(label for panel in picture.panels for label in _labels(panel)))
    colours = {label: _COLOURS[number % len(_COLOURS)] for number, label in enumerate(labels)}
    dashed = {
        course.label
        for panel in picture.panels
        if isinstance(panel, Courses)
        for course in panel.courses
        if course.dashed
    }
    across = min(_ACROSS, len(picture.panels))
    down = math.ceil(len(picture.panels) / across)
    width = _LEFT + across * (_WIDTH + _GAP) - _GAP + 24
    places = _legend(labels, width)
    head = places[-1][1] + 14 if places else 42
    height = head + down * (_TOP + _HEIGHT + _BOTTOM)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 24, picture.title, 'font-size="16" font-weight="bold"'),
    ]
    for label, (x, y) in zip(labels, places, strict=True):
        out.append(_line(x, y - 4, x + 22, y - 4, colours[label], 4 if label not in dashed else 2, label in dashed))
        out.append(_text(x + 28, y, label))
    for number, panel in enumerate(picture.panels):
        left = _LEFT + (number % across) * (_WIDTH + _GAP)
        top = head + _TOP + (number // across) * (_TOP + _HEIGHT + _BOTTOM)
        draw = _courses(panel, left, top, colours) if isinstance(panel, Courses) else _bars(panel, left, top, colours)
        out += [_text(left + _WIDTH / 2, top - 14, panel.title, 'text-anchor="middle" font-weight="bold"'), *draw]
    return "\n".join([*out, "</svg>", ""])


def _legend(labels: Sequence[str], width: float) -> list[tuple[float, float]]:
    """Where each entry begins."""
    places: list[tuple[float, float]] = []
    x, y = float(_LEFT), 48.0
    for label in labels:
        entry = 48 + _LETTER * len(label)
        if places and x + entry > width:
            x, y = _LEFT, y + 20
        places.append((x, y))
        x += entry
    return places


def _labels(panel: Courses | Bars) -> list[str]:
    return [course.label for course in panel.courses] if isinstance(panel, Courses) else list(panel.values)


def _courses(panel: Courses, left: float, top: float, colours: dict[str, str]) -> list[str]:
    xs = [x for course in panel.courses for x, _ in course.points]
    low, high = math.log(min(xs)), math.log(max(xs))
    highest, steps = _scale([y for course in panel.courses for _, y in course.points])

    def at_x(x: float) -> float:
        return left + _WIDTH * (math.log(x) - low) / ((high - low) or 1)

    out = _y_axis(panel.y_label, panel.form, (highest, steps), left, top)
    for tick in _ticks(min(xs), max(xs)):
        out.append(_line(at_x(tick), top + _HEIGHT, at_x(tick), top + _HEIGHT + 5, "#444444", 1))
        out.append(_text(at_x(tick), top + _HEIGHT + 19, _short(tick), 'text-anchor="middle" font-size="11"'))
    out.append(_text(left + _WIDTH / 2, top + _HEIGHT + 40, panel.x_label, 'text-anchor="middle"'))
    for mark in panel.marks:
        out.append(_line(at_x(mark.x), top, at_x(mark.x), top + _HEIGHT, "#444444", 1, True))
        out.append(_text(at_x(mark.x) + 4, top + 12, mark.label, 'font-size="11" fill="#444444"'))
    for course in panel.courses:
        path = " ".join(f"{at_x(x):.1f},{top + _HEIGHT * (1 - y / highest):.1f}" for x, y in course.points)
        dashes = ' stroke-dasharray="6 4"' if course.dashed else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="{colours[course.label]}" stroke-width="2"{dashes}/>')
    return out


def _bars(panel: Bars, left: float, top: float, colours: dict[str, str]) -> list[str]:
    highest, steps = _scale([value for values in panel.values.values() for value in values if value is not None])
    out = _y_axis(panel.y_label, panel.form, (highest, steps), left, top)
    group_width = _WIDTH / len(panel.groups)
    bar_width = 0.84 * group_width / len(panel.values)
    for group, name in enumerate(panel.groups):
        begin = left + group * group_width
        out.append(_text(begin + group_width / 2, top + _HEIGHT + 20, name, 'text-anchor="middle"'))
        for number, (label, values) in enumerate(panel.values.items()):
            value = values[group]
            if value is None:
                continue
            x, height = begin + 0.08 * group_width + number * bar_width, _HEIGHT * value / highest
            out.append(
                f'<rect x="{x:.1f}" y="{top + _HEIGHT - height:.1f}" width="{0.92 * bar_width:.1f}" '
                f'height="{height:.1f}" fill="{colours[label]}"/>'
            )
            at = f'text-anchor="middle" font-size="10" fill="{colours[label]}"'
            out.append(_text(x + 0.46 * bar_width, top + _HEIGHT - height - 4, format(value, panel.form), at))
    return out


def _y_axis(label: str, form: str, scale: tuple[float, int], left: float, top: float) -> list[str]:
    highest, steps = scale
    out = []
    for number in range(steps + 1):
        y = top + _HEIGHT * (1 - number / steps)
        out.append(_line(left, y, left + _WIDTH, y, "#dddddd" if number else "#444444", 1))
        out.append(_text(left - 6, y + 4, format(highest * number / steps, form), 'text-anchor="end" font-size="11"'))
    x, y = left - 48, top + _HEIGHT / 2
    out.append(_text(x, y, label, f'text-anchor="middle" transform="rotate(-90 {x:.1f} {y:.1f})"'))
    return out


def _scale(values: Sequence[float]) -> tuple[float, int]:
    """The end of an axis from 0 that is above all of them, and how many steps of 1, 2 or 5 times a power of ten lead
    there."""
    most = max(values, default=0.0)
    if most < _NOTHING:
        return 1.0, 5
    scale = 10.0 ** math.floor(math.log10(most))
    step = next(each * scale for each in (0.2, 0.5, 1.0, 2.0) if each * scale * 6 >= most)
    steps = math.ceil(most / step - 1e-9)
    return step * steps, steps


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    return [step for step in steps if low * 0.999 <= step <= high * 1.001]


def _short(value: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{escape(text)}</text>'
