"""The commands ``pinyon simulate``, ``compare`` and ``plan``, which run a trace on simulated clusters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon_lab.cli import simulate_regions, simulated
from pinyon_lab.cli.numbers import add_numbers, refuse_given
from pinyon_lab.cli.trace_input import open_trace, print_json
from pinyon_lab.simulator.models import Model, Rows, RunLimits
from pinyon_lab.simulator.searches import Bounds, fewest, goodput
from pinyon_lab.simulator.workload import at_rate, one_by_one

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

APART_S = 600.0
"""The least time in s between requests that must not wait for each other."""
APART_INSTANCES = 1024
"""A number of caches with room for everything; a policy that spreads prompts may reuse more with a single cache."""

_PLAN = """\
Find the fewest simulated instances that serve a trace so that --share of its requests have their first token within
--slo. With --both, which is for models of whole machines, the time between tokens is to be within --tbt-slo as well.
With --prefill-instances and --decode-instances, their ratio is kept. The last line is one JSON object with all
sizes."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="run a trace on a simulated cluster",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulated.add_cluster(parser, traced=False)
    simulated.add_policy(parser)
    rate = parser.add_mutually_exclusive_group()
    add_numbers(rate, "--rate", "--goodput")
    add_numbers(parser, "--p99", "--drift")
    simulated.add_output(parser, per_request=True, picture=True)
    simulate_regions.add_arguments(parser)
    parser.set_defaults(run=simulate)


def add_compare(commands: Any) -> None:
    parser = commands.add_parser("compare", help="simulate placement policies side by side", description=_COMPARE)
    simulated.add_cluster(parser)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"may be given again: {PLACEMENT_POLICIES.described} (default: {', '.join(COMPARED)})",
    )
    add_numbers(parser, "--rate")
    simulated.add_output(parser, picture=True)
    parser.set_defaults(run=compare)


def add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="find how many instances a trace needs", description=_PLAN)
    simulated.add_cluster(parser, sized=False)
    simulated.add_policy(parser)
    add_numbers(parser, "--rate", "--share")
    parser.add_argument(
        "--both", action="store_true", help="count requests whose TTFT and time between tokens are both in time"
    )
    add_numbers(parser, "--instances-max")
    simulated.add_output(parser)
    parser.set_defaults(run=plan)


def _models(
    arguments: argparse.Namespace, choices: Sequence[str], instances: int | None
) -> tuple[dict[str, Model], simulated.SentTrace]:
    """Returns a model for each choice of a placement policy, and the trace. Raises :class:`PinyonError`."""
    policies = {choice: simulated.policy_of(arguments, choice) for choice in choices}
    if len(policies) < len(choices):
        raise InvalidArgument("a policy is named twice", field="policy")
    trace = open_trace(arguments.trace, arguments.format)
    models = {choice: simulated.model_of(arguments, trace, policy, instances) for choice, policy in policies.items()}
    return models, simulated.read(arguments, trace)


def _instances(arguments: argparse.Namespace) -> int:
    count: int = (arguments.instances or 0) + arguments.prefill_instances + arguments.decode_instances
    return count


