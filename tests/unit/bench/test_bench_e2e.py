"""The parts of ``./dev bench e2e``: a tokenizer, texts of a given size, service options, the figure that counts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.e2e import BARE, CPU_AIM, TOKENS, aims_of, extra_of, told
from bench.e2e_model import make_model, words
from bench.router_prompts import Prompts
from pinyon.model import load_card


def test_texts_have_their_size_and_no_two_are_alike() -> None:
    made = Prompts("seed", 8 << 10, stream=True, write=words)
    texts = [made.text() for _ in range(50)]
    assert {len(text.encode()) for _, text in texts} == {8 << 10}
    assert len({text[4096:] for _, text in texts}) == 50
    assert len({(group, text[:4096]) for group, text in texts}) == len({group for group, _ in texts})


def test_the_model_has_tokens_of_a_few_characters(tmp_path: Path) -> None:
    card = load_card(str(make_model(tmp_path / "model")), "x")
    text = words(random.Random(1), 8 << 10)
    tokens = card.tokenizer.encode(text)
    assert card.tokenizer.decode(tokens.tolist()) == text
    assert 3 < len(text) / len(tokens) < 5
    assert card.tokenizer.vocab_size == card.config.vocab_size > 8000


def test_options_are_for_one_kind_of_service_or_for_all() -> None:
    assert extra_of(["all:transport=grpc", "lb:routing=a=b"]) == {
        "conductor": ("--transport", "grpc"),
        "worker": ("--transport", "grpc"),
        "lb": ("--transport", "grpc", "--routing", "a=b"),
    }
    for wrong in ("transport=grpc", "redis:a=b", "lb:a", "lb:=b"):
        with pytest.raises(ValueError, match="OPTION=VALUE"):
            extra_of([wrong])


def test_the_aim_is_by_the_cheaper_of_the_other_routers() -> None:
    def figure(value: float) -> dict[str, dict[str, float]]:
        return {"cpu_us_per_request": {"median": value}}

    ours = {
        **figure(700),
        "tokens_us_per_request": 9.0,
        "keys_us_per_request": 60.0,
        "added_whole_p50_us": {"median": 290},
    }
    cpu, added = aims_of("cell", ours, {BARE: figure(400), TOKENS: figure(900)}, tls=False, unavailable="")
    assert (cpu.target, cpu.measured, cpu.met) == (CPU_AIM * 400, 700, False)
    assert "9 are tokens and 60 keys" in cpu.reason
    assert added.met
    cpu, _ = aims_of("cell", ours, {}, tls=True, unavailable="no network")
    assert (cpu.measured, cpu.met, cpu.reason) == (None, False, "no network")


def test_added_is_the_difference_within_a_repetition() -> None:
    mine = {"cpu_us_per_request": [5.0, 7.0], "cpu_lb_us_per_request": [3.0, 4.0], "whole_p50_us": [30.0, 90.0],
            "whole_p99_us": [40.0, 95.0], "first_p50_us": [1.0, 1.0], "first_p99_us": [1.0, 1.0]}  # fmt: skip
    without = {"whole_p50_us": [10.0, 80.0], "whole_p99_us": [20.0, 85.0], "first_p50_us": [1.0, 0.0],
               "first_p99_us": [0.0, 0.0]}  # fmt: skip
    found = told(mine, without, stream=False)
    assert found["added_whole_p50_us"] == {"median": 15.0, "min": 10.0, "max": 20.0}
    assert found["cpu_lb_us_per_request"]["median"] == 3.5
    assert "added_first_p50_us" not in found
    assert told(mine, without, stream=True)["added_first_p50_us"]["max"] == 1.0
