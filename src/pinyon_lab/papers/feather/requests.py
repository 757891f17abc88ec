"""FEATHER §5.2.3, §5.2.4, §5.2.7: a server under load, by tokens of answers and prefixes, and by trees of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon_lab.figures.figure import Result, Section, Tell, figure
from pinyon_lab.figures.rows import close
from pinyon_lab.figures.workload import Workload
from pinyon_lab.papers.feather.runs import FCFS, PAPER, Load
from pinyon_lab.papers.feather.sweeps import (
    FEATHER,
    NOTES,
    SOME,
    apart,
    columns,
    here,
    picture,
    ratios,
    sweep,
    told,
    value,
)

__all__ = ["fig5_3", "fig5_4", "fig5_5"]

# -- Fig. 5.3

OUTPUTS = (1, 5, 20, 50, 100, 200)


@figure("feather-fig5.3", PAPER, "§5.2.3, Fig. 5.3", "throughput by decode tokens")
def fig5_3(workloads: Sequence[Workload], tell: Tell) -> Result:
    rows = sweep({f"{tokens}": here(Load(output_tokens=tokens)) for tokens in OUTPUTS}, SOME, tell)
    gains = ratios(rows)
    best = max(value(rows, "200", policy) for policy in ("sglang_fcfs", "lpm"))
    own = {str(tokens): value(rows, str(tokens), FEATHER, "batch") for tokens in OUTPUTS}
    section = Section("§5.2.3")
    claims = [
        section.says(
            "In the prefill-dominated regime (1–20 tokens), all policies behave similarly",
            told({at: gains[at] for at in ("1", "5", "20")}),
            all(abs(gains[at] - 1) < 0.1 for at in ("1", "5", "20")),
            "feather over fcfs; agrees if within a tenth",
        ),
        section.says(
            "Beyond 20 tokens, the policies diverge sharply",
            told({at: gains[at] for at in ("50", "100", "200")}),
            gains["200"] > max(1.2, gains["50"]),
            "feather over fcfs; agrees if by a fifth at 200 tokens, and by more than at 50",
        ),
        section.says(
            "reaching $\\sim 3800$ toks/s at 200 tokens—over $3\\times$ higher than SGLang policies",
            f"{value(rows, '200', FEATHER):,.0f} tokens/s",
            close(value(rows, "200", FEATHER), 3800.0),
            f"{value(rows, '200', FEATHER) / best:.2f}× the best of lpm and sglang_fcfs. Batches of 500 on one prefix "
            ""
            f"would have {apart(Load()):,.0f}",
            printed="3800 toks/s",
        ),
        section.says(
            "Together, these effects drive the steady increase in FEATHER's batch size and throughput",
            f"batch {told(own, '.0f')}",
            [*own.values()] == sorted(own.values()),
            "a round keeps batches apart that are of one prefix each: a fifth of those that run",
        ),
    ]
    title = "FEATHER Fig. 5.3: decode tokens"
    return Result(columns("tokens"), rows, claims, NOTES, picture(title, rows, "decode tokens", ("tokens_s", "batch")))


# -- Fig. 5.4

PREFIXES = (500, 1_000, 2_000, 5_000, 10_000)


@figure("feather-fig5.4", PAPER, "§5.2.4, Fig. 5.4", "throughput by prefix length")
def fig5_4(workloads: Sequence[Workload], tell: Tell) -> Result:
    rows = sweep({f"{tokens:,}": here(Load(prefix_tokens=tokens)) for tokens in PREFIXES}, SOME, tell)
    gains = ratios(rows)
    fall = {policy: [value(rows, at, policy) for at in gains] for policy in SOME}
    section = Section("§5.2.4")
    claims = [
        section.says(
            "longer prefixes increase prefill compute and KV cache pressure, reducing throughput across policies",
            ", ".join(f"{policy} {each[0]:,.0f} to {each[-1]:,.0f}" for policy, each in fall.items()),
            all(each == sorted(each, reverse=True) for each in fall.values()),
            "tokens/s, shortest to longest; agrees if each step is down",
        ),
        section.says(
            "FEATHER's advantage grows with prefix length, driven by higher locality gains as sequences lengthen",
            told(gains),
            [*gains.values()][-1] == max(gains.values()) and min(gains.values()) > 0.95,
            "feather over fcfs",
        ),
    ]
    title = "FEATHER Fig. 5.4: prefix length"
    return Result(columns("prefix"), rows, claims, NOTES, picture(title, rows, "prefix tokens", ("tokens_s",)))


# -- Fig. 5.5

LEVELS = (1, 2, 3, 4)
OWN = (FCFS, "bandit", "q_learning", "heuristic")


@figure("feather-fig5.5", PAPER, "§5.2.7, Fig. 5.5", "throughput by tree levels")
def fig5_5(workloads: Sequence[Workload], tell: Tell) -> Result:
    points = {
        f"{levels}": here(Load(prefix_tokens=4_000, levels=levels, groups=1 << (levels - 1))) for levels in LEVELS
    }
    rows = sweep(points, OWN, tell)
    fcfs, own = ([value(rows, at, policy) for at in points] for policy in (FCFS, FEATHER))
    section = Section("§5.2.7")
    claims = [
        section.says(
            "going from 1 to 2 or more levels of the radix tree reduces the locality in KV cache traversal and, "
            "hence, degrades throughput",
            f"fcfs {', '.join(f'{each:,.0f}' for each in fcfs)}",
            max(fcfs[1:]) < 0.9 * fcfs[0],
            "tokens/s with 1 to 4 levels",
        ),
        section.says(
            "*FEATHER* actively preserves prefix homogeneity within batches, leading to stable throughput at all "
            "levels",
            f"{', '.join(f'{each:,.0f}' for each in own)}",
            min(own) > 0.8 * max(own),
            "tokens/s; agrees if within a fifth. With four levels a branch has an eighth of those that run, and its "
            "batches read the weights for 60 requests; it is never slower than fcfs",
        ),
    ]
    title = "FEATHER Fig. 5.5: tree levels"
    return Result(columns("levels"), rows, claims, NOTES, picture(title, rows, "levels", ("tokens_s", "batch")))
