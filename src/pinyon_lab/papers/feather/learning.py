"""FEATHER's learning: convergence (Figs. 5.12, 5.13), requests that share nothing (Fig. 5.14), and results without
learning (Fig. 5.17)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pinyon_lab.figures.figure import Basis, FigureInputs, Result, Table, columns, figure
from pinyon_lab.figures.rows import every, told
from pinyon_lab.papers.feather.load import FEATHER, SERVED, sweep
from pinyon_lab.papers.feather.runs import FCFS, NEVER, NOTE, PAPER, FeatherLoad, FeatherServer, LoadSample, served
from pinyon_lab.pictures import Course, Courses

CONVERGING = FeatherLoad(rate=5.0)
CONVERGING_REQUESTS = 1_500
LATE_S = 100.0
"""The time at which exploration is over (§5.3.5)."""
HOMOGENEOUS = 0.9

SAMPLED = [
    *columns(time_s=("until, s", ".0f"), rate=("arrivals, requests/s", "g")),
    *columns(Basis.MODELLED, batch=("batch", ".0f"), homogeneity=("shared by all of the batch", ".0%")),
    *columns(Basis.MODELLED, batches=("batches of a round", ".1f"), tokens_s=("decoded, tokens/s", ",.0f")),
]
WINDOW = 5
"""The number of samples in a row."""


def _add_windows(table: Table, samples: Sequence[LoadSample], rate: float) -> None:
    """Adds a row for each window of the samples."""
    for at in range(0, len(samples), WINDOW):
        part = samples[at : at + WINDOW]
        table.add(part[-1].time_s, rate, *(_mean(part, column.key) for column in SAMPLED[2:]))


def _mean(samples: Sequence[LoadSample], key: str) -> float:
    return sum(float(getattr(each, key)) for each in samples) / max(1, len(samples))


def _panels(courses: Mapping[str, Sequence[LoadSample]]) -> list[Courses]:
    return [
        Courses(
            text,
            "seconds",
            text,
            [
                Course(name, [(each.time_s, float(getattr(each, key))) for each in samples], dashed=bool(number))
                for number, (name, samples) in enumerate(courses.items())
            ],
            form=form,
        )
        for text, key, form in (("requests of a step", "batch", ".0f"), ("shared by all of it", "homogeneity", ".0%"))
    ]


@figure("feather-fig5.12", PAPER, "§5.3.5, Fig. 5.12", "convergence of the bandit")
def fig5_12(given: FigureInputs) -> Result:
    runs: dict[float, list[LoadSample]] = {}
    for rate in (CONVERGING.rate, 2 * CONVERGING.rate):
        load = FeatherLoad(rate=rate, requests=round(CONVERGING_REQUESTS * rate / CONVERGING.rate))
        end_s = CONVERGING_REQUESTS / CONVERGING.rate
        taken = served(load, FeatherServer(FEATHER), given.tell).samples
        runs[rate] = [each for each in taken if each.time_s <= end_s]
    table = Table(given, *SAMPLED)
    for rate, samples in runs.items():
        _add_windows(table, samples, rate)
        early = [each for each in samples if each.time_s <= LATE_S]
        late = [each for each in samples if each.time_s > LATE_S]
        batch = f"{rate:g}/s: batch {_mean(early, 'batch'):.0f} until 100 s, {_mean(late, 'batch'):.0f} after that"
        table.says(
            "After this phase concludes (around 100 seconds), the system shifts to homogeneous batching",
            f"{batch}; {_mean(early, 'homogeneity'):.0%} and {_mean(late, 'homogeneity'):.0%} shared",
            _mean(late, "homogeneity") >= HOMOGENEOUS > _mean(early, "homogeneity"),
            "agrees if batches share nine tenths of their prompts after 100 s and not before. At 5/s this server "
            "is not full (70 are decoded at once, and one batch of all is as fast as five of 14); at twice that it is",
            printed="100 s",
        )
        most = max((each.batch for each in samples), default=0.0)
        table.says(
            "FEATHER experiments with different configurations and reaches relatively large batch sizes (around 500)",
            f"{rate:g}/s: {most:.0f} at most",
            most >= 400,
            "mean of five seconds. The paper's server is full at 5/s, for it has a fourth of its throughput "
            "without locality; ours does not fill up while it explores, which takes some hundred rounds",
            printed="500",
        )
    panels = _panels({f"{rate:g} requests/s": samples for rate, samples in runs.items()})
    return table.result("FEATHER Fig. 5.12: convergence", panels, [NOTE])


PHASES = ((5.0, 200.0), (10.0, 100.0), (20.0, 50.0))


@figure("feather-fig5.13", PAPER, "§5.3.6, Fig. 5.13", "the bandit as rates change")
def fig5_13(given: FigureInputs) -> Result:
    samples = served(FeatherLoad(rates=PHASES), FeatherServer(FEATHER), given.tell).samples
    table, means, begin_s = Table(given, *SAMPLED), [], 0.0
    for rate, seconds in PHASES:
        part = [each for each in samples if begin_s < each.time_s <= begin_s + seconds]
        _add_windows(table, part, rate)
        means.append(_mean(part, "batch"))
        begin_s += seconds
    table.says(
        "Between 200 and 300 seconds, the rate increases to 10, leading to a noticeable rise in batch size",
        f"{means[0]:.0f} to {means[1]:.0f} requests",
        means[1] > means[0],
        "means of the phases",
    )
    table.says(
        "from 300 to 350 seconds, the request rate reaches 20, and the batch size peaks",
        f"{means[-1]:.0f} requests",
        means[-1] == max(means),
        "mean of the phase",
    )
    shown = [each for each in samples if each.time_s <= begin_s]
    return table.result("FEATHER Fig. 5.13: changing rates", _panels({"bandit": shown}), [NOTE])


ALONE_RATES = (2, 5, 10, 20)
ALONE_REQUESTS = 400
ALONE_TOKENS = 1_000
"""Our choice: the text prints no length. With 5,000, prefill would hide all else."""
ALONE = (FCFS, "bandit", "q_learning", "heuristic", "sglang_fcfs")


@figure("feather-fig5.14", PAPER, "§5.3.7, Fig. 5.14", "nothing shared")
def fig5_14(given: FigureInputs) -> Result:
    points = {
        f"{rate}/s": FeatherLoad(rate=rate, groups=0, prefix_tokens=ALONE_TOKENS, requests=ALONE_REQUESTS)
        for rate in ALONE_RATES
    }
    table = sweep(given, "rate", points, ALONE)
    gains = {policy: table.ratios(policy) for policy in ("bandit", "q_learning")}
    most = f"{max(ALONE_RATES)}/s"
    table.says(
        "even in the absence of prefix sharing, FEATHER, powered by its adaptive RL-based policy—matches the "
        "performance of vLLM's FCFS scheduler",
        "; ".join(f"{policy} {told(each)}" for policy, each in gains.items()),
        min(gains["bandit"].values()) > 0.97,
        "throughput over fcfs by rate; agrees if the bandit is nowhere more than 3 % behind. Where nobody shares "
        "anything a round has one decision, and one batch as soon as that is known to be better",
    )
    table.says(
        "At higher input rates, vLLM-based policies begin to outperform SGLang policies, primarily due to their "
        "ability to form larger batches",
        f"batch {table.value(most, FCFS, 'batch'):.0f} against {table.value(most, 'sglang_fcfs', 'batch'):.0f}, "
        f"{table.value(most, FCFS):,.0f} against {table.value(most, 'sglang_fcfs'):,.0f} tokens/s",
        table.value(most, FCFS) > 1.02 * table.value(most, "sglang_fcfs"),
        "at the highest rate, fcfs against sglang_fcfs: where nothing is shared nothing is counted twice, and "
        "the two are one policy here",
    )
    return table.drawn("FEATHER Fig. 5.14: nothing shared", shown=SERVED[:3])


LEARNING_RATES = (1, 3, 5, 7, 10, 15, 20, 100)
BEYOND = 100
"""Our choice: a rate above those of the figure."""


@figure("feather-fig5.17", PAPER, "§5.4.2, Fig. 5.17", "with and without learning")
def fig5_17(given: FigureInputs) -> Result:
    table = sweep(given, "rate", {f"{rate}/s": FeatherLoad(rate=rate) for rate in LEARNING_RATES}, (FEATHER, NEVER))
    gains = table.ratios(FEATHER, NEVER)
    batch = table.ratios(FEATHER, NEVER, "batch")
    low = {f"{rate}/s": gains[f"{rate}/s"] for rate in LEARNING_RATES if rate < 5}
    high = {f"{rate}/s": gains[f"{rate}/s"] for rate in LEARNING_RATES if 5 < rate < BEYOND}
    beyond = f"{BEYOND}/s"
    table.finds(
        "At $< 5$ req/s, removing RL has little effect",
        every(low, lambda ratio: abs(ratio - 1) < 0.03),
        "throughput with learning over without; agrees if within 3 %",
    )
    table.says(
        "With RL, FEATHER detects homogeneous requests and stops batching at the right time, achieving higher "
        "throughput despite smaller average batch sizes",
        f"{told(high)}; batch {told({at: batch[at] for at in high})}",
        all(ratio > 1.02 for at, ratio in high.items() if at != "7/s") and all(batch[at] < 1 for at in high),
        "of those beyond 5/s; agrees if by 2 % from 10/s on. This server is full at 6/s without locality",
    )
    table.says(
        "At higher rates than shown in the figure, large pools enable even non-RL to form $\\sim 500$ -request "
        "homogeneous batches, leading the two curves to converge",
        f"{beyond}: {gains[beyond]:.2f}; batches of {table.value(beyond, NEVER, 'batch'):.0f}, of all five prefixes",
        abs(gains[beyond] - 1) < 0.1,
        "who gets memory first are those of one prefix, but memory holds all five, and whoever has some is decoded",
        printed="500",
    )
    return table.drawn("FEATHER Fig. 5.17: without RL", shown=SERVED[:3])
