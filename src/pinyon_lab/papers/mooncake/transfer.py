"""Mooncake: when fetching a prefix pays (§2.2, Eq. 2), TTFT by bandwidth (§5.4.2, Fig. 13), and the parts of a
request's latency (§5.4.3, Fig. 14)."""

from __future__ import annotations

from collections.abc import Callable

from pinyon_lab.figures.figure import Basis, Column, FigureInputs, Result, Table, columns, figure
from pinyon_lab.figures.rows import counting
from pinyon_lab.figures.serving import MODEL_NOTE, UTILISATION, Results, TestbedSystem, arrivals_of, node, seldom, split
from pinyon_lab.papers.mooncake.figures import NODE_TOKENS, PAPER, WIDTH, A, B
from pinyon_lab.pictures import Bars, Course, Courses

GQA, ITEM_BYTES = 8, 2
"""The model's gqa and s (Table 1)."""
A800_FLOPS = 8 * 312e12
"""The machine's G (Table 1)."""
H800_FLOPS = 8 * 989e12
"""NVIDIA's data sheet of the H800 SXM, dense 16 bit; the paper gives no number."""
GB = 1e9


def least_bytes_s(flops: float, prefix: int) -> float:
    """Returns the bytes/s above which fetching ``prefix`` tokens beats computing them at ``flops``/s (Eq. 2)."""
    return flops * 2 * WIDTH * ITEM_BYTES / (GQA * (A * prefix * WIDTH + B * WIDTH**2))


PREFIXES = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


@figure("mooncake-eq2", PAPER, "§2.2, Eq. 2", "bandwidth from which on fetching is sooner")
def eq2(given: FigureInputs) -> Result:
    machines = (("8 x A800", A800_FLOPS), ("8 x H800", H800_FLOPS))
    table = Table(
        given, Column("prefix", "prefix", ",d"), *(Column(name, f"{name}, GB/s", ".2f") for name, _ in machines)
    )
    for prefix in PREFIXES:
        table.add(prefix, *(least_bytes_s(flops, prefix) / GB for _, flops in machines))

    def claim(said: str, printed: float, flops: float) -> None:
        ours = least_bytes_s(flops, 8192) / GB
        table.says(
            said,
            f"{ours:.2f} GB/s",
            round(ours) == printed,
            "arithmetic: Eq. 2 with Table 1, rounded as printed",
            printed=f"{printed:g} GB/s",
        )

    claim("Equation 2 yields a minimum required B of 6 GB/s", 6, A800_FLOPS)
    claim("The requirement for B will be enlarged to 19 GB/s for an $8 \\times H800$ machine", 19, H800_FLOPS)
    courses = [Course(name, table.rows.points("prefix", name)) for name, _ in machines]
    panel = Courses("From where on fetching is sooner", "prefix in tokens", "GB/s", courses, form=".0f")
    note = "The H800's throughput is NVIDIA's figure for dense 16 bit, 989 TFLOP/s; the paper does not print one."
    return table.result("Mooncake Eq. 2: bandwidth that is worth it", [panel], [note])


GBITS = (24, 48, 72, 100, 150, 200, 300, 400)
RECOMMENDED_GBIT = 100
SECONDS_MAX = 2.0
FETCHING = ("algorithm1", "kvcache_centric")


