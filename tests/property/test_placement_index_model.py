"""The block index against sets of keys, at every density of the sample.

It covers lost and repeated changes, snapshots in parts, restarts in between, and a table that is too small."""

import random
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pinyon.core.block_keys import chain_block_keys, namespace
from pinyon.core.key_sample import key_sample
from pinyon.placement import holder_sets, holdings, key_table
from pinyon.placement.index import BlockIndex, Intake
from tests.long import usually

UNIVERSE = 80
KEYS = chain_block_keys(namespace("m", "l", "t"), bytes(4 * UNIVERSE), 1)
"""The keys of one long prompt; any part of it is stored, removed and asked for."""
EVERY = (1, 2, 4, 8, 16)


class Member(NamedTuple):
    bit: int


MEMBERS = [Member(1), Member(2), Member(4)]
NAMES = st.sampled_from(MEMBERS)
NUMBERS = st.integers(0, UNIVERSE - 1)
FEW = st.lists(NUMBERS, max_size=6)
RUNS = st.builds(lambda first, length: list(range(first, min(UNIVERSE, first + length))), NUMBERS, st.integers(0, 60))
HEALS = st.sampled_from((True, True, False))
CHANGED = st.one_of(FEW, RUNS, st.builds(list.__add__, RUNS, FEW))
PROMPTS = st.one_of(RUNS, st.builds(list.__add__, RUNS, FEW))


def pack(numbers) -> bytes:
    return b"".join(KEYS[number] for number in numbers)


def sampled(number: int, every: int) -> bool:
    return (number + 1) % every == 0


