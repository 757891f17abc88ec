"""Regions with TLS between them: a region that forwards has the certificate of a load balancer."""

from __future__ import annotations

from pathlib import Path

from launch.cluster import ClusterSpec
from launch.regions import LocalRegions, RegionsSpec
from tests.cluster.regions_load import Load, taken_by
from tests.forks import forked


def test_requests_cross_regions_with_certificates(tmp_path: Path) -> None:
    spec = ClusterSpec(
        prefill=0, decode=0, mixed=1, stores=0, engine="paced", engine_profile="tiny", pool_blocks=128, tls=True,
        extra={"mixed": ("--max-batch", "2")},
    )  # fmt: skip
    with LocalRegions(RegionsSpec(("us", "eu"), spec), tmp_path, forked) as regions, Load(regions) as load:
        for region in ("us", "eu"):
            taken_by(regions, region)
        assert set(load.check()) == {"us", "eu"}
