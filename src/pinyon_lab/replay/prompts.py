"""Tokens for the requests of a trace that has only block ids: equal ids give equal tokens, and different ids others.

A further request of a conversation continues with the tokens that were really generated, as a trace tells only the
answer's length, not its tokens. From then on, the ids of those blocks mean these tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import InvalidArgument
from pinyon_lab.simulator.workload import Arrival

Tokens = npt.NDArray[np.uint32]

ID_MASK = (1 << 64) - 1
DIGITS_MAX = 10
BLOCKS_KEPT = 8192


class TokenRange(NamedTuple):
    """The range of token ids that prompts are made of, both ends included.

    Most vocabularies begin with single characters. These are the printable ones of ASCII, or something equally
    harmless."""

    first: int = 33
    last: int = 126

    @classmethod
    def parse(cls, text: str) -> TokenRange:
        """Parses ``FIRST-LAST``. Raises :class:`InvalidArgument`."""
        first, _, last = text.partition("-")
        numbers = all(each.isdecimal() and len(each) <= DIGITS_MAX for each in (first, last))
        if not (numbers and int(first) < int(last) < 1 << 32):
            raise InvalidArgument(f"not a range of tokens as 33-126: {text!r}", field="token_ids")
        return cls(int(first), int(last))


class ReplayPrompts:
    """The prompts of one replay. Call ``answered`` for each request that ended, then ``of`` for its follower."""

    def __init__(self, arrivals: Sequence[Arrival], block_tokens: int, seed: int, range_: TokenRange) -> None:
        self._arrivals, self._block_tokens = arrivals, block_tokens
        self._seed, self._range = seed, range_
        self._block = lru_cache(BLOCKS_KEPT)(self._made)  # frequent blocks are made once, as making one takes 24 us
        self._known: dict[int, Tokens] = {}
        """The tokens by block id, where generated ones differ from :meth:`_made`'s: at most the trace's blocks."""
        self._followers = Counter(each.follows for each in arrivals if each.follows >= 0)
        self._sent: dict[int, Tokens] = {}
        self._transcripts: dict[int, Tokens] = {}

    def of(self, number: int) -> Tokens:
        """Returns the prompt of the request at this place, with its number of tokens. Call it once per request."""
        arrival, size, known = self._arrivals[number], self._block_tokens, self._known
        parts = [known[block] if block in known else self._block(block) for block in arrival.blocks]
        prompt = np.concatenate(parts)[: arrival.tokens] if parts else np.zeros(0, np.uint32)
        before = self._before(arrival)
        if before is not None:
            prompt[: len(before)] = before[: len(prompt)]
            for place in range(min(len(before) + size - 1, len(prompt)) // size):
                block = arrival.blocks[place]
                tokens = prompt[place * size : (place + 1) * size]
                if not np.array_equal(tokens, self._block(block)):
                    known[block] = tokens.copy()
        if self._followers[number]:
            self._sent[number] = prompt
        return prompt

    def answered(self, number: int, generated: Sequence[int]) -> None:
        """Records the tokens that a request got; none if it failed."""
        sent = self._sent.pop(number, None)
        if sent is not None:
            self._transcripts[number] = np.concatenate([sent, np.asarray(generated, np.uint32)])

    def _before(self, arrival: Arrival) -> Tokens | None:
        """Returns the conversation so far, if this request really continues it."""
        follows = arrival.follows
        if follows < 0:
            return None
        before = self._transcripts.get(follows)
        self._followers[follows] -= 1
        if not self._followers[follows]:
            self._transcripts.pop(follows, None)
        whole = self._arrivals[follows].tokens // self._block_tokens
        if before is None or arrival.blocks[:whole] != self._arrivals[follows].blocks[:whole]:
            return None
        return before

    def _made(self, block: int) -> Tokens:
        dice = np.random.default_rng((self._seed, block & ID_MASK))
        first, last = self._range
        tokens = dice.integers(first, last, self._block_tokens, np.uint32, endpoint=True)
        tokens.flags.writeable = False
        return tokens
