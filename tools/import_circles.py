"""A check that fails and prints every circle of imports in src, services, launch, bench, tools and tests.

Imports inside functions and under ``TYPE_CHECKING`` count: a reader meets them as well. ``from package import name``
counts as an import of the module ``package.name`` if there is one, else of ``package/__init__.py``. A package's
``__init__.py`` that gathers names for others (``from package.part import Name``) imports its parts; a part that names
its own package therefore is in a circle.

    python -m tools.import_circles [ROOT]"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = {"src": "src", "services": ".", "launch": ".", "bench": ".", "tools": ".", "tests": "."}
"""The folders of files, each with the folder below which dotted names begin."""


def modules_of(root: Path) -> dict[str, Path]:
    """Returns the file of each dotted name; a package's name stands for its ``__init__.py``."""
    found: dict[str, Path] = {}
    for folder, base in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / base).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> dict[str, int]:
    """Returns the modules that ``name`` imports, each with the line of its first import."""
    found: dict[str, int] = {}
    for target, line in _targets(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        module = next((candidate for candidate in _shortened(target) if candidate in modules), None)
        if module is not None and module != name:
            found.setdefault(module, line)
    return found


def _targets(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _shortened(target: str) -> Iterator[str]:
    """Yields ``a.b.c`` as it is, then ``a.b``, then ``a``: the longest that is a module is meant."""
    while target:
        yield target
        target = target.rpartition(".")[0]


def circles(graph: dict[str, dict[str, int]]) -> list[list[str]]:
    """Returns one shortest circle of each knot (strongly connected component) of more than one file, sorted."""
    return sorted(_shortest_circle(knot, graph) for knot in _knots(graph) if len(knot) > 1)


def _knots(graph: dict[str, dict[str, int]]) -> list[set[str]]:
    """Returns the knots by Tarjan's algorithm, with a stack of its own: chains of imports may be long."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    knots: list[set[str]] = []
    work: list[tuple[str, Iterator[str]]] = []

    def enter(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        on_stack.add(module)
        work.append((module, iter(graph[module])))

    for root in graph:
        if root in number:
            continue
        enter(root)
        while work:
            module, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[module])
                if low[module] == number[module]:
                    knot = set(stack[stack.index(module) :])
                    del stack[stack.index(module) :]
                    on_stack.difference_update(knot)
                    knots.append(knot)
            elif following not in number:
                enter(following)
            elif following in on_stack:
                low[module] = min(low[module], number[following])
    return knots


def _shortest_circle(knot: set[str], graph: dict[str, dict[str, int]]) -> list[str]:
    best: list[str] = []
    for start in sorted(knot):
        came_from: dict[str, str] = {}
        front = [start]
        while front and start not in came_from:
            ahead: list[str] = []
            for module in front:
                for following in graph[module]:
                    if following in knot and following not in came_from:
                        came_from[following] = module
                        ahead.append(following)
            front = ahead
        circle = [start]
        while (before := came_from[circle[-1]]) != start:
            circle.append(before)
        if not best or len(circle) < len(best):
            best = [start, *reversed(circle[1:])]
    return best


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    modules = modules_of(root)
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}
    found = circles(graph)
    for circle in found:
        print(f"a circle of {len(circle)} files:")
        for module, following in zip(circle, [*circle[1:], circle[0]], strict=True):
            place = f"{modules[module].relative_to(root)}:{graph[module][following]}"
            print(f"  {place} imports {following}")
    print(f"{len(modules)} files, {sum(map(len, graph.values()))} imports, {len(found)} circles")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
