"""Simulations of the KV store by seed: ``./dev test vopr`` (``--help`` says more).

Each seed runs in a process of its own, forked from this one, so nothing is left over from another one."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

SEED_S_MAX = 120.0
"""The seconds after which a seed counts as hanging."""
SEEDS, LIMIT_S = 1000, 120.0
"""The seeds of a run that names none, and the seconds after which it begins no other one."""
MECHANISMS = (
    *("blocks read", "evictions", "promotions", "recovered objects", "torn write", "corrupt found", "leases expired"),
    *("puts timed out", "redis losses noticed", "copied", "drained with room"),
    *("evicted for quotas", "pinned at the end"),
)
END = " "
"""The end of each line of results that is whole."""
BLIND_SEEDS = 200
"""The seeds in which each mechanism is seen at work, or the simulation has gone blind."""
SAID_SEEDS = 500
"""The seeds between two lines that tell how far it is."""


@dataclass
class Report:
    """The report of one seed."""

    seed: int
    failure: str = ""
    operations: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    covered: dict[str, int] = field(default_factory=dict)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0


def simulate(seed: int, log: Callable[[str], None] | None = None) -> Report:
    """Runs one seed in this process, which can run no other one afterwards."""
    from tests.vopr.world import World

    began_s = time.process_time()
    world = World(seed, log)
    try:
        world.loop.run_until_complete(world.loop.create_task(world.run()))
    except Exception:
        world.checker.fail(traceback.format_exc(limit=-4))
    struck = world.network.struck + world.wire.struck
    for each in world.disks.values():
        struck += Counter({"torn write": each.torn, "disk error": each.errors})
    return Report(
        seed,
        world.checker.failure,
        dict(world.operations),
        dict(world.faults),
        dict(world.covered + struck),
        world.loop.time(),
        time.process_time() - began_s,
        world.loop.steps,
    )


def forked(seed: int) -> tuple[int, int]:
    """Starts a seed in a child; returns its process id and the pipe on which it reports."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        return child, reads
    status = 1
    try:
        gc.disable()
        data = json.dumps(asdict(simulate(seed))).encode()
        while data:
            data = data[os.write(writes, data) :]
        status = 0
    finally:
        os._exit(status)


def run_all(seeds: Iterable[int], processes: int, limit_s: float = inf) -> Iterator[Report]:
    """Runs seeds side by side, of which none begins after ``limit_s``; yields their reports as they come."""
    import tests.vopr.world  # noqa: F401  # once, for all children

    gc.collect()
    gc.freeze()
    end_s = time.monotonic() + limit_s
    left = iter(seeds)
    running: dict[int, tuple[int, int, bytes, float]] = {}
    try:
        while True:
            while len(running) < processes and time.monotonic() < end_s and (seed := next(left, None)) is not None:
                child, pipe = forked(seed)
                running[pipe] = seed, child, b"", time.monotonic() + SEED_S_MAX
            if not running:
                return
            for pipe in select.select(list(running), [], [], 1.0)[0]:
                seed, child, said, late_s = running[pipe]
                part = os.read(pipe, 1 << 16)
                if part:
                    running[pipe] = seed, child, said + part, late_s
                    continue
                del running[pipe]
                os.close(pipe)
                os.waitpid(child, 0)
                died = f"its process died, or took over {SEED_S_MAX:g} s"
                yield Report(**json.loads(said)) if said else Report(seed, died)
            for _, child, _, late_s in running.values():
                if time.monotonic() > late_s:
                    os.kill(child, signal.SIGKILL)
    finally:
        for _, child, _, _ in running.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def replay(seed: int) -> Report:
    return simulate(seed, lambda line: print(line, flush=True))


def summary(reports: Sequence[Report]) -> str:
    """Returns what the seeds did together."""
    lines = []
    for name in ("operations", "faults", "covered"):
        total: Counter[str] = Counter()
        for each in reports:
            total.update(getattr(each, name))
        lines.append(f"{name}: {total.total():,}" if name != "covered" else "covered:")
        lines += [f"  {what:32} {count:12,}" for what, count in sorted(total.items())]
    return "\n".join(lines)


class Results:
    """The reports of a run, which are kept in a file, so that it can go on after a stop."""

    def __init__(self, path: Path | None, first: int | None, seeds: int) -> None:
        self._path, self._seeds = path, seeds
        self.reports: list[Report] = []
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        said = [json.loads(line) for line in lines if line.endswith(END)]  # others were cut off
        self.reports = [Report(**each) for each in said if "seed" in each]
        chosen = first if first is not None else random.SystemRandom().randrange(10**9)
        self.first: int = next((each["first"] for each in said if "first" in each), chosen)
        self._new = not said

    def __enter__(self) -> Results:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a")
            if self._new:
                self._write({"first": self.first})
        print(f"seeds from {self.first} on, {len(self.reports)} of {self._seeds} are done", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()

    def _write(self, what: dict[str, Any]) -> None:
        self._file.write(f"\n{json.dumps(what)}{END}")  # the line before may have been cut off
        self._file.flush()

    def left(self) -> list[int]:
        done = {each.seed for each in self.reports}
        return [seed for seed in range(self.first, self.first + self._seeds) if seed not in done]

    def add(self, report: Report) -> None:
        self.reports.append(report)
        if self._path is not None:
            self._write(asdict(report))
        if len(self.reports) % SAID_SEEDS == 0:
            print(f"{len(self.reports)} seeds", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev test vopr", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, help=f"how many seeds (default: {SEEDS}, or as many as {LIMIT_S:g} s allow)"
    )
    parser.add_argument("--first", type=int, help="the first seed (default: one by chance)")
    parser.add_argument("--seed", type=int, help="replay one seed, with all its events")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep the results there, and go on where they end")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that fails")
    options = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.vopr", *(sys.argv[1:] if argv is None else argv)])
    began_s = time.monotonic()
    if options.seed is not None:
        report = replay(options.seed)
        print(summary([report]))
        print(f"seed {options.seed}: {report.failure or 'passed'}")
        return int(bool(report.failure))
    try:
        with Results(options.resume, options.first, options.seeds or SEEDS) as results:
            limit_s = inf if options.seeds else LIMIT_S
            for report in run_all(results.left(), options.processes, limit_s):
                results.add(report)
                if report.failure:
                    print(f"seed {report.seed} FAILED {report.failure}", flush=True)
                    print(f"  replay it: ./dev test vopr --seed {report.seed}", flush=True)
                    if not options.keep_going:
                        break
    except KeyboardInterrupt:
        return 130
    reports = results.reports
    print(summary(reports))
    failed = [each.seed for each in reports if each.failure]
    seen = {name for each in reports for name, count in each.covered.items() if count}
    blind = [name for name in MECHANISMS if name not in seen] if len(reports) >= BLIND_SEEDS else []
    if blind:
        print(f"in {len(reports)} seeds, these never happened: {', '.join(blind)}")
    cpu_s = sum(each.cpu_s for each in reports) / max(1, len(reports))
    print(
        f"{len(reports)} of {options.seeds or SEEDS} seeds from {results.first} on, "
        f"{len(failed)} failed {failed or ''}; "
        f"{time.monotonic() - began_s:.1f} s, {cpu_s:.3f} s of CPU each"
    )
    return int(bool(failed or blind))
