"""``pinyon simulate``: a trace on a simulated cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pinyon.batching.service_order import SERVICE_ORDERS, ServiceOrder
from pinyon.cli.trace_input import add_trace, bar, open_trace, seed_of, tell_broken
from pinyon.core.errors import InvalidArgument
from pinyon.core.policies import Registry
from pinyon.eviction import EVICTION_POLICIES
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.simulator.goodput import goodput
from pinyon.simulator.prefill_reference import PrefillReference, ReferenceSettings
from pinyon.simulator.report import Served, report
from pinyon.simulator.workload import at_rate, cut, native_rate

__all__ = ["add_command", "simulate"]

REFERENCE = "prefill-reference"
INSTANCES_MAX = 1 << 16
_FACTS = (
    ("requests that count", "counted", "{:,}"),
    ("rate, requests/s", "rate", "{:.4g}"),
    ("TTFT in time", "attainment", "{:.2%}"),
    ("  of the last quarter by arrival", "attainment_last_quarter", "{:.2%}"),
    ("  of the tenth with the longest prompts", "attainment_longest_tenth", "{:.2%}"),
    ("TTFT mean, s", "mean_s", "{:.3f}"),
    ("TTFT P50, s", "p50_s", "{:.3f}"),
    ("TTFT P90, s", "p90_s", "{:.3f}"),
    ("TTFT P99, s", "p99_s", "{:.3f}"),
    ("tokens reused", "hit_ratio", "{:.2%}"),
)
_DESCRIPTION = """\
Send the requests of a trace to simulated instances, on a virtual clock, through the very modules that place, queue and
evict in a running suite. The same arguments and seed give the same numbers. The last line is one JSON object.

