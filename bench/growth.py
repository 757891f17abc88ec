"""The cost of a large ``max_tokens`` that is not used, and of long generations for the requests beside them.

One local cluster serves the built-in model over HTTP. First come requests with ``max_tokens`` 64 and 32,000,
alternating: stop strings end the answers of both, soon and alike. Then the time to the first token of short requests
from 40 clients is taken, alone and beside four streams of up to 32,000 tokens, alternating. No prompt is asked twice,
except where answers are compared."""

from __future__ import annotations

import asyncio
import random
import statistics
import string
import tempfile
import time
from pathlib import Path

from bench.load import HttpClient, Sample, http_answer, http_request, run_closed_loop
from bench.report import Aim, Report, parser, percentile, progress, summary
from launch.cluster import ClusterSpec, LocalCluster

MANY = 32_000
FEW = 64
CLIENTS = 40
STREAMS = 4
PROMPT_CHARS = 120
SHORT_TOKENS = 8
STOPS = list("aeinostr")
"""A stop string comes after a dozen tokens in the mean, and hardly ever after 64."""


def _prompts(dice: random.Random, count: int) -> list[str]:
    return ["".join(dice.choices(string.ascii_lowercase + " ", k=PROMPT_CHARS)) for _ in range(count)]


class Load:
    """Requests to one load balancer, from clients that keep their connections."""

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model
        self._clients = [HttpClient(address) for _ in range(CLIENTS)]

    def request(self, prompt: str, **fields: object) -> bytes:
        return self.raw({"model": self._model, "prompt": prompt, "temperature": 0, **fields})

    def raw(self, body: dict[str, object]) -> bytes:
        return http_request(self._address, "/v1/completions", body)

    async def run(self, requests: list[bytes]) -> list[Sample]:
        left = iter(requests)
        return await run_closed_loop(lambda number: self._clients[number].send(next(left)), len(requests), CLIENTS)

    def stopped(self, prompts: list[str], max_tokens: int) -> list[dict[str, object]]:
        """Returns bodies with stop strings; they are sampled, as greedy answers may go round in circles and never
        stop."""
        common = {"model": self._model, "temperature": 1, "stop": STOPS, "ignore_eos": True, "max_tokens": max_tokens}
        return [{**common, "prompt": prompt, "seed": number} for number, prompt in enumerate(prompts)]

    async def answers(self, prompts: list[str], max_tokens: int) -> list[tuple[str, str]]:
        choices = [
            (await http_answer(self._address, self.raw(body)))["choices"][0]
            for body in self.stopped(prompts, max_tokens)
        ]
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    async def stream_for_ever(self, prompt: str) -> None:
        """Reads a stream until it is cancelled, or has all its tokens."""
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self.request(prompt, max_tokens=MANY, stream=True, ignore_eos=True))
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()

    def close(self) -> None:
        for client in self._clients:
            client.close()


async def _used_or_not(load: Load, dice: random.Random, rounds: int, count: int, report: Report) -> None:
    compared = _prompts(dice, 24)
    equal = await load.answers(compared, FEW) == await load.answers(compared, MANY)
    rates: dict[int, list[float]] = {FEW: [], MANY: []}
    for index in range(rounds):
        progress(f"max_tokens 64 and 32,000: round {index + 1} of {rounds}")
        for limit in (FEW, MANY) if index % 2 else (MANY, FEW):
            bodies = load.stopped(_prompts(dice, count), limit)
            began_s = time.perf_counter()
            await load.run([load.raw(body) for body in bodies])
            rates[limit].append(count / (time.perf_counter() - began_s))
    ratio = statistics.median(many / few for many, few in zip(rates[MANY], rates[FEW], strict=True))
    report.results["unused_max_tokens"] = {
        **{f"requests_per_s_at_{limit}": summary(values) for limit, values in rates.items()},
        "ratio": round(ratio, 3),
        "answers_equal": equal,
    }
    report.aims.append(Aim("requests/s at max_tokens 32,000 to those at 64", 0.95, round(ratio, 3), at_most=False))
    report.aims.append(Aim("answers equal", 1, int(equal), at_most=False))


async def _beside_streams(load: Load, dice: random.Random, rounds: int, count: int, report: Report) -> None:
    first: dict[str, list[float]] = {"alone": [], "beside": []}
    for index in range(2 * rounds):
        progress(f"short requests beside long streams: round {index // 2 + 1} of {rounds}")
        how = "beside" if index % 2 else "alone"
        tasks = [
            asyncio.create_task(load.stream_for_ever(prompt))
            for prompt in (_prompts(dice, STREAMS) if how == "beside" else ())
        ]
        try:
            requests = [
                load.request(prompt, max_tokens=SHORT_TOKENS, stream=True, ignore_eos=True)
                for prompt in _prompts(dice, count)
            ]
            samples = await load.run(requests)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        first[how].append(1e3 * percentile([sample.first_byte_s for sample in samples], 50))
    ratio = statistics.median(beside / alone for alone, beside in zip(first["alone"], first["beside"], strict=True))
    report.results["beside_long_streams"] = {
        **{f"ttft_p50_ms_{how}": summary(values) for how, values in first.items()},
        "ratio": round(ratio, 2),
    }
    report.aims.append(Aim("TTFT p50 of short requests beside long streams to that without", 1.5, round(ratio, 2)))


async def run(quick: bool, seed: int) -> Report:
    dice = random.Random(seed)
    rounds, count = (2, 2 * CLIENTS) if quick else (9, 6 * CLIENTS)
    config = {"seed": seed, "rounds": rounds, "requests": count, "clients": CLIENTS, "streams": STREAMS}
    report = Report("growth", config)
    with tempfile.TemporaryDirectory() as logs, LocalCluster(ClusterSpec(), Path(logs)) as cluster:
        load = Load(cluster.services["lb-0"].endpoints["http"], "pinyon-tiny")
        await load.run([load.request(prompt, max_tokens=SHORT_TOKENS) for prompt in _prompts(dice, CLIENTS)])
        await _used_or_not(load, dice, rounds, count, report)
        await _beside_streams(load, dice, rounds, count, report)
        load.close()
    return report


def main() -> None:
    arguments = parser(__doc__).parse_args()
    asyncio.run(run(arguments.quick, arguments.seed)).emit()


if __name__ == "__main__":
    main()
