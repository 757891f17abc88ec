"""The block index against a dict of sets, through lost changes, resyncs and restarts."""

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pinyon.placement.index import BlockIndex, Intake
from pinyon.placement.prefix_match import Holders


class Member(NamedTuple):
    bit: int


MEMBERS = [Member(1), Member(2), Member(4)]
NOBODY = Member(8)
NAMES = st.sampled_from(MEMBERS)
KEYS = st.lists(st.integers(0, 11), max_size=8)


def pack(numbers) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


class IndexMachine(RuleBasedStateMachine):
    """``held`` is what the index should know; the instances' own content may be ahead after a lost change."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(10_000)
        self.content: dict[Member, set[int]] = {}
        self.seq: dict[Member, int] = {}
        self.held: dict[Member, set[int]] = {}
        self.synced: dict[Member, bool] = {}
        for member in MEMBERS:
            self._start(member)

    def _start(self, member: Member) -> None:
        assert self.index.add() == member.bit
        self.content[member], self.held[member] = set(), set()
        self.seq[member], self.synced[member] = 0, False

    def _change(self, member: Member, stored: list[int], removed: list[int]) -> None:
        self.seq[member] += 1
        self.content[member] = (self.content[member] | set(stored)) - set(removed)

    @rule(member=NAMES, stored=KEYS, removed=KEYS)
    def change_arrives(self, member, stored, removed):
        self._change(member, stored, removed)
        taken = self.index.apply_delta(member, self.seq[member], pack(stored), pack(removed))
        assert (taken is Intake.APPLIED) == self.synced[member]
        if self.synced[member]:
            self.held[member] = set(self.content[member])

    @rule(member=NAMES, stored=KEYS, removed=KEYS, later=KEYS)
    def change_is_lost(self, member, stored, removed, later):
        self._change(member, stored, removed)
        self._change(member, later, [])
        taken = self.index.apply_delta(member, self.seq[member], pack(later), b"")
        assert taken is not Intake.APPLIED
        if self.synced[member]:
            assert taken is Intake.GAP
        self.synced[member] = False

    @rule(member=NAMES, parts=st.integers(1, 3))
    def snapshot(self, member, parts):
        content = sorted(self.content[member])
        for part in range(parts):
            taken = self.index.apply_snapshot(
                member, self.seq[member], pack(content[part::parts]), first=part == 0, last=part == parts - 1
            )
            assert taken is Intake.APPLIED
        self.held[member], self.synced[member] = set(content), True

    @rule(member=NAMES)
    def connects_again(self, member):
        self.index.new_session(member)
        self.synced[member] = False

    @rule(member=NAMES)
    def restarts(self, member):
        self.index.drop(member)
        self._start(member)

    @rule(prompt=st.lists(st.integers(0, 12), max_size=100), sources=st.sets(NAMES), first=st.integers(0, 12))
    def lookup(self, prompt, sources, first):
        match = self.index.match(pack(prompt))
        leading = {}
        for member, held in self.held.items():
            length = 0
            while length < len(prompt) and prompt[length] in held:
                length += 1
            if length:
                leading[member] = length
        assert {member: blocks for member in MEMBERS if (blocks := match.held_by(member))} == leading
        together = set().union(*self.held.values())
        blocks = 0
        while blocks < len(prompt) and prompt[blocks] in together:
            blocks += 1
        assert match.blocks == blocks
        if first <= blocks:
            end = first
            while end < blocks and any(member in sources and prompt[end] in held for member, held in self.held.items()):
                end += 1
            assert match.extent_for(NOBODY, first, Holders(sources)) == end
            at = first
            for start, stop, holders in match.spans_for(NOBODY, first, end, Holders(sources)):
                assert start == at < stop
                found = set(holders)
                all_of_it, further = set(prompt[start:stop]), set(prompt[start : stop + 1])
                assert found == {member for member in sources if all_of_it <= self.held[member]} != set()
                assert stop == end or not any(further <= self.held[member] for member in sources)
                at = stop
            assert at == end

    @invariant()
    def same_content(self):
        for member, held in self.held.items():
            assert self.index.blocks_of(member) == len(held)
        self.index.check_integrity()


class FullIndexMachine(IndexMachine):
    """An index that is too small: what it says is true, and it never holds more than it may."""

    LIMIT = 7

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(self.LIMIT)
        for member in MEMBERS:
            assert self.index.add() == member.bit

    @rule(prompt=st.lists(st.integers(0, 12), max_size=100), sources=st.sets(NAMES), first=st.integers(0, 12))
    def lookup(self, prompt, sources, first):
        match = self.index.match(pack(prompt))
        for member, held in self.held.items():
            assert set(prompt[: match.held_by(member)]) <= held
        assert set(prompt[: match.blocks]) <= set().union(*self.held.values())

    @invariant()
    def same_content(self):
        assert self.index.entries == sum(self.index.blocks_of(member) for member in MEMBERS) <= self.LIMIT
        self.index.check_integrity()

    @rule(keys_max=st.integers(0, 3))
    def collects(self, keys_max):
        self.index.collect(keys_max)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexModel = IndexMachine.TestCase
FullIndexMachine.TestCase.settings = IndexMachine.TestCase.settings
TestFullIndex = FullIndexMachine.TestCase
