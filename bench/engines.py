"""Two stock vLLM servers, one thread each, behind different front ends, under unmodified ``vllm bench serve``.

``round_robin`` and ``cache_aware`` are vllm-router's; ``dynamo`` is Dynamo's KV router; ``upstream`` is our load
balancer alone; ``agent`` places by what the untouched servers hold. These five share two servers. ``lmcache`` has
LMCache's connector in both servers, its own server, and ``round_robin`` in front. ``pool`` has our connector in both
servers, and a store node. ``pairs`` has the same with one server for prompts, and one that decodes. All servers are
warm, and their prefix caches are emptied before each run. A peer that cannot be installed is left out, and the table
says why."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.engines_peers import dynamo_python, dynamo_side, lmcache_python, lmcache_side, peers_python
from bench.engines_sides import Side, ask, conductor_side, pool_side, router_side, two_servers, upstream_side
from bench.peers import PeerUnavailable, peer_python
from bench.report import Aim, Report, parser, progress
from bench.router_sides import PEERS
from launch import vllm
from launch.process import ROOT
from launch.vllm import VllmServer
from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Unavailable
from pinyon.messages.plan import FIELD, NAME, seal_plan
from pinyon.runtime.process import child_environment

CLIENT_S = 900.0
PANDAS = "pandas==2.3.3"
PANDAS_NEEDS = ("python-dateutil", "pytz", "six", "tzdata")
pairs_side = partial(pool_side, name="pairs")
SHAPE = {"hidden": 512, "layers": 8, "heads": 8}
"""A model that takes a second and a half for 1,000 tokens on one thread here."""
KV_MIB = 192
"""KV memory of each server: 12,288 tokens."""
PROMPT, BLOCK_TOKENS = 2000, 32
SAVED_S = 2.0
"""The time for a prompt's blocks to be in the pool."""
SHARING = ("round_robin", "cache_aware", "dynamo", "upstream", "agent")
"""The sides that share two servers."""
OWN = ("lmcache", "pool", "pairs")
"""The sides whose servers have a connector."""
OURS = ("upstream", "agent", "pool", "pairs")
Start = Callable[[], AbstractContextManager[Side]]
LOADS = ("prefix_8", "prefix_24", "sharegpt", "long_beside")


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
    mixed = folder / "long_beside.jsonl"
    mixed.write_text("".join(f"{json.dumps(each)}\n" for each in _long_beside(many, seed)))
    custom = ("--dataset-name", "custom", "--dataset-path", str(mixed), "--custom-output-len", "-1")
    beside = Load("long_beside", 0.5, many, (*custom, "--skip-chat-template"))
    return [*prefixes, Load("sharegpt", 0.7, many, nothing), beside]


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


