"""The NumPy engine's attention kernels: decode over prefixes that requests share, beside what the machine can do.

The built-in model has blocks of 32 tokens in random places of the pool. All times are CPU time of the process, medians
over repetitions in which the kernels take turns. That they compute the same is checked on the way."""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported: idle threads would count

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from bench.report import Aim, Report, parser, progress
from pinyon.batching import DecodeSlot
from pinyon.core.request import SamplingParams
from pinyon.model.builtin import builtin_config
from pinyon.model.config import ModelConfig
from services.worker.engines.attention import PagedAttention
from services.worker.engines.blas import TILE, pin_blas_threads
from services.worker.engines.decode_plan import KERNELS, DecodePlan
from services.worker.engines.numpy_llama import NumpyLlamaEngine
from services.worker.engines.protocol import StepResult
from services.worker.engines.segments import SEGMENT_TOKENS
from services.worker.engines.weights import builtin_weights

BLOCK_TOKENS = 32
BATCH = 32
OWN_TOKENS = 64
"""The tokens of each request after its shared prefix."""
SHARING = (1, 2, 4, 8, 16, 32, 64)
GROUPS = (1, 2, 5, BATCH)
"""The numbers of prefix groups; with the last one, no prefix is shared."""
FASTER_MIN = 4.0
UNSHARED_MAX = 1.05


PREFIX_TOKENS = 4096
LARGE_BYTES = 512 << 20
"""The size of the array that measures the bandwidth: far more than the caches."""


def tables(groups: int, dice: np.random.Generator, batch: int = BATCH) -> list[list[int]]:
    """Returns the requests' block tables, the groups in turn: the group's prefix, then blocks of the request's own."""
    shared, own = PREFIX_TOKENS // BLOCK_TOKENS, OWN_TOKENS // BLOCK_TOKENS
    blocks = dice.permutation(groups * shared + batch * own)
    prefixes = blocks[: groups * shared].reshape(groups, shared)
    rest = blocks[groups * shared :].reshape(batch, own)
    return [[*prefixes[number % groups].tolist(), *rest[number].tolist()] for number in range(batch)]


