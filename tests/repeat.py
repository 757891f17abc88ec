"""Tests run many times on a busy machine: ``./dev test --repeat N [SUITE] [..]``.

Each test runs N times beside busy loops, which exposes tests that fail now and then. The result of each test is
appended to ``.cache/repeat``, so an interrupted run resumes there. The table at the end lists the runs with their
times, and each test that ever failed, with how often.

``pytest -p tests.repeat`` loads this module too, to record each test's result and to skip tests that are done."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".cache" / "repeat"
LOOPS = 4
RUN_S_MAX = 5400.0
"""The time after which a run counts as hanging."""
SAID_LINES = 4
"""Lines kept of a failure's message."""
ERROR_OF_GROUP = re.compile(r"[\s|]+\| [\w.]+(Error|Exception|Interrupt)\b")
"""The line with which pytest reports an exception of a group."""
NOTHING_LEFT = 5
"""pytest's exit status when no test was selected."""
DONE, WRITE_TO, RUN, COMMIT = (f"PINYON_TEST_REPEAT_{name}" for name in ("DONE", "RESULTS", "RUN", "COMMIT"))
"""Environment variables that tell pytest the file of finished tests, the file for results, the run and the commit."""
BUSY = "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass\n"
"""A busy loop that ends with its parent, however that ends."""


@dataclass(frozen=True, slots=True)
class Result:
    run: int
    test: str
    outcome: str
    """``passed``, ``failed`` (in any phase) or ``skipped``."""
    seconds: float
    at: str
    """The time when the test ended, UTC, as ISO 8601."""
    commit: str
    """The tested commit, with a ``+`` if files had changed since."""
    why: str = ""
    """The reason of a skip, or what a failure's first error says."""


# ---------------------------------------------------------------- within pytest


class Writer:
    """A plugin of the workers' leader that appends a line for each test when its last phase has ended."""

    def __init__(self, path: Path, run: int, commit: str) -> None:
        self._path, self._run, self._commit = path, run, commit
        self._phases: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases.setdefault(report.nodeid, []).append(report)
        if report.when in ("setup", "call"):
            return  # the last phase is the teardown, or a report that the test's worker died
        phases = self._phases.pop(report.nodeid)
        outcome, why = outcome_of(phases)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        seconds = round(sum(each.duration for each in phases), 3)
        result = Result(self._run, report.nodeid, outcome, seconds, now, self._commit, why)
        append_line(self._path, json.dumps([getattr(result, name) for name in Result.__slots__]))


def outcome_of(phases: Sequence[pytest.TestReport]) -> tuple[str, str]:
    """Returns a test's outcome by the reports of its phases, and the reason."""
    for report in phases:
        if report.failed:
            text = str(report.longrepr).strip().splitlines() or [""]
            said = [line[1:].strip() for line in text if line.startswith("E  ")]
            said = said or [line.strip("| ") for line in text if ERROR_OF_GROUP.match(line)] or text[-1:]
            said = said[:SAID_LINES]
            return "failed", f"{report.when}: {' | '.join(said)[:400]}"
    for report in phases:
        if report.skipped:
            where = report.longrepr
            return "skipped", str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")
    return "passed", ""


