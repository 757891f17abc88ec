"""The memory of blocks (§3.5): lifespans from the first use to the last (Figs. 19, 20), and sizes (Figs. 21, 22)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pinyon_lab.pictures import Course, Courses
from pinyon_lab.traces.analysis.columns import TraceColumns
from pinyon_lab.traces.analysis.figure import Heads, TraceFigure, Value, course
from pinyon_lab.traces.analysis.groups import Categories, Windows, types_by_turn
from pinyon_lab.traces.analysis.models import KV_HBM_FORMULA, MODELS
from pinyon_lab.traces.analysis.turns import WindowMeans
from pinyon_lab.traces.analysis.uses import Survey

SHOWN_LEAST_S = 0.1
STEP_BLOCKS = 1 << 20


def _spans_s(survey: Survey) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float64]]]:
    """Yields of each block the row that stored it and its lifespan, some blocks at a time to save memory."""
    blocks, time_s = survey.blocks, survey.columns.time_s
    for begin in range(0, len(blocks.first), STEP_BLOCKS):
        first, last = blocks.first[begin : begin + STEP_BLOCKS], blocks.last[begin : begin + STEP_BLOCKS]
        some = first >= 0
        yield first[some], time_s[last[some]] - time_s[first[some]]


def lifespans(figure: TraceFigure, survey: Survey) -> None:
    """Makes Fig. 19. A block that is never used again has lived for 0 s."""
    spans_s = np.empty(np.count_nonzero(survey.blocks.first >= 0))
    at = 0
    for _, some_s in _spans_s(survey):
        spans_s[at : at + len(some_s)] = some_s
        at += len(some_s)
    if not len(spans_s):
        return figure.without("no request has a block")
    figure.fact("blocks", "blocks", len(spans_s), ",")
    figure.fact("reused", "used again", float((survey.blocks.uses > 1).sum() / len(spans_s)), ".1%")
    figure.fact("mean_s", "mean", float(spans_s.mean()), "s")
    spans_s.sort()
    papers = {0.5: "", 0.9: "A 612 s, B 0.3 s (§3.5)", 0.99: "B 97 s (§1)", 1.0: "A 800 min, B 1,200 min (§3.5)"}
    for share, paper in papers.items():
        name = "max" if share == 1 else f"P{round(100 * share)}"
        value = float(spans_s[min(len(spans_s), max(1, int(np.ceil(share * len(spans_s))))) - 1])
        figure.fact(f"{name.lower()}_s", name, value, "s", paper)
    x = np.geomspace(SHOWN_LEAST_S, max(10 * SHOWN_LEAST_S, float(spans_s[-1])), 200)
    y = np.searchsorted(spans_s, x, side="right") / len(spans_s)
    figure.plots.append(Courses("Lifespan of blocks", "lifespan, s", "blocks up to it", [course("blocks", x, y)]))
    limits = (0.0, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0)
    rows = [(limit, float(np.searchsorted(spans_s, limit, side="right") / len(spans_s))) for limit in limits]
    figure.table("cdf", "blocks by lifespan", rows, lifespan_s=("s", "up to"), share=(".1%", "of blocks"))


def mean_lifespans(figure: TraceFigure, survey: Survey, categories: Categories, windows: Windows) -> None:
    """Makes Fig. 20, the mean by category and window of the request that stored the block."""
    means = WindowMeans(categories, windows)
    for first, spans_s in _spans_s(survey):
        means.add(first, spans_s)
    if not means.counts.any():
        return figure.without("no request has a block")
    means.show(figure, "mean lifespan", "s")
    figure.notes.append("Blocks that are stored near the trace's end have less time to be used again than others.")


GIB = 1 << 30


def request_sizes(figure: TraceFigure, columns: TraceColumns) -> None:
    """Makes Fig. 21, the KV of a request's prompt and answer against the HBM that an instance has for KV."""
    tokens = columns.input_tokens + columns.output_tokens
    shares = (0.5, 0.9, 0.99)
    rows: list[tuple[Value, ...]] = []
    lines: list[Course] = []
    groups = [("all", "all", np.ones(len(columns), bool)), *types_by_turn(columns)]
    for kind, turn, of in groups if len(groups) > 2 else groups[:1]:
        some = np.sort(tokens[of])
        for model in MODELS:
            each = model.token_bytes / model.kv_hbm_bytes
            quantiles = (np.quantile(some, shares, method="inverted_cdf") * each).tolist()
            rows.append((kind, turn, model.name, len(some), float(some.mean()), float(some.mean() * each), *quantiles))
            if kind == "all":
                at = np.unique(np.linspace(0, len(some) - 1, 300).astype(np.int64))
                x = np.maximum(some[at], 1) * each * 100
                lines.append(course(model.name, x, (at + 1) / len(some)))
    heads: Heads = {"type": "", "turn": "", "model": "", "requests": ",", "mean_tokens": (",.0f", "mean tokens")}
    percentiles = {f"p{100 * share:.0f}": (".2%", f"P{100 * share:.0f}") for share in shares}
    figure.table("sizes", "share of the HBM for KV", rows, **heads, mean=".2%", **percentiles)
    of_models = [(each.name, each.token_bytes, each.gpus, each.kv_hbm_bytes, each.source) for each in MODELS]
    heads = {"model": "", "token_bytes": (",", "bytes a token"), "gpus": ("", "GPUs")}
    heads |= {"kv_hbm_bytes": (",.0f", "HBM for KV, bytes"), "source": ("", "bytes a token are")}
    figure.table("models", "models, on A800-80GB", of_models, **heads)
    figure.notes += [
        KV_HBM_FORMULA,
        "The paper, A's text requests on Qwen2-7B: mean 0.09 % single-turn, 0.56 % multi-turn; P50, P90, P99 0.09, "
        "0.15, 0.37 % and 0.36, 1.31, 2.21 %; mean tokens 973 and 5,953 (§3.5).",
    ]
    figure.plots.append(Courses("KV of a request", "% of the HBM for KV", "requests up to it", lines))


