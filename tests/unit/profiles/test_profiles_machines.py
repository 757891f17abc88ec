"""Machine profiles: their sources, and the errors of bad ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.profiles.engine_profile import load_profile
from pinyon.profiles.machine_profile import built_in_machines, load_machine


@pytest.mark.parametrize("name", built_in_machines())
def test_built_in_machines_have_a_source_and_an_engine(name: str) -> None:
    machine = load_machine(name)
    assert machine.source
    assert machine.stated
    assert machine.assumed
    assert load_profile(machine.engine).source


def test_mooncakes_table_1() -> None:
    machine = load_machine("a800x8-llama-70b")
    assert machine.kv_token_bytes == 2 * 80 * 8192 * 2 // 8  # 2 (K, V) x l x d x s / gqa
    assert machine.nic_bytes_s == 800e9 / 8
    assert machine.dram_bytes_s == 128e9


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(load_machine("tiny"))))
    assert load_machine(str(path)) == load_machine("tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hbm_tokens": 0}, "hbm_tokens must be from 1 to"),
        ({"dram_tokens": -1}, "dram_tokens must be from"),
        ({"hbm_tokens": 1.5}, "hbm_tokens must be a whole number"),
        ({"nic_bytes_s": "fast"}, "nic_bytes_s must be a number"),
        ({"nic_bytes_s": True}, "nic_bytes_s must be a number"),
        ({"nic_bytes_s": float("nan")}, "nic_bytes_s must be from"),
        ({"engine": 3}, "engine must be a text"),
        ({"gpus": 3}, "missing or unknown: gpus"),
    ],
)
def test_a_bad_machine_is_refused_by_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(load_machine("tiny")) | change))
    with pytest.raises(InvalidArgument, match=message):
        load_machine(str(path))


def test_an_unknown_machine_gets_a_list() -> None:
    with pytest.raises(InvalidArgument, match=r"known: 910b-qwen2\.5-14b, .*, tiny, or a JSON file"):
        load_machine("h100")