def pytest_configure(config: pytest.Config) -> None:
    if WRITE_TO in os.environ and not hasattr(config, "workerinput"):
        writer = Writer(Path(os.environ[WRITE_TO]), int(os.environ[RUN]), os.environ[COMMIT])
        config.pluginmanager.register(writer, "repeat-writer")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that this run has done, the same in every worker, as the list stays unchanged meanwhile."""
    done = set(Path(os.environ[DONE]).read_text().splitlines()) if DONE in os.environ else set()
    left = [item for item in items if item.nodeid not in done]
    if len(left) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = left


# ---------------------------------------------------------------- around pytest


def append_line(path: Path, line: str) -> None:
    """Appends a line, after a newline where the last one was cut off."""
    with path.open("ab+") as file:
        cut_off = False
        if file.tell():
            file.seek(-1, os.SEEK_END)
            cut_off = file.read(1) != b"\n"
        file.write((b"\n" if cut_off else b"") + line.encode() + b"\n")


def read_results(path: Path) -> tuple[list[Result], set[int]]:
    """Returns all recorded results, and which runs are complete. A line that was cut off is ignored."""
    said = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            said.append(json.loads(line))
    return [Result(*each) for each in said if isinstance(each, list)], {each for each in said if isinstance(each, int)}


def table(results: Sequence[Result], runs: int) -> str:
    """Returns a Markdown table: a row for each run up to ``runs``, then each test that ever failed."""
    lines = [
        "| run | tests | passed | failed | skipped | from (UTC) | to | of commit | busiest test |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in range(1, runs + 1):
        of_run = [each for each in results if each.run == run]
        if not of_run:
            lines.append(f"| {run} | 0 | | | | not yet | | | |")
            continue
        came = Counter(each.outcome for each in of_run)
        commits = ", ".join(dict.fromkeys(each.commit for each in of_run))
        slowest = max(of_run, key=lambda each: each.seconds)
        begun, ended = (edge(each.at for each in of_run)[:16].replace("T", " ") for edge in (min, max))
        lines.append(
            f"| {run} | {len(of_run)} | {came['passed']} | {came['failed']} | {came['skipped']} | {begun} | {ended} "
            f"| {commits} | `{slowest.test.rpartition('/')[2]}` {slowest.seconds:.0f} s |"
        )
    failed = Counter(each.test for each in results if each.outcome == "failed")
    ran = Counter(each.test for each in results if each.outcome != "skipped")
    lines.append("")
    if not failed:
        lines.append("No test failed.")
    else:
        lines += ["| failed | of runs | test | the last time |", "|---|---|---|---|"]
        for test, times in sorted(failed.items(), key=lambda item: (-item[1], item[0])):
            last_time = next(e for e in reversed(results) if e.test == test and e.outcome == "failed")
            lines.append(
                f"| {times} | {ran[test]} | `{test}` | run {last_time.run}, {last_time.commit}: {last_time.why} |"
            )
    return "\n".join(lines)


def tested_commit() -> str:
    """Returns the short hash of the commit that is checked out, with a ``+`` if files have changed since."""

    def git(*arguments: str) -> str:
        ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        return ran.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short=8", "HEAD") or "unknown") + ("+" if changed else "")


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-S", "-c", BUSY, str(os.getpid())]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_once(run: int, results: Path, done: Iterable[str], arguments: Sequence[str]) -> int:
    """Runs pytest once without the tests that are ``done``; returns its exit status."""
    with tempfile.NamedTemporaryFile("w", prefix="pinyon-done-", suffix=".txt") as file:
        file.write("\n".join(sorted(done)))
        file.flush()
        told = {DONE: file.name, WRITE_TO: str(results), RUN: str(run), COMMIT: tested_commit()}
        command = [sys.executable, "-m", "pytest", "-p", "tests.repeat", "-n", "auto", "-q", *arguments]
        child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **told})
        try:
            return child.wait(timeout=RUN_S_MAX)
        except Terminated:
            child.send_signal(signal.SIGINT)
            await_end(child)
            raise
        except BaseException:  # Ctrl-C reaches pytest as well, which ends its workers
            await_end(child)
            raise
        finally:
            child.kill()
            child.wait()


class Terminated(KeyboardInterrupt):
    """The error raised when a signal ends this process alone, not its whole group as Ctrl-C does."""


def terminated(*_: object) -> None:
    raise Terminated


def await_end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=60)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every test ran as asked and never failed, 1 if one failed, 2 for bad arguments, 130 if stopped."""
    parser = argparse.ArgumentParser(
        prog="./dev test --repeat",
        description="Runs tests many times beside busy loops, goes on where it was, and says what ever failed.",
    )
    parser.add_argument("runs", type=int, metavar="N", help="how often each test runs")
    parser.add_argument("--loops", type=int, default=LOOPS, help="busy loops beside it (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="begin anew instead of going on where it was")
    parser.add_argument("--table", action="store_true", help="print the table of what ran so far, and run nothing")
    options, arguments = parser.parse_known_args(argv)
    if options.runs < 1 or options.loops < 0:
        parser.error("a number of runs is at least 1, of loops at least 0")

    name = hashlib.sha256(json.dumps([options.loops, arguments]).encode()).hexdigest()[:12]
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    print(f"repeat: {' '.join(arguments) or 'all tests'}, results in {path.relative_to(ROOT)}", file=sys.stderr)
    unfinished = False
    signal.signal(signal.SIGTERM, terminated)
    try:
        with busy_loops(0 if options.table else options.loops):
            for run in range(1, 1 if options.table else options.runs + 1):
                results, complete = read_results(path)
                if run in complete:
                    continue
                done = {each.test for each in results if each.run == run}
                print(f"repeat: run {run} of {options.runs}, {len(done)} tests of it are done", file=sys.stderr)
                status = run_once(run, path, done, arguments)
                if status not in (0, 1, NOTHING_LEFT):  # stopped, or pytest could not run at all
                    unfinished = True
                    break
                if not done and not any(each.run == run for each in read_results(path)[0]):
                    parser.error("no test is selected: folders of tests come first, options after them")
                append_line(path, str(run))
    except KeyboardInterrupt:
        unfinished = True
    results = [each for each in read_results(path)[0] if each.run <= options.runs]
    print(table(results, options.runs))
    if unfinished:
        print("repeat: stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    return int(any(each.outcome == "failed" for each in results))


if __name__ == "__main__":
    sys.exit(main())
