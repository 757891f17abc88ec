"""Requests that grow in a pool too small for them: all complete, the first one without interruption."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinyon.batching import Fcfs, StepLimits, StepScheduler
from pinyon.batching.fcfs import PATIENCE_S
from pinyon.batching.policy import BatchRequest
from pinyon.decisions import Admission, make_room
from pinyon.eviction import Lru
from pinyon.paging import BlockPool, LeaseTable, Reservations
from tests.worker_integrity import check_admission

BLOCK = 4
BLOCKS = 8
STEP_S = 0.05


class Machine:
    """One instance whose prompts are computed in no time; ``left`` has the tokens still to generate, by number."""

    def __init__(self, max_batch: int, headroom: int) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(BLOCKS, Lru())
        self.reservations = Reservations(self.pool, LeaseTable())
        self.admission = Admission(Fcfs, self.pool, self.reservations, 2 * max_batch, headroom)
        self.steps = StepScheduler(StepLimits(max_batch, 64, 64, BLOCK))
        self.tokens: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.preempted: list[int] = []

    def ask(self, number: int) -> None:
        blocks = -(-(self.tokens[number] + (self.left[number] > 1)) // BLOCK)
        self.admission.enqueue(BatchRequest(number, self.tokens[number], blocks))

    def grow(self, number: int, count: int) -> list[int] | None:
        return self.admission.grow(number, count, self.now_s)

    def give_way(self, number: int, table: list[int]) -> None:
        self.admission.end(number)
        self.reservations.release(table, self.now_s)

    def settle(self) -> None:
        for number, reservation, _ in self.admission.admit(self.now_s):
            self.tables[number] = reservation.table
            self.sampled(number)
            if number in self.left:
                self.steps.add_decode(number, self.tokens[number] - 1, len(reservation.table))

    def sampled(self, number: int) -> None:
        self.tokens[number] += 1
        self.left[number] -= 1
        if not self.left[number]:
            del self.left[number]
            self.steps.remove_decode(number)
            self.give_way(number, self.tables.pop(number))

    def step(self) -> None:
        self.steps.fill()
        gave_way = make_room(self.steps, self.admission, self, self.tables.__getitem__)
        self.preempted += gave_way
        for number in gave_way:
            del self.tables[number]
            self.ask(number)
        self.settle()
        self.steps.fill()
        plan = self.steps.decide(self.now_s) if not self.steps.growth() else None
        self.now_s += STEP_S
        if plan is not None:
            for number in plan.decodes:
                assert len(self.tables[number]) * BLOCK >= self.tokens[number], "a token without room"
            for number in self.steps.fold(plan).decodes:
                self.sampled(number)


def first_gets_on(machine: Machine) -> None:
    """Runs a step, in which any request but the first may give way."""
    first, before = min(machine.left, default=-1), len(machine.preempted)
    machine.step()
    assert first not in machine.preempted[before:], "the first one gave way"


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, BLOCKS * BLOCK - 2), st.integers(1, 30)).filter(
            lambda ask: sum(ask) <= BLOCKS * BLOCK
        ),
        min_size=1,
        max_size=12,
    ),
    together=st.integers(1, 12),
    max_batch=st.integers(1, 4),
    headroom=st.integers(0, 2),
)
def test_all_end_and_the_first_never_gives_way(
    sizes: list[tuple[int, int]], together: int, max_batch: int, headroom: int
) -> None:
    machine = Machine(max_batch, headroom)
    wanted = {}
    for start in range(0, len(sizes), together):
        for number, (prompt, new) in enumerate(sizes[start : start + together], start):
            machine.tokens[number], machine.left[number] = prompt, new
            wanted[number] = prompt + new
            machine.ask(number)
        machine.settle()
        first_gets_on(machine)
    for _ in range(40 * sum(new for _, new in sizes) + 100 * len(sizes)):
        if not machine.left:
            break
        first_gets_on(machine)
        machine.settle()
    assert machine.tokens == wanted
    check_admission(machine.admission)
    assert machine.pool.used == machine.admission.admitted == machine.admission.waiting == 0


def test_a_waiting_request_gets_the_place_of_later_ones() -> None:
    machine = Machine(max_batch=4, headroom=0)
    for number, blocks in ((0, 4), (2, 2), (3, 2)):
        machine.tokens[number], machine.left[number] = blocks * BLOCK - 3, 3
        machine.ask(number)
    machine.settle()
    machine.left = dict.fromkeys(machine.left, 2)
    machine.tokens[1], machine.left[1] = 3 * BLOCK - 1, 2
    machine.ask(1)
    machine.settle()
    assert machine.admission.claimant() is None
    machine.now_s = PATIENCE_S
    machine.settle()
    assert machine.admission.claimant() == 1
    assert make_room(machine.steps, machine.admission, machine, machine.tables.__getitem__) == [3, 2]
    assert [grant.number for grant in machine.admission.admit(machine.now_s)] == [1]


def test_nobody_gives_way_in_vain() -> None:
    machine = Machine(max_batch=4, headroom=0)
    for number, blocks in ((0, 4), (2, 2), (3, 2)):
        machine.tokens[number], machine.left[number] = blocks * BLOCK - 3, 3
        machine.ask(number)
    machine.settle()
    machine.tokens[1], machine.left[1] = 6 * BLOCK - 1, 2
    machine.ask(1)
    for machine.now_s in (0.0, PATIENCE_S):
        machine.settle()
    assert make_room(machine.steps, machine.admission, machine, machine.tables.__getitem__) == []
