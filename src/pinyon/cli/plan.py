"""``pinyon plan``: how many instances a trace needs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from pinyon.cli.simulated import (
    add_cluster,
    block_tokens_of,
    check,
    limits_of,
    model_of,
    policy_of,
    read,
    run_model,
)
from pinyon.cli.simulated_results import print_side_by_side
from pinyon.cli.trace_input import open_trace
from pinyon.core.errors import InvalidArgument
from pinyon.placement.policies import PLACEMENT_DEFAULT, PLACEMENT_POLICIES
from pinyon.simulator.plan import fewest

__all__ = ["add_command", "plan"]

_DESCRIPTION = """\
Find the fewest simulated instances that serve a trace so that --share of its requests have their first token within
--slo (and, for models of whole machines with --both, the time between tokens within --tbt-slo). With
--prefill-instances and --decode-instances, their ratio is kept. The last line is one JSON object with all sizes."""


def add_command(commands: Any) -> None:
    """Register the command with the sub-parsers of the ``pinyon`` command."""
    parser = commands.add_parser("plan", help="how many instances a trace needs", description=_DESCRIPTION)
    add_cluster(parser, sized=False)
    described = f"{PLACEMENT_POLICIES.described} (default {PLACEMENT_DEFAULT}, as a conductor's)"
    parser.add_argument("--policy", default=PLACEMENT_DEFAULT, help=described)
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second (default: the trace's)")
    parser.add_argument("--share", type=float, default=0.9, help="of the requests that are to be in time (default 0.9)")
    parser.add_argument("--both", action="store_true", help="the time between tokens is to be in time as well")
    parser.add_argument("--instances-max", type=int, default=1024, metavar="N", help="tried at most (default 1024)")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.set_defaults(run=plan)


def plan(arguments: argparse.Namespace) -> int:
    """Run and print. Raises :class:`PinyonError`."""
    check(arguments)
    for name, least in (("sizes", ""), ("clients", 0)):
        if getattr(arguments, name) != least:
            raise InvalidArgument(f"--{name} is of simulate: a plan tries sizes, under the load of a rate", field=name)
    policy, limits = policy_of(arguments, arguments.policy), limits_of(arguments)
    trace = open_trace(arguments)
    split = arguments.prefill_instances > 0
    base = model_of(arguments, block_tokens_of(arguments, trace), policy, None if split else 1)
    load = read(arguments, trace)
    rate = load.native_rate if arguments.rate is None else arguments.rate
    least = 2 if split else 1
    key = "effective" if arguments.both and arguments.tbt_slo else "attainment"
    found: dict[int, dict[str, float]] = {}

    def attained(instances: int) -> float:
        model = base.resized(max(least, instances))
        rows = run_model(model, load, rate, f"{instances} instances")
        found[instances] = model.report(rows, limits)
        return found[instances].get(key, found[instances]["attainment"])

    fewest_instances = max(least, fewest(attained, arguments.share, arguments.instances_max))
    sizes: list[dict[str, Any]] = [{"instances": max(least, size), **found[size]} for size in sorted(found)]
    result = {
        "name": "plan",
        "model": arguments.model,
        "policy": policy,
        "slo_s": arguments.slo,
        "share": arguments.share,
        "rate": rate,
        "seed": arguments.seed,
        "instances": fewest_instances,
        "tried": sizes,
    }
    if not arguments.json:
        title = f"{fewest_instances} instances: {arguments.share:.0%} within {arguments.slo:g} s, {policy}"
        print_side_by_side(title, "instances", {str(each["instances"]): each for each in sizes})
    sys.stdout.write(json.dumps(result) + "\n")
    return 0
