"""Conversations like those of ChatBot Arena and WildChat: their lengths, and what users and regions share."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

from pinyon_lab.simulator.regions.programs import Fresh, Program, ProgramStep, Text, fresh_keys
from pinyon_lab.traces.generate.draws import log_normal

TEMPLATE_TOKENS = 32
"""The length of Llama 3.1's chat template before the first message of all requests, in whole blocks of 16."""
OPENING, OPENING_SIGMA, OPENING_REST = 0.75, 0.5, 0.2
"""The mean length of an opening by that of a prompt, its sigma, and the length of what follows by the prompt's without
an opening. So prompts are as long as without openings, and openings most of what they begin."""
TOKENS_MIN = 4


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The settings of conversations. Lengths are of one turn, in tokens: means and sigmas of log-normal distributions.
    An *opening* begins the first prompt of some of them: the user's, or a popular one of the region or of all
    regions."""

    prompt_mean: float
    prompt_sigma: float
    answer_mean: float
    answer_sigma: float
    again: float
    """The probability of one more turn."""
    long_share: float
    """The share of conversations whose probability of one more turn is ``long_again``."""
    long_again: float
    users: int
    """The number of users of a region; the n-th begins conversations in proportion to 1 / n^``skew``."""
    skew: float
    own: float
    """The probability that a conversation begins with its user's opening."""
    regional: float
    """The probability that a conversation begins with an opening that is popular in the region."""
    worldwide: float
    """The probability that a conversation begins with an opening that is popular everywhere."""
    openings: int
    """The number of openings that are popular in a region, and of those that are popular everywhere."""
    context_max: int = 16_384
    """The limit of a prompt and its answer in tokens: a conversation that would exceed it ends."""


ARENA: Final = ChatSettings(
    prompt_mean=52.3, prompt_sigma=1.28, answer_mean=189.5, answer_sigma=0.8,
    again=1 / 6, long_share=0.0, long_again=0.0,
    users=600, skew=0.8, own=0.18, regional=0.15, worldwide=0.26, openings=2,
)  # fmt: skip
"""The settings for ChatBot Arena. Lengths and turns (1.2 in the mean) are published by the data set's authors
(LMSYS-Chat-1M, Table 1); sigmas are of LMSYS-Chat-1M. With these openings, a user's conversations share 2.47 times as
much with each other as with others' (§3.2)."""
WILDCHAT: Final = ChatSettings(
    prompt_mean=295.6, prompt_sigma=1.85, answer_mean=441.3, answer_sigma=0.79,
    again=0.41, long_share=0.095, long_again=0.9,
    users=600, skew=0.8, own=0.37, regional=0.15, worldwide=0.28, openings=2,
)  # fmt: skip
"""The settings for WildChat. Lengths and turns (2.5 in the mean, more than ten in 3.7 % of the conversations) are
published by its authors. Openings as for :data:`ARENA`: 7.60 times, and 2.5 % across regions."""


class SharedTexts:
    """The texts that all regions share."""

    def __init__(self, settings: ChatSettings, rng: Random) -> None:
        self.settings = settings
        self.fresh = fresh_keys(rng)
        self.template = Text().extended(TEMPLATE_TOKENS, self.fresh)
        self.openings = [self.opening(rng) for _ in range(settings.openings)]

    def opening(self, rng: Random) -> Text:
        tokens = OPENING * self.settings.prompt_mean * log_normal(rng, OPENING_SIGMA)
        return self.template.extended(max(TOKENS_MIN, round(tokens)), self.fresh)

    def prompt_tokens(self, rng: Random) -> int:
        chats = self.settings
        most = chats.context_max // 2
        return min(most, max(TOKENS_MIN, round(chats.prompt_mean * log_normal(rng, chats.prompt_sigma))))

    def answer_tokens(self, rng: Random) -> int:
        chats = self.settings
        return min(chats.context_max // 2, max(1, round(chats.answer_mean * log_normal(rng, chats.answer_sigma))))


class RegionChatSource:
    """A source of one region's conversations. Raises ``ValueError`` if the probabilities exceed 1 together.

    A program has ``least`` to ``most`` conversations of one user, begun at once: where there are several, bursts, and
    programs with several patterns (SkyWalker §3.2)."""

    def __init__(self, chats: SharedTexts, region: str, rng: Random, least: int = 1, most: int = 1) -> None:
        settings = chats.settings
        if settings.own + settings.regional + settings.worldwide > 1:
            raise ValueError("conversations begin with an opening of one kind only")
        self._chats, self._region, self._least, self._most = chats, region, least, most
        self._openings = [chats.opening(rng) for _ in range(settings.openings)]
        self._own = [chats.opening(rng) for _ in range(settings.users)]
        self._weights = list(accumulate(1 / number**settings.skew for number in range(1, settings.users + 1)))

    def program(self, rng: Random) -> Program:
        user = bisect(self._weights, rng.random() * self._weights[-1])
        steps: list[ProgramStep] = []
        for _ in range(rng.randint(self._least, self._most) if self._most > 1 else 1):
            self._converse(steps, user, rng)
        return Program(f"{self._region} {user}", tuple(steps))

    def _converse(self, steps: list[ProgramStep], user: int, rng: Random) -> None:
        """Adds the steps of a conversation of the region's n-th user."""
        chats, settings = self._chats, self._chats.settings
        fresh: Fresh = fresh_keys(rng)
        again = settings.long_again if rng.random() < settings.long_share else settings.again
        text = self._first(user, rng, fresh)
        last = -1
        while True:
            output = chats.answer_tokens(rng)
            answered = text.extended(output, fresh)
            steps.append(ProgramStep(last, text.tokens, output, text.keys, answered.keys[len(text.keys) :]))
            last = len(steps) - 1
            text = answered.extended(chats.prompt_tokens(rng), fresh)
            if rng.random() >= again or text.tokens + settings.answer_mean > settings.context_max:
                return

    def _first(self, user: int, rng: Random, fresh: Fresh) -> Text:
        chats, settings, draw = self._chats, self._chats.settings, rng.random()
        tokens = chats.prompt_tokens(rng)
        if draw < settings.own:
            opening = self._own[user]
        elif draw < settings.own + settings.regional:
            opening = rng.choice(self._openings)
        elif draw < settings.own + settings.regional + settings.worldwide:
            opening = rng.choice(chats.openings)
        else:
            return chats.template.extended(tokens, fresh)
        return opening.extended(max(TOKENS_MIN, round(OPENING_REST * tokens)), fresh)
