"""The figures of all papers in small: each paper's are made once, on small workloads and with few and short runs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pinyon_lab.figures.figure import Clock
from pinyon_lab.figures.tree_costs import TreeLoad
from pinyon_lab.papers import FIGURES, Result, Workload, dualmap, feather, skywalker
from pinyon_lab.papers.skywalker.runs import RegionLoad
from pinyon_lab.traces import TraceRow
from tests.long import usually

SHARED = Path(__file__).resolve().parents[3] / "shared"
TEXTS = {"wild": "kvcache_in_the_wild"}
"""The names of papers' texts, where they are not the paper's."""


def ticking() -> Clock:
    """Returns a clock that advances by a µs with each reading."""
    ticks = count()
    return lambda: 1_000 * next(ticks)


def asked(name: str, requests: int = 70) -> Workload:
    """Returns requests of which most begin alike, for systems of several instances."""
    rng, rows = random.Random(name), []
    for number in range(requests):
        first = rng.choice([0, 0, 0, 1 + number % 7])
        shared = [100 * first + each for each in range(1, rng.randint(2, 8))]
        own = [1000 * number + 1000 + each for each in range(rng.randint(1, 9))]
        blocks = (first, *shared, *own)
        rows.append(TraceRow(number / 10, 512 * len(blocks) - rng.randint(0, 500), rng.randint(1, 60), blocks))
    return Workload(name, rows, 512, generated=name == "toolagent")


def poisson(name: str) -> Workload:
    """Returns requests of one in a second, all of which begin alike."""
    rng = random.Random(name)
    rows, now_s = [], 0.0
    for number in range(usually(36, long=60)):
        now_s += rng.expovariate(1.0)
        blocks = (*range(rng.randint(1, 20)), *(10_000 + 100 * number + each for each in range(rng.randint(1, 30))))
        rows.append(TraceRow(now_s, 512 * len(blocks) - rng.randint(0, 500), rng.randint(1, 60), blocks))
    return Workload(name, rows, 512, generated=name == "toolagent")


def popular(name: str) -> Workload:
    """Returns 4,000 requests that all begin with the same block.

    One request in three begins with a prefix of 6 blocks, one in three with a prefix of 13 blocks."""
    rows = []
    for number in range(4000):
        prefix = (0, *range(10, 15)) if number % 3 == 0 else (0, *range(20, 32)) if number % 3 == 1 else (0,)
        blocks = (*prefix, *range(1000 * number + 100, 1000 * number + 103))
        rows.append(TraceRow(float(number), 512 * len(blocks), 1, blocks))
    return Workload(name, rows, 512, generated=name == "toolagent")


def short(load: RegionLoad) -> RegionLoad:
    """Returns the load with a tenth of its clients and 18 seconds."""
    clients = tuple((region, max(1, count // 10)) for region, count in load.clients)
    return replace(load, clients=clients, warm_s=5.0, until_s=18.0)


DUALMAP = (
    (dualmap.structure, {"PER_INSTANCE": 200}),
    (dualmap.runs, {"SEEDS": 1, "SAMPLE_S": 0.5, "WARM_UP": 20, "REQUESTS": dict.fromkeys(dualmap.runs.REQUESTS, 70)}),
    (dualmap.serving, {"WARM_UP": 20, "RATES": dict.fromkeys(dualmap.serving.RATES, (6.0, 20.0))}),
    (dualmap.elastic, {"WARM_UP": 20, "SIZES": (8, 16), "REQUESTS_EACH": 15, "RATES_EACH": (2.0,), "CALM_S": 60.0}),
)
FEATHER = (
    (feather.runs, {"REQUESTS": usually(10, long=16)}),
    (
        feather.batches,
        {
            "REQUESTS": usually(14, long=24),
            "OUTPUT_TOKENS": 10,
            "PREFIX": 1_000,
            "SHARES": (0.0, 0.1, 1.0),
            "FRACTIONS": (0.0, 0.5, 1.0),
            "GROUPS": (1, 2, 10, 20, 50, 100),
            "SMALL_PREFIXES": (100, 1_000),
            "SIZES": (5, 20),
            "EACH": 8,
            "SPLITS": (1, 8, 16, 32),
            "OUTPUTS": (1, 10),
        },
    ),
    (feather.load, {"RATES": (10, 100), "MAX_BATCH": 16, "PREFIXES": (500, 1_000)}),
    (
        feather.learning,
        {
            "CONVERGING_REQUESTS": usually(20, long=40),
            "ALONE_REQUESTS": usually(15, long=30),
            "ALONE_RATES": (2,),
            "PHASES": ((2.0, 20.0), (4.0, 10.0)),
            "LEARNING_RATES": (3, 10, 100),
        },
    ),
    (
        feather.costs,
        {
            "REQUESTS": usually(10, long=20),
            "CHUNK_REQUESTS": usually(10, long=20),
            "LENGTHS": (320, 640),
            "PREFIXES": (320, 640),
            "TREE": TreeLoad(20, 300, 60, 50),
        },
    ),
    (
        feather.systems,
        {
            "OFFLINE_REQUESTS": usually(10, long=16),
            "RATES": (100,),
            "STALLED_RATES": (10, 100),
            "PREFIXES": (320, 640),
            "TREE_PREFIXES": (320, 640),
        },
    ),
)
SKYWALKER = (
    (RegionLoad, {"quick": short}),
    (skywalker.serving, {"LIMITS": (20, 50)}),
    (skywalker.sharing, {"PROGRAMS": 150}),
)
SMALL: dict[str, tuple[tuple[Any, dict[str, Any]], ...]] = {
    "dualmap": DUALMAP,
    "feather": FEATHER,
    "skywalker": SKYWALKER,
}


@contextmanager
def small(paper: str) -> Iterator[None]:
    """Has a paper's figures made with few and short runs."""
    with pytest.MonkeyPatch.context() as patch:
        for where, changes in SMALL.get(paper, ()):
            for name, value in changes.items():
                patch.setattr(where, name, value)
        yield
    for runs in (dualmap.runs._ran, feather.runs._served, skywalker.runs._ran):
        runs.cache_clear()


