"""What pictures as SVG text are made of. Which picture shows what is said where the numbers are."""

from pinyon_lab.pictures.axes import round_ticks, rounded_up, ticks_from_zero
from pinyon_lab.pictures.svg import COLOURS, line, page, polyline, rect, text

__all__ = ["COLOURS", "line", "page", "polyline", "rect", "round_ticks", "rounded_up", "text", "ticks_from_zero"]
