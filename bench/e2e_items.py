"""The cost of a request's tokens and block keys, by the load balancer's modules, in this process."""

from __future__ import annotations

import random
import statistics
import time

from bench.e2e_cluster import BLOCK_TOKENS, card_of
from bench.e2e_model import new_words
from bench.router_prompts import GROUPS, Prompts
from launch.cluster import LocalCluster
from pinyon.core.block_keys import namespace
from pinyon.frontdoor.instances.prompts import KeyChains
from pinyon.frontdoor.instances.tokenizer_process import tokenize


def tokens_and_keys(cluster: LocalCluster, prompts: Prompts, count: int) -> dict[str, float]:
    """Returns the median CPU µs per request over ``count`` new prompts, and their mean tokens. Beginnings and common
    words are known. For ``tokens_of_new_words`` the other half of each prompt is of words that never came."""
    card, chains = card_of(cluster), KeyChains()
    start = namespace(card.fingerprint, card.config.kv_layout(BLOCK_TOKENS).layout_id, "", cluster.access.secret)
    for _ in range(2 * GROUPS):
        chains.packed(start, tokenize(card, prompts.text()[1]), BLOCK_TOKENS)
    tokens_ns, new_ns, keys_ns, sizes = [], [], [], []
    for number in range(count):
        text = prompts.text()[1]
        other = text[: len(text) // 2] + new_words(random.Random(f"{number} {text[-64:]}"), len(text) // 2)
        began_ns = time.thread_time_ns()
        tokenize(card, other)
        new_ns.append(time.thread_time_ns() - began_ns)
        began_ns = time.thread_time_ns()
        tokens = tokenize(card, text)
        between_ns = time.thread_time_ns()
        chains.packed(start, tokens, BLOCK_TOKENS)
        keys_ns.append(time.thread_time_ns() - between_ns)
        tokens_ns.append(between_ns - began_ns)
        sizes.append(len(tokens) // 4)
    return {
        "tokens_us_per_request": round(statistics.median(tokens_ns) / 1e3, 1),
        "tokens_of_new_words_us_per_request": round(statistics.median(new_ns) / 1e3, 1),
        "keys_us_per_request": round(statistics.median(keys_ns) / 1e3, 1),
        "prompt_tokens": round(statistics.fmean(sizes)),
    }
