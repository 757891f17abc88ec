"""The cost of choosing batches by shared prefixes: operations of FEATHER's chunked hash tree (Table 5.1), and
scheduling by each policy, by length of the prefix (Figure 5.9)."""

from __future__ import annotations

import time
from typing import Any

from bench.report import Aim, Report, parser, progress, summary
from pinyon.profiles.engine_profile import EngineProfile, load_profile
from pinyon_lab.figures.round_costs import CHOICES, PER_TOKEN, RoundLoad, engine_s, round_costs
from pinyon_lab.figures.tree_costs import PRINTED_US, TreeLoad, tree_costs

TREE_TOKENS = 5_000
TREE_OWN = 64
TREE_CHUNK = 50
"""The paper's chunk size; the number of requests and their length are the paper's, too."""
TREE_MAIN = "5 groups, chunk 50"

PROFILE = "rtx6000ada-llama-8b"
PREFIXES = (1_000, 5_000, 10_000, 20_000)
ENGINE_SHARE_PERCENT = 1.0
"""The share of engine time below which FEATHER stays at any length (§5.3.1)."""


CLOCK = time.thread_time_ns


def tree_loads(requests: int) -> dict[str, TreeLoad]:
    return {
        TREE_MAIN: TreeLoad(requests, TREE_TOKENS, TREE_OWN, TREE_CHUNK),
        "5 groups, chunk 50, hashes known": TreeLoad(requests, TREE_TOKENS, TREE_OWN, TREE_CHUNK, hashed=True),
        "nothing shared, chunk 50": TreeLoad(requests, TREE_TOKENS, TREE_TOKENS, TREE_CHUNK),
        "5 groups, chunk 16": TreeLoad(requests, TREE_TOKENS, TREE_OWN, 16),
        "5 groups, chunk 1": TreeLoad(requests, TREE_TOKENS, TREE_OWN, 1),
    }


def main() -> None:
    arguments = parser(__doc__).parse_args()
    requests = 1_000 if arguments.quick else 5_000
    rounds = 1 if arguments.quick else 3
    tree = {"tree_requests": requests, "tree_tokens": TREE_TOKENS, "tree_own_tokens": TREE_OWN}
    report = Report("batching", {**tree, "engine": PROFILE, "seed": arguments.seed})
    for label, load in tree_loads(requests).items():
        costs = {key: each._asdict() for key, each in tree_costs(load, arguments.seed, rounds, CLOCK).items()}
        report.results[f"tree: {label}"] = costs
        means = ", ".join(f"{operation} {cost['mean_us']}" for operation, cost in costs.items())
        progress(f"{label}: mean µs: {means}")
    report.baseline["table_5_1_us"] = PRINTED_US
    for operation, printed_us in PRINTED_US.items():
        measured_us = report.results[f"tree: {TREE_MAIN}"][operation]["mean_us"]
        report.aims.append(Aim(f"chunked hash tree, {operation}, µs", printed_us, measured_us))
    _rounds(report, arguments.quick)
    report.emit()


def _round(choice: str, load: RoundLoad, profile: EngineProfile, seed: int, rounds: int) -> dict[str, Any]:
    costs = round_costs(choice, load, profile, seed, rounds, CLOCK)
    share_percent = round(100 * costs.of_engine_time, 3)
    return {"cpu_ms": summary(costs.cpu_ms, 3), "rounds": len(costs.cpu_ms), "of_engine_time_percent": share_percent}


def _rounds(report: Report, quick: bool) -> None:
    profile, seed, rounds = load_profile(PROFILE), report.config["seed"], 10 if quick else 40
    for tokens in PREFIXES[:3:2] if quick else PREFIXES:
        figures: dict[str, Any] = {"engine_ms_modelled": round(1e3 * engine_s(RoundLoad(tokens), profile), 1)}
        for name, choice in CHOICES.items():
            figures[name] = _round(choice, RoundLoad(tokens), profile, seed, rounds)
        for name in PER_TOKEN:
            load = RoundLoad(tokens, key_tokens=1)
            figures[f"{name}, per token"] = _round(CHOICES[name], load, profile, seed, rounds)
        report.results[f"rounds: {tokens} tokens"] = figures
        share, why = figures["feather"]["of_engine_time_percent"], "the engine's time is modelled"
        report.aims.append(Aim(f"feather, {tokens} tokens, of engine time, %", ENGINE_SHARE_PERCENT, share, reason=why))
        costs = ", ".join(
            f"{name} {each['cpu_ms']['median']}" for name, each in figures.items() if isinstance(each, dict)
        )
        progress(f"{tokens} tokens: ms per round: {costs}; engine {figures['engine_ms_modelled']}")


if __name__ == "__main__":
    main()
