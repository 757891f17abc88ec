"""Shared parts of the commands that simulate: the model as the arguments describe it, the trace, and the results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from pinyon.batching import BATCHING_DEFAULT, BATCHING_POLICIES
from pinyon.batching.service_order import SERVICE_ORDER_DEFAULT, SERVICE_ORDERS
from pinyon.core.errors import InvalidArgument
from pinyon.core.policies import Registry
from pinyon.core.request import Role
from pinyon.eviction import EVICTION_POLICIES
from pinyon.placement.policies import PLACEMENT_DEFAULT, PLACEMENT_POLICIES
from pinyon.placement.scaling import ScalingSettings, parse_sizes
from pinyon.profiles.engine_profile import load_profile
from pinyon.profiles.machine_profile import built_in_machines, load_machine
from pinyon_lab.cli.numbers import REFERENCE, WARM_UP, add_numbers, check_numbers, refuse_given
from pinyon_lab.cli.trace_input import add_trace, bar, reading, seed_of, write_text
from pinyon_lab.pictures import Course, Courses, Picture, svg
from pinyon_lab.simulator.cluster_settings import KERNELS, ClusterSettings, StepRule
from pinyon_lab.simulator.models import ClusterModel, Model, ReferenceModel, Rows, RunLimits, utilised
from pinyon_lab.simulator.prefill_reference import ReferenceSettings
from pinyon_lab.simulator.reference_memory import FETCH_US, SSD_US, PoolRules
from pinyon_lab.simulator.workload import Arrival, cut, native_rate, shrunk
from pinyon_lab.traces.file import TraceFile

MODELS = f"{REFERENCE}, {', '.join(built_in_machines())}, or a machine profile as a JSON file"
WITH_MEMORY = "l4-llama-8b"
"""A model to begin with, for error messages to suggest."""
SSD_SHARE = 3
"""The size of a pool on SSDs, as a multiple of the plain reference's DRAM."""
_ALIKE = ("max_batch", "step_tokens", "whole_tokens", "active_prefills", "pipeline", "attention_kernel")
"""The options that are settings of the cluster under the same name."""
_WHOLE_ALONE = (
    *("prefill_instances", "decode_instances", "clients", "dram_tokens", "step_tokens", "chunk_tokens", "step_tbt"),
    *("whole_tokens", "active_prefills", "max_batch", "pipeline", "utilisation", "path_ms", "shed", "shed_tbt"),
    *("no_prefix_cache", "steps", "batching", "attention_kernel", "sizes"),
)
"""The options that the model of few rules does not use."""
POINTS = 200
"""The number of points of a curve in a picture."""
_FACTS = (
    ("requests that count", "counted", "{:,}"),
    ("rate, requests/s", "rate", "{:.4g}"),
    ("TTFT in time", "attainment", "{:.2%}"),
    ("  of the last quarter by arrival", "attainment_last_quarter", "{:.2%}"),
    ("  of the tenth with the longest prompts", "attainment_longest_tenth", "{:.2%}"),
    ("TTFT mean, s", "mean_s", "{:.3f}"),
    ("TTFT P50, s", "p50_s", "{:.3f}"),
    ("TTFT P90, s", "p90_s", "{:.3f}"),
    ("TTFT P99, s", "p99_s", "{:.3f}"),
    ("tokens reused", "hit_ratio", "{:.2%}"),
    ("tokens fetched", "fetched_ratio", "{:.2%}"),
    ("TBT P50, ms", "tbt_p50_s", "{:.1f}"),
    ("TBT P90, ms", "tbt_p90_s", "{:.1f}"),
    ("TBT in time", "tbt_attainment", "{:.2%}"),
    ("effective: both in time", "effective", "{:.2%}"),
    ("instances that computed prompts", "instances_used", "{:.0f}"),
    ("finished", "finished", "{:.2%}"),
    ("end to end mean, s", "e2e_mean_s", "{:.2f}"),
    ("tokens generated per s", "output_tokens_per_s", "{:,.0f}"),
)
_COLUMNS = (
    ("in time", "attainment", "{:.1%}", "share of the requests whose TTFT is"),
    ("last ¼", "attainment_last_quarter", "{:.1%}", "of the last quarter by arrival"),
    ("longest", "attainment_longest_tenth", "{:.1%}", "of the tenth with the longest prompts"),
    ("P50", "p50_s", "{:.2f}", "of the TTFT in s, as P90 and P99"),
    ("P90", "p90_s", "{:.2f}", ""),
    ("P99", "p99_s", "{:.2f}", ""),
    ("reused", "hit_ratio", "{:.1%}", "share of the prompts' tokens"),
    ("both", "effective", "{:.1%}", "TTFT and TBT in time"),
)
"""The columns of a comparison, and the legend of each."""


