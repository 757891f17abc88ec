"""Batch invariance, bit for bit: tokens and KV bytes depend on the request alone.

They do not depend on the chunks of its prompt, the other requests of each step, its blocks, or what those held before.
Nor do they depend on whether its KV came from prefill, decode, this engine or another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from pinyon.batching import DecodeSlot, PrefillChunk, TokenCounts
from pinyon.core.logprobs import LogprobRows
from pinyon.core.request import SamplingParams
from pinyon.model.builtin import builtin_config
from pinyon.model.card import load_card
from services.worker.engines import numpy_llama
from services.worker.engines.decode_plan import KERNELS
from services.worker.engines.numpy_llama import NumpyLlamaEngine
from services.worker.engines.weights import builtin_weights, load_weights
from tests.long import usually

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
BLOCKS = 160
BLOCK_TOKENS = 16
# One model per shape of tile: one, two, three and four query heads per KV head, one and many KV heads.
MODELS = ("builtin", "mha", "qwen3-f32", "qwen2-f16-sharded", "llama-bf16-rope3-tied")
SAMPLED = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=7)


@cache
def engine_of(model: str) -> NumpyLlamaEngine:
    if model == "builtin":
        # Two of the four layers, and narrower ones: as many shapes of tiles in a third of the time.
        config = replace(builtin_config(), num_layers=2, hidden_size=usually(128, long=256))
        return NumpyLlamaEngine(config, builtin_weights(config), BLOCKS, BLOCK_TOKENS)
    if model == "mha":
        config = replace(builtin_config(), num_layers=2, num_heads=1, num_kv_heads=1, hidden_size=64)
        return NumpyLlamaEngine(config, builtin_weights(config), BLOCKS, BLOCK_TOKENS)
    card = load_card(str(GOLDEN / model))
    return NumpyLlamaEngine(card.config, load_weights(card), BLOCKS, BLOCK_TOKENS)


def prompt_of(engine: NumpyLlamaEngine, length: int, number: int = 0) -> npt.NDArray[np.uint32]:
    return np.random.default_rng([length, number]).integers(4, 250, length).astype("<u4")


def kv_of(engine: NumpyLlamaEngine, table: Sequence[int], tokens: int) -> bytes:
    """Returns K and V of the first ``tokens`` positions, in position order."""
    blocks = engine.pool[list(table[: engine.layout.blocks_for(tokens)])]
    by_token = blocks.transpose(0, 3, 1, 2, 4, 5)
    return by_token.reshape(-1, *by_token.shape[2:])[:tokens].tobytes()


def run(
    engine: NumpyLlamaEngine,
    prompt: npt.NDArray[np.uint32],
    table: Sequence[int],
    cuts: Sequence[int],
    new_tokens: int,
    sampling: SamplingParams = SAMPLED,
) -> list[int]:
    """Runs a prompt alone in chunks that end at ``cuts``, then decodes; returns the new tokens."""
    ends = sorted({c for c in cuts if 0 < c < len(prompt)} | {len(prompt)})
    start = 0
    out: list[int] = []
    for end in ends:
        last = sampling if end == len(prompt) else None
        result = engine.step([PrefillChunk(prompt[start:end], start, table, last)], [])
        out += [token for token in result.prefill_tokens if token is not None]
        start = end
    while len(out) < new_tokens:
        slot = DecodeSlot(out[-1], len(prompt) + len(out) - 1, table, sampling, len(out))
        out += engine.step([], [slot]).decode_tokens
    return out


@seed(1)
@settings(max_examples=usually(30, long=600))
@given(
    model=st.sampled_from(MODELS),
    length=st.integers(1, 200),
    cuts=st.lists(st.integers(1, 199), max_size=6),
    shuffle=st.integers(0, 1000),
)
def test_chunks_and_blocks_do_not_matter(model: str, length: int, cuts: list[int], shuffle: int) -> None:
    engine = engine_of(model)
    prompt = prompt_of(engine, length)
    engine.pool[:] = np.nan  # shows every read of an unwritten value
    table = list(range(16))
    expected = run(engine, prompt, table, [], 4)
    kv = kv_of(engine, table, length + 3)
    other = np.random.default_rng(shuffle).permutation(BLOCKS)[:16].tolist()
    engine.pool[:] = np.inf
    assert run(engine, prompt, other, cuts, 4) == expected
    assert kv_of(engine, other, length + 3) == kv


@seed(2)
@settings(max_examples=usually(20, long=80))
@given(model=st.sampled_from(MODELS), data=st.data())
def test_company_does_not_matter(model: str, data: st.DataObject) -> None:
    """Several requests with different chunks advance beside random others until all are done."""
    engine = engine_of(model)
    count = data.draw(st.integers(2, 6), "requests")
    lengths = [data.draw(st.integers(1, 120), "length") for _ in range(count)]
    prompts = [prompt_of(engine, n, i) for i, n in enumerate(lengths)]
    new_tokens = 4
    samplings = [replace(SAMPLED, seed=i, temperature=float(i % 2)) for i in range(count)]
    tables = [list(range(i * 10, i * 10 + 10)) for i in range(count)]
    expected, kvs = [], []
    for prompt, table, sampling in zip(prompts, tables, samplings, strict=True):
        engine.pool[:] = np.nan
        expected.append(run(engine, prompt, table, [], new_tokens, sampling))
        kvs.append(kv_of(engine, table, len(prompt) + new_tokens - 1))

    engine.pool[:] = np.nan
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6), "schedule"))
    done = [0] * count
    out: list[list[int]] = [[] for _ in range(count)]
    while any(len(tokens) < new_tokens for tokens in out):
        prefills, decodes, who_prefills, who_decodes = [], [], [], []
        for i in rng.permutation(count).tolist():
            if len(out[i]) == new_tokens or rng.random() < 0.3:
                continue
            if done[i] < lengths[i]:
                end = min(lengths[i], done[i] + int(rng.integers(1, 50)))
                last = samplings[i] if end == lengths[i] else None
                prefills.append(PrefillChunk(prompts[i][done[i] : end], done[i], tables[i], last))
                who_prefills.append((i, end))
            else:
                position = lengths[i] + len(out[i]) - 1
                decodes.append(DecodeSlot(out[i][-1], position, tables[i], samplings[i], len(out[i])))
                who_decodes.append(i)
        result = engine.step(prefills, decodes)
        for (i, end), token in zip(who_prefills, result.prefill_tokens, strict=True):
            done[i] = end
            if token is not None:
                out[i].append(token)
        for i, token in zip(who_decodes, result.decode_tokens, strict=True):
            out[i].append(token)
    assert out == expected
    assert [kv_of(engine, t, len(p) + new_tokens - 1) for t, p in zip(tables, prompts, strict=True)] == kvs


@cache
def kernel_of(model: str, kernel: str) -> NumpyLlamaEngine:
    """Returns an engine of the same model over the same pool."""
    base = engine_of(model)
    return NumpyLlamaEngine(base.config, base._weights, BLOCKS, BLOCK_TOKENS, base.pool, kernel=kernel, check=False)


@seed(6)
@settings(max_examples=usually(8, long=60))
@given(
    model=st.sampled_from(["builtin", "mha"]),
    trunk=st.integers(0, 2),
    branches=st.lists(st.integers(0, 1), min_size=2, max_size=4),
    own=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    part=st.integers(0, 15),
    beside=st.booleans(),
)
def test_shared_prefixes_do_not_matter(
    model: str, trunk: int, branches: list[int], own: list[int], part: int, beside: bool
) -> None:
    """Requests decoded together equal each decoded alone by ``plain`` in its own blocks.

    They share ``trunk`` segments and some blocks, then a branch of one segment and some blocks with some requests, and
    end in tokens of their own."""
    engine = engine_of(model)
    texts, tables, block = {}, {}, 0
    for name, tokens in ("trunk", 256 * trunk + 16 * part), (0, 256), (1, 272):
        texts[name] = prompt_of(engine, tokens, 7)
        tables[name] = list(range(block, block := block + tokens // BLOCK_TOKENS))
    prompts = [
        np.concatenate([texts["trunk"], texts[branch], prompt_of(engine, own[i], i)])
        for i, branch in enumerate(branches)
    ]
    expected, kvs = [], []
    alone = kernel_of(model, "plain")
    samplings = [replace(SAMPLED, seed=i, logprobs=0) for i in range(len(branches))]
    for prompt, sampling in zip(prompts, samplings, strict=True):
        engine.pool[:] = np.nan
        expected.append(run(alone, prompt, range(80), [], 3, sampling))
        kvs.append(kv_of(engine, range(80), len(prompt) + 2))
    mine = [
        [*tables["trunk"], *tables[branch], *range(block + 5 * i, block + 5 * i + 5)]
        for i, branch in enumerate(branches)
    ]
    guest, guest_table = prompt_of(engine, 20, 9), range(block + 20, block + 22)
    assert block + 22 <= BLOCKS
    for kernel in KERNELS:
        sharing = kernel_of(model, kernel)
        engine.pool[:] = np.nan
        for i, prompt in enumerate(prompts):
            sharing.step([PrefillChunk(prompt, 0, mine[i])], [])
        out = [[expected[i][0]] for i in range(len(prompts))]
        for turn in range(2):
            slots = [
                DecodeSlot(out[i][-1], len(prompt) + turn, mine[i], samplings[i], turn + 1)
                for i, prompt in enumerate(prompts)
            ]
            chunks = [PrefillChunk(guest, 0, guest_table)] if beside else []
            result = sharing.step(chunks, slots)
            for tokens, token in zip(out, result.decode_tokens, strict=True):
                tokens.append(token)
            contexts = sum(slot.position + 1 for slot in slots)
            saved = contexts - result.kv_tokens_read
            assert saved >= (0 if kernel == "plain" else 256 * trunk * (len(prompts) - 1))
            assert saved == 0 or kernel != "plain"
            assert 0.0 < result.decode_share < 1.0 if beside else result.decode_share == 0.0
        assert out == expected
        assert [kv_of(engine, t, len(p) + 2) for t, p in zip(mine, prompts, strict=True)] == kvs


@seed(3)
@settings(max_examples=usually(20, long=60))
@given(model=st.sampled_from(MODELS), length=st.integers(2, 100), turn=st.integers(1, 60))
def test_origin_of_the_kv_does_not_matter(model: str, length: int, turn: int) -> None:
    """A second turn over KV that prefill and decode wrote in the first equals one prefill of everything."""
    engine = engine_of(model)
    prompt = prompt_of(engine, length)
    table = list(range(20))
    engine.pool[:] = np.nan
    answer = run(engine, prompt, table, [], 5)
    known = length + 4  # the last token's KV is not written yet
    text = np.concatenate([prompt, np.array(answer, "<u4"), prompt_of(engine, turn, 1)])
    reused = engine.step([PrefillChunk(text[known:], known, table, SAMPLED)], []).prefill_tokens
    kv = kv_of(engine, table, len(text))
    engine.pool[:] = np.nan
    assert engine.step([PrefillChunk(text, 0, table, SAMPLED)], []).prefill_tokens == reused
    assert kv_of(engine, table, len(text)) == kv


ASKING = SamplingParams(
    temperature=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=9, max_tokens=9, logprobs=3
)


def telling_chunk(prompt: npt.NDArray[np.uint32], start: int, end: int, table: Sequence[int]) -> PrefillChunk:
    last = end == len(prompt)
    counts = TokenCounts.needed(ASKING, prompt, 0) if last else None
    followers = prompt[start + 1 : end + 1]
    return PrefillChunk(prompt[start:end], start, table, ASKING if last else None, 0, counts, followers, 2)


@seed(5)
@settings(max_examples=usually(20, long=60))
@given(
    model=st.sampled_from(MODELS),
    length=st.integers(1, 120),
    cuts=st.lists(st.integers(1, 119), max_size=5),
    company=st.integers(0, 4),
)
def test_log_probabilities_do_not_depend_on_chunks_or_company(
    model: str, length: int, cuts: list[int], company: int
) -> None:
    """Log-probabilities of prompts and of generated tokens are equal bit for bit, and so are tokens with penalties."""
    engine = engine_of(model)
    prompt = prompt_of(engine, length)

    def told(ends: list[int], others: int) -> tuple[list[int], list[object]]:
        engine.pool[:] = np.nan
        guests = [prompt_of(engine, 9 + number, number) for number in range(others)]
        tables = [list(range(20 + 4 * number, 24 + 4 * number)) for number in range(others)]
        out: list[int] = []
        said: list[object] = []
        rows: list[LogprobRows] = []
        start = 0
        for end in ends:
            beside = [PrefillChunk(guest, 0, table) for guest, table in zip(guests, tables, strict=True)]
            result = engine.step([*beside, telling_chunk(prompt, start, end, range(16))], [])
            assert result.logprobs is not None
            rows.append(result.logprobs.prompts[others])
            start = end
        out.append(result.prefill_tokens[others])
        said.append(result.logprobs.prefills[others])
        while len(out) < 4:
            counts = TokenCounts.needed(ASKING, np.array([*prompt, *out], "<u4"), len(out))
            slot = DecodeSlot(out[-1], length + len(out) - 1, range(16), ASKING, len(out), counts)
            beside = [
                DecodeSlot(66, len(guest), table, SAMPLED, 1) for guest, table in zip(guests, tables, strict=True)
            ]
            result = engine.step([], [*beside, slot])
            assert result.logprobs is not None
            assert list(result.logprobs.decodes) == [others]
            out.append(result.decode_tokens[others])
            said.append(result.logprobs.decodes[others])
        names = ("logprobs", "top_tokens", "top_logprobs")
        said += [np.concatenate([getattr(each, name) for each in rows]).tolist() for name in names]
        return out, said

    whole = told([length], 0)
    assert len(whole[1][-1]) == length - 1
    assert told(sorted({cut for cut in cuts if cut < length} | {length}), company) == whole


def test_computing_logits_in_many_panels_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("builtin")
    chunk = telling_chunk(prompt_of(engine, 150), 0, 150, range(16))
    at_once = engine.step([chunk], []).logprobs
    monkeypatch.setattr(numpy_llama, "_LOGIT_BYTES", 1)
    in_panels = engine.step([chunk], []).logprobs
    assert at_once is not None
    assert in_panels is not None
    for one, other in zip(astuple(at_once.prompts[0]), astuple(in_panels.prompts[0]), strict=True):
        assert np.array_equal(one, other)


@seed(4)
@settings(max_examples=25)
@given(length=st.sampled_from([63, 64, 65, 127, 128, 129, 500, 1023, 1025]), cut=st.integers(1, 1024))
def test_long_prompts_cross_the_padding_steps(length: int, cut: int) -> None:
    engine = engine_of("builtin")
    prompt = prompt_of(engine, length)
    expected = run(engine, prompt, range(70), [], 3)
    kv = kv_of(engine, range(70), length + 2)
    engine.pool[:] = np.nan
    assert run(engine, prompt, range(80, 150), [cut, cut + 1], 3) == expected
    assert kv_of(engine, range(80, 150), length + 2) == kv


@pytest.mark.parametrize("block_tokens", [1, 7, 64, 200])
def test_block_size_does_not_matter_for_tokens(block_tokens: int) -> None:
    base = engine_of("builtin")
    prompt = prompt_of(base, 150)
    other = NumpyLlamaEngine(base.config, builtin_weights(base.config), 200, block_tokens, check=False)
    other.pool[:] = np.nan
    assert run(other, prompt, range(200), [33], 6) == run(base, prompt, range(20), [], 6)


CHILD = """
import hashlib, sys
sys.path[:0] = {path!r}
import test_engine_invariance as t
engine = t.engine_of("builtin")
prompt = t.prompt_of(engine, 333)
out = t.run(engine, prompt, range(30), [5, 64, 100], 8)
print(out, hashlib.sha256(t.kv_of(engine, range(30), 340)).hexdigest())
"""


def test_another_process_computes_the_same_bits() -> None:
    """Another process's environment asks for several BLAS threads, but the engine pins them itself."""
    import hashlib

    engine = engine_of("builtin")
    out = run(engine, prompt_of(engine, 333), range(40, 70), [], 8)
    here = f"{out} {hashlib.sha256(kv_of(engine, range(40, 70), 340)).hexdigest()}"
    root = Path(__file__).parents[2]
    code = CHILD.format(path=[str(Path(__file__).parent), str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.strip() == here


def test_a_large_decode_batch_of_mixed_lengths_equals_each_alone() -> None:
    """The batch has more than one group of equal padded length, and lengths at both ends of a step."""
    engine = engine_of("builtin")
    engine.pool[:] = np.nan
    lengths = [*range(1, 24), 63, 64, 65, 127, 128, 200, 512]
    slots, block = [], 0
    for number, length in enumerate(lengths):
        blocks = range(block, block := block + engine.layout.blocks_for(length + 1))
        run(engine, prompt_of(engine, length, number), blocks, [], 1)
        slots.append(DecodeSlot(65, length, blocks, replace(SAMPLED, seed=number), 1))
    assert block <= BLOCKS
    alone = [engine.step([], [slot]).decode_tokens[0] for slot in slots]
    kv = engine.pool[:block].tobytes()
    for order in (slots, slots[::-1]):
        for slot in slots:
            engine.pool[slot.block_table[slot.position // BLOCK_TOKENS], :, :, slot.position % BLOCK_TOKENS] = np.nan
        together = engine.step([], order).decode_tokens
        assert together == (alone if order is slots else alone[::-1])
        assert engine.pool[:block].tobytes() == kv
