"""Programs that call an API, job by job."""

from __future__ import annotations

import math
from collections import deque
from random import Random

from pinyon.traces.generate.profile import Profile, Programs
from pinyon.traces.generate.source import Ids, Made, chance_to_exponential, chance_to_normal
from pinyon.traces.generate.users import Users

__all__ = ["ProgramSource"]

TEXTS_MAX = 4096
"""Of a program, those that may be asked again."""
LATE_S = 10.0
"""What no call of the program asked again until then is not any more."""


class _Program:
    __slots__ = ("born_s", "instructions", "texts", "tokens", "user")

    def __init__(self, user: int, instructions: list[int], tokens: float, born_s: float) -> None:
        self.born_s = born_s
        self.user = user
        self.instructions = instructions
        self.tokens = tokens
        """Of a prompt, typically."""
        self.texts: deque[tuple[float, int, list[int]]] = deque(maxlen=TEXTS_MAX)
        """When, how many tokens and which blocks: what is to be asked again, the earliest first."""


class ProgramSource:
    """Of one kind. Each user has one program; and there are those that all share."""

    def __init__(self, profile: Profile, programs: Programs, users: Users, ids: Ids, rng: Random) -> None:
        self._programs = programs
        self._users = users
        self._ids = ids
        self._head = round(programs.head_users * profile.users.number)
        self._by_user: dict[int, _Program] = {}
        self._hot = [(share, _Program(-1, ids.fresh(blocks), 0.0, 0.0)) for share, blocks in programs.hot]
        steps = 256
        calls = sum(max(1, round(programs.calls.at((step + 0.5) / steps))) for step in range(steps)) / steps
        self.begins_per_request = programs.share / (calls * (1 + programs.second_turn))

    def begin(self, now_s: float, rng: Random) -> Made:
        """The first call of a job."""
        programs = self._programs
        user = self._users.pick(rng)
        program = self._program(user, now_s, rng)
        calls = max(1, round(programs.calls.at(rng.random())))
        return self._call(program, user, calls, programs.per_s.at(rng.random()), now_s, rng)

    def _program(self, user: int, now_s: float, rng: Random) -> _Program:
        chance = rng.random() if self._hot else 1.0
        for share, program in self._hot:
            if chance < share:
                return program
            chance -= share
        return self._own(user, now_s, rng)

    def _own(self, user: int, now_s: float, rng: Random) -> _Program:
        programs = self._programs
        mine = self._by_user.get(user)
        if mine is None or now_s - mine.born_s > programs.life_s:
            tokens = programs.tokens.at(rng.random()) * (programs.head_longer if user < self._head else 1.0)
            low, high = programs.fixed
            fixed = tokens * (low + (high - low) * rng.random())
            mine = _Program(user, self._ids.fresh(int(fixed) // self._ids.block_tokens), tokens, now_s)
            self._by_user[user] = mine
        return mine

    def _call(self, program: _Program, user: int, left: int, per_s: float, now_s: float, rng: Random) -> Made:
        programs, ids = self._programs, self._ids
        size = ids.block_tokens
        if program.tokens:
            program = self._own(user, now_s, rng)
        texts = program.texts
        while texts and texts[0][0] < now_s - LATE_S:
            texts.popleft()
        if texts and texts[0][0] <= now_s:
            _, prompt, blocks = texts.popleft()
        else:
            fixed = len(program.instructions) * size
            own = (program.tokens - fixed) if program.tokens else programs.tokens.at(rng.random())
            sigma = programs.spread if program.tokens else 0.0
            own *= math.exp(sigma * chance_to_normal(rng) - sigma * sigma / 2) if sigma else 1.0
            prompt = fixed + max(1, round(own))
            blocks = program.instructions + ids.fresh(-(-prompt // size) - len(program.instructions))
            if programs.same_after_s is not None and rng.random() < programs.same:
                self._ask_again(program, now_s + programs.same_after_s.at(rng.random()), prompt, blocks)
        output = max(1, round(programs.output.at(rng.random())))
        chat = ids.name()
        followed = rng.random() < programs.second_turn
        if left <= 1 and not followed:
            return Made(prompt, output, blocks, programs.kind, 1, chat, "", user, 0.0, None)
        then_s = now_s + chance_to_exponential(rng.random(), 1.0 / per_s)

        def go_on(then_s: float, rng: Random) -> Made:
            if not followed:
                return self._call(program, user, left - 1, per_s, then_s, rng)
            longer = prompt + output + max(1, round(programs.tokens.at(rng.random()) / 4))
            kept = blocks[: prompt // size]
            more = kept + ids.fresh(-(-longer // size) - len(kept))
            name = (programs.kind, 2, ids.name(), chat, user)
            if left <= 1:
                return Made(longer, output, more, *name, 0.0, None)
            later_s = then_s + chance_to_exponential(rng.random(), 1.0 / per_s)
            return Made(
                *(longer, output, more, *name, later_s),
                lambda at_s, rng: self._call(program, user, left - 1, per_s, at_s, rng),
            )

        return Made(prompt, output, blocks, programs.kind, 1, chat, "", user, then_s, go_on)

    @staticmethod
    def _ask_again(program: _Program, when_s: float, prompt: int, blocks: list[int]) -> None:
        texts = program.texts
        if texts and when_s < texts[-1][0]:
            kept = sorted([*texts, (when_s, prompt, blocks)], key=lambda text: text[0])
            texts.clear()
            texts.extend(kept)
        else:
            texts.append((when_s, prompt, blocks))
