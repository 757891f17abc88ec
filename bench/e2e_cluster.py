"""The cluster that ``bench/e2e.py`` measures: load balancer, conductor, and workers that compute nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.router_stub import EVENT_GAP_S, MODEL
from launch.cluster import ClusterSpec, LocalCluster
from pinyon.model import ModelCard, load_card

WORKERS = 2
BLOCK_TOKENS = 32
POOL_TEXT_BYTES = 1536 << 10
"""The bytes of text in a worker's cache, about: its share of the beginnings of 32 KB prompts, and not all of them."""
BPE_TOKEN_BYTES = 4
STEP_TOKENS = 16384
"""A prompt is one step, since a worker's chunks are not what is measured."""
MAX_BATCH = 128

Extra = Mapping[str, Sequence[str]]
"""Additional arguments by kind of service."""


@contextlib.contextmanager
def our_cluster(
    folder: Path, model: Path | None, *, tls: bool = False, token_gap_s: float = EVENT_GAP_S, extra: Extra
) -> Iterator[LocalCluster]:
    """Runs a cluster in which prompts take no time, and each further token ``token_gap_s``: by default that of the
    other router's stubs. A ``model`` of None is the built-in one, whose tokens are bytes."""
    profile = folder / "profile.json"
    none = ("step_s", "prefill_token_s", "prefill_pair_s", "decode_request_s", "decode_kv_token_s")
    profile.write_text(
        json.dumps(
            {"source": "none", "stated": "nothing", "assumed": "all", "decode_step_s": token_gap_s}
            | dict.fromkeys(none, 0.0)
        )
    )
    ours = {
        # Before its first report, an engine is taken to be slow.
        "conductor": ("--ttft-slo-ms", "0"),
        "worker": (
            *("--prefill-chunk-tokens", str(STEP_TOKENS), "--step-tokens", str(STEP_TOKENS * 2)),
            *("--max-batch", str(MAX_BATCH)),
        ),
        "lb": (),
    }
    spec = ClusterSpec(
        prefill=0,
        decode=0,
        mixed=WORKERS,
        stores=0,
        engine="paced",
        engine_profile=str(profile),
        model=str(model or ""),
        served_model_name=MODEL,
        block_tokens=BLOCK_TOKENS,
        pool_blocks=POOL_TEXT_BYTES // (BLOCK_TOKENS * (1 if model is None else BPE_TOKEN_BYTES)),
        tls=tls,
        log_level="warning",
        extra={kind: (*arguments, *extra.get(kind, ())) for kind, arguments in ours.items()},
    )
    with LocalCluster(spec, folder / "logs") as cluster:
        yield cluster


def pids_of(cluster: LocalCluster) -> dict[str, int]:
    """Returns the processes whose CPU is the price of a request."""
    return {"lb": cluster.services["lb-0"].pid, "conductor": cluster.services["conductor"].pid}


def card_of(cluster: LocalCluster) -> ModelCard:
    return load_card(cluster.spec.model or None, cluster.spec.served_model_name)
