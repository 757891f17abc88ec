"""Charts as SVG text, with categories along x and values on a logarithmic y axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pinyon_lab.pictures.elements import COLOURS, line, page, polyline, round_ticks, text

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _GAP = 440, 260, 62, 72, 30, 62
_NUMBER_WIDTH = 36
"""Room for a value's text, so that neighbours do not overlap."""


@dataclass(frozen=True)
class Series:
    """One system, with a value and its range per category, ``(low, value, high)``, or None."""

    label: str
    colour: int
    """A number for the colour: the same system looks alike in all pictures."""
    values: Sequence[tuple[float, float, float] | None]


@dataclass(frozen=True)
class Panel:
    """One coordinate system of a picture."""

    title: str
    categories: Sequence[str]
    series: Sequence[Series]


def chart(title: str, unit: str, panels: Sequence[Panel], *, joined: bool) -> str:
    """Returns all panels with one y axis and one legend, side by side or, when they are wide, one above the other.

    ``joined`` draws lines from category to category (a course over sizes). Otherwise each value is a dot with its own
    column and its number (a comparison)."""
    numbers = [one for panel in panels for each in panel.series for three in each.values if three for one in three]
    if not numbers:
        raise ValueError("nothing to draw")
    low, high = _round(min(numbers), -1), _round(max(numbers), 1)
    labels = list(dict.fromkeys(each.label for panel in panels for each in panel.series))
    colours = {each.label: COLOURS[each.colour % len(COLOURS)] for panel in panels for each in panel.series}
    widest = 0 if joined else max(len(panel.categories) * len(panel.series) for panel in panels)
    panel_width = max(_WIDTH, widest * _NUMBER_WIDTH)
    across = 1 if panel_width > 1.5 * _WIDTH else min(2, len(panels))
    rows = -(-len(labels) // 4)
    head = 34 + 18 * rows
    width = _LEFT + across * (panel_width + _GAP) - _GAP + 20
    height = head + -(-len(panels) // across) * (_HEIGHT + _TOP - 34 + _BOTTOM) + 8
    out: list[str] = []
    for index, label in enumerate(labels):
        x, y = _LEFT + (index % 4) * (width - _LEFT) / 4, 46 + 18 * (index // 4)
        out.append(f'<circle cx="{x + 6:.0f}" cy="{y - 4}" r="5" fill="{colours[label]}"/>')
        out.append(text(x + 16, y, label))
    for index, panel in enumerate(panels):
        left = _LEFT + (index % across) * (panel_width + _GAP)
        top = head + 38 + (index // across) * (_HEIGHT + _TOP - 34 + _BOTTOM)
        out += _panel(panel, _Frame(left, top, panel_width, low, high), colours, joined)
    return page(f"{title}: {unit}", width, height, out, left=_LEFT)


@dataclass(frozen=True)
class _Frame:
    """The place of a panel, and the range of its y axis."""

    left: float
    top: float
    width: float
    low: float
    high: float

    def y(self, value: float) -> float:
        return self.top + _HEIGHT * (1 - math.log(value / self.low) / math.log(self.high / self.low))

    def x(self, column: float, columns: int) -> float:
        return self.left + self.width * column / columns


def _round(value: float, direction: int) -> float:
    """Returns the nearest 1, 2 or 5 times a power of ten beyond ``value``."""
    steps = round_ticks(value / 100, value * 100)
    return min(step for step in steps if step > value) if direction > 0 else max(s for s in steps if s < value)


def _panel(panel: Panel, frame: _Frame, colours: dict[str, str], joined: bool) -> list[str]:
    right, bottom = frame.left + frame.width, frame.top + _HEIGHT
    out = [text(frame.left + frame.width / 2, frame.top - 10, panel.title, 'text-anchor="middle" font-weight="bold"')]
    for tick in round_ticks(frame.low, frame.high):
        y = frame.y(tick)
        out.append(line((frame.left, y), (right, y), "#ddd"))
        out.append(text(frame.left - 6, y + 4, f"{tick:g}", 'text-anchor="end" font-size="11"'))
    columns = len(panel.categories)
    for index, category in enumerate(panel.categories):
        out.append(text(frame.x(index + 0.5, columns), bottom + 18, category, 'text-anchor="middle"'))
        if index and not joined:
            x = frame.x(index, columns)
            out.append(line((x, frame.top), (x, bottom), "#bbb"))
    for number, each in enumerate(panel.series):
        colour = colours[each.label]
        shift = 0.5 if joined else (number + 0.5) / len(panel.series)
        points = [(frame.x(index + shift, columns), three) for index, three in enumerate(each.values) if three]
        if joined:
            out.append(polyline([(x, frame.y(value)) for x, (_, value, _) in points], colour, 2))
        for x, (least, value, most) in points:
            y, above, below = frame.y(value), frame.y(most), frame.y(least)
            out.append(line((x, above), (x, below), colour))
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.5 if joined else 4.5}" fill="{colour}"/>')
            if not joined:
                shown = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
                at = 'text-anchor="middle" font-size="11"'
                out.append(text(x, min(y - 2, above) - 5, shown, f'{at} fill="{colour}"'))
    return out
