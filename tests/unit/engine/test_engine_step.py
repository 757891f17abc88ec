"""The engine's contract beyond numbers: hooks, input checks, the built-in model's behaviour."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.errors import FailedPrecondition, Internal, InvalidArgument
from pinyon.core.request import SamplingParams
from pinyon.model.builtin import builtin_config
from pinyon.model.card import load_card
from services.worker.engines import ENGINES, blas, create_engine
from services.worker.engines.blas import TILE, check_lanes_alike, pin_blas_threads
from services.worker.engines.numpy_llama import NumpyLlamaEngine
from services.worker.engines.protocol import Engine
from services.worker.engines.segments import LENGTH_STEP, SEGMENT_TOKENS, last_length
from services.worker.engines.weights import builtin_weights, load_weights

GREEDY = SamplingParams()
TOKENS = np.arange(40, 90, dtype="<u4")


@pytest.fixture(scope="module")
def numpy_engine() -> Engine:
    return create_engine("numpy", load_card(), 64, 16)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return create_engine(request.param, load_card(), 16, 16)


def test_pool_is_the_registered_memory(engine: Engine) -> None:
    assert engine.pool.shape == (16, *engine.layout.shape)
    assert engine.pool.flags.c_contiguous
    assert engine.pool.nbytes == 16 * engine.layout.block_bytes


def test_given_pool_is_used(numpy_engine: Engine) -> None:
    card = load_card()
    pool = np.zeros((8, *card.config.kv_layout(16).shape), np.float32)
    engine = NumpyLlamaEngine(card.config, load_weights(card), 8, 16, pool)
    engine.step([PrefillChunk(TOKENS, 0, range(4))], [])
    assert engine.pool is pool
    assert pool[:3].all()
    assert not pool[4:].any()
    with pytest.raises(InvalidArgument, match="pool must be"):
        NumpyLlamaEngine(card.config, load_weights(card), 9, 16, pool)


def test_hooks_run_in_layer_order_wait_before_write(engine: Engine) -> None:
    seen: list[tuple[str, int]] = []
    chunk = PrefillChunk(
        TOKENS[16:],
        16,
        range(4),
        GREEDY,
        0,
        wait_layer=lambda layer: seen.append(("wait", layer)),
        on_layer=lambda layer: seen.append(("on", layer)),
    )
    engine.step([PrefillChunk(TOKENS[:16], 0, range(4))], [])
    engine.step([chunk], [])
    assert seen == [(what, layer) for layer in range(4) for what in ("wait", "on")]


def test_kv_of_a_layer_is_in_the_pool_when_its_hook_runs(numpy_engine: Engine) -> None:
    pool = numpy_engine.pool
    pool[:] = np.nan
    states: list[list[bool]] = []
    chunk = PrefillChunk(
        TOKENS[:32],
        0,
        [3, 5],
        on_layer=lambda _: states.append([bool(np.isfinite(pool[[3, 5], i]).all()) for i in range(4)]),
    )
    numpy_engine.step([chunk], [])
    assert states == [[i <= layer for i in range(4)] for layer in range(4)]


def test_reused_kv_may_arrive_layer_by_layer(numpy_engine: Engine) -> None:
    """The prefix's KV comes from elsewhere; each layer arrives only once the engine waits for it."""
    pool = numpy_engine.pool
    expected = numpy_engine.step([PrefillChunk(TOKENS, 0, range(4), GREEDY)], []).prefill_tokens
    source = pool[:2].copy()
    pool[8:12] = np.nan

    def arrive(layer: int) -> None:
        pool[[8, 9], layer] = source[:, layer]

    chunk = PrefillChunk(TOKENS[32:], 32, [8, 9, 10, 11], GREEDY, wait_layer=arrive)
    assert numpy_engine.step([chunk], []).prefill_tokens == expected


def test_an_error_in_a_hook_aborts_the_step(engine: Engine) -> None:
    def fail(layer: int) -> None:
        raise FailedPrecondition(f"layer {layer} never came")

    with pytest.raises(FailedPrecondition, match="layer 0"):
        engine.step([PrefillChunk(TOKENS, 0, range(4), wait_layer=fail)], [])


def chunk(**changes: Any) -> PrefillChunk:
    return replace(PrefillChunk(TOKENS, 0, [0, 1, 2, 3]), **changes)


