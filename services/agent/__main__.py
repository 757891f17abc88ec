"""The program of an agent: ``python -m services.agent``."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.runtime.process import spare_collector


def main(argv: Sequence[str] | None = None) -> None:
    spare_collector()
    from pinyon.runtime.service import run_service
    from pinyon.runtime.setting_sources import load_settings
    from services.agent.settings import AgentSettings

    settings = load_settings(AgentSettings, argv)
    try:
        from services.agent.app import run
    except ModuleNotFoundError as error:
        raise SystemExit(f"pinyon agent: {error}; pip install 'pinyon[agent]' brings it") from None
    run_service(settings, run)


if __name__ == "__main__":
    main()
