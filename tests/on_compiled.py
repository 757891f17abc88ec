"""Tests run again on the modules that mypyc compiled, those of pure rooms, of transfers and of services: ``./dev test
--compiled [SUITE] [..]``.

``compiled_tree`` makes the modules where a C compiler is available. Before the tests, a check confirms that all of them
are loaded as compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pinyon.core.compiled import compiled
from tools.compiled_modules import COMPILED, compiled_modules, compiled_services
from tools.compiled_tree import Lacking, make_tree

ROOT = Path(__file__).resolve().parent.parent
TREES = ROOT / ".cache" / "compiled"
UNIT = (
    *("batching", "conductor", "core", "decisions", "eviction", "lb", "model", "paging", "placement", "routing"),
    *("runtime", "simulator", "transfer", "worker"),
)
PROPERTY = (
    *("batching", "conductor", "core", "decisions", "eviction", "lb", "messages", "model", "paging", "placement"),
    *("routing", "transfer", "worker"),
    *("http2_connection", "store_objects", "store_switch"),
)
INTEGRATION = ("conductor", "decision", "lb", "transfer", "worker")
PURE = (
    *(f"tests/unit/{room}" for room in UNIT),
    "tests/unit/store/test_store_traits.py",
    *(f"tests/property/test_{room}*.py" for room in PROPERTY),
    *(f"tests/integration/test_{room}_*.py" for room in INTEGRATION),
    "tests/simulation",
)
"""Files, folders and patterns of the tests that run on compiled modules."""

REPLACES_METHODS = pytest.mark.skipif(compiled(), reason="replaces a method, which compiled classes do not allow")


def run_on_compiled(arguments: Sequence[str], *, patterns: Sequence[str] = COMPILED, optimize: str = "2") -> int:
    """Compiles the modules unless they exist, and runs pytest on them.

    Returns pytest's exit status, or 3 where nothing can be compiled. ``arguments`` are pytest's, tests among them. With
    other ``patterns`` services run as Python."""
    tree = TREES / f"O{optimize}-{len(patterns)}"
    services = ROOT / "services" if patterns is COMPILED else None
    try:
        made = make_tree(tree, patterns=patterns, services=services, optimize=optimize)
    except Lacking as error:
        print(f"on_compiled: nothing is compiled: {error}", file=sys.stderr)
        return 3
    print(f"on_compiled: {tree} {'made' if made else 'was there'}", file=sys.stderr)
    # Otherwise the working folder would precede the compiled tree, and services would run as Python.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join((str(tree), str(ROOT)))}
    paths = compiled_modules(tree, patterns) + (compiled_services(tree / "services") if services is not None else [])
    names = [".".join(path.with_suffix("").parts) for path in paths]
    looked = subprocess.run([sys.executable, "-m", "tests.on_compiled", "--look", *names], env=environment, cwd=ROOT)
    if looked.returncode:
        return looked.returncode
    command = [sys.executable, "-m", "pytest", "-o", f"pythonpath={tree} {ROOT}", "-p", "no:cacheprovider", *arguments]
    status = subprocess.run(command, env=environment, cwd=ROOT).returncode
    return 1 if status == 3 else status  # pytest has a status 3 of its own, for an internal error


def _look(names: Sequence[str]) -> int:
    """Returns 1 if a module would run as Python, else 0."""
    where = {name: str(getattr(importlib.util.find_spec(name), "origin", "")) for name in names}
    python = [f"{name}: {origin}" for name, origin in where.items() if not origin.endswith(".so")]
    print("\n".join(["on_compiled: not compiled:", *python]) if python or not names else "", end="", file=sys.stderr)
    return int(bool(python) or not names)


def _tests(words: Sequence[str]) -> list[str]:
    """Returns the tests of ``PURE`` that are below the named folders of ``tests``, or all of them."""
    found = sorted({str(path.relative_to(ROOT)) for pattern in PURE for path in ROOT.glob(pattern)})
    return [each for each in found if not words or each.split("/")[1] in words]


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--look"]:
        return _look(arguments[1:])
    words = []
    while arguments and arguments[0].isidentifier():
        words.append(arguments.pop(0))
    named = any(Path(ROOT, each.partition("::")[0]).exists() for each in arguments)
    return run_on_compiled(["-n", "auto", *([] if named else _tests(words)), *arguments])


if __name__ == "__main__":
    sys.exit(main())
