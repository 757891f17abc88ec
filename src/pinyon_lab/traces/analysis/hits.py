"""What an unlimited cache would answer: Figs. 4 and 5 (§3.2), and DualMap's Fig. 14 (A.5)."""

from __future__ import annotations

import numpy as np

from pinyon_lab.pictures import Bars, Courses
from pinyon_lab.traces.analysis.columns import NO_TURNS
from pinyon_lab.traces.analysis.figure import Column, Figure, Table, course
from pinyon_lab.traces.analysis.uses import Survey
from pinyon_lab.traces.analysis.windows import Windows

CDF_POINTS = 101


def _hit_tokens(survey: Survey) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Of each request; a last block that is not full counts as far as there are tokens."""
    columns = survey.columns
    return np.minimum(survey.hits.astype(np.int64) * columns.block_tokens, columns.input_tokens)


def hit_ratio(survey: Survey, windows: Windows) -> Figure:
    """Fig. 4: over the day; a hit is a block of the longest leading run that earlier requests had."""
    columns = survey.columns
    figure = Figure("4", "ideal hit ratio of an unlimited cache")
    accessed, hit = int(columns.lengths.sum()), int(survey.hits.sum())
    tokens, hit_tokens = int(columns.input_tokens.sum()), int(_hit_tokens(survey).sum())
    figure.fact("requests", "requests", len(columns), ",")
    figure.fact("blocks", f"blocks of {columns.block_tokens} tokens", accessed, ",")
    figure.fact("unique_blocks", "unlike", int((survey.blocks.first >= 0).sum()), ",")
    figure.fact("hit_blocks", "hits", hit, ",")
    figure.fact("hit_ratio", "hit ratio, of blocks", hit / max(1, accessed), ".2%", "A 62 %, B 54 % (§3.2)")
    figure.fact("hit_ratio_tokens", "hit ratio, of prompt tokens", hit_tokens / max(1, tokens), ".2%")
    by_window = np.bincount(windows.of, columns.lengths, len(windows))
    hits_by_window = np.bincount(windows.of, survey.hits, len(windows))
    ratio = hits_by_window / np.maximum(1, by_window)
    requests = np.bincount(windows.of, minlength=len(windows))
    heads = (
        *(Column("start", "from"), Column("requests", "requests", ","), Column("blocks", "blocks", ",.0f")),
        *(Column("hit_blocks", "hits", ",.0f"), Column("hit_ratio", "hit ratio", ".1%")),
    )
    rows = zip(
        *(windows.labels(), requests.tolist(), by_window.tolist(), hits_by_window.tolist()),
        [each if some else None for each, some in zip(ratio.tolist(), by_window, strict=True)],
        strict=True,
    )
    figure.tables.append(Table("windows", "by window", heads, list(rows)))
    x = windows.starts_s
    peak = max(1.0, float(by_window.max()))
    lines = (
        course("accessed (1 = most in a window)", x, by_window / peak),
        course("hit (same scale)", x, hits_by_window / peak),
        course("hit ratio", x, ratio),
    )
    figure.plots.append(Courses("Ideal hit ratio", "time", "blocks, share", lines, time=True))
    return figure


def request_types(survey: Survey) -> Figure:
    """Fig. 5: how many of each type, how many of these in a later turn, and who has the hits."""
    columns = survey.columns
    figure = Figure("5", "types of requests and their multi-turn ratio")
    if not columns.has_turns:
        return figure.without(NO_TURNS)
    hits, total = max(1, int(survey.hits.sum())), len(columns)
    single = columns.turn == 1
    paper = "A 54 % (§3.3); B 99.9 % (Fig. 5)"
    figure.fact("single_share", "single-turn requests", float(single.mean()), ".1%", paper)
    figure.fact(
        "single_hits", "their share of the hits", float(survey.hits[single].sum() / hits), ".1%", "B 97 % (§3.2)"
    )
    rows: list[tuple[str, float, float, float]] = []
    for kind, name in enumerate(columns.kinds):
        of = columns.kind == kind
        multi = float((columns.turn[of] > 1).mean())
        rows.append((name or "request", float(of.sum() / total), multi, float(survey.hits[of].sum() / hits)))
    rows.sort(key=lambda row: -row[1])
    heads = (
        *(Column("type", "type"), Column("share", "of requests", ".1%")),
        *(Column("multi_turn", "multi-turn", ".2%"), Column("hits", "of hits", ".1%")),
    )
    figure.tables.append(Table("types", "by type", heads, list(rows)))
    figure.notes.append(
        "The paper's Fig. 5: text 78 % of A (47 % multi-turn), file 4 % (51 %), multimodal 3 % (10 %), search 15 % "
        "(49 %); API 100 % of B (0.08 %)."
    )
    names = [row[0] for row in rows[:12]]
    shares = zip(*(row[1:] for row in rows[:12]), strict=True)
    bars = dict(zip(("requests", "multi-turn", "hits"), shares, strict=True))
    figure.plots.append(Bars("Types of requests", "share", names, bars))
    return figure


def shared_prefix(survey: Survey) -> Figure:
    """DualMap's Fig. 14: the share of its prompt that a request has in common with an earlier one."""
    columns = survey.columns
    figure = Figure("dualmap-14", "shared prefix rate (DualMap, Fig. 14)")
    some = columns.input_tokens > 0
    if not some.any():
        return figure.without("no request has a prompt")
    rate = _hit_tokens(survey)[some] / columns.input_tokens[some]
    at_half = float((rate >= 0.5).mean())
    printed = "Conversation 48 %, Tool&Agent 76 % (A.5)"
    figure.fact("half_or_more", "requests that share half of their prompt or more", at_half, ".1%", printed)
    figure.fact("mean", "mean rate", float(rate.mean()), ".1%")
    figure.fact("nothing", "requests that share nothing", float((rate == 0).mean()), ".1%")
    points = np.linspace(0, 1, CDF_POINTS)
    # x <= point: a rate is a fraction of tokens, far coarser than the rounding of a point
    cdf = np.searchsorted(np.sort(rate), points + 1e-12, side="right") / len(rate)
    heads = (Column("rate", "rate up to", ".0%"), Column("share", "of requests", ".1%"))
    figure.tables.append(Table("cdf", "requests by rate", heads, list(zip(points.tolist(), cdf.tolist(), strict=True))))
    figure.notes.append(
        f"Known to a block of {columns.block_tokens} tokens: what two prompts share of one that differs is not seen."
    )
    lines = [course("requests", points, cdf)]
    figure.plots.append(Courses("Shared prefix rate", "share of the prompt", "requests up to that", lines, linear=True))
    return figure
