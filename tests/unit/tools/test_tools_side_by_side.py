"""The tests that begin first, and the worker that each runs on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.side_by_side import LONGEST, TOGETHER, left_by, next_unit, pytest_xdist_make_scheduler, rank, unit_of

ROOT = Path(__file__).resolve().parents[3]
WAITS, COMPUTES = "tests/cluster/test_x.py", "tests/unit/core/test_y.py"


@pytest.mark.parametrize("name", sorted({*LONGEST, *TOGETHER} - set(TOGETHER.values())))
def test_what_is_named_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_every_suite_runs_but_two_that_are_named(pytestconfig: pytest.Config) -> None:
    suites = {f"tests/{path.parent.relative_to(ROOT / 'tests').parts[0]}" for path in ROOT.glob("tests/*/**/test_*.py")}
    assert {*pytestconfig.getini("testpaths"), "tests/reproduction", "tests/vllm"} == suites


@pytest.mark.parametrize("queue", [[WAITS, COMPUTES], [COMPUTES, WAITS]])
def test_every_other_worker_begins_with_what_waits(queue: list[str]) -> None:
    assert [next_unit(queue, worker) for worker in range(4)] == [WAITS, COMPUTES] * 2


@pytest.mark.parametrize("unit", [WAITS, COMPUTES])
def test_whoever_is_idle_takes_what_is_left_in_order(unit: str) -> None:
    queue = [unit, f"{unit}x"]
    assert [next_unit(queue, worker) for worker in range(4)] == [unit] * 4


def test_the_longest_begin_first_and_a_unit_stays_together() -> None:
    shared = [f"{name}::test_{number}" for number, name in enumerate(TOGETHER) if TOGETHER[name].startswith("tests/cl")]
    others = [f"{WAITS}::test_a", f"{COMPUTES}::test_b", f"{LONGEST[0]}::test_c"]
    ordered = sorted([*others[:2], *shared, *others[2:]], key=rank)
    assert ordered == [others[2], *shared, *others[:2]]
    assert len({unit_of(each) for each in shared}) == 1


def test_files_of_real_engines_are_one_unit() -> None:
    files = (ROOT / "tests" / "vllm").glob("test_*.py")
    assert len({unit_of(f"{path.relative_to(ROOT)}::test") for path in files}) == 1


def test_what_a_dead_worker_left_is_run_but_what_killed_it() -> None:
    done, begun, waits = {"a": True}, {"b": True, "c": False, "d": False}, {"e": False}
    left, ended_by = left_by({"1": done, "2": begun, "3": waits})
    assert (left, ended_by) == ({"2": {"b": True, "c": True, "d": False}, "3": waits}, "c")
    assert left_by({"1": done}) == ({}, None)
    assert left_by({"1": {"a": False}}) == ({}, "a"), "it was the last of all"


class Worker:
    """A worker as the scheduler sees those of pytest-xdist: it is told to run tests, and to end."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.asked: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert indices, "it would report nothing, and be given nothing more"
        self.asked += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_worker_that_dies_holds_up_nobody(pytestconfig: pytest.Config) -> None:
    """The first worker has ended many units when it dies; the others run the rest, each test once."""
    option = SimpleNamespace(tx=["2*popen"], loadscopereorder=False)
    config = SimpleNamespace(option=option, getvalue=lambda name: getattr(option, name), hook=pytestconfig.hook)
    scheduler = pytest_xdist_make_scheduler(config, None)
    tests = [f"tests/unit/x/test_{file}.py::test_{number}" for file in range(9) for number in range(3)]
    first, second = Worker("gw0"), Worker("gw1")
    for worker in (first, second):
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    run: list[int] = []

    def runs(worker: Worker) -> None:
        """Runs a worker's next test while the worker knows of another test that follows."""
        while worker.asked and (len(worker.asked) > 1 or worker.shutting_down):
            run.append(worker.asked.pop(0))
            scheduler.mark_test_complete(worker, run[-1])

    while len(run) < 16:
        run.append(first.asked.pop(0))
        scheduler.mark_test_complete(first, run[-1])
    died_at = first.asked[0]
    assert scheduler.remove_node(first) == tests[died_at]
    third = Worker("gw2")
    scheduler.add_node(third)
    scheduler.add_node_collection(third, tests)
    scheduler.schedule()
    for _ in range(2):
        runs(second)
        runs(third)
    assert sorted([*run, died_at]) == list(range(len(tests)))
    assert not scheduler.has_pending
