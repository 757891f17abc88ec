"""Two stock vLLM servers, one thread each, behind different front ends, under unmodified ``vllm bench serve``.

``round_robin`` and ``cache_aware`` are vllm-router's; ``upstream`` is our load balancer alone; ``agent`` places by what
the untouched servers hold; ``pool`` has the connector in both servers, and a store node. The first four share two
servers. All servers are warm, and their prefix caches are emptied before each run."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.engines_sides import Side, ask, conductor_side, pool_side, router_side, two_servers, upstream_side
from bench.report import Aim, Report, parser, progress
from launch import vllm
from launch.process import ROOT
from launch.vllm import VllmServer
from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.messages.plan import FIELD, NAME, seal_plan
from pinyon.runtime.process import child_environment

CLIENT_S = 900.0
SHAPE = {"hidden": 512, "layers": 8, "heads": 8}
"""A model that takes a second and a half for 1,000 tokens on one thread here."""
KV_MIB = 192
"""KV memory of each server: 12,288 tokens."""
PROMPT, BLOCK_TOKENS = 2000, 32
SAVED_S = 2.0
"""The time for a prompt's blocks to be in the pool."""


@dataclass(frozen=True)
class Load:
    """A load: the client's requests per second, their number, and its options."""

    name: str
    rate: float
    prompts: int
    arguments: tuple[str, ...]


def loads(quick: bool, folder: Path, seed: int) -> list[Load]:
    few, many = (24, 24) if quick else (32, 72)
    prefixes = [Load("prefix_8", 0.7, few, _prefixes(8)), Load("prefix_24", 0.7, many, _prefixes(24))]
    shared = folder / "sharegpt.json"
    shared.write_text(json.dumps(_conversations(many, seed)))
    nothing = ("--dataset-name", "sharegpt", "--dataset-path", str(shared))
    return [*prefixes, Load("sharegpt", 0.7, many, nothing)]


def _prefixes(number: int) -> tuple[str, ...]:
    """Returns a data set of so many prefixes: 8 fit into one server's KV memory, 24 do not fit into both."""
    return (
        "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "1000",
        "--prefix-repetition-suffix-len", "64", "--prefix-repetition-num-prefixes", str(number),
        "--prefix-repetition-output-len", "16",
    )  # fmt: skip


def _conversations(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns texts of ShareGPT's form that share nothing, with lengths that vary as people's do."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz      "

    def text(length: float) -> str:
        return "".join(rng.choices(letters, k=max(8, min(900, round(length)))))

    return [
        {
            "id": str(number),
            "conversations": [
                {"from": "human", "value": text(rng.lognormvariate(5.3, 0.8))},
                {"from": "gpt", "value": text(rng.lognormvariate(3.2, 0.5))},
            ],
        }
        for number in range(count * 2)
    ]


def measure(side: Side, load: Load, model: Path, folder: Path, seed: int) -> dict[str, float]:
    """Runs the client once and returns what it and the processes' own clocks say."""
    side.forget()
    result = folder / f"{side.name}-{load.name}.json"
    command = [
        str(vllm.vllm_python()), "-m", "launch.vllm_main", "bench", "serve", "--backend", "openai",
        "--base-url", side.url, "--model", model.name, "--tokenizer", str(model), "--endpoint", "/v1/completions",
        *load.arguments, "--num-prompts", str(load.prompts), "--request-rate", str(load.rate), "--seed", str(seed),
        "--ignore-eos", "--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99", "--save-result",
        "--result-dir", str(folder), "--result-filename", result.name, "--disable-tqdm",
    ]  # fmt: skip
    environment = child_environment(ROOT, os.getpid()) | vllm.ENVIRONMENT
    environment.pop("PYTHONSAFEPATH", None)
    before, cpu_s, busy_s, began_s = side.hits(), side.cpu_s(), side.server_cpu_s(), time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CLIENT_S)
    seconds = time.monotonic() - began_s
    if done.returncode:
        raise RuntimeError(f"vllm bench serve failed: {(done.stderr or done.stdout)[-800:]}")
    told = json.loads(result.read_text())
    after = side.hits()
    prompts = max(1.0, after["tokens"] - before["tokens"])
    return {
        "completed": told["completed"],
        "ttft_mean_ms": told["mean_ttft_ms"],
        "ttft_p50_ms": told["p50_ttft_ms"],
        "ttft_p99_ms": told["p99_ttft_ms"],
        "tbt_mean_ms": told["mean_itl_ms"],
        "tbt_p99_ms": told["p99_itl_ms"],
        "hit_share": (after["local"] - before["local"] + after["loaded"] - before["loaded"]) / prompts,
        "loaded_share": (after["loaded"] - before["loaded"]) / prompts,
        "front_cpu_ms_per_request": 1e3 * (side.cpu_s() - cpu_s) / load.prompts,
        "servers_busy_share": (side.server_cpu_s() - busy_s) / seconds / len(side.servers),
    }


