"""The profile of an engine in a running cluster, measured from outside by requests sent one after another."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np
import numpy.typing as npt

from pinyon.eviction import Traits
from pinyon.profiles.engine_profile import EngineProfile
from pinyon_lab.replay import Player, ReplayPrompts, Sending, TokenRange
from pinyon_lab.simulator.report import FINISHED, RequestOutcome
from pinyon_lab.simulator.workload import Arrival

LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 2560)
"""The prompts' lengths in tokens; chunks are of :data:`CHUNK`."""
CHUNK = 256
"""The prompt tokens of one request in one step, as in ``services.worker.settings``."""
AT_ONCE = (1, 2, 4, 8)
ANSWER = 48
SHORT, LONG = 64, 2048
"""The prompt lengths of requests whose decoding is measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The profile measured; ``path_s`` is a request's way through the services and that of its first token back."""

    profile: EngineProfile
    path_s: float
    worst: float
    """The largest relative error of the prompts' median times."""


def measure(address: str, block_tokens: int, repeats: int, seed: int) -> Measured:
    """Measures through the load balancer at ``address``, behind which there is one instance."""
    dice = random.Random(seed)
    lengths = [length for length in LENGTHS for _ in range(repeats)]
    dice.shuffle(lengths)
    play(address, [(SHORT, 2)] * 8, 1, block_tokens, seed)  # warms up what is done once
    prompts = play(address, [(length, 1) for length in lengths], 1, block_tokens, seed + 1)
    medians = {
        length: statistics.median(each.ttft_s for each in prompts if each.tokens == length) for length in LENGTHS
    }
    decodes: dict[tuple[int, int], float] = {}
    for at_once in AT_ONCE:
        wanted = [(SHORT, ANSWER)] * (3 * at_once)
        decodes[at_once, SHORT] = _between(play(address, wanted, at_once, block_tokens, seed + 2 + at_once))
    decodes[1, LONG] = _between(play(address, [(LONG, ANSWER)] * 3, 1, block_tokens, seed + 2))
    return fit(medians, decodes)


def fit(prompts: dict[int, float], decodes: dict[tuple[int, int], float]) -> Measured:
    """Fits a profile by relative errors. ``prompts``: seconds to the first token by length; ``decodes``: seconds
    between tokens, by the number of requests decoded at once and the length of their prompts."""
    rows = [(1.0, at_once, at_once * (length + ANSWER / 2)) for at_once, length in decodes]
    between = np.array(list(decodes.values()))
    decode_s, request_s, kv_s = _non_negative(np.array(rows) / between[:, None], np.ones_like(between))
    lengths = np.array(list(prompts), float)
    times = np.array(list(prompts.values()))
    columns = np.stack([np.ones_like(lengths), lengths, lengths**2, np.ceil(lengths / CHUNK)], axis=1)
    *rest, step_s = _non_negative(columns / times[:, None], np.ones_like(times))
    if step_s > decode_s:  # a step that decodes includes it
        step_s = decode_s
        rest = _non_negative(columns[:, :3] / times[:, None], 1 - step_s * columns[:, 3] / times)
    path_s, token_s, pair_s = rest
    predicted = columns @ np.array([*rest, step_s])
    profile = EngineProfile(
        source="measured through a cluster that runs, by requests one after another",
        stated="",
        assumed="",
        step_s=step_s,
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        decode_step_s=decode_s - step_s,
        decode_request_s=request_s,
        decode_kv_token_s=kv_s,
    )
    return Measured(profile, path_s, float(np.abs(predicted / times - 1).max()))


def _non_negative(columns: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> list[float]:
    """Computes least squares; while a factor is negative, the most negative one is left out."""
    places = list(range(columns.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(columns[:, places], values, rcond=None)
        if (found >= 0).all():
            result = [0.0] * columns.shape[1]
            for place, value in zip(places, found, strict=True):
                result[place] = float(value)
            return result
        del places[int(found.argmin())]


def _between(outcomes: Sequence[RequestOutcome]) -> float:
    """Returns the median seconds between tokens."""
    return statistics.median((each.e2e_s - each.ttft_s) / (each.output_tokens - 1) for each in outcomes)


def play(
    address: str, wanted: Sequence[tuple[int, int]], clients: int, block_tokens: int, seed: int
) -> list[RequestOutcome]:
    """Sends prompts that share nothing, by ``clients`` clients; ``wanted``: tokens of each prompt and its answer."""
    blocks = iter(range(1 << 40))
    arrivals = [
        Arrival(0.0, tokens, output, tuple(next(blocks) for _ in range(-(-tokens // block_tokens))), Traits())
        for tokens, output in wanted
    ]

    async def send() -> list[RequestOutcome]:
        async with grpc.aio.insecure_channel(address) as channel:
            prompts = ReplayPrompts(arrivals, block_tokens, seed, TokenRange())
            return (await Player(channel, arrivals, prompts, Sending(clients)).run()).outcomes

    outcomes = asyncio.run(send())
    failed = [each.end for each in outcomes if each.end != FINISHED]
    if failed:
        raise RuntimeError(f"requests for the profile failed: {failed}")
    return outcomes
