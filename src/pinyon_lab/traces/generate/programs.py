"""Programs that call an API, generated job by job."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from random import Random

from pinyon_lab.traces.formats import TraceRow
from pinyon_lab.traces.generate.draws import exponential, log_normal
from pinyon_lab.traces.generate.profile import Profile, Programs
from pinyon_lab.traces.generate.source import Ids, Series, Users

TEXTS_MAX = 4096
"""The number of a program's texts that may be asked again."""
LATE_S = 10.0
"""The time by which a text that is due to be asked again may be late; then it is given up."""
SPREAD = 0.4
"""The sigma of the logarithm of what a call adds to a program's own instructions."""


class _Program:
    __slots__ = ("born_s", "instructions", "texts", "tokens")

    def __init__(self, instructions: list[int], tokens: float, born_s: float) -> None:
        self.born_s = born_s
        self.instructions = instructions
        self.tokens = tokens
        """The typical length of a prompt; 0: each call has its own."""
        self.texts: list[tuple[float, int, list[int]]] = []
        """A heap of texts to be asked again: time, number of tokens, blocks."""


class ProgramSource:
    """A source of programs' calls of one kind. Each user has a program, and there are programs that all share."""

    def __init__(self, profile: Profile, programs: Programs, users: Users, ids: Ids) -> None:
        self._programs = programs
        self._users = users
        self._ids = ids
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
