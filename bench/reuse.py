"""Time to first token with and without reuse, in the demo's setting: its conversation and its batch, alternating."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from bench.report import Aim, Report, parser, progress, summary
from launch.cluster import ClusterSpec, LocalCluster
from launch.demo import BATCH_CONCURRENCY, demo_documents, demo_requests


def main() -> None:
    arguments = parser(__doc__).parse_args()
    repetitions = 2 if arguments.quick else 5
    figures: dict[str, list[float]] = {}
    shares: list[float] = []
    for repetition in range(repetitions):
        # A fresh cluster each time: blocks that the last repetition left in the caches would be reused, too.
        with (
            tempfile.TemporaryDirectory() as logs,
            LocalCluster(ClusterSpec(log_level="warning"), Path(logs)) as cluster,
        ):
            address = cluster.services["lb-0"].endpoints["http"]
            for kind, no_reuse in (("reuse", False), ("no_reuse", True)):
                outcomes = list(demo_requests(address, demo_documents(), no_reuse=no_reuse))
                times = [outcome.ttft_s * 1000 for outcome in outcomes]
                figures.setdefault(f"{kind}_ttft_median_ms", []).append(statistics.median(times))
                figures.setdefault(f"{kind}_ttft_mean_ms", []).append(statistics.fmean(times))
                if not no_reuse:
                    prompt = sum(outcome.prompt_tokens for outcome in outcomes)
                    shares.append(sum(outcome.cached_tokens for outcome in outcomes) / prompt)
        progress(f"repetition {repetition + 1} of {repetitions} done")
    report = Report("reuse", {"repetitions": repetitions, "batch_concurrency": BATCH_CONCURRENCY})
    report.results = {key: summary(values) for key, values in figures.items() if key.startswith("reuse")}
    report.results["reused_share_of_prompt_tokens"] = summary(shares, 3)
    report.baseline = {key: summary(values) for key, values in figures.items() if key.startswith("no_reuse")}
    ratios = [
        without / with_
        for with_, without in zip(figures["reuse_ttft_mean_ms"], figures["no_reuse_ttft_mean_ms"], strict=True)
    ]
    report.results["ttft_mean_ratio"] = summary(ratios, 2)
    report.aims.append(Aim("mean TTFT without reuse / with reuse", 1.0, statistics.median(ratios), at_most=False))
    report.emit()


if __name__ == "__main__":
    main()
