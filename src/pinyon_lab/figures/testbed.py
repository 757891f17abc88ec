"""One serving instance of the testbed of "KVCache cache in the wild" (§4.3), modelled.

The model says how many blocks its cache holds, and which part of a trace it serves. The paper scales its traces "to fit
the processing capability" of the testbed and prints neither the factor nor that capability. A hint stands in §3.5:
"suppose a GPU can process 5 requests per second", of Qwen2-7B and trace A. Those requests' tokens, but for those that
an ideal cache would have, are what one GPU computes in a second. Other models compute as many times fewer tokens as a
GPU has more parameters to multiply with. As a check, 2 FLOP per parameter and token make that 96 TFLOPS, a third of an
A800's 312 (Mooncake, Table 1).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from pinyon_lab.caches.cache import leading_run
from pinyon_lab.figures.workload import Workload
from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.analysis.models import MODELS, ServingModel
from pinyon_lab.traces.scaling import Unit, Units

HOUR_S = 3600.0
"""The part of a longer trace that counts: its first hour, as Fig. 22 takes one."""
REFERENCE = MODELS[0]
REQUESTS_PER_S = 5
"""The request rate of the reference model (§3.5)."""
SINGLE_TOKENS, MULTI_TOKENS, MULTI_SHARE = 973, 5953, 0.47
"""The mean tokens, prompt and answer, of single- and multi-turn requests, and the multi-turn share (§3.5)."""
IDEAL = 0.62
"""The ideal hit ratio of trace A (§3.2, Fig. 4)."""
REFERENCE_PER_S = (
    REQUESTS_PER_S * (SINGLE_TOKENS * (1 - MULTI_SHARE) + MULTI_TOKENS * MULTI_SHARE) * (1 - IDEAL) / REFERENCE.gpus
)


def capacity_blocks(model: ServingModel, block_tokens: int, ratio: float) -> int:
    """Returns the blocks that fit in the HBM for KV and a CPU cache of ``ratio`` times that size.

    Both count, because a block is in one of them: a block without room on the GPU goes to the CPU, and a block without
    room there is removed (§4.1).
    """
    return int(model.kv_hbm_bytes * (1 + ratio) / (model.token_bytes * block_tokens))


def computed_per_s(model: ServingModel) -> float:
    """Returns the number of tokens that an instance computes in a second."""
    return REFERENCE_PER_S * model.gpus * REFERENCE.parameters / model.parameters


def served(workload: Workload, model: ServingModel, generator: random.Random) -> Workload:
    """Returns the part of a workload that one instance serves: as many users as it can, at their own times.

    Where no users are named, sessions are drawn. Where neither is named, all requests stay: requests drawn one by one
    would not find the blocks that they reuse.
    """
    end_s = workload.rows[0].time_s + HOUR_S
    rows = [row for row in workload.rows if row.time_s < end_s]
    unit: Unit | None = "user" if rows[0].user else "session" if rows[0].chat else None
    asked, most = _asked_per_s(rows, workload.block_tokens), computed_per_s(model)
    if unit is not None and asked > most:
        rows = list(compress(rows, Units(rows, unit).chosen(most / asked, generator)))
    return replace(workload, rows=rows)


def _asked_per_s(rows: Sequence[TraceRow], block_tokens: int) -> float:
    """Returns the tokens to compute in a second, prompts and answers, if nothing is ever evicted."""
    seen: set[int] = set()
    tokens = 0
    for row in rows:
        tokens += max(0, row.input_tokens - leading_run(row.blocks, seen) * block_tokens) + row.output_tokens
        seen.update(row.blocks)
    return tokens / max(1.0, rows[-1].time_s - rows[0].time_s)