@figure("mooncake-fig13", PAPER, "§5.4.2, Fig. 13", "TTFT and transfers by bandwidth", ("synthetic",))
def fig13(given: FigureInputs) -> Result:
    (workload,) = given.workloads
    arrivals = arrivals_of(workload)
    none = TestbedSystem("recomputation", split(8), "least_loaded", {"prefix_cache": False}).serve(
        workload, arrivals, given.tell
    )
    recomputed_s = none.mean_ttft_s()
    table = Table(
        given,
        *columns(gbit=("Gbit/s", "d"), policy="scheduler"),
        *columns(Basis.MODELLED, ttft_s=("mean TTFT", ".2f"), fetch_s=("fetch, s", ".2f")),
        *columns(Basis.MODELLED, theory_s=("alone, s", ".2f"), fetches=("fetches", ",d"), reused=("reused", ".1%")),
    )
    for gbit in GBITS:
        for policy in FETCHING:
            text = f"{gbit} Gbit/s: {policy}"
            given.tell(text)
            bytes_s = gbit * GB / 8
            system = TestbedSystem(text, split(8), policy, {"dram_tokens": NODE_TOKENS}, bytes_s)
            cluster = system.cluster(workload.block_tokens)
            outcomes = Results(cluster.run(arrivals, progress=seldom(counting(given.tell, text, len(arrivals)))))
            moves, fetches = cluster.moves, cluster.moves.fetches
            each_s = (seconds / max(1, fetches) for seconds in (moves.fetch_s, moves.fetched_bytes / bytes_s))
            table.add(gbit, policy, outcomes.mean_ttft_s(), *each_s, fetches, outcomes.reused(), basis=workload.basis)
    by_policy = {policy: table.rows.those(policy=policy) for policy in FETCHING}
    recommended = [row for row in table.rows if row["gbit"] >= RECOMMENDED_GBIT]
    most_s = {policy: max(row["ttft_s"] for row in recommended if row["policy"] == policy) for policy in FETCHING}
    slow, fast = ({policy: rows[place] for policy, rows in by_policy.items()} for place in (0, -1))
    judged = FETCHING[0]

    def both(text: Callable[[str], str]) -> str:
        return "; ".join(f"{text(policy)} ({policy})" for policy in FETCHING)

    table.says(
        "When the total communication bandwidth exceeds 100 Gbps, the average TTFT remains below 2 s, "
        "significantly less than the TTFT of the recomputation baseline",
        f"at most {both(lambda each: f'{most_s[each]:.2f} s')}; recomputation {recomputed_s:.2f} s",
        most_s[judged] < SECONDS_MAX < recomputed_s,
        f"from {RECOMMENDED_GBIT} Gbit/s on; the three statements are judged by {judged}, the paper's",
        printed="< 2 s",
    )
    table.says(
        "when bandwidth falls below 100 Gbps, system performance is significantly compromised",
        both(
            lambda each: (
                f"TTFT {slow[each]['ttft_s']:.2f} s at {GBITS[0]} Gbit/s, {fast[each]['ttft_s']:.2f} s at {GBITS[-1]}"
            )
        ),
        slow[judged]["ttft_s"] > 2 * fast[judged]["ttft_s"],
        f"more than twice counts as significant; by {judged}",
    )
    table.says(
        "network congestion, as demonstrated by the substantial divergence between actual and theoretical "
        "transfer times",
        both(lambda each: f"{slow[each]['fetch_s']:.2f} s against {slow[each]['theory_s']:.2f} s at {GBITS[0]} Gbit/s"),
        slow[judged]["fetch_s"] > 1.5 * slow[judged]["theory_s"],
        f"a fetch, and what it would take alone; half as long again counts as substantial; by {judged}",
    )
    panels = [
        Courses(
            title,
            "Gbit/s",
            "seconds",
            [
                Course(f"{policy}{more}", by_policy[policy].points("gbit", key), thin)
                for policy in FETCHING
                for key, more, thin in keys
            ],
            form=".1f",
        )
        for title, keys in (
            ("Mean TTFT", [("ttft_s", "", False)]),
            ("A fetch", [("fetch_s", "", False), ("theory_s", ", alone", True)]),
        )
    ]
    notes = [
        "Eight nodes for prompts and eight to decode; what is pushed to these shares the NICs with what is fetched. "
        "kvcache_centric is Algorithm 1 that fetches only where that is sooner, as §4.2 says in words, and from decode "
        "nodes as well, which hold what they decode; algorithm1 from the prefill node that holds most.",
        MODEL_NOTE,
    ]
    return table.result("Mooncake Fig. 13: network bandwidth", panels, notes)


LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072)
RATIOS = (0.0, 0.95)
DECODED = 128
SCHEDULE_S = 0.001
"""The time that our conductor takes for a placement; as there is one request, nothing queues."""
PARTS = ("schedule", "prefill", "transfer", "load", "decode")


def _parts(tokens: int, ratio: float) -> dict[str, float]:
    machine, engine = node()
    held = int(tokens * ratio)
    size = tokens * machine.kv_token_bytes
    computed_s = engine.seconds([(held, tokens)], 0, 0)
    # Cached KV is loaded layer by layer while the rest is computed: the longer of the two counts.
    prefill_s = max(computed_s, held * machine.kv_token_bytes / machine.dram_bytes_s)
    decode_s = sum(engine.seconds([], 1, tokens + step) for step in range(DECODED))
    values = SCHEDULE_S, prefill_s, size / machine.nic_bytes_s, size / machine.dram_bytes_s, decode_s
    return dict(zip(PARTS, values, strict=True))


@figure("mooncake-fig14", PAPER, "§5.4.3, Fig. 14", "what a request's latency is made of")
def fig14(given: FigureInputs) -> Result:
    table = Table(
        given,
        *columns(tokens=("tokens", ",d"), ratio=("cached", ".0%")),
        *(Column(part, f"{part}, s", ".3f", Basis.MODELLED) for part in PARTS),
    )
    for ratio in RATIOS:
        for tokens in LENGTHS:
            table.add(tokens, ratio, *_parts(tokens, ratio).values())
    without, cached = _parts(LENGTHS[-1], 0.0), _parts(LENGTHS[-1], 0.95)
    before_token = PARTS[:-1]
    prefill = 1 - cached["prefill"] / without["prefill"]
    ttft = 1 - sum(cached[part] for part in before_token) / sum(without[part] for part in before_token)
    table.says(
        "with an input length of 128k tokens, prefix caching reduces the prefill time by 92%",
        f"{prefill:.0%}",
        abs(prefill - 0.92) <= 0.02,
        "Eq. 1 with Table 1, 95% cached; within two points",
        printed="92%",
    )
    table.says(
        "prefix caching in MOONCAKE can reduce TTFT by 86% with an input length of 128k tokens",
        f"{ttft:.0%}",
        abs(ttft - 0.86) <= 0.02,
        "all but decoding, one after the other, at full bandwidth and without a queue; within two points",
        printed="86%",
    )
    panels = [
        Bars(
            f"{ratio:.0%} cached",
            "seconds",
            [f"{tokens // 1024}k" for tokens in LENGTHS],
            {part: table.rows.column(part, ratio=ratio) for part in PARTS},
            ".2f",
        )
        for ratio in RATIOS
    ]
    notes = [
        f"A formula, not a run: Table 1 at a utilisation of {UTILISATION:g}, KV over all NICs at 800 Gbit/s, from DRAM "
        f"at 128 GB/s, {DECODED} tokens decoded alone. Scheduling: {1000 * SCHEDULE_S:g} ms, as a placement takes."
    ]
    return table.result("Mooncake Fig. 14: what latency is made of", panels, notes)
