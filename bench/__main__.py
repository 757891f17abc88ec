"""The command ``python -m bench [NAME] [--quick] [--python]``, which runs one benchmark or all.

All together write ``bench/results/*.json``; a table shows the aims. They run compiled, as the container image does,
where there is a C compiler; ``--python`` runs the sources as they are."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.compiled import environment
from bench.report import ARGUMENTS_ONLY
from pinyon.core.near import did_you_mean

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LIMIT_S = 3600
"""The time after which a benchmark is ended; the longest one takes some 45 minutes."""
CLOSE_S = 15
"""The time in which a benchmark that was interrupted twice must end its processes."""
PYTHON = "--python"
NOT_BENCHMARKS = {"compiled", "load", "peers", "pictures", "report"}
"""The modules that are no benchmarks, beside names with an underscore: parts of a benchmark in files of their own."""


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Terminated(KeyboardInterrupt):
    """An interruption by SIGTERM, of which the benchmark has not heard, unlike of Ctrl-C."""


def _terminated(number: int, frame: object) -> None:
    raise Terminated


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS and "_" not in path.stem)


def run(name: str, arguments: list[str], variables: dict[str, str]) -> tuple[int, str]:
    """Runs a benchmark; returns its exit status and its last line of stdout. Its stderr goes to the terminal."""
    parent = os.getpid()

    def end_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)

    process = subprocess.Popen(
        [sys.executable, "-m", f"bench.{name}", *arguments],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
        preexec_fn=end_with_parent,  # safe: this process has one thread
    )
    assert process.stdout is not None
    last, interrupted, terminated = "", False, False
    started = time.monotonic()
    while True:
        try:
            for line in process.stdout:
                last = line.strip() or last
                if time.monotonic() - started > LIMIT_S:
                    process.kill()
            code = process.wait()
            if terminated:
                raise SystemExit(128 + signal.SIGTERM)
            return code, last
        except KeyboardInterrupt as stop:
            if interrupted:
                try:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(CLOSE_S)
                finally:
                    process.kill()
                raise
            interrupted = True  # the benchmark was interrupted, too, and may still report its results
            terminated = isinstance(stop, Terminated)
            if terminated:
                deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in a background job of a script
                process.send_signal(signal.SIGTERM if deaf else signal.SIGINT)


def main(argv: list[str]) -> int:
    console = Console(stderr=True)
    wanted = [word for word in argv if not word.startswith("-")]
    name = wanted[0] if wanted and wanted[0] in names() else None
    if argv and not argv[0].startswith("-") and name is None:
        hint = did_you_mean(argv[0], names())
        console.print(f"no benchmark {argv[0]}{hint}; there are: {', '.join(names())}", style="red")
        return 2
    if {"-h", "--help"} & set(argv):
        if name is None:
            print(f"./dev bench [NAME] [--quick] [--python]: {', '.join(names())}.")
            print("Compiled, as the image is, unless --python. NAME --help has the options of one.")
            return 0
        command = [sys.executable, "-m", f"bench.{name}", "--help"]
        return subprocess.call(command, cwd=HERE.parent, env=environment(python=True))
    arguments = [word for word in argv if word not in (name, PYTHON)]
    for each in [name] if name else names():  # arguments are checked before anything is compiled, which takes minutes
        command = [sys.executable, "-m", f"bench.{each}", *arguments]
        if code := subprocess.call(command, cwd=HERE.parent, env={**environment(python=True), ARGUMENTS_ONLY: "1"}):
            return code
    signal.signal(signal.SIGTERM, _terminated)
    variables = environment(python=PYTHON in argv)
    variables.pop(ARGUMENTS_ONLY, None)
    table = Table(title="Aims", title_justify="left")
    for column in ("benchmark", "aim", "target", "measured", "met"):
        table.add_column(column)
    status = 0
    for each in [name] if name else names():
        code, last = run(each, arguments, variables)
        try:
            result = json.loads(last)
        except ValueError:
            console.print(f"{each}: exit status {code}, and its last line is not JSON", style="red")
            status = 1
            continue
        status = status or code
        if name:
            sys.stdout.write(last + "\n")
        else:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{each}.json").write_text(json.dumps(result, indent=2) + "\n")
        for aim in result["aims"]:
            mark = "[green]yes" if aim["met"] else "[red]no"
            measured = "–" if aim["measured"] is None else f"{aim['measured']:g}"
            table.add_row(each, aim["name"], f"{aim['target']:g}", measured, mark)
    console.print(table)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
