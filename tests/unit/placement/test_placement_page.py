"""docs/design/placement.md names every file of the room."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_of_files_is_whole() -> None:
    table = (ROOT / "docs" / "design" / "placement.md").read_text().partition("\n\n## ")[0]
    files = [path.name for path in (ROOT / "src" / "pinyon" / "placement").glob("*.py") if path.stem != "__init__"]
    assert len(files) > 20
    assert [name for name in sorted(files) if f"`{name}`" not in table] == []
