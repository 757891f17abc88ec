"""The researchers' commands of ``pinyon``: traces, replay, simulation, and the papers' figures."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pinyon_lab.policies.names  # noqa: F401 - options choose among them
from pinyon_lab.cli import replay, reproduce, simulate, simulate_cache, trace_analyze, trace_generate, trace_record

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Adds the commands to the parser of ``pinyon``."""
    simulate.add_compare(commands)
    simulate.add_plan(commands)
    for command in (replay, reproduce, simulate_cache, simulate):
        command.add_command(commands)
    trace = commands.add_parser("trace", help="make, record and analyse traces of requests")
    of_traces = trace.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")
    trace_analyze.add_command(of_traces)
    trace_analyze.add_fit(of_traces)
    trace_generate.add_command(of_traces)
    trace_record.add_command(of_traces)
    trace_generate.add_scale(of_traces)
