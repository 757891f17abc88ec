"""``pinyon trace``: what one does with traces of requests."""

from __future__ import annotations

from typing import Any

from pinyon_lab.cli import trace_analyze, trace_fit, trace_generate, trace_record, trace_scale

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Register the command with the sub-parsers of the ``pinyon`` command."""
    parser = commands.add_parser("trace", help="make, record and analyse traces of requests")
    group = parser.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")
    trace_analyze.add_command(group)
    trace_fit.add_command(group)
    trace_generate.add_command(group)
    trace_record.add_command(group)
    trace_scale.add_command(group)
