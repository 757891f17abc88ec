"""A test of the simulation: a trace replayed on a suite that runs (`pinyon replay`), and the same trace simulated
(`pinyon simulate`) on the same number of instances with the same memory.

First comes the NumPy engine on a few instances, by a profile that is measured on a cluster of one. Then comes the paced
engine, whose steps take what its profile says, on eight. Results are means and P90 of the TTFT, and hits by tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bench.fidelity_profile import measure
from bench.report import Aim, Report, parser, progress
from launch.cluster import ClusterSpec, LocalCluster
from pinyon.placement.policies import PLACEMENT_DEFAULT
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.traces import TraceWriter
from pinyon_lab.traces.generate import generate, profile
from services.worker.settings import WorkerSettings

RATIO = 0.20
POINTS = 2.0
WORKER = {
    "--step-tokens": "step_tokens",
    "--chunk-tokens": "prefill_chunk_tokens",
    "--max-batch": "max_batch",
    "--step-tbt": "step_tbt_s",
    "--active-prefills": "active_prefills",
}
"""The options of a simulated instance that have a worker's defaults, with the names of the worker's settings."""
LIMIT_S = 900.0
GENERATED = "toolagent"


@dataclass(frozen=True)
class Setting:
    """A load and its instances; ``blocks`` of KV are per instance, ``rate`` is in requests per second."""

    name: str
    engine: str
    engine_profile: str
    instances: int
    block_tokens: int
    blocks: int
    shrink: int
    tokens_max: int
    rate: float
    policy: str


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, metavar="FILE", help=f"default: {GENERATED}, generated")
    options.add_argument("--minutes", type=float, default=5.0, help="of each load (default 5)")
    options.add_argument("--policy", default=PLACEMENT_DEFAULT, help=f"of placement (default {PLACEMENT_DEFAULT})")
    options.add_argument("--only", choices=("numpy", "paced"), help="one of the two")
    arguments = options.parse_args()
    minutes = 0.25 if arguments.quick else arguments.minutes
    numpy_ = Setting("NumPy engine", "numpy", "", 2, 64, 640, 8, 20_480, 3.0, arguments.policy)
    paced = Setting("paced engine", "paced", "910b-qwen2.5-7b", 8, 512, 2048, 1, 20_480, 3.4, arguments.policy)
    settings = [each for each in (numpy_, paced) if arguments.only in (None, each.engine)]
    report = Report("fidelity", {"minutes": minutes, "settings": [asdict(each) for each in settings]})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for setting in settings:
            rows = int(setting.rate * 60 * minutes)
            trace = arguments.trace or _generated(folder, arguments.seed, rows)
            _compare(report, setting, trace, rows, folder, arguments.seed)
    report.emit()


def _generated(folder: Path, seed: int, rows: int) -> Path:
    path = folder / f"{GENERATED}-{rows}.jsonl"
    made = profile(GENERATED)
    with TraceWriter(path, made.format) as writer:
        for row in islice(generate(made, seed), rows):
            writer.write(row)
    return path


def _compare(report: Report, setting: Setting, trace: Path, rows: int, folder: Path, seed: int) -> None:
    load = [
        str(trace), "--limit", str(rows), "--rate", str(setting.rate), "--tokens-max", str(setting.tokens_max),
        "--shrink", str(setting.shrink), "--warm-up", "0", "--json",
    ]  # fmt: skip
    engine, path_ms = setting.engine_profile, 0.0
    if not engine:
        with _cluster(setting, 1) as cluster:
            measured = measure(cluster.services["lb-0"].endpoints["grpc"], setting.block_tokens, 5, seed)
        engine, path_ms = str(_written(folder / "engine.json", asdict(measured.profile))), 1e3 * measured.path_s
        report.results[f"{setting.name}: profile"] = {**asdict(measured)}
        progress(f"{setting.name}: a request's way {path_ms:.1f} ms; {measured.profile}; off by {measured.worst:.0%}")
    with _cluster(setting, setting.instances) as cluster:
        live = _run(["replay", *load, "--lb", cluster.services["lb-0"].endpoints["grpc"], "--seed", str(seed)])
    machine = MachineProfile(
        source="this machine", stated="", assumed="all but its engine", engine=engine, kv_token_bytes=4096,
        hbm_tokens=setting.blocks * setting.block_tokens, dram_tokens=0, dram_bytes_s=1e10, nic_bytes_s=1e10,
        ssd_bytes_s=1e9,
    )  # fmt: skip
    simulated = _run(
        [
            "simulate", *load, "--model", str(_written(folder / "machine.json", asdict(machine))),
            "--instances", str(setting.instances), "--policy", setting.policy, "--path-ms", str(path_ms), *as_worker(),
        ]
    )  # fmt: skip
    report.results[setting.name] = {"live": live, "simulated": simulated}
    for key, label in (("mean_s", "mean TTFT"), ("p90_s", "P90 TTFT")):
        off = abs(simulated[key] / live[key] - 1)
        progress(f"{setting.name}: {label} live {live[key]:.3f} s, simulated {simulated[key]:.3f} s")
        report.aims.append(Aim(f"{setting.name}: simulated {label} off the live one, share", RATIO, round(off, 3)))
    hits = [each["hit_ratio"] + each["fetched_ratio"] for each in (live, simulated)]
    progress(f"{setting.name}: reused live {hits[0]:.1%}, simulated {hits[1]:.1%}")
    off = 100 * abs(hits[0] - hits[1])
    report.aims.append(Aim(f"{setting.name}: simulated hits off the live ones, points", POINTS, round(off, 2)))


def _cluster(setting: Setting, instances: int) -> LocalCluster:
    spec = ClusterSpec(
        prefill=0,
        decode=0,
        mixed=instances,
        stores=0,
        engine=setting.engine,
        engine_profile=setting.engine_profile,
        placement=setting.policy,
        pool_blocks=setting.blocks,
        block_tokens=setting.block_tokens,
        log_level="warning",
        extra={"conductor": ("--ttft-slo-ms", "0")},
    )
    return LocalCluster(spec)


def as_worker() -> list[str]:
    fields = WorkerSettings.model_fields
    return [word for option, name in WORKER.items() for word in (option, str(fields[name].default))]


def _written(path: Path, values: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(values))
    return path


def _run(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs the ``pinyon`` command, and returns the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "pinyon.cli", *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
