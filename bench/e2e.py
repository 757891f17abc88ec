"""The cost of the load balancer and the conductor per request, in one run with vllm-router (cache-aware).

Workers compute nothing: prompts take them no time, and further tokens come one each millisecond, as from the stub
servers behind the other router. Half of each prompt is one of 64 shared beginnings, the other half is its own: no
prompt comes twice. CPU is that of load balancer and conductor (or of the other router) per request with 16 at once, by
the scheduler's accounting. Added latency is against a client that speaks to a worker (or to a stub) itself, one request
at a time. All sides take turns. Besides, the benchmark shows the part of tokens and block keys in that CPU, and the
cost of a token in each service while 64 streams are served.

Ours tokenizes, makes keys, predicts and admits. The other router asks its servers for tokens. Where they have none, it
says that it chooses by characters, but its choices do not follow prefixes (docs/notebook/benchmarks.md): that is the
cost of a router that only forwards. Both are measured, with as many servers as ours has workers, and the aim is by the
cheaper one."""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.e2e_cluster import WORKERS, Extra, our_cluster, pids_of
from bench.e2e_items import tokens_and_keys
from bench.e2e_model import make_model, words
from bench.e2e_sides import CONCURRENCY, DirectTaker, HttpTaker, Taker
from bench.e2e_streams import STREAMS, TOKEN_GAP_S, token_price
from bench.load import cpu_seconds, run_closed_loop
from bench.peers import PeerUnavailable
from bench.report import Aim, Report, parser, percentile, progress, summary
from bench.router_prompts import GROUPS, STREAMED_TOKENS, Prompts
from bench.router_sides import PEERS, Side, peer_side, running_stubs
from launch.cluster import LocalCluster
from launch.scrape import Scrape

ROUTER = "vllm_router"
BARE, TOKENS = ROUTER, f"{ROUTER}_tokens"
"""The router before servers that do not tokenize, and before servers that do."""
CPU_AIM = 1.5
"""The aim in multiples of the peer's CPU."""
ADDED_AIM_US = 300.0
TOKEN_AIM_US = 25.0
SIZES_KB = (32, 8)
"""The prompts' sizes. Large ones come first and fill the workers' caches: later blocks are evicted as in service."""
FILL_REQUESTS = 256
QUICK_FILL_REQUESTS = 96
STUB_CHUNKS = 1 << 16
"""The size of the stubs' caches; no result depends on what they hold."""
KINDS = ("conductor", "worker", "lb")


@dataclass(frozen=True)
class Suite:
    """A cluster of ours, and the cells that are measured with it."""

    tokenizer: str
    tls: bool
    cells: Sequence[tuple[int, bool]]
    """The kilobytes of prompt, and whether the answer is streamed."""

    @property
    def name(self) -> str:
        return f"{self.tokenizer}{'_tls' if self.tls else ''}"


def suites(quick: bool) -> list[Suite]:
    if quick:
        return [Suite("bytes", False, ((8, False), (8, True))), Suite("bpe", True, ((8, False),))]
    cells = list(itertools.product(SIZES_KB, (False, True)))
    return [Suite(tokenizer, tls, cells) for tokenizer in ("bytes", "bpe") for tls in (False, True)]


async def turn(taker: Taker, concurrency: int, count: int, figures: dict[str, list[float]]) -> None:
    """Sends ``count`` requests, ``concurrency`` at once, and adds to the figures."""
    following = iter(taker.prepare(count))
    gc.collect()
    before = {name: cpu_seconds([pid]) for name, pid in taker.pids.items()}
    samples = await run_closed_loop(lambda number: taker.send(number, next(following)), count, concurrency)
    if concurrency > 1:
        total = 0.0
        for name, pid in taker.pids.items():
            each = (cpu_seconds([pid]) - before[name]) / count * 1e6
            figures.setdefault(f"cpu_{name}_us_per_request", []).append(each)
            total += each
        figures.setdefault("cpu_us_per_request", []).append(total)
        return
    for percent in (50, 99):
        for what, values in (
            ("first", [sample.first_byte_s for sample in samples]),
            ("whole", [sample.total_s for sample in samples]),
        ):
            figures.setdefault(f"{what}_p{percent}_us", []).append(percentile(values, percent) * 1e6)


