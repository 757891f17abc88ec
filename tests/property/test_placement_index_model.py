"""The block index against a dict of sets, through lost changes, resyncs and restarts."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pinyon.placement.index import BlockIndex, Intake

NAMES = st.sampled_from([1, 2, 4])
KEYS = st.lists(st.integers(0, 11), max_size=8)


def pack(numbers) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


class IndexMachine(RuleBasedStateMachine):
    """``held`` is what the index should know; the instances' own content may be ahead after a lost change."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(10_000)
        self.content: dict[int, set[int]] = {}
        self.seq: dict[int, int] = {}
        self.held: dict[int, set[int]] = {}
        self.synced: dict[int, bool] = {}
        for bit in (1, 2, 4):
            self._start(bit)

    def _start(self, bit: int) -> None:
        self.index.add(bit)
        self.content[bit], self.held[bit] = set(), set()
        self.seq[bit], self.synced[bit] = 0, False

    def _change(self, bit: int, stored: list[int], removed: list[int]) -> None:
        self.seq[bit] += 1
        self.content[bit] = (self.content[bit] | set(stored)) - set(removed)

    @rule(bit=NAMES, stored=KEYS, removed=KEYS)
    def change_arrives(self, bit, stored, removed):
        self._change(bit, stored, removed)
        taken = self.index.apply_delta(bit, self.seq[bit], pack(stored), pack(removed))
        assert (taken is Intake.APPLIED) == self.synced[bit]
        if self.synced[bit]:
            self.held[bit] = set(self.content[bit])

    @rule(bit=NAMES, stored=KEYS, removed=KEYS, later=KEYS)
    def change_is_lost(self, bit, stored, removed, later):
        self._change(bit, stored, removed)
        self._change(bit, later, [])
        taken = self.index.apply_delta(bit, self.seq[bit], pack(later), b"")
        assert taken is not Intake.APPLIED
        if self.synced[bit]:
            assert taken is Intake.GAP
        self.synced[bit] = False

    @rule(bit=NAMES, parts=st.integers(1, 3))
    def snapshot(self, bit, parts):
        content = sorted(self.content[bit])
        for part in range(parts):
            taken = self.index.apply_snapshot(
                bit, self.seq[bit], pack(content[part::parts]), first=part == 0, last=part == parts - 1
            )
            assert taken is Intake.APPLIED
        self.held[bit], self.synced[bit] = set(content), True

    @rule(bit=NAMES)
    def connects_again(self, bit):
        self.index.new_session(bit)
        self.synced[bit] = False

    @rule(bit=NAMES)
    def restarts(self, bit):
        self.index.drop(bit)
        self._start(bit)

    @rule(prompt=st.lists(st.integers(0, 12), max_size=100), sources=st.integers(0, 7), first=st.integers(0, 12))
    def lookup(self, prompt, sources, first):
        match = self.index.match(pack(prompt))
        leading = {}
        for bit, held in self.held.items():
            length = 0
            while length < len(prompt) and prompt[length] in held:
                length += 1
            if length:
                leading[bit] = length
        assert match.leading == leading
        together = set().union(*self.held.values())
        blocks = 0
        while blocks < len(prompt) and prompt[blocks] in together:
            blocks += 1
        assert match.blocks == blocks
        if first <= blocks:
            end = first
            while end < blocks and any(bit & sources and prompt[end] in held for bit, held in self.held.items()):
                end += 1
            assert match.extent(first, sources) == end

    @invariant()
    def same_content(self):
        for bit, held in self.held.items():
            assert self.index.blocks_of(bit) == len(held)
        self.index.check_integrity()


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexModel = IndexMachine.TestCase
