"""The prefix trie against a list of records, oldest first: it finds, holds and forgets the same after any calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pinyon.routing.prefix_trie import Match, PrefixTrie, _TrieNode
from pinyon.routing.routing_keys import KEY_BYTES, byte_keys
from tests.long import usually

NAMES = ("a", "b", "c", "d")
PROMPTS = st.lists(st.sampled_from(b"xyz"), max_size=9).map(bytes)
"""Prompts with one byte per chunk: many share prefixes, and branch at all places."""


def keys(prompt: bytes) -> bytes:
    return byte_keys(b"root", prompt, 1)


class Records:
    """The records (prompt, target), oldest first; a target that comes back is a new one."""

    def __init__(self, chunks_max: int, records_max: int) -> None:
        self.chunks_max, self.records_max = chunks_max, records_max
        self.records: list[tuple[bytes, tuple[str, int]]] = []
        self.there: dict[str, int] = {}
        self.boots = 0

    def add(self, name: str) -> None:
        if name not in self.there:
            self.boots += 1
            self.there[name] = self.boots

    def insert(self, prompt: bytes, name: str) -> None:
        prompt = prompt[: self.chunks_max]
        if not prompt:
            return
        record = (prompt, (name, self.there[name]))
        if record in self.records:
            self.records.remove(record)
        self.records.append(record)
        while self.chunks > self.chunks_max or len(self.records) > self.records_max:
            del self.records[0]

    @property
    def chunks(self) -> int:
        return len(self.prefixes(self.records))

    @staticmethod
    def prefixes(records: list[tuple[bytes, tuple[str, int]]]) -> set[bytes]:
        return {prompt[:end] for prompt, _ in records for end in range(1, len(prompt) + 1)}

    def size(self, name: str) -> int:
        who = (name, self.there.get(name, 0))
        return len(self.prefixes([record for record in self.records if record[1] == who]))

    def match(self, prompt: bytes, available: set[str]) -> tuple[int, set[str]]:
        whose = {(name, self.there[name]) for name in available if name in self.there}
        for end in range(len(prompt), 0, -1):
            found = {who[0] for sent, who in self.records if who in whose and sent[:end] == prompt[:end]}
            if found:
                return end, found
        return 0, set()


def check(trie: PrefixTrie) -> None:
    """Raises :class:`AssertionError` where the trie contradicts ittrie. Looks at all of it."""
    assert trie.chunks <= trie._chunks_max, f"{trie.chunks} chunks, at most {trie._chunks_max} may be"
    assert len(trie._records) <= trie._records_max, "too many records"
    expected: dict[_TrieNode, dict[int, int]] = {}
    for last, place in trie._records:
        node: _TrieNode | None = last
        while node is not None:
            counts = expected.setdefault(node, {})
            counts[place] = counts.get(place, 0) + 1
            node = node.parent
    assert set(expected) == set(trie._starts.values()), "a node without records, or one that is not found"
    for node, counts in expected.items():
        assert node.counts == counts, "records are miscounted"
        assert node.targets == sum([1 << place for place in counts]), "bits differ from counts"
        assert trie._starts[node.keys[:KEY_BYTES]] is node
        assert node.parent is None or not node.targets & ~node.parent.targets, "a child has a target of its own"
    assert trie.chunks == sum([len(node.keys) for node in expected]) // KEY_BYTES, "chunks are miscounted"
    assert trie.bits == {target: 1 << place for target, place in trie._places.items()}, "bits differ from places"
    taken = sorted([*trie._places.values(), *trie._free, *trie._left])
    assert taken == list(range(trie._width)), "places are lost, or given twice"
    for place in range(trie._width):
        sizes = [len(node.keys) for node in expected if place in node.counts]
        assert trie._sizes[place] == sum(sizes) // KEY_BYTES, "sizes are miscounted"


class TrieMachine(RuleBasedStateMachine):
    @initialize(chunks_max=st.integers(1, 40), records_max=st.integers(1, 12))
    def begin(self, chunks_max: int, records_max: int) -> None:
        self.trie, self.model = PrefixTrie(chunks_max, records_max), Records(chunks_max, records_max)

    @rule(name=st.sampled_from(NAMES))
    def add(self, name: str) -> None:
        self.trie.add(name)
        self.model.add(name)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.trie.remove(name)
        self.model.there.pop(name, None)

    @rule(prompt=PROMPTS, name=st.sampled_from(NAMES))
    def insert(self, prompt: bytes, name: str) -> None:
        if name in self.model.there:
            before = self.model.match(prompt, {name})[0]
            assert self.trie.insert(keys(prompt), name) == before
            self.model.insert(prompt, name)

    @rule(prompt=PROMPTS, available=st.sets(st.sampled_from(NAMES)))
    def match(self, prompt: bytes, available: set[str]) -> None:
        bits = {name: self.trie.bit(name) for name in available}
        found = self.trie.match(keys(prompt), sum(bits.values()))
        assert (found.chunks, {name for name in available if bits[name] & found.targets}) == self.model.match(
            prompt, available
        )

    @invariant()
    def same(self) -> None:
        check(self.trie)
        assert (self.trie.chunks, len(self.trie)) == (self.model.chunks, len(self.model.records))
        assert [self.trie.size(name) for name in NAMES] == [self.model.size(name) for name in NAMES]


TestTrie = TrieMachine.TestCase
TestTrie.settings = settings(max_examples=usually(20, long=200), stateful_step_count=40, deadline=None)


def test_a_match_may_end_within_a_run_of_keys() -> None:
    trie = PrefixTrie()
    trie.add("a")
    trie.insert(keys(b"abcdefgh"), "a")
    assert trie.match(keys(b"abcxxx"), trie.bit("a")) == Match(3, trie.bit("a"))
    assert trie.nodes == 1


def test_what_was_sent_before_a_target_came_back_is_not_found() -> None:
    trie = PrefixTrie(records_max=2)
    trie.add("a")
    trie.insert(keys(b"abc"), "a")
    trie.remove("a")
    trie.add("a")
    assert trie.match(keys(b"abc"), trie.bit("a")) == Match(0, 0)
    for name in range(100):  # a target that leaves no records takes no place
        trie.add(str(name))
        trie.remove(str(name))
    assert trie.bit("a") < 1 << 3


def test_any_number_of_distinct_prompts_takes_bounded_room() -> None:
    """Costs are in nodes and records; bench/router.py has the figures of memory."""
    trie = PrefixTrie(chunks_max=5_000, records_max=500)
    trie.add("a")
    shared = keys(b"shared" * 10)
    most = 0
    for number in range(20_000):
        trie.insert(shared + number.to_bytes(KEY_BYTES, "little") * 2, "a")
        most = max(most, trie.nodes)
    assert most <= 2 * 500 + 1
    assert trie.chunks <= 5_000
    check(trie)
