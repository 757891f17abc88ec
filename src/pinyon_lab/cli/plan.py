"""The command ``pinyon plan``, which finds how many instances a trace needs."""

from __future__ import annotations

import argparse
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon_lab.cli.numbers import add_numbers, refuse_given
from pinyon_lab.cli.simulated import add_cluster, add_output, add_policy, check, model_of, policy_of, read, run_model
from pinyon_lab.cli.simulated_results import print_side_by_side
from pinyon_lab.cli.trace_input import open_trace, print_json
from pinyon_lab.simulator.models import Limits, Rows
from pinyon_lab.simulator.searches import fewest
from pinyon_lab.simulator.workload import at_rate, one_by_one

APART_S = 600.0
"""The least time in s between requests that shall not wait for each other."""
APART_INSTANCES = 1024
"""A number of caches with room for everything; a policy that spreads prompts over them may reuse more with one."""

_DESCRIPTION = """\
Find the fewest simulated instances that serve a trace so that --share of its requests have their first token within
--slo. With --both, which is for models of whole machines, the time between tokens is to be within --tbt-slo as well.
With --prefill-instances and --decode-instances, their ratio is kept. The last line is one JSON object with all
sizes."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("plan", help="find how many instances a trace needs", description=_DESCRIPTION)
    add_cluster(parser, sized=False)
    add_policy(parser)
    add_numbers(parser, "--rate", "--share")
    parser.add_argument(
        "--both", action="store_true", help="count requests whose TTFT and time between tokens are both in time"
    )
    add_numbers(parser, "--instances-max")
    add_output(parser)
    parser.set_defaults(run=plan)


def plan(arguments: argparse.Namespace) -> int:
    """Simulates sizes and prints the results. Raises :class:`PinyonError`."""
    check(arguments)
    refuse_given(arguments, {"sizes": "", "clients": 0}, "is of simulate: a plan tries sizes, under the load of a rate")
    policy = policy_of(arguments, arguments.policy)
    trace = open_trace(arguments)
    split = arguments.prefill_instances > 0
    base = model_of(arguments, trace, policy, None if split else 1)
    load = read(arguments, trace)
    limits, arrivals = load.limits, at_rate(load.arrivals, load.rate)
    least = 2 if split else 1
    key = "effective" if arguments.both and arguments.tbt_slo else "attainment"
    found: dict[int, dict[str, float]] = {}

    def share_of(report: dict[str, float]) -> float:
        return report.get(key, report["attainment"])

    def attained(instances: int) -> float:
        model = base.resized(max(least, instances))
        rows = run_model(model, arrivals, f"{instances} instances")
        found[instances] = model.report(rows, limits)
        return share_of(found[instances])

    enough = fewest(attained, arguments.share, arguments.instances_max)
    if enough is None:
        most: int = arguments.instances_max
        apart = one_by_one(load.arrivals, max(APART_S, 10 * limits.slo_s))
        models = [base.resized(size) for size in (least, max(most, APART_INSTANCES))]
        alone = [(each, run_model(each, apart, "each request alone")) for each in models]
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
        "policy": policy,
        "slo_s": arguments.slo,
        "share": arguments.share,
        "rate": load.rate,
        "seed": arguments.seed,
        "instances": fewest_instances,
        "tried": sizes,
    }
    if not arguments.json:
        title = f"{fewest_instances} instances: {arguments.share:.0%} within {arguments.slo:g} s, {policy}"
        print_side_by_side(title, "instances", {str(each["instances"]): each for each in sizes})
    print_json(result)
    return 0


def _unreachable(share: float, best: float, rows: Rows, limits: Limits) -> str:
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