EVERY = [
    name
    for name in FIGURES
    if not name.startswith("wild-") and name not in ("mooncake-fig9", "mooncake-fig10", "mooncake-table2")
]
"""The figures that have one small form; the others' tests have workloads of their own."""


def workload(figure: str, name: str) -> Workload:
    """Returns a figure's workload of that name."""
    if figure.startswith("mooncake"):
        return poisson(name)
    in_structure = figure in ("dualmap-fig6", "dualmap-table1")
    return popular(name) if in_structure else asked(name, 240 if figure == "dualmap-fig13" else 70)


@cache
def made(paper: str) -> dict[str, Result]:
    """Returns all of a paper's figures, by name."""
    results = {}
    with small(paper):
        for each in (FIGURES[name] for name in EVERY if name.startswith(f"{paper}-")):
            told: list[str] = []
            workloads = [workload(each.name, name) for name in (*each.needs, *each.likes)]
            results[each.name] = each.make(workloads, told.append, ticking(), quick=each.has_quick_way)
            assert told or not each.needs
    return results


def plain(text: str) -> str:
    """Returns a paper's text in one line, with each formula once: the extracted text has some twice, once as TeX."""
    text = re.sub(r"(\d+\.\d+)\1-", r"\1-", text)
    text = re.sub(r"(\d+(?:\.\d+)?)([×%])\1\\(?:times|%)", r"\1\2", text)
    return re.sub(r"\s+", " ", text.replace("’", "'"))


@cache
def text_of(paper: str) -> str:
    return plain((SHARED / "seeds" / f"{TEXTS.get(paper, paper)}.txt").read_text())
