"""``python -m services.lb``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from pinyon.runtime.process import spare_collector


def main(argv: Sequence[str] | None = None) -> None:
    spare_collector()
    from pinyon.runtime.service import run_service
    from pinyon.runtime.settings import load_settings
    from services.lb.settings import LbSettings

    settings = load_settings(LbSettings, argv)
    if settings.processes > 1:
        from prometheus_client import CollectorRegistry

        from services.lb.parent import run_processes

        # Of their parent there is nothing to show: what metrics there are is for its processes to say.
        arguments = sys.argv[1:] if argv is None else argv
        run_service(settings, partial(run_processes, arguments=arguments), CollectorRegistry)
    else:
        from services.lb.app import run

        run_service(settings, run)


if __name__ == "__main__":
    main()
