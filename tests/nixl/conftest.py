"""The NIXL transport on the real NIXL, by ``./dev test nixl``, which fetches it; otherwise skipped.

The tests run in processes of their own: NIXL's library ends a process that has loaded protoc's (``grpc_tools``), as
other tests do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FETCHED = Path(__file__).resolve().parents[2] / ".cache" / "nixl"
"""The folder of ``tools/nixl_wheel.sh``: for tests only, so not in the environment."""
OWN = "PINYON_TEST_NIXL"
"""The environment variable that is set where no other tests run."""
if os.environ.get(OWN) and FETCHED.is_dir() and str(FETCHED) not in sys.path:
    sys.path.append(str(FETCHED))


@pytest.fixture(autouse=True)
def _nixl_is_there() -> None:
    if not os.environ.get(OWN):
        pytest.skip("./dev test nixl runs these, in processes of their own")
    from pinyon.transfer.transports.nixl.agent import NixlError, _nixl

    try:
        _nixl()
    except NixlError as error:
        pytest.skip(str(error))
