"""The file of what a batching policy has learned: used for the same policy and kernel, never in the way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pinyon.batching import BATCHING_POLICIES, StepLimits, StepScheduler
from services.worker.instance.learned import FILE_BYTES_MAX, restore_learned, save_learned

BANDIT = "feather:stop=bandit"
TABLE = {"1/1/4": [0.0, 0.0, 3.0, 900.0], "4/4/2": [5.0, 2000.0, 1.0, 100.0]}


def scheduler(choice: str = BANDIT) -> StepScheduler:
    return StepScheduler(StepLimits(8, 64, 64, 16), None, BATCHING_POLICIES.make(choice).rounds("whole"), "whole")


def test_what_was_kept_is_what_the_next_one_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    restore_learned(path, scheduler(), BANDIT, "whole")  # the file does not exist yet
    save_learned(path, TABLE, BANDIT, "whole")
    steps = scheduler()
    restore_learned(path, steps, BANDIT, "whole")
    assert steps.learned() == TABLE
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]


def test_nothing_learned_leaves_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_learned(path, TABLE, BANDIT, "whole")
    save_learned(path, {}, "fcfs", "whole")
    assert json.loads(path.read_text())["table"] == TABLE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"batching": BANDIT, "kernel": "grouped", "table": TABLE}, "kernel 'grouped'"),
        ({"batching": "feather:stop=q_learning", "kernel": "whole", "table": TABLE}, "q_learning"),
        ({"batching": BANDIT, "kernel": "whole", "table": {"1/1/4": [1.0]}}, "4 numbers"),
        ({"batching": BANDIT, "kernel": "whole", "table": {"1/1/4": "none"}}, "not used"),
        ({"batching": BANDIT, "kernel": "whole", "table": {"1/1/4": 7}}, "not used"),
        ({"batching": BANDIT, "kernel": "whole"}, "no table"),
        ([], "no table"),
        ("[" * 50_000, "not used"),
        (" " * (FILE_BYTES_MAX + 1), "no table"),
    ],
)
def test_what_cannot_be_used_is_said_and_left_alone(tmp_path: Path, caplog, content: object, said: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    steps = scheduler()
    with caplog.at_level(logging.WARNING):
        restore_learned(path, steps, BANDIT, "whole")
    assert said in caplog.text
    assert steps.learned() == {}


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        save_learned(tmp_path / "nowhere" / "table.json", TABLE, BANDIT, "whole")
    assert "No such file" in caplog.text


def test_a_policy_without_rounds_takes_none() -> None:
    steps = StepScheduler(StepLimits(8, 64, 64, 16))
    assert steps.learned() == {}
    steps.restore({})
    with pytest.raises(ValueError, match="no table"):
        steps.restore(TABLE)
