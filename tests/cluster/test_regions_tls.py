"""Regions with TLS between them: who forwards has the certificate of a load balancer."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.cluster import ClusterSpec
from services.regions import LocalRegions, RegionsSpec
from tests.forks import forked


@pytest.mark.parametrize(("static_peers", "secret"), [(False, False), (True, True)])
def test_requests_cross_regions_with_certificates(tmp_path: Path, static_peers: bool, secret: bool) -> None:
    spec = ClusterSpec(
        prefill=0, decode=0, mixed=1, stores=0, engine="paced", engine_profile="tiny", pool_blocks=128, tls=True,
        extra={"mixed": ("--max-batch", "2"), "lb": () if secret else ("--federation-secret-file", "")},
    )  # fmt: skip
    with LocalRegions(RegionsSpec(("us", "eu"), spec, static_peers=static_peers), tmp_path, forked) as regions:
        us = regions.clusters["us"]

        def ask(number: int) -> str:
            body = {"model": "pinyon-tiny", "prompt": f"Number {number}.", "max_tokens": 64}
            headers = {"content-type": "application/json", "x-pinyon-report": "1"}
            request = urllib.request.Request(f"{us.http}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60, context=us.access.ssl_context()) as reply:
                return json.loads(reply.read())["pinyon"].get("region", "us").partition("@")[0].partition("-lb-")[0]

        names = [service.arguments[service.arguments.index("--instance-id") + 1] for service in us.services.values()]
        assert "us-lb-0" in names
        with ThreadPoolExecutor(16) as threads:
            assert set(threads.map(ask, range(24))) == {"us", "eu"}
