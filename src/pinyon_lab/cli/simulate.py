"""The commands ``pinyon simulate`` and ``compare``, which run a trace on a simulated cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon_lab.cli import simulate_regions
from pinyon_lab.cli.numbers import add_numbers
from pinyon_lab.cli.simulated import (
    Load,
    add_cluster,
    add_output,
    add_policy,
    check,
    model_of,
    policy_of,
    read,
    run_model,
)
from pinyon_lab.cli.simulated_results import draw, print_result, print_side_by_side, write_rows
from pinyon_lab.cli.trace_input import open_trace, print_json
from pinyon_lab.simulator.models import Model, Rows
from pinyon_lab.simulator.searches import Bounds, goodput
from pinyon_lab.simulator.workload import at_rate

_DESCRIPTION = """\
Send the requests of a trace to simulated instances, on a virtual clock, through the very modules that place, queue,
batch and evict in a running suite. The same arguments and seed give the same numbers. The last line is one JSON object.

The model prefill-reference has few rules, so that anybody can compute its numbers again: an instance computes one
prompt at a time, 127 µs for each token that it does not reuse; it reuses the longest leading run of blocks in its cache
when service starts, all tokens but one at most; blocks enter the cache when service ends; TTFT is waiting and service.
Prompts are cut to --tokens-max, arrivals are scaled to --rate, and the first --warm-up requests do not count. In it,
preble balances load alone where no prefix is long enough (combined=false).

The other models are whole machines, by a profile of their engine and links: chunked prefill, continuous batching, KV
memory with a second tier, a global pool, and transfers that share NICs. --steps prefill_first, with or without
--no-prefix-cache, are the coupled baselines of Mooncake §5.2.

--regions needs no trace: load balancers of several regions route what closed-loop clients send over a day."""

COMPARED = ("random", "least_loaded", "cache_affinity", "min_ttft", "preble", "dualmap", "kvcache_centric", "pinyon")
_COMPARE = """\
Run a trace as ``pinyon simulate`` does once for each placement policy, all else alike, and show the results side by
side. The last line is one JSON object with all of them."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="run a trace on a simulated cluster",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_cluster(parser, traced=False)
    add_policy(parser)
    rate = parser.add_mutually_exclusive_group()
    add_numbers(rate, "--rate", "--goodput")
    add_numbers(parser, "--p99", "--drift")
    add_output(parser, per_request=True, picture=True)
    simulate_regions.add_arguments(parser)
    parser.set_defaults(run=simulate, defaults=vars(parser.parse_args([])))


def add_compare(commands: Any) -> None:
    parser = commands.add_parser("compare", help="simulate placement policies side by side", description=_COMPARE)
    add_cluster(parser)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"may be given again: {PLACEMENT_POLICIES.described} (default: {', '.join(COMPARED)})",
    )
    add_numbers(parser, "--rate")
    add_output(parser, picture=True)
    parser.set_defaults(run=compare)


def _models(arguments: argparse.Namespace, choices: Sequence[str]) -> tuple[dict[str, Model], Load]:
    """Returns a model for each choice of a placement policy, and the trace. Raises :class:`PinyonError`."""
    check(arguments)
    policies = {choice: policy_of(arguments, choice) for choice in choices}
    if len(policies) < len(choices):
        raise InvalidArgument("a policy is named twice", field="policy")
    trace = open_trace(arguments)
    models = {choice: model_of(arguments, trace, policy, arguments.instances) for choice, policy in policies.items()}
    return models, read(arguments, trace)


def _instances(arguments: argparse.Namespace) -> int:
    count: int = (arguments.instances or 0) + arguments.prefill_instances + arguments.decode_instances
    return count


def simulate(arguments: argparse.Namespace) -> int:
    """Runs the trace and prints the results. Raises :class:`PinyonError`."""
    simulate_regions.check(arguments, arguments.defaults)
    if arguments.regions is not None:
        return simulate_regions.simulate(arguments)
    if arguments.trace is None:
        raise InvalidArgument("a trace is missing, or --regions", field="trace")
    models, load = _models(arguments, [arguments.policy])
    (model,) = models.values()

    def served_at(rate: float) -> Rows:
        return run_model(model, at_rate(load.arrivals, rate), f"{rate:.4g} requests/s")

    if arguments.goodput is None:
        rate, rows = load.rate, served_at(load.rate)
    else:
        bounds = Bounds(arguments.goodput, arguments.p99, arguments.drift)
        within = "" if bounds == Bounds(bounds.share) else " within the bounds"
        rate, rows = goodput(
            served_at,
            lambda rows: bounds.hold(model.report(rows, load.limits)),
            load.native_rate,
            f"{bounds.share:.0%} of the requests in time{within}",
        )
    result = {
        "name": "simulate",
        "model": arguments.model,
        "policy": model.policy,
        "order": arguments.order,
        "instances": _instances(arguments),
        "cache_tokens": arguments.cache_tokens,
        "slo_s": arguments.slo,
        "seed": arguments.seed,
        "rate": rate,
        **({} if arguments.goodput is None else {"goodput": rate, "goodput_share": arguments.goodput}),
        "native_rate": load.native_rate,
        "broken_rows": load.broken,
        **model.report(rows, load.limits),
    }
    if arguments.per_request is not None:
        write_rows(arguments.per_request, enumerate(rows))
    title = f"{model.policy}, {result['instances']} instances, TTFT SLO {arguments.slo:g} s"
    if arguments.goodput is not None:
        title += f": goodput at {arguments.goodput:.0%}"
    if arguments.picture is not None:
        draw(arguments.picture, title, {model.policy: rows}, load.limits)
    if not arguments.json:
        print_result(title, result)
    print_json(result)
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Runs the policies and prints the results. Raises :class:`PinyonError`."""
    models, load = _models(arguments, arguments.policy or COMPARED)
    arrivals = at_rate(load.arrivals, load.rate)
    rows: dict[str, Rows] = {}
    results: dict[str, dict[str, Any]] = {}
    for choice, model in models.items():
        rows[choice] = run_model(model, arrivals, choice)
        results[choice] = {"policy": model.policy, "rate": load.rate, **model.report(rows[choice], load.limits)}
    count = _instances(arguments)
    title = f"{count} instances of {arguments.model}, TTFT SLO {arguments.slo:g} s"
    if arguments.picture is not None:
        draw(arguments.picture, title, rows, load.limits)
    if not arguments.json:
        print_side_by_side(title, "policy", results)
    common = {"name": "compare", "model": arguments.model, "instances": count, "slo_s": arguments.slo}
    print_json(common | {"seed": arguments.seed, "results": list(results.values())})
    return 0
