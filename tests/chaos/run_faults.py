"""Every service killed, frozen and restarted while requests keep coming."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from launch.cluster import LocalCluster
from launch.process import Launch, start_module
from tests.chaos.balancer import Balancer
from tests.chaos.clusters import Configuration
from tests.chaos.contention import Contention, quiet
from tests.chaos.evidence import Evidence
from tests.chaos.jobs import Jobs
from tests.chaos.rows import Row, rows_of
from tests.chaos.traffic import Traffic
from tests.chaos.victims import Pace, mend, strike
from tests.cluster.observe import until_idle

MEND_S = 60.0
QUIET_S = 60.0

Say = Callable[[str], None]


@dataclass
class FaultResult:
    """One fault: its rows, and what else was observed."""

    victim: str
    fault: str
    rows: list[Row]
    away_s: float
    """Seconds from the fault to the victim's return."""
    idle_s: float | None
    """Seconds from the last answer until no service holds anything of any request; None: not in time."""
    left: dict[str, float]
    """Gauges that stayed above zero."""
    lag_s: float
    """The longest delay of the clients' own timer: the measuring process adds as much to the measured times."""
    load: float
    """The machine's load average over a minute, at the end."""
    others: float
    """Share of the processors' time that went to neither the suite nor its clients."""
    evidence: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return all(row.good for row in self.rows) and not self.left and not self.problems

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "rows": [row.as_json() for row in self.rows], "good": self.good}


async def run_configuration(
    configuration: Configuration,
    strikes: Sequence[tuple[str, str]],
    seed: str,
    evidence: Evidence,
    pace: Pace,
    say: Say,
    done: Callable[[FaultResult], None],
    busy_max: float = 1.0,
    launch: Launch = start_module,
) -> None:
    """Strikes one cluster again and again; ``done`` is called after each fault.

    Before each fault, it waits, for some minutes at most, until others use no more than ``busy_max`` of the machine."""
    say("computing what the answers must be")
    jobs = configuration.jobs(random.Random(f"{seed} {configuration.name}"))
    cluster = LocalCluster(configuration.spec, evidence.logs / configuration.name, launch)
    try:
        # Services end with the thread that started them, and this thread lives on.
        cluster.start(lambda line: say(f"starting: {line.partition(' ')[0]}"))
        await _warm(cluster, configuration, jobs, seed)
        for victim, fault in strikes:
            if busy_max < 1.0:
                say(f"waiting until others take at most {busy_max:.0%} of the machine")
                await quiet(busy_max, lambda: _pids(cluster), QUIET_S)
            done(await _one(configuration, cluster, jobs, victim, fault, seed, evidence, pace, say))
    finally:
        mend(cluster)
        cluster.stop()


def _pids(cluster: LocalCluster) -> list[int]:
    redis = cluster.redis.process if cluster.redis is not None else None
    processes = [service.process for service in cluster.services.values()] + [redis]
    return [process.pid for process in processes if process is not None and process.returncode is None]


def _balancer(cluster: LocalCluster) -> Balancer:
    return Balancer([(service.name, service.endpoints["http"]) for service in cluster.of_kind("lb")])


async def _warm(cluster: LocalCluster, configuration: Configuration, jobs: Jobs, seed: str) -> None:
    """Warms the cluster up: first requests are slow everywhere, so they are not measured."""
    async with (
        _balancer(cluster) as balancer,
        Traffic(balancer, jobs, configuration.clients, f"{seed} warm") as traffic,
    ):
        await asyncio.sleep(2.0)
    bad = [record for record in traffic.records if record.outcome != "ok"]
    if bad:
        raise RuntimeError(f"without any fault {len(bad)} of {len(traffic.records)} requests failed: {bad[0].detail}")


async def _one(
    configuration: Configuration,
    cluster: LocalCluster,
    jobs: Jobs,
    victim: str,
    fault: str,
    seed: str,
    evidence: Evidence,
    pace: Pace,
    say: Say,
) -> FaultResult:
    name = f"{configuration.name}-{victim}-{fault}"
    evidence.begin()
    contention = Contention(lambda: _pids(cluster))
    events: list[float] = []
    problems: list[str] = []
    async with (
        _balancer(cluster) as balancer,
        Traffic(balancer, jobs, configuration.clients, f"{seed} {name}") as traffic,
    ):

        def note(what: str) -> None:
            events.append(time.monotonic())
            evidence.note(f"{victim} {what}")
            traffic.kick()
            say(f"{name}: {what}")

        say(f"{name}: calm")
        await asyncio.sleep(pace.calm_s)
        try:
            await strike(cluster, balancer, victim, fault, pace, note)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
            evidence.note(f"problem: {problems[-1]}")
        await asyncio.sleep(pace.after_s)
        say(f"{name}: until the last answer")
    if not events:
        raise RuntimeError(f"{victim} could not be struck: {problems}")
    struck_s, back_s, others = events[0], events[-1], contention.share()
    problems += await _whole(cluster)
    idle_s, left = await until_idle(cluster)
    result = FaultResult(
        victim,
        fault,
        # After the fault and after the return each client sends at once: from there its gap is measured.
        rows_of((configuration.name, victim, fault), traffic.records, struck_s, (struck_s, back_s)),
        away_s=back_s - struck_s,
        idle_s=None if left else idle_s,
        left=left,
        lag_s=traffic.lag_s,
        load=round(os.getloadavg()[0], 1),
        others=round(others, 2),
        problems=problems,
    )
    if not result.good:
        result.evidence = str(evidence.keep(name, cluster, traffic.records, result.as_json()))
    return result


async def _whole(cluster: LocalCluster) -> list[str]:
    """Waits until all services serve again; returns what went wrong."""
    try:
        await asyncio.to_thread(cluster.wait_serving, time.monotonic() + MEND_S)
    except Exception as error:
        return [f"not whole within {MEND_S:g} s: {type(error).__name__}: {error}"]
    return []
