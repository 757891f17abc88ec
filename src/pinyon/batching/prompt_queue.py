"""Prompts to compute: a bounded queue, and a few that are in progress at once.

A prompt waits while another one computes (or fetches) the block that it needs next, since a prefix is never computed
twice. Meanwhile, prompts behind it that share nothing go first. A prompt in progress *claims* the blocks that it will
bring, until they are published or the prompt ends.

After any change, more prompts may be able to leave the queue: :meth:`PromptQueue.start` says which."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from pinyon.batching.interface import ServiceOrder
from pinyon.batching.service_order import FifoOrder
from pinyon.batching.step import PromptWork
from pinyon.core.block_keys import BlockKey
from pinyon.core.errors import ResourceExhausted

LOOK_AHEAD = 32
"""The number of queued prompts among which one that waits for no other is searched."""


class Prefixes(Protocol):
    """The blocks that are held already: :class:`pinyon.paging.BlockPool`."""

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading keys are held."""

    def want(self, keys: Sequence[BlockKey]) -> int:
        """Keeps the held leading keys for a waiting prompt: others are evicted first. Returns their number."""

    def unwant(self, keys: Sequence[BlockKey]) -> None:
        """Ends what :meth:`want` began for that prompt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of ``tokens`` tokens. No other prompt has its ``number`` while it lives."""

    number: int
    tokens: int
    keys: tuple[BlockKey, ...]
    """Keys of its full blocks."""
    reusable: int
    """Leading keys whose blocks it may reuse."""
    owned: bool
    """True if the prompt came with KV memory of its own, so it never waits for room."""
    arrived_s: float = 0.0
    shared: bool = True
    """True if others may reuse what it computes."""
    seconds: float = 0.0
    """Predicted seconds to compute it; 0: unknown."""
    deadline_s: float = 0.0
    """The time at which its first token is due; 0: unknown."""


