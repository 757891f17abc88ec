"""FEATHER's chapter 3 on the NumPy engine: the gain of a batch by what its requests share, in single decode steps of
the built-in model, by attention kernel.

The batches are those of Experiments 1 to 8 at a size that this engine has time for. They have 32 requests with prefixes
of 4,096 tokens, where the paper has 100 to 800, most of 10,000. The simulator shows what memory does when it cannot
hold all prefixes, and whole runs with their prompts (Experiment 8); `./dev bench batching` shows what scheduling costs
(Experiment 9). Figures are tokens per second of CPU time, medians over repetitions in which the kernels take turns;
each kernel computes the same tokens. `whole` reads once what all requests share, which the paper supposes that a GPU's
caches do; `grouped` reads once what some do, too (as PAT does)."""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported: idle threads would count

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bench.kernels import BLOCK_TOKENS, engines_of, machine, roofline, tokens_per_s
from bench.report import Aim, Report, parser, progress
from pinyon.batching import DecodeSlot
from pinyon.core.request import SamplingParams
from pinyon.model.builtin import builtin_config
from services.worker.engines.blas import pin_blas_threads
from services.worker.engines.numpy_llama import NumpyLlamaEngine

BATCH = 32
PREFIX_TOKENS = 4096
OWN_TOKENS = BLOCK_TOKENS
POOL_BLOCKS = BATCH * (PREFIX_TOKENS + OWN_TOKENS) // BLOCK_TOKENS
"""The blocks of the largest batch if nothing of it is shared."""
FULL_MIN = 2.0
"""The least gain by one prefix for all, over two of them, with the kernel that gains by what all share."""

Parts = Sequence[tuple[str, int]]
"""The parts of a request, names with tokens in whole blocks; requests that begin with the same names share that KV."""


class Point(NamedTuple):
    """The name and the batches of one row."""

    name: str
    batches: Sequence[Sequence[Parts]]
    """The batches, decoded one after the other."""


def prefixed(prefix: str, own: str, tokens: int = PREFIX_TOKENS) -> Parts:
    return [(prefix, tokens), (own, OWN_TOKENS)]


def experiment_1() -> list[Point]:
    """Returns batches by how many requests have prefix A, and the others B (§3.2, Fig. 3.2)."""
    points = []
    for others in (0, 1, 4, 8, 16):
        batch = [prefixed("B" if number < others else "A", str(number)) for number in range(BATCH)]
        points.append(Point(f"{BATCH - others} of {BATCH} with A", [batch]))
    return points


def experiment_2() -> list[Point]:
    """Returns batches of prompts of one length, by the share that is common to all (Fig. 3.4)."""
    points = []
    for share in (0, 25, 50, 75, 100):
        common = PREFIX_TOKENS * share // 100
        batch = [[("A", common), (str(number), PREFIX_TOKENS + OWN_TOKENS - common)] for number in range(BATCH)]
        points.append(Point(f"{share} % shared", [batch]))
    return points


def experiment_3() -> list[Point]:
    """Returns batches by the number of prefixes (Fig. 3.5)."""
    return [Point(f"{groups} prefixes", [in_groups(groups)]) for groups in (1, 2, 4, 8, 16)]


def in_groups(groups: int, count: int = BATCH, tokens: int = PREFIX_TOKENS) -> list[Parts]:
    return [prefixed(str(number % groups), f"own {number}", tokens) for number in range(count)]


def experiment_4() -> list[Point]:
    """Returns prompts of one length as trees of one to four levels, of which level i has 2^i branches (Fig. 3.7)."""
    points = []
    part = PREFIX_TOKENS // 4
    for levels in (1, 2, 3, 4):
        batch: list[Parts] = []
        for number in range(BATCH):
            path = [(f"{level}: {number % (1 << level)}", part) for level in range(levels - 1)]
            leaf = f"{levels - 1}: {number % (1 << (levels - 1))}"
            batch.append([*path, (leaf, PREFIX_TOKENS - part * (levels - 1)), (str(number), OWN_TOKENS)])
        points.append(Point(f"{levels} levels", [batch]))
    return points


def experiment_5() -> list[Point]:
    """Returns batches by length and number of prefixes (Fig. 3.8)."""
    return [
        Point(f"{tokens} tokens, {groups} prefixes", [in_groups(groups, tokens=tokens)])
        for tokens in (256, 1024, PREFIX_TOKENS)
        for groups in (1, 2, 8)
    ]