def first_tokens(side: Side, model: str, rounds: int) -> dict[str, float]:
    """Returns the median times to the first token of new prompts of 2,000 tokens: computed, in the server's own cache,
    in the pool, and at the other server. Raises :class:`RuntimeError` where blocks did not come from there."""
    rng = random.Random(5)
    first, second = side.servers
    found: dict[str, list[float]] = {"computed_ms": [], "own_ms": [], "pool_ms": [], "peer_ms": []}
    plan = worker_pb2.Plan(request_id="bench")
    plan.placement.policy = "bench"
    plan.placement.fetches.add(
        source_id=first.name,
        source_address=side.addresses[first.name],
        source=common_pb2.KV_SOURCE_PEER,
        block_count=(PROMPT - 1) // BLOCK_TOKENS,
    )
    planned = {FIELD: {NAME: seal_plan(plan.SerializeToString(), b"")}}
    for _ in range(rounds):
        for way, extra in (("pool_ms", {}), ("peer_ms", planned)):
            prompt = [rng.randrange(97, 123) for _ in range(PROMPT)]
            found["computed_ms"].append(_ask_ms(first, model, prompt))
            found["own_ms"].append(_ask_ms(first, model, prompt))
            time.sleep(SAVED_S)
            loaded = side.hits()["loaded"]
            found[way].append(_ask_ms(second, model, prompt, **extra))
            if side.hits()["loaded"] < loaded + PROMPT - 2 * BLOCK_TOKENS:
                raise RuntimeError(f"blocks did not come from the {way.removesuffix('_ms')}")
    return {way: statistics.median(times) for way, times in found.items()}


def _ask_ms(server: VllmServer, model: str, prompt: list[int], **fields: Any) -> float:
    began_s = time.monotonic()
    ask(server, model, prompt, **fields)
    return 1e3 * (time.monotonic() - began_s)


def run(quick: bool, rounds: int) -> Report:
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the servers' caches are emptied between loads
    report = Report("engines", {"model": SHAPE, "kv_mib": KV_MIB, "rounds": rounds, "vllm": vllm.VERSION})
    model = vllm.small_checkpoint("bench", **SHAPE)
    more = ("--kv-cache-memory-bytes", str(KV_MIB << 20))
    cells: dict[str, dict[str, list[dict[str, float]]]] = {}

    def take(side: Side, place: int, load: Load) -> None:
        # The pool keeps what it got: no load has another one's prompts.
        measured = measure(side, load, model, folder, 10 * number + place)
        cells.setdefault(load.name, {}).setdefault(side.name, []).append(measured)
        progress(f"{load.name} {side.name}: " + ", ".join(f"{k} {v:.3g}" for k, v in measured.items()))

    with tempfile.TemporaryDirectory(prefix="pinyon-bench-") as scratch:
        folder = Path(scratch)
        for number in range(rounds):
            wanted = list(enumerate(loads(quick, folder, number)))
            with two_servers(model, more, folder) as plain:
                sides = [
                    partial(router_side, "round_robin", plain, folder),
                    partial(router_side, "cache_aware", plain, folder),
                    partial(upstream_side, plain, folder),
                    partial(conductor_side, plain, model, folder),
                ]
                for place, load in wanted:
                    for start in sides[number % 4 :] + sides[: number % 4]:
                        with start() as side:  # what is not measured does not run
                            take(side, place, load)
            with pool_side(model, more, folder) as side:
                for place, load in wanted:
                    take(side, place, load)
                found = first_tokens(side, model.name, 2 if quick else 4)
                cells.setdefault("first_token", {}).setdefault("pool", []).append(found)
    for name, by in cells.items():
        report.results[name] = {
            side: {key: statistics.median(each[key] for each in told) for key in told[0]} for side, told in by.items()
        }
    report.aims = aims(report.results)
    return report


def aims(results: dict[str, Any]) -> list[Aim]:
    made = []
    for load in ("prefix_8", "prefix_24"):
        told = {side: each["ttft_mean_ms"] for side, each in results[load].items()}
        others = min(each for side, each in told.items() if side != "pool")
        made.append(Aim(f"mean TTFT with the pool / the best other, {load}", 1.0, told["pool"] / others))
    told = {side: each["ttft_mean_ms"] for side, each in results["sharegpt"].items()}
    made += [
        Aim(f"mean TTFT with {side} / round robin, nothing shared", 1.05, told[side] / told["round_robin"])
        for side in ("agent", "pool")
    ]
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=1, help="repeat everything so often, in another order")
    given = options.parse_args()
    report = run(given.quick, given.rounds)
    report.emit()


if __name__ == "__main__":
    main()
