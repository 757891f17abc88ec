"""The paced engine on a virtual clock: steps take what the profile's formula says, and errors do not add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.errors import FailedPrecondition, InvalidArgument
from pinyon.core.request import SamplingParams
from pinyon.model.builtin import builtin_config
from pinyon.profiles.engine_profile import EngineProfile, built_in_profiles, load_profile
from services.worker.engines.paced import CATCH_UP_S, PacedEngine

BLOCKS, BLOCK_TOKENS = 64, 16
TABLE = list(range(BLOCKS))
GREEDY = SamplingParams()
ROUND = EngineProfile("s", "", "", 0.5, 0.001, 1e-6, 0.25, 0.125, 0.01)


class VirtualTime:
    """A clock that advances only by sleeping, and that oversleeps."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.overshoot_s = overshoot_s
        self.slept = 0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += 1
        self.now_s += seconds + self.overshoot_s

    def engine(self, profile: EngineProfile = ROUND) -> PacedEngine:
        return PacedEngine(builtin_config(), BLOCKS, BLOCK_TOKENS, profile, clock=self.clock, sleep=self.sleep)


def chunk(start: int, count: int, sampling: SamplingParams | None = None, index: int = 0, **hooks) -> PrefillChunk:
    return PrefillChunk(np.full(count, 65, "<u4"), start, TABLE, sampling, index, **hooks)


def slot(position: int, sampling: SamplingParams = GREEDY, index: int = 0) -> DecodeSlot:
    return DecodeSlot(65, position, TABLE, sampling, index)


def test_a_step_by_hand() -> None:
    time = VirtualTime()
    result = time.engine().step([chunk(100, 100), chunk(0, 10)], [slot(99), slot(199)])
    assert result.kv_tokens_read == 100 + 200
    prefill = 0.001 * 110 + 1e-6 * (200**2 - 100**2 + 10**2)
    decode = 0.25 + 0.125 * 2 + 0.01 * (100 + 200)
    assert time.now_s - 1000 == pytest.approx(0.5 + prefill + decode)
    assert result.decode_share == pytest.approx((0.5 + decode) / (0.5 + prefill + decode))
    assert time.engine().step([chunk(0, 10)], []).decode_share == 0.0
    assert time.engine().step([], [slot(99)]).decode_share == 0.0


seconds = st.floats(0, 10)
spans = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), max_size=4)


@given(
    st.builds(EngineProfile, *[st.just("")] * 3, *[seconds] * 6),
    st.lists(st.tuples(spans, st.lists(st.integers(0, 1000), max_size=5)), max_size=5),
    st.booleans(),
)
def test_steps_take_what_the_formula_says(profile, steps, hooked: bool) -> None:
    time = VirtualTime()
    engine = time.engine(profile)
    for prefills, decodes in steps:
        begun_s = time.now_s
        hooks = {"on_layer": lambda _: None} if hooked else {}
        engine.step([chunk(start, count, **hooks) for start, count in prefills], [slot(each) for each in decodes])
        expected = 0.0
        if prefills or decodes:
            expected += profile.step_s
        for start, count in prefills:
            expected += profile.prefill_token_s * count
            expected += profile.prefill_pair_s * ((start + count) ** 2 - start**2)
        if decodes:
            expected += profile.decode_step_s + profile.decode_request_s * len(decodes)
            expected += profile.decode_kv_token_s * sum(each + 1 for each in decodes)
        assert time.now_s - begun_s == pytest.approx(expected, abs=1e-6)


def test_what_sleeping_overshoots_does_not_add_up() -> None:
    time = VirtualTime(overshoot_s=0.001)
    engine = time.engine()
    for _ in range(1000):
        engine.step([], [slot(0)])
        time.now_s += 0.001  # the time that the engine loop takes
    assert time.now_s - 1000 == pytest.approx(1000 * (0.5 + 0.25 + 0.125 + 0.01), abs=0.003)


def test_an_idle_engine_saves_nothing_up() -> None:
    time = VirtualTime()
    engine = time.engine()
    engine.step([], [slot(0)])
    time.now_s += 2 * CATCH_UP_S
    begun_s = time.now_s
    engine.step([], [slot(0)])
    assert time.now_s - begun_s == pytest.approx(0.885)


def test_layers_spread_over_the_step_and_a_late_one_prolongs_it() -> None:
    time = VirtualTime()
    seen: list[tuple[str, int, float]] = []

    def wait(layer: int) -> None:
        seen.append(("wait", layer, round(time.now_s - 1000, 6)))
        time.now_s += 0.1 if layer == 2 else 0.0

    def on(layer: int) -> None:
        seen.append(("on", layer, round(time.now_s - 1000, 6)))

    profile = replace(ROUND, step_s=0.4, prefill_token_s=0.0, prefill_pair_s=0.0)
    time.engine(profile).step([chunk(16, 16, wait_layer=wait, on_layer=on)], [])
    starts, waited = [0.0, 0.1, 0.2, 0.4], [0.0, 0.1, 0.3, 0.4]
    assert seen == [
        each
        for layer, (start, over) in enumerate(zip(starts, waited, strict=True))
        for each in (("wait", layer, start), ("on", layer, over))
    ]
    assert time.now_s - 1000 == pytest.approx(0.5)


