"""The cost of scheduling by length of the shared prefix (FEATHER Figure 5.9).

The cost is the CPU time per round of 500 running requests, while 500 others wait. In a round each running request is
decoded once. Requests have 200 output tokens, so in each round 2.5 end, as many come, and as many enter. The batching
policy and the step scheduler are called as an instance calls them, but without the pool of blocks. Block keys are known
already: the load balancer makes them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from pinyon.batching import BATCHING_POLICIES, BatchRequest, BlockNeed, StepLimits, StepScheduler, StepSeen
from pinyon.core.block_keys import KEY_BYTES, BlockKey
from pinyon.profiles.engine_profile import EngineProfile
from pinyon_lab.figures.figure import Clock

CHOICES = {
    "fcfs": "fcfs",
    "oracle": "oracle",
    "feather": "feather",
    "lpm": "lpm:fallback=0,tree_blocks=1048576",
    "dfs_weight": "dfs_weight:tree_blocks=1048576",
}
"""The policies compared. As in the paper, SGLang's cache has room for everything, and ``lpm`` does not fall back."""
PER_TOKEN = ("lpm", "dfs_weight")
"""The policies that are measured with trees of tokens as well: SGLang's trees are of tokens, not of blocks."""
BLOCK_TOKENS = 16
OWN_TOKENS = 64
OUT_TOKENS = 200
"""The output tokens of a request (FEATHER §5.2)."""
WARM_ROUNDS = 2
CPU_S = 0.6
"""The CPU time at a length after which a policy is measured well enough: slow policies take half a second a round."""
ROOM_BLOCKS = 1 << 40
"""A number of free blocks that is never a limit: requests wait for slots only."""


@dataclass(frozen=True)
class RoundLoad:
    """A load of rounds; ``key_tokens`` is the number of tokens of one key that a policy compares."""

    prefix_tokens: int
    requests: int = 500
    groups: int = 5
    key_tokens: int = BLOCK_TOKENS

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + OWN_TOKENS


def _unpacked(packed: bytes) -> tuple[BlockKey, ...]:
    return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))


class _Books:
    """Books that hold the shared prefix of each prompt."""

    def need(self, request: BatchRequest) -> BlockNeed:
        return BlockNeed(request.reusable, request.blocks - request.reusable)

    def behind(self, number: int) -> int:
        return 0


