"""Conversations, generated turn by turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pinyon_lab.traces.generate.draws import exponential, log_normal
from pinyon_lab.traces.generate.profile import Chats, Profile
from pinyon_lab.traces.generate.source import Ids, Made, Users

ANSWER_S_PER_TOKEN = 0.02


@dataclass(eq=False, slots=True)
class _Chat:
    user: int
    factor: float
    """The conversation's factor on what its turns add."""
    again: float
    """The probability of one more turn after the second and later ones."""
    system: list[int]
    blocks: list[int]
    """The blocks of the last prompt."""
    prompt: int
    """The tokens of the last prompt."""
    last: str = ""
    """The name of the last request."""
    turn: int = 0


class ChatSource:
    """A source of conversations of one kind."""

    def __init__(self, profile: Profile, chats: Chats, users: Users, chatty: Sequence[bool], ids: Ids) -> None:
        """Starts without conversations. ``chatty``: whether a user mostly goes on talking, by user."""
        self._chats = chats
        self._users = users
        self._chatty = chatty
        share = profile.chatty_users
        self._chatty_again = min(1.0, chats.again_first * profile.chatty_more)
        self._others_again = (chats.again_first - share * self._chatty_again) / (1.0 - share)
        self._hours = profile.hours
        self._start_s = profile.start_s
        self._ids = ids
        self._era: int | None = None
        self._system: list[int] = []
        turns = 1.0 + chats.again_first * (
            (1 - chats.long_share) / (1 - chats.again_later) + chats.long_share / (1 - chats.long_again)
        )
        self.begins_per_request = chats.share / turns
        """The conversations that begin for each request of the whole workload."""

    def begin(self, now_s: float, rng: Random) -> Made:
        """Returns the first turn of a new conversation."""
        chats = self._chats
        factor = log_normal(rng, chats.spread)
        again = chats.long_again if rng.random() < chats.long_share else chats.again_later
        system = self._system_at(now_s) if rng.random() < chats.system_known else []
        chat = _Chat(self._users.pick(rng), factor, again, system, system, len(system) * self._ids.block_tokens)
        return self._turn(chat, chats.first.at(rng.random()), now_s, rng)

    def _system_at(self, now_s: float) -> list[int]:
        chats, ids = self._chats, self._ids
        era = int(now_s // chats.system_life_s) if chats.system_life_s < math.inf else 0
        if era != self._era:
            self._era, self._system = era, ids.fresh(chats.system_tokens // ids.block_tokens)
        return self._system

    def _turn(self, chat: _Chat, more: float, now_s: float, rng: Random) -> Made:
        chats, ids = self._chats, self._ids
        prompt = chat.prompt + max(1, round(more))
        kept = chat.blocks[: chat.prompt // ids.block_tokens]
        if prompt > chats.context_max:
            kept = chat.system
            prompt = min(prompt // 2 + len(kept) * ids.block_tokens, chats.context_max)
        chat.blocks, chat.prompt = ids.extended(kept, prompt), prompt
        output = max(1, round(chats.output.at(rng.random())))
        parent, chat.last = chat.last, ids.name()
        chat.turn += 1
        made = Made(prompt, output, chat.blocks, chats.kind, chat.turn, chat.last, parent, chat.user)
        first = chat.turn == 1
        again = (self._chatty_again if self._chatty[chat.user] else self._others_again) if first else chat.again
        if rng.random() >= again:
            return made
        slow = self._hours.slowness(self._start_s + now_s)
        think_s = chats.think_s * (1.0 if first else chats.think_later) * slow
        wait_s = output * ANSWER_S_PER_TOKEN + exponential(rng, think_s)

        def go_on(then_s: float, rng: Random) -> Made:
            added = output + chat.factor * chats.more.at(rng.random())
            return self._turn(chat, added, then_s, rng)

        return made._replace(then_s=now_s + wait_s, then=go_on)
