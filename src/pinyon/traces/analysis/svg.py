"""Plots as SVG text, several in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from pinyon.traces.analysis.plots import Bars, Heat, Lines, Plot
from pinyon.traces.analysis.windows import clock

__all__ = ["svg"]

COLOURS = ("#1f6fb4", "#d1662b", "#3a8f4d", "#8a4fa3", "#7a7a7a", "#b3942b", "#2aa3a3", "#c04a6e")
WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 22, 40, 44
LEGEND_LINE = 17
ACROSS = 2
LABEL_CHARS = 7
"""About as wide as this many pixels each."""
TICKS = 6
CELLS_LABELLED = 12


def svg(title: str, plots: Sequence[Plot]) -> str:
    """All plots under one title, two side by side."""
    frames = [_Panel(plot) for plot in plots]
    across = min(ACROSS, len(frames))
    width = max(across * max(frame.width for frame in frames), 30 + 9 * len(title))
    out, y = list[str](), 40.0
    for begin in range(0, len(frames), across):
        line = frames[begin : begin + across]
        for at, frame in enumerate(line):
            out += frame.drawn(at * width / across, y)
        y += max(frame.height for frame in line)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {y:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">'
    )
    back = f'<rect width="{width:.0f}" height="{y:.0f}" fill="#fff"/>'
    top = _text(14, 24, title, 'font-size="16" font-weight="bold"')
    return "\n".join([head, f"<title>{escape(title)}</title>", back, top, *out, "</svg>", ""])


class _Panel:
    """One plot: how large it is, and its parts at a place."""

    def __init__(self, plot: Plot) -> None:
        self._plot = plot
        self._left, self._inner = LEFT, HEIGHT
        legend = 0
        if isinstance(plot, Heat):
            self._left = max(LEFT, 16 + LABEL_CHARS * max(len(name) for name, _ in plot.rows))
            self._inner = max(HEIGHT, min(18 * len(plot.rows), WIDTH))
            legend = 1
        else:
            labels = [line.label for line in plot.lines] if isinstance(plot, Lines) else [name for name, _ in plot.bars]
            legend = -(-len(labels) // 2) if len(labels) > 1 else 0
        self._legend = legend * LEGEND_LINE
        self.width = self._left + WIDTH + RIGHT
        self.height = TOP + self._legend + self._inner + BOTTOM

    def drawn(self, left: float, top: float) -> list[str]:
        plot, x = self._plot, left + self._left
        y = top + TOP + self._legend
        out = [_text(x, top + 20, plot.title, 'font-weight="bold"')]
        if isinstance(plot, Heat):
            return out + _heat(plot, x, y, self._inner)
        if isinstance(plot, Lines):
            labels = [(line.label, line.dashed) for line in plot.lines]
        else:
            labels = [(name, False) for name, _ in plot.bars]
        if len(labels) > 1:
            colours = _colours([dashed for _, dashed in labels])
            for at, ((label, dashed), colour) in enumerate(zip(labels, colours, strict=True)):
                at_x, at_y = x + (at % 2) * WIDTH / 2, top + TOP + (at // 2) * LEGEND_LINE - 2
                out.append(_stroke([(at_x, at_y - 4), (at_x + 18, at_y - 4)], colour, 3, dashed))
                out.append(_text(at_x + 24, at_y, label))
        return out + (_lines(plot, x, y) if isinstance(plot, Lines) else _bars(plot, x, y))


def _lines(plot: Lines, left: float, top: float) -> list[str]:
    xs = [each for line in plot.lines for each in line.x if not plot.log_x or each > 0]
    ys = [each for line in plot.lines for each in line.y]
    if not xs:
        return []
    low, high = min(xs), max(xs)
    if low == high:
        low, high = (low / 2, high * 2) if plot.log_x else (low - 0.5, high + 0.5)
    scale = _scale(ys)

    def x_of(value: float) -> float:
        part = math.log(value / low) / math.log(high / low) if plot.log_x else (value - low) / (high - low)
        return left + WIDTH * part

    def y_of(value: float) -> float:
        return top + HEIGHT * (1 - value / scale)

    out = _y_axis(left, top, scale, plot.y_label)
    for tick, label in _x_ticks(plot, low, high):
        x = x_of(tick)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + HEIGHT}" stroke="#eee"/>')
        out.append(_text(x, top + HEIGHT + 16, label, 'text-anchor="middle" font-size="11"'))
    out.append(_text(left + WIDTH / 2, top + HEIGHT + 34, plot.x_label, 'text-anchor="middle"'))
    colours = _colours([line.dashed for line in plot.lines])
    for line, colour in zip(plot.lines, colours, strict=True):
        points = [(x_of(x), y_of(y)) for x, y in zip(line.x, line.y, strict=True) if not plot.log_x or x > 0]
        out.append(_stroke(points, colour, 1.4 if line.dashed else 2, line.dashed))
        if len(points) == 1:
            out.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{colour}"/>')
    return out


def _colours(dashed: Sequence[bool]) -> list[str]:
    """One for each line; a dashed one has that of the line before."""
    colours, number = list[str](), -1
    for each in dashed:
        number += not each
        colours.append(COLOURS[max(0, number) % len(COLOURS)])
    return colours


def _x_ticks(plot: Lines, low: float, high: float) -> list[tuple[float, str]]:
    if plot.log_x:
        decades = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        if len(decades) < 3:
            ticks = [s * 10.0**d for d in range(math.floor(math.log10(low)), decades.stop + 1) for s in (1, 2, 5)]
            return [(each, f"{each:g}") for each in ticks if low * 0.999 <= each <= high * 1.001]
        every = -(-len(decades) // 8)
        return [(10.0**each, f"{10.0**each:g}") for each in decades if each % every == 0]
    if plot.time:
        steps = (60.0, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400)
        step = next((each for each in steps if (high - low) / each <= 8), 86400.0 * math.ceil((high - low) / 8 / 86400))
        times = [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(each, clock(each)) for each in times]
    step = _ceiling((high - low) / TICKS)
    return [(at * step, f"{at * step:.6g}") for at in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _bars(plot: Bars, left: float, top: float) -> list[str]:
    scale = _scale([value for _, values in plot.bars for value in values])
    out = _y_axis(left, top, scale, plot.y_label)
    slot = WIDTH / max(1, len(plot.categories))
    wide = 0.8 * slot / len(plot.bars)
    for at, name in enumerate(plot.categories):
        out.append(_text(left + (at + 0.5) * slot, top + HEIGHT + 16, name, 'text-anchor="middle"'))
        for number, (_, values) in enumerate(plot.bars):
            tall = HEIGHT * values[at] / scale
            x = left + (at + 0.1) * slot + number * wide
            fill = COLOURS[number % len(COLOURS)]
            out.append(
                f'<rect x="{x:.1f}" y="{top + HEIGHT - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
                f'fill="{fill}"/>'
            )
            if wide > 26:
                number_at = 'text-anchor="middle" font-size="11"'
                out.append(_text(x + wide / 2, top + HEIGHT - tall - 4, f"{values[at]:.1%}", number_at))
    return out


def _heat(plot: Heat, left: float, top: float, tall: float) -> list[str]:
    wide, high = WIDTH / max(1, len(plot.columns)), tall / max(1, len(plot.rows))
    values = [value for _, row in plot.rows for value in row if value is not None]
    most = max(values, default=0.0) or 1.0
    out = [f'<rect x="{left}" y="{top:.1f}" width="{WIDTH}" height="{tall:.1f}" fill="#f4f4f4"/>']
    for at, (name, row) in enumerate(plot.rows):
        y = top + at * high
        out.append(_text(left - 6, y + high / 2 + 4, name, 'text-anchor="end" font-size="11"'))
        for column, value in enumerate(row):
            if value is not None:
                x = left + column * wide
                # a little larger than its place, so that no seams show
                size = f'width="{wide + 0.4:.2f}" height="{high + 0.4:.2f}"'
                out.append(f'<rect x="{x:.2f}" y="{y:.2f}" {size} fill="{_shade(value / most)}"/>')
                if plot.numbers:
                    ink = "#fff" if value / most > 0.45 else "#222"
                    at_middle = f'text-anchor="middle" font-size="11" fill="{ink}"'
                    out.append(_text(x + wide / 2, y + high / 2 + 4, f"{value:.0%}", at_middle))
    every = -(-len(plot.columns) // CELLS_LABELLED) if all(plot.columns) else 1
    if any(len(name) > 8 for name in plot.columns):
        every *= 2
    for column in range(0, len(plot.columns), every):
        middle = left + (column + 0.5) * wide
        out.append(_text(middle, top + tall + 16, plot.columns[column], 'text-anchor="middle" font-size="11"'))
    out.append(_text(left + WIDTH / 2, top + tall + 34, plot.x_label, 'text-anchor="middle"'))
    steps, x = 24, left + WIDTH - 120
    shown = f"{most:.0%}" if plot.numbers else f"{most:.3g}"
    for step in range(steps):
        fill = _shade(step / (steps - 1))
        out.append(f'<rect x="{x + step * 3:.1f}" y="{top - 16:.1f}" width="3.4" height="9" fill="{fill}"/>')
    out.append(_text(x - 6, top - 8, f"{plot.unit}: 0", 'text-anchor="end" font-size="11"'))
    out.append(_text(x + steps * 3 + 6, top - 8, shown, 'font-size="11"'))
    return out


def _shade(part: float) -> str:
    """From near white to dark blue; ever darker, so that a print without colours reads the same."""
    low, middle, high = (240, 246, 252), (66, 146, 198), (8, 40, 96)
    one, other, share = (low, middle, 2 * part) if part < 0.5 else (middle, high, 2 * part - 1)
    mixed = (round(a + (b - a) * min(1.0, max(0.0, share))) for a, b in zip(one, other, strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed)


def _y_axis(left: float, top: float, scale: float, label: str) -> list[str]:
    out = []
    step = _ceiling(scale / TICKS)
    for at in range(round(scale / step) + 1):
        y = top + HEIGHT * (1 - at * step / scale)
        out.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(_text(left - 6, y + 4, f"{at * step:.6g}", 'text-anchor="end" font-size="11"'))
    x, y = left - 46, top + HEIGHT / 2
    return [*out, _text(x, y, label, f'text-anchor="middle" transform="rotate(-90 {x:.0f} {y:.0f})"')]


def _scale(values: Sequence[float]) -> float:
    """Where an axis from 0 ends: the first tick that none is above."""
    most = max([*values, 1e-9])
    step = _ceiling(most / TICKS)
    return step * math.ceil(most / step - 1e-9)


def _ceiling(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below ``value``."""
    decade = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return next((step * decade for step in (1, 2, 5) if step * decade >= value * (1 - 1e-9)), 10 * decade)


def _stroke(points: Sequence[tuple[float, float]], colour: str, wide: float, dashed: bool) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{wide}"{dash}/>'


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{escape(text)}</text>'
