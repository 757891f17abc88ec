"""The requests that wait for room, counted one by one, and whether requests fit where room was reported."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching import BatchRequest, Prompt
from pinyon.decisions import InstanceConfig, InstanceDecisions
from pinyon.decisions.admission import RECENT
from tests.long import usually
from tests.worker_integrity import check_admission, check_prompts

MAX_BATCH = 3


class Instance:
    """An instance with its requests and prompts by number, each with a state.

    Requests: ``asks`` (nothing yet), ``waits`` (for KV memory), ``here`` (it has memory, and is computed or decoded
    here), ``elsewhere`` (its prompt is computed there). Prompts for others: ``queued``, ``waits``, ``computed``."""

    def __init__(self, pool_blocks: int) -> None:
        config = InstanceConfig(pool_blocks, 4, MAX_BATCH, 64, 32, active_prefills=2, max_prefills=64)
        self.parts = InstanceDecisions(config)
        self.requests: dict[int, str] = {}
        self.goes: dict[int, str] = {}
        self.prompts: dict[int, str] = {}
        self.tables: dict[int, list[int]] = {}
        self.blocks: dict[int, int] = {}
        self.number = 0
        self.now = 0.0

    def submit(self, blocks: int, goes: str) -> int:
        self.number += 1
        self.requests[self.number], self.goes[self.number] = "asks", goes
        self.blocks[self.number] = blocks
        return self.number

    def ask(self, number: int) -> None:
        self.requests[number] = "waits"
        self._enqueue(number, decodes=True)

    def _enqueue(self, number: int, decodes: bool) -> None:
        blocks = self.blocks[number]
        self.parts.admission.enqueue(BatchRequest(number, 4 * blocks, blocks, decodes=decodes, arrived_s=self.now))
        self.settle()

    def settle(self) -> None:
        for grant in self.parts.admission.admit(self.now):
            self.tables[grant.number] = grant.reservation.table
            if grant.number in self.requests:
                self.requests[grant.number] = self.goes[grant.number]
            else:
                if self.prompts[grant.number] == "waits":
                    self.parts.prompts.has_room(grant.number)
                self.prompts[grant.number] = "computed"

    def prompt(self, blocks: int) -> None:
        self.number += 1
        self.blocks[self.number] = blocks
        self.prompts[self.number] = "queued"
        self.parts.prompts.add(Prompt(self.number, 4 * blocks, (), 0, owned=False), self.now)

    def start(self) -> None:
        for number in self.parts.prompts.start(self.now):
            self.prompts[number] = "started"
            self._enqueue(number, decodes=False)
            if self.prompts[number] == "started":
                self.prompts[number] = "waits"
                self.parts.prompts.waits_for_room(number)

    def gives_way(self, number: int) -> None:
        self._release(number)
        self.goes[number] = "here"
        self.ask(number)

    def end(self, number: int) -> None:
        state = self.requests.pop(number, None) or self.prompts[number]
        if number in self.prompts:
            del self.prompts[number]
            self.parts.prompts.end(number)
        if state == "waits":
            self.parts.admission.withdraw(number)
        elif state not in ("asks", "queued"):
            self._release(number)
        self.settle()

    def _release(self, number: int) -> None:
        self.parts.admission.end(number)
        self.parts.reservations.release(self.tables.pop(number), self.now)

    def check(self) -> None:
        states = list(self.requests.values())
        elsewhere = sum(
            state == "elsewhere" or (state == "asks" and self.goes[number] == "elsewhere")
            for number, state in self.requests.items()
        )
        look = self.parts.room.look(len(self.requests), elsewhere)
        in_batch = states.count("here") + sum(
            state == "asks" and self.goes[number] == "here" for number, state in self.requests.items()
        )
        roomless = list(self.prompts.values()).count("waits")
        waiting = states.count("waits") + max(0, in_batch - MAX_BATCH) + roomless
        if roomless:
            waiting += list(self.prompts.values()).count("queued")
        assert look.waiting == waiting
        assert look.waiting + look.running == len(self.requests) + len(self.prompts)
        assert 0 <= look.room <= MAX_BATCH
        assert not (look.waiting and look.room)
        check_admission(self.parts.admission)
        check_prompts(self.parts.prompts)

    def fill(self) -> None:
        """Checks that as many requests as there is room for, each as large as those here, get room at once."""
        for number in [number for number, state in self.requests.items() if state == "asks"]:
            self.ask(number)
        elsewhere = list(self.requests.values()).count("elsewhere")
        look = self.parts.room.look(len(self.requests), elsewhere)
        queued = list(self.prompts.values()).count("queued")
        if not look.room or queued:
            return
        size = max(1, int(self.parts.admission.next_blocks))
        for _ in range(look.room):
            self.ask(self.submit(size, "here"))
        assert "waits" not in self.requests.values()
        assert not self.parts.room.look(len(self.requests), elsewhere).waiting


ACTIONS = ("submit", "submit", "ask", "ask", "prompt", "start", "gives_way", "end", "wait")


@given(
    pool_blocks=st.integers(4, 40),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 4), st.integers(0, 1 << 16)), max_size=60),
)
@settings(max_examples=usually(25, long=300))
def test_each_is_counted_once_and_room_is_there(pool_blocks: int, actions: list[tuple[str, int, int]]) -> None:
    world = Instance(pool_blocks)
    for action, blocks, pick in actions:
        having = [number for number, state in world.requests.items() if state in ("here", "elsewhere")]
        asking = [number for number, state in world.requests.items() if state == "asks"]
        everybody = [*world.requests, *world.prompts]
        if action == "submit":
            world.submit(blocks, ("here", "elsewhere")[pick % 2])
        elif action == "ask" and asking:
            world.ask(asking[pick % len(asking)])
        elif action == "prompt":
            world.prompt(blocks)
        elif action == "start":
            world.start()
        elif action == "gives_way" and having:
            world.gives_way(having[pick % len(having)])
        elif action == "end" and everybody:
            world.end(everybody[pick % len(everybody)])
        elif action == "wait":
            world.now += pick / (1 << 15)
            world.settle()
        world.check()
    world.fill()


def test_only_the_first_one_of_an_unused_pool_leaves_no_headroom() -> None:
    for blocks, room in (4, 2), (12, 1):
        world = Instance(12)
        number = world.submit(blocks, "here")
        world.ask(number)
        world.end(number)
        assert world.parts.room.look(0, 0).room == room
        world.fill()


def test_an_idle_one_says_what_those_that_ended_had() -> None:
    world = Instance(40)
    assert world.parts.room.look(0, 0).room == MAX_BATCH, "a place has its share of the pool"
    number = world.submit(30, "here")
    world.ask(number)
    assert world.parts.room.look(1, 0).room == 0
    world.end(number)
    assert world.parts.room.look(0, 0).room == 1


@given(pool_blocks=st.integers(60, 400), shared=st.integers(1, 40), own=st.integers(1, 4), ended=st.integers(0, RECENT))
@settings(max_examples=usually(20, long=200))
def test_where_all_share_a_prefix_as_many_have_room_as_is_said(
    pool_blocks: int, shared: int, own: int, ended: int
) -> None:
    config = InstanceConfig(pool_blocks, 4, 512, 4096, 512, active_prefills=2, max_prefills=1024)
    parts = InstanceDecisions(config)
    keys = tuple(bytes([number]) * 16 for number in range(shared))
    tables: dict[int, list[int]] = {}

    def submit(number: int) -> bool:
        parts.admission.enqueue(BatchRequest(number, 4 * (shared + own), shared + own, keys, shared))
        for grant in parts.admission.admit(0.0):
            tables[grant.number] = grant.reservation.table
            if number == 0:
                parts.reservations.publish(tables[0][:shared], keys, 0.0)
        return number in tables

    number = 0
    while number <= RECENT:
        if not submit(number):
            return  # the pool is too small for any statement
        number += 1
    for each in range(ended):  # includes the first one, whose blocks the others still use
        parts.admission.end(each)
        parts.reservations.release(tables.pop(each), 0.0)
    room = parts.room.look(len(tables), 0).room
    found = 0
    while submit(number):
        found, number = found + 1, number + 1
    assert room == min(found, 512)
    assert parts.room.look(len(tables) + 1, 0).room == 0
