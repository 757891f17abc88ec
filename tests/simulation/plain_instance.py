"""A plain simulated instance with endless memory, step by step, without the simulator's modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pinyon.profiles.engine_profile import EngineProfile
from pinyon_lab.simulator.workload import Arrival


class Plain(NamedTuple):
    ttft_s: float
    e2e_s: float
    hit_tokens: int
    gaps_s: list[float]


def serve(
    arrivals: Sequence[Arrival],
    profile: EngineProfile,
    block: int,
    chunk: int,
    budget: int,
    batch: int,
    prefill_first: bool,
) -> list[Plain]:
    """Serves one prompt at a time, first come, first served; each running request gets a token in each step."""
    cache: set[int] = set()
    queue: list[int] = []
    prompt: int | None = None
    position = 0
    waiting: list[int] = []
    running: list[int] = []
    tokens: dict[int, list[float]] = {number: [] for number in range(len(arrivals))}
    hits = dict.fromkeys(tokens, 0)
    coming = list(range(len(arrivals)))
    now = 0.0
    while coming or queue or prompt is not None or running or waiting:
        if prompt is None and not queue and not running and not waiting:
            now = max(now, arrivals[coming[0]].time_s)
        while coming and arrivals[coming[0]].time_s <= now:
            queue.append(coming.pop(0))
        if prompt is None and queue:
            prompt = queue.pop(0)
            full = arrivals[prompt].blocks[: (arrivals[prompt].tokens - 1) // block]
            held = 0
            while held < len(full) and full[held] in cache:
                held += 1
            position = hits[prompt] = held * block
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        decoded = [] if prefill_first and prompt is not None else list(running)
        contexts = [arrivals[each].tokens + len(tokens[each]) for each in decoded]
        chunks = []
        if prompt is not None:
            left = arrivals[prompt].tokens - position
            take = left if prefill_first else min(left, chunk, max(budget - len(running), min(block, chunk)))
            if take < left and (position + take) % block < take:
                take -= (position + take) % block
            chunks = [(position, position + take)]
        now += profile.seconds(chunks, len(contexts), sum(contexts))
        for each in decoded:
            tokens[each].append(now)
            if len(tokens[each]) == max(1, arrivals[each].output_tokens):
                running.remove(each)
        if prompt is not None:
            position = chunks[0][1]
            cache.update(arrivals[prompt].blocks[: min(position, arrivals[prompt].tokens) // block])
            if position == arrivals[prompt].tokens:
                tokens[prompt].append(now)
                if max(1, arrivals[prompt].output_tokens) > 1:
                    waiting.append(prompt)
                prompt = None
    return [
        Plain(
            times[0] - arrivals[number].time_s,
            times[-1] - arrivals[number].time_s,
            hits[number],
            [after - before for before, after in pairwise(times)],
        )
        for number, times in tokens.items()
    ]
