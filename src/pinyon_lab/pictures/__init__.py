"""Pictures as SVG text. The code that has the numbers says which picture shows what."""

from pinyon_lab.pictures.picture import Bars, Course, Courses, Heat, Mark, Panel, Picture, clock, svg

__all__ = ["Bars", "Course", "Courses", "Heat", "Mark", "Panel", "Picture", "clock", "svg"]
