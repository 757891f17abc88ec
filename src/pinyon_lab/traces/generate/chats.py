"""Conversations, generated turn by turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from random import Random

from pinyon_lab.traces.formats import TraceRow
from pinyon_lab.traces.generate.draws import exponential, log_normal
from pinyon_lab.traces.generate.profile import Chats, Profile
from pinyon_lab.traces.generate.source import Ids, Series, Users

ANSWER_S_PER_TOKEN = 0.02


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

    def begin(self, now_s: float, rng: Random) -> Series:
        """Yields the turns of a new conversation."""
        chats, ids = self._chats, self._ids
        factor = log_normal(rng, chats.spread)
        again_later = chats.long_again if rng.random() < chats.long_share else chats.again_later
        system = self._system_at(now_s) if rng.random() < chats.system_known else []
        user = self._users.pick(rng)
        blocks, prompt, parent = system, len(system) * ids.block_tokens, ""
        more = chats.first.at(rng.random())
        for turn in count(1):
            kept = blocks[: prompt // ids.block_tokens]
            prompt += max(1, round(more))
            if prompt > chats.context_max:
                kept = system
                prompt = min(prompt // 2 + len(kept) * ids.block_tokens, chats.context_max)
            blocks = ids.extended(kept, prompt)
            output, chat = max(1, round(chats.output.at(rng.random()))), ids.name()
            row = TraceRow(round(now_s, 3), prompt, output, tuple(blocks), chats.kind, turn, chat, parent, str(user))
            again, think_s = again_later, chats.think_s * chats.think_later
            if turn == 1:
                again, think_s = self._chatty_again if self._chatty[user] else self._others_again, chats.think_s
            if rng.random() >= again:
                yield row, math.inf
                return
            slow = self._hours.slowness(self._start_s + now_s)
            now_s += output * ANSWER_S_PER_TOKEN + exponential(rng, think_s * slow)
            yield row, now_s
            more = output + factor * chats.more.at(rng.random())
            parent = chat

    def _system_at(self, now_s: float) -> list[int]:
        chats, ids = self._chats, self._ids
        era = int(now_s // chats.system_life_s) if chats.system_life_s < math.inf else 0
        if era != self._era:
            self._era, self._system = era, ids.fresh(chats.system_tokens // ids.block_tokens)
        return self._system
