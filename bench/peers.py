"""Software of other projects for side-by-side runs, each in a virtual environment of its own, never in ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import progress

_HOME = Path(__file__).resolve().parent.parent / ".cache" / "bench"
_INSTALL_S = 300.0
_IMPORT_S = 60.0


class PeerUnavailable(Exception):
    """The peer cannot be installed or loaded here; the text says why."""


def peer_python(
    requirement: str,
    module: str,
    hint: str = "",
    home: Path = _HOME,
    also: Sequence[str] = (),
    *,
    alone: bool = False,
    beside: Path | None = None,
) -> Path:
    """Returns the interpreter of an environment that holds ``requirement`` (``name==version``), made on first use.

    ``module`` must import there, else the peer counts as unavailable; ``hint``, such as a system package that it needs,
    is then added to the reason. ``also`` are further requirements, of the program that asks the peer. ``alone`` leaves
    out all dependencies but ``also``. ``beside`` is another environment, whose packages are there too, untouched.
    Raises :class:`PeerUnavailable`."""
    folder = home / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    complete = folder / ".complete"
    if not complete.exists():
        progress(f"installing {requirement} into {folder} ...")
        _call([sys.executable, "-m", "venv", "--clear", str(folder)], _INSTALL_S, "no environment for it")
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
            *(("--no-deps",) if alone else ()),
        ]
        _call([*pip, requirement, *also], _INSTALL_S, f"cannot install {requirement}")
        if beside is not None:
            (packages,), (others,) = (each.glob("lib/python3*/site-packages") for each in (folder, beside))
            (packages / "beside.pth").write_text(f"{others}\n")
        complete.touch()
    _call([str(python), "-c", f"import {module}"], _IMPORT_S, f"{requirement} does not load{hint and f' ({hint})'}")
    return python


def _call(command: list[str], timeout_s: float, failure: str) -> None:
    """Runs a command to its end. Raises :class:`PeerUnavailable`, with the last line it wrote, when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{failure}: {error}") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise PeerUnavailable(f"{failure}: {lines[-1]}")
