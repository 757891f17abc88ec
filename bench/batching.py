"""What choosing batches by shared prefixes costs: the operations of FEATHER's chunked hash tree (Table 5.1)."""

from __future__ import annotations

from bench.batching_tree import PRINTED_US, TreeLoad, tree_costs
from bench.report import Aim, Report, parser, progress

TREE_TOKENS = 5_000
TREE_OWN = 64
TREE_CHUNK = 50
"""The paper's, as are the requests' number and length."""
TREE_MAIN = "5 groups, chunk 50"


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
    report = Report("batching", {"requests": requests, "tokens": TREE_TOKENS, "own": TREE_OWN, "seed": arguments.seed})
    for label, load in tree_loads(requests).items():
        costs = tree_costs(load, arguments.seed, rounds)
        report.results[f"tree: {label}"] = costs
        means = ", ".join(f"{operation} {cost['mean_us']}" for operation, cost in costs.items())
        progress(f"{label}: mean µs: {means}")
    report.baseline["table_5_1_us"] = PRINTED_US
    for operation, printed_us in PRINTED_US.items():
        measured_us = report.results[f"tree: {TREE_MAIN}"][operation]["mean_us"]
        report.aims.append(Aim(f"chunked hash tree, {operation}, µs", printed_us, measured_us))
    report.emit()


if __name__ == "__main__":
    main()