def test_a_step_that_a_hook_aborted_can_be_repeated() -> None:
    time = VirtualTime()
    engine = time.engine()

    def fail(layer: int) -> None:
        raise FailedPrecondition("it never came")

    with pytest.raises(FailedPrecondition):
        engine.step([chunk(16, 16, wait_layer=fail)], [])
    begun_s = time.now_s
    engine.step([chunk(16, 16)], [])
    assert time.now_s - begun_s == pytest.approx(0.5 + 0.016 + 1e-6 * (32**2 - 16**2))


@given(st.integers(0, 2**64 - 1), st.integers(1, 200), st.integers(1, 40), st.data())
def test_tokens_do_not_depend_on_chunks_batches_or_resumption(seed, prompt, count, data) -> None:
    sampling = SamplingParams(seed=seed)
    engine, other = VirtualTime().engine(), VirtualTime().engine()
    whole = engine.step([chunk(0, prompt, sampling)], []).prefill_tokens
    while len(whole) < count:
        place = prompt + len(whole) - 1
        index = len(whole)
        whole += engine.step([chunk(0, 3)], [slot(place, sampling, index), slot(7)]).decode_tokens[:1]
    assert all(chr(token).islower() for token in whole)
    kept = data.draw(st.integers(0, count - 1))
    cut = data.draw(st.integers(0, prompt + kept - 1))
    resumed = other.step([chunk(cut, prompt + kept - cut, sampling, kept)], []).prefill_tokens
    assert resumed == whole[kept : kept + 1]
    assert engine.step([chunk(0, prompt)], []).prefill_tokens == [None]


def test_requests_and_tokens_differ() -> None:
    engine = VirtualTime().engine()
    texts = {
        tuple(engine.step([], [slot(9 + index, SamplingParams(seed=seed), index) for index in range(50)]).decode_tokens)
        for seed in range(20)
    }
    assert len(texts) == 20
    assert all(len(set(text)) > 10 for text in texts)


def test_kv_is_small() -> None:
    engine = VirtualTime().engine()
    assert engine.layout.block_bytes == 2 * 4 * engine.layout.layers * BLOCK_TOKENS


# -- profiles


@pytest.mark.parametrize("name", built_in_profiles())
def test_built_in_profiles_say_where_they_come_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.source
    assert profile.stated
    assert profile.assumed


def test_the_stated_figures_come_out() -> None:
    # SkyWalker §2: 512 tokens take about 300 ms
    assert load_profile("l4-llama-8b").seconds([(0, 512)], 0, 0) == pytest.approx(0.3, rel=0.01)
    # Mooncake Table 1, formula (1): with a prefix of p tokens reused
    n, p, layers, d, a, b, flops = 8192, 2048, 80, 8192, 4, 22, 8 * 312e12
    expected = layers * (a * (n**2 - p**2) * d + b * (n - p) * d**2) / flops
    assert load_profile("a800x8-llama-70b").seconds([(p, n)], 0, 0) == pytest.approx(expected, rel=0.001)


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    values = {field: getattr(ROUND, field) for field in ROUND.__slots__}
    path.write_text(json.dumps(values))
    assert load_profile(str(path)) == ROUND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_s": -1}, "step_s must be from 0 to 3600, got -1"),
        ({"step_s": float("nan")}, "step_s must be from 0 to 3600, got nan"),
        ({"step_s": "1"}, "step_s must be a number"),
        ({"step_s": True}, "step_s must be a number"),
        ({"source": 3}, "source must be a text"),
        ({"steps": 1}, "missing or unknown: steps"),
    ],
)
def test_a_bad_profile_is_refused_by_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**{field: getattr(ROUND, field) for field in ROUND.__slots__}, **change}))
    with pytest.raises(InvalidArgument, match=message):
        load_profile(str(path))


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 20_000, " " * 70_000, "\xff"])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InvalidArgument, match=r"not valid JSON|JSON object"):
        load_profile(str(path))


def test_an_unknown_profile_gets_a_list() -> None:
    with pytest.raises(InvalidArgument, match=r"known: 910b-qwen2\.5-14b, .*, l4-llama-8b, .*tiny, or a JSON file"):
        load_profile("h100")
    with pytest.raises(InvalidArgument, match="No such file"):
        load_profile("nowhere/h100.json")
