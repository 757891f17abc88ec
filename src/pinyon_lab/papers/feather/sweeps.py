"""Tables and pictures of a server under load, with the same columns for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pinyon_lab.figures.figure import Basis, Claim, Column, Result, Rows, Tell, Value
from pinyon_lab.figures.rows import number
from pinyon_lab.papers.feather.runs import (
    FCFS,
    MACHINE,
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
from pinyon_lab.pictures import Bars, Picture

Runs = Mapping[tuple[str, str], Served]
"""The runs by the value that varies, and by the system's label in tables."""

FEATHER = "bandit"
"""The policy of the paper's results (§5.2)."""
SOME = (FCFS, "bandit", "sglang_fcfs", "lpm")
"""The policies where not all are compared."""

SERVED = [
    Column("tokens_s", "tokens/s", ",.0f", Basis.MODELLED),
    Column("batch", "batch", ".0f", Basis.MODELLED),
    Column("tbt_ms", "TBT, ms", ",.0f", Basis.MODELLED),
    Column("ttft_s", "TTFT P50, s", ".1f", Basis.MODELLED),
    Column("evicted", "evicted blocks", ",d", Basis.MODELLED),
    Column("computed", "prompt tokens computed", ".1%", Basis.MODELLED),
]
STALLED = [
    *SERVED[:3],
    Column("stalled", "waits for the scheduler", ".1%", Basis.MODELLED),
    Column("reading", "memory is read", ".1%", Basis.MODELLED),
    Column("read_s", "read in all, s", ",.1f", Basis.MODELLED),
    Column("computing", "compute", ".1%", Basis.MODELLED),
]


def sweep(
    loads: Mapping[str, Load], policies: Sequence[str], tell: Tell, machine: str = MACHINE
) -> list[dict[str, Value]]:
    """Returns a row for each load and policy; ``loads`` are by the value that varies, as text."""
    return [
        {"at": at, "policy": label(policy), **numbers(served(load, Server(policy, machine), tell))}
        for at, load in loads.items()
        for policy in policies
    ]


def numbers(run: Served, shown: Sequence[Column] = SERVED) -> dict[str, Value]:
    found: dict[str, Value] = {**run._asdict(), "tbt_ms": 1e3 * run.tbt_s, "reading": run.reading}
    return {column.key: found[column.key] for column in shown}


def table(varied: str, runs: Runs, keys: Sequence[str]) -> tuple[list[Column], list[dict[str, Value]]]:
    """Returns columns and rows of runs whose engine may wait for its scheduler; ``keys`` name the columns."""
    shown = [column for column in STALLED if column.key in keys]
    rows = [{"at": at, "policy": name, **numbers(run, shown)} for (at, name), run in runs.items()]
    return [Column("at", varied), Column("policy", "policy"), *shown], rows


def value(rows: Rows, at: str, policy: str, key: str = "tokens_s") -> float:
    (row,) = [each for each in rows if each["at"] == at and each["policy"] == label(policy)]
    return number(row, key)


def drawn(title: str, varied: str, columns: Sequence[Column], rows: Rows) -> Picture:
    """Returns bars of each column, by varied value and policy."""
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
    """Returns the ratio of ``policy`` to ``to`` in column ``key``, by varied value."""
    at = dict.fromkeys(str(row["at"]) for row in rows)
    return {each: value(rows, each, policy, key) / value(rows, each, to, key) for each in at}


def told(found: Mapping[str, float], form: str = ".2f") -> str:
    return ", ".join(f"{at}: {format(ratio, form)}" for at, ratio in found.items())


def apart(load: Load) -> float:
    """Returns the output tokens/s if one prefix is served after the other, a full batch of each. No batches are more
    homogeneous."""
    group = [[("prefix", load.prefix_tokens), (f"own {each}", OWN_TOKENS)] for each in range(MAX_BATCH)]
    return batches([group], load.output_tokens, Server()).tokens_s


NOTES = [MODEL_NOTE, SERVED_NOTE]


def swept(
    title: str, varied: str, rows: Rows, claims: Sequence[Claim], shown: Sequence[Column] = SERVED[:3], axis: str = ""
) -> Result:
    """Returns the result of a :func:`sweep`; the picture has the columns ``shown``, and ``axis`` for ``varied``."""
    columns = [Column("at", varied), Column("policy", "policy"), *SERVED]
    return Result(columns, rows, claims, NOTES, drawn(title, axis or varied, shown, rows))
