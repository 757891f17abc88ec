"""The answers of an unlimited cache by receiver: Figs. 4 to 8 (§3.2), and DualMap's Fig. 14 (A.5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pinyon_lab.pictures import Bars, Courses, Heat
from pinyon_lab.traces.analysis.columns import NO_TURNS, Floats, TraceColumns
from pinyon_lab.traces.analysis.figure import Heads, TraceFigure, course
from pinyon_lab.traces.analysis.groups import Windows
from pinyon_lab.traces.analysis.uses import Step, Survey

CDF_POINTS = 101


def _hit_tokens(survey: Survey) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns the hit tokens of each request; a last block that is not full counts as far as there are tokens."""
    columns = survey.columns
    return np.minimum(survey.hits.astype(np.int64) * columns.block_tokens, columns.input_tokens)


def hit_ratio(figure: TraceFigure, survey: Survey, windows: Windows) -> None:
    """Makes Fig. 4, hits over the day. A hit is a block of the longest leading run that earlier requests had."""
    columns = survey.columns
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
    known = [each if some else None for each, some in zip(ratio.tolist(), by_window, strict=True)]
    counts = (each.tolist() for each in (requests, by_window, hits_by_window))
    rows = zip(windows.labels(), *counts, known, strict=True)
    heads: Heads = {"start": ("", "from"), "requests": ",", "blocks": ",.0f", "hit_blocks": (",.0f", "hits")}
    figure.table("windows", "by window", rows, **heads, hit_ratio=(".1%", "hit ratio"))
    x = windows.starts_s
    peak = max(1.0, float(by_window.max()))
    lines = (
        course("accessed (1 = most in a window)", x, by_window / peak),
        course("hit (same scale)", x, hits_by_window / peak),
        course("hit ratio", x, ratio),
    )
    figure.plots.append(Courses("Ideal hit ratio", "time", "blocks, share", lines, time=True))


def request_types(figure: TraceFigure, survey: Survey) -> None:
    """Makes Fig. 5: the share of each type, of later turns in each, and of the hits."""
    columns = survey.columns
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
    heads = {"share": (".1%", "of requests"), "multi_turn": (".2%", "multi-turn"), "hits": (".1%", "of hits")}
    figure.table("types", "by type", rows, type="", **heads)
    figure.notes.append(
        "The paper's Fig. 5: text 78 % of A (47 % multi-turn), file 4 % (51 %), multimodal 3 % (10 %), search 15 % "
        "(49 %); API 100 % of B (0.08 %)."
    )
    names = [row[0] for row in rows[:12]]
    shares = zip(*(row[1:] for row in rows[:12]), strict=True)
    bars = dict(zip(("requests", "multi-turn", "hits"), shares, strict=True))
    figure.plots.append(Bars("Types of requests", "share", names, bars))


def shared_prefix(figure: TraceFigure, survey: Survey) -> None:
    """Makes DualMap's Fig. 14: the share of its prompt that a request has in common with an earlier one."""
    columns = survey.columns
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
    rows = zip(points.tolist(), cdf.tolist(), strict=True)
    figure.table("cdf", "requests by rate", rows, rate=(".0%", "rate up to"), share=(".1%", "of requests"))
    figure.notes.append(
        f"Known to a block of {columns.block_tokens} tokens: what two prompts share of one that differs is not seen."
    )
    lines = [course("requests", points, cdf)]
    figure.plots.append(Courses("Shared prefix rate", "share of the prompt", "requests up to that", lines, linear=True))


GRID = 40
NO_USERS = "the trace names no users"


def share_with(values: Floats, share: float) -> float | None:
    """Returns the least share of all elements that together have ``share`` of the sum."""
    total = values.sum()
    if not total:
        return None
    ranked = np.cumsum(np.sort(values)[::-1])
    return float((np.searchsorted(ranked, share * total * (1 - 1e-12)) + 1) / len(values))


def _by_user(columns: TraceColumns, values: NDArray[np.int32] | None = None) -> Floats:
    known = columns.user >= 0
    weights = None if values is None else values[known]
    return np.bincount(columns.user[known], weights, columns.users).astype(np.float64)


def _cumulative(values: Floats) -> tuple[list[float], list[float]]:
    """Returns at most some 200 points of the cumulative share, greatest first."""
    ranked = np.cumsum(np.sort(values)[::-1]) / max(1.0, float(values.sum()))
    at = np.unique(np.linspace(0, len(values) - 1, 201).astype(np.int64))
    return [0.0, *((at + 1) / len(values)).tolist()], [0.0, *ranked[at].tolist()]


