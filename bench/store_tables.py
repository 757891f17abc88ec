"""The tables of the store benchmark, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from bench.store_figures import CROWD_SIDES, GET, PUT, SIDES, Measured, Row, crowd_figures, figures


def row_table(measured: Measured, rows: Iterable[Row]) -> Table:
    table = Table(title="Store: one client, medians of rounds", title_justify="left", padding=(0, 1))
    table.add_column("row", no_wrap=True)
    table.add_column("side", no_wrap=True)
    for column in ("ops/s", "GB/s", "p50 µs", "p99 µs", "client CPU µs/op", "servers", "× Mooncake"):
        table.add_column(column, justify="right")
    for row in rows:
        for number, side in enumerate(each for each in SIDES if (each.name, row) in measured.samples):
            found = figures(row, measured.samples[side.name, row])
            ratio = measured.ratio(row, side)
            table.add_row(
                "" if number else row.name,
                side.label,
                f"{found['ops_s']['median']:,.0f}",
                f"{found['gb_s']['median']:.3f}" if "gb_s" in found else "",
                f"{found['p50_us']:,.0f}",
                f"{found['p99_us']:,.0f}",
                f"{found['client_cpu_us']:,.1f}",
                f"{found['server_cpu_us']:,.1f}",
                "" if ratio is None else f"{ratio:.2f}",
            )
        table.add_section()
    return table


def crowd_table(measured: Measured) -> Table:
    table = Table(title="Store: many connections, 4 KiB, each one call at a time", title_justify="left", padding=(0, 1))
    for column in ("side", "connections", "op", "ops/s", "p50 ms", "p99 ms", "client CPU µs/op", "servers", "limits"):
        table.add_column(column, justify="left" if column in ("side", "op", "limits") else "right")
    for side in CROWD_SIDES:
        if (crowd := measured.crowds.get(side.name)) is None:
            continue
        found = crowd_figures(crowd)
        for op in (PUT, GET):
            if (phase := found.get(op)) is None:
                table.add_row(side.label, "", op, *[""] * 5, str(found.get("error", "")))
                continue
            said = [
                str(found["stopped_by"]),
                f"{phase['failed']} failed: {phase['failure']}" if phase["failed"] else "",
            ]
            table.add_row(
                side.label,
                f"{found['open']:,}",
                op,
                f"{phase['ops_s']:,}",
                *("" if phase[key] is None else f"{phase[key] / 1000:,.1f}" for key in ("p50_us", "p99_us")),
                f"{phase['client_cpu_us']:,.0f}",
                f"{phase['server_cpu_us']:,.0f}",
                "; ".join(filter(None, said)),
            )
    return table


def show(measured: Measured, rows: Sequence[Row]) -> None:
    """Prints tables for people on stderr."""
    console = Console(stderr=True, width=130)
    console.print(row_table(measured, rows))
    if measured.crowds:
        console.print(crowd_table(measured))
    for name, reason in measured.missing.items():
        console.print(f"{name}: {reason}", markup=False)