The model prefill-reference has few rules, so that anybody can compute its numbers again: an instance computes one
prompt at a time, 127 µs for each token that it does not reuse; it reuses the longest leading run of blocks in its cache
when service starts, all tokens but one at most; blocks enter the cache when service ends; TTFT is waiting and service.
Prompts are cut to --tokens-max, arrivals are scaled to --rate, and the first --warm-up requests do not count. In it,
preble balances load alone where no prefix is long enough (combined=false)."""


def add_command(commands: Any) -> None:
    """Register the command with the sub-parsers of the ``pinyon`` command."""
    parser = commands.add_parser("simulate", help="a trace on a simulated cluster", description=_DESCRIPTION)
    add_trace(parser)
    parser.add_argument("--model", default=REFERENCE, choices=(REFERENCE,), help=f"default {REFERENCE}")
    parser.add_argument("--policy", default="min_ttft", help=f"{PLACEMENT_POLICIES.described} (default min_ttft)")
    parser.add_argument("--instances", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--cache-tokens", type=int, required=True, metavar="C", help="of each instance, in whole blocks of the trace"
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=float, metavar="R", help="requests per second in the mean (default: the trace's)")
    rate.add_argument(
        "--goodput", type=float, metavar="SHARE", help="find the highest rate at which that share is in time"
    )
    parser.add_argument("--slo", type=float, default=5.0, metavar="S", help="of the TTFT (default 5)")
    parser.add_argument("--order", default="fifo", help=f"of service: {SERVICE_ORDERS.described} (default fifo)")
    parser.add_argument("--pool", default="none", choices=("none",), help="a global cache beside the instances' own")
    parser.add_argument("--eviction", default="lru", help="of each cache (default lru), as in simulate-cache")
    parser.add_argument("--tokens-max", type=int, default=20_480, metavar="N", help="of a prompt (default 20480)")
    parser.add_argument(
        "--warm-up", type=int, default=500, metavar="N", help="requests that do not count (default 500)"
    )
    parser.add_argument("--seed", type=seed_of, default=0, help="of chance and of hashes (default 0)")
    parser.add_argument("--per-request", type=Path, metavar="FILE", help="write a line of JSON for each request")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.set_defaults(run=simulate)


def simulate(arguments: argparse.Namespace) -> int:
    """Run and print. Raises :class:`PinyonError`."""
    _check(arguments)
    policy = _choice(PLACEMENT_POLICIES, arguments.policy, "policy")
    for option, value in (("seed", arguments.seed), ("slo_s", arguments.slo), ("combined", False)):
        policy = PLACEMENT_POLICIES.with_default(policy, option, value)
    order = _choice(SERVICE_ORDERS, arguments.order, "order")
    eviction = _choice(EVICTION_POLICIES, arguments.eviction, "eviction")
    trace = open_trace(arguments)
    block_tokens = trace.format.block_tokens
    if arguments.cache_tokens < block_tokens:
        raise InvalidArgument(f"--cache-tokens must be at least one block of {block_tokens}", field="cache_tokens")
    with bar("reading", trace.size_bytes) as progress:
        arrivals = cut(trace.sorted_rows(arguments.limit, progress), block_tokens, arguments.tokens_max)
    tell_broken(trace)
    native = native_rate(arrivals)
    if len(arrivals) <= arguments.warm_up:
        raise InvalidArgument(
            f"none of {len(arrivals)} requests counts: the first {arguments.warm_up} do not (--warm-up)",
            field="warm_up",
        )
    settings = ReferenceSettings(
        arguments.instances, arguments.cache_tokens, block_tokens, arguments.slo, eviction, arguments.seed
    )

    def served_at(rate: float) -> list[Served]:
        def make() -> ServiceOrder[Any]:
            return SERVICE_ORDERS.make(order)

        cluster = PrefillReference(settings, PLACEMENT_POLICIES.make(policy), make)
        with bar(f"{rate:.4g} requests/s", len(arrivals)) as progress:
            return cluster.run(at_rate(arrivals, rate), progress)

    if arguments.goodput is None:
        rate = native if arguments.rate is None else arguments.rate
        served = served_at(rate)
    else:
        rate, served = goodput(served_at, arguments.goodput, arguments.slo, arguments.warm_up, native)
    result = {
        "name": "simulate",
        "model": arguments.model,
        "policy": policy,
        "order": order,
        "instances": arguments.instances,
        "cache_tokens": arguments.cache_tokens,
        "slo_s": arguments.slo,
        "seed": arguments.seed,
        "rate": rate,
        "native_rate": native,
        "broken_rows": trace.broken,
        **report(served, arguments.slo, arguments.warm_up),
    }
    if arguments.per_request is not None:
        _write(arguments.per_request, served)
    if not arguments.json:
        _print(result, arguments.goodput)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name, least, most in (
        ("instances", 1, INSTANCES_MAX),
        ("tokens_max", 1, 1 << 31),
        ("warm_up", 0, 1 << 31),
        ("cache_tokens", 1, 1 << 50),
        ("slo", 1e-6, 1e6),
        ("rate", 1e-9, 1e9),
        ("goodput", 0.0, 1.0),
    ):
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            option = name.replace("_", "-")
            raise InvalidArgument(f"--{option} must be from {least:g} to {most:g}, got {value:g}", field=name)
    rows = arguments.per_request
    if rows is not None and (rows.is_dir() or not rows.parent.is_dir()):  # now: a search for a rate may take long
        raise InvalidArgument(f"cannot write {rows}: there is no such folder, or it is one", field="per_request")


def _choice(registry: Registry[Any], choice: str, option: str) -> str:
    try:
        return registry.checked(choice)
    except ValueError as error:
        raise InvalidArgument(str(error), field=option) from None


def _write(path: Path, served: Sequence[Served]) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            for number, each in enumerate(served):
                file.write(json.dumps({"request": number, **each._asdict()}) + "\n")
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}", field="per_request") from None


def _print(result: dict[str, Any], share: float | None) -> None:
    title = f"{result['policy']}, {result['instances']} instances, TTFT SLO {result['slo_s']:g} s"
    if share is not None:
        title += f": goodput at {share:.0%}"
    table = Table(title=title, title_justify="left", show_header=False)
    for label, key, shown in _FACTS:
        table.add_row(label, shown.format(result[key]))
    Console(file=sys.stderr if not sys.stdout.isatty() else sys.stdout).print(table)
