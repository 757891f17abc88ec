"""Pictures as SVG text: courses, over a logarithmic x axis most often, and bars side by side; y axes are linear from
0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pinyon_lab.pictures import COLOURS, line, page, polyline, rect, round_ticks, text, ticks_from_zero

__all__ = ["Bars", "Course", "Courses", "Mark", "Picture", "svg"]

_WIDTH, _HEIGHT, _LEFT, _GAP, _TOP, _BOTTOM = 560, 300, 64, 78, 40, 56
_ACROSS = 2
"""Panels."""
_LETTER = 7
"""Width of one, on average at most."""
_DIGIT = 6
"""Of the numbers at bars."""
_BELOW_TITLE = 10
"""Free above a panel."""


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
    linear: bool = False
    """The x axis, from the least to the largest x."""


@dataclass(frozen=True, slots=True)
class Bars:
    """``values[label][group]``; None leaves a gap."""

    title: str
    y_label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    form: str = ".0%"


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    panels: Sequence[Courses | Bars]


def svg(picture: Picture) -> str:
    """With one legend, in which the same label has the same colour in all panels."""
    labels = list(dict.fromkeys(label for panel in picture.panels for label in _labels(panel)))
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
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
    out: list[str] = []
    for label, (x, y) in zip(labels, places, strict=True):
        thin = label in dashed
        out.append(line((x, y - 4), (x + 22, y - 4), colours[label], 2 if thin else 4, dashed=thin))
        out.append(text(x + 28, y, label))
    for number, panel in enumerate(picture.panels):
        left = _LEFT + (number % across) * (_WIDTH + _GAP)
        top = head + _TOP + (number // across) * (_TOP + _HEIGHT + _BOTTOM)
        draw = _courses(panel, left, top, colours) if isinstance(panel, Courses) else _bars(panel, left, top, colours)
        out += [text(left + _WIDTH / 2, top - 14, panel.title, 'text-anchor="middle" font-weight="bold"'), *draw]
    return page(picture.title, width, height, out, left=_LEFT)


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
    xs = [x for course in panel.courses for x, _ in course.points] or [1.0]
    low, high = _on_axis(panel, min(xs)), _on_axis(panel, max(xs))
    scale = ticks_from_zero([y for course in panel.courses for _, y in course.points])

    def at_x(x: float) -> float:
        return left + _WIDTH * (_on_axis(panel, x) - low) / ((high - low) or 1)

    out = _y_axis(panel.y_label, panel.form, scale, left, top)
    linear = [tick for tick in ticks_from_zero(xs) if min(xs) <= tick <= max(xs)]
    for tick in linear if panel.linear else round_ticks(min(xs), max(xs)):
        out.append(line((at_x(tick), top + _HEIGHT), (at_x(tick), top + _HEIGHT + 5), "#444444"))
        out.append(text(at_x(tick), top + _HEIGHT + 19, _short(tick), 'text-anchor="middle" font-size="11"'))
    out.append(text(left + _WIDTH / 2, top + _HEIGHT + 40, panel.x_label, 'text-anchor="middle"'))
    for mark in panel.marks:
        out.append(line((at_x(mark.x), top), (at_x(mark.x), top + _HEIGHT), "#444444", dashed=True))
        out.append(text(at_x(mark.x) + 4, top + 12, mark.label, 'font-size="11" fill="#444444"'))
    for course in panel.courses:
        path = [(at_x(x), top + _HEIGHT * (1 - y / scale[-1])) for x, y in course.points]
        out.append(polyline(path, colours[course.label], 2, dashed=course.dashed))
    return out


def _on_axis(panel: Courses, x: float) -> float:
    return x if panel.linear else math.log(x)


def _bars(panel: Bars, left: float, top: float, colours: dict[str, str]) -> list[str]:
    group_width = _WIDTH / len(panel.groups)
    bar_width = 0.84 * group_width / len(panel.values)
    known = [value for values in panel.values.values() for value in values if value is not None]
    longest = max([len(format(value, panel.form)) for value in known], default=0) * _DIGIT
    upright = longest > bar_width
    """Numbers stand on their bars where they would run into each other."""
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
