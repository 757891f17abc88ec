"""The simulation on copies of the product, each with a planted bug: ``python -m tests.vopr.planted [NAME ..]``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.planted_bugs import ROOT, Bug

SEEDS = 200
"""The seeds within which each bug is found."""
FIRST = 60_000
"""The first one: which seed finds a bug does not change from run to run."""
RUN_S_MAX = 600.0


def bugs() -> list[Bug]:
    return [Bug(**each) for each in tomllib.loads(Path(__file__).with_name("planted_bugs.toml").read_text())["bug"]]


def copied(to: Path, bug: Bug) -> None:
    """Makes a copy of links to what the simulation needs, with the bug in it."""
    for folder in ("src/pinyon", "services", "tests/vopr"):
        shutil.copytree(ROOT / folder, to / folder, copy_function=os.symlink)
    (to / "tests" / "store_integrity.py").symlink_to(ROOT / "tests" / "store_integrity.py")
    text = (ROOT / bug.file).read_text()
    (to / bug.file).unlink()
    (to / bug.file).write_text(text)
    bug.put_into(to)


def found(bug: Bug) -> str:
    """Returns what the first seed that fails says; empty if none does."""
    with tempfile.TemporaryDirectory(prefix="pinyon-vopr-") as folder:
        copied(Path(folder), bug)
        ran = subprocess.run(
            [sys.executable, "-m", "tests.vopr", "--seeds", str(SEEDS), "--first", str(FIRST)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder}/src:{folder}", "PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
    if ran.returncode not in (0, 1) or "seeds from" not in ran.stdout:
        raise RuntimeError(f"the simulation ended with {ran.returncode}:\n{ran.stdout[-3000:]}")
    return next((line for line in ran.stdout.splitlines() if " FAILED " in line), "")


def main(names: Sequence[str]) -> int:
    missed = 0
    for bug in bugs():
        if bug.name in names or not names:
            said = found(bug)
            missed += not said
            print(f"{bug.name}: {said or 'NOBODY found it'}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
