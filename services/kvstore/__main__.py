"""``python -m services.kvstore``."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.runtime.service import run_service
from pinyon.runtime.settings import load_settings
from services.kvstore.app import run
from services.kvstore.settings import KvStoreSettings


def main(argv: Sequence[str] | None = None) -> None:
    run_service(load_settings(KvStoreSettings, argv), run)


if __name__ == "__main__":
    main()
