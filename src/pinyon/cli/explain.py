"""The ``pinyon explain`` command: tells why a request runs, or ran, on its instance."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.cli.channel import add_conductor, add_timeout, add_tls_dir, open_channel
from pinyon.cli.tables import table
from pinyon.runtime.identity import CONDUCTOR

_DESCRIPTION = """\
Ask the conductor why a request was placed where it was, or refused. Shows the predicted times on the chosen instance
and on the others, as they were at the decision, and the measured time of the first token. REQUEST_ID is the client's
x-request-id, the id of a completion (chatcmpl-...), or the request_id of a log line. The conductor remembers its last
decisions (--explain-max)."""

PARTS = ("room", "queue", "transfer", "prefill", "drain")
GUESSED = ("transfer_ms", "ttft_ms")
"""The fields that are inexact where an instance's fetch time was only estimated."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("explain", help="tell why a request went where it went", description=_DESCRIPTION)
    parser.add_argument("request_id", metavar="REQUEST_ID")
    add_conductor(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    add_timeout(parser)
    add_tls_dir(parser)
    parser.set_defaults(run=explain)


def explain(arguments: argparse.Namespace) -> int:
    """Prints every decision for the request, the first one first."""
    with open_channel(arguments.conductor, CONDUCTOR, arguments.tls_dir) as channel:
        stub = conductor_pb2_grpc.ConductorServiceStub(channel)
        request = conductor_pb2.ExplainRequest(request_id=arguments.request_id)
        reply = stub.Explain(request, timeout=arguments.timeout_s)
    if arguments.json:
        sys.stdout.write(MessageToJson(reply, preserving_proto_field_name=True) + "\n")
        return 0
    console = Console()
    for number, decision in enumerate(reply.decisions):
        if number:
            console.print()
        _print(console, decision)
    return 0


def _print(console: Console, decision: conductor_pb2.ExplainedDecision) -> None:
    """Prints a sentence, the facts, and the instances side by side, without markup: names come from outside."""
    for line in (f"{decision.request_id} {decision.because}", _asked(decision)):
        console.print(Text(line), soft_wrap=True)
    if decision.HasField("chosen"):
        console.print(_table(decision))
    if decision.HasField("first_token"):
        console.print(Text(_measured(decision)), soft_wrap=True)
    elif not decision.HasField("error"):
        console.print(Text("measured: nothing yet, or its instance never told"), soft_wrap=True)


def _asked(decision: conductor_pb2.ExplainedDecision) -> str:
    """Returns the known facts of the request and its decision as one line."""
    policy, limit_ms, tbt_ms = decision.placement.policy, decision.ttft_limit_ms, decision.tbt_limit_ms
    known = {
        f"at most {decision.max_tokens} generated": decision.max_tokens,
        f"{decision.kind}, turn {decision.turn}": decision.kind,
        f"priority {decision.priority}": decision.priority,
        "nothing is reused": decision.no_reuse,
        f"policy {policy}": decision.HasField("placement"),
        f"first token within {_ms(limit_ms)}": limit_ms,
        f"{_ms(tbt_ms)} between tokens": tbt_ms,
        f"not on {', '.join(decision.exclude_instance_ids)}": decision.exclude_instance_ids,
        "a probe": decision.probe,
    }
    facts = [f"{decision.age_ms / 1e3:.1f} s ago", decision.model, f"{decision.prompt_tokens} prompt tokens"]
    return ", ".join([*facts, *[fact for fact, is_known in known.items() if is_known]])


def _table(decision: conductor_pb2.ExplainedDecision) -> Table:
    """Returns the table: the chosen instance, then the others, soonest first, without columns that are all 0."""
    candidates = (decision.chosen, *decision.others)
    blocks = [("holds", "held_blocks"), ("soon", "expected_blocks"), ("fetches", "fetched_blocks")]
    if all(each.held_blocks == each.expected_blocks for each in candidates):
        del blocks[1]
    parts = [(name, f"{name}_ms") for name in PARTS]
    shown = [(name, field) for name, field in blocks + parts if any(getattr(each, field) for each in candidates)]
    shown.append(("first token", "ttft_ms"))
    if any(each.others_ms for each in candidates):
        shown.append(("others' time", "others_ms"))
    names = {
        decision.alternate_instance_id: "the other one of the pair",
        decision.placement.prefill_instance_id: "would have been taken" if decision.HasField("error") else "taken",
    }
    rows = [
        (each.instance_id, *(_cell(each, field) for _, field in shown), names.get(each.instance_id, ""))
        for each in candidates
    ]
    columns = ("instance", *(name for name, _ in shown), "")
    made = table(columns, rows, right=columns[1:-1], whole=True)
    if (more := decision.candidates - 1 - len(decision.others)) > 0:
        made.caption, made.caption_justify = f"and {more} more", "left"
    return made


def _cell(each: conductor_pb2.Candidate, field: str) -> str:
    value = getattr(each, field)
    if not field.endswith("_ms"):
        return str(value)
    return f"{'~' if each.about and field in GUESSED else ''}{_ms(value)}"


def _measured(decision: conductor_pb2.ExplainedDecision) -> str:
    """Returns the measured times beside the predicted ones."""
    first = decision.first_token
    parts = [f"{name} {_ms(getattr(first, f'{name}_us') / 1e3)}" for name in ("queue", "fetch", "compute", "push")]
    predicted_ms, measured_ms = decision.placement.predicted_ttft_ms, first.ttft_us / 1e3
    error_ms = measured_ms - predicted_ms
    tokens = f"{first.computed_tokens} tokens computed, {first.local_tokens} local"
    for name, count in (("from peers", first.peer_tokens), ("from the store", first.store_tokens)):
        if count:
            tokens += f", {count} {name}"
    return (
        f"measured: first token in {_ms(measured_ms)}, predicted {_ms(predicted_ms)} "
        f"({'+' if error_ms >= 0 else '-'}{_ms(abs(error_ms))}); on {first.prefill_instance_id}: "
        f"{', '.join(parts)}; {tokens}"
    )


def _ms(milliseconds: float) -> str:
    if milliseconds >= 1e3:
        return f"{milliseconds / 1e3:.2f} s"
    return f"{milliseconds:.1f} ms" if milliseconds else "–"
