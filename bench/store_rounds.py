"""The rounds of the store benchmark: all sides do each row, one after another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bench.report import progress
from bench.store_figures import CROWD_SIDES, KIB, SIDES, Measured, Row, Sample
from bench.transfer_pair import Side, System, SystemFailed

PROCESSES = 4
"""The number of processes with many connections."""


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement: ``rounds`` rounds, each with ``seconds`` of a row; a crowd works for ``crowd_s``."""

    rounds: int
    seconds: float
    crowd_s: float
    open_s: float
    limit_s: float
    """The time after which no further round begins."""


def drop(side: System, reason: str, sides: dict[str, Side], measured: Measured) -> None:
    measured.missing[side.name] = reason
    progress(f"without {side.label}: {reason}")
    if process := sides.pop(side.name, None):
        process.close()


def ask(process: Side, **command: Any) -> dict[str, Any]:
    """Returns the answer to a command. Raises :class:`SystemFailed` if it failed, or bytes were wrong."""
    answer = process.ask(**command)
    if "error" in answer:
        raise SystemFailed(f"{command['do']}: {answer['error']}")
    if answer.get("wrong"):
        raise SystemFailed(f"{command}: {answer['wrong']} answers were wrong")
    return answer


def measure_group(process: Side, rows: list[Row], seconds: float) -> list[Sample]:
    """Returns a sample for each of the rows, which are about the same objects."""
    samples = []
    for row in rows:
        took = ask(process, do=row.op, size=row.size, batch=row.batch, seconds=seconds)
        figures = {key: took[key] for key in ("spent_us", "seconds", "client_cpu_s", "server_cpu_s")}
        samples.append(Sample(**figures, batch=row.batch))
    ask(process, do="remove")
    return samples


def measure_all(sides: dict[str, Side], wanted: list[list[Row]], effort: Effort, measured: Measured) -> int:
    """Fills ``measured``; returns the number of rounds. A side that fails has no figures from there on.

    Before the first round, each side fills its pool once, as the first use of memory takes longer."""
    started = time.monotonic()
    for name in list(sides):
        warm_up(next(side for side in SIDES if side.name == name), sides, measured)
    rounds = 0
    for round_number in range(effort.rounds):
        if round_number and time.monotonic() - started > effort.limit_s:
            break
        for rows in wanted:
            here = [side for side in SIDES if side.name in sides]
            turn = round_number % max(1, len(here))
            for side in here[turn:] + here[:turn]:
                try:
                    samples = measure_group(sides[side.name], rows, effort.seconds)
                except SystemFailed as error:
                    drop(side, f"{rows[0].name}: {error}", sides, measured)
                    continue
                for row, sample in zip(rows, samples, strict=True):
                    measured.samples.setdefault((side.name, row), []).append(sample)
        rounds += 1
        progress(f"round {rounds} of {effort.rounds}, {time.monotonic() - started:.0f} s so far")
    return rounds


def warm_up(side: System, sides: dict[str, Side], measured: Measured) -> None:
    try:
        for size, batch, seconds in ((16 << 20, 1, 2.0), (4 * KIB, 64, 0.2)):
            measure_group(sides[side.name], [Row("put", size, batch), Row("get", size, batch)], seconds)
    except SystemFailed as error:
        drop(side, f"warm-up: {error}", sides, measured)


def measure_crowds(sides: dict[str, Side], connections: int, effort: Effort, measured: Measured) -> None:
    task = {"processes": PROCESSES, "connections": connections, "size": 4 * KIB}
    for side in CROWD_SIDES:
        if side.name not in sides:
            continue
        progress(f"{side.label}: {connections} connections from {PROCESSES} processes")
        limits = {"seconds": effort.crowd_s, "open_s": effort.open_s}
        try:
            answer = sides[side.name].ask(within_s=180.0, do="crowd", **task, **limits)
        except SystemFailed as error:
            drop(side, f"{connections} connections: {error}", sides, measured)
            continue
        measured.crowds[side.name] = answer


def idle_facts(sides: dict[str, Side], seconds: float) -> dict[str, Any]:
    """Returns the cores that each side uses while it is idle, and what it says about itself."""
    return {name: ask(process, do="idle", seconds=seconds) for name, process in sides.items()}
