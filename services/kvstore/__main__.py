"""The program of a store node: ``python -m services.kvstore``."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.runtime.process import spare_collector


def main(argv: Sequence[str] | None = None) -> None:
    spare_collector()
    from pinyon.runtime.service import run_service
    from pinyon.runtime.setting_sources import load_settings
    from services.kvstore.app import run
    from services.kvstore.settings import KvStoreSettings

    run_service(load_settings(KvStoreSettings, argv), run)


if __name__ == "__main__":
    main()