@dataclass(frozen=True, slots=True)
class SentTrace:
    """A trace as it is sent, and the limits by which its run is judged."""

    arrivals: Sequence[Arrival]
    broken: int
    native_rate: float
    rate: float
    """The rate asked for, or else the trace's own."""
    limits: RunLimits


def add_cluster(parser: argparse.ArgumentParser, *, sized: bool = True, traced: bool = True) -> None:
    """Adds the options of the trace, the model and the limits. Without ``traced``, the trace may be left out."""
    add_trace(parser, needed=traced)
    parser.set_defaults(parser=parser)
    add = parser.add_argument
    add("--model", default=REFERENCE, metavar="NAME", help=f"what is simulated: {MODELS} (default {REFERENCE})")
    add_numbers(
        parser, *(["--instances"] if sized else []), "--prefill-instances", "--decode-instances", "--cache-tokens"
    )
    described = f"who is served next: {SERVICE_ORDERS.described} (default {SERVICE_ORDER_DEFAULT}, as a worker's)"
    add("--order", default=SERVICE_ORDER_DEFAULT, help=described)
    add("--pool", default="none", choices=("none", "dram", "ssd"), help="a global pool on the hosts (default none)")
    add("--eviction", default="lru", help="each cache's eviction policy, as in simulate-cache (default lru)")
    add_load(parser)
    add("--seed", type=seed_of, default=0, help="seed of all that is random, and of hashes (default 0)")
    whole = parser.add_argument_group("models of whole machines")
    add_numbers(whole, "--dram-tokens", "--pool-tokens")
    whole.add_argument("--no-prefix-cache", action="store_true", help="reuse nothing")
    whole.add_argument(
        "--steps",
        default=StepRule.MIXED,
        choices=[*StepRule],
        help="what a step computes: chunks of prompts beside decoding (mixed, the default), or whole prompts first",
    )
    add_numbers(
        whole, "--step-tokens", "--chunk-tokens", "--step-tbt", "--whole-tokens", "--active-prefills", "--max-batch"
    )
    add_numbers(whole, "--pipeline")
    described = f"who gets KV memory: {BATCHING_POLICIES.described} (default {BATCHING_DEFAULT}, as a worker's)"
    whole.add_argument("--batching", default=BATCHING_DEFAULT, help=described)
    whole.add_argument(
        "--attention-kernel",
        choices=KERNELS,
        default="whole",
        help="which KV is read once for several requests: what the whole batch shares (whole, the default), or what "
        "any two of it share (grouped); it counts for profiles that gain by it",
    )
    add_numbers(whole, "--utilisation", "--path-ms")
    whole.add_argument(
        "--sizes",
        default="",
        metavar="LEAST-MOST",
        help="instances come and go with the load, within these bounds (default: their number is fixed)",
    )
    add_numbers(whole, "--shed", "--shed-tbt")


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the placement policy."""
    described = f"{PLACEMENT_POLICIES.described} (default {PLACEMENT_DEFAULT}, as a conductor's)"
    parser.add_argument("--policy", "--placement", default=PLACEMENT_DEFAULT, help=described)


def add_output(parser: argparse.ArgumentParser, *, per_request: bool = False, picture: bool = False) -> None:
    """Adds the options that say where results go."""
    if per_request:
        parser.add_argument("--per-request", type=Path, metavar="FILE", help="write a line of JSON for each request")
    if picture:
        parser.add_argument("--picture", type=Path, metavar="FILE", help="draw how TTFTs are distributed, as SVG")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")


def add_load(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how a trace is sent and its run is judged."""
    add_numbers(parser, "--tokens-max", "--shrink", "--clients", "--warm-up", "--slo", "--tbt-slo")


