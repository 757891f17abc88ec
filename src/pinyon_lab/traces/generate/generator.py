"""The requests of a profile in order of time, without an end: only conversations and jobs under way are kept.

Conversations are generated turn by turn, programs that call an API job by job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

from pinyon_lab.traces.formats import FORMATS, TraceRow
from pinyon_lab.traces.generate.draws import Ids, Users, exponential, log_normal
from pinyon_lab.traces.generate.profile import DAY_S, Chats, Profile, Programs

ANSWER_S_PER_TOKEN = 0.02
TEXTS_MAX = 4096
"""The number of a program's texts that may be asked again."""
LATE_S = 10.0
"""The time by which a text that is due to be asked again may be late; then it is given up."""
SPREAD = 0.4
"""The sigma of the logarithm of what a call adds to a program's own instructions."""

Series = Iterator[tuple[TraceRow, float]]
"""Requests that follow each other, each with the time of the next one in s; the last one's is infinite."""


class ChatSource:
    """A source of conversations of one kind."""

    def __init__(self, profile: Profile, chats: Chats, users: Users, chatty: Sequence[bool], ids: Ids) -> None:
        """Starts without conversations. ``chatty``: whether a user mostly goes on talking, by user."""
        self._profile, self._chats, self._users, self._chatty, self._ids = profile, chats, users, chatty, ids
        share = profile.chatty_users
        self._chatty_again = min(1.0, chats.again_first * profile.chatty_more)
        self._others_again = (chats.again_first - share * self._chatty_again) / (1.0 - share)
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
            slow = self._profile.hours.slowness(self._profile.start_s + now_s)
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


@dataclass(slots=True)
class _Program:
    instructions: list[int]
    tokens: float
    """The typical length of a prompt; 0: each call has its own."""
    born_s: float
    texts: list[tuple[float, int, list[int]]] = field(default_factory=list)
    """A heap of texts to be asked again: time, number of tokens, blocks."""


