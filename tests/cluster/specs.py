"""Clusters as the tests start them: with TLS everywhere when ``PINYON_TEST_TLS`` is set (``./dev test --tls``)."""

from __future__ import annotations

import os
from typing import Any

from launch.cluster import ClusterSpec

CHUNKS = {"worker": ("--prefill-chunk-tokens", "96")}
"""So short that prompts of a few hundred tokens are computed in several."""


PATIENT = ("--conductor-timeout-s", "10")
"""Of load balancers: on a busy machine the conductor's answer takes longer than what usually counts as none."""


def cluster_spec(**values: Any) -> ClusterSpec:
    extra = values.pop("extra", {})
    values["extra"] = {**extra, "lb": (*PATIENT, *extra.get("lb", ()))}
    return ClusterSpec(**{"tls": os.environ.get("PINYON_TEST_TLS", "") not in ("", "0"), **values})
