"""The prompt queue against a model that keeps lists and looks at everything each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pinyon.batching import Prompt, PromptQueue
from pinyon.core.errors import ResourceExhausted
from tests.long import usually
from tests.worker_integrity import check_prompts

ACTIVE, LIMIT = 2, 6
LETTERS = 3


def chain(path: list[int]) -> tuple[bytes, ...]:
    """Returns the keys of a prompt with the blocks ``path``; equal keys mean that everything before is equal, too."""
    return tuple(bytes(path[: end + 1]).ljust(16, b"\xff") for end in range(len(path)))


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.held: set[bytes] = set()
        self.queue = PromptQueue(self, active=ACTIVE, limit=LIMIT)
        self.next = 0
        self.prompts: dict[int, Prompt] = {}
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.roomless: set[int] = set()
        self.back: list[int] = []
        self.claims: dict[int, set[bytes]] = {}
        self.left: dict[int, int] = {}
        self.wanted: Counter[bytes] = Counter()
        self.wants: dict[int, list[bytes]] = {}
        """The held prefix of each prompt without blocks, at its arrival."""

    def want(self, keys) -> int:
        self.wanted.update(keys[: self.match_prefix(keys)])
        return self.match_prefix(keys)

    def unwant(self, keys) -> None:
        self.wanted.subtract(keys)

    def match_prefix(self, keys) -> int:
        return next((index for index, key in enumerate(keys) if key not in self.held), len(keys))

    def claim(self, number: int) -> None:
        prompt = self.prompts[number]
        taken = set().union(*self.claims.values())
        mine = prompt.keys[self.match_prefix(prompt.keys) :] if prompt.shared else ()
        self.claims[number] = set(mine) - taken

    @rule(
        path=st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=4),
        rest=st.integers(0, 3),
        owned=st.booleans(),
        shared=st.sampled_from([True, True, False]),
    )
    def add(self, path: list[int], rest: int, owned: bool, shared: bool) -> None:
        keys = chain(path)
        tokens = 4 * len(path) + rest
        prompt = Prompt(self.next, tokens, keys, (tokens - 1) // 4 if shared else 0, owned, 0.0, shared)
        if len(self.prompts) == LIMIT:
            with pytest.raises(ResourceExhausted):
                self.queue.add(prompt, 0.0)
            return
        self.queue.add(prompt, 0.0)
        keys = prompt.keys[: prompt.reusable]
        self.wants[self.next] = [] if owned else list(keys[: self.match_prefix(keys)])  # a holder's keys
        self.prompts[self.next] = prompt
        self.waiting.append(self.next)
        self.left[self.next] = tokens
        self.next += 1

    def behind(self, number: int) -> bool:
        prompt = self.prompts[number]
        keys = prompt.keys[: prompt.reusable]
        held = self.match_prefix(keys)
        others = set().union(*(claims for other, claims in self.claims.items() if other != number))
        return held < len(keys) and keys[held] in others

    def claim_more(self, number: int) -> None:
        before = self.claims[number]
        self.claim(number)
        self.claims[number] |= before

    @precondition(lambda self: set(self.running) - self.roomless - set(self.back))
    @rule(data=st.data())
    def held_back(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.running) - self.roomless - set(self.back))))
        self.claim_more(number)
        assert self.queue.held_back(number) == self.behind(number)
        if self.behind(number):
            self.back.append(number)

    @rule()
    def start(self) -> None:
        started = []
        for number in list(self.back):
            if not self.behind(number):
                self.claim_more(number)
                self.back.remove(number)
                started.append(number)
        for number in list(self.waiting):
            if len(self.running) - len(self.roomless) >= ACTIVE:
                break
            prompt = self.prompts[number]
            keys = prompt.keys[: prompt.reusable]
            held = self.match_prefix(keys)
            taken = set().union(*self.claims.values())
            if (self.roomless and not prompt.owned) or (held < len(keys) and keys[held] in taken):
                continue
            self.waiting.remove(number)
            self.running.append(number)
            self.claim(number)
            started.append(number)
        assert self.queue.start(0.0) == started

    @precondition(lambda self: set(self.running) - self.roomless - set(self.back))
    @rule(data=st.data())
    def waits_for_room(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.running) - self.roomless - set(self.back))))
        self.queue.waits_for_room(number)
        self.roomless.add(number)
        self.claims[number] = set()

    @precondition(lambda self: self.roomless)
    @rule(data=st.data())
    def has_room(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.roomless)))
        self.queue.has_room(number)
        self.roomless.remove(number)
        self.claim(number)

    @precondition(lambda self: set(self.running) - self.roomless)
    @rule(data=st.data())
    def reserved(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.running) - self.roomless)))
        self.queue.reserved(number)
        self.wants.pop(number, None)

    @precondition(lambda self: set(self.running) - self.roomless)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Computes one more block, which can be reused from now on if the prompt is shared."""
        number = data.draw(st.sampled_from(sorted(set(self.running) - self.roomless)))
        prompt = self.prompts[number]
        tokens = min(4, self.left[number])
        self.queue.advanced(number, tokens)
        self.left[number] -= tokens
        done = (prompt.tokens - self.left[number]) // 4
        if prompt.shared and done:
            self.held.add(prompt.keys[done - 1])
            self.queue.published(number, [prompt.keys[done - 1]])
            self.claims[number].discard(prompt.keys[done - 1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.held.remove(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.prompts)))
        assert self.queue.end(number)
        assert not self.queue.end(number)
        del self.prompts[number], self.left[number]
        self.claims.pop(number, None)
        self.wants.pop(number, None)
        self.roomless.discard(number)
        if number in self.back:
            self.back.remove(number)
        (self.waiting if number in self.waiting else self.running).remove(number)

    @invariant()
    def books_balance(self) -> None:
        queue = self.queue
        check_prompts(queue)
        assert (queue.queued, queue.active) == (len(self.waiting), len(self.running))
        assert queue.waiting_for_others == len(self.back)
        assert queue.foreign == sum(not prompt.owned for prompt in self.prompts.values())
        assert queue.pending_tokens == sum(self.left.values())
        assert +self.wanted == Counter(key for keys in self.wants.values() for key in keys)

    def teardown(self) -> None:
        """Checks that all prompts complete from any state."""
        for number in sorted(self.roomless):
            self.queue.has_room(number)
        while self.prompts:
            self.running += [number for number in self.queue.start(0.0) if number not in self.running]
            self.waiting = [number for number in self.waiting if number not in self.running]
            assert self.running, "prompts wait for nobody"
            number = self.running.pop(0)
            del self.prompts[number]
            assert self.queue.end(number)
        check_prompts(self.queue)
        assert (self.queue.queued, self.queue.active, self.queue.pending_tokens) == (0, 0, 0)
        assert not +self.wanted


Model.TestCase.settings = settings(max_examples=usually(20, long=80), stateful_step_count=40)
TestPromptQueue = Model.TestCase
