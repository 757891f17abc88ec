"""The next step of the engine: all running decodes plus prompt chunks under a token budget.

``decide`` plans a step over numbers; ``fold`` says for which of its members it counts. Between the two, members may be
removed: the step does not count for them. Only the caller knows what a number stands for.

An order of service says anew in each step which prompt advances first. A short one that came later may go ahead of a
long one that is being computed, which keeps its blocks.

A decoded request's KV grows by a token in each step. So after ``fill`` and before ``decide``, the owner gives each
request that ``growth`` names one more block (``grown``), or takes others out when there are none."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pinyon.batching.engine_step import GROUPED, WHOLE
from pinyon.batching.interface import Rounds, ServiceOrder
from pinyon.batching.policies import BATCHING_POLICIES
from pinyon.batching.policy import StepSeen
from pinyon.batching.rounds import Formed
from pinyon.batching.service_order import FifoOrder
from pinyon.batching.step_cost import StepCost, TimeLeft


@dataclass(frozen=True, slots=True)
class PromptWork:
    """A prompt to compute: ``tokens`` long, of which the KV of the first ``position`` is there already."""

    number: int
    position: int
    tokens: int
    arrived_s: float = 0.0
    seconds: float = 0.0
    """Predicted seconds to compute what is left; 0: unknown."""
    deadline_s: float = 0.0
    """The time at which its first token is due; 0: unknown."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits in tokens, except ``max_batch`` (requests) and ``tbt_s``."""

    max_batch: int
    step_tokens: int
    chunk_tokens: int
    block_tokens: int
    tbt_s: float = 0.0
    """Limit on seconds between tokens, as far as chunks decide (:meth:`StepScheduler.decide`); 0: there is none."""


@dataclass(slots=True)  # not frozen: two are made in each step, and frozen ones take three times as long
class StepPlan:
    """One engine step: chunks of prompts, and the requests that get one token each."""

    prefills: list[tuple[int, int, int]]
    """Chunks ``(number, start, end)``: the prompt's tokens ``[start, end)`` are computed."""
    decodes: list[int]

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + len(self.decodes)

    @property
    def prompt_tokens(self) -> int:
        return sum(end - start for _, start, end in self.prefills)

    def token_s(self, seconds: float) -> float:
        """Returns the seconds charged for each prompt token of a step that took ``seconds``.

        Prompts in one step share its time, so the times of waiting prompts add up to that of the queue (Mooncake §4.1).
        """
        return seconds / max(1, self.prompt_tokens)


@dataclass(slots=True)
class _StepPrompt:
    position: int
    tokens: int
    token_s: float
    """Predicted seconds to compute one of its tokens."""
    planned: int = 0
    """The position at which the step under way ends for it; 0: it is not in that step."""


