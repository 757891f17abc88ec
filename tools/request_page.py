"""The line numbers of docs/design/request.md: ``python -m tools.request_page`` writes them anew.

A stay of the page is a link such as [`Dispatcher.run`](../../src/…/kind.py#L34). A person wrote the name and the
file, and the number is where that file defines the name."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design" / "request.md"

STAY = re.compile(r"\[`([\w.]+)`\]\((\S+?\.py)(?:#L\d+)?\)")


def line_of(path: Path, name: str) -> int:
    """Returns where a file defines ``Class.method`` or ``function``. Raises :class:`LookupError`."""
    found: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    line = 0
    for part in name.split("."):
        definition = next(
            (
                each
                for each in found
                if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and each.name == part
            ),
            None,
        )
        if definition is None:
            raise LookupError(f"{path.relative_to(ROOT)} does not define {name}")
        line, found = definition.lineno, definition.body
    return line


def with_lines(text: str) -> str:
    """Returns the page with each stay's line as it is now."""

    def stay(match: re.Match[str]) -> str:
        name, link = match.groups()
        return f"[`{name}`]({link}#L{line_of((PAGE.parent / link).resolve(), name)})"

    return STAY.sub(stay, text)


def main() -> int:
    PAGE.write_text(with_lines(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
