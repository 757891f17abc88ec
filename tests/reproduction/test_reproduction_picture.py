"""Pictures: whatever the numbers, well-formed and inside the frame."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import example, given
from hypothesis import strategies as st

from pinyon_lab.pictures import Bars, Course, Courses, Mark, Picture, svg

SVG = "{http://www.w3.org/2000/svg}"
y_values = st.one_of(st.floats(0, 1), st.floats(0, 1e9))
labels = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Z"]), max_size=60)


def drawn(picture: Picture) -> ElementTree.Element:
    root = ElementTree.fromstring(svg(picture))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for polyline in root.iter(f"{SVG}polyline"):
        for point in polyline.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    for box in list(root.iter(f"{SVG}rect"))[1:]:
        top, tall = float(box.attrib["y"]), float(box.attrib["height"])
        assert tall >= 0
        assert 0 <= top <= top + tall <= height
        assert 0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= width
    return root


@given(
    st.lists(st.tuples(labels, st.lists(st.tuples(st.floats(1e-3, 1e12), y_values), min_size=1)), min_size=1), labels
)
def test_courses(courses: list[tuple[str, list[tuple[float, float]]]], title: str) -> None:
    made = [Course(label, points, dashed=number % 2 == 1) for number, (label, points) in enumerate(courses)]
    marks = [Mark("here", courses[0][1][0][0])]
    root = drawn(Picture(title, [Courses("one", "x", "y", made, marks), Courses("two", "x", "y", made, linear=True)]))
    assert len(list(root.iter(f"{SVG}polyline"))) == 2 * len(courses)
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert title in texts
    assert all(label in texts for label, _ in courses)


@example({"denormal": [5e-324, 0.0]})
@given(st.dictionaries(labels, st.lists(st.none() | y_values, min_size=2, max_size=2), min_size=1, max_size=6))
def test_bars(values: dict[str, list[float | None]]) -> None:
    root = drawn(Picture("bars", [Bars("one", "y", ["a & b", "<c>"], dict(values))]))
    wanted = sum(value is not None for pair in values.values() for value in pair)
    assert len(list(root.iter(f"{SVG}rect"))) == 1 + wanted


def test_the_same_label_has_the_same_colour_in_all_panels() -> None:
    left = Bars("left", "y", ["a"], {"one": [0.5], "two": [0.25]})
    right = Bars("right", "y", ["a"], {"two": [0.25]})
    root = drawn(Picture("both", [left, right]))
    fills = [box.attrib["fill"] for box in list(root.iter(f"{SVG}rect"))[1:]]
    assert fills[1] == fills[2] != fills[0]


def test_numbers_stand_upright_where_they_would_overlap() -> None:
    def upright(labels: int) -> bool:
        bars = Bars("bars", "y", ["a", "b", "c"], {str(number): [0.92] * 3 for number in range(labels)})
        numbers = [each for each in drawn(Picture("p", [bars])).iter(f"{SVG}text") if each.text == "92%"]
        assert len(numbers) == 3 * labels
        return all("rotate" in each.attrib.get("transform", "") for each in numbers)

    assert not upright(3)
    assert upright(9)
