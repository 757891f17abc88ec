"""What every ring of tests shares."""

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
from tests.process_hooks import (  # noqa: F401 - hooks and a fixture
    every_process_is_reaped,
    pytest_runtest_makereport,
    pytest_runtest_teardown,
)
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

# Child processes find the package, as it is found here, and the services wherever the tests are started from.
os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(pinyon.__file__).resolve().parent.parent), str(ROOT)))
# As in a worker: one BLAS thread per process, set before NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# gRPC's core tells of every GOAWAY on standard error, from threads that no test's capture catches.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

own_all()
# Who runs the tests in the background of a shell ignores SIGINT, and all that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine is shared: no deadline per example. A failing example prints how to reproduce it.
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
    """The collected tests stay: half a million objects that the collector need not walk again and again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"OPENBLAS_NUM_THREADS={os.environ['OPENBLAS_NUM_THREADS']}"
