"""Trees of thoughts over questions of grade school mathematics (SkyWalker §5.1): siblings are asked for at once."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from pinyon_lab.simulator.regions.programs import Program, Step, Text, fresh_keys
from pinyon_lab.traces.generate.draws import log_normal


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """A tree of ``depth`` levels has 1 + branches + branches² + … requests: 15 with two branches and four levels, 85
    with four. The paper prints no lengths. These are of SGLang's benchmark of the same trees over the same questions
    (``benchmark/tree_of_thought_deep``: its instructions, and answers of 256 tokens at most)."""

    branches: int = 2
    depth: int = 4
    system_tokens: int = 96
    """The same of all trees: what to do, and the chat template."""
    question_tokens: float = 80.0
    instruction_tokens: int = 48
    """Between one thought and the next one; the same text everywhere."""
    answer_mean: float = 200.0
    answer_max: int = 256
    sigma: float = 0.5
    """Of answers and questions, log-normal."""

    @property
    def requests(self) -> int:
        return sum(self.branches**level for level in range(self.depth))


class Trees:
    """What all trees have in common."""

    def __init__(self, block_tokens: int, system_tokens: int, rng: Random) -> None:
        self.block_tokens = block_tokens
        self.system = Text().extended(system_tokens, block_tokens, fresh_keys(rng))


class TreeSource:
    """Each program is one question; its number is what consistent hashing goes by."""

    def __init__(self, trees: Trees, settings: TreeSettings, region: str) -> None:
        self._trees, self._settings, self._region = trees, settings, region
        self._asked = 0

    def program(self, rng: Random) -> Program:
        self._asked += 1
        return self.tree(f"{self._region} question {self._asked}", rng)

    def tree(self, question: str, rng: Random) -> Program:
        settings, block_tokens, fresh = self._settings, self._trees.block_tokens, fresh_keys(rng)
        tokens = max(8, round(settings.question_tokens * log_normal(rng, settings.sigma)))
        level: list[tuple[int, Text]] = [(-1, self._trees.system.extended(tokens, block_tokens, fresh))]
        """Requests of the next level: what they wait for, and their prompts."""
        steps: list[Step] = []
        for depth in range(settings.depth):
            following: list[tuple[int, Text]] = []
            for after, prompt in level:
                output = max(8, round(settings.answer_mean * log_normal(rng, settings.sigma)))
                output = min(output, settings.answer_max)
                thought = prompt.extended(output, block_tokens, fresh)
                steps.append(Step(after, prompt.tokens, output, prompt.keys, thought.keys[len(prompt.keys) :]))
                if depth + 1 < settings.depth:
                    asked = thought.extended(settings.instruction_tokens, block_tokens, fresh)
                    following += [(len(steps) - 1, asked)] * settings.branches
            level = following
        return Program(question, tuple(steps))