def slot(**changes: Any) -> DecodeSlot:
    return replace(DecodeSlot(65, 10, [0], GREEDY, 0), **changes)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ([chunk(tokens=TOKENS[:0])], []), "tokens"),
        (lambda: ([chunk(tokens=np.array([272], "<u4"))], []), "tokens"),
        (lambda: ([chunk(tokens=np.array([-1]))], []), "tokens"),
        (lambda: ([chunk(tokens=np.array([1.5]))], []), "tokens"),
        (lambda: ([chunk(tokens=[1, 2])], []), "tokens"),
        (lambda: ([chunk(tokens=np.ones((2, 2), "<u4"))], []), "tokens"),
        (lambda: ([chunk(start=-1)], []), "position"),
        (lambda: ([chunk(start=40_960)], []), "position"),
        (lambda: ([chunk(start=15)], []), "block_table"),
        (lambda: ([chunk(block_table=[0, 1, 2])], []), "block_table"),
        (lambda: ([chunk(block_table=[0, 1, 2, 16])], []), "block_table"),
        (lambda: ([chunk(block_table=[0, 1, -1, 2])], []), "block_table"),
        (lambda: ([chunk(sample_index=-1)], []), "sample_index"),
        (lambda: ([], [slot(token=272)]), "token"),
        (lambda: ([], [slot(token=-1)]), "token"),
        (lambda: ([], [slot(position=40_960)]), "position"),
        (lambda: ([], [slot(position=16)]), "block_table"),
        (lambda: ([], [slot(block_table=[])]), "block_table"),
        (lambda: ([], [slot(position=300, block_table=[0] * 20)]), "block_table"),
        (lambda: ([], [slot(sample_index=2**64)]), "sample_index"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    engine: Engine, make: Callable[[], tuple[list[PrefillChunk], list[DecodeSlot]]], field: str
) -> None:
    prefills, decodes = make()
    with pytest.raises(InvalidArgument) as caught:
        engine.step([chunk(block_table=[4, 5, 6, 7]), *prefills], decodes)
    assert caught.value.field == field
    assert not engine.pool.any()


def test_an_empty_step_is_fine(engine: Engine) -> None:
    result = engine.step([], [])
    assert (result.prefill_tokens, result.decode_tokens) == ([], [])


def test_a_model_that_overflows_is_an_internal_error() -> None:
    config = replace(builtin_config(), num_layers=1)
    weights = builtin_weights(config)
    weights.final_norm[0] = np.inf
    engine = NumpyLlamaEngine(config, weights, 8, 16, check=False)
    with pytest.raises(Internal, match="not finite"):
        engine.step([chunk(sampling=GREEDY)], [])


def test_the_builtin_model_builds_fast_and_speaks_printable_text() -> None:
    engine = create_engine("numpy", load_card(), 64, 32)
    times = []
    for _ in range(3):
        start = time.thread_time()  # CPU time does not depend on this machine's other work
        create_engine("numpy", load_card(), 64, 32)
        times.append(time.thread_time() - start)
    assert min(times) < 0.3
    tokenizer, eos = load_card().tokenizer, load_card().config.eos_token_ids[0]
    ended, distinct = 0, []
    for i, text in enumerate(
        ["The quick brown fox", "def main():", "1 2 3 4", "Hello", "A longer beginning of a text, with commas."]
    ):
        prompt = tokenizer.encode(text)
        first = engine.step([PrefillChunk(prompt, 0, range(32), GREEDY)], []).prefill_tokens[0]
        assert first is not None
        out = [first]
        sampling = replace(GREEDY, temperature=float(i % 2))
        while len(out) < 100:
            out += engine.step(
                [], [DecodeSlot(out[-1], len(prompt) + len(out) - 1, range(32), sampling, len(out))]
            ).decode_tokens
        ended += eos in out
        distinct.append(len(set(out)))
        assert all(0x20 <= t < 0x7F or t in (0x0A, eos) for t in out)
    assert ended <= 1
    assert min(distinct) > 20


def test_instant_engine_counts_through_the_alphabet() -> None:
    engine = create_engine("instant", load_card(), 16, 16)
    result = engine.step([chunk(sampling=GREEDY), chunk()], [slot(sample_index=1), slot(sample_index=27)])
    assert result.prefill_tokens == [ord("a"), None]
    assert result.decode_tokens == [ord("b"), ord("b")]


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="engine must be one of"):
        create_engine("gpu", load_card(), 16, 16)


def test_too_many_query_heads_per_kv_head_are_refused() -> None:
    config = replace(builtin_config(), num_layers=1, num_heads=17, num_kv_heads=1)
    with pytest.raises(InvalidArgument, match="at most 16"):
        NumpyLlamaEngine(config, builtin_weights(config), 8, 16)


def test_the_length_of_a_segment_depends_on_the_position_only() -> None:
    for position in range(3 * SEGMENT_TOKENS):
        in_segment = position % SEGMENT_TOKENS
        assert last_length(position) % LENGTH_STEP == 0
        assert 0 < last_length(position) - in_segment <= LENGTH_STEP


def test_a_product_that_looks_at_the_lane_is_found() -> None:
    pin_blas_threads()
    uneven = np.ones(TILE, np.float32)
    uneven[-1] = np.nextafter(np.float32(1), np.float32(2))
    check_lanes_alike(lambda lanes: lanes * np.float32(3), 8, "nothing")
    with pytest.raises(FailedPrecondition, match="something with other bits"):
        check_lanes_alike(lambda lanes: lanes * uneven, 8, "something")


def test_without_a_way_to_one_thread_the_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_loaded_openblas", list)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    pin_blas_threads()
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FailedPrecondition, match="OPENBLAS_NUM_THREADS=1"):
        pin_blas_threads()
