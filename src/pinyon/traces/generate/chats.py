"""Conversations, turn by turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from pinyon.traces.generate.profile import Chats, Profile
from pinyon.traces.generate.source import Ids, Made, chance_to_exponential, chance_to_normal
from pinyon.traces.generate.users import Users

__all__ = ["ChatSource"]


class _Chat:
    __slots__ = ("again", "blocks", "factor", "last", "prompt", "system", "turn", "user")

    def __init__(self, user: int, factor: float, again: float, system: list[int]) -> None:
        self.user = user
        self.factor = factor
        self.again = again
        """Probability of one more after the second and later turns."""
        self.system = system
        self.blocks: list[int] = system
        self.prompt = 0
        self.turn = 0
        self.last = ""


class ChatSource:
    """Of one kind."""

    def __init__(self, profile: Profile, chats: Chats, users: Users, chatty: Callable[[int], bool], ids: Ids) -> None:
        self._chats = chats
        self._users = users
        self._chatty = chatty
        share = profile.chatty_users
        self._chatty_again = min(1.0, chats.again_first * profile.chatty_more)
        self._others_again = (chats.again_first - share * self._chatty_again) / (1.0 - share)
        self._hours = profile.hours
        self._start_s = profile.start_s
        self._ids = ids
        self._systems: dict[int, list[int]] = {}
        turns = 1.0 + chats.again_first * (
            (1 - chats.long_share) / (1 - chats.again_later) + chats.long_share / (1 - chats.long_again)
        )
        self.begins_per_request = chats.share / turns
        """Conversations."""

    def begin(self, now_s: float, rng: Random) -> Made:
        """The first turn of a new conversation."""
        chats = self._chats
        sigma = chats.spread
        factor = math.exp(sigma * chance_to_normal(rng) - sigma * sigma / 2) if sigma else 1.0
        again = chats.long_again if rng.random() < chats.long_share else chats.again_later
        system = self._system(now_s) if rng.random() < chats.system_known else []
        chat = _Chat(self._users.pick(rng), factor, again, system)
        chat.prompt = len(system) * self._ids.block_tokens
        return self._turn(chat, chats.first.at(rng.random()), now_s, rng)

    def _system(self, now_s: float) -> list[int]:
        chats, ids = self._chats, self._ids
        era = int(now_s // chats.system_life_s) if chats.system_life_s < math.inf else 0
        if era not in self._systems:
            self._systems = {era: ids.fresh(chats.system_tokens // ids.block_tokens)}
        return self._systems[era]

    def _turn(self, chat: _Chat, more: float, now_s: float, rng: Random) -> Made:
        chats, ids = self._chats, self._ids
        prompt = chat.prompt + max(1, round(more))
        kept = chat.blocks[: chat.prompt // ids.block_tokens]
        if prompt > chats.context_max:
            kept = list(chat.system)
            prompt = min(prompt // 2 + len(kept) * ids.block_tokens, chats.context_max)
        blocks = kept + ids.fresh(-(-prompt // ids.block_tokens) - len(kept))
        output = max(1, round(chats.output.at(rng.random())))
        chat.turn += 1
        chat.blocks, chat.prompt = blocks, prompt
        parent, chat.last = chat.last, ids.name()
        name = (chats.kind, chat.turn, chat.last, parent, chat.user)
        first = chat.turn == 1
        again = (self._chatty_again if self._chatty(chat.user) else self._others_again) if first else chat.again
        if rng.random() >= again:
            return Made(prompt, output, blocks, *name, 0.0, None)
        slow = self._hours.slowness(self._start_s + now_s)
        think_s = chats.think_s * (1.0 if first else chats.think_later) * slow
        wait_s = output * chats.answer_s_per_token + chance_to_exponential(rng.random(), think_s)

        def go_on(then_s: float, rng: Random) -> Made:
            added = output + chat.factor * chats.more.at(rng.random())
            return self._turn(chat, added, then_s, rng)

        return Made(prompt, output, blocks, *name, now_s + wait_s, go_on)
