"""Mooncake §5.2.1, Table 2: what its workloads are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pinyon_lab.caches.cache import endless_hits
from pinyon_lab.figures.figure import Basis, Claim, Column, Given, Result, Rows, Section, Table, figure
from pinyon_lab.figures.rows import basis, column, number
from pinyon_lab.pictures import Bars

PRINTED: Mapping[str, Mapping[str, float]] = {
    "conversation": {"requests": 12_031, "input": 12_035, "output": 343, "ratio": 0.40},
    "toolagent": {"requests": 23_608, "input": 8_596, "output": 182, "ratio": 0.59},
    "synthetic": {"requests": 3_993, "input": 15_325, "output": 149, "ratio": 0.66},
}
LENGTH_CLOSE = 0.5
"""Ours: printed are whole tokens."""
RATIO_CLOSE = 0.01
"""Ours: printed are whole points, and a block of 512 tokens hides some."""
BY_TOKENS, BY_BLOCKS, BY_REQUEST = "of all tokens", "of all blocks", "mean over the requests"


@figure(
    "mooncake-table2",
    "Mooncake (FAST '25)",
    "§5.2.1, Table 2",
    "requests, lengths and cache ratio",
    ("conversation", "synthetic"),
    ("toolagent",),
)
def table2(given: Given) -> Result:
    table = Table(
        Column("workload", "workload"),
        Column("requests", "requests", ",", Basis.MEASURED),
        Column("input", "input", ",.1f", Basis.MEASURED),
        Column("output", "output", ",.1f", Basis.MEASURED),
        *(Column(key, key, ".1%", Basis.MEASURED) for key in (BY_TOKENS, BY_BLOCKS, BY_REQUEST)),
    )
    for workload in given.workloads:
        given.tell(f"an endless cache: {workload.name}")
        rows, count = workload.rows, len(workload.rows)
        hits = list(endless_hits(row.blocks for row in rows))
        cached = [min(row.input_tokens, n * workload.block_tokens) for row, n in zip(rows, hits, strict=True)]
        tokens, blocks = sum(row.input_tokens for row in rows), sum(len(row.blocks) for row in rows)
        ratio = sum(n / max(1, row.input_tokens) for row, n in zip(rows, cached, strict=True)) / count
        lengths = tokens / count, sum(row.output_tokens for row in rows) / count
        ratios = sum(cached) / max(1, tokens), sum(hits) / max(1, blocks), ratio
        table.add(workload.name, count, *lengths, *ratios, basis=basis(workload))
    notes = [
        "Cached: the longest leading run of blocks that earlier requests had, in a cache that forgets nothing. How the "
        "paper counts its ratio is not stated: here are three ways.",
        "A generated trace stands in the table alone: its statistics were put in.",
        "Blocks are of 512 tokens, the paper's store has 256 (§5.1): what is shared inside a block is not seen.",
    ]
    named = [f"{row['workload']} ({row['basis']})" for row in table.rows]
    bars: dict[str, Sequence[float | None]] = {
        key: column(table.rows, key) for key in (BY_TOKENS, BY_BLOCKS, BY_REQUEST)
    }
    bars["the paper"] = [PRINTED[each.name]["ratio"] for each in given.workloads]
    panel = Bars("Endless cache", "cached", named, bars, ".1%")
    return table.result("Mooncake Table 2: cache ratio", [panel], _claims(table.rows), notes)


def _claims(all_rows: Rows) -> list[Claim]:
    """Of the published traces: a generated one has what was put in."""
    rows = {str(row["workload"]): row for row in all_rows if row["basis"] == Basis.MEASURED}

    def claim(said: str, key: str, form: str, close: float, why: str = "", ours: str = "") -> Claim:
        values = {name: number(row, ours or key) for name, row in rows.items()}
        return Section("Table 2", Basis.MEASURED).says(
            said,
            ", ".join(f"{name} {value:{form}}" for name, value in values.items()),
            all(abs(value - PRINTED[name][key]) <= close for name, value in values.items()),
            why,
            printed=", ".join(f"{name} {PRINTED[name][key]:{form.replace('.1', '.0')}}" for name in rows),
        )

    others = "; ".join(
        f"{name} {number(row, BY_BLOCKS):.1%} {BY_BLOCKS}, {number(row, BY_REQUEST):.1%} as {BY_REQUEST}"
        for name, row in rows.items()
    )
    return [
        claim("Num Requests 12031 23608 3993", "requests", ",.0f", 0),
        claim("Avg Input Len 12035 8596 15325", "input", ",.1f", LENGTH_CLOSE, "a trace's mean, of whole prompts"),
        claim("Avg Output Len 343 182 149", "output", ",.1f", LENGTH_CLOSE, "a trace's mean"),
        claim(
            "Cache Ratio 40% 59% 66%",
            "ratio",
            ".1%",
            RATIO_CLOSE,
            f"{BY_TOKENS}; {others}. Where a request's hits end inside a block of 512, up to 511 tokens are not seen",
            BY_TOKENS,
        ),
    ]
