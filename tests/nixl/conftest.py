"""The NIXL transport on the real NIXL, by ``./dev test nixl``, which fetches it: in processes that run nothing else,
since NIXL's library ends one that has loaded protoc's (``grpc_tools``), as other tests do. Else skipped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FETCHED = Path(__file__).resolve().parents[2] / ".cache" / "nixl"
"""By ``tools/nixl_wheel.sh``: for tests only, so not in the environment."""
OWN = "PINYON_TEST_NIXL"
"""Set where nothing else is run."""
if os.environ.get(OWN) and FETCHED.is_dir() and str(FETCHED) not in sys.path:
    sys.path.append(str(FETCHED))


@pytest.fixture(autouse=True)
def _nixl_is_there() -> None:
    if not os.environ.get(OWN):
        pytest.skip("./dev test nixl runs these, in processes of their own")
    from pinyon.transfer.transports.nixl.agent import nixl_available

    reason = nixl_available()
    if reason is not None:
        pytest.skip(reason)
