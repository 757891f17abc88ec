"""The table of grants against a model that knows for every byte who may touch it."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pinyon.transfer import (
    Access,
    Grant,
    InvalidTransfer,
    Opcode,
    Reason,
    TransferError,
    TransferLimitReached,
    TransferLimits,
)
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.types.segment import Range
from pinyon.transfer.types.spans import merge_ranges
from tests.long import usually
from tests.unit.transfer.conftest import users

SIZE = 48
LIMIT, RANGES = 6, 12
offsets = st.integers(0, SIZE - 1)
ranges = st.lists(offsets.flatmap(lambda at: st.tuples(st.just(at), st.integers(1, SIZE - at))), min_size=1, max_size=4)
asked = st.tuples(st.integers(0, SIZE + 4) | st.just((1 << 64) - 3), st.integers(1, SIZE))


class Known:
    """The model's knowledge of a grant."""

    def __init__(self, grant: Grant, region: int, opened: list[tuple[int, int]], access: Access, end: float) -> None:
        self.grant, self.region, self.access, self.end = grant, region, access, end
        self.bytes = {byte for at, size in opened for byte in range(at, at + size)}
        self.revoked = False


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = MemoryTable(TransferLimits(max_grants=LIMIT, max_grant_ranges=RANGES), lambda: self.now)
        self.taken_back: list[Grant] = []
        self.table.on_revoke.append(self.taken_back.append)
        self.memories = [bytearray(SIZE) for _ in range(2)]
        self.regions = [self.table.register(memory, "cpu:0", Access.NONE) for memory in self.memories]
        self.model = [bytearray(SIZE) for _ in range(2)]
        self.known: list[Known] = []
        self.pins: list[tuple[object, set[Grant]]] = []
        self.written = 0

    def open(self) -> list[Known]:
        """Returns the grants that count against the limit."""
        return [one for one in self.known if not one.revoked]

    def code(self, one: Known, opcode: Opcode, at: int, size: int) -> int:
        if one.revoked or one.end <= self.now:
            return Reason.UNKNOWN_REGION
        if not one.access & (Access.READ if opcode is Opcode.READ else Access.WRITE):
            return Reason.ACCESS_DENIED
        return 0 if set(range(at, at + size)) <= one.bytes else Reason.OUT_OF_RANGE

    @rule(
        region=st.integers(0, 1),
        opened=ranges,
        access=st.sampled_from([Access.READ, Access.WRITE, Access.READ_WRITE]),
        life=st.sampled_from([None, 1.0, 5.0]),
    )
    def grant(self, region: int, opened: list[tuple[int, int]], access: Access, life: float | None) -> None:
        merged = len(merge_ranges(opened, SIZE).starts)
        held = sum(len(one.grant.spans.starts) for one in self.open())
        if len(self.open()) == LIMIT or held + merged > RANGES:
            with pytest.raises(TransferLimitReached):
                self.table.grant(self.regions[region], opened, access, life)
            return
        grant = self.table.grant(self.regions[region], opened, access, life)
        assert grant.key not in {one.grant.key for one in self.known}, "a key is used again"
        end = float("inf") if life is None else self.now + life
        self.known.append(Known(grant, region, opened, access, end))
        assert grant.descriptor().length == max(self.known[-1].bytes) + 1

    @precondition(lambda self: self.known)
    @rule(data=st.data(), opcode=st.sampled_from(Opcode), where=asked)
    def one_small_frame(self, data: st.DataObject, opcode: Opcode, where: tuple[int, int]) -> None:
        one = data.draw(st.sampled_from(self.known))
        at, size = where
        code = self.code(one, opcode, at, size)
        payload = bytearray(size)
        if opcode is Opcode.READ:
            assert self.table.take(one.grant.key, at, memoryview(payload)) == (code == 0)
            assert payload == (self.model[one.region][at : at + size] if not code else bytes(size))
            return
        self.written += 1
        payload[:] = bytes([self.written % 251 + 1]) * size
        assert self.table.put(one.grant.key, at, memoryview(payload)) == (code == 0)
        if not code:
            self.model[one.region][at : at + size] = payload

    @precondition(lambda self: self.known)
    @rule(data=st.data(), opcode=st.sampled_from(Opcode), keep=st.booleans())
    def a_frame_of_several(self, data: st.DataObject, opcode: Opcode, keep: bool) -> None:
        parts = data.draw(st.lists(st.tuples(st.sampled_from(self.known), asked), min_size=1, max_size=5))
        holder = object()
        frame = [Range(one.grant.key, *where) for one, where in parts]
        found, refusals, pinned = self.table.admit(opcode, frame, holder, lambda: None)
        codes = [self.code(one, opcode, *where) for one, where in parts]
        assert list(refusals or bytes(len(parts))) == codes
        for (one, _), region, code in zip(parts, found, codes, strict=True):
            assert region is (None if code else self.regions[one.region])
        if keep:
            self.pins.append((holder, pinned))
        else:
            self.table.unpin(pinned, holder)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def a_frame_ends(self, data: st.DataObject) -> None:
        self.end_frame(data.draw(st.integers(0, len(self.pins) - 1)))

    def end_frame(self, number: int) -> None:
        holder, pinned = self.pins.pop(number)
        self.table.unpin(pinned, holder)
        for one in self.known:  # a caller that was told of its use waits for its end
            if one.revoked and one.grant in pinned and not self.used(one):
                self.table.revoke(one.grant, 0.0)
                assert one.grant in self.taken_back

    def used(self, one: Known) -> bool:
        return any(one.grant in pinned for _, pinned in self.pins)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.known))
        used = self.used(one)
        assert self.table.revoke_now(one.grant) == (not used)
        one.revoked = True
        assert used or one.grant in self.taken_back
        if not used:
            self.table.revoke(one.grant, 0.0)  # without waiting

    @rule(seconds=st.sampled_from([0.5, 1.0, 7.0]), swept=st.booleans())
    def time_goes_by(self, seconds: float, swept: bool) -> None:
        self.now += seconds
        if not swept:
            return
        overdue = [one for one in self.open() if one.end <= self.now]
        assert self.table.expire(self.now) == len(overdue)
        for one in overdue:
            one.revoked = True
            assert one.grant in self.taken_back

    @invariant()
    def nothing_else_changed(self) -> None:
        assert self.memories == self.model
        assert self.table.grants == len(self.open())
        pins = [sum(one.region is region for one in pinned) for region in self.regions for _, pinned in self.pins]
        assert sum(users(self.table, region) for region in self.regions) <= sum(pins)

    def teardown(self) -> None:
        while self.pins:
            self.end_frame(0)
        for region in self.regions:
            self.table.unregister(region, 0.0)
        assert self.table.grants == 0
        for one in self.known:
            assert not self.table.take(one.grant.key, 0, memoryview(bytearray(1)))
            assert one.grant in self.taken_back


