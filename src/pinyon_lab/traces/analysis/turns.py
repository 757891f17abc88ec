"""Sessions and their turns: Figs. 9 to 11 (§3.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pinyon_lab.pictures import Course, Courses, Heat
from pinyon_lab.traces.analysis.columns import TraceColumns
from pinyon_lab.traces.analysis.figure import TraceFigure, course
from pinyon_lab.traces.analysis.groups import Categories, Windows
from pinyon_lab.traces.analysis.hits import NO_USERS

NO_SESSIONS = "the trace names no chats, so that it has no sessions"
SHARES = (0.5, 0.9, 0.99, 1.0)


def _turns_of_sessions(columns: TraceColumns) -> NDArray[np.int64]:
    """Returns the last turn of each session, also of those that began before the trace."""
    known = columns.session >= 0
    turns = np.zeros(columns.sessions, np.int64)
    np.maximum.at(turns, columns.session[known], columns.turn[known])
    return turns


def turn_numbers(figure: TraceFigure, columns: TraceColumns) -> None:
    """Makes Fig. 9, the turns of requests and of sessions."""
    if not columns.has_turns:
        return figure.without(NO_SESSIONS)
    of_requests = columns.turn[columns.turn > 0]
    named = (("P50", "1"), ("P90", "5"), ("P99", ""), ("max", "232"))
    for (name, paper), value in zip(named, _upper(of_requests, SHARES), strict=True):
        key = f"request_{name.lower()}"
        figure.fact(key, f"turn of a request, {name}", value, ",", f"A {paper} (§3.3)" if paper else "")
    single = float((of_requests == 1).mean())
    figure.fact("single_share", "requests that are the first of their session", single, ".1%", "A 54 % (§3.3)")
    lines = [_cdf("requests", of_requests)]
    if columns.sessions:
        of_sessions = _turns_of_sessions(columns)
        figure.fact("sessions", "sessions", columns.sessions, ",")
        for (name, _), value in zip(named, _upper(of_sessions, SHARES), strict=True):
            figure.fact(f"session_{name.lower()}", f"turns of a session, {name}", value, ",")
        figure.fact("session_single", "sessions of one turn", float((of_sessions == 1).mean()), ".1%")
        lines.append(_cdf("sessions", of_sessions))
    turns, requests = np.unique(of_requests, return_counts=True)
    share = (np.cumsum(requests) / requests.sum()).tolist()
    rows = zip(turns.tolist(), requests.tolist(), share, strict=True)
    figure.table("turns", "requests by turn", rows, turn=",", requests=",", share=(".1%", "up to it"))
    figure.plots.append(Courses("Turns", "turn", "up to it", lines))


def _upper(values: NDArray[np.signedinteger], shares: tuple[float, ...]) -> list[int]:
    """Returns the least values that at least these shares do not exceed."""
    found: list[int] = np.quantile(values, shares, method="inverted_cdf").astype(np.int64).tolist()
    return found


def _cdf(label: str, values: NDArray[np.signedinteger]) -> Course:
    unlike, counts = np.unique(values, return_counts=True)
    return course(label, unlike, np.cumsum(counts) / counts.sum())


def turns_by_user(figure: TraceFigure, columns: TraceColumns) -> None:
    """Makes Fig. 10, the mean and standard deviation of the turns of a user's sessions."""
    if not columns.users or not columns.sessions:
        return figure.without(NO_USERS if columns.sessions else NO_SESSIONS)
    turns = _turns_of_sessions(columns).astype(np.float64)
    owner = np.full(columns.sessions, -1, np.int64)
    known = columns.session >= 0
    owner[columns.session[known][::-1]] = columns.user[known][::-1]  # the user of a session's first request
    turns, owner = turns[owner >= 0], owner[owner >= 0]
    if not len(owner):
        return figure.without(NO_USERS)
    sessions = np.bincount(owner, minlength=columns.users)
    some = sessions > 0
    mean = np.bincount(owner, turns, columns.users)[some] / sessions[some]
    # the mean of squared distances, as a difference of squares would lose what is small
    per_user = np.zeros(columns.users)
    per_user[some] = mean
    deviation = np.sqrt(np.bincount(owner, (turns - per_user[owner]) ** 2, columns.users)[some] / sessions[some])
    top = np.sort(mean)[::-1][: max(1, round(len(mean) / 10))]
    figure.fact("users", "users", len(mean), ",")
    figure.fact("mean", "mean of the users' means", float(mean.mean()), ".2f")
    printed = "A 8.9 × (§3.3)"
    figure.fact("top_tenth", "top 10 % of the users against it", float(top.mean() / mean.mean()), ".2f", printed)
    printed = "A up to 44 (§3.3)"
    figure.fact("deviation_max", "largest standard deviation", float(deviation.max()), ".1f", printed)
    shares = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
    by_share = (np.quantile(each, shares, method="inverted_cdf").tolist() for each in (mean, deviation))
    rows = zip(shares, *by_share, strict=True)
    figure.table("quantiles", "users, by either", rows, share=(".0%", "users up to"), mean=".2f", deviation=".2f")
    at = np.unique(np.linspace(0, len(mean) - 1, 200).astype(np.int64))
    x = (at + 1) / len(mean)
    lines = [course(label, x, np.sort(each)[at]) for label, each in (("mean", mean), ("deviation", deviation))]
    title, users = "Turns by user", "users, in order of each"
    figure.plots.append(Courses(title, users, "turns of a session", lines, form="g", linear=True))


