"""Regions with TLS between them: a region that forwards has the certificate of a load balancer."""

from __future__ import annotations

from pathlib import Path

from launch.regions import LocalRegions, RegionsSpec
from tests.cluster.regions_load import Load, taken_by
from tests.cluster.specs import PACED, cluster_spec
from tests.forks import forked


def test_requests_cross_regions_with_certificates(tmp_path: Path) -> None:
    spec = cluster_spec(**PACED, tls=True, extra={"mixed": ("--max-batch", "2")})
    with LocalRegions(RegionsSpec(("us", "eu"), spec), tmp_path, forked) as regions, Load(regions) as load:
        for region in ("us", "eu"):
            taken_by(regions, region)
        assert set(load.check()) == {"us", "eu"}