async def compare(takers: Sequence[Taker], quick: bool) -> dict[str, dict[str, list[float]]]:
    """Returns the figures of each repetition, by side."""
    repetitions, alone, together = (2, 40, 100) if quick else (5, 40, 160)
    figures: dict[str, dict[str, list[float]]] = {taker.name: {} for taker in takers}
    for taker in takers:
        await turn(taker, CONCURRENCY if taker.pids else 1, GROUPS if quick or not taker.pids else 2 * GROUPS, {})
    for _ in range(repetitions):
        for taker in takers:
            await turn(taker, 1, alone, figures[taker.name])
            if taker.pids:
                await turn(taker, CONCURRENCY, together, figures[taker.name])
    return figures


def told(mine: Mapping[str, list[float]], without: Mapping[str, list[float]], stream: bool) -> dict[str, Any]:
    """Returns a side's CPU, and the latency that it adds to that of the servers behind it."""
    found: dict[str, Any] = {name: summary(each) for name, each in mine.items() if name.startswith("cpu")}
    for what, percent in itertools.product(("first", "whole") if stream else ("whole",), (50, 99)):
        key = f"{what}_p{percent}_us"
        added = [one - other for one, other in zip(mine[key], without[key], strict=True)]
        found[f"added_{key}"] = summary(added)
        found[key] = summary(mine[key])
    return found