class IndexMachine(RuleBasedStateMachine):
    """A machine with what the index should know (``known``), and what it knew ``before`` an incomplete snapshot.

    An instance's own ``content`` may be ahead after a lost change."""

    LIMIT = 100_000

    @initialize(every=st.sampled_from(EVERY))
    def begin(self, every: int) -> None:
        self.every = every
        self.index = BlockIndex(self.LIMIT)
        self.content: dict[Member, set[int]] = {}
        self.seq: dict[Member, int] = {}
        self.known: dict[Member, set[int]] = {}
        self.before: dict[Member, set[int]] = {}
        self.synced: dict[Member, bool] = {}
        self.parts: dict[Member, list[list[int]]] = {}
        """The parts of a snapshot still to come; empty: none is being loaded."""
        for member in MEMBERS:
            self._start(member)

    def _start(self, member: Member) -> None:
        assert self.index.add() == member.bit
        self.content[member], self.known[member], self.before[member] = set(), set(), set()
        self.seq[member], self.synced[member], self.parts[member] = 0, False, []

    def _told(self, numbers) -> bytes:
        return key_sample(pack(numbers), self.every)

    def _sample(self, numbers) -> set[int]:
        return {number for number in numbers if sampled(number, self.every)}

    def _delta(self, member: Member, stored: list[int], removed: list[int], more: bool = False) -> Intake:
        return self.index.apply_delta(member, self.seq[member], self._told(stored), self._told(removed), more=more)

    def _changed(self, member: Member, stored: list[int], removed: list[int]) -> None:
        self.content[member] = (self.content[member] | set(stored)) - set(removed)

    def _gap(self, member: Member, heals: bool = False) -> None:
        """Loses the instance's sequence; with ``heals`` the snapshot that is asked for comes at once."""
        self.synced[member], self.parts[member] = False, []
        if heals:
            self.snapshot_begins(member, 2, True)

    @rule(member=NAMES, stored=CHANGED, removed=CHANGED, more=st.booleans(), later=FEW)
    def change_arrives(self, member, stored, removed, more, later):
        self.seq[member] += 1
        self._changed(member, stored, removed)
        taken = self._delta(member, stored, removed)
        assert (taken is Intake.APPLIED) == self.synced[member]
        if more:
            self._changed(member, later, [])
            assert (self._delta(member, later, [], more=True) is Intake.APPLIED) == self.synced[member]
        if self.synced[member]:
            self.known[member] = self._sample(self.content[member])
        else:
            self._gap(member)

    @rule(member=NAMES, stored=CHANGED, later=FEW, heals=HEALS)
    def change_is_lost(self, member, stored, later, heals):
        self.seq[member] += 2
        self._changed(member, stored + later, [])
        taken = self._delta(member, later, [])
        assert taken is not Intake.APPLIED
        if self.synced[member]:
            assert taken is Intake.GAP
        self._gap(member, heals)

    @rule(member=NAMES, stored=FEW, heals=HEALS)
    def change_comes_twice(self, member, stored, heals):
        """Repeats a change: the second one is unexpected, so its meaning is unknown."""
        assert self._delta(member, stored, []) is not Intake.APPLIED
        self._gap(member, heals)

    @rule(member=NAMES, parts=st.integers(1, 3), whole=st.booleans())
    def snapshot_begins(self, member, parts, whole):
        content = sorted(self.content[member])
        self.parts[member] = [content[part::parts] for part in range(parts)]
        self._part(member, first=True)
        while whole and self.parts[member]:
            self._part(member)

    @precondition(lambda self: any(self.parts.values()))
    @rule(which=st.integers(0, 2))
    def snapshot_goes_on(self, which):
        loading = [member for member in MEMBERS if self.parts[member]]
        self._part(loading[which % len(loading)])

    def _part(self, member: Member, first: bool = False) -> None:
        part = self.parts[member].pop(0)
        last = not self.parts[member]
        taken = self.index.apply_snapshot(member, self.seq[member], self._told(part), first=first, last=last)
        assert taken is Intake.APPLIED
        if first:
            self.before[member], self.known[member] = self.known[member], set()
            self.synced[member] = False
        self.known[member] |= self._sample(part)
        if last:
            self.before[member], self.synced[member] = set(), True

    @rule(member=NAMES, heals=HEALS)
    def connects_again(self, member, heals):
        self.index.new_session(member)
        self._gap(member, heals)

    @rule(member=NAMES, stored=CHANGED, heals=HEALS)
    def restarts(self, member, stored, heals):
        self.index.drop(member)
        self._start(member)
        self.content[member] = set(stored)
        self._gap(member, heals)

    @rule(slots=st.sampled_from((0, 1, 7, 64, 10_000)))
    def collects(self, slots):
        self.index.collect(slots)

    def _shown(self, member: Member) -> set[int]:
        return self.known[member] | self.before[member]

    @rule(
        prompt=PROMPTS, limit=st.one_of(st.none(), st.integers(0, 70)), sources=st.sets(NAMES), first=st.integers(0, 60)
    )
    def lookup(self, prompt, limit, sources, first):
        match = self.index.match(pack(prompt), limit, every=self.every)
        prompt = prompt if limit is None else prompt[:limit]
        places = [at for at, number in enumerate(prompt) if sampled(number, self.every)]

        def reach(numbers: set[int], start: int = 0) -> int:
            """Returns the end of the run of sampled blocks in ``numbers``, as far as the sample tells."""
            end = start
            for place in places:
                if place >= start:
                    if prompt[place] not in numbers:
                        break
                    end = place + 1
            return end

        for member in MEMBERS:
            assert match.held_by(member) == reach(self._shown(member))
        together = set().union(*map(self._shown, MEMBERS))
        assert match.blocks == reach(together)
        rows = match.held_by_row(4)
        assert list(rows) == [reach(self._shown(member)) for member in MEMBERS] + [0]
        if first <= match.blocks:
            among = set().union(*map(self._shown, sources)) if sources else set()
            end = min(match.blocks, reach(among, first))
            mask = sum(member.bit for member in sources)
            assert match.extent(first, mask) == end
            at = first
            for start, stop, holders in match.spans(first, end, mask, len(match.runs)):
                assert start == at < stop
                held = {prompt[place] for place in places if start <= place < stop}
                assert holders == sum(member.bit for member in sources if held <= self._shown(member)) > 0
                at = stop
            assert at == end

    def _holders(self) -> dict[int, set[Member]]:
        """Returns by block number the members that the index takes for holders."""
        matches = {number: self.index.match(pack([number]), every=self.every) for number in range(UNIVERSE)}
        return {number: {each for each in MEMBERS if match.held_by(each)} for number, match in matches.items()}

    @invariant()
    def same_content(self):
        for number, holders in self._holders().items():
            assert holders == {member for member in MEMBERS if number in self._shown(member)}
        for member, known in self.known.items():
            assert self.index.blocks_of(member) == len(known)
        assert self.index.entries == sum(map(len, self.known.values()))
        self.index.check_integrity()