def _long_beside(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns prompts that share nothing: four short ones with longer answers to each long one."""
    rng = random.Random(seed)
    sizes = ((PROMPT, 4) if number % 5 == 2 else (100, 48) for number in range(count))
    return [{"prompt": "".join(rng.choices("abcdefghij ", k=k)), "output_tokens": tokens} for k, tokens in sizes]


@cache
def client_python() -> Path:
    """Returns the Python that runs the client: vLLM's, with pandas beside it, which reads prompts of one's own."""
    return peers_python(PANDAS, "pandas", PANDAS_NEEDS)


def measure(side: Side, load: Load, model: Path, folder: Path, seed: int) -> dict[str, float]:
    """Runs the client once and returns what it and the processes' own clocks say."""
    side.forget()
    result = folder / f"{side.name}-{load.name}.json"
    command = [
        str(client_python()), "-m", "launch.vllm_main", "bench", "serve", "--backend", "openai",
        "--base-url", side.url, "--model", model.name, "--tokenizer", str(model), "--endpoint", "/v1/completions",
        *load.arguments, "--num-prompts", str(load.prompts), "--request-rate", str(load.rate), "--seed", str(seed),
        "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--save-result",
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
        "output_tokens": told["total_output_tokens"],
        "ttft_mean_ms": told["mean_ttft_ms"],
        "ttft_p50_ms": told["p50_ttft_ms"],
        "ttft_p99_ms": told["p99_ttft_ms"],
        "tpot_mean_ms": told["mean_tpot_ms"],
        "tpot_p99_ms": told["p99_tpot_ms"],
        "tbt_mean_ms": told["mean_itl_ms"],
        "tbt_p99_ms": told["p99_itl_ms"],
        "hit_share": (after["local"] - before["local"] + after["loaded"] - before["loaded"]) / prompts,
        "loaded_share": (after["loaded"] - before["loaded"]) / prompts,
        "front_cpu_ms_per_request": 1e3 * (side.cpu_s() - cpu_s) / load.prompts,
        "servers_busy_share": (side.server_cpu_s() - busy_s) / seconds / len(side.servers),
    }


def first_tokens(side: Side, model: str, rounds: int) -> dict[str, float]:
    """Returns the median times to the first token of new prompts of 2,000 tokens: computed, in the server's own cache,
    and in the pool. If the other server lends blocks, these are read, too. Raises :class:`RuntimeError` where blocks
    did not come from there."""
    rng = random.Random(5)
    first, second = side.servers
    ways: dict[str, dict[str, Any]] = {"pool_ms": {}}
    if side.addresses:
        ways["peer_ms"] = _planned(side, first)
    found: dict[str, list[float]] = {"computed_ms": [], "own_ms": [], **{way: [] for way in ways}}
    for _ in range(rounds):
        for way, extra in ways.items():
            prompt = [rng.randrange(97, 123) for _ in range(PROMPT)]
            found["computed_ms"].append(_ask_ms(first, model, prompt))
            found["own_ms"].append(_ask_ms(first, model, prompt))
            time.sleep(SAVED_S)
            loaded = side.hits()["loaded"]
            found[way].append(_ask_ms(second, model, prompt, **extra))
            if side.hits()["loaded"] < loaded + PROMPT - 2 * BLOCK_TOKENS:
                raise RuntimeError(f"blocks did not come from the {way.removesuffix('_ms')}")
    return {way: statistics.median(times) for way, times in found.items()}


def _planned(side: Side, first: VllmServer) -> dict[str, Any]:
    """Returns the field of a request that has a prompt's blocks come from that server."""
    plan = worker_pb2.Plan(request_id="bench")
    plan.placement.policy = "bench"
    plan.placement.fetches.add(
        source_id=first.name,
        source_address=side.addresses[first.name],
        source=common_pb2.KV_SOURCE_PEER,
        block_count=(PROMPT - 1) // BLOCK_TOKENS,
    )
    return {FIELD: {NAME: seal_plan(plan.SerializeToString(), b"")}}


def _ask_ms(server: VllmServer, model: str, prompt: list[int], **fields: Any) -> float:
    began_s = time.monotonic()
    ask(server, model, prompt, **fields)
    return 1e3 * (time.monotonic() - began_s)


def missing(wanted: Sequence[str]) -> dict[str, str]:
    """Installs the peers of the wanted sides, and returns why a side has none."""
    routers = partial(peer_python, *PEERS["vllm_router"])
    needs: dict[str, list[Callable[[], Path]]] = {
        "round_robin": [routers],
        "cache_aware": [routers],
        "dynamo": [dynamo_python],
        "lmcache": [lmcache_python, routers],
    }
    found = {}
    for name in wanted:
        try:
            for need in needs.get(name, []):
                need()
        except PeerUnavailable as error:
            progress(f"no side {name}: {error}")
            found[name] = str(error)
    return found


@contextlib.contextmanager
def started(name: str, start: Start, skipped: dict[str, str]) -> Iterator[Side | None]:
    """Yields the side, or None and notes the reason if it is a peer that does not start: the others are measured."""
    with contextlib.ExitStack() as stack:
        side = None
        if name not in skipped:
            try:
                side = stack.enter_context(start())
            except (RuntimeError, Unavailable) as error:
                if name in OURS:
                    raise
                progress(f"no side {name}: {error}")
                skipped[name] = f"it does not start: {error}"
        yield side


def run(quick: bool, rounds: int, sides: Sequence[str], names: Sequence[str]) -> Report:
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the servers' caches are emptied between loads
    os.environ["LMCACHE_TRACK_USAGE"] = "false"  # else it reports to its makers
    os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"  # else it writes lines for each request, as no other side does
    report = Report("engines", {"model": SHAPE, "kv_mib": KV_MIB, "rounds": rounds, "vllm": vllm.VERSION})
    skipped = missing(sides)
    report.config["skipped"] = skipped
    wanted = [name for name in sides if name not in skipped]
    model = vllm.small_checkpoint("bench-text", text=1, **SHAPE)
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
            places = [each for each in enumerate(loads(quick, folder, number)) if each[1].name in names]
            sharing = [name for name in SHARING if name in wanted]
            if sharing:
                at = number % len(sharing)
                with two_servers(model, more, folder) as plain:
                    starts: dict[str, Start] = {
                        "round_robin": partial(router_side, "round_robin", plain, folder),
                        "cache_aware": partial(router_side, "cache_aware", plain, folder),
                        "dynamo": partial(dynamo_side, plain, model, folder),
                        "upstream": partial(upstream_side, plain, folder),
                        "agent": partial(conductor_side, plain, model, folder),
                    }
                    for place, load in places:
                        for name in sharing[at:] + sharing[:at]:
                            with started(name, starts[name], skipped) as side:  # what is not measured does not run
                                if side is not None:
                                    take(side, place, load)
            for name, start in (("lmcache", lmcache_side), ("pool", pool_side), ("pairs", pairs_side)):
                if name not in wanted:
                    continue
                with started(name, partial(start, model, more, folder), skipped) as side:
                    if side is not None:
                        for place, load in places:
                            take(side, place, load)
                        if name == "pairs":
                            continue  # one of its servers gets prompts only
                        found = first_tokens(side, model.name, 2 if quick else 4)
                        cells.setdefault("first_token", {}).setdefault(name, []).append(found)
    for name, by in cells.items():
        report.results[name] = {
            side: {key: statistics.median(each[key] for each in told) for key in told[0]} for side, told in by.items()
        }
    report.aims = aims(report.results)
    Console(stderr=True).print(*tables(report.results, skipped), sep="\n")
    return report


def tables(results: dict[str, Any], skipped: dict[str, str]) -> list[Table]:
    """Returns a table of each load for people: mean and P99 in ms, and why a side has no row."""
    made = []
    for load in LOADS:
        if load not in results:
            continue
        table = Table(title=f"{load}: mean / P99 in ms", title_justify="left")
        for column in (
            "side",
            "TTFT",
            "time per output token",
            "between tokens",
            "reused",
            "loaded",
            "answers",
            "tokens",
        ):
            table.add_column(column, no_wrap=column == "side")
        for side, told in results[load].items():
            pairs = (f"{told[f'{key}_mean_ms']:,.0f} / {told[f'{key}_p99_ms']:,.0f}" for key in ("ttft", "tpot", "tbt"))
            shares = (f"{told[key]:.0%}" for key in ("hit_share", "loaded_share"))
            counts = (f"{told[key]:,.0f}" for key in ("completed", "output_tokens"))
            table.add_row(side, *pairs, *shares, *counts)
        for side, why in skipped.items():
            table.add_row(side, f"left out: {why}")
        made.append(table)
    return made


def aims(results: dict[str, Any]) -> list[Aim]:
    """Returns the aims for which all sides were measured."""
    made = []
    for load in ("prefix_8", "prefix_24"):
        told = {side: each["ttft_mean_ms"] for side, each in results.get(load, {}).items()}
        others = [each for side, each in told.items() if side != "pool"]
        if "pool" in told and others:
            made.append(Aim(f"mean TTFT with the pool / the best other, {load}", 1.0, told["pool"] / min(others)))
    between = {side: each["tbt_p99_ms"] for side, each in results.get("long_beside", {}).items()}
    if "pool" in between and "pairs" in between:
        ratio = between["pairs"] / between["pool"]
        made.append(Aim("P99 between tokens, prompts apart / in the pool, long prompts beside", 1.0, ratio))
    told = {side: each["ttft_mean_ms"] for side, each in results.get("sharegpt", {}).items()}
    if "round_robin" in told:
        made += [
            Aim(f"mean TTFT with {side} / round robin, nothing shared", 1.05, told[side] / told["round_robin"])
            for side in ("agent", "pool")
            if side in told
        ]
    return made


def chosen(among: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns a parser of an option's names, in their usual order."""

    def read(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in among]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r} among {', '.join(among)}")
        return [name for name in among if name in given]

    return read


def main() -> None:
    sides = (*SHARING, *OWN)
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=1, help="repeat everything so often, in another order")
    options.add_argument(
        "--sides", type=chosen(sides), default=list(sides), help="only these sides, with commas between"
    )
    options.add_argument("--loads", type=chosen(LOADS), default=list(LOADS), help="only these loads")
    given = options.parse_args()
    run(given.quick, given.rounds, given.sides, given.loads).emit()


if __name__ == "__main__":
    main()
