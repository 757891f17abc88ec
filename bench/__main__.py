"""``python -m bench [NAME] [--quick] [--python]``: run one benchmark or all. All write ``bench/results/*.json`` and a
table. They run compiled, as the container image does, where there is a C compiler; ``--python``: as the sources are.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.compiled import environment

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LIMIT_S = 1800
PYTHON = "--python"
NOT_BENCHMARKS = {"compiled", "load", "peers", "pictures", "report"}
"""Neither is a name with an underscore: the part of a benchmark in a file of its own."""


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS and "_" not in path.stem)


def run(name: str, arguments: list[str], variables: dict[str, str]) -> tuple[int, str]:
    """Exit status and the last line of stdout; everything else goes through to the terminal."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"bench.{name}", *arguments],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
    )
    assert process.stdout is not None
    last, interrupted = "", False
    started = time.monotonic()
    while True:
        try:
            for line in process.stdout:
                last = line.strip() or last
                if time.monotonic() - started > LIMIT_S:
                    process.kill()
            return process.wait(), last
        except KeyboardInterrupt:
            if interrupted:
                process.kill()
                raise
            interrupted = True  # it has heard of that, too, and may still say what it has


def main(argv: list[str]) -> int:
    console = Console(stderr=True)
    wanted = [word for word in argv if not word.startswith("-")]
    name = wanted[0] if wanted and wanted[0] in names() else None
    if argv and not argv[0].startswith("-") and name is None:
        console.print(f"no benchmark {argv[0]}; there are: {', '.join(names())}", style="red")
        return 2
    if {"-h", "--help"} & set(argv):
        if name is None:
            print(f"./dev bench [NAME] [--quick] [--python]: {', '.join(names())}.")
            print("Compiled, as the image is, unless --python. NAME --help has the options of one.")
            return 0
        command = [sys.executable, "-m", f"bench.{name}", "--help"]
        return subprocess.call(command, cwd=HERE.parent, env=environment(python=True))
    variables = environment(python=PYTHON in argv)
    table = Table(title="Aims", title_justify="left")
    for column in ("benchmark", "aim", "target", "measured", "met"):
        table.add_column(column)
    status = 0
    for each in [name] if name else names():
        code, last = run(each, [word for word in argv if word not in (name, PYTHON)], variables)
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
