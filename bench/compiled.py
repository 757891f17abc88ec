"""The tree that ``./dev bench`` runs from: ``build/compiled``, as the container image and ``./dev build`` have it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench.report import progress
from tools.compiled_tree import Lacking, is_current, make_tree

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "compiled"


def environment(*, python: bool) -> dict[str, str]:
    """Returns the environment of a benchmark and its services, which import ``pinyon`` and ``services`` from one tree.

    The tree is made first where it is missing or not of these sources, which takes minutes. Where that fails, stderr
    says so, and the sources run as they are, as with ``python``."""
    inherited = dict(os.environ)
    if not python:
        try:
            if not is_current(TREE, services=ROOT / "services"):
                progress(f"compiling into {TREE}, as the image is: some minutes, once (--python: not) ...")
                make_tree(TREE, services=ROOT / "services")
            # Without PYTHONSAFEPATH, the working folder, a checkout, would come before the tree.
            return {**inherited, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join((str(TREE), str(ROOT)))}
        except (Lacking, subprocess.CalledProcessError) as error:
            progress(f"not compiled, so slower than the image is: {error}")
    return {**inherited, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
