"""Modules compiled by mypyc decide as their source does: some placement tests run on compiled modules.

They are skipped without a C compiler. All tests of pure rooms: ``./dev test --compiled``."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from pinyon import __version__
from pinyon.core.compiled import compiled, version_line
from tests.long import usually
from tests.on_compiled import PURE
from tools.compiled_modules import (
    COMPILED,
    LAB,
    LEFT_OUT,
    SERVICES,
    SERVICES_LEFT_OUT,
    compiled_modules,
    compiled_services,
)
from tools.compiled_tree import Lacking, compiler, is_current, lacking, make_tree

ROOT = Path(__file__).resolve().parents[3]
DECIDES = (
    *("scheduler", "policy", "kvcache_centric", "costs", "prefix_match", "cost_model", "decode_selection"),
    *("transfer_cost", "instances", "admission", "index", "key_table", "holder_sets"),
)
ROOMS = ("core/*.py", *(f"placement/{name}.py" for name in DECIDES))
"""The modules of the published policy, which take half as long to compile as the room."""
TESTS = (
    "tests/unit/placement/test_placement_policies.py",
    "tests/unit/placement/test_placement_hash_ring.py",
    "tests/property/test_placement_algorithm1.py",
)


@pytest.fixture(scope="module", autouse=True)
def _collected_tests_stay_frozen() -> Iterator[None]:
    """Freezes the tests again, which mypy unfreezes: every later garbage collection here would walk them all."""
    yield
    gc.collect()
    gc.freeze()


def test_the_lists_name_what_is_there() -> None:
    of = {}
    for package in (ROOT / "src" / "pinyon", ROOT / "src" / "pinyon_lab"):
        of[package.name] = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    for lists, names in (COMPILED, of["pinyon"]), (LAB, of["pinyon_lab"]), (LEFT_OUT, of["pinyon"] + of["pinyon_lab"]):
        assert [each for each in lists if not any(fnmatch(name, each) for name in names)] == []
    names = [path.relative_to(ROOT / "services").as_posix() for path in (ROOT / "services").rglob("*.py")]
    assert [each for each in (*SERVICES, *SERVICES_LEFT_OUT) if not any(fnmatch(name, each) for name in names)] == []
    assert Path("services/conductor/sessions.py") in compiled_services(ROOT / "services")
    assert [each for each in (*PURE, *TESTS) if not list(ROOT.glob(each))] == []
    chosen = [path.as_posix() for path in compiled_modules(ROOT / "src")]
    assert "pinyon/placement/scheduler.py" in chosen
    assert "pinyon/frontdoor/upstreams/forwarding.py" in chosen
    assert "pinyon/core/compiled.py" in chosen, "it speaks for the others"
    assert "pinyon_lab/simulator/virtual_time.py" in chosen
    assert not any(path.endswith(("/__init__.py", "/policies.py")) for path in chosen)


def test_fields_that_no_constructor_sets_have_no_default() -> None:
    """The compiler mypyc sets no default for such fields: the attribute would be missing in the compiled class."""
    wrong = []
    modules = [ROOT / "src" / path for path in compiled_modules(ROOT / "src")]
    for path in [*modules, *(ROOT / path for path in compiled_services(ROOT / "services"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "field":
                continue
            if {"init", "default"} <= {keyword.arg for keyword in node.keywords}:
                wrong.append(f"{path}:{node.lineno}")
    assert wrong == []


def test_nothing_compiled_lies_beside_the_sources() -> None:
    assert [*(ROOT / "src").rglob("*.so"), *(ROOT / "services").rglob("*.so")] == []


def test_the_version_says_whether_they_are_compiled() -> None:
    assert version_line() == f"pinyon {__version__} ({'compiled' if compiled() else 'Python'})"


def test_without_a_compiler_it_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.compiled_tree", "--out", str(tmp_path / "tree")],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 3
    assert re.fullmatch(r"compiled_tree: nothing is compiled: no C compiler .*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_is_made_once_and_anew_for_other_sources(tmp_path: Path) -> None:
    if reason := lacking():
        pytest.skip(reason)
    src, tree = tmp_path / "src", tmp_path / "tree"
    (src / "pinyon" / "core").mkdir(parents=True)
    for folder in (src / "pinyon", src / "pinyon" / "core"):
        (folder / "__init__.py").write_text("")
    module = src / "pinyon" / "core" / "sum.py"
    module.write_text("def add(left: int, right: int) -> int:\n    return left + right\n")
    services = tmp_path / "services"
    (services / "conductor").mkdir(parents=True)
    for folder in (services, services / "conductor"):
        (folder / "__init__.py").write_text("")
    (services / "conductor" / "sessions.py").write_text(
        "from pinyon.core.sum import add\n\n\nasync def ask() -> int:\n    return add(2, 3)\n"
    )
    assert make_tree(tree, src=src, services=services, optimize="0")
    assert not is_current(tree, src=src, optimize="0"), "it was made of something else"
    ask = "from pinyon.core import sum as m; print(m.add(2, 3), m.__file__)"
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, "-c", ask], cwd=tree, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == f"5 {tree / 'pinyon' / 'core' / 'sum'}{sysconfig.get_config_var('EXT_SUFFIX')}", done
    ask = "import asyncio; from services.conductor import sessions as m; print(asyncio.run(m.ask()), m.__file__)"
    done = subprocess.run([sys.executable, "-c", ask], cwd=tree, env=env, capture_output=True, text=True, timeout=300)
    where = tree / "services" / "conductor" / "sessions"
    assert done.stdout.strip() == f"5 {where}{sysconfig.get_config_var('EXT_SUFFIX')}", done
    assert not make_tree(tree, src=src, services=services, optimize="0")
    assert not is_current(tree, src=src, services=services, optimize="1")
    module.write_text(module.read_text().replace("+", "-"))
    assert not is_current(tree, src=src, services=services, optimize="0")
    assert [*src.rglob("*.so"), *services.rglob("*.so")] == []


@pytest.mark.slow
@pytest.mark.skipif(not usually(0, long=1), reason="./dev test --compiled does all of that; ./dev test --long")
def test_placement_decides_the_same_when_it_is_compiled() -> None:
    if reason := lacking():
        pytest.skip(reason)
    code = (
        "import sys; from tests.on_compiled import run_on_compiled; "
        f"sys.exit(run_on_compiled(sys.argv[1:], patterns={ROOMS!r}, optimize='0'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "-q", "-n", "0", *TESTS], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert re.search(r"\d{2,} passed", done.stdout), done.stdout[-2000:]


def test_a_compiler_may_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = tmp_path / "mycc"
    named.write_text("#!/bin/sh\n")
    named.chmod(0o755)
    monkeypatch.setenv("CC", f"{named} -pipe")
    assert compiler() == [str(named)]
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Lacking):
        compiler()
