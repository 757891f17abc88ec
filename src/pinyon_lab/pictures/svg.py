"""Elements of an SVG as text. Lengths are in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["COLOURS", "line", "page", "polyline", "rect", "text"]

COLOURS = ("#1f6fb4", "#d1662b", "#3a8f4d", "#8a4fa3", "#7a7a7a", "#b3942b", "#2aa3a3", "#c04a6e", "#222222")


def page(title: str, width: float, height: float, parts: Iterable[str], *, font: int = 13, left: float = 14) -> str:
    """A whole one, with its title on top of it (up to 34)."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="{font}">'
    )
    back = rect(0, 0, width, height, "#fff")
    top = text(left, 24, title, 'font-size="16" font-weight="bold"')
    return "\n".join([head, f"<title>{escape(title)}</title>", back, top, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, extra: str = "") -> str:
    """``extra``: attributes."""
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
