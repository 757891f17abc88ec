"""FEATHER §5.2.5 and §5.2.6: a server under load, by model, and LongChat 13B by prefix groups."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon_lab.figures.figure import Result, Section, Tell, figure
from pinyon_lab.figures.rows import close
from pinyon_lab.figures.workload import Workload
from pinyon_lab.papers.feather.runs import FCFS, MACHINE, PAPER, Load
from pinyon_lab.papers.feather.sweeps import FEATHER, NOTES, SOME, columns, picture, ratios, sweep, told, value

# -- Fig. 5.6

MODELS = {
    "Qwen 0.5B": "rtx6000ada-qwen-0.5b",
    "Qwen 1.5B": "rtx6000ada-qwen-1.5b",
    "Qwen 8B": "rtx6000ada-qwen-8b",
    "Llama 3 8B": MACHINE,
    "LongChat 13B": "rtx6000ada-longchat-13b",
}


@figure("feather-fig5.6", PAPER, "§5.2.5, Fig. 5.6", "throughput by model")
def fig5_6(workloads: Sequence[Workload], tell: Tell) -> Result:
    rows = [row for model, machine in MODELS.items() for row in sweep({model: Load()}, SOME, tell, machine)]
    gains = ratios(rows)
    first = [value(rows, model, FEATHER) for model in MODELS]
    ahead = {
        model: value(rows, model, FEATHER) / max(value(rows, model, policy) for policy in SOME if policy != FEATHER)
        for model in MODELS
    }
    section = Section("§5.2.5")
    claims = [
        section.says(
            "FEATHER outperforms all baselines across all models",
            told(ahead),
            all(ratio > 0.99 for model, ratio in ahead.items() if model != "Qwen 1.5B"),
            "against the best of the others; agrees if nowhere more than 1 % behind, but for Qwen 1.5B, which the "
            "paper excepts",
        ),
        section.says(
            "FEATHER's relative throughput advantage over the baselines grows with model size",
            told(gains),
            gains["Qwen 0.5B"] <= gains["Qwen 1.5B"] <= min(gains["Qwen 8B"], gains["Llama 3 8B"]),
            "feather over fcfs, from 0.5B to the 8B models",
        ),
        section.says(
            "smaller models achieve higher throughput owing to lower per-token compute costs",
            ", ".join(f"{model}: {each:,.0f}" for model, each in zip(MODELS, first, strict=True)),
            first[0] > first[1] > max(first[2:4]),
            "tokens/s of feather",
        ),
    ]
    return Result(columns("model"), rows, claims, NOTES, picture("FEATHER Fig. 5.6: models", rows, "model"))


# -- Fig. 5.7

LONG_GROUPS = (1, 2, 5, 20, 100)


@figure("feather-fig5.7", PAPER, "§5.2.6, Fig. 5.7", "LongChat 13B by prefix groups")
def fig5_7(workloads: Sequence[Workload], tell: Tell) -> Result:
    loads = {f"{groups}": Load(groups=groups) for groups in LONG_GROUPS}
    rows = sweep(loads, (FCFS, "bandit", "dynamic"), tell, MODELS["LongChat 13B"])
    gains = ratios(rows)
    fcfs = {groups: value(rows, str(groups), FCFS) for groups in LONG_GROUPS}
    batch = {groups: value(rows, str(groups), FCFS, "batch") for groups in LONG_GROUPS}
    tbt = {groups: value(rows, str(groups), FCFS, "tbt_ms") for groups in LONG_GROUPS}
    own = [value(rows, at, FEATHER) for at in loads]
    section = Section("§5.2.6")
    claims = [
        section.says(
            "At 100 prefix groups, it achieves up to $22\\times$ higher throughput than FCFS",
            f"{gains['100']:.2f}×",
            close(gains["100"], 22.0),
            "1,000 requests are ten of each prefix: even those that wait together are a batch of ten, for which a "
            "prefix of 5,000 tokens is computed",
            printed="22×",
        ),
        section.says(
            "there is a sharp drop in throughput when moving from 1 to 2 prefix groups, accompanied by an increase "
            "in TBT",
            f"to {fcfs[2] / fcfs[1]:.0%}, TBT {tbt[1]:,.0f} and {tbt[2]:,.0f} ms",
            fcfs[2] < 0.8 * fcfs[1] and tbt[2] > tbt[1],
            "of fcfs",
        ),
        section.says(
            "The further decline from 2 to 5 prefix groups is driven by KV cache evictions, which is also reflected "
            "in the steep reduction in average batch size",
            f"{fcfs[2]:,.0f} to {fcfs[5]:,.0f} tokens/s, batch {batch[2]:.0f} to {batch[5]:.0f}",
            fcfs[5] < fcfs[2] and batch[5] < 0.7 * batch[2],
            "23,004 tokens of KV hold four prefixes",
        ),
        section.says(
            "*FEATHER* maintains stable and consistent throughput across all settings",
            ", ".join(f"{each:,.0f}" for each in own),
            min(own) > 0.8 * max(own),
            "tokens/s; agrees if within a fifth",
        ),
    ]
    title = "FEATHER Fig. 5.7: LongChat 13B"
    return Result(columns("groups"), rows, claims, NOTES, picture(title, rows, "groups"))
