"""Every figure against counting by hand, one block at a time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.analysis import TraceFigure, analyse, read_columns, uses
from pinyon_lab.traces.analysis.models import MODELS
from pinyon_lab.traces.analysis.reuse import EDGES_S, bins_of, ks_exponential, quantile_s
from tests.long import usually

BLOCK = 16
KINDS = ("text", "file")
USERS = ("u", "v", "w")


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRow]:
    """Returns rows out of order, with equal times, forks, missing parents, repeated ids, and no prefix rule."""
    rows: list[TraceRow] = []
    wide = draw(st.sampled_from((1, (1 << 60) + 7)))
    for number in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(["", "", "gone", *(row.chat for row in rows)]))
        turn = next((row.turn for row in rows if row.chat == parent), 1) + 1 if parent else 1
        blocks = tuple(wide * each for each in draw(st.lists(st.integers(0, 6), max_size=12)))
        tokens = max(0, BLOCK * len(blocks) - draw(st.integers(0, BLOCK - 1)))
        time_s = draw(st.sampled_from((0, 1, 1, 2, 700, 5000))) + len(rows) * draw(st.sampled_from((0, 3)))
        who = draw(st.sampled_from(USERS))
        kind = draw(st.sampled_from(KINDS))
        rows.append(TraceRow(float(time_s), tokens, number % 5, blocks, kind, turn, f"c{number}", parent, who))
    return rows


class Naive:
    """The hits of an unlimited cache, computed with dictionaries."""

    def __init__(self, rows: list[TraceRow]) -> None:
        order = sorted(range(len(rows)), key=lambda at: rows[at].time_s)
        self.rows = [rows[at] for at in order]
        place = {at: new for new, at in enumerate(order)}
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.uses: Counter[int] = Counter()
        self.hits: list[int] = []
        self.reuses: list[tuple[int, int, int]] = []
        """The row, the row before, and the row that stored it, for each hit."""
        self.cells: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * len(rows))
        """The number of blocks found, per row, by offset and stride."""
        parts: dict[int, set[int]] = defaultdict(set)
        for at, row in enumerate(self.rows):
            hit = 0
            while hit < len(row.blocks) and row.blocks[hit] in self.first:
                block = row.blocks[hit]
                self.reuses.append((at, self.last[block], self.first[block]))
                hit += 1
            self.hits.append(hit)
            for offset in range(10):
                for stride in range(1, 11 - offset):
                    found = sum(bool(parts[block] & set(range(offset, offset + stride))) for block in row.blocks)
                    self.cells[offset, stride][at] = found
            for index, block in enumerate(row.blocks):
                self.first.setdefault(block, at)
                self.last[block] = at
                parts[block].add(10 * index // len(row.blocks))
            self.uses.update(set(row.blocks))
        # Sessions and their turns, in the order of the file.
        chats = {row.chat: at for at, row in enumerate(rows)}
        self.session_turns: dict[str, int] = {}
        self.session_user: dict[str, str] = {}
        for at in order:
            root = rows[at]
            name = root.chat
            while root.parent:
                name = root.parent
                if root.parent not in chats:
                    break
                root = rows[chats[root.parent]]
                name = root.chat
            self.session_turns[name] = max(self.session_turns.get(name, 0), rows[at].turn)
            self.session_user.setdefault(name, rows[at].user)
        self.followed = {place[chats[row.parent]] for row in rows if row.parent in chats}

    def time(self, at: int) -> float:
        return self.rows[at].time_s


def by_number(rows: list[TraceRow], step: int = 7) -> dict[str, TraceFigure]:
    with mock.patch.object(uses, "STEP_IDS", step):
        return {figure.number: figure for figure in analyse(read_columns(rows, BLOCK, 1 << 30))}


def table(figure: TraceFigure, key: str) -> list[dict[str, object]]:
    rows = figure.json()[key]
    assert isinstance(rows, list)
    return rows


def close(value: object, expected: float) -> bool:
    assert isinstance(value, int | float)
    return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)


def least_share(values: list[int], share: float) -> float:
    ranked, total, count = sorted(values, reverse=True), 0, 0
    while total < share * sum(values) - 1e-9:
        total += ranked[count]
        count += 1
    return count / len(values)


@settings(max_examples=usually(20, long=120), deadline=None)
@given(traces(), st.integers(1, 40))
def test_hits_users_and_turns(rows: list[TraceRow], step: int) -> None:
    figures, naive = by_number(rows, step), Naive(rows)
    blocks = sum(len(row.blocks) for row in rows)
    if not blocks:
        assert figures["4"].left_out
        return
    hits = sum(naive.hits)
    four = figures["4"].json()
    assert (four["requests"], four["blocks"], four["unique_blocks"], four["hit_blocks"]) == (
        *(len(rows), blocks, len(naive.first)),
        hits,
    )
    tokens = [min(hit * BLOCK, row.input_tokens) for hit, row in zip(naive.hits, naive.rows, strict=True)]
    assert close(four["hit_ratio_tokens"], sum(tokens) / sum(row.input_tokens for row in rows))
    by_window: Counter[int] = Counter()
    for at, hit in enumerate(naive.hits):
        by_window[int(naive.time(at) // 600)] += hit
    windows = table(figures["4"], "windows")
    first = int(naive.time(0) // 600)
    assert [each["hit_blocks"] for each in windows] == [by_window[first + at] for at in range(len(windows))]

    for each in table(figures["5"], "types"):
        of = [at for at, row in enumerate(naive.rows) if row.kind == each["type"]]
        assert close(each["share"], len(of) / len(rows))
        assert close(each["multi_turn"], sum(naive.rows[at].turn > 1 for at in of) / len(of))
        assert close(each["hits"], sum(naive.hits[at] for at in of) / max(1, hits))

    user = [row.user for row in naive.rows]
    names = list(dict.fromkeys(row.user for row in rows))
    requests = Counter(user)
    own = sum(user[at] == user[stored] for at, _, stored in naive.reuses)
    assert close(figures["6"].json()["own"], own / max(1, hits))
    ranked = sorted(names, key=lambda name: -requests[name])
    pairs = Counter((user[at], user[stored]) for at, _, stored in naive.reuses)
    for by, line in zip(ranked, figures["6"].tables[0].rows, strict=True):
        most = max(pairs.values(), default=1)
        assert list(line[1:]) == pytest.approx([pairs[by, of] / most for of in ranked])

    by_user = [sum(hit for hit, who in zip(naive.hits, user, strict=True) if who == name) for name in names]
    seven = figures["7"].json()
    if hits:
        assert close(seven["users_for_90"], least_share(by_user, 0.9))
        assert close(seven["requests_for_90"], least_share(naive.hits, 0.9))
    reused = sorted((count - 1 for count in naive.uses.values()), reverse=True)
    if sum(reused):
        assert close(seven["top_tenth_of_blocks"], sum(reused[: max(1, round(len(reused) / 10))]) / sum(reused))
    assert close(figures["8"].json()["users_for_90"], least_share(list(requests.values()), 0.9))

    nine = figures["9"].json()
    turns = sorted(row.turn for row in rows)
    assert nine["request_p90"] == turns[math.ceil(0.9 * len(turns) - 1e-9) - 1]
    assert nine["request_max"] == turns[-1]
    assert (nine["sessions"], nine["session_max"]) == (len(naive.session_turns), max(naive.session_turns.values()))
    of_user = defaultdict(list)
    for session, who in naive.session_user.items():
        of_user[who].append(naive.session_turns[session])
    means = [np.mean(each) for each in of_user.values()]
    ten = figures["10"].json()
    assert close(ten["mean"], float(np.mean(means)))
    assert close(ten["deviation_max"], max(float(np.std(each)) for each in of_user.values()))

    for each in table(figures["11"], "categories"):
        of = [at for at, row in enumerate(naive.rows) if row.category == each["category"]]
        if each["category"] != "other":
            assert (each["count"], each["mean"]) == (
                len(of),
                pytest.approx(sum(at in naive.followed for at in of) / len(of)),
            )


@settings(max_examples=usually(20, long=120), deadline=None)
@given(traces(), st.integers(1, 40))
def test_reuse_times_locality_and_lifespans(rows: list[TraceRow], step: int) -> None:
    figures, naive = by_number(rows, step), Naive(rows)
    blocks = sum(len(row.blocks) for row in rows)
    if not blocks:
        assert figures["12"].left_out
        return
    times = sorted(naive.time(at) - naive.time(before) for at, before, _ in naive.reuses)
    if times:
        (line,) = table(figures["12"], "quantiles")
        assert line["reuses"] == len(times)
        for percent in (50, 90):
            exact = times[math.ceil(percent / 100 * len(times) - 1e-9) - 1]
            assert exact * (1 - 1e-12) <= line[f"p{percent}_s"] <= exact * 1.01  # type: ignore[operator]
        assert close(figures["12"].json()["within_600_s"], sum(each < 601 for each in times) / len(times))
    else:
        assert figures["12"].left_out
    single = [row.turn == 1 for row in naive.rows]
    pairs = [(at, before) for at, before, _ in naive.reuses if single[at] and single[before]]
    of_single = sum(len(row.blocks) for row in rows if row.turn == 1)
    assert close(figures["13"].json()["reused_blocks"], len(pairs) / max(1, of_single))
    if any(single):
        assert close(figures["13"].json()["reused_requests"], len({before for _, before in pairs}) / sum(single))
    multi = Counter(naive.rows[at].kind for at, *_ in naive.reuses if naive.rows[at].turn > 1)
    lines = [] if figures["14"].left_out else table(figures["14"], "quantiles")
    assert {line["requests"]: line["reuses"] for line in lines} == dict(multi)

    for number, chosen in (("16", None), ("17", False), ("18", True)):
        of = [at for at, each in enumerate(single) if chosen is None or each == chosen]
        for shown in figures[number].tables:
            name = shown.title.split(":")[0]
            kind = next((kind for kind in KINDS if name.startswith(kind)), None)
            some = [at for at in of if kind in (None, naive.rows[at].kind)]
            total = sum(len(naive.rows[at].blocks) for at in some)
            for stride, *cells in shown.rows:
                for offset, cell in enumerate(cells):
                    if cell is not None:
                        found = naive.cells[offset, int(stride) // 10]  # type: ignore[arg-type]
                        assert close(cell, sum(found[at] for at in some) / total)

    spans = sorted(naive.time(naive.last[block]) - naive.time(naive.first[block]) for block in naive.first)
    nineteen = figures["19"].json()
    assert nineteen["p90_s"] == spans[math.ceil(0.9 * len(spans) - 1e-9) - 1]
    assert close(nineteen["mean_s"], sum(spans) / len(spans))
    for each in table(figures["20"], "categories"):
        stored = [block for block, at in naive.first.items() if naive.rows[at].category == each["category"]]
        if each["category"] != "other":
            mean = sum(naive.time(naive.last[block]) - naive.time(naive.first[block]) for block in stored) / len(stored)
            assert (each["count"], each["mean"]) == (len(stored), pytest.approx(mean))

    live = [sum(naive.first[block] <= at < naive.last[block] for block in naive.first) for at in range(len(naive.rows))]
    if max(live):
        assert figures["22"].json()["peak_blocks"] == max(live)
        ratio = max(live) * BLOCK * MODELS[0].token_bytes / MODELS[0].kv_hbm_bytes
        assert close(table(figures["22"], "models")[0]["peak_ratio"], ratio)
    some = [at for at, row in enumerate(naive.rows) if row.input_tokens]
    half = [min(naive.hits[at] * BLOCK, naive.rows[at].input_tokens) >= naive.rows[at].input_tokens / 2 for at in some]
    assert close(figures["dualmap-14"].json()["half_or_more"], sum(half) / len(half))


@settings(max_examples=usually(20, long=60), deadline=None)
@given(traces())
def test_fits_and_sizes(rows: list[TraceRow]) -> None:
    with mock.patch("pinyon_lab.traces.analysis.reuse.REUSES_MIN", 1):
        figures, naive = by_number(rows), Naive(rows)
    if not figures["15"].left_out:
        reuses: dict[tuple[str, int], list[float]] = defaultdict(list)
        for at, before, _ in naive.reuses:
            hour = int(naive.time(before) // 3600)
            reuses[naive.rows[before].category, hour].append(naive.time(at) - naive.time(before))
        for each in table(figures["15"], "fits"):
            hours, minutes = str(each["hour"]).split(":")
            times = reuses[str(each["category"]), int(hours)]
            assert (each["reuses"], each["mean_s"]) == (len(times), pytest.approx(sum(times) / len(times)))
            assert minutes == "00"
    tokens = sorted(row.input_tokens + row.output_tokens for row in rows)
    line = table(figures["21"], "sizes")[0]
    assert close(line["mean_tokens"], sum(tokens) / len(tokens))
    p90 = tokens[math.ceil(0.9 * len(tokens) - 1e-9) - 1]
    assert close(line["p90"], p90 * MODELS[0].token_bytes / MODELS[0].kv_hbm_bytes)


@settings(max_examples=usually(20, long=60), deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0.01, 1))
def test_histogram(times: list[float], share: float) -> None:
    """Quantiles are exact to a class, and so is the distance of distributions to the fullest class."""
    counts = np.bincount(bins_of(np.array(times)), minlength=len(EDGES_S)).astype(float)
    exact = sorted(times)[math.ceil(share * len(times) * (1 - 1e-12)) - 1]
    found = quantile_s(counts, share)
    assert found is not None
    assert exact - 1e-3 <= found <= exact * 1.0091 + 1e-9
    mean = sum(times) / len(times)
    if mean >= 1e-3:
        ranked = np.sort(times)
        model = -np.expm1(-ranked / mean)
        steps = np.arange(len(times) + 1) / len(times)
        true = max(np.abs(steps[1:] - model).max(), np.abs(steps[:-1] - model).max())
        distance = ks_exponential(counts, mean)
        assert distance is not None
        slack = max(counts.max() / len(times), float(np.diff(-np.expm1(-EDGES_S / mean), prepend=0).max()))
        assert true - slack - 1e-9 <= distance <= true + 1e-9