class CrossUser:
    """Fig. 6: hits by user and owner of the block, which is the user whose request stored it, the first that had it."""

    def __init__(self, columns: TraceColumns) -> None:
        self._user = columns.user
        self._users = columns.users
        requests = _by_user(columns)
        rank = np.empty(columns.users, np.int64)
        rank[np.argsort(-requests, kind="stable")] = np.arange(columns.users)
        self._size = min(GRID, columns.users)
        self._group = rank * self._size // max(1, columns.users)
        """The group of each user: all are equally large, and the first has the users with the most requests."""
        self._grid = np.zeros(self._size * self._size)
        self._own = self._other = 0

    def take(self, step: Step) -> None:
        runs = step.runs
        user, owner = self._user[runs.row], self._user[runs.stored]
        known = (user >= 0) & (owner >= 0)
        user, owner, count = user[known], owner[known], runs.blocks[known]
        own = int(count[user == owner].sum())
        self._own += own
        self._other += int(count.sum()) - own
        cell = self._group[user] * self._size + self._group[owner]
        self._grid += np.bincount(cell, count, len(self._grid))

    def figure(self, figure: TraceFigure) -> None:
        if not self._users:
            return figure.without(NO_USERS)
        total = self._own + self._other
        figure.fact("users", "users", self._users, ",")
        figure.fact("own", "hits on blocks that the same user stored", self._own / max(1, total), ".1%", "most (§3.2)")
        figure.fact("other", "hits on another user's blocks", self._other / max(1, total), ".1%", "rare (§3.2)")
        grid = (self._grid / max(1.0, self._grid.max())).reshape(self._size, self._size)
        heads = {f"of_{at}": (".3f", str(at)) for at in range(self._size)}
        rows = [(at, *line) for at, line in enumerate(grid.tolist())]
        each = self._users / self._size
        title = f"hits by a group of users (down) on blocks of another (across), 1 = most; {each:.3g} users a group"
        figure.table("grid", title, rows, by=("", "group"), **heads)
        figure.notes.append(
            f"Users are ranked by requests and put into {self._size} groups of equal size; the diagonal holds hits "
            "within a group, the facts above tell users apart. Colours are those of the square root, so that what is "
            "rare shows."
        )
        drawn = [(str(at) if at % 5 == 0 else "", np.sqrt(line).tolist()) for at, line in enumerate(grid)]
        across = [str(at) if at % 5 == 0 else "" for at in range(self._size)]
        figure.plots.append(Heat("Who hits whose blocks", "stored by (group of users)", "√ of hits", across, drawn))


def hits_by_user(figure: TraceFigure, survey: Survey) -> None:
    """Makes Fig. 7, the concentration of hits on few users; and the skew of blocks (§1)."""
    columns = survey.columns
    reuses = survey.blocks.uses[survey.blocks.uses > 0] - 1
    top, total = max(1, round(len(reuses) / 10)), int(reuses.sum())
    reuses.partition(len(reuses) - top)
    most = float(reuses[-top:].sum() / total) if total else None
    figure.fact("top_tenth_of_blocks", "reuses on the most reused 10 % of the blocks", most, ".1%", "77 % (§1)")
    by_request = survey.hits.astype(np.float64)
    figure.fact("requests_for_90", "requests with 90 % of the hits", share_with(by_request, 0.9), ".1%")
    lines = [course("requests", *_cumulative(by_request))]
    if columns.users:
        by_user = _by_user(columns, survey.hits)
        printed = "A 19 %, B 4 % (§3.2)"
        figure.fact("users", "users", columns.users, ",")
        figure.fact("users_for_90", "users with 90 % of the hits", share_with(by_user, 0.9), ".1%", printed)
        figure.fact("users_for_50", "users with 50 % of the hits", share_with(by_user, 0.5), ".1%")
        lines.append(course("users", *_cumulative(by_user)))
        _rank(figure, "hits", by_user)
        figure.notes.append(
            "The paper says “of the user requests”: both users and requests, each ranked by hits, are given."
        )
    else:
        figure.notes.append(NO_USERS[0].upper() + NO_USERS[1:] + ": only requests and blocks are ranked.")
    figure.plots.append(Courses("Cumulative hits", "share, most hits first", "of the hits", lines, linear=True))


def requests_by_user(figure: TraceFigure, columns: TraceColumns) -> None:
    """Makes Fig. 8."""
    if not columns.users:
        return figure.without(NO_USERS)
    requests = _by_user(columns)
    figure.fact("users", "users", columns.users, ",")
    figure.fact("users_for_50", "users with 50 % of the requests", share_with(requests, 0.5), ".1%", "A 19 % (§3.2)")
    printed = "A 72 %, B 15 % (§3.2)"
    figure.fact("users_for_90", "users with 90 % of the requests", share_with(requests, 0.9), ".1%", printed)
    _rank(figure, "requests", requests)
    lines = [course("requests", *_cumulative(requests))]
    title, users = "Cumulative requests", "users, most requests first"
    figure.plots.append(Courses(title, users, "of the requests", lines, linear=True))


def _rank(figure: TraceFigure, what: str, values: Floats) -> None:
    rows = zip(*_cumulative(values), strict=True)
    figure.table("cumulative", f"most {what} first", rows, users=".1%", **{what: (".1%", f"of the {what}")})