def experiment_6() -> list[Point]:
    """Returns batches with a prefix of all (f1 of the prompt), then one suffix for f2 of them, or a few (Fig. 3.9)."""
    points = []
    for f1 in (0, 50, 75):
        for f2 in (0, 50, 75, 100):
            common = PREFIX_TOKENS * f1 // 100
            batch: list[Parts] = []
            for number in range(BATCH):
                suffix = "A" if number < BATCH * f2 // 100 else f"B{number % 5}"
                batch.append([("all", common), (suffix, PREFIX_TOKENS - common), (str(number), OWN_TOKENS)])
            points.append(Point(f"f1 {f1} %, f2 {f2} %", [batch]))
    return points


def experiment_7() -> list[Point]:
    """Returns batches by size, with one prefix and with five (Fig. 3.10)."""
    return [
        Point(f"{count} requests, {groups} prefixes", [in_groups(groups, count)])
        for groups in (1, 5)
        for count in (5, 8, 16, 32, 64, 128)
    ]


def experiment_8() -> list[Point]:
    """Returns the same requests of four prefixes in fewer large or more small batches; one step of each (Fig. 3.11)."""
    requests = sorted(in_groups(4), key=lambda parts: parts[0])
    points = []
    for count in (1, 2, 4, 8, 16):
        size = BATCH // count
        points.append(Point(f"{count} x {size}", [requests[at : at + size] for at in range(0, BATCH, size)]))
    return points


EXPERIMENTS = {
    "1 (Fig. 3.2), requests with prefix A": experiment_1,
    "2 (Fig. 3.4), shared of the prompt": experiment_2,
    "3 (Fig. 3.5), prefixes": experiment_3,
    "4 (Figs. 3.6, 3.7), levels of a tree": experiment_4,
    "5 (Fig. 3.8), length and number of prefixes": experiment_5,
    "6 (Fig. 3.9), partly homogeneous": experiment_6,
    "7 (Fig. 3.10), batch size": experiment_7,
    "8 (Fig. 3.11), many small or few large batches": experiment_8,
}


def slots_of(
    batch: Sequence[Parts], blocks: Sequence[int], taken: dict[tuple[str, ...], list[int]]
) -> list[DecodeSlot]:
    """Returns slots for each request's last token; parts not in ``taken`` get blocks in the order of ``blocks``."""
    slots = []
    for number, parts in enumerate(batch):
        table: list[int] = []
        path: tuple[str, ...] = ()
        for name, tokens in parts:
            path = (*path, name)
            if path not in taken:
                used = sum(map(len, taken.values()))
                taken[path] = list(blocks[used : used + tokens // BLOCK_TOKENS])
            table += taken[path]
        position = len(table) * BLOCK_TOKENS - 1
        slots.append(DecodeSlot(65, position, table, SamplingParams(seed=number), 1))
    return slots


def measured(
    engines: Mapping[str, NumpyLlamaEngine], point: Point, repeats: int, dice: np.random.Generator
) -> dict[str, float]:
    blocks: list[int] = dice.permutation(POOL_BLOCKS).tolist()
    taken: dict[tuple[str, ...], list[int]] = {}
    return tokens_per_s(engines, [slots_of(batch, blocks, taken) for batch in point.batches], repeats)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    repeats = 1 if arguments.quick else 7
    pin_blas_threads()
    config, dice = builtin_config(), np.random.default_rng(arguments.seed)
    said = {"prefix_tokens": PREFIX_TOKENS, "own_tokens": OWN_TOKENS, "batch": BATCH, "block_tokens": BLOCK_TOKENS}
    report = Report("sharing", {**said, "seed": arguments.seed})
    report.baseline["machine"] = machine(config, repeats)
    progress(f"machine: {report.baseline['machine']}")
    report.baseline["roofline"] = roofline(config, repeats, dice)
    engines = engines_of(config, POOL_BLOCKS, dice)
    for name, experiment in EXPERIMENTS.items():
        rows = report.results[name] = {}
        for point in experiment():
            rows[point.name] = measured(engines, point, repeats, dice)
            progress(f"{name}: {point.name}: {rows[point.name]}")
    prefixes = report.results["3 (Fig. 3.5), prefixes"]
    full = prefixes["1 prefixes"]["whole_tokens_per_s"] / prefixes["2 prefixes"]["whole_tokens_per_s"]
    report.aims.append(Aim("whole: one prefix for all, over two of them", FULL_MIN, round(full, 2), at_most=False))
    report.emit()


if __name__ == "__main__":
    main()