def simulate(arguments: argparse.Namespace) -> int:
    """Runs the trace and prints the results. Raises :class:`PinyonError`."""
    simulate_regions.check(arguments)
    if arguments.regions is not None:
        return simulate_regions.simulate(arguments)
    if arguments.trace is None:
        raise InvalidArgument("a trace is missing, or --regions", field="trace")
    simulated.check(arguments)
    models, load = _models(arguments, [arguments.policy], arguments.instances)
    (model,) = models.values()

    def served_at(rate: float) -> Rows:
        return simulated.run_model(model, at_rate(load.arrivals, rate), f"{rate:.4g} requests/s")

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
    simulated.write_rows(arguments, enumerate(rows))
    title = f"{model.policy}, {result['instances']} instances, TTFT SLO {arguments.slo:g} s"
    if arguments.goodput is not None:
        title += f": goodput at {arguments.goodput:.0%}"
    simulated.draw(arguments, title, {model.policy: rows}, load.limits)
    if not arguments.json:
        simulated.print_result(title, result)
    print_json(result)
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Runs the policies and prints the results. Raises :class:`PinyonError`."""
    simulated.check(arguments)
    models, load = _models(arguments, arguments.policy or COMPARED, arguments.instances)
    arrivals = at_rate(load.arrivals, load.rate)
    rows: dict[str, Rows] = {}
    results: dict[str, dict[str, Any]] = {}
    for choice, model in models.items():
        rows[choice] = simulated.run_model(model, arrivals, choice)
        results[choice] = {"policy": model.policy, "rate": load.rate, **model.report(rows[choice], load.limits)}
    count = _instances(arguments)
    title = f"{count} instances of {arguments.model}, TTFT SLO {arguments.slo:g} s"
    simulated.draw(arguments, title, rows, load.limits)
    if not arguments.json:
        simulated.print_side_by_side(title, "policy", results)
    common = {"name": "compare", "model": arguments.model, "instances": count, "slo_s": arguments.slo}
    print_json(common | {"seed": arguments.seed, "results": list(results.values())})
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """Simulates sizes and prints the results. Raises :class:`PinyonError`."""
    simulated.check(arguments)
    refuse_given(arguments, ("sizes", "clients"), "is of simulate: a plan tries sizes, under the load of a rate")
    split = arguments.prefill_instances > 0
    models, load = _models(arguments, [arguments.policy], None if split else 1)
    (base,) = models.values()
    limits, arrivals = load.limits, at_rate(load.arrivals, load.rate)
    least = 2 if split else 1
    key = "effective" if arguments.both and arguments.tbt_slo else "attainment"
    found: dict[int, dict[str, float]] = {}

    def share_of(report: dict[str, float]) -> float:
        return report.get(key, report["attainment"])

    def attained(instances: int) -> float:
        model = base.resized(max(least, instances))
        rows = simulated.run_model(model, arrivals, f"{instances} instances")
        found[instances] = model.report(rows, limits)
        return share_of(found[instances])

    enough = fewest(attained, arguments.share, arguments.instances_max)
    if enough is None:
        most: int = arguments.instances_max
        apart = one_by_one(load.arrivals, max(APART_S, 10 * limits.slo_s))
        larger = [base.resized(size) for size in (least, max(most, APART_INSTANCES))]
        alone = [(each, simulated.run_model(each, apart, "each request alone")) for each in larger]
        model, rows = max(alone, key=lambda pair: share_of(pair[0].report(pair[1], limits)))
        best = share_of(model.report(rows, limits))
        if best >= arguments.share:
            reached = share_of(found[most])
            raise InvalidArgument(
                f"{most} instances attain {reached:.1%} only: try more (--instances-max)", field="instances_max"
            )
        raise InvalidArgument(_unreachable(arguments.share, best, rows, limits), field="share")
    fewest_instances = max(least, enough)
    sizes: list[dict[str, Any]] = [{"instances": max(least, size), **found[size]} for size in sorted(found)]
    result = {
        "name": "plan",
        "model": arguments.model,
        "policy": base.policy,
        "slo_s": arguments.slo,
        "share": arguments.share,
        "rate": load.rate,
        "seed": arguments.seed,
        "instances": fewest_instances,
        "tried": sizes,
    }
    if not arguments.json:
        title = f"{fewest_instances} instances: {arguments.share:.0%} within {arguments.slo:g} s, {base.policy}"
        simulated.print_side_by_side(title, "instances", {str(each["instances"]): each for each in sizes})
    print_json(result)
    return 0


def _unreachable(share: float, best: float, rows: Rows, limits: RunLimits) -> str:
    """Returns the error message; ``rows`` are of requests that wait for no other, and ``best`` is the share in time."""
    counted = rows[limits.warm_up :]
    late = [row for row in counted if not 0 <= row.ttft_s <= limits.slo_s]
    why = f"even where nobody waits, {best:.1%} of the requests are in time"
    if late:
        slowest = max(late, key=lambda row: float(row.ttft_s))
        why += (
            f"; the first tokens of {len(late)} of {len(counted)} take longer than {limits.slo_s:g} s to compute, "
            f"up to {slowest.ttft_s:.1f} s for a prompt of {slowest.tokens} tokens"
        )
    return f"no number of instances attains {share:.1%}: {why}"
