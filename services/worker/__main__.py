"""The command ``python -m services.worker``: see ``--help``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pinyon.runtime.process import spare_collector


def main(argv: Sequence[str] | None = None) -> None:
    # BLAS gets one thread, before NumPy is imported. More threads would split a product differently from call to call,
    # and starve the other processes of the machine.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    spare_collector()
    from pinyon.runtime.service import run_service
    from pinyon.runtime.setting_sources import load_settings
    from services.worker.app import main as serve
    from services.worker.settings import WorkerSettings

    run_service(load_settings(WorkerSettings, argv), serve)


if __name__ == "__main__":
    main()
