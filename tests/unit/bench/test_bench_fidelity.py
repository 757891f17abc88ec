"""The settings that live and simulated instances of ``bench.fidelity`` share."""

from __future__ import annotations

import sys

import pytest

from bench import fidelity
from pinyon.cli import main
from pinyon.placement.policies import PLACEMENT_DEFAULT
from services.conductor.settings import ConductorSettings
from services.worker.settings import WorkerSettings


def test_it_runs_the_policy_that_a_conductor_runs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fidelity", "--help"])
    with pytest.raises(SystemExit):
        fidelity.main()
    assert f"default {PLACEMENT_DEFAULT}" in capsys.readouterr().out
    assert ConductorSettings.model_fields["placement"].default == PLACEMENT_DEFAULT


def test_simulated_instances_have_a_workers_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out
    words = fidelity.as_worker()
    assert all(option in shown for option in words[::2])
    own = WorkerSettings.model_fields["active_prefills"].default
    assert words[words.index("--active-prefills") + 1] == str(own), "the simulator's own is another one"
