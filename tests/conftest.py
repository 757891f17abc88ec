"""What every ring of tests shares."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Child processes find the package and the services wherever the tests are started from.
os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
# As in a worker: one BLAS thread per process, set before NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The machine is shared: no deadline per example. A failing example prints how to reproduce it.
settings.register_profile("pinyon", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pinyon")


def pytest_report_header() -> str:
    return f"OPENBLAS_NUM_THREADS={os.environ['OPENBLAS_NUM_THREADS']}"
