"""One placement decision of 512 blocks, by instances, over ten million blocks that the conductor's index was told of.
Dynamo's radix tree and selection service have as many in the same run.

A decision is all of ``Scheduler.schedule``: pools, look-up, policy, decode instance, the account of what is in flight.
No prompt comes twice: its first half is held by some instance, the rest by none. Between decisions come the reports and
cache events of what was placed. Policies take turns. Times are of the wall clock, sums of CPU."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

from bench.__main__ import HERE
from bench.peers import PeerUnavailable, peer_python
from bench.placement_cluster import BLOCK_TOKENS, Cluster, Shape, Turn, default_of
from bench.report import Aim, Report, parser, percentile, progress, summary

POLICIES = ("pinyon", "kvcache_centric", "dualmap")
HEADLINE = POLICIES[0]
TARGETS_US = {32: 50.0, 256: 100.0, 1024: 150.0}
"""The aim for the median of a decision, by instances."""
EVENTS_MIN = 1_000_000
REPETITIONS = 5
EVENT_BATCH = 512
RATE = 1000
"""The decisions per second of the mixed load."""
HEARTBEAT_S = 0.5
"""The time between two load reports of an instance with nothing else to say."""
GONE_SHARE = 1 / 64
"""The share of the blocks that go from the middle of chains."""
DYNAMO, ZMQ = "ai-dynamo-runtime==1.6.1", "pyzmq==27.3.0"
PEER_S = 300.0


class Peer:
    """Dynamo in a process of its own."""

    def __init__(self, shape: Shape, seed: int) -> None:
        """Starts and fills Dynamo. Raises :class:`PeerUnavailable`."""
        python = peer_python(DYNAMO, "dynamo._core", also=(ZMQ,))
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.placement_dynamo", str(shape.instances), str(shape.blocks), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent), "DYN_LOG": "error"},
        )
        self.filled = self._answer()

    def turn(self, requests: int) -> dict[str, Any]:
        """Asks for a turn, see :meth:`bench.placement_dynamo.Peer.turn`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{requests}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerUnavailable(f"{DYNAMO} ended with status {self._process.wait(PEER_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.close()
        try:
            self._process.wait(PEER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(shape: Shape, decisions: int, seed: int, beside: bool) -> dict[str, Any]:
    """Measures all policies, in turns, and Dynamo if ``beside``."""
    peer, reason = None, ""
    if beside:
        try:
            peer = Peer(shape, seed)
        except PeerUnavailable as error:
            reason = str(error)
    try:
        return {**_measure(shape, decisions, seed, peer), **({"dynamo_missing": reason} if reason else {})}
    finally:
        if peer is not None:
            peer.close()


def _measure(shape: Shape, decisions: int, seed: int, peer: Peer | None) -> dict[str, Any]:
    cluster = Cluster(shape, seed)
    keys = len(cluster.fleet.index)
    figures: dict[str, Any] = {
        "indexed_keys": keys,
        "blocks": keys * cluster.every,
        "bytes_per_key": round(cluster.filled.bytes_per_key, 1),
        "bytes_per_block": round(cluster.filled.bytes_per_key / cluster.every, 1),
    }
    cluster.warm(HEADLINE)
    for policy in POLICIES:  # a policy's first decision makes what it needs once for all instances
        cluster.turn(policy, 1)
    turns: dict[str, list[Turn]] = {policy: [] for policy in POLICIES}
    theirs: list[dict[str, Any]] = []
    for _ in range(REPETITIONS):
        for policy in POLICIES:
            turns[policy].append(cluster.turn(policy, decisions))
        if peer is not None:
            theirs.append(peer.turn(decisions))
    figures["match_us"] = _times(*[cluster.match_us(decisions)[0] for _ in range(REPETITIONS)])
    lives = [turn for policy in POLICIES for turn in turns[policy]]
    for policy in POLICIES:
        figures[policy] = _figures(turns[policy], lives, shape.instances)
    figures |= _events(cluster)
    if peer is not None:
        figures["dynamo"] = {
            "filled": peer.filled,
            **{f"{name}_us": _times(*(each[f"{name}_us"] for each in theirs)) for name in ("tree", "tokens", "hashes")},
            **{
                f"{name}_cpu_us": summary([each[f"{name}_cpu_us"] for each in theirs])
                for name in ("tree", "tokens", "hashes")
            },
        }
    figures["blocks_gone_from_the_middle"] = _thinned(cluster, decisions)
    return figures


def _times(*repetitions: list[float]) -> dict[str, Any]:
    """Returns summaries of the repetitions' medians and 99th percentiles, and the least and greatest of all times."""
    return {
        "p50": summary([percentile(each, 50) for each in repetitions]),
        "p99": summary([percentile(each, 99) for each in repetitions]),
        "least": round(min(map(min, repetitions)), 1),
        "most": round(max(map(max, repetitions)), 1),
    }


def _figures(turns: list[Turn], lives: list[Turn], instances: int) -> dict[str, Any]:
    """Returns a policy's figures; ``lives`` are all turns, as a decision's reports and events come in later ones."""
    decisions = sum(len(each.decisions_us) for each in turns)
    decision_us = sum(each.decisions_ns for each in turns) / 1e3 / decisions
    placed = sum(len(each.decisions_us) for each in lives)
    reports = sum(each.reports for each in lives)
    blocks = sum(each.event_blocks for each in lives)
    report_us = sum(each.reports_ns for each in lives) / 1e3 / max(1, reports)
    events_us = sum(each.events_ns for each in lives) / 1e3 / placed
    heartbeats_ms = instances / HEARTBEAT_S * report_us / 1e3
    return {
        "decision_us": _times(*(each.decisions_us for each in turns)),
        "decision_cpu_us": round(decision_us, 1),
        "report_cpu_us": round(report_us, 1),
        "reports_per_decision": round(reports / placed, 1),
        "event_blocks_per_decision": round(blocks / placed),
        "events_cpu_us_per_decision": round(events_us, 1),
        f"cpu_ms_per_s_at_{RATE}_decisions": round(
            (decision_us + report_us * reports / placed + events_us) * RATE / 1e3 + heartbeats_ms
        ),
        "reused_blocks": round(sum(each.reused_blocks for each in turns) / decisions),
        "fetching_percent": round(100 * sum(each.fetching for each in turns) / decisions),
    }


def _events(cluster: Cluster) -> dict[str, Any]:
    """Returns blocks per second in changes of 512, and the keys of these that the index has."""
    both = [cluster.filled.events(EVENT_BATCH, 100) for _ in range(REPETITIONS)]
    stored, removed = (summary(each, 0) for each in zip(*both, strict=True))
    return {
        "stored_blocks_per_s": stored,
        "removed_blocks_per_s": removed,
        "stored_keys_per_s": round(stored["median"] / cluster.every),
        "removed_keys_per_s": round(removed["median"] / cluster.every),
    }


def _thinned(cluster: Cluster, decisions: int) -> dict[str, Any]:
    """Measures with a cache that evicts by request, so that blocks go from the middle of chains."""
    cluster.thin(GONE_SHARE)
    looked = [cluster.match_us(decisions) for _ in range(REPETITIONS)]
    turns = [cluster.turn(HEADLINE, decisions) for _ in range(REPETITIONS)]
    return {
        "share": GONE_SHARE,
        "removed_from_all_over_blocks_per_s": summary([cluster.scattered_per_s(100) for _ in range(REPETITIONS)], 0),
        "match_us": _times(*(times for times, _ in looked)),
        "found_blocks": round(sum(found for _, found in looked) / len(looked)),
        HEADLINE: _figures(turns, turns, cluster.shape.instances),
        **_events(cluster),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--blocks", type=int, default=0, help="that the index is told of (default 10 M; quick: 500,000)"
    )
    options.add_argument("--instances", type=int, action="append", default=[], help="(may be repeated)")
    arguments = options.parse_args()
    blocks = arguments.blocks or (500_000 if arguments.quick else 10_000_000)
    decisions = 40 if arguments.quick else 200
    sizes = arguments.instances or list(TARGETS_US)
    default = int(default_of("index_stride_tokens"))
    config = {
        "blocks": blocks,
        "decisions": decisions * REPETITIONS,
        "policy": HEADLINE,
        "default_stride_tokens": default,
        "seed": arguments.seed,
    }
    report = Report("placement", config)
    roles = (False,) if arguments.quick else (False, True)
    # each in a process of its own, in which no memory was freed before
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as alone:
        for size, stride, separate in product(sizes, (default, 1), roles):
            name = _name(size, stride, separate)
            shape = Shape(size, blocks, stride, separate)
            beside = stride == default and not separate
            figures = alone.submit(measure, shape, decisions, arguments.seed, beside).result()
            if "dynamo" in figures or "dynamo_missing" in figures:
                report.baseline[f"dynamo, {size} workers"] = figures.pop("dynamo", figures.pop("dynamo_missing", None))
            report.results[name] = figures
            progress(f"{name}: {json.dumps(figures)}")
            report.aims += _aims(size, stride, separate, figures)
            if beside:
                report.aims += _comparison(size, figures, report.baseline[f"dynamo, {size} workers"])
    report.emit()


def _name(size: int, stride: int, separate: bool) -> str:
    blocks = max(1, stride // BLOCK_TOKENS)
    return f"{size} {'prefill and decode' if separate else 'mixed'} instances, one key in {blocks}"


def _aims(size: int, stride: int, separate: bool, figures: dict[str, Any]) -> list[Aim]:
    name = _name(size, stride, separate)
    aims = []
    if size in TARGETS_US:
        median = figures[HEADLINE]["decision_us"]["p50"]["median"]
        aims.append(Aim(f"{name}: decision by {HEADLINE}, p50, µs", TARGETS_US[size], median))
    for what in ("stored", "removed"):
        median = figures[f"{what}_blocks_per_s"]["median"]
        aims.append(Aim(f"{name}: blocks {what} per second", EVENTS_MIN, median, at_most=False))
    median = figures["blocks_gone_from_the_middle"]["removed_from_all_over_blocks_per_s"]["median"]
    aims.append(Aim(f"{name}: blocks removed from all over per second", EVENTS_MIN, median, at_most=False))
    return aims


def _comparison(size: int, figures: dict[str, Any], theirs: Any) -> list[Aim]:
    """Returns the aim: our decision is no slower than Dynamo's service for a request hashed already, as ours is."""
    median = figures[HEADLINE]["decision_us"]["p50"]["median"]
    name = f"{size} mixed instances: decision by {HEADLINE} beside Dynamo's selection, hashed already, p50, µs"
    if not isinstance(theirs, dict):
        return [Aim(name, 0.0, None, reason=str(theirs))]
    return [Aim(name, theirs["hashes_us"]["p50"]["median"], median)]


if __name__ == "__main__":
    main()
