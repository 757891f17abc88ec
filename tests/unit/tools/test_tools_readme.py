"""The README's commands agree with CI and CONTRIBUTING, and its replay is comparable with its simulation."""

from __future__ import annotations

import re
from argparse import Namespace

from launch.__main__ import command_line
from launch.process import ROOT
from pinyon.cli.main import _parser
from services.conductor.settings import ConductorSettings
from services.worker.settings import WorkerSettings
from tests.unit.tools.test_tools_docs import lines_to_copy

README, CONTRIBUTING = ((ROOT / f"{name}.md").read_text() for name in ("README", "CONTRIBUTING"))
CI = (ROOT / ".ci" / "run").read_text()
NAMED = ("reproduction", "rdma")
"""Suites that run only by name."""


def table() -> dict[str, str]:
    """Returns what CONTRIBUTING says of each command."""
    rows = re.findall(r"^\| (`\./dev [^|]*) \| ([^|]*) \|$", CONTRIBUTING, re.MULTILINE)
    return {command: said for cell, said in rows for command in re.findall(r"`([^`]+)`", cell)}


def test_the_two_commands_are_what_ci_runs_and_contributing_has() -> None:
    section = README.partition("## Two commands\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    commands = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert commands == ["./dev demo", "./dev test"]
    for command in commands:
        assert command in CI.splitlines()
        assert command in table()


def test_ci_runs_what_contributing_has_and_no_result_is_lost() -> None:
    run = re.findall(r"^(\./dev (\S+).*)\n(.*)$", CI, re.MULTILINE)
    known = {command.split()[1] for command in table()}
    assert {word for _, word, _ in run} <= known
    kept = re.findall(r"^(\w+)=\$\?$", CI, re.MULTILINE)
    assert len(kept) == len(set(kept)) == len(run)
    verdict = CI.rpartition("\n[ ")[2]
    for name in kept:
        assert f'"${name}" -eq 0 ]' in f"[ {verdict}", name
        assert f"${name}" in CI.rpartition('\nsay "')[2], name


def test_all_say_which_suites_have_to_be_named() -> None:
    line = next(line for line in README.splitlines() if line.startswith("./dev test "))
    for suite in NAMED:
        assert suite in line.lower()
        assert f"`./dev test {suite}`" in table()["./dev test"]
        assert f"./dev test {suite}" in CI.splitlines()


def parsed(*beginning: str) -> Namespace:
    """Parses the README's first line that begins with these words."""
    words = next(words for words in lines_to_copy(ROOT / "README.md") if words[: len(beginning)] == [*beginning])
    parser = command_line() if words[0] == "./dev" else _parser()
    return parser.parse_args(words[1:])


def test_replay_and_simulation_are_of_one_trace_at_one_scale() -> None:
    generated = parsed(".venv/bin/pinyon", "trace", "generate")
    replayed, simulated = parsed(".venv/bin/pinyon", "replay"), parsed(".venv/bin/pinyon", "simulate")
    assert generated.out == replayed.trace == simulated.trace
    for name in ("shrink", "tokens_max", "warm_up", "limit", "rate", "clients", "slo", "tbt_slo"):
        assert getattr(replayed, name) == getattr(simulated, name), name


def test_replay_and_simulation_are_of_the_same_instances() -> None:
    up = parsed("./dev", "up", "--prefill", "0")
    simulated = parsed(".venv/bin/pinyon", "simulate")
    assert (up.prefill, up.decode, up.mixed) == (0, 0, simulated.instances)
    assert (up.engine, up.engine_profile) == ("paced", simulated.model)
    assert (up.placement or ConductorSettings().placement) == simulated.policy
    assert simulated.step_tbt == WorkerSettings.model_fields["step_tbt_s"].default
    other, of_simulate = re.search(r"`--placement (\w+)` of `up`, `--policy (\w+)` of `simulate`", README).groups()
    assert other == of_simulate != simulated.policy
