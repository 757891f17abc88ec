"""Pictures as SVG text. Which picture shows what is said where the numbers are."""

from pinyon_lab.pictures.elements import COLOURS, line, page, polyline, round_ticks, text
from pinyon_lab.pictures.picture import Bars, Course, Courses, Heat, Mark, Panel, Picture, clock, svg

__all__ = [
    "COLOURS",
    "Bars",
    "Course",
    "Courses",
    "Heat",
    "Mark",
    "Panel",
    "Picture",
    "clock",
    "line",
    "page",
    "polyline",
    "round_ticks",
    "svg",
    "text",
]
