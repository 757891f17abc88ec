"""Lines of each room, folders that import each other, and classes of one name.

    python -m tools.layout [ROOT]

Lines are those of Python files, blank ones and comments included; generated code (``pinyon/api``) is left out. Two
folders import each other where a file of each imports one of the other. A folder's ``__init__.py`` belongs to it, and
folders within a folder count as others. A name stands for one class: a reader who has met it knows what it means.
Exit status: 1 where such a pair is left, or a name stands for two classes."""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path

from tools.import_circles import imports_of, modules_of

GENERATED = "src/pinyon/api/"
PRODUCT = ("src/", "services/", "launch/")
SERVING = ("src/pinyon/", "services/")
"""The code that serves; the rest of the product is the lab and what launches a suite."""
FRONT_DOOR = ("services/lb/", "services/router/", "src/pinyon/http/", "src/pinyon/openai/", "src/pinyon/frontdoor/")


def lines_of(root: Path) -> dict[str, int]:
    """Returns the lines of every file of the product, by its path below ``root``."""
    files = (path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py")))
    names = ((path.relative_to(root).as_posix(), path) for path in files)
    return {name: len(path.read_text().splitlines()) for name, path in names if not name.startswith(GENERATED)}


def room_of(name: str) -> str:
    """Returns ``src/pinyon/placement`` or ``services/lb``: two folders below ``src``, else one below the first."""
    parts = name.split("/")[:-1]
    return "/".join(parts[: 3 if parts[0] == "src" else 2])


def pairs(root: Path) -> list[tuple[str, str, str, str]]:
    """Returns folders that import each other, each pair with one file of either that does so."""
    modules = modules_of(root)
    files = {name: path.relative_to(root).as_posix() for name, path in modules.items()}
    edges: dict[tuple[str, str], str] = {}
    for name, path in modules.items():
        if not files[name].startswith(PRODUCT) or files[name].startswith(GENERATED):
            continue
        here = files[name].rpartition("/")[0]
        for target, line in imports_of(name, path, modules).items():
            there = files[target].rpartition("/")[0]
            if there != here:
                edges.setdefault((here, there), f"{files[name]}:{line}")
    return sorted(
        (*both, edges[both], edges[both[::-1]]) for both in edges if both < both[::-1] and both[::-1] in edges
    )


def classes(root: Path) -> dict[str, list[str]]:
    """Returns the places (``file:line``) of each class of the product, by name; not those in functions."""
    places: dict[str, list[str]] = defaultdict(list)
    for name in lines_of(root):
        tree = ast.parse((root / name).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name}:{node.lineno}")
    return places


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    lines = lines_of(root)
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for name, count in lines.items():
        rooms[room_of(name)].update(lines=count, files=1)
    for room, counts in sorted(rooms.items(), key=lambda item: -item[1]["lines"]):
        print(f"{counts['lines']:7,} lines {counts['files']:4} files  {room}")

    def total(title: str, chosen: dict[str, int]) -> None:
        print(f"{sum(chosen.values()):7,} lines {len(chosen):4} files  {title}")

    print()
    total("pinyon and services", {name: count for name, count in lines.items() if name.startswith(SERVING)})
    total("with the lab and the launcher", lines)
    total("the front door", {name: count for name, count in lines.items() if name.startswith(FRONT_DOOR)})
    print()
    found = pairs(root)
    for here, there, one, other in found:
        print(f"{here} and {there} import each other: {one}, {other}")
    print(f"{len(found)} pairs of folders import each other")
    twice = {name: places for name, places in sorted(classes(root).items()) if len(places) > 1}
    for name, places in twice.items():
        print(f"{name} is several classes: {', '.join(places)}")
    print(f"{len(twice)} names stand for several classes")
    return 1 if found or twice else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
