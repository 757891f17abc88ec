"""Long runs, each with a table, JSON and evidence of failures: ``./dev chaos [faults | leave]`` and ``./dev soak``."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from launch.cluster import LocalCluster
from launch.process import ROOT
from pinyon.runtime.arguments import Parser
from tests.chaos.clusters import CONFIGURATIONS
from tests.chaos.evidence import Evidence
from tests.chaos.leaving import MOMENTS, SIZES_BYTES, Leaving, run_leaving
from tests.chaos.report import markdown, show_faults, show_growth, show_leaving, write_json
from tests.chaos.run_faults import FaultResult, run_configuration
from tests.chaos.soak import run_soak, start_soak
from tests.chaos.victims import FAULTS, Pace

SEED = "4711"


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


async def faults(arguments: argparse.Namespace, console: Console, evidence: Evidence) -> bool:
    chosen = {
        name: [
            (victim, fault)
            for victim in CONFIGURATIONS[name].victims
            for fault in arguments.fault or FAULTS
            if not arguments.service or victim.partition("-")[0] in arguments.service
        ]
        for name in arguments.configuration or CONFIGURATIONS
    }
    pace = Pace(dead_s=arguments.dead_s)
    results: list[FaultResult] = []
    with _progress(console) as progress:
        task = progress.add_task("", total=sum(map(len, chosen.values())))

        def say(text: str) -> None:
            progress.update(task, description=text)

        def done(result: FaultResult) -> None:
            results.append(result)
            progress.advance(task)
            for row in result.rows:
                gap, worst = ("–" if value is None else f"{value:.2f} s" for value in (row.gap_s, row.worst_s))
                text = f"{row.failed} of {row.requests} failed, gap {gap}, worst {worst}"
                text = f"{row.victim} {row.fault}, {row.size}: {text}, only copy of {row.only_copy}"
                console.print(text, style=None if row.good else "red", highlight=False)

        try:
            for name, strikes in chosen.items():
                if strikes:
                    await run_configuration(
                        CONFIGURATIONS[name],
                        strikes,
                        arguments.seed,
                        evidence,
                        pace,
                        say,
                        done,
                        arguments.busy_max / 100,
                    )
        finally:
            write_json(evidence.folder / "faults.json", "faults", arguments.seed, faults=[r.as_json() for r in results])
    show_faults(console, results)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(results))
    return all(result.good for result in results)


async def leave(arguments: argparse.Namespace, console: Console, evidence: Evidence) -> bool:
    results: list[Leaving] = []
    with _progress(console) as progress:
        task = progress.add_task("", total=len(SIZES_BYTES) * len(MOMENTS))

        def done(result: Leaving, cluster: LocalCluster) -> None:
            results.append(result)
            progress.advance(task)
            if not result.good:
                name = f"leave-{result.size_bytes}-{result.moment}"
                console.print(f"not noticed: see {evidence.keep(name, cluster, (), result.as_json())}", style="red")
            evidence.begin()

        try:
            await run_leaving(evidence.logs, arguments.seed, lambda text: progress.update(task, description=text), done)
        finally:
            write_json(evidence.folder / "leave.json", "leave", arguments.seed, leaving=[r.as_json() for r in results])
    show_leaving(console, results)
    return all(result.good for result in results)


async def both(arguments: argparse.Namespace, console: Console, evidence: Evidence) -> bool:
    good = await faults(arguments, console, evidence)
    return await leave(arguments, console, evidence) and good


async def soak(arguments: argparse.Namespace, console: Console, evidence: Evidence) -> bool:
    with _progress(console) as progress:
        task = progress.add_task("", total=arguments.requests)
        cluster = start_soak(evidence.logs, lambda text: progress.update(task, description=text))
        try:
            progress.update(task, description="requests")
            tenth = max(1, arguments.requests // 10)

            def served(count: int) -> None:
                progress.update(task, completed=count)
                if not console.is_terminal and count % tenth == 0:  # no progress bar moves here
                    console.print(f"{count} requests")

            result = await run_soak(cluster, arguments.requests, arguments.seed, served)
        finally:
            cluster.stop()
    growths = result.samples.growths()
    write_json(evidence.folder / "soak.json", "soak", arguments.seed, **result.as_json())
    show_growth(console, growths)
    console.print(f"{result.served} answered, {result.left} left, {len(result.failed)} failed: {result.failed[:3]}")
    evidence.kept = bool(result.failed)
    return not result.failed and all(each.good for each in growths)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="./dev chaos", description=__doc__, allow_abbrev=False)
    defaults = {"configuration": None, "service": None, "fault": None, "markdown": None}
    parser.set_defaults(**defaults, dead_s=Pace.dead_s, busy_max=100)
    commands = parser.add_subparsers(dest="command", required=True)
    services = sorted({victim.partition("-")[0] for each in CONFIGURATIONS.values() for victim in each.victims})
    one = commands.add_parser("faults", help="every service killed, frozen, drained under load", allow_abbrev=False)
    one.add_argument("--configuration", action="append", choices=CONFIGURATIONS, help="default: all")
    one.add_argument("--service", action="append", choices=services, help="default: all")
    one.add_argument("--fault", action="append", choices=FAULTS, help="default: all")
    one.add_argument(
        "--dead-s",
        type=float,
        default=Pace.dead_s,
        help=f"seconds until who was killed is restarted (default {Pace.dead_s:g})",
    )
    one.add_argument(
        "--busy-max",
        type=int,
        default=100,
        metavar="PERCENT",
        help="wait before each fault until others take no more of the machine",
    )
    one.add_argument("--markdown", type=Path, help="write the table there too")
    two = commands.add_parser("leave", help="clients that go away in the middle", allow_abbrev=False)
    three = commands.add_parser(
        "soak", prog="./dev soak", help="many requests, and what memory does", allow_abbrev=False
    )
    three.add_argument("--requests", type=int, default=20_000, help="how many (default 20,000)")
    both = commands.add_parser("all", help="faults, then leave", allow_abbrev=False)
    for command in (one, two, three, both):
        command.add_argument("--seed", default=SEED, help=f"of prompts, sampling and arrivals (default {SEED})")
        command.add_argument("--out", type=Path, help="folder for JSON and evidence (default: results/ with the time)")
    return parser


COMMANDS: dict[str, Callable[[argparse.Namespace, Console, Evidence], Awaitable[bool]]] = {
    "faults": faults,
    "leave": leave,
    "all": both,
    "soak": soak,
}


async def _run(arguments: argparse.Namespace, console: Console, evidence: Evidence) -> bool:
    """Runs the command; SIGTERM and SIGHUP cancel it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    return await COMMANDS[arguments.command](arguments, console, evidence)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    folder = arguments.out or ROOT / "tests" / "chaos" / "results" / time.strftime(f"{arguments.command}-%Y%m%d-%H%M%S")
    # As in a worker, each process has one BLAS thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        with Evidence(folder, arguments.seed) as evidence:
            good = asyncio.run(_run(arguments, console, evidence))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; everything that was started has ended", style="yellow")
        return 130
    console.print(f"seed {arguments.seed}; {folder}", highlight=False, soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