def medians_ms(jobs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median time of each job; all run once to warm up, then in turn."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(repeats):
        for name, job in jobs.items():
            began_s = time.process_time()
            job()
            taken[name].append(1e3 * (time.process_time() - began_s))
    return {name: statistics.median(each) for name, each in taken.items()}


def machine(config: ModelConfig, repeats: int) -> dict[str, float]:
    """Returns GB/s that one core reads and copies, and Gflop/s of the products that attention consists of."""
    large = np.ones(LARGE_BYTES // 8)
    half = large.size // 2
    keys = np.ones((4, SEGMENT_TOKENS, config.head_dim), np.float32)
    tile = np.ones((4, config.head_dim, TILE), np.float32)
    out = np.empty((4, SEGMENT_TOKENS, TILE), np.float32)
    ms = medians_ms(
        {
            "read": lambda: np.add.reduce(large),
            "copy": lambda: np.copyto(large[:half], large[half:]),
            "product": lambda: [np.matmul(keys, tile, out=out) for _ in range(500)],
        },
        repeats,
    )
    flops = 500 * 2 * out.size * config.head_dim
    return {
        "read_gb_per_s": round(large.nbytes / ms["read"] / 1e6, 1),
        "copy_gb_per_s": round(large.nbytes / 2 / ms["copy"] / 1e6, 1),
        "tile_product_gflop_per_s": round(flops / ms["product"] / 1e6, 1),
    }


def roofline(config: ModelConfig, repeats: int, dice: np.random.Generator) -> dict[str, dict[str, float]]:
    """Measures attention of one layer alone over a prefix that several decoded tokens share."""
    layout = config.kv_layout(BLOCK_TOKENS)
    count = PREFIX_TOKENS // BLOCK_TOKENS
    # The pool is larger than the caches: only some of its blocks are the prefix's.
    pool = np.ones((max(1024, count), *layout.shape), np.float32)
    table = dice.permutation(len(pool))[:count]
    attention = PagedAttention(config, layout, pool, "grouped")
    figures = {}
    for sharing in SHARING:
        queries = dice.standard_normal((sharing, config.num_heads, config.head_dim), np.float32)
        out = np.empty_like(queries)
        ends = [PREFIX_TOKENS - 1] * sharing
        plan = attention.plan(range(sharing), ends, [table] * sharing)

        job = partial(_all_layers, attention, config.num_layers, queries, plan, out)
        ms = medians_ms({"grouped": job}, repeats)["grouped"] / config.num_layers
        token_bytes = 2 * layout.kv_heads * layout.head_dim * 4
        figures[f"{sharing} requests"] = {
            "ms_per_layer": round(ms, 3),
            "attended_tokens_per_us": round(sharing * PREFIX_TOKENS / ms / 1e3, 2),
            "kv_read_gb_per_s": round(plan.tokens_read * token_bytes / ms / 1e6, 2),
        }
    return figures


def _all_layers(
    attention: PagedAttention,
    layers: int,
    queries: npt.NDArray[np.float32],
    plan: DecodePlan,
    out: npt.NDArray[np.float32],
) -> None:
    with np.errstate(under="ignore"):
        for layer in range(layers):
            attention.decode(layer, queries, plan, out)


def engines_of(config: ModelConfig, blocks: int, dice: np.random.Generator) -> dict[str, NumpyLlamaEngine]:
    """Returns an engine for each kernel, over one pool."""
    weights = builtin_weights(config)
    pool = np.empty((blocks, *config.kv_layout(BLOCK_TOKENS).shape), np.float32)
    pool[:] = dice.standard_normal(pool.shape[1:], np.float32)
    return {
        kernel: NumpyLlamaEngine(config, weights, blocks, BLOCK_TOKENS, pool, kernel=kernel, check=False)
        for kernel in KERNELS
    }


def tokens_per_s(
    engines: Mapping[str, NumpyLlamaEngine], batches: Sequence[Sequence[DecodeSlot]], repeats: int
) -> dict[str, float]:
    """Returns by kernel: tokens per CPU second, KV tokens read per layer, and the speed in multiples of ``plain``."""
    told: dict[str, list[StepResult]] = {}

    def decode(kernel: str) -> None:
        told[kernel] = [engines[kernel].step([], slots) for slots in batches]

    ms = medians_ms({kernel: partial(decode, kernel) for kernel in engines}, repeats)
    assert len({tuple(tuple(result.decode_tokens) for result in results) for results in told.values()}) == 1
    row: dict[str, float] = {}
    for kernel, results in told.items():
        row[f"{kernel}_tokens_per_s"] = round(1e3 * sum(map(len, batches)) / ms[kernel])
        row[f"{kernel}_kv_tokens_read"] = sum(result.kv_tokens_read for result in results)
    return {**row, **{f"{kernel}_times_plain": round(ms["plain"] / ms[kernel], 2) for kernel in ("whole", "grouped")}}


def steps(
    engines: Mapping[str, NumpyLlamaEngine], repeats: int, dice: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Measures whole decode steps of one batch, by the number of its groups."""
    figures = {}
    for groups in GROUPS:
        name = f"{groups} groups" if groups < BATCH else "nothing shared"
        figures[name] = tokens_per_s(engines, [slots_of(tables(groups, dice))], repeats)
        progress(f"{name}: {figures[name]}")
    return figures


def slots_of(of_each: Sequence[Sequence[int]]) -> list[DecodeSlot]:
    """Returns slots that decode the last token of each request."""
    return [
        DecodeSlot(65, PREFIX_TOKENS + OWN_TOKENS - 1, table, SamplingParams(seed=number), 1)
        for number, table in enumerate(of_each)
    ]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    repeats = 2 if arguments.quick else 11
    pin_blas_threads()
    config, dice = builtin_config(), np.random.default_rng(arguments.seed)
    said = {"prefix_tokens": PREFIX_TOKENS, "own_tokens": OWN_TOKENS, "batch": BATCH, "block_tokens": BLOCK_TOKENS}
    report = Report("kernels", {**said, "segment_tokens": SEGMENT_TOKENS, "seed": arguments.seed})
    report.baseline["machine"] = machine(config, repeats)
    progress(f"machine: {report.baseline['machine']}")
    report.results["attention"] = roofline(config, repeats, dice)
    for name, figures in report.results["attention"].items():
        progress(f"{name}: {figures}")
    blocks = max(GROUPS) * PREFIX_TOKENS // BLOCK_TOKENS + BATCH * OWN_TOKENS // BLOCK_TOKENS
    engines = engines_of(config, blocks, dice)
    report.results["steps"] = by_groups = steps(engines, repeats, dice)
    shared, unshared = by_groups["1 groups"]["grouped_times_plain"], by_groups["nothing shared"]["grouped_times_plain"]
    report.aims += [
        Aim("one prefix for all, times as fast as plain", FASTER_MIN, shared, at_most=False),
        Aim("nothing shared, CPU time of plain's", UNSHARED_MAX, round(1 / unshared, 2)),
    ]
    report.emit()


if __name__ == "__main__":
    main()
