"""A count of the planted bugs that the tests find.

    python -m tools.planted_bugs [NAME ..] [--suites unit property ..] [--fresh] [--table]

``tests/data/planted_bugs.toml`` has the bugs: what to replace in which file, and who would suffer from it. Each is put
into a copy of this checkout, whose tests run until the first one fails: those first that are near the file by imports.
Results are written to ``.cache/planted/results.jsonl`` as they come, and what is there is not run again. A change to a
file with a planted bug must put the same bug into the new text."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUGS = ROOT / "tests" / "data" / "planted_bugs.toml"
RESULTS = ROOT / ".cache" / "planted" / "results.jsonl"
SUITES = ("unit", "property", "simulation", "reproduction", "integration", "cluster")
RUN_S_MAX = 3600.0
NOT_ASKED = "tests/unit/tools/test_tools_planted.py"
"""The test that a bug can be planted, which fails where it is planted already."""
NEAR = 40
"""Test files that run before the others: to collect all takes longer than to run these."""
MODULE = re.compile(r"\b(?:pinyon|pinyon_lab|services|launch|tests)(?:\.\w+)+")


@dataclass(frozen=True, slots=True)
class Bug:
    """One replacement: ``old`` occurs once in ``file``."""

    name: str
    room: str
    file: str
    what: str
    old: str
    new: str

    def put_into(self, root: Path) -> None:
        """Puts the bug into a checkout. Raises ``ValueError`` where the text is not there, or more than once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of trying one bug."""

    name: str
    caught_by: str
    """The first test that failed; empty if the bug survived."""
    seconds: float
    at: str
    commit: str


def bugs() -> list[Bug]:
    return [Bug(**each) for each in tomllib.loads(BUGS.read_text(encoding="utf-8"))["bug"]]


def copied(to: Path) -> None:
    """Copies what git knows of this checkout, as it is now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def by_distance(root: Path, suites: Sequence[str], file: str) -> list[str]:
    """Returns the test files of the suites, those first that import the file, then those that import these, and so on.

    Most bugs are found by the first ones."""
    paths = [
        path for folder in ("src", "services", "launch", "tests") for path in sorted((root / folder).rglob("*.py"))
    ]
    modules = {module_of(path.relative_to(root)): path.relative_to(root) for path in paths}
    importers: dict[str, list[str]] = {}
    for module, path in modules.items():
        for name in sorted(set(MODULE.findall((root / path).read_text(encoding="utf-8")))):
            importers.setdefault(name, []).append(module)
    reached = [module_of(Path(file))]
    for module in reached:  # it grows meanwhile
        reached += [each for each in importers.get(module, ()) if each in modules and each not in reached]
    every = [module for module in modules if module not in reached]
    tests = [modules[module] for module in (*reached, *every) if module in modules]
    folders = [Path("tests", suite) for suite in suites]
    return [
        path.as_posix()
        for path in tests
        if path.name.startswith("test_")
        and path.as_posix() != NOT_ASKED
        and any(folder in path.parents for folder in folders)
    ]


def module_of(path: Path) -> str:
    """Returns the dotted name of a file, relative to the checkout."""
    return re.sub(r"^src/|(/__init__)?\.py$", "", path.as_posix()).replace("/", ".")


def first_failure(root: Path, tests: Sequence[str]) -> str:
    """Returns the first of these tests that fails; empty: none. Raises ``RuntimeError`` if they cannot be run."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "auto", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    try:
        ran = subprocess.run(
            [*command, *tests],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "(the tests hung)"
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    if (ran.returncode == 0) is (named is not None):
        raise RuntimeError(f"pytest ended with {ran.returncode}:\n{ran.stdout[-3000:]}")
    return named[1] if named else ""


def commit() -> str:
    ran = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    return ran.stdout.strip() or "unknown"


def try_one(bug: Bug, suites: Sequence[str]) -> Found:
    begun = datetime.datetime.now(datetime.UTC)
    with tempfile.TemporaryDirectory(prefix="pinyon-planted-") as folder:
        root = Path(folder)
        copied(root)
        bug.put_into(root)
        tests = by_distance(root, suites, bug.file)
        caught = first_failure(root, tests[:NEAR]) or first_failure(root, tests[NEAR:])
    took = (datetime.datetime.now(datetime.UTC) - begun).total_seconds()
    return Found(bug.name, caught, round(took, 1), begun.isoformat(timespec="seconds"), commit())


def table(planted: Sequence[Bug], found: dict[str, Found]) -> str:
    """Returns a Markdown table with a row for each bug, then the score."""
    lines = ["| bug | file | found by | s | commit |", "|---|---|---|---|---|"]
    for bug in planted:
        came = found.get(bug.name)
        by = "not run" if came is None else f"`{came.caught_by}`" if came.caught_by else "**nobody**"
        lines.append(
            f"| {bug.name} | `{bug.file}` | {by} | {'' if came is None else f'{came.seconds:.0f}'} "
            f"| {'' if came is None else came.commit} |"
        )
    caught = sum(bool(each.caught_by) for each in found.values())
    return "\n".join(
        [*lines, "", f"{caught} of {len(found)} bugs that were tried were found ({len(planted)} planted)."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.planted_bugs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these bugs (default: all)")
    parser.add_argument("--suites", nargs="+", default=SUITES, metavar="SUITE", help=f"default: {' '.join(SUITES)}")
    parser.add_argument("--fresh", action="store_true", help="run again what was run")
    parser.add_argument("--table", action="store_true", help="print what was found so far, and run nothing")
    options = parser.parse_args(argv)
    planted = bugs()
    if unknown := {*options.names} - {bug.name for bug in planted}:
        parser.error(f"no such bug: {', '.join(sorted(unknown))}")
    planted = [bug for bug in planted if bug.name in options.names or not options.names]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    said = [json.loads(line) for line in lines if line.endswith("}")]  # the last line may have been cut off
    before = {} if options.fresh else {each.name: each for each in (Found(**each) for each in said)}
    found = {bug.name: before[bug.name] for bug in planted if bug.name in before}
    for number, bug in enumerate(planted, 1):
        if options.table or bug.name in found:
            continue
        print(f"planted {number} of {len(planted)}: {bug.name} ...", file=sys.stderr, flush=True)
        found[bug.name] = came = try_one(bug, options.suites)
        with RESULTS.open("a") as results:
            results.write(json.dumps(asdict(came)) + "\n")
        print(f"planted: {came.caught_by or 'NOBODY found it'} ({came.seconds:.0f} s)", file=sys.stderr, flush=True)
    print(table(planted, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
