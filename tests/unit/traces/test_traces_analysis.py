"""A case worked by hand, ids of any size, limits, and the public traces."""

from __future__ import annotations

import random
import xml.dom.minidom
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pinyon.core.errors import InvalidArgument
from pinyon_lab.pictures import Picture, svg
from pinyon_lab.traces import TraceFile, TraceRow
from pinyon_lab.traces.analysis import FIGURES, analyse, checked_figures, read_columns
from pinyon_lab.traces.analysis.columns import numbered
from pinyon_lab.traces.analysis.models import MODELS

SHARED = Path(__file__).resolve().parents[4] / "shared" / "traces"
GIB = 1 << 30


def test_a_case_by_hand() -> None:
    # a's second turn hits two blocks of its own, b one block of a's; the next day b hits three of its own
    rows = [
        TraceRow(0, 32, 5, (1, 2), "text", 1, "a1", "", "a"),
        TraceRow(10, 40, 5, (1, 2, 3), "text", 2, "a2", "a1", "a"),
        TraceRow(30, 48, 5, (1, 4, 5), "file", 1, "b1", "", "b"),
        TraceRow(86400, 60, 5, (1, 4, 5, 6), "file", 2, "b2", "b1", "b"),
    ]
    figures = {each.number: each.json() for each in analyse(read_columns(rows, 16, GIB))}
    assert figures["4"]["hit_blocks"] == 6
    assert figures["4"]["windows"][0] == {
        "start": "day 1 0:00",
        "requests": 3,
        "blocks": 8,
        "hit_blocks": 3,
        "hit_ratio": 3 / 8,
    }
    assert figures["4"]["windows"][1]["hit_ratio"] is None
    assert figures["4"]["windows"][-1]["start"] == "day 2 0:00"
    # b's three hits of the next day: block 1, which a stored, and its own 4 and 5
    assert figures["6"]["own"] == pytest.approx(4 / 6)
    assert figures["11"]["single"] == 1.0
    assert figures["11"]["multi"] == 0.0
    # twice after 10 s, once after 20 s, three times after 86,370 s
    assert figures["12"]["within_10_s"] == pytest.approx(2 / 6)
    assert figures["13"]["reused_blocks"] == 0.0
    assert figures["19"]["max_s"] == 86400
    assert figures["22"]["peak_blocks"] == 3, "1, 4 and 5 from b's first to b's second request"
    assert figures["dualmap-14"]["half_or_more"] == 0.5


def test_the_papers_sizes() -> None:
    """Qwen2-7B takes 0.875 MB for 16 tokens, 0.09 % for 973 and 0.56 % for 5,953 (§3.5); Mooncake §5.3.1: 320 KB."""
    qwen, _, llama3 = MODELS
    assert qwen.token_bytes * 16 == 0.875 * 2**20
    assert llama3.token_bytes == 320 * 1024
    assert round(100 * 973 * qwen.token_bytes / qwen.kv_hbm_bytes, 2) == 0.09
    assert round(100 * 5953 * qwen.token_bytes / qwen.kv_hbm_bytes, 2) == pytest.approx(0.56, abs=0.011)


@pytest.mark.parametrize("scale", [1, 1 << 40])
def test_ids_are_numbered(scale: int) -> None:
    """Ids are numbered in the order of their values."""
    generator = random.Random(3)
    ids = [scale * generator.randrange(40) for _ in range(240)]
    numbers, bound = numbered(array("q", ids))
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [sorted(set(ids)).index(each) for each in ids]
    assert bound == len(set(ids))
    assert numbered(array("q"))[1] == 0


def test_memory_is_bounded() -> None:
    rows = [TraceRow(float(at), 16_000, 1, tuple(range(1000))) for at in range(100)]
    with pytest.raises(
        InvalidArgument, match=r"100 rows with 100,000 block ids may need more than 0\.003.*--memory-gib"
    ):
        read_columns(rows, 16, 3_500_000)
    assert len(read_columns(rows, 16, 5_000_000)) == 100


def test_long_rows_are_looked_at_before_there_are_many() -> None:
    read = 0

    def rows() -> Iterator[TraceRow]:
        nonlocal read
        while read < 100:
            read += 1
            yield TraceRow(float(read), 1, 1, tuple(range(300_000)))

    with pytest.raises(InvalidArgument, match="may need more than"):
        read_columns(rows(), 16, 32_000_000)
    assert read == 3, "what two of them need was allowed"


def test_what_cannot_be_analysed() -> None:
    with pytest.raises(InvalidArgument, match="no whole row"):
        read_columns([], 16, GIB)
    with pytest.raises(InvalidArgument, match="no figure '3'"):
        checked_figures(["3"])
    assert checked_figures(["22", "4"]) == ["4", "22"]
    rows = [TraceRow(0, 1, 1, (1,)), TraceRow(1e14, 1, 1, (1,))]
    with pytest.raises(InvalidArgument, match="windows of 600 s"):
        analyse(read_columns(rows, 16, GIB))
    assert not analyse(read_columns(rows, 16, GIB), window_s=1e12)[0].left_out


@pytest.mark.parametrize(
    "rows",
    [
        [TraceRow(0, 0, 0, ())],
        [TraceRow(0, 0, 0, ()), TraceRow(0, 0, 0, (5, 5))],
        [TraceRow(-1e6, 1 << 47, 1 << 47, (7,), "[/b]<b>&\x1b\ud800", 1 << 47, "c", "c", "<u>")] * 2,
        [TraceRow(0, 16, 1, (at,), f"kind {at}", at, f"c{at}", f"c{at - 1}", f"u{at}") for at in range(200)],
    ],
)
def test_odd_traces_have_figures_and_pictures(rows: list[TraceRow]) -> None:
    figures = analyse(read_columns(rows, 16, GIB))
    assert [each.number for each in figures] == list(FIGURES)
    for figure in figures:
        figure.json()
        assert figure.left_out or figure.facts or figure.tables
        if figure.plots:
            xml.dom.minidom.parseString(svg(Picture(figure.title, figure.plots)))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("name", "blocks", "tokens"),
    [
        ("mooncake_conversation.jsonl.gz", 0.3664, 0.3736),
        ("mooncake_synthetic.jsonl.gz", 0.6396, 0.6512),
        ("claude_code_a.jsonl.gz", 0.9258, 0.9279),
    ],
)
def test_ideal_hit_ratio_of_public_traces(name: str, blocks: float, tokens: float) -> None:
    trace = TraceFile(SHARED / name)
    (figure,) = analyse(read_columns(trace.rows(), trace.format.block_tokens, GIB), ["4"])
    found = figure.json()
    assert (round(found["hit_ratio"], 4), round(found["hit_ratio_tokens"], 4)) == (blocks, tokens)
