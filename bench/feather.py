"""FEATHER's batching on the NumPy engine: which requests a step decodes, against which kernel reads their KV.

Requests of some prefixes that are cached (a warm-up run, as in FEATHER §3.2) are all there at once. They run through a
worker's modules and its engine in this process. Decode throughput is in processor time of the steps that only decode.
Each policy runs several times in the same world, and the last run counts: what it learns, it has learned by then. All
combinations take turns, so that ratios are of the same minutes. All tokens must be those of the first combination.

Then the workload shifts under a policy that has learned: from prefixes that are worth steps of their own to ones that
are not, and back. There are three runs of each, all of which count."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

import pinyon_lab.policies.names  # noqa: F401 - policies are chosen among them
from bench.batching_world import Ask, Outcome, World, grouped_asks
from bench.report import Aim, Report, parser, progress, summary
from pinyon.model.card import load_card
from services.worker.engines import create_engine
from services.worker.engines.blas import pin_blas_threads

BLOCK = 16
POLICIES = {
    "fcfs": "fcfs",
    "never": "feather:stop=never,passed_over_s=3600",
    "heuristic": "feather:stop=heuristic,passed_over_s=3600",
    "bandit": "feather:stop=bandit,passed_over_s=3600",
    "q_learning": "feather:stop=q_learning,passed_over_s=3600",
}
COMBINATIONS = (
    ("plain", "fcfs"),
    *(("whole", policy) for policy in POLICIES),
    *(("grouped", policy) for policy in POLICIES),
)
FIXED = ("fcfs", "never", "heuristic")
LEARNED = ("bandit", "q_learning")
WARM_LEARNED = 3
"""The runs of a learning policy before the one that counts: Q-learning explores for some hundred rounds."""
SHIFTING = ("heuristic", *LEARNED)


@dataclass(frozen=True, slots=True)
class Workload:
    groups: int
    count: int
    prefix: int
    own: int
    new_tokens: int

    @property
    def described(self) -> str:
        shared = f"{self.groups} groups, {self.prefix} shared tokens" if self.groups else "nothing shared"
        return f"{self.count} requests, {shared}, {self.own} own, {self.new_tokens} decoded"

    @property
    def blocks(self) -> int:
        prefixes = (self.groups or self.count) * self.prefix
        return prefixes // BLOCK + self.count * ((self.own + self.new_tokens) // BLOCK + 3) + 64


def one(workload: Workload, kernel: str, policy: str, seed: int) -> Outcome:
    engine = create_engine("numpy", load_card(), workload.blocks, BLOCK, kernel=kernel)
    world = World(engine, POLICIES[policy])
    asks = grouped_asks(workload.count, workload.groups, workload.prefix, workload.own, workload.new_tokens, seed)
    if workload.groups:
        firsts = {ask.tokens[: workload.prefix].tobytes(): Ask(ask.tokens, 1) for ask in asks}
        for ask in firsts.values():
            world.run([ask])
    for _ in range(WARM_LEARNED if policy in LEARNED else 1):
        world.run(asks)
    return world.run(asks)


def measure(workload: Workload, repeats: int, seed: int) -> dict[tuple[str, str], list[Outcome]]:
    """Returns the outcomes by kernel and policy. Raises ``RuntimeError`` if any token differs."""
    outcomes: dict[tuple[str, str], list[Outcome]] = {each: [] for each in COMBINATIONS}
    for repeat in range(repeats):
        reference: dict[int, list[int]] | None = None
        for kernel, policy in COMBINATIONS:
            outcome = one(workload, kernel, policy, seed + repeat)
            reference = reference or outcome.tokens
            if outcome.tokens != reference:
                raise RuntimeError(f"{policy} on {kernel} makes other tokens")
            outcomes[kernel, policy].append(outcome)
            progress(
                f"  {kernel:8}{policy:11}{outcome.decode_rate:8.0f} tokens/s, batch {outcome.batch:5.1f}, "
                f"{outcome.kv_tokens_read / max(1, outcome.decode_tokens):6.0f} KV tokens read for each, "
                f"scheduling {outcome.scheduling_s / outcome.total_s:.2%}"
            )
    return outcomes


def shifting(policy: str, phases: tuple[Workload, ...], runs: int, seed: int) -> list[float]:
    """Returns the decode throughput in each phase, over all of its runs, of one policy that goes on learning."""
    engine = create_engine("numpy", load_card(), sum(phase.blocks for phase in phases), BLOCK, kernel="whole")
    world = World(engine, POLICIES[policy])
    rates = []
    for number, phase in enumerate(phases):
        asks = grouped_asks(phase.count, phase.groups, phase.prefix, phase.own, phase.new_tokens, seed + number % 2)
        outcomes = [world.run(asks) for _ in range(runs)]
        rates.append(sum(each.decode_tokens for each in outcomes) / sum(each.decode_s for each in outcomes))
    return rates


def measure_shift(report: Report, phases: tuple[Workload, ...], repeats: int, runs: int, seed: int) -> None:
    """Measures whether learning gains what the heuristic loses where prefixes are not worth steps of their own."""
    report.config["shift"] = "; ".join(phase.described for phase in phases)
    progress(f"shift: {report.config['shift']}")
    rates: dict[str, list[list[float]]] = {policy: [] for policy in SHIFTING}
    for repeat in range(repeats):
        for policy in SHIFTING:
            rates[policy].append(shifting(policy, phases, runs, seed + 10 * repeat))
            progress(f"  {policy:11}" + "".join(f"{rate:8.0f}" for rate in rates[policy][-1]) + " tokens/s")
    for policy, of_runs in rates.items():
        report.results[f"shift_{policy}_tokens_s"] = [
            round(statistics.median(phase)) for phase in zip(*of_runs, strict=True)
        ]
    for policy in LEARNED:
        # Each phase counts as much: the mean time of a token.
        gains = [
            statistics.mean(1 / rate for rate in other) / statistics.mean(1 / rate for rate in one)
            for one, other in zip(rates[policy], rates["heuristic"], strict=True)
        ]
        report.aims.append(Aim(f"shift_{policy}_to_heuristic_ratio", 1.0, round(statistics.median(gains), 3), False))


def ratio(outcomes: dict[tuple[str, str], list[Outcome]], of: tuple[str, str], to: tuple[str, str]) -> float:
    """Returns the median of the runs' ratios of decode throughput."""
    pairs = zip(outcomes[of], outcomes[to], strict=True)
    return statistics.median(one.decode_rate / other.decode_rate for one, other in pairs)


