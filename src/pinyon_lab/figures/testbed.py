"""One serving instance of the testbed of "KVCache cache in the wild" (§4.3), modelled: the blocks that its cache holds,
and the part of a trace that it serves.

The paper scales its traces "to fit the processing capability" of the testbed and prints neither the factor nor that
capability. What it prints of it stands in §3.5: "suppose a GPU can process 5 requests per second", of Qwen2-7B and
trace A. Those requests' tokens, but for what an ideal cache would have, are what one GPU computes in a second; other
models compute as many times fewer as a GPU has more parameters to multiply with. Check: 2 FLOP per parameter and token
make that 96 TFLOPS, a third of an A800's 312 (Mooncake, Table 1).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from pinyon_lab.caches.cache import leading_run
from pinyon_lab.figures.workload import Workload
from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.analysis.models import MODELS, Served
from pinyon_lab.traces.scaling import Unit, Units

HOUR_S = 3600.0
"""Of a longer trace its first hour counts, as Fig. 22 takes one."""
REFERENCE = MODELS[0]
REQUESTS_PER_S = 5
"""§3.5, of the reference."""
SINGLE_TOKENS, MULTI_TOKENS, MULTI_SHARE = 973, 5953, 0.47
"""§3.5: mean tokens, prompt and answer, of single- and multi-turn requests, and how many are multi-turn."""
IDEAL = 0.62
"""§3.2, Fig. 4: ideal hit ratio of trace A."""
REFERENCE_PER_S = (
    REQUESTS_PER_S * (SINGLE_TOKENS * (1 - MULTI_SHARE) + MULTI_TOKENS * MULTI_SHARE) * (1 - IDEAL) / REFERENCE.gpus
)


def capacity_blocks(model: Served, block_tokens: int, ratio: float) -> int:
    """In the HBM for KV and a CPU cache of ``ratio`` times that. Both count: a block is in one of them, as what the GPU
    has no room for goes to the CPU, and what that has no room for is removed (§4.1)."""
    return int(model.kv_hbm_bytes * (1 + ratio) / (model.token_bytes * block_tokens))


def computed_per_s(model: Served) -> float:
    """Tokens that an instance computes in a second."""
    return REFERENCE_PER_S * model.gpus * REFERENCE.parameters / model.parameters


def served(workload: Workload, model: Served, generator: random.Random) -> Workload:
    """As many of its users (sessions, where no users are named), at their own times, as one instance serves. All, where
    neither is named: requests drawn one by one would not find what they reuse."""
    end_s = workload.rows[0].time_s + HOUR_S
    rows = [row for row in workload.rows if row.time_s < end_s]
    unit: Unit | None = "user" if rows[0].user else "session" if rows[0].chat else None
    asked, most = _asked_per_s(rows, workload.block_tokens), computed_per_s(model)
    if unit is not None and asked > most:
        rows = list(compress(rows, Units(rows, unit).chosen(most / asked, generator)))
    return replace(workload, rows=rows)


def _asked_per_s(rows: Sequence[TraceRow], block_tokens: int) -> float:
    """Tokens to compute in a second, prompts and answers, if nothing is ever evicted."""
    seen: set[int] = set()
    tokens = 0
    for row in rows:
        tokens += max(0, row.input_tokens - leading_run(row.blocks, seen) * block_tokens) + row.output_tokens
        seen.update(row.blocks)
    return tokens / max(1.0, rows[-1].time_s - rows[0].time_s)