def check(arguments: argparse.Namespace) -> None:
    """Checks the options. Raises :class:`InvalidArgument`."""
    check_numbers(arguments)
    if arguments.clients:
        for name in ("rate", "goodput"):
            if getattr(arguments, name, None) is not None:
                raise InvalidArgument(f"--clients send when they have been answered: there is no --{name}", field=name)
    for name in ("per_request", "picture"):
        path: Path | None = getattr(arguments, name, None)
        # Checked before the run: a search for a rate may take long.
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InvalidArgument(f"cannot write {path}: there is no such folder, or it is one", field=name)


def block_tokens_of(arguments: argparse.Namespace, trace: TraceFile) -> int:
    """Returns the tokens of a block as it is sent. Raises :class:`InvalidArgument`."""
    block_tokens, factor = trace.format.block_tokens, int(arguments.shrink)
    if block_tokens % factor:
        raise InvalidArgument(f"--shrink must divide the trace's {block_tokens} tokens of a block", field="shrink")
    return block_tokens // factor


def read(arguments: argparse.Namespace, trace: TraceFile) -> SentTrace:
    """Reads the trace. Raises :class:`PinyonError`."""
    with reading(trace) as progress:
        rows = trace.sorted_rows(arguments.limit, progress)
        arrivals = cut(rows, trace.format.block_tokens, arguments.tokens_max)
    if not arrivals:
        raise InvalidArgument("no request of the trace has a prompt", field="trace")
    requests, rate = len(arrivals), native_rate(arrivals)
    by_itself = min(WARM_UP, requests // 10)
    warm_up = by_itself if arguments.warm_up is None else arguments.warm_up
    if warm_up >= requests:
        raise InvalidArgument(
            f"--warm-up {warm_up} leaves none of the trace's {requests} requests to count; its default is {by_itself}",
            field="warm_up",
        )
    limits = RunLimits(arguments.slo, arguments.tbt_slo, warm_up)
    asked = rate if arguments.rate is None else arguments.rate
    return SentTrace(shrunk(arrivals, arguments.shrink), trace.broken, rate, asked, limits)


def policy_of(arguments: argparse.Namespace, choice: str) -> str:
    """Returns the placement policy, with the options that other arguments set."""
    policy = _choice(PLACEMENT_POLICIES, choice, "policy")
    for option, value in (("seed", arguments.seed), ("slo_s", arguments.slo)):
        policy = PLACEMENT_POLICIES.with_default(policy, option, value)
    if arguments.model == REFERENCE:
        policy = PLACEMENT_POLICIES.with_default(policy, "combined", False)
        policy = PLACEMENT_POLICIES.with_default(policy, "fetch", arguments.pool != "none")
    return policy


def model_of(arguments: argparse.Namespace, trace: TraceFile, policy: str, instances: int | None) -> Model:
    """Returns the model for the blocks of a trace. Raises :class:`InvalidArgument`."""
    block_tokens = block_tokens_of(arguments, trace)
    order = _choice(SERVICE_ORDERS, arguments.order, "order")
    eviction = _choice(EVICTION_POLICIES, arguments.eviction, "eviction")
    if arguments.model == REFERENCE:
        return _reference(arguments, block_tokens, policy, instances, order, eviction)
    try:
        machine = load_machine(arguments.model)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.message}; or {REFERENCE}", field="model") from error
    engine = utilised(load_profile(machine.engine), arguments.utilisation)
    pool_tokens = (
        0 if arguments.pool == "none" else _tokens(arguments, "pool_tokens", machine.dram_tokens, block_tokens)
    )
    dram_tokens = arguments.dram_tokens
    if dram_tokens is None:  # a pool in DRAM uses the same memory, which must not count twice
        dram_tokens = 0 if arguments.pool == "dram" else machine.dram_tokens
    roles, sizes = _roles(arguments, instances), parse_sizes(arguments.sizes)
    settings = ClusterSettings(
        roles,
        block_tokens,
        _tokens(arguments, "cache_tokens", machine.hbm_tokens, block_tokens),
        dram_tokens,
        pool_tokens,
        pool_on_ssd=arguments.pool == "ssd",
        prefix_cache=not arguments.no_prefix_cache,
        step_rule=StepRule(arguments.steps),
        chunk_tokens=arguments.chunk_tokens or arguments.step_tokens,
        step_tbt_s=arguments.step_tbt,
        eviction=eviction,
        pool_eviction=eviction,
        batching=_choice(BATCHING_POLICIES, arguments.batching, "batching"),
        service_order=order,
        slo_s=arguments.slo,
        scaling=None if sizes is None else ScalingSettings(*sizes, slo_s=arguments.slo),
        path_s=arguments.path_ms * 1e-3,
        ttft_slo_s=arguments.shed or 0.0,
        tbt_slo_s=arguments.shed_tbt or 0.0,
        **{name: getattr(arguments, name) for name in _ALIKE},
    )
    return ClusterModel(settings, machine, engine, policy, arguments.seed, arguments.clients)