def main(argv: list[str]) -> int:
    arguments = parser(__doc__).parse_args(argv)
    pin_blas_threads()
    quick, seed = arguments.quick, arguments.seed
    shared = Workload(5, 20, 1024, 20, 24) if quick else Workload(5, 40, 4096, 20, 60)
    alone = Workload(0, 16, 240, 20, 24) if quick else Workload(0, 32, 480, 20, 60)
    repeats = 1 if quick else 3
    report = Report("feather", {"seed": seed, "repeats": repeats, "block_tokens": BLOCK})
    ratios: dict[str, float] = {}
    for name, workload in (("shared", shared), ("alone", alone)):
        report.config[name] = workload.described
        progress(f"{name}: {workload.described}")
        outcomes = measure(workload, repeats, seed)
        for (kernel, policy), runs in outcomes.items():
            key = f"{name}_{kernel}_{policy}"
            report.results[f"{key}_tokens_s"] = summary([run.decode_rate for run in runs], 0)
            report.results[f"{key}_read_kv_tokens"] = round(runs[0].kv_tokens_read / max(1, runs[0].decode_tokens))
            report.results[f"{key}_batch_requests"] = round(runs[0].batch, 1)
        for kernel in ("whole", "grouped"):
            for policy in POLICIES:
                ratios[f"{name}_{kernel}_{policy}"] = ratio(outcomes, (kernel, policy), (kernel, "fcfs"))
            best = max(FIXED, key=lambda policy: ratios[f"{name}_{kernel}_{policy}"])
            for policy in LEARNED:
                ratios[f"{name}_{kernel}_{policy}_to_{best}"] = share = ratio(
                    outcomes, (kernel, policy), (kernel, best)
                )
                aim = f"{name}_{kernel}_{policy}_to_best_fixed_ratio"
                report.aims.append(Aim(aim, 0.95, round(share, 3), at_most=False, reason=f"the best one: {best}"))
        scheduling = [run.scheduling_s / run.total_s for run in outcomes["grouped", "bandit"]]
        report.aims.append(
            Aim(f"{name}_grouped_bandit_scheduling_percent", 1.0, round(100 * statistics.median(scheduling), 2))
        )
        if name == "shared":
            # The gain by batching where the kernel is the fastest exact one, whatever the policy.
            fastest = ratio(outcomes, ("grouped", "bandit"), ("grouped", "fcfs"))
            report.results["shared_bandit_to_fcfs_on_the_fastest_kernel_ratio"] = round(fastest, 3)
            report.results["shared_whole_bandit_to_grouped_fcfs_ratio"] = round(
                ratio(outcomes, ("whole", "bandit"), ("grouped", "fcfs")), 3
            )
    apart = Workload(5, 20, 1024, 20, 24) if quick else Workload(5, 40, 2048, 20, 60)
    together = Workload(5, 20, 544, 20, 24) if quick else Workload(10, 40, 544, 20, 60)
    measure_shift(report, (apart, together, apart, together), repeats, 2 if quick else 3, seed)
    report.results["to_fcfs_on_the_same_kernel_ratio"] = {name: round(value, 3) for name, value in ratios.items()}
    report.aims.append(Aim("shared_whole_bandit_to_fcfs_ratio", 2.0, round(ratios["shared_whole_bandit"], 3), False))
    for kernel in ("whole", "grouped"):
        measured = round(ratios[f"alone_{kernel}_bandit"], 3)
        report.aims.append(Aim(f"alone_{kernel}_bandit_to_fcfs_ratio", 0.98, measured, False))
    report.emit()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
