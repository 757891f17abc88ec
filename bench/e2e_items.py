"""What tokens and block keys cost of a request, by the modules that the load balancer has, in this process."""

from __future__ import annotations

import time

from bench.e2e_cluster import BLOCK_TOKENS, card_of
from bench.router_prompts import GROUPS, Prompts
from pinyon.core.block_keys import namespace
from services.cluster import LocalCluster
from services.lb.key_chains import KeyChains
from services.lb.tokenizer_process import tokenize

__all__ = ["tokens_and_keys"]


def tokens_and_keys(cluster: LocalCluster, prompts: Prompts, count: int) -> dict[str, float]:
    """Of ``count`` new prompts, once beginnings are known: microseconds of CPU per request, and tokens."""
    card, chains = card_of(cluster), KeyChains()
    start = namespace(card.fingerprint, card.config.kv_layout(BLOCK_TOKENS).layout_id, "", cluster.access.secret)
    for _ in range(2 * GROUPS):
        chains.packed(start, tokenize(card, prompts.text()[1]), BLOCK_TOKENS)
    texts = [prompts.text()[1] for _ in range(count)]
    began_ns = time.thread_time_ns()
    encoded = [tokenize(card, text) for text in texts]
    between_ns = time.thread_time_ns()
    for tokens in encoded:
        chains.packed(start, tokens, BLOCK_TOKENS)
    ended_ns = time.thread_time_ns()
    return {
        "tokens_us_per_request": round((between_ns - began_ns) / count / 1e3, 1),
        "keys_us_per_request": round((ended_ns - between_ns) / count / 1e3, 1),
        "prompt_tokens": round(sum(map(len, encoded)) / 4 / count),
    }
