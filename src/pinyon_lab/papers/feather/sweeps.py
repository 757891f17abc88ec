"""A server under load in a table: the same columns for each run, and what is read from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pinyon_lab.figures.figure import Basis, Column, Tell, Value
from pinyon_lab.figures.picture import Bars, Picture
from pinyon_lab.figures.rows import number
from pinyon_lab.papers.feather.runs import (
    FCFS,
    MAX_BATCH,
    MODEL_NOTE,
    OWN_TOKENS,
    SERVED_NOTE,
    Load,
    Served,
    Server,
    batches,
    label,
    served,
)

__all__ = [
    "FEATHER",
    "MACHINE",
    "NOTES",
    "SERVED",
    "SOME",
    "Points",
    "Rows",
    "apart",
    "columns",
    "drawn",
    "here",
    "numbers",
    "picture",
    "ratios",
    "sweep",
    "told",
    "value",
]

Rows = Sequence[Mapping[str, Value]]
Points = Mapping[str, tuple[Load, str]]
"""By what the figure varies, as text: a load, and a machine."""

FEATHER = "bandit"
"""§5.2: what the paper's results are of."""
MACHINE = Server().machine
SOME = (FCFS, "bandit", "sglang_fcfs", "lpm")
"""Policies, where not all are compared."""

SERVED = [
    Column("tokens_s", "tokens/s", ",.0f", Basis.MODELLED),
    Column("batch", "batch", ".0f", Basis.MODELLED),
    Column("tbt_ms", "TBT, ms", ",.0f", Basis.MODELLED),
    Column("ttft_s", "TTFT P50, s", ".1f", Basis.MODELLED),
    Column("evicted", "evicted blocks", ",d", Basis.MODELLED),
    Column("computed", "prompt tokens computed", ".1%", Basis.MODELLED),
]


def sweep(points: Points, policies: Sequence[str], tell: Tell) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for at, (load, machine) in points.items():
        for policy in policies:
            run = served(load, Server(policy, machine), tell)
            rows.append({"at": at, "policy": label(policy), **numbers(run)})
    return rows


def numbers(run: Served) -> dict[str, Value]:
    found: dict[str, Value] = {**run._asdict(), "tbt_ms": 1e3 * run.tbt_s}
    return {column.key: found[column.key] for column in SERVED}


def here(load: Load) -> tuple[Load, str]:
    return load, MACHINE


def columns(varied: str) -> list[Column]:
    return [Column("at", varied), Column("policy", "policy"), *SERVED]


def value(rows: Rows, at: str, policy: str, key: str = "tokens_s") -> float:
    (row,) = [each for each in rows if each["at"] == at and each["policy"] == label(policy)]
    return number(row, key)


def picture(title: str, rows: Rows, varied: str, keys: Sequence[str] = ("tokens_s", "batch", "tbt_ms")) -> Picture:
    columns = {column.key: column for column in SERVED}
    return drawn(title, varied, [columns[key] for key in keys], rows)


def drawn(title: str, varied: str, columns: Sequence[Column], rows: Rows) -> Picture:
    """Bars of each column by point and policy."""
    at, policies = (list(dict.fromkeys(str(row[key]) for row in rows)) for key in ("at", "policy"))
    cells = {(row["at"], row["policy"]): row for row in rows}

    def bars(column: Column) -> Bars:
        values: dict[str, list[float | None]] = {}
        for policy in policies:
            for each in at:
                value = cells.get((each, policy), {}).get(column.key)
                values.setdefault(policy, []).append(value if isinstance(value, int | float) else None)
        return Bars(f"by {varied}", column.title, at, values, form=column.form)

    return Picture(title, [bars(column) for column in columns])


def ratios(rows: Rows, policy: str = FEATHER, to: str = FCFS, key: str = "tokens_s") -> dict[str, float]:
    """By point."""
    at = dict.fromkeys(str(row["at"]) for row in rows)
    return {each: value(rows, each, policy, key) / value(rows, each, to, key) for each in at}


def told(found: Mapping[str, float], form: str = ".2f") -> str:
    return ", ".join(f"{at}: {format(ratio, form)}" for at, ratio in found.items())


def apart(load: Load) -> float:
    """Output tokens per second if one prefix is served after the other, a full batch of each: nothing more homogeneous
    is possible."""
    group = [[("prefix", load.prefix_tokens), (f"own {each}", OWN_TOKENS)] for each in range(MAX_BATCH)]
    return batches([group], load.output_tokens, Server()).tokens_s


NOTES = [MODEL_NOTE, SERVED_NOTE]
