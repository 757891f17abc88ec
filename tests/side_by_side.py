"""The order in which pytest-xdist runs tests, and how all workers stop when a run has to end.

One worker runs a file from its first test to its last, so that its fixtures start their processes once. Files that
share the session's cluster count as one unit. The longest units begin first, so that a run ends with short ones. Every
other worker begins with tests that mostly wait for processes, the rest with those that compute. Together they keep the
processors busy, and at most half of the workers have a cluster at a time.

The hooks take effect through ``conftest.py``. The guest of ``tests/rdma`` runs without pytest-xdist, and so without
them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

CLUSTER = "tests/cluster/shared"
TOGETHER = {
    f"tests/cluster/test_cluster_{name}.py": CLUSTER
    for name in ("cancel", "cli", "exactness", "explain", "openai", "record", "reflection", "sharing")
}
"""Files that use the session's fixture ``cluster``."""
MACHINES = "tests/rdma/machines"
TOGETHER |= dict.fromkeys(("tests/docker/test_docker_compose.py", "tests/rdma/test_rdma_guest.py"), MACHINES)
"""Files that would each take both processors for minutes; they run one after the other, beside the rest."""
ENGINES = "tests/vllm/"
"""A folder whose files each start several engines of a GB: one after the other."""
WAITING = ("tests/rdma/", "tests/cluster/", "tests/integration/")
"""Folders whose tests wait for processes most of the time."""
FIRST = (*WAITING, "tests/simulation/", "tests/property/", "tests/reproduction/", "tests/unit/")
"""Folders in the order in which their units are handed out, and below, the files that come first in their folder."""
LONGEST = (
    "tests/cluster/test_cluster_faults.py",
    CLUSTER,
    "tests/cluster/test_cluster_under_fire.py",
    "tests/cluster/test_cluster_hostile.py",
    "tests/cluster/test_regions_faults.py",
    "tests/cluster/test_cluster_restarts.py",
    "tests/integration/test_transfer_multi_nic.py",
    "tests/integration/test_worker_exactness.py",
    "tests/integration/test_transfer_chaos.py",
    "tests/simulation/test_simulation_four_instances.py",
    "tests/simulation/test_simulation_thrash.py",
    "tests/property/test_placement_index_model.py",
    "tests/property/test_eviction_reuse_hazard.py",
    "tests/property/test_engine_invariance.py",
    "tests/unit/tools/test_tools_compiled.py",
    "tests/reproduction/test_reproduction_figures.py",
    "tests/unit/transfer/test_transfer_conformance.py",
    "tests/unit/tools/test_tools_dev.py",
)
STOP = pytest.StashKey[Path]()


def unit_of(nodeid: str) -> str:
    """Returns the unit of a test: the tests that run on one worker, in order."""
    file = nodeid.partition("::")[0]
    return ENGINES if file.startswith(ENGINES) else TOGETHER.get(file, file)


def rank(nodeid: str) -> tuple[int, int, str]:
    """Returns a sort key; tests of one unit stay together and, in a stable sort, in order."""
    unit = unit_of(nodeid)
    folder = next((number for number, name in enumerate(FIRST) if unit.startswith(name)), len(FIRST))
    return folder, LONGEST.index(unit) if unit in LONGEST else len(LONGEST), unit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Returns twice the number of processors, at most eight, because workers wait for half of their time.

    The limit is there because each worker first imports and collects everything."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return min(2 * len(os.sched_getaffinity(0)), 8)


def next_unit(units: Iterable[str], worker: int) -> str:
    """Returns the first unit of the kind that this worker prefers, else the first, in the order of ``rank``."""
    queue = list(units)
    wanted = worker % 2 == 0
    return next((unit for unit in queue if unit.startswith(WAITING) is wanted), queue[0])


def left_by(work: dict[str, dict[str, bool]]) -> tuple[dict[str, dict[str, bool]], str | None]:
    """Returns what other workers must run of an ended worker's units, and the test during which it ended.

    ``work`` maps each unit to its tests and whether each is done. The test that ended the worker is not run again. A
    worker given only finished units, as pytest-xdist would do, reports nothing and gets no more, so the run never ends.
    """
    ended_by = next((test for tests in work.values() for test, done in tests.items() if not done), None)
    left = {unit: {test: done or test == ended_by for test, done in tests.items()} for unit, tests in work.items()}
    return {unit: tests for unit, tests in left.items() if not all(tests.values())}, ended_by


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out units in the order of collection, of each worker's kind first; an idle worker takes the next."""
    from xdist.scheduler import LoadScopeScheduling

    class UnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            # A worker takes the first unit of the queue.
            self.workqueue.move_to_end(next_unit(self.workqueue, int(node.gateway.id.removeprefix("gw"))), last=False)
            super()._assign_work_unit(node)

        def remove_node(self, node: Any) -> str | None:
            left, ended_by = left_by(self.assigned_work.pop(node))
            self.workqueue.update(left)
            for other in self.assigned_work:
                self._reschedule(other)
            return ended_by

    config.option.loadscopereorder = False
    return UnitScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Reports a worker that ends before it is told to as a failure, even when all of its tests had passed."""
    if error is None:
        return
    name = f"worker {node.gateway.id}"
    said = pytest.TestReport(name, (name, None, name), {}, "failed", f"{name} ended: {error}", "teardown")
    said.node = node
    node.config.hook.pytest_runtest_logreport(report=said)


# -- With -x a worker would run its current file to the end although the session is over. This file tells it to stop.


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    stash = node.config.stash
    if STOP not in stash:
        stash[STOP] = Path(tempfile.mkdtemp(prefix="pinyon-tests-"), "stop")
    node.workerinput["stop"] = str(stash[STOP])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (session.shouldfail or session.shouldstop) and (stop := stop_file(session.config)) is not None:
        stop.touch()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (stop := config.stash.get(STOP, None)) is not None:
        stop.unlink(missing_ok=True)
        stop.parent.rmdir()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    stop = stop_file(item.config)
    if stop is None or not stop.exists():
        return None
    item.session.shouldstop = "another worker's test ended the session"
    return True


def stop_file(config: pytest.Config) -> Path | None:
    """Returns the file that tells this worker to stop; None without pytest-xdist and in the workers' leader."""
    name = getattr(config, "workerinput", {}).get("stop")
    return None if name is None else Path(name)
