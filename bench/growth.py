"""What a large ``max_tokens`` costs that is not used, and what long generations cost those beside them.

One local cluster with the built-in model, over HTTP. First the same requests with ``max_tokens`` 64 and 32,000, whose
answers are equal because a stop string ends them, alternating. Then the time to the first token of short requests from
40 clients, alone and beside four streams that go on for up to 32,000 tokens, alternating.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.load import HttpClient, Sample, http_request, run_closed_loop
from bench.report import Aim, Report, parser, percentile, progress, summary
from services.cluster import ClusterSpec, LocalCluster

MANY = 32_000
FEW = 64
CLIENTS = 40
STREAMS = 4
PROMPT_CHARS = 120
SHORT_TOKENS = 8


def _prompts(dice: random.Random, count: int) -> list[str]:
    return ["".join(dice.choices(string.ascii_lowercase + " ", k=PROMPT_CHARS)) for _ in range(count)]


async def _whole(address: str, body: dict[str, object]) -> dict[str, Any]:
    """The JSON of an answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(http_request(address, "/v1/completions", body))
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    answer: dict[str, Any] = json.loads(await reader.readexactly(length))
    writer.close()
    return answer


class Load:
    """Requests to one load balancer, from clients that keep their connections."""

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model
        self._clients = [HttpClient(address) for _ in range(CLIENTS)]

    def request(self, prompt: str, **fields: object) -> bytes:
        body = {"model": self._model, "prompt": prompt, "temperature": 0, **fields}
        return http_request(self._address, "/v1/completions", body)

    async def run(self, requests: list[bytes]) -> list[Sample]:
        left = iter(requests)
        return await run_closed_loop(lambda number: self._clients[number].send(next(left)), len(requests), CLIENTS)

    async def stops(self, prompts: list[str]) -> list[str]:
        """For each prompt, what its greedy answer has for the first time in its middle."""
        stops = []
        for prompt in prompts:
            body = {"model": self._model, "prompt": prompt, "temperature": 0, "max_tokens": FEW, "ignore_eos": True}
            text = (await _whole(self._address, body))["choices"][0]["text"]
            cut = next((at for at in range(8, 40) if text.find(text[at : at + 3]) == at), 8)
            stops.append(text[cut : cut + 3])
        return stops

    async def answers(self, prompts: list[str], stops: list[str], max_tokens: int) -> list[tuple[str, str]]:
        answers = []
        for prompt, stop in zip(prompts, stops, strict=True):
            body = {"model": self._model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "stop": stop}
            choice = (await _whole(self._address, {**body, "ignore_eos": True}))["choices"][0]
            answers.append((choice["text"], choice["finish_reason"]))
        return answers

    async def stream_for_ever(self, prompt: str) -> None:
        """Until it is cancelled, or has all its tokens."""
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


async def _used_or_not(load: Load, dice: random.Random, rounds: int, report: Report) -> None:
    prompts = _prompts(dice, 12)
    stops = await load.stops(prompts)
    equal = await load.answers(prompts, stops, FEW) == await load.answers(prompts, stops, MANY)
    rates: dict[int, list[float]] = {FEW: [], MANY: []}
    for index in range(rounds):
        progress(f"max_tokens 64 and 32,000: round {index + 1} of {rounds}")
        for limit in (FEW, MANY) if index % 2 else (MANY, FEW):
            requests = [
                load.request(prompt, stop=stop, max_tokens=limit, ignore_eos=True)
                for prompt, stop in zip(prompts, stops, strict=True)
            ] * 20
            began_s = time.perf_counter()
            await load.run(requests)
            rates[limit].append(len(requests) / (time.perf_counter() - began_s))
    ratio = statistics.median(many / few for many, few in zip(rates[MANY], rates[FEW], strict=True))
    report.results["unused_max_tokens"] = {
        **{f"requests_per_s_at_{limit}": summary(values) for limit, values in rates.items()},
        "ratio": round(ratio, 3),
        "answers_equal": equal,
    }
    report.aims.append(Aim("requests/s at max_tokens 32,000 to those at 64", 0.95, round(ratio, 3), at_most=False))
    report.aims.append(Aim("answers equal", 1, int(equal), at_most=False))


async def _beside_streams(load: Load, dice: random.Random, rounds: int, report: Report) -> None:
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
                for prompt in _prompts(dice, 8 * CLIENTS)
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
    rounds = 3 if quick else 9
    report = Report("growth", {"seed": seed, "rounds": rounds, "clients": CLIENTS, "streams": STREAMS})
    with tempfile.TemporaryDirectory() as logs, LocalCluster(ClusterSpec(), Path(logs)) as cluster:
        load = Load(cluster.services["lb-0"].endpoints["http"], "pinyon-tiny")
        await load.run([load.request(prompt, max_tokens=SHORT_TOKENS) for prompt in _prompts(dice, CLIENTS)])
        await _used_or_not(load, dice, rounds, report)
        await _beside_streams(load, dice, rounds, report)
        load.close()
    return report


def main() -> None:
    arguments = parser(__doc__).parse_args()
    asyncio.run(run(arguments.quick, arguments.seed)).emit()


if __name__ == "__main__":
    main()