class FullIndexMachine(IndexMachine):
    """An index that is too small: its answers are true, its size stays bounded, and it knows the latest changes."""

    LIMIT = 40

    @rule(prompt=PROMPTS, limit=st.none(), sources=st.none(), first=st.none())
    def lookup(self, prompt, limit, sources, first):
        match = self.index.match(pack(prompt), every=self.every)
        for member in MEMBERS:
            assert self._sample(prompt[: match.held_by(member)]) <= self._shown(member)
        assert self._sample(prompt[: match.blocks]) <= set().union(*map(self._shown, MEMBERS))

    @rule(member=NAMES, stored=st.lists(NUMBERS, max_size=LIMIT, unique=True))
    def newest_stay(self, member, stored):
        if not self.synced[member]:
            return
        self.change_arrives(member, stored, [], False, [])
        for number in self._sample(stored):
            assert self.index.match(pack([number]), every=self.every).held_by(member) == 1

    @invariant()
    def same_content(self):
        for number, holders in self._holders().items():
            assert holders <= {member for member in MEMBERS if number in self._shown(member)}
        for member, known in self.known.items():
            assert self.index.blocks_of(member) <= len(known)
        assert self.index.entries == sum(self.index.blocks_of(member) for member in MEMBERS)
        assert len(self.index) <= self.LIMIT
        self.index.check_integrity()


class FewSetsMachine(FullIndexMachine):
    """An index with too few sets of holders, which still says nothing untrue."""

    LIMIT = 100_000

    @initialize(every=st.sampled_from(EVERY))
    def begin(self, every: int) -> None:
        super().begin(every)
        self.index = BlockIndex(self.LIMIT, sets_max=2)
        for member in MEMBERS:
            self._start(member)

    @rule()
    def newest_stay(self):
        pass


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes at which all events of a large index occur: growth bucket by bucket, full buckets, sets given up."""
    monkeypatch.setattr(key_table, "BUCKETS_MIN", 1)
    monkeypatch.setattr(key_table, "_GROWING", 7.5)
    monkeypatch.setattr(key_table, "_SMALL", 1 << 12)
    monkeypatch.setattr(holder_sets, "_UNUSED_MAX", 3)
    monkeypatch.setattr(holdings, "COLLECT_SLOTS", 8)
    monkeypatch.setattr(holdings, "_COLLECT_SETS", 1)
    monkeypatch.setattr(holdings, "_EVICT_SLOTS", 8)


@pytest.mark.parametrize("seed", range(usually(2, long=8)))
def test_keys_that_move_while_void_ones_are_cleared_are_cleared(seed, monkeypatch):
    """Keys of a full bucket may move to where the clearing pass through the table has been already."""
    monkeypatch.setattr(key_table, "_GROWING", 7.6)
    monkeypatch.setattr(key_table, "_SMALL", 1)
    dice = random.Random(seed)
    index = BlockIndex(100_000)
    for member in MEMBERS:
        assert index.add() == member.bit
        index.apply_snapshot(member, 0, dice.randbytes(16 * 300), first=True, last=True)
    index.drop(MEMBERS[0])
    seq, moved = 0, 0
    while index.collect(8):
        seq += 1
        index.apply_delta(MEMBERS[1], seq, dice.randbytes(16 * 8), b"")
        moved = max(moved, len(index._holdings.table.watched or ()))
    assert moved
    index.check_integrity()


for machine in (IndexMachine, FullIndexMachine, FewSetsMachine):
    machine.TestCase.settings = settings(max_examples=usually(20, long=50), stateful_step_count=40, deadline=None)
TestIndexModel = pytest.mark.usefixtures("small")(IndexMachine.TestCase)
TestFullIndex = pytest.mark.usefixtures("small")(FullIndexMachine.TestCase)
TestFewSets = pytest.mark.usefixtures("small")(FewSetsMachine.TestCase)