class ProgramSource:
    """A source of programs' calls of one kind. Each user has a program, and there are programs that all share."""

    def __init__(self, profile: Profile, programs: Programs, users: Users, ids: Ids) -> None:
        self._programs, self._users, self._ids = programs, users, ids
        self._head = round(programs.head_users * profile.users.number)
        self._by_user: dict[int, _Program] = {}
        self._hot = [(share, _Program(ids.fresh(blocks), 0.0, 0.0)) for share, blocks in programs.hot]
        steps = 256
        calls = sum(max(1, round(programs.calls.at((step + 0.5) / steps))) for step in range(steps)) / steps
        self.begins_per_request = programs.share / (calls * (1 + programs.second_turn))

    def begin(self, now_s: float, rng: Random) -> Series:
        """Yields the calls of a job."""
        programs, ids = self._programs, self._ids
        user, hot = self._users.pick(rng), self._picked_hot(rng)
        if hot is None:
            self._own(user, now_s, rng)  # its draws come before the job's: else a seed would mean another trace
        calls = max(1, round(programs.calls.at(rng.random())))
        mean_s = 1.0 / programs.per_s.at(rng.random())
        for left in reversed(range(calls)):
            prompt, blocks = self._text(hot or self._own(user, now_s, rng), now_s, rng)
            output, chat = max(1, round(programs.output.at(rng.random()))), ids.name()
            call = TraceRow(round(now_s, 3), prompt, output, tuple(blocks), programs.kind, 1, chat, "", str(user))
            followed = rng.random() < programs.second_turn
            now_s = now_s + exponential(rng, mean_s) if left or followed else math.inf
            yield call, now_s
            if followed:  # the answer to the second turn is as long as the call's
                kept = blocks[: prompt // ids.block_tokens]
                prompt += output + max(1, round(programs.tokens.at(rng.random()) / 4))
                second = call._replace(
                    time_s=round(now_s, 3),
                    input_tokens=prompt,
                    blocks=tuple(ids.extended(kept, prompt)),
                    turn=2,
                    chat=ids.name(),
                    parent=chat,
                )
                now_s = now_s + exponential(rng, mean_s) if left else math.inf
                yield second, now_s

    def _picked_hot(self, rng: Random) -> _Program | None:
        chance = rng.random() if self._hot else 1.0
        for share, program in self._hot:
            if chance < share:
                return program
            chance -= share
        return None

    def _own(self, user: int, now_s: float, rng: Random) -> _Program:
        programs = self._programs
        mine = self._by_user.get(user)
        if mine is None or now_s - mine.born_s > programs.life_s:
            tokens = programs.tokens.at(rng.random()) * (programs.head_longer if user < self._head else 1.0)
            low, high = programs.fixed
            fixed = tokens * (low + (high - low) * rng.random())
            mine = _Program(self._ids.fresh(int(fixed) // self._ids.block_tokens), tokens, now_s)
            self._by_user[user] = mine
        return mine

    def _text(self, program: _Program, now_s: float, rng: Random) -> tuple[int, list[int]]:
        """Returns tokens and blocks of a text that is to be asked again, or of a new one."""
        programs, ids, texts = self._programs, self._ids, program.texts
        while texts and texts[0][0] < now_s - LATE_S:
            heappop(texts)
        if texts and texts[0][0] <= now_s:
            _, prompt, blocks = heappop(texts)
            return prompt, blocks
        fixed = len(program.instructions) * ids.block_tokens
        if program.tokens:
            added = (program.tokens - fixed) * log_normal(rng, SPREAD)
        else:
            added = programs.tokens.at(rng.random())
        prompt = fixed + max(1, round(added))
        blocks = ids.extended(program.instructions, prompt)
        if programs.same_after_s is not None and rng.random() < programs.same:
            heappush(texts, (now_s + programs.same_after_s.at(rng.random()), prompt, blocks))
            if len(texts) > TEXTS_MAX:
                heappop(texts)
        return prompt, blocks


def generate(profile: Profile, seed: int) -> Iterator[TraceRow]:
    """Yields the rows of a profile, the same ones for the same seed (from 0). The busiest user is 0. Memory holds the
    conversations and jobs under way, and a program for each user."""
    rng = Random(seed)
    ids = Ids(FORMATS[profile.format].block_tokens)
    users = Users(profile.users.weights())
    chatty = [rng.random() < profile.chatty_users for _ in range(profile.users.number)]
    sources: list[ChatSource | ProgramSource] = [
        ChatSource(profile, part, users, chatty, ids)
        if isinstance(part, Chats)
        else ProgramSource(profile, part, users, ids)
        for part in profile.parts
    ]
    hours = profile.hours
    last_day = int((profile.start_s + profile.duration_s) // DAY_S)
    days = [1.0 + hours.workdays_differ * (2 * rng.random() - 1.0) for _ in range(last_day + 1)]
    busiest = max(days)
    number = len(sources)
    # time, unique number, and event: a source that may begin something, or what goes on
    heap: list[tuple[float, int, ChatSource | ProgramSource | Series]] = [
        (-profile.warm_up_s, place, source) for place, source in enumerate(sources)
    ]
    while heap:
        now_s, _, series = heappop(heap)
        if now_s >= profile.duration_s:
            return
        if isinstance(series, (ChatSource, ProgramSource)):
            number += 1
            after_s = exponential(rng, 1.0 / (profile.per_s * busiest * series.begins_per_request))
            heappush(heap, (now_s + after_s, number, series))
            time_s = profile.start_s + now_s
            rate = hours.rate(time_s) * days[max(0, int(time_s // DAY_S))]
            if rng.random() * busiest >= rate:
                continue
            series = series.begin(now_s, rng)
        row, then_s = next(series)
        if then_s < math.inf:
            number += 1
            heappush(heap, (then_s, number, series))
        if now_s >= 0:
            yield row
