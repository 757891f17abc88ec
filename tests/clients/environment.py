"""Environments for clients, made once with pip and kept under ``.cache/clients``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from launch.process import ROOT
from tests.clients.child import TooLate, run_child

ENVIRONMENTS = ROOT / ".cache" / "clients"
NO_INDEX = re.compile(
    r"from versions: none|connection broken|max retries|read timed out|name resolution", re.IGNORECASE
)
"""Errors of pip which mean that no index was reached, or none that has the package."""


class NotInstalled(Exception):
    """The error when pip could not install from an index that answers: the requirement is wrong."""


class NotHad(NotInstalled):
    """The error when no index has the package, or the index was too slow."""


@dataclass(frozen=True)
class Step:
    """One call of ``pip install``.

    ``alone``: installs without dependencies. ``needs_of``: installs not ``requirements`` but the dependencies of this
    package, which a step ``alone`` has installed, except the packages ``without``."""

    requirements: tuple[str, ...] = ()
    alone: bool = False
    needs_of: str = ""
    without: tuple[str, ...] = ()

    def arguments(self, python: Path) -> list[str]:
        if not self.needs_of:
            return [*self.requirements, *(["--no-deps"] if self.alone else [])]
        program = f"import importlib.metadata, json; print(json.dumps(importlib.metadata.requires({self.needs_of!r})))"
        told = subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True)
        needs = [Requirement(line) for line in json.loads(told.stdout) or ()]
        here = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        return [f"{need.name}{_extras(need)}{need.specifier}" for need in here if need.name not in self.without]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


@dataclass(frozen=True)
class Environment:
    """An environment: a folder ``name`` below ``.cache/clients``, and its ``steps`` in order."""

    name: str
    steps: tuple[Step, ...]

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    def make(self, limit_s: float, say: Callable[[str], None]) -> None:
        """Makes the environment unless it exists. Raises :class:`NotInstalled` and :class:`NotHad`, with one line."""
        stamp, done = f"{sys.version_info[:2]} {self.steps}", self.folder / "installed"
        if done.is_file() and done.read_text() == stamp:
            return
        log = self.folder / "pip.log"
        began_s = time.monotonic()
        say(f"{self.name}: installing into {self.folder.relative_to(ROOT)} ...")

        def tick(_: float) -> None:
            said = log.read_text(errors="replace")
            fetched = len(re.findall(r"^ *(?:Downloading|Processing|Using cached) ", said, re.MULTILINE))
            say(f"{self.name}: {time.monotonic() - began_s:.0f} s, {fetched} files fetched")

        # This interpreter's pip serves all environments, so none needs a copy.
        venv.create(self.folder, with_pip=False, clear=True)
        python = self.programs / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-input", "--no-compile"]
        pip += ["--progress-bar", "off", "--disable-pip-version-check"]
        for step in self.steps:
            left_s = limit_s - (time.monotonic() - began_s)
            try:
                status = run_child([*pip, *step.arguments(python)], log, left_s, tick=tick)
            except TooLate:
                raise NotHad(
                    f"not installed within the {limit_s:.0f} s left for it ({log.relative_to(ROOT)})"
                ) from None
            if status:
                said = log.read_text(errors="replace")
                wrong = [line for line in said.splitlines() if line.lstrip().startswith("ERROR")] or said.splitlines()
                kind = NotHad if NO_INDEX.search(said) else NotInstalled
                raise kind(f"not installed: {' '.join(wrong[:1])} ({log.relative_to(ROOT)})")
        done.write_text(stamp)
