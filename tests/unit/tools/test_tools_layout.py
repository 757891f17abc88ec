"""``tools/layout.py`` refuses two folders that import each other, and one name for two classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.layout import main


def tree(root: Path, files: dict[str, str]) -> str:
    """Writes the files, each below ``src/pinyon``, and returns the checkout's folder."""
    for name, text in files.items():
        path = root / "src/pinyon" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("files", "status", "said"),
    [
        ({"a/one.py": "class One: ...", "b/two.py": "class Two: ..."}, 0, "0 names stand for several classes"),
        (
            {"a/one.py": "class One: ...", "b/two.py": "import os\nclass One: ..."},
            1,
            "One is several classes: src/pinyon/a/one.py:1, src/pinyon/b/two.py:2",
        ),
        ({"a/one.py": "class One: ...", "api/one_pb2.py": "class One: ..."}, 0, "0 names stand for several classes"),
        (
            {"a/one.py": "import pinyon.b.two", "b/two.py": "", "b/three.py": "import pinyon.a.one"},
            1,
            "src/pinyon/a and src/pinyon/b import each other: src/pinyon/a/one.py:1, src/pinyon/b/three.py:1",
        ),
    ],
)
def test_the_house_is_checked(
    files: dict[str, str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([tree(tmp_path, files)]) == status
    assert said in capsys.readouterr().out
