"""The configuration that all folders of tests share."""

from __future__ import annotations

import gc
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import pinyon
from tests.long import usually
from tests.ports import free_ports  # noqa: F401 - a fixture
from tests.process_hooks import every_process_is_reaped, pytest_runtest_makereport, pytest_runtest_teardown  # noqa: F401 - hooks and a fixture
from tests.processes import own_all
from tests.side_by_side import (  # noqa: F401 - hooks
    pytest_collection_modifyitems,
    pytest_configure_node,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_testnodedown,
    pytest_unconfigure,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
)

if find_spec("librt"):  # the virtual machine of tests/rdma has few packages, and no test there chooses a policy
    import pinyon_lab.policies.names  # noqa: F401 - tests choose among them, too

ROOT = Path(__file__).resolve().parent.parent

# Child processes find the package where it was found here, and the services wherever the tests are started from.
os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(pinyon.__file__).resolve().parent.parent), str(ROOT)))
# As in a worker: one BLAS thread per process, set before NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# gRPC's core logs every GOAWAY to standard error, from threads that pytest's capture does not cover.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

own_all()
# A shell starts background jobs with SIGINT ignored, and every child process of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine is shared, so examples have no deadline. A failing example prints how to reproduce it.
settings.register_profile(
    "pinyon",
    max_examples=usually(20, long=100),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pinyon")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freezes the collected tests, half a million objects that the garbage collector need not walk again and again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"OPENBLAS_NUM_THREADS={os.environ['OPENBLAS_NUM_THREADS']}"
