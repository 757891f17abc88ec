"""The KV store beside Mooncake Store and Redis: put, get and exists over TCP, and with pinyon over shared memory, too.
Reads of pinyon's disk tier are beside plain reads of the same disk.

Each side is a client process with its own servers on loopback. In a round every side does the same row, in an order
that rotates; ratios are formed within a round. Keys are new for each put, objects differ in every page, and what was
got is compared once per row and round, outside the timed part. A row's objects are removed before the next row."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.peers import PeerUnavailable, peer_python
from bench.report import Report, number, parser, progress
from bench.store_figures import OURS, PEER, REDIS, SHM, SIDES, SIZES, Measured, aims, groups, results, size_label
from bench.store_rounds import Effort, drop, idle_facts, measure_all, measure_crowds
from bench.store_ssd import measure_ssd, said, ssd_aims
from bench.store_tables import show
from bench.transfer import where_pinyon_is
from bench.transfer_pair import Side, System, SystemFailed, uninterrupted

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
"""Mooncake's package without CUDA. The one before it, 0.3.13, has a store that does not load without CUDA."""
HIREDIS = "hiredis==3.5.0"
REDIS_PY = "redis>=8,<9"
NUMPY = "numpy>=2"
MEMORY_BYTES = 256 << 20
"""The largest number of bytes that one row puts in a round."""


FULL = Effort(rounds=5, seconds=0.4, crowd_s=4.0, open_s=30.0, limit_s=330.0)
QUICK = Effort(rounds=1, seconds=0.15, crowd_s=1.0, open_s=4.0, limit_s=40.0)


def python_of(side: System) -> Path:
    """Returns the interpreter that has the side. Raises :class:`PeerUnavailable`."""
    if side == PEER:
        return peer_python(MOONCAKE, "mooncake.store", "it needs libibverbs1", also=(NUMPY,))
    if side == REDIS:
        return peer_python(HIREDIS, "redis", also=(REDIS_PY, NUMPY))
    return Path(sys.executable)


def start(wanted: list[System], logs: Path, measured: Measured) -> dict[str, Side]:
    """Returns the processes of the sides that can run here, by name; the others' reasons are in ``measured``."""
    src, _ = where_pinyon_is()
    sides: dict[str, Side] = {}
    for side in wanted:
        try:
            python = python_of(side)
            process = Side(python, side, "client", MEMORY_BYTES, str(logs), logs / f"{side.name}.log", src)
            sides[side.name] = process
            process.answer()
            progress(f"{side.label} is there")
        except (PeerUnavailable, SystemFailed) as error:
            drop(side, str(error), sides, measured)
    return sides


def size(text: str) -> int:
    """Returns the size that a label such as ``4k`` or ``16m`` names."""
    sizes = {size_label(each).lower().replace("ib", "").replace(" ", ""): each for each in SIZES}
    if text.lower() not in sizes:
        raise argparse.ArgumentTypeError(f"not one of {', '.join(sizes)}: {text!r}")
    return sizes[text.lower()]


def ssd_figures(quick: bool) -> tuple[dict[str, Any], str]:
    """Returns the figures of the SSD, and why there are none."""
    progress("reads of the disk tier")
    try:
        return measure_ssd(4 if quick else 24), ""
    except PeerUnavailable as error:
        return {}, str(error)


def close(sides: dict[str, Side]) -> None:
    with uninterrupted():
        for process in sides.values():
            process.close()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sides", nargs="+", choices=[side.name for side in SIDES], help="these sides")
    options.add_argument("--sizes", nargs="+", type=size, default=list(SIZES), help="of 4k 64k 1m 4m 16m")
    options.add_argument("--seconds", type=float, help="time for each row, side and round (default 0.4)")
    options.add_argument("--rounds", type=number(1, 1000), help="rounds (default 5)")
    options.add_argument(
        "--connections", type=number(0, 20000), default=2000, help="of the last row (default 2000; 0: without it)"
    )
    arguments = options.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts as Ctrl-C
    base = QUICK if arguments.quick else FULL
    seconds, count = arguments.seconds or base.seconds, arguments.rounds or base.rounds
    effort = Effort(count, seconds, base.crowd_s, base.open_s, base.limit_s)
    wanted = [side for side in SIDES if not arguments.sides or side.name in arguments.sides]
    measured = Measured(missing={side.name: "not asked for" for side in SIDES if side not in wanted})
    rows = groups(arguments.sizes)
    started, load = time.monotonic(), os.getloadavg()[0]
    if load > 0.5:
        progress(f"something else runs on this machine (load {load:.1f}): the figures will be noisy")
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        stack.callback(lambda: close(sides))
        sides |= start(wanted, Path(logs), measured)
        rounds = measure_all(sides, rows, effort, measured)
        facts = idle_facts(sides, 1.0)
        if arguments.connections:
            measure_crowds(sides, arguments.connections, effort, measured)
    ssd, ssd_missing = ssd_figures(arguments.quick) if OURS in wanted else ({}, "pinyon is not asked for")
    flat = [row for group in rows for row in group]
    show(measured, flat)
    progress(said(ssd))
    report = Report(
        "store",
        {
            "seed": arguments.seed,
            "rounds": rounds,
            "seconds": seconds,
            "mooncake": MOONCAKE,
            "hiredis": HIREDIS,
            "pinyon": where_pinyon_is()[1],
            "load_before": round(load, 2),
            "duration_s": round(time.monotonic() - started, 1),
            "idle": facts,
            "missing": measured.missing,
        },
    )
    report.results = results(measured, (OURS, SHM))
    report.baseline = results(measured, (PEER, REDIS))
    if ssd:
        report.results["ssd"] = ssd
    report.aims = aims(measured, flat) + ssd_aims(ssd, ssd_missing)
    report.emit()


if __name__ == "__main__":
    main()
