"""What pytest-xdist may run side by side, and what begins first.

A file is run by one worker from its first test to its last, so that what its fixtures start is started once. Files that
share the session's cluster count as one. What takes longest begins first, so that the end of a run is small pieces.
"""

from __future__ import annotations

from typing import Any

__all__ = ["make_scheduler", "rank", "unit_of", "worker_count"]

CLUSTER = "tests/cluster/shared"
TOGETHER = {
    f"tests/cluster/test_cluster_{name}.py": CLUSTER for name in ("cancel", "cli", "exactness", "openai", "reflection")
}
"""Files that use the session's fixture ``cluster``."""
FIRST = ("tests/rdma/", "tests/docker/", "tests/cluster/", "tests/integration/", "tests/property/", "tests/unit/")
"""Folders in the order in which their units are handed out, and below:"""
LONGEST = ("tests/cluster/test_cluster_faults.py", "tests/integration/test_transfer_chaos.py")


def unit_of(nodeid: str) -> str:
    """What runs on one worker, in order."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file, file)


def rank(nodeid: str) -> tuple[int, bool, str]:
    """Sorts tests; those of one unit stay together and, in a stable sort, in order."""
    unit = unit_of(nodeid)
    folder = next((number for number, name in enumerate(FIRST) if unit.startswith(name)), len(FIRST))
    return folder, unit not in LONGEST, unit


def worker_count(cpus: int) -> int:
    """Twice the processors: half of what the larger tests take is waiting for other processes. At most eight."""
    return min(max(2, 2 * cpus), 8)


def make_scheduler(config: Any, log: Any) -> Any:
    """Hands out units in the order of collection; whoever is idle takes the next."""
    from xdist.scheduler import LoadScopeScheduling  # the guest of tests/rdma has none

    class UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return UnitScheduling(config, log)