class StepScheduler:
    """A scheduler of one step at a time: ``decide``, then ``fold``. Prompts and decoded requests have separate numbers.

    ``order`` is of the prompts that are here, and this is its only user; None: first come, first served. ``rounds``
    chooses the requests that a step decodes; None: all that run. ``kernel`` is the engine's, for other rounds."""

    def __init__(
        self, limits: StepLimits, order: ServiceOrder[int] | None = None, rounds: Rounds | None = None, kernel: str = ""
    ) -> None:
        self._limits = limits
        self._rounds = rounds
        self._kernel = kernel
        self._paths: dict[int, Sequence[int]] = {}
        """Paths of waiting requests, if there are rounds."""
        self._planned: Rounds | None = None
        """The rounds that made the last plan."""
        self._order: ServiceOrder[int] = FifoOrder() if order is None else order
        self._prompts: dict[int, _StepPrompt] = {}
        self._waiting: dict[int, int] = {}
        self._running: dict[int, int] = {}
        """Requests in order of arrival, as ``_waiting``, with the tokens that their blocks have room for yet."""
        self._cost = StepCost()
        """Told only where there is a ``tbt_s``."""
        self._asked: list[tuple[int, int]] = []
        """Chunks of the last plan."""
        self.cut_steps = 0
        """Steps in which prompts got less, so that running requests do not wait for their tokens."""

    @property
    def waiting(self) -> int:
        """Requests whose KV is in place and that wait for a place in the batch."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def prefilling(self) -> int:
        return len(self._prompts)

    def add_prefill(self, work: PromptWork) -> None:
        """Adds a prompt. Raises ``ValueError`` if the number is known or nothing is left to compute."""
        if work.number in self._prompts:
            raise ValueError(f"prompt {work.number} is computed already")
        if not 0 <= work.position < work.tokens:
            raise ValueError(f"nothing to compute from token {work.position} to {work.tokens}")
        token_s = work.seconds / (work.tokens - work.position)
        self._prompts[work.number] = _StepPrompt(work.position, work.tokens, token_s)
        self._order.add(work.number, work.arrived_s, work.seconds, work.deadline_s or math.inf)

    def remove_prefill(self, number: int) -> None:
        if self._prompts.pop(number, None) is not None:
            self._order.remove(number)

    @property
    def level_blocks(self) -> int:
        """Blocks of one level of a ``path``; 0: paths are not used."""
        return 0 if self._rounds is None else self._rounds.chunk_blocks

    @property
    def reads_once(self) -> bool:
        """True if steps may read only once what some of their requests share.

        The kernel does that for each group, or for what a whole batch shares, and batches are made to share something.
        """
        if self._kernel == WHOLE:
            return self._rounds is not None and self._rounds.share
        return self._kernel == GROUPED

    def path(self, table: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Returns the last block of each level of full ones, for a request with KV of ``tokens`` in these blocks.

        Requests that share blocks are known by it. Empty where paths are not used."""
        step = self.level_blocks
        return tuple(table[step - 1 : tokens // self._limits.block_tokens : step]) if step else ()

    def add_decode(self, number: int, tokens: int, blocks: int, path: Sequence[int] = ()) -> None:
        """Adds a request that has the KV of ``tokens`` in ``blocks``. Raises ``ValueError`` if the number is known."""
        if number in self._waiting or number in self._running:
            raise ValueError(f"request {number} is decoded already")
        self._waiting[number] = blocks * self._limits.block_tokens - tokens
        if self._rounds is not None:
            self._paths[number] = path

    def remove_decode(self, number: int) -> None:
        """Removes a request that is finished, gave way, or was cancelled."""
        if self._waiting.pop(number, None) is None:
            if self._running.pop(number, None) is not None and self._rounds is not None:
                self._rounds.remove(number)
        elif self._rounds is not None:
            del self._paths[number]

    def fill(self) -> None:
        """Moves waiting requests to free places of the batch, in order of arrival."""
        waiting, running = self._waiting, self._running
        while waiting and len(running) < self._limits.max_batch:
            number = next(iter(waiting))
            running[number] = waiting.pop(number)
            if self._rounds is not None:
                self._rounds.add(number, self._paths.pop(number))

    def growth(self) -> list[int]:
        """Returns the running requests that need one more block before the next step."""
        return [number for number, left in self._running.items() if left < 1]

    def room(self, number: int) -> int:
        """Returns the steps until the request is in :meth:`growth`. Raises ``KeyError`` if it is not running."""
        return self._running[number]

    def grown(self, number: int, blocks: int) -> None:
        """Adds ``blocks`` to a running request. Raises ``KeyError`` if it is not running."""
        self._running[number] += blocks * self._limits.block_tokens

    def decoded(self) -> list[int]:
        """Returns all decoded requests, also those that wait for a place."""
        return [*self._running, *self._waiting]

    def decide(self, now_s: float) -> StepPlan | None:
        """Returns the next step, or None when there is nothing to do. Requires that :meth:`growth` is empty.

        The whole batch is decoded. Prompts have what is left of the limits: of tokens and, while any request runs, of
        the time between tokens. They have a block in any case, and a share of the time (:data:`PROMPT_SHARE` of what
        decoding takes), so neither starves the other. In a round of several batches each has its part of the time."""
        if not self._running and not self._prompts:
            return None
        self._planned = self._rounds
        decodes = list(self._running) if self._rounds is None else self._rounds.next()
        chunks = self._chunks(len(decodes), now_s) if self._prompts else []
        if self._limits.tbt_s:
            self._asked = [(start, end) for _, start, end in chunks]
        return StepPlan(chunks, decodes)

    def _chunks(self, decodes: int, now_s: float) -> list[tuple[int, int, int]]:
        limits = self._limits
        asked: list[int] = []
        batches = 1 if self._rounds is None else max(1, self._rounds.batches)
        time = self._cost.left(limits.tbt_s / batches) if limits.tbt_s and decodes else None
        # Prompts always advance: a full batch must not starve them.
        takes = plan_chunks(
            self._spans(now_s, asked),
            budget_tokens=max(limits.step_tokens - decodes, min(limits.block_tokens, limits.chunk_tokens)),
            chunk_tokens=limits.chunk_tokens,
            block_tokens=limits.block_tokens,
            time=time,
        )
        self.cut_steps += time is not None and time.cut
        chunks = []
        for number, take in zip(asked, takes, strict=False):
            prompt = self._prompts[number]
            prompt.planned = prompt.position + take
            chunks.append((number, prompt.position, prompt.planned))
        return chunks

    def _spans(self, now_s: float, asked: list[int]) -> Iterator[tuple[int, int]]:
        """Yields what is left of each prompt in turn, and adds it to ``asked``. Lazily: each turn has its price."""
        # A single prompt, the usual case, has every turn.
        turns: Iterable[int] = self._order.turns(now_s) if len(self._prompts) > 1 else self._prompts
        for number in turns:
            asked.append(number)
            prompt = self._prompts[number]
            yield prompt.position, prompt.tokens

    def fold(
        self,
        plan: StepPlan,
        failed_prefills: Collection[int] = (),
        failed_decodes: Collection[int] = (),
        steps: int = 1,
    ) -> StepPlan:
        """Returns the part of the step that counts: members that are still there and did not fail.

        ``steps``: so many equal ones in a row, as a simulator takes them at once. Only the last can have failed
        members, and none has more than its :meth:`room`.

        Failed members are removed, and so are prompts that have reached their end. Decoded requests stay until
        :meth:`remove_decode`."""
        for number in failed_decodes:
            self.remove_decode(number)
        running = self._running
        if plan.decodes and self._rounds is not None and self._rounds is self._planned:
            self._rounds.done()
        decodes = [number for number in plan.decodes if number in running]
        for number in decodes:
            running[number] -= steps
        return StepPlan(self._advance(plan, failed_prefills) if plan.prefills else [], decodes)

    def switch(self, choice: str, tables: Mapping[int, tuple[Sequence[int], int]]) -> None:
        """Changes to the rounds of another batching policy. Raises ``ValueError`` for an unknown policy.

        ``tables``: the blocks of each decoded request, and its tokens with KV. A step under way ends as it is."""
        self._rounds = BATCHING_POLICIES.make(choice).rounds(self._kernel)
        self._paths = {}
        if self._rounds is None:
            return
        for number in self._running:
            self._rounds.add(number, self.path(*tables[number]))
        for number in self._waiting:
            self._paths[number] = self.path(*tables[number])

    def learned(self) -> dict[str, list[float]]:
        """Returns what the policy of rounds has learned, for :meth:`restore`; empty where nothing is learned."""
        return {} if self._rounds is None else self._rounds.stopping.table()

    def restore(self, table: Mapping[str, Sequence[float]]) -> None:
        """Restores what was :meth:`learned`. Raises ``ValueError`` if this policy has not learned such a table."""
        if self._rounds is not None:
            self._rounds.stopping.restore(table)
        elif table:
            raise ValueError("a policy that does not learn has no table")

    @property
    def learns(self) -> bool:
        """True if the outcome of a step may change which requests the next one decodes."""
        return self._rounds is not None and self._rounds.stopping.learns

    @property
    def formed(self) -> Formed:
        """Figures of the present batches; zeros where a step decodes all that run."""
        return Formed() if self._rounds is None else self._rounds.formed

    def observe(self, step: StepSeen) -> None:
        """Records how the last step went."""
        if self._limits.tbt_s:
            self._cost.saw(self._asked, step)
        if self._rounds is not None:
            self._rounds.observe(step)

    def _advance(self, plan: StepPlan, failed: Collection[int]) -> list[tuple[int, int, int]]:
        counted = []
        for chunk in plan.prefills:
            number, start, end = chunk
            prompt = self._prompts.get(number)
            # A prompt that was removed and added again meanwhile is another one.
            if prompt is None or prompt.position != start or prompt.planned != end:
                continue
            prompt.position, prompt.planned = end, 0
            self._order.advance(number, prompt.token_s * (end - start))
            if number in failed or end == prompt.tokens:
                self.remove_prefill(number)
            if number not in failed:
                counted.append(chunk)
        return counted


def plan_chunks(
    spans: Iterable[tuple[int, int]],
    *,
    budget_tokens: int,
    chunk_tokens: int,
    block_tokens: int,
    time: TimeLeft | None = None,
) -> list[int]:
    """Returns the tokens to compute now for each ``(position, end)`` span, in order, without trailing zeros.

    This is chunked prefill with a budget per step, as in Sarathi. The first span gets all it can use before the second
    gets anything. No span gets more than ``chunk_tokens``. A chunk that does not reach the span's end is cut at a block
    boundary where that leaves at least one token. So blocks become complete, and whole ranges to send, early.

    ``time``: what the chunks may take beside decoding. The first one has a block (``chunk_tokens``, if that is less) in
    any case, so that prompts always advance; another one has none rather than a part of a block."""
    taken: list[int] = []
    for position, end in spans:
        take = min(end - position, chunk_tokens, budget_tokens)
        if take <= 0:
            break
        if time is not None:
            block = min(take, block_tokens)
            take = time.tokens(position, take)
            if take < block:
                if taken:
                    break
                take = block
        if position + take < end:
            over = (position + take) % block_tokens
            if over < take:
                take -= over
        taken.append(take)
        if time is not None:
            time.spend(position, take)
        budget_tokens -= take
    return taken
