"""Pictures as SVG text. The code that has the numbers says which picture shows what."""

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