Model.TestCase.settings = settings(max_examples=usually(25, long=120), stateful_step_count=40)
TestGrants = Model.TestCase


@given(opened=ranges, where=asked)
def test_merged_ranges_hold_the_same_bytes(opened: list[tuple[int, int]], where: tuple[int, int]) -> None:
    spans = merge_ranges(opened, SIZE)
    inside = {byte for at, size in opened for byte in range(at, at + size)}
    assert {byte for start, end in zip(*spans, strict=True) for byte in range(start, end)} == inside
    assert all(end < start for end, start in zip(spans.ends, spans.starts[1:], strict=False))
    at, size = where
    index = spans.holding(at, at + size)
    assert (index >= 0) == (set(range(at, at + size)) <= inside)
    assert index < 0 or spans.starts[index] <= at < at + size <= spans.ends[index]


@pytest.mark.parametrize(
    "opened", [[], [(0, 0)], [(-1, 2)], [(0, SIZE + 1)], [(SIZE, 1)], [(0, 1), (SIZE - 1, 2)], [(0, 1 << 64)]]
)
def test_what_is_no_range_is_not_granted(opened: list[tuple[int, int]]) -> None:
    table = MemoryTable()
    region = table.register(bytearray(SIZE), "cpu:0", Access.NONE)
    with pytest.raises(InvalidTransfer) as wrong:
        table.grant(region, opened, Access.READ)
    assert wrong.value.field == "ranges"
    assert table.grants == 0


def test_what_makes_no_sense_is_not_granted() -> None:
    table = MemoryTable()
    region = table.register(bytearray(SIZE), "cpu:0", Access.NONE)
    with pytest.raises(InvalidTransfer, match="right"):
        table.grant(region, [(0, 1)], Access.NONE)
    for life in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidTransfer, match="lifetime"):
            table.grant(region, [(0, 1)], Access.READ, life)
    table.unregister(region, 0.0)
    with pytest.raises(InvalidTransfer, match="not registered"):
        table.grant(region, [(0, 1)], Access.READ)


def test_grants_revoked_before_their_time_are_forgotten() -> None:
    table = MemoryTable()
    region = table.register(bytearray(SIZE), "cpu:0", Access.NONE)
    for _ in range(2000):
        assert table.revoke_now(table.grant(region, [(0, 1)], Access.READ, 1e6))
    gc.collect()
    assert sum(isinstance(each, Grant) and each.region is region for each in gc.get_objects()) < 100


def test_revoking_waits_for_users_and_aborts_those_that_hang() -> None:
    table = MemoryTable()
    region = table.register(bytearray(SIZE), "cpu:0", Access.NONE)
    used, other = (table.grant(region, [(at, 4)], Access.WRITE) for at in (0, 8))
    holder, aborted = object(), threading.Event()

    def admit(grant: Grant) -> set[Grant]:
        return table.admit(Opcode.WRITE, [Range(grant.key, grant.spans.starts[0], 4)], holder, aborted.set)[2]

    pinned = admit(used)
    assert not table.revoke_now(used)
    assert admit(used) == set(), "it is refused while it is waited for"
    ended = threading.Thread(target=lambda: (aborted.wait(60), table.unpin(pinned, holder)))
    ended.start()
    table.revoke(used, 0.01)
    assert aborted.is_set()
    ended.join()
    assert table.take(other.key, 8, memoryview(bytearray(1))) is False
    assert table.put(other.key, 8, memoryview(b"x" * 4)), "another grant on the same region is not concerned"


def test_who_cannot_be_stopped_is_an_error() -> None:
    ticks = itertools.count(0.0, 10.0)  # without waiting
    table = MemoryTable(clock=lambda: next(ticks))
    region = table.register(bytearray(SIZE), "cpu:0", Access.NONE)
    grant = table.grant(region, [(0, 4)], Access.WRITE)
    holder = object()
    _, _, pinned = table.admit(Opcode.WRITE, [Range(grant.key, 0, 4)], holder, lambda: None)
    for end in (lambda: table.revoke(grant, 1.0), lambda: table.unregister(region, 1.0)):
        with pytest.raises(TransferError, match="do not end"):
            end()
    table.unpin(pinned, holder)
    table.revoke(grant, 1.0)