class PromptQueue:
    """A queue of ``limit`` prompts; up to ``active`` are in progress, not counting those that wait for KV memory.

    The ``order`` says which leaves first, and has no other user."""

    def __init__(self, prefixes: Prefixes, *, active: int, limit: int, order: ServiceOrder[int] | None = None) -> None:
        """Starts an empty queue. Without an ``order``: first come, first served."""
        self._prefixes = prefixes
        self._order: ServiceOrder[int] = FifoOrder() if order is None else order
        self._slots = active
        self._limit = limit
        self._queue: dict[int, Prompt] = {}
        self._owned: OrderedDict[int, None] = OrderedDict()
        """Queued prompts that brought their KV memory along, in order of arrival."""
        self._active: dict[int, Prompt] = {}
        self._roomless: set[int] = set()
        self._back: dict[int, None] = {}
        """Prompts in progress that wait for blocks that another prompt computes."""
        self._claims: dict[BlockKey, int] = {}
        self._left: dict[int, int] = {}
        self._wanted: dict[int, int] = {}
        """The number of leading keys whose blocks are kept from eviction for each prompt that has no blocks yet."""
        self.pending_tokens = 0
        """Accepted prompt tokens that are neither computed nor reused yet."""

    # -- figures

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def waiting_for_others(self) -> int:
        """Prompts in progress that are held back: see :meth:`held_back`."""
        return len(self._back)

    @property
    def foreign(self) -> int:
        """Prompts computed for other instances, queued ones included."""
        return sum(not prompt.owned for prompt in (*self._queue.values(), *self._active.values()))

    @property
    def foreign_queued(self) -> int:
        """Queued prompts for other instances."""
        return len(self._queue) - len(self._owned)

    @property
    def held_up(self) -> int:
        """Queued prompts for other instances that may not leave, since prompts before them wait for KV memory."""
        return self.foreign_queued if self._roomless else 0

    def left(self, number: int) -> int:
        """Returns how many of a prompt's tokens are left; 0 if the prompt is not known."""
        return self._left.get(number, 0)

    def work(self, number: int, position: int) -> PromptWork:
        """Returns the work of a prompt in progress that has KV up to ``position``. Raises ``KeyError`` otherwise."""
        prompt = self._active[number]
        return PromptWork(number, position, prompt.tokens, prompt.arrived_s, prompt.seconds, prompt.deadline_s)

    # -- life of a prompt

    def add(self, prompt: Prompt, now_s: float) -> None:
        """Adds a prompt. Raises ``ResourceExhausted`` if the queue is full, ``ValueError`` if the number is known."""
        if len(self._left) >= self._limit:
            raise ResourceExhausted("the prefill queue is full", field="prefill_instance", retry_after_s=1.0)
        if prompt.number in self._left:
            raise ValueError(f"prompt {prompt.number} is here already")
        self._queue[prompt.number] = prompt
        if prompt.owned:
            self._owned[prompt.number] = None
        self._order.add(prompt.number, now_s, prompt.seconds, prompt.deadline_s or math.inf)
        self._left[prompt.number] = prompt.tokens
        if not prompt.owned:  # an owned prompt holds its cached blocks already
            self._wanted[prompt.number] = self._prefixes.want(prompt.keys[: prompt.reusable])
        self.pending_tokens += prompt.tokens

    def start(self, now_s: float) -> list[int]:
        """Returns the prompts that were held back and need not wait any more, then those that leave the queue now."""
        started: list[int] = []
        back = self._let_go() if self._back else []
        room = self._slots - (len(self._active) - len(self._roomless))
        if room > 0 and self._queue:
            for number in self._next(now_s):  # lazily, as each turn is costly
                prompt = self._queue[number]
                if self._roomless and not prompt.owned:
                    continue  # prompts before it wait for KV memory
                held = self._prefixes.match_prefix(prompt.keys)
                if self._behind(prompt, held):
                    continue
                self._active[number] = prompt
                self._claim(prompt, held)
                started.append(number)
                if len(started) == room:
                    break
            for number in started:
                del self._queue[number]
                self._owned.pop(number, None)
                self._order.take(number, now_s)
        return back + started

    def _let_go(self) -> list[int]:
        gone: list[int] = []
        for number in self._back:
            prompt = self._active[number]
            held = self._prefixes.match_prefix(prompt.keys)
            if not self._behind(prompt, held):
                self._claim(prompt, held)
                gone.append(number)
        for number in gone:
            del self._back[number]
        return gone

    def _next(self, now_s: float) -> Iterator[int]:
        """Returns the prompts to look at. While others wait for KV memory, only prompts that brought theirs may start.

        These may start however far behind they are, since the others may be waiting for the memory that they hold."""
        if self._roomless:
            return islice(self._owned, LOOK_AHEAD)
        return islice(self._order.turns(now_s), LOOK_AHEAD)

    def _behind(self, prompt: Prompt, held: int) -> bool:
        """Returns whether another prompt computes (or fetches) the block that follows the ``held`` leading keys."""
        return held < prompt.reusable and self._claims.get(prompt.keys[held], prompt.number) != prompt.number

    def waits(self, number: int) -> bool:
        """Returns whether the prompt is still queued."""
        return number in self._queue

    def waits_for_room(self, number: int) -> None:
        """Lets a prompt wait for KV memory and gives its place to others, which may hold that memory."""
        self._roomless.add(number)
        self._unclaim(self._active[number])

    def has_room(self, number: int) -> None:
        """Records that the prompt does not wait for KV memory any more."""
        self._roomless.remove(number)
        prompt = self._active[number]
        self._claim(prompt, self._prefixes.match_prefix(prompt.keys))

    def reserved(self, number: int) -> None:
        """Records that the prompt now holds its cached blocks itself, so they need no more protection."""
        self._unwant(self._active[number])

    def held_back(self, number: int) -> bool:
        """Returns whether a prompt that has its blocks must wait until :meth:`start` names it again.

        While the prompt waited for room, another one may have begun to compute the block that it needs next, or a
        cached block may be gone. Once :meth:`start` names the prompt, it looks up the cached blocks again."""
        prompt = self._active[number]
        held = self._prefixes.match_prefix(prompt.keys)
        self._claim(prompt, held)
        behind = self._behind(prompt, held)
        if behind:
            self._back[number] = None
        return behind

    def _unwant(self, prompt: Prompt) -> None:
        wanted = self._wanted.pop(prompt.number, 0)
        if wanted:
            self._prefixes.unwant(prompt.keys[:wanted])

    def published(self, number: int, keys: Sequence[BlockKey]) -> None:
        """Records that the prompt's blocks with these keys can be reused now."""
        claims = self._claims
        if not claims:
            return
        for key in keys:
            claimed = claims.pop(key, None)
            if claimed is not None and claimed != number:
                claims[key] = claimed

    def advanced(self, number: int, tokens: int) -> None:
        """Subtracts computed ``tokens``. The rest falls below 0 if reused blocks turned out not to be there."""
        self._left[number] -= tokens
        self.pending_tokens -= tokens

    def end(self, number: int) -> bool:
        """Removes a prompt that is done or was abandoned. Returns False if it is not known."""
        prompt = self._queue.pop(number, None)
        if prompt is not None:
            self._owned.pop(number, None)
            self._order.remove(number)
        else:
            prompt = self._active.pop(number, None)
            if prompt is None:
                return False
            self._roomless.discard(number)
            self._back.pop(number, None)
            self._unclaim(prompt)
        self.pending_tokens -= self._left.pop(number)
        self._unwant(prompt)
        return True

    # -- claims

    def _claim(self, prompt: Prompt, held: int) -> None:
        """Claims the blocks that the prompt will compute (or fetch), after its ``held`` leading keys."""
        if prompt.shared:
            claims, number = self._claims, prompt.number
            for key in prompt.keys[held:]:
                claims.setdefault(key, number)

    def _unclaim(self, prompt: Prompt) -> None:
        self.published(prompt.number, prompt.keys)