def next_turns(figure: TraceFigure, columns: TraceColumns, categories: Categories, windows: Windows) -> None:
    """Makes Fig. 11, the frequency of a next turn by category and window of a request's arrival."""
    if not columns.sessions:
        return figure.without(NO_SESSIONS)
    followed = np.zeros(len(columns), np.float64)
    followed[columns.parent[columns.parent >= 0]] = 1.0
    for key, label, of, paper in (
        ("single", "single-turn requests that a next turn follows", columns.turn == 1, "A 0.5 (§3.3)"),
        ("multi", "multi-turn requests that a next turn follows", columns.turn > 1, "A 0.8 (§3.3)"),
    ):
        figure.fact(key, label, float(followed[of].mean()) if of.any() else None, ".2f", paper)
    figure.notes.append("A request near the trace's end has less time to be followed than others.")
    means = WindowMeans(categories, windows)
    means.add(np.arange(len(columns), dtype=np.int32), followed)
    means.show(figure, "frequency", ".2f")


class WindowMeans:
    """The mean of a value by category and window of a request."""

    def __init__(self, categories: Categories, windows: Windows) -> None:
        self._categories = categories
        self._windows = windows
        self._shape = (len(categories.names), len(windows))
        self.counts = np.zeros(self._shape, np.int64)
        self._sums = np.zeros(self._shape)

    def add(self, rows: NDArray[np.int32], values: NDArray[np.float64]) -> None:
        """Adds a value for each of these requests; a request may have several."""
        cells = self._categories.of[rows].astype(np.int64) * len(self._windows) + self._windows.of[rows]
        self.counts += np.bincount(cells, minlength=self.counts.size).reshape(self._shape)
        self._sums += np.bincount(cells, values, self.counts.size).reshape(self._shape)

    def show(self, figure: TraceFigure, what: str, form: str) -> None:
        """Adds the mean over all, its spread, and the mean of each window to ``figure``."""
        names, counts, sums = self._categories.names, self.counts, self._sums
        means = np.divide(sums, counts, out=np.full(self._shape, np.nan), where=counts > 0)
        rows = []
        for name, count, total, line in zip(names, counts, sums, means, strict=True):
            some = line[count > 0]
            if len(some):
                least, most = float(some.min()), float(some.max())
                rows.append((name, int(count.sum()), float(total.sum() / count.sum()), least, most))
        heads = {"count": (",", "number"), "mean": (form, what), "min": (form, "least window")}
        figure.table("categories", "by category", rows, category="", **heads, max=(form, "greatest window"))
        labels = self._windows.labels()
        none_as_none = [[None if np.isnan(each) else each for each in line] for line in means.tolist()]
        by_window = zip(labels, *none_as_none, strict=True)
        figure.table("windows", "by window", by_window, start=("", "from"), **dict.fromkeys(names, form))
        drawn = list(zip(names, none_as_none, strict=True))
        figure.plots.append(Heat(figure.title, "time", what, labels, drawn))
