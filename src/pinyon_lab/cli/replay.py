"""The command ``pinyon replay``, which sends a trace to a running suite."""

from __future__ import annotations

import argparse
import asyncio
import sys
from bisect import bisect_left
from dataclasses import replace
from typing import Any

from pinyon.cli.channel import add_api_key, add_tls_dir, authorization, check_role, open_async_channel, open_channel
from pinyon.cli.failures import in_words
from pinyon.core.errors import InvalidArgument
from pinyon.runtime.identity import LB
from pinyon_lab.cli import simulated
from pinyon_lab.cli.numbers import add_numbers
from pinyon_lab.cli.trace_input import add_trace, bar, open_trace, print_json, seed_of
from pinyon_lab.replay import Player, Replayed, ReplayPrompts, Sending, TokenRange
from pinyon_lab.simulator.report import cluster_report
from pinyon_lab.simulator.workload import at_rate

LATE_S = 0.05
REACHED_S = 30.0
"""The time within which the load balancer must have confirmed its role."""
INTERRUPTED = 130
"""The exit status after Ctrl-C."""
_DESCRIPTION = """\
Send the requests of a trace to a load balancer, at the trace's times or at --rate, and report as ``pinyon simulate``
does. A trace has no text: prompts are made of one text of tokens for each block id, so that prompts share what they
share in the trace; answers are as long as in the trace, whatever the model says. A further turn of a conversation waits
for the end of the one before, and goes on with what was generated.

For a model with a short context, --tokens-max cuts prompts and --shrink divides all lengths; block ids then stand for
fewer tokens. The blocks of the services should be no longer than those.

The last line is one JSON object. The exit status is 1 if a request failed. Ctrl-C ends it; what has ended by then is
reported, and the exit status is 130."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="send a trace to a running suite",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_trace(parser)
    add("--lb", default="127.0.0.1:8001", metavar="HOST:PORT", help="the load balancer's gRPC (default 127.0.0.1:8001)")
    add("--model", default="", metavar="NAME", help="the model's name as served (default: the only one)")
    add_numbers(parser, "--rate")
    simulated.add_load(parser)
    add(
        "--seed",
        type=seed_of,
        default=0,
        help="the prompts' tokens depend on it; runs with different seeds share no block (default 0)",
    )
    add(
        "--token-ids",
        default="33-126",
        metavar="FIRST-LAST",
        help="token ids that prompts are made of (default 33-126: printable characters in most vocabularies)",
    )
    add_numbers(parser, "--timeout", "--in-flight-max")
    add_api_key(parser)
    simulated.add_output(parser, per_request=True, picture=True)
    add_tls_dir(parser)
    parser.set_defaults(run=replay)


def replay(arguments: argparse.Namespace) -> int:
    """Sends the trace, waits and prints. Raises :class:`PinyonError`."""
    simulated.check(arguments)
    metadata = authorization(arguments.api_key)
    if not arguments.model.isprintable():
        raise InvalidArgument("--model has characters that cannot be sent", field="model")
    sending = Sending(arguments.clients, arguments.model, metadata, arguments.timeout, arguments.in_flight_max)
    tokens, trace = TokenRange.parse(arguments.token_ids), open_trace(arguments.trace, arguments.format)
    block_tokens = simulated.block_tokens_of(arguments, trace)
    with open_channel(arguments.lb, LB, arguments.tls_dir) as channel:
        check_role(channel, arguments.lb, LB, min(REACHED_S, arguments.timeout))
    load = simulated.read(arguments, trace)
    replayed, interrupted = asyncio.run(_play(arguments, load, sending, block_tokens, tokens))
    rows = replayed.outcomes
    title = f"replay, TTFT SLO {arguments.slo:g} s"
    warm_up = bisect_left(replayed.numbers, load.limits.warm_up)
    if interrupted:
        title += f", interrupted: {len(rows)} of {len(load.arrivals)} requests had ended"
        if warm_up == len(rows):
            warm_up, title = 0, f"{title}, none after the warm-up, which counts here"
    limits = replace(load.limits, warm_up=warm_up)
    result = {
        "name": "replay",
        "rate": load.rate,
        "native_rate": load.native_rate,
        "broken_rows": load.broken,
        "slo_s": arguments.slo,
        "seed": arguments.seed,
        "late_p99_s": replayed.late_p99_s,
        "errors": replayed.errors,
        **({"interrupted": True} if interrupted else {}),
        **cluster_report(rows, limits.slo_s, limits.tbt_slo_s, limits.warm_up),
    }
    if not arguments.json:
        simulated.print_result(title, result)
    _tell(replayed, arguments)
    print_json(result)  # a file that cannot be written must not lose the result
    simulated.write_rows(arguments, zip(replayed.numbers, rows, strict=True))
    simulated.draw(arguments, title, {"replay": rows}, limits)
    if interrupted:
        return INTERRUPTED
    return 1 if replayed.errors else 0


async def _play(
    arguments: argparse.Namespace, load: simulated.SentTrace, sending: Sending, block_tokens: int, tokens: TokenRange
) -> tuple[Replayed, bool]:
    """Returns the results of the requests, and whether Ctrl-C ended the run."""
    arrivals = at_rate(load.arrivals, load.rate)
    prompts = ReplayPrompts(arrivals, block_tokens, arguments.seed, tokens)
    async with open_async_channel(arguments.lb, LB, arguments.tls_dir) as channel:
        with bar(f"to {arguments.lb}", len(arrivals)) as progress:
            player = Player(channel, arrivals, prompts, sending, progress)
            try:
                return await player.run(), False
            except asyncio.CancelledError:  # Ctrl-C
                return player.replayed(), True


def _tell(replayed: Replayed, arguments: argparse.Namespace) -> None:
    """Writes the run's failures and delays to stderr."""
    for told, count in replayed.errors.items():
        code, _, details = told.partition(": ")
        said = in_words(code, details, LB, arguments.lb, arguments.tls_dir)
        sys.stderr.write(f"pinyon: {count} requests: {said}\n")
    if replayed.late_p99_s > LATE_S:
        sys.stderr.write(
            f"pinyon: one request in a hundred was sent {replayed.late_p99_s:.2f} s late or more: this program, or "
            "--in-flight-max, held it back\n"
        )
