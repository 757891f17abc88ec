"""Plots as SVG text, several in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pinyon_lab.pictures import COLOURS, line, page, polyline, rect, round_ticks, rounded_up, text, ticks_from_zero
from pinyon_lab.traces.analysis.figure import Bars, Heat, Lines, Plot
from pinyon_lab.traces.analysis.windows import clock

__all__ = ["svg"]

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
        row = frames[begin : begin + across]
        for at, frame in enumerate(row):
            out += frame.drawn(at * width / across, y)
        y += max(frame.height for frame in row)
    return page(title, width, y, out, font=12)


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
            labels = [each.label for each in plot.lines] if isinstance(plot, Lines) else [name for name, _ in plot.bars]
            legend = -(-len(labels) // 2) if len(labels) > 1 else 0
        self._legend = legend * LEGEND_LINE
        self.width = self._left + WIDTH + RIGHT
        self.height = TOP + self._legend + self._inner + BOTTOM

    def drawn(self, left: float, top: float) -> list[str]:
        plot, x = self._plot, left + self._left
        y = top + TOP + self._legend
        out = [text(x, top + 20, plot.title, 'font-weight="bold"')]
        if isinstance(plot, Heat):
            return out + _heat(plot, x, y, self._inner)
        if isinstance(plot, Lines):
            labels = [(each.label, each.dashed) for each in plot.lines]
        else:
            labels = [(name, False) for name, _ in plot.bars]
        if len(labels) > 1:
            colours = _colours([dashed for _, dashed in labels])
            for at, ((label, dashed), colour) in enumerate(zip(labels, colours, strict=True)):
                at_x, at_y = x + (at % 2) * WIDTH / 2, top + TOP + (at // 2) * LEGEND_LINE - 2
                out.append(line((at_x, at_y - 4), (at_x + 18, at_y - 4), colour, 3, dashed=dashed))
                out.append(text(at_x + 24, at_y, label))
        return out + (_lines(plot, x, y) if isinstance(plot, Lines) else _bars(plot, x, y))


def _lines(plot: Lines, left: float, top: float) -> list[str]:
    xs = [x for each in plot.lines for x in each.x if not plot.log_x or x > 0]
    if not xs:
        return []
    low, high = min(xs), max(xs)
    if low == high:
        low, high = (low / 2, high * 2) if plot.log_x else (low - 0.5, high + 0.5)
    ticks = ticks_from_zero([y for each in plot.lines for y in each.y], TICKS)

    def x_of(value: float) -> float:
        part = math.log(value / low) / math.log(high / low) if plot.log_x else (value - low) / (high - low)
        return left + WIDTH * part

    def y_of(value: float) -> float:
        return top + HEIGHT * (1 - value / ticks[-1])

    out = _y_axis(left, top, ticks, plot.y_label)
    for tick, label in _x_ticks(plot, low, high):
        x = x_of(tick)
        out.append(line((x, top), (x, top + HEIGHT), "#eee"))
        out.append(text(x, top + HEIGHT + 16, label, 'text-anchor="middle" font-size="11"'))
    out.append(text(left + WIDTH / 2, top + HEIGHT + 34, plot.x_label, 'text-anchor="middle"'))
    colours = _colours([each.dashed for each in plot.lines])
    for each, colour in zip(plot.lines, colours, strict=True):
        points = [(x_of(x), y_of(y)) for x, y in zip(each.x, each.y, strict=True) if not plot.log_x or x > 0]
        out.append(polyline(points, colour, 1.4 if each.dashed else 2, dashed=each.dashed))
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
            return [(each, f"{each:g}") for each in round_ticks(low, high)]
        every = -(-len(decades) // 8)
        return [(10.0**each, f"{10.0**each:g}") for each in decades if each % every == 0]
    if plot.time:
        steps = (60.0, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400)
        step = next((each for each in steps if (high - low) / each <= 8), 86400.0 * math.ceil((high - low) / 8 / 86400))
        times = [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(each, clock(each)) for each in times]
    step = rounded_up((high - low) / TICKS)
    return [(at * step, f"{at * step:.6g}") for at in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _bars(plot: Bars, left: float, top: float) -> list[str]:
    ticks = ticks_from_zero([value for _, values in plot.bars for value in values], TICKS)
    out = _y_axis(left, top, ticks, plot.y_label)
    slot = WIDTH / max(1, len(plot.categories))
    wide = 0.8 * slot / len(plot.bars)
    for at, name in enumerate(plot.categories):
        out.append(text(left + (at + 0.5) * slot, top + HEIGHT + 16, name, 'text-anchor="middle"'))
        for number, (_, values) in enumerate(plot.bars):
            tall = HEIGHT * values[at] / ticks[-1]
            x = left + (at + 0.1) * slot + number * wide
            out.append(rect(x, top + HEIGHT - tall, wide, tall, COLOURS[number % len(COLOURS)]))
            if wide > 26:
                number_at = 'text-anchor="middle" font-size="11"'
                out.append(text(x + wide / 2, top + HEIGHT - tall - 4, f"{values[at]:.1%}", number_at))
    return out


def _heat(plot: Heat, left: float, top: float, tall: float) -> list[str]:
    wide, high = WIDTH / max(1, len(plot.columns)), tall / max(1, len(plot.rows))
    values = [value for _, row in plot.rows for value in row if value is not None]
    most = max(values, default=0.0) or 1.0
    out = [rect(left, top, WIDTH, tall, "#f4f4f4")]
    for at, (name, row) in enumerate(plot.rows):
        y = top + at * high
        out.append(text(left - 6, y + high / 2 + 4, name, 'text-anchor="end" font-size="11"'))
        for column, value in enumerate(row):
            if value is not None:
                x = left + column * wide
                # a little larger than its place, so that no seams show
                out.append(rect(x, y, wide + 0.4, high + 0.4, _shade(value / most)))
                if plot.numbers:
                    ink = "#fff" if value / most > 0.45 else "#222"
                    at_middle = f'text-anchor="middle" font-size="11" fill="{ink}"'
                    out.append(text(x + wide / 2, y + high / 2 + 4, f"{value:.0%}", at_middle))
    every = -(-len(plot.columns) // CELLS_LABELLED) if all(plot.columns) else 1
    if any(len(name) > 8 for name in plot.columns):
        every *= 2
    for column in range(0, len(plot.columns), every):
        middle = left + (column + 0.5) * wide
        out.append(text(middle, top + tall + 16, plot.columns[column], 'text-anchor="middle" font-size="11"'))
    out.append(text(left + WIDTH / 2, top + tall + 34, plot.x_label, 'text-anchor="middle"'))
    steps, x = 24, left + WIDTH - 120
    shown = f"{most:.0%}" if plot.numbers else f"{most:.3g}"
    out += [rect(x + step * 3, top - 16, 3.4, 9, _shade(step / (steps - 1))) for step in range(steps)]
    out.append(text(x - 6, top - 8, f"{plot.unit}: 0", 'text-anchor="end" font-size="11"'))
    out.append(text(x + steps * 3 + 6, top - 8, shown, 'font-size="11"'))
    return out


def _shade(part: float) -> str:
    """From near white to dark blue; ever darker, so that a print without colours reads the same."""
    low, middle, high = (240, 246, 252), (66, 146, 198), (8, 40, 96)
    one, other, share = (low, middle, 2 * part) if part < 0.5 else (middle, high, 2 * part - 1)
    mixed = (round(a + (b - a) * min(1.0, max(0.0, share))) for a, b in zip(one, other, strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed)


def _y_axis(left: float, top: float, ticks: Sequence[float], label: str) -> list[str]:
    out = []
    for tick in ticks:
        y = top + HEIGHT * (1 - tick / ticks[-1])
        out.append(line((left, y), (left + WIDTH, y), "#ddd"))
        out.append(text(left - 6, y + 4, f"{tick:.6g}", 'text-anchor="end" font-size="11"'))
    x, y = left - 46, top + HEIGHT / 2
    return [*out, text(x, y, label, f'text-anchor="middle" transform="rotate(-90 {x:.0f} {y:.0f})"')]
