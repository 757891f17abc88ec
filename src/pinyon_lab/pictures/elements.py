"""Elements of an SVG as text, lengths in pixels, and numbers on axes: 1, 2 and 5 times powers of ten."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

COLOURS = ("#1f6fb4", "#d1662b", "#3a8f4d", "#8a4fa3", "#7a7a7a", "#b3942b", "#2aa3a3", "#c04a6e", "#222222")
NEARLY = 1e-9
"""A bound on rounding errors."""


def page(title: str, width: float, height: float, parts: Iterable[str], *, left: float = 14) -> str:
    """Returns a whole SVG with its title on top, which takes up to y = 34."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="13">'
    )
    back = rect(0, 0, width, height, "#fff")
    top = text(left, 24, title, 'font-size="16" font-weight="bold"')
    return "\n".join([head, f"<title>{escape(title)}</title>", back, top, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, extra: str = "") -> str:
    """Returns a text element; ``extra`` are further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{escape(words)}</text>'


def line(
    begin: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1, *, dashed: bool = False
) -> str:
    (x1, y1), (x2, y2) = begin, end
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{_dashes(dashed)}/>'


def polyline(points: Sequence[tuple[float, float]], colour: str, width: float, *, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{_dashes(dashed)}/>'


def rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"/>'


def _dashes(dashed: bool) -> str:
    return ' stroke-dasharray="6 4"' if dashed else ""


def round_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2, 5, 10 ... from ``low`` (above 0) to ``high``, for a logarithmic axis."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    return [step for step in steps if low * 0.999 <= step <= high * 1.001]


def _rounded_up(value: float) -> float:
    """Returns the least of 1, 2, 5 times a power of ten that is not below ``value`` (above 0)."""
    decade = 10.0 ** math.floor(math.log10(value) + NEARLY)
    return next((step * decade for step in (1, 2, 5) if step * decade >= value * (1 - NEARLY)), 10 * decade)


def ticks_from_zero(values: Sequence[float]) -> list[float]:
    """Returns 0 and at most six more ticks for a linear axis; no value (none is below 0) is above the last tick."""
    highest = max(values, default=0.0)
    if highest < NEARLY:
        highest = 1.0
    step = _rounded_up(highest / 6)
    return [number * step for number in range(math.ceil(highest / step - NEARLY) + 1)]
