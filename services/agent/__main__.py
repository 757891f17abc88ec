"""The program of an agent: ``python -m services.agent``."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.runtime.process import spare_collector


def main(argv: Sequence[str] | None = None) -> None:
    spare_collector()
    from pinyon.runtime.service import run_service
    from pinyon.runtime.setting_sources import load_settings
    from services.agent.app import run
    from services.agent.settings import AgentSettings

    run_service(load_settings(AgentSettings, argv), run)


if __name__ == "__main__":
    main()