def _reference(
    arguments: argparse.Namespace, block_tokens: int, policy: str, instances: int | None, order: str, eviction: str
) -> Model:
    refuse_given(arguments, _WHOLE_ALONE, f"is of models of whole machines; {REFERENCE} has no such thing")
    missing = ["--instances is missing"] if instances is None else []
    if arguments.cache_tokens is None:
        other = f"a --model that has one, such as {WITH_MEMORY}"
        missing.append(f"{REFERENCE} has no memory of its own: give --cache-tokens, or {other}")
    if instances is None or missing:
        raise InvalidArgument("; ".join(missing), field="instances")
    cache_tokens = _tokens(arguments, "cache_tokens", 0, block_tokens)
    pool = _pool_rules(arguments, block_tokens, cache_tokens)
    settings = ReferenceSettings(
        instances, cache_tokens, block_tokens, arguments.slo, eviction, arguments.seed, pool=pool
    )
    return ReferenceModel(settings, policy, order)


def _pool_rules(arguments: argparse.Namespace, block_tokens: int, cache_tokens: int) -> PoolRules | None:
    """Returns the pool of all instances' caches; with SSDs, each instance adds the tokens of its SSD."""
    if arguments.pool == "none":
        if arguments.pool_tokens is not None:
            raise InvalidArgument("--pool-tokens is of a --pool", field="pool_tokens")
        return None
    if arguments.pool == "dram":
        if arguments.pool_tokens is not None:
            raise InvalidArgument(f"a pool of DRAM is the caches of {REFERENCE}: --cache-tokens", field="pool_tokens")
        return PoolRules(FETCH_US)
    ssd_tokens = SSD_SHARE * cache_tokens if arguments.pool_tokens is None else arguments.pool_tokens
    return PoolRules(FETCH_US, SSD_US, max(1, ssd_tokens // block_tokens))


def _tokens(arguments: argparse.Namespace, name: str, default: int, block_tokens: int) -> int:
    """Returns the tokens of an option, which must be at least a block."""
    tokens: int | None = getattr(arguments, name)
    tokens = default if tokens is None else tokens
    if tokens < block_tokens:
        option = f"--{name.replace('_', '-')}"
        raise InvalidArgument(f"{option} must be at least one block of {block_tokens}", field=name)
    return tokens


def _roles(arguments: argparse.Namespace, instances: int | None) -> tuple[Role, ...]:
    prefills: int = arguments.prefill_instances
    decodes: int = arguments.decode_instances
    if (prefills > 0) != (decodes > 0):
        raise InvalidArgument("--prefill-instances and --decode-instances go together", field="prefill_instances")
    if instances is None and not prefills:
        raise InvalidArgument(
            "--instances, or --prefill-instances and --decode-instances, is missing", field="instances"
        )
    if arguments.pipeline > 1 and not prefills:
        raise InvalidArgument("--pipeline is of --prefill-instances", field="pipeline")
    return (Role.MIXED,) * (instances or 0) + (Role.PREFILL,) * prefills + (Role.DECODE,) * decodes


def _choice(registry: Registry[Any], choice: str, option: str) -> str:
    try:
        return registry.checked(choice)
    except ValueError as error:
        raise InvalidArgument(str(error), field=option) from None


def run_model(model: Model, arrivals: Sequence[Arrival], text: str) -> Rows:
    with bar(text, len(arrivals)) as progress:
        return model.run(arrivals, progress)


def write_rows(arguments: argparse.Namespace, rows: Iterable[tuple[int, Any]]) -> None:
    """Writes a line of JSON for each row, with its number, to ``--per-request``. Raises :class:`InvalidArgument`."""
    if arguments.per_request is not None:
        lines = (json.dumps({"request": number, **each._asdict()}) + "\n" for number, each in rows)
        write_text(arguments.per_request, "".join(lines), "per_request")


def draw(arguments: argparse.Namespace, title: str, rows: dict[str, Rows], limits: RunLimits) -> None:
    """Draws to ``--picture`` the share of requests with a first token by each time. Raises :class:`InvalidArgument`."""
    if arguments.picture is None:
        return
    courses = []
    for label, each in rows.items():
        times = sorted(row.ttft_s for row in each[limits.warm_up :] if row.ttft_s > 0)
        count = len(each) - limits.warm_up
        places = sorted({round(at * (len(times) - 1) / POINTS) for at in range(POINTS + 1)}) if times else []
        courses.append(Course(label, [(times[at], (at + 1) / count) for at in places]))
    panel = Courses("Time to the first token", "TTFT, s", "of the requests by then", courses)
    write_text(arguments.picture, svg(Picture(title, [panel])), "picture")


def print_result(title: str, result: Mapping[str, Any]) -> None:
    """Prints a line for each figure."""
    table = Table(title=title, title_justify="left", show_header=False)
    for label, key, shown in _FACTS:
        if key in result:
            table.add_row(label, shown.format(result[key] * (1e3 if label.endswith(", ms") else 1)))
    results_console().print(table)


def print_side_by_side(title: str, first: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a line for each result; ``first`` is the title of the column with their names."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    shown = [column for column in _COLUMNS if any(column[1] in result for result in results.values())]
    for label, *_ in shown:
        table.add_column(label, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(name, *(form.format(result[key]) if key in result else "" for _, key, form, _ in shown))
    table.caption = "; ".join(f"{label}: {told}" for label, _, _, told in shown if told)
    table.caption_justify = "left"
    results_console().print(table)


def results_table(title: str, *titles: str) -> Table:
    """Returns a table without lines: names in its first column, numbers in the others."""
    columns = (Column(each, justify="right" if place else "left", no_wrap=True) for place, each in enumerate(titles))
    return Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)


def results_console() -> Console:
    """Returns the console for tables; it leaves standard output to the JSON object unless a person reads it."""
    return Console(file=sys.stderr if not sys.stdout.isatty() else sys.stdout)