def ideal_capacity(figure: TraceFigure, survey: Survey, windows: Windows) -> None:
    """Makes Fig. 22, the blocks that are there and will be used again, after each request."""
    columns, blocks = survey.columns, survey.blocks
    reused = blocks.uses > 1
    if not reused.any():
        return figure.without("no block is used again")
    live = np.cumsum(
        np.bincount(blocks.first[reused], minlength=len(columns))
        - np.bincount(blocks.last[reused], minlength=len(columns))
    )
    peak = np.zeros(len(windows), np.int64)
    np.maximum.at(peak, windows.of, live)
    # a window without a request holds what the one before left
    last = np.full(len(windows), -1, np.int64)
    last[windows.of] = live
    for at in np.flatnonzero(last < 0).tolist():
        last[at] = peak[at] = last[at - 1]
    most = int(live.max())
    figure.fact("peak_blocks", f"most blocks of {columns.block_tokens} tokens", most, ",")
    figure.fact("peak_tokens", "as tokens", most * columns.block_tokens, ",")
    figure.fact("peak_at_s", "at, since the trace began", float(columns.time_s[live.argmax()] - columns.time_s[0]), "s")
    rows: list[tuple[Value, ...]] = []
    lines = []
    for model in MODELS:
        block_bytes = model.token_bytes * columns.block_tokens
        ratio = most * block_bytes / model.kv_hbm_bytes
        paper = "A 4 (§3.5)" if model.name == "Llama3-70B" else ""
        rows.append((model.name, most * block_bytes / GIB, ratio, paper))
        lines.append(course(model.name, windows.starts_s, peak * block_bytes / model.kv_hbm_bytes))
    heads = {"peak_gib": (",.1f", "most, GiB"), "peak_ratio": (",.2f", "× HBM for KV")}
    figure.table("models", "at its most", rows, model="", **heads, paper="")
    by_window = zip(windows.labels(), peak.tolist(), strict=True)
    figure.table("windows", "by window", by_window, start=("", "from"), peak_blocks=(",", "most blocks"))
    figure.notes += [
        KV_HBM_FORMULA,
        "All requests against the HBM of one instance, however many they need: the paper takes the most that one "
        "instance serves (pinyon trace scale). Answers count once they are in a later prompt.",
    ]
    figure.plots.append(Courses("Blocks that will be used again", "time", "× HBM for KV", lines, form="g", time=True))