class _MeasuredInstance:
    """A policy and a step scheduler, the calls that an instance makes, and the CPU time that they take."""

    def __init__(self, choice: str, load: RoundLoad, profile: EngineProfile, random: Random, clock: Clock) -> None:
        self._load, self._profile, self._random, self._clock = load, profile, random, clock
        batching = BATCHING_POLICIES.make(choice)
        self._policy = batching.policy(_Books())
        limits = StepLimits(load.requests, 32_768, 32_768, BLOCK_TOKENS)
        self._steps = StepScheduler(limits, rounds=batching.rounds(""))
        self._prefixes = [random.randbytes(KEY_BYTES * self._keys(load.prefix_tokens)) for _ in range(load.groups)]
        self._tokens = [_unpacked(prefix) for prefix in self._prefixes] if load.key_tokens < BLOCK_TOKENS else []
        self._tables: dict[int, list[int]] = {}
        """The block tables of the requests that wait or run."""
        self._running: list[int] = []
        self._number = 0
        self._now_s = 0.0
        self._cpu_ns = 0
        self.decided = 0
        """The number of steps."""

    def _keys(self, tokens: int) -> int:
        return tokens // self._load.key_tokens

    def come(self) -> BatchRequest:
        """Returns one more request, of a random group."""
        load, random = self._load, self._random
        group = random.randrange(load.groups)
        own = _unpacked(random.randbytes(KEY_BYTES * self._keys(OWN_TOKENS)))
        # As in messages, no two requests share key objects; with a key per token, copies would take a gigabyte.
        keys = (self._tokens[group] if self._tokens else _unpacked(self._prefixes[group])) + own
        shared, blocks = load.prefix_tokens // BLOCK_TOKENS, (load.tokens + OUT_TOKENS) // BLOCK_TOKENS
        self._number += 1
        first = (load.groups + self._number) * blocks
        table = [*range(group * blocks, group * blocks + shared), *range(first, first + blocks - shared)]
        self._tables[self._number] = table
        reusable = self._keys(load.prefix_tokens)
        return BatchRequest(
            self._number, load.tokens, reusable + blocks - shared, keys, reusable, arrived_s=self._now_s
        )

    def enqueue(self, request: BatchRequest) -> None:
        began = self._clock()
        self._policy.enqueue(request)
        self._took(began)

    def admit(self) -> None:
        began = self._clock()
        load, steps = self._load, self._steps
        while chosen := self._policy.admit(load.requests - len(self._running), ROOM_BLOCKS, self._now_s):
            for number in chosen:
                table = self._tables[number]
                steps.add_decode(number, load.tokens, 2 * len(table), steps.path(table, load.tokens))
                self._running.append(number)
        steps.fill()
        self._took(began)

    def leave(self) -> None:
        number = self._running.pop(self._random.randrange(len(self._running)))
        began = self._clock()
        self._policy.remove(number)
        self._steps.remove_decode(number)
        self._took(began)
        del self._tables[number]

    def round(self) -> None:
        """Runs steps until as many requests have been decoded as are running."""
        decoded = 0
        while decoded < self._load.requests:
            began = self._clock()
            plan = self._steps.decide(self._now_s)
            assert plan is not None
            self._steps.fold(plan)
            self._took(began)
            seen = StepSeen(len(plan.decodes), 0, self._seconds(plan.decodes))
            began = self._clock()
            self._policy.observe(seen)
            self._steps.observe(seen)
            self._took(began)
            decoded += seen.decoded
            self.decided += 1
            self._now_s += seen.seconds

    def _seconds(self, decodes: Sequence[int]) -> float:
        """Returns the modelled time of a step. The first block of a table identifies the group."""
        load, count = self._load, len(decodes)
        groups = {self._tables[number][0] for number in decodes}
        shared = load.prefix_tokens if len(groups) == 1 else 0
        return self._profile.seconds((), count, self._profile.kv_read(load.tokens * count, shared * (count - 1)))

    def _took(self, began_ns: int) -> None:
        self._cpu_ns += self._clock() - began_ns

    def taken_ms(self) -> float:
        """Returns the CPU time since the last call of this."""
        taken_ms, self._cpu_ns = self._cpu_ns / 1e6, 0
        return taken_ms


def engine_s(load: RoundLoad, profile: EngineProfile) -> float:
    """Returns the modelled time of an oracle's round: a step per group, and the own tokens of entering requests."""
    each = load.requests // load.groups
    context = load.tokens + OUT_TOKENS // 2
    read = profile.kv_read(context * each, load.prefix_tokens * (each - 1))
    enter = load.requests / OUT_TOKENS
    own_s = profile.seconds([(load.prefix_tokens, load.tokens)], 0, 0.0)
    return load.groups * profile.seconds((), each, read) + enter * own_s


class RoundCosts(NamedTuple):
    cpu_ms: list[float]
    """The CPU time of each round."""
    steps: float
    """The mean number of steps of a round."""
    engine_s: float
    """The modelled time that the engine takes for an oracle's round."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.cpu_ms) / 1e3

    @property
    def of_engine_time(self) -> float:
        return self.median_s / self.engine_s


def round_costs(
    choice: str, load: RoundLoad, profile: EngineProfile, seed: int, rounds_max: int, clock: Clock
) -> RoundCosts:
    instance = _MeasuredInstance(choice, load, profile, Random(seed), clock)
    for _ in range(load.requests):
        instance.enqueue(instance.come())
    instance.admit()
    for _ in range(load.requests):
        instance.enqueue(instance.come())
    instance.taken_ms()
    taken_ms: list[float] = []
    ends = 0.0
    while len(taken_ms) < WARM_ROUNDS + rounds_max and sum(taken_ms) < 1e3 * CPU_S:
        ends += load.requests / OUT_TOKENS
        come = [instance.come() for _ in range(int(ends))]
        for request in come:
            instance.leave()
            instance.enqueue(request)
        instance.admit()
        instance.round()
        taken_ms.append(instance.taken_ms())
        ends -= len(come)
    return RoundCosts(taken_ms[WARM_ROUNDS:] or taken_ms, instance.decided / len(taken_ms), engine_s(load, profile))
