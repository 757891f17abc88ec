"""The clusters under test: what is started, which services are struck, and what clients ask."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.cluster import ClusterSpec
from tests.chaos.jobs import ExactJobs, Jobs, PacedJobs
from tests.chaos.traffic import ClientKind

HERE = Path(__file__).resolve().parent


_WATCHED = {"lb": ("--lame-duck-s", "2")}
"""Options of the load balancer, whose readiness the balancer in front polls; the launcher assumes that nobody does."""


def _paced(**values: object) -> ClusterSpec:
    # A block of the paced engine has 1 KB, and a large prompt takes 1,250 blocks.
    extra = {"worker": ("--prefill-chunk-tokens", "4096", "--step-tokens", "8192"), **_WATCHED}
    profile = str(HERE / "profile-faults.json")
    return ClusterSpec(
        engine="paced", engine_profile=profile, pool_blocks=16_384, store_mib=32, lbs=2, extra=extra, **values
    )  # type: ignore[arg-type]


@dataclass(frozen=True)
class Configuration:
    """``victims`` are services, or ``redis``; ``clients`` send as often as their kind says."""

    name: str
    spec: ClusterSpec
    victims: tuple[str, ...]
    clients: tuple[ClientKind, ...]
    jobs: Callable[[random.Random], Jobs]
    about: str


_CLIENTS = (
    *(ClientKind("2 KB", stream, 0.5) for stream in (True, False, True, False)),
    *(ClientKind("200 KB", stream, 1.0) for stream in (True, False)),
)
_EXACT_CLIENTS = (
    *(ClientKind("2 KB", stream, 2.0) for stream in (True, False)),
    *(ClientKind("200 KB", stream, 4.0) for stream in (True, False)),
)

CONFIGURATIONS = {
    each.name: each
    for each in (
        Configuration(
            "split",
            _paced(prefill=2, decode=2),
            ("conductor", "lb-0", "prefill-0", "decode-0", "kvstore-0", "redis"),
            _CLIENTS,
            PacedJobs,
            "2 prefill, 2 decode, 1 store node, conductor, 2 load balancers, Redis; paced engine",
        ),
        Configuration(
            "mixed",
            _paced(prefill=0, decode=0, mixed=2),
            ("mixed-0",),
            _CLIENTS,
            PacedJobs,
            "2 mixed, 1 store node, conductor, 2 load balancers, Redis; paced engine",
        ),
        Configuration(
            "exact",
            ClusterSpec(lbs=2, pool_blocks=512, extra=_WATCHED),
            ("conductor", "lb-0", "prefill-0", "decode-0", "kvstore-0", "redis"),
            _EXACT_CLIENTS,
            ExactJobs,
            "2 prefill, 2 decode, 1 store node, conductor, 2 load balancers, Redis; the built-in model computes",
        ),
    )
}
