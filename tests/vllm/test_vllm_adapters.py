"""LoRA adapters through pairs of vLLM servers and across streams that are cut: each answers as at one server alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.vllm import soak
from tests.vllm.adapters import RANK, write_adapter
from tests.vllm.ask import Told, ask, ask_stream, counter, prompts
from tests.vllm.conftest import serving
from tests.vllm.pairs import cutting, own_metrics, resumes, servers, started_pairs

SEED = 7
PROMPTS = 24
TOKENS = 24
ADAPTERS = ("bark", "moss")


@soak.long_only
def test_adapters_answer_through_pairs_as_alone(model: Path, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    folders = [write_adapter(tmp_path / name, model, SEED + number) for number, name in enumerate(ADAPTERS)]
    named = [f"{name}={folder}" for name, folder in zip(ADAPTERS, folders, strict=True)]
    more = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(max(8, RANK)), "--lora-modules", *named)
    # vLLM 0.32 on a CPU answers for the plain model wrongly while an adapter is in the same batch, also without us.
    asked = prompts(SEED, PROMPTS, families=4)
    adapted, plain = [(each, name) for each in asked for name in ADAPTERS], [(each, "tiny") for each in asked]
    with serving(model, tmp_path, more=more) as alone:
        expected = [ask(alone.url, prompt, TOKENS, name).tokens for prompt, name in (*adapted, *plain)]
    assert len({*expected}) > 0.9 * len(expected), "each adapter answers in its own way"
    with started_pairs(model, SEED, TOKENS, more) as (pairs, proxies), ThreadPoolExecutor(8) as callers:

        def told(by: Callable[..., Told]) -> list[tuple[int, ...]]:
            answers: list[Told] = []
            for several in (adapted, plain):
                answers += callers.map(lambda each: by(pairs.http, each[0], TOKENS, each[1]), several)
            return [each.tokens for each in answers]

        assert told(ask) == expected
        (prefill,), decodes = servers(pairs, "prefill"), servers(pairs, "decode")
        computed = counter(prefill.url, "vllm:request_success_total")
        from_peers = sum(counter(own_metrics(each), "pinyon_vllm_peer_blocks_total") for each in decodes)
        print(f"{computed:g} of {len(expected)} prompts computed apart; {from_peers:g} blocks from peers")
        assert computed > len(expected) / 4
        assert from_peers > computed
        with cutting(proxies):
            assert told(ask_stream) == expected
        print(f"{resumes(pairs):g} of {len(expected)} streams went on elsewhere")
        assert resumes(pairs) > len(expected) / 2
