"""The command ``python -m services.lb``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from pinyon.runtime.process import spare_collector


def main(argv: Sequence[str] | None = None) -> None:
    spare_collector()
    from pinyon.runtime.service import run_service
    from pinyon.runtime.setting_sources import load_settings
    from services.lb.settings import LbSettings

    settings = load_settings(LbSettings, argv)
    if settings.processes > 1:
        # The launcher starts this program that many times. Services do not import it, so it is looked up by name, as
        # the launcher does with this program.
        import_module("launch.balancers.group").run(settings, sys.argv[1:] if argv is None else argv)
    else:
        from services.lb.app import run

        run_service(settings, run)


if __name__ == "__main__":
    main()
