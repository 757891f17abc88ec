"""``tools/import_circles.py`` finds import circles wherever the import stands, and prints one circle of each knot."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.import_circles import circles, main


def tree(root: Path, **files: str) -> Path:
    for folder in ("src/toy", "services", "bench", "tools", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "src/toy/__init__.py").write_text("")
    for name, text in files.items():
        (root / f"src/toy/{name}.py").write_text(text)
    return root


@pytest.mark.parametrize(
    "back",
    [
        "import toy.a",
        "from toy import a",
        "from toy.a import name",
        "def f():\n    from toy.a import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.a import name",
        "try:\n    import toy.a as other\nexcept ImportError:\n    pass",
    ],
)
def test_a_circle_is_found_and_printed(back: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, a="from toy.b import x", b="import toy.c", c=back)
    assert main([str(root)]) == 1
    out = capsys.readouterr().out
    assert (
        "a circle of 3 files:\n  src/toy/a.py:1 imports toy.b\n  src/toy/b.py:1 imports toy.c\n  src/toy/c.py:" in out
    )
    assert out.endswith("imports, 1 circles\n")


def test_two_ways_to_one_file_are_no_circle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, a="import toy.b, toy.c", b="import toy.d", c="import toy.d, os", d="")
    assert main([str(root)]) == 0
    assert "0 circles" in capsys.readouterr().out


def test_a_part_that_names_its_own_package_is_in_a_circle(tmp_path: Path) -> None:
    root = tree(tmp_path, a="from toy import name")
    (root / "src/toy/__init__.py").write_text("from toy.a import other")
    assert main([str(root)]) == 1


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")), min_size=6, max_size=6))
def test_against_reachability(edges: dict[str, set[str]]) -> None:
    graph = {name: dict.fromkeys(sorted(targets - {name}), 1) for name, targets in edges.items()}
    reach = {name: set(targets) for name, targets in graph.items()}
    for _ in graph:
        for name in graph:
            reach[name] |= {further for target in reach[name] for further in reach[target]}
    found = circles(graph)
    knots = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}
    assert len(found) == len(knots)
    for circle in found:
        assert all(b in graph[a] for a, b in zip(circle, [*circle[1:], circle[0]], strict=True))
        assert any(set(circle) <= knot for knot in knots)