async def measure(
    suite: Suite, cluster: LocalCluster, peers: Mapping[str, Side], cell: tuple[int, bool], quick: bool, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the figures of one cell, ours and the peers'."""
    size_kb, stream = cell

    def prompts(side: str) -> Prompts:
        return Prompts(f"{seed} {suite.name} {side}", size_kb << 10, stream, words)

    ours = HttpTaker(
        "pinyon", prompts("ours"), [cluster.services["lb-0"].endpoints["http"]], pids_of(cluster),
        cluster.access.ssl_context(),
    )  # fmt: skip
    takers: list[Taker] = [ours, DirectTaker(prompts("direct"), cluster)]
    takers += [HttpTaker(name, prompts(name), [peer.address], {"router": peer.pid}) for name, peer in peers.items()]
    takers += [HttpTaker("stubs", prompts("stubs"), peer.stubs) for peer in list(peers.values())[:1]]
    before = counted(cluster)
    try:
        figures = await compare(takers, quick)
    finally:
        for taker in takers:
            await taker.close()
    asked, cached, fallbacks = [now - then for now, then in zip(counted(cluster), before, strict=True)]
    result = told(figures["pinyon"], figures["direct"], stream)
    result |= tokens_and_keys(cluster, prompts("items"), 20 if quick else 100)
    result |= {"cached_ratio": round(cached / asked, 3), "placed_without_conductor": fallbacks}
    return result, {name: told(figures[name], figures["stubs"], stream) for name in peers}


def counted(cluster: LocalCluster) -> tuple[float, float, float]:
    """Returns the prompt tokens, the reused ones among them, and the placements without the conductor, all so far."""
    names = ("prompt_tokens", "cached_tokens", "fallback_placements")
    scrape = Scrape(cluster, ("lb-0",))
    one, other, third = (scrape.total(f"pinyon_lb_{name}_total") for name in names)
    return one, other, third


def aims_of(name: str, ours: Mapping[str, Any], peers: Mapping[str, Any], tls: bool, unavailable: str) -> list[Aim]:
    cpu = ours["cpu_us_per_request"]["median"]
    text = f"{name}: CPU of lb + conductor, us per request, {CPU_AIM} x vllm-router's"
    if peers:
        best = min(each["cpu_us_per_request"]["median"] for each in peers.values())
        items = f"{ours['tokens_us_per_request']:.0f} are tokens and {ours['keys_us_per_request']:.0f} keys"
        if TOKENS in peers:  # the router that chooses by prefix
            items += f"; {cpu / peers[TOKENS]['cpu_us_per_request']['median']:.2f} x that of vllm-router by prefix"
        plain = "; vllm-router without TLS, which it does not have" if tls else ""
        aims = [Aim(text, round(CPU_AIM * best, 1), cpu, reason=items + plain)]
    else:
        aims = [Aim(text, 0.0, None, reason=unavailable)]
    for what in ("first", "whole"):
        if (added := ours.get(f"added_{what}_p50_us")) is not None:
            aim = Aim(f"{name}: added p50 of the {what}, us", ADDED_AIM_US, added["median"])
            if added["median"] < -ADDED_AIM_US:  # no work more can make a request so much faster
                aim = replace(aim, measured=None, reason=f"{added['median']:.0f}: the machine was busy with others")
            aims.append(aim)
    return aims


async def run(quick: bool, seed: int, extra: Extra) -> Report:
    report = Report(
        "e2e",
        {
            "shared_beginnings": GROUPS, "streamed_tokens": STREAMED_TOKENS, "concurrency": [1, CONCURRENCY],
            "streams": STREAMS, "seed": seed, "quick": quick, "peer": PEERS[ROUTER][0], "extra": dict(extra),
        },
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary, running_stubs(2) as stubs, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        models: dict[str, Path | None] = {"bytes": None, "bpe": make_model(folder / "model")}
        peers, unavailable = {}, ""
        try:
            for name, own in zip((BARE, TOKENS), stubs, strict=True):
                peers[name] = stack.enter_context(peer_side(ROUTER, own[:WORKERS], folder))
                peers[name].resize(STUB_CHUNKS)
            peers[BARE].bare()
        except (PeerUnavailable, RuntimeError) as error:
            unavailable = str(error)
            report.baseline[ROUTER] = {"unavailable": unavailable}
            peers.clear()
        for suite in suites(quick):
            with our_cluster(folder, models[suite.tokenizer], tls=suite.tls, extra=extra) as cluster:
                await fill(cluster, suite, seed, QUICK_FILL_REQUESTS if quick else FILL_REQUESTS)
                for cell in suite.cells:
                    name = f"{suite.name}_{cell[0]}kb_{'stream' if cell[1] else 'whole'}"
                    ours, others = await measure(suite, cluster, peers, cell, quick, seed)
                    report.results[name] = ours
                    report.baseline[name] = others
                    report.aims += aims_of(name, ours, others, suite.tls, unavailable)
                    tell(name, ours, others)
        for tls in (False,) if quick else (False, True):
            with our_cluster(folder, None, tls=tls, token_gap_s=TOKEN_GAP_S, extra=extra) as cluster:
                name = f"bytes{'_tls' if tls else ''}_{STREAMS}_streams"
                prompts = Prompts(f"{seed} tokens", 1024, True, words)
                price = await token_price(cluster, prompts, 112 if quick else 256, 1 if quick else 5)
                report.results[name] = price
                report.aims += [
                    Aim(f"{name}: CPU of {who}, us per token", TOKEN_AIM_US, price[f"{who}_us_per_token"]["median"])
                    for who in ("lb", "worker")
                ]
                progress(f"{name}: {price}")
    return report


async def fill(cluster: LocalCluster, suite: Suite, seed: int, count: int) -> None:
    """Fills the workers' caches, so that all that comes next evicts something."""
    prompts = Prompts(f"{seed} {suite.name} fill", max(SIZES_KB) << 10, False, words)
    host = cluster.services["lb-0"].endpoints["http"]
    taker = HttpTaker("fill", prompts, [host], context=cluster.access.ssl_context())
    try:
        await turn(taker, CONCURRENCY, count, {})
    finally:
        await taker.close()


def tell(name: str, ours: Mapping[str, Any], peers: Mapping[str, Any]) -> None:
    parts = " + ".join(f"{ours[f'cpu_{who}_us_per_request']['median']:.0f} {who}" for who in ("lb", "conductor"))
    others = "".join(
        f"; {who}: {each['cpu_us_per_request']['median']:.0f} us, added p50 {each['added_whole_p50_us']['median']:.0f}"
        for who, each in peers.items()
    )
    items = f"{ours['tokens_us_per_request']:.0f} tokens, {ours['keys_us_per_request']:.0f} keys"
    progress(
        f"{name}: CPU {ours['cpu_us_per_request']['median']:.0f} us ({parts}; {items}), "
        f"added p50 {ours['added_whole_p50_us']['median']:.0f}, reused {ours['cached_ratio']}{others}"
    )


def extra_of(choices: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns options by kind from ``KIND:OPTION=VALUE`` each, where ``all`` is every kind. Raises ``ValueError``."""
    found: dict[str, tuple[str, ...]] = {}
    for choice in choices:
        kind, _, rest = choice.partition(":")
        option, equals, value = rest.partition("=")
        if kind not in (*KINDS, "all") or not option or not equals:
            raise ValueError(f"not all, {', '.join(KINDS)} and :OPTION=VALUE: {choice!r}")
        for each in KINDS if kind == "all" else (kind,):
            found[each] = (*found.get(each, ()), f"--{option}", value)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--extra", action="append", default=[], metavar="KIND:OPTION=VALUE",
        help="an option for our services: kind all, lb, conductor or worker",
    )  # fmt: skip
    arguments = options.parse_args()
    try:
        extra = extra_of(arguments.extra)
    except ValueError as error:
        options.error(str(error))
    uvloop.run(run(arguments.quick, arguments.seed, extra)).emit()


if __name__ == "__main__":
    main()
