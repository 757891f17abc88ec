"""The command ``pinyon compare``, which runs a trace on one simulated cluster under several policies."""

from __future__ import annotations

import argparse
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon_lab.cli.numbers import add_numbers
from pinyon_lab.cli.simulated import add_cluster, add_output, check, model_of, policy_of, read, run_model
from pinyon_lab.cli.simulated_results import draw, print_side_by_side
from pinyon_lab.cli.trace_input import open_trace, print_json
from pinyon_lab.simulator.models import Rows
from pinyon_lab.simulator.workload import at_rate

DEFAULT = ("random", "least_loaded", "cache_affinity", "min_ttft", "preble", "dualmap", "kvcache_centric", "pinyon")
_DESCRIPTION = """\
Run a trace as ``pinyon simulate`` does once for each placement policy, all else alike, and show the results side by
side. The last line is one JSON object with all of them."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("compare", help="simulate placement policies side by side", description=_DESCRIPTION)
    add_cluster(parser)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"may be given again: {PLACEMENT_POLICIES.described} (default: {', '.join(DEFAULT)})",
    )
    add_numbers(parser, "--rate")
    add_output(parser, picture=True)
    parser.set_defaults(run=compare)


def compare(arguments: argparse.Namespace) -> int:
    """Runs the policies and prints the results. Raises :class:`PinyonError`."""
    check(arguments)
    choices = arguments.policy or list(DEFAULT)
    policies = {choice: policy_of(arguments, choice) for choice in choices}
    if len(policies) < len(choices):
        raise InvalidArgument("a policy is named twice", field="policy")
    trace = open_trace(arguments)
    models = {choice: model_of(arguments, trace, policy, arguments.instances) for choice, policy in policies.items()}
    load = read(arguments, trace)
    arrivals = at_rate(load.arrivals, load.rate)
    rows: dict[str, Rows] = {}
    results: dict[str, dict[str, Any]] = {}
    for choice, model in models.items():
        rows[choice] = run_model(model, arrivals, choice)
        results[choice] = {"policy": model.policy, "rate": load.rate, **model.report(rows[choice], load.limits)}
    count = (arguments.instances or 0) + arguments.prefill_instances + arguments.decode_instances
    title = f"{count} instances of {arguments.model}, TTFT SLO {arguments.slo:g} s"
    if arguments.picture is not None:
        draw(arguments.picture, title, rows, load.limits)
    if not arguments.json:
        print_side_by_side(title, "policy", results)
    common = {"name": "compare", "model": arguments.model, "instances": count, "slo_s": arguments.slo}
    print_json(common | {"seed": arguments.seed, "results": list(results.values())})
    return 0
