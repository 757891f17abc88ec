"""The workloads of SkyWalker's evaluation (§5.1; §3.2 for Fig. 6) by name: the programs of each region's clients. Chats
are in :mod:`pinyon_lab.simulator.regions.chats`; trees of thoughts, whose siblings are sent at once, are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from pinyon.core.errors import InvalidArgument
from pinyon_lab.simulator.regions.chats import ARENA, WILDCHAT, ChatSettings, RegionChatSource, SharedTexts
from pinyon_lab.simulator.regions.programs import Program, ProgramStep, RegionProgramSource, Text, fresh_keys
from pinyon_lab.traces.generate.draws import log_normal


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """The settings of a tree of 1 + branches + branches² + … requests in ``depth`` levels. Four levels make 15 requests
    with two branches, 85 with four. The paper prints no lengths. These are of SGLang's benchmark of the same trees over
    the same questions (``benchmark/tree_of_thought_deep``: its instructions, and answers of 256 tokens at most)."""

    branches: int = 2
    depth: int = 4
    system_tokens: int = 96
    """The length of what all trees begin with: the task and the chat template."""
    question_tokens: float = 80.0
    instruction_tokens: int = 48
    """The length of the text between two thoughts; the same text everywhere."""
    answer_mean: float = 200.0
    answer_max: int = 256
    sigma: float = 0.5
    """The sigma of the log-normal lengths of answers and questions."""


class TreeSource:
    """A source of trees that begin with ``system``, one question each; consistent hashing goes by its number."""

    def __init__(self, system: Text, settings: TreeSettings, region: str) -> None:
        self._system, self._settings, self._region = system, settings, region
        self._asked = 0

    def program(self, rng: Random) -> Program:
        self._asked += 1
        settings, fresh = self._settings, fresh_keys(rng)
        tokens = max(8, round(settings.question_tokens * log_normal(rng, settings.sigma)))
        level: list[tuple[int, Text]] = [(-1, self._system.extended(tokens, fresh))]
        """The requests of the next level: the step that each awaits, and its prompt."""
        steps: list[ProgramStep] = []
        for depth in range(settings.depth):
            following: list[tuple[int, Text]] = []
            for after, prompt in level:
                output = max(8, round(settings.answer_mean * log_normal(rng, settings.sigma)))
                output = min(output, settings.answer_max)
                thought = prompt.extended(output, fresh)
                steps.append(ProgramStep(after, prompt.tokens, output, prompt.keys, thought.keys[len(prompt.keys) :]))
                if depth + 1 < settings.depth:
                    asked = thought.extended(settings.instruction_tokens, fresh)
                    following += [(len(steps) - 1, asked)] * settings.branches
            level = following
        return Program(f"{self._region} question {self._asked}", tuple(steps))


_COMMON: Final = replace(WILDCHAT, own=0.0, worldwide=0.0, prompt_sigma=1.0, again=0.0, long_share=0.0)
_CHATS: Final[Mapping[str, tuple[ChatSettings, int, int]]] = {
    "arena": (ARENA, 1, 1),
    "wildchat": (WILDCHAT, 1, 1),
    "cross-user": (replace(_COMMON, regional=0.8, openings=150), 1, 1),
    "bursty": (replace(_COMMON, own=0.8, regional=0.0, users=60), 1, 4),
    "heterogeneous": (replace(_COMMON, regional=0.8, openings=150, users=60), 4, 4),
}
"""The chat settings, and the least and most conversations of a program."""
_BRANCHES: Final = {"tree": 2, "mixed-tree": 2}
BUSY_BRANCHES: Final = 4
"""The branches of the first region's trees in the mixed workload."""
WORKLOADS: Final[Mapping[str, str]] = {
    "arena": "conversations as in ChatBot Arena",
    "wildchat": "conversations as in WildChat",
    "tree": "trees of thoughts, two branches: 15 requests each",
    "mixed-tree": "the same, but in the first region four branches: 85 requests",
    "cross-user": "conversations with one of 150 openings that all users have in common",
    "bursty": "one to four conversations of one user at once, mostly with that user's own opening",
    "heterogeneous": "four conversations of one user at once, with openings that all users have in common",
}


def sources(workload: str, regions: Sequence[str], rng: Random) -> dict[str, RegionProgramSource]:
    """Returns each region's source of programs. Raises :class:`InvalidArgument` for an unknown workload."""
    if workload in _BRANCHES:
        settings = TreeSettings(_BRANCHES[workload])
        busy = replace(settings, branches=BUSY_BRANCHES) if workload == "mixed-tree" else settings
        system = Text().extended(settings.system_tokens, fresh_keys(rng))
        return {region: TreeSource(system, settings if place else busy, region) for place, region in enumerate(regions)}
    if workload not in _CHATS:
        raise InvalidArgument(f"no workload {workload!r}; there are: {', '.join(WORKLOADS)}", field="workload")
    chat, least, most = _CHATS[workload]
    chats = SharedTexts(chat, rng)
    return {region: RegionChatSource(chats, region, rng, least, most) for region in regions}
