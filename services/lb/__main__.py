"""``python -m services.lb``."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.runtime.process import spare_collector


def main(argv: Sequence[str] | None = None) -> None:
    spare_collector()
    from pinyon.runtime.service import run_service
    from pinyon.runtime.settings import load_settings
    from services.lb.app import run
    from services.lb.settings import LbSettings

    run_service(load_settings(LbSettings, argv), run)


if __name__ == "__main__":
    main()
