"""The NIXL transport on the real NIXL: skipped where that is not there (``./dev test nixl`` fetches it)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FETCHED = Path(__file__).resolve().parents[2] / ".cache" / "nixl"
"""By ``tools/nixl_wheel.sh``: for tests only, so not in the environment."""
if FETCHED.is_dir() and str(FETCHED) not in sys.path:
    sys.path.append(str(FETCHED))


@pytest.fixture(autouse=True)
def _nixl_is_there() -> None:
    from pinyon.transfer.transports.nixl.agent import nixl_available

    reason = nixl_available()
    if reason is not None:
        pytest.skip(reason)
