"""The reports that an agent makes of pages of metrics."""

from __future__ import annotations

import pytest

from pinyon.routing.server_load import kind_of_page
from services.agent.engine_blocks import COUNTED, EngineBlocks
from services.agent.report import BUSY_S, PREFILLS_MAX, ServerReport, engines, read_cache
from tests.unit.agent.engine_model import START

VLLM = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
process_start_time_seconds 1.79596799715e+09
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {waiting}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} 0.25
vllm:prompt_tokens_total{{engine="0",model_name="tiny"}} {prompt_tokens}.0
vllm:request_prompt_tokens_count{{engine="0",model_name="tiny"}} {requests}.0
vllm:request_prompt_tokens_sum{{engine="0",model_name="tiny"}} {of_requests}.0
vllm:request_prefill_time_seconds_count{{engine="0",model_name="tiny"}} {requests}.0
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="tiny"}} {seconds}
vllm:request_prefill_kv_computed_tokens_count{{engine="0",model_name="tiny"}} {requests}.0
vllm:request_prefill_kv_computed_tokens_sum{{engine="0",model_name="tiny"}} {computed}.0
vllm:inter_token_latency_seconds_bucket{{engine="0",le="0.01",model_name="tiny"}} 1.0
vllm:inter_token_latency_seconds_count{{engine="0",model_name="tiny"}} {tokens}.0
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="tiny"}} {token_seconds}
vllm:cache_config_info{{_block_size_resolved="True",block_size="32",effective_attention_block_size="32",\
hash_block_size="None",mamba_block_size="16",num_cpu_blocks="None",num_gpu_blocks="192",\
num_gpu_blocks_override="8",user_specified_block_size="True"}} 1.0
"""
START_PAGE = {
    "running": 0,
    "waiting": 0,
    "prompt_tokens": 900,
    "requests": 9,
    "of_requests": 900,
    "seconds": 4.5,
    "computed": 700,
    "tokens": 100,
    "token_seconds": 1.5,
}
SGLANG = b"""\
sglang:num_running_reqs{model_name="m"} 3.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:token_usage{model_name="m"} 0.5
sglang:page_size{model_name="m"} 16.0
sglang:num_pages{model_name="m"} 1000.0
sglang:inter_token_latency_seconds_sum{model_name="m"} 2.0
sglang:inter_token_latency_seconds_count{model_name="m"} 100.0
"""


def page(**figures: float) -> bytes:
    return VLLM.format(**{**START_PAGE, **figures}).encode()


def served(first: bytes) -> ServerReport:
    size, blocks = read_cache(first)
    held = EngineBlocks(START, size, 100, dict.fromkeys(COUNTED, 0))
    report = ServerReport(kind_of_page(first), blocks, held)
    assert report.read(first, 0.0)
    return report


@pytest.mark.parametrize(
    ("shown", "cache"),
    [
        (page(), (32, 192)),
        (SGLANG, (16, 1000)),
        (b'sglang:cache_config_info{num_pages="7",page_size="16"} 1.0', (16, 7)),
        (b'sglang:page_size{engine_type="unified",tp_rank="0"} 16.0\nsglang:num_pages{tp_rank="0"} 256.0', (16, 256)),
        (page().replace(b'"192"', b'"None"'), (32, 0)),
        (page().replace(b'_block_size="32"', b'_block_size="64"'), (64, 192)),
        (page().replace(b'_block_size="32"', b'_block_size="None"'), (32, 192)),
        (b"sglang:page_size 1.0\nsglang:num_pages 1.234567e+06", (1, 1_234_567)),
        (b"", (0, 0)),
        (b'sglang:page_size{tp_rank="0"} 16.0\nsglang:page_size{tp_rank="1"} 16.0', (16, 0)),
        (b"sglang:page_size 1e999\nsglang:num_pages 7.5", (0, 0)),
    ],
)
def test_size_and_number_of_blocks_are_read(shown: bytes, cache: tuple[int, int]) -> None:
    assert read_cache(shown) == cache


def test_the_load_is_what_the_page_shows() -> None:
    report = served(page(running=3, waiting=2))
    load = report.load()
    assert (load.running_requests, load.pending_requests, load.waiting_for_room) == (3, 2, 2)
    assert (load.used_blocks, load.kv_tokens) == (48, 48 * 32)
    assert (load.cached_blocks, load.draining) == (0, False)
    load = served(SGLANG).load()
    assert (load.running_requests, load.pending_requests, load.used_blocks) == (3, 1, 500)


def test_a_page_that_lacks_figures_is_no_restart() -> None:
    report = served(page())
    assert report.read(b"vllm:num_requests_running 1.0\n", 1.0)
    assert report.read(page(), 2.0)
    assert not report.read(page().replace(b"1.79596799715e+09", b"1.79596799716e+09"), 3.0)


def test_a_server_that_has_counted_nothing_yet_has_restarted() -> None:
    counted = b'sglang:prompt_tokens_total{model_name="m"} 7.0\n'
    report = served(SGLANG + counted)
    assert report.read(SGLANG + counted, 1.0)
    assert not report.read(SGLANG, 2.0)


def test_ranks_of_a_model_fill_their_memory_alike() -> None:
    ranks = b"".join(b'sglang:token_usage{tp_rank="%d"} 0.25\n' % rank for rank in range(4))
    page = SGLANG.replace(b'sglang:token_usage{model_name="m"} 0.5\n', ranks)
    assert served(page).load().used_blocks == 250


def test_requests_by_priority_are_not_counted_again() -> None:
    parts = b'sglang:num_queue_reqs{priority=""} 1.0\nsglang:num_queue_reqs{a="b",priority="5"} 1.0\n'
    page = SGLANG.replace(b'sglang:num_queue_reqs{model_name="m"} 1.0\n', parts)
    assert served(page).load().pending_requests == 1
    times = b'sglang:inter_token_latency_seconds_%b{priority="5"} 4.0\n'
    report = served(page)
    more = page.replace(b'{model_name="m"} 100.0', b'{model_name="m"} 104.0')
    report.read(more + times % b"sum" + times % b"count", 1.0)
    assert report.load().mean_tbt_ms > 0, "requests of a priority have no total"


def test_engines_behind_one_server_are_counted() -> None:
    rank = b'vllm:cache_config_info{block_size="16",engine="%d"} 1.0\n'
    assert engines(rank % 0 + rank % 0) == 1
    assert engines(rank % 0 + rank % 1) == 2
    assert engines(page()) == engines(b"") == 1


def test_time_between_tokens_is_that_since_the_last_report() -> None:
    report = served(page(running=1))
    assert report.load().mean_tbt_ms == 0
    report.read(page(running=1, tokens=110, token_seconds=1.75), 1.0)
    report.read(page(running=1, tokens=120, token_seconds=2.0), 2.0)
    assert report.load().mean_tbt_ms == pytest.approx(25)
    assert report.load().mean_tbt_ms == 0


ALONE = {"requests": 10, "of_requests": 1000, "seconds": 4.75, "computed": 780}


def measured(report: ServerReport) -> list[tuple[int, int, int]]:
    return [(each.computed_tokens, each.prefix_tokens, each.compute_us) for each in report.news().prefills]


def test_the_prefill_of_a_request_that_was_alone_is_measured() -> None:
    report = served(page())
    report.read(page(running=1), 1.0)
    report.read(page(**ALONE), 2.0)
    assert measured(report) == [(80, 20, 250_000)]
    assert not measured(report)


def test_requests_beside_each_other_are_measured_by_their_mean() -> None:
    report = served(page())
    report.read(page(requests=13, of_requests=1300, computed=1020, seconds=4.5 + 8), 2.0)
    assert measured(report) == [(80, 20, 500_000)], "two seconds have passed, not eight"
    report.read(page(requests=15, of_requests=1500, computed=1180, seconds=4.5 + 8.5), 4.0)
    assert measured(report) == [(80, 20, 250_000)]


@pytest.mark.parametrize("first", [True, False])
def test_a_page_that_lacks_sums_starts_no_measurement(first: bool) -> None:
    lacking = page().replace(b"vllm:request_", b"vllm:")
    report = served(lacking if first else page())
    report.read(page() if first else lacking, 1.0)
    report.read(page(**ALONE), 2.0)
    assert measured(report) == [(80, 20, 250_000)]


def test_a_server_that_is_never_idle_is_measured_too() -> None:
    report = served(page())
    report.read(page(running=1, **ALONE), BUSY_S - 0.1)
    assert not measured(report)
    report.read(page(running=1, **ALONE), BUSY_S)
    assert measured(report) == [(80, 20, 250_000)]
    report.read(page(running=1, **ALONE), 3 * BUSY_S)
    later = {"requests": 11, "of_requests": 2000, "computed": 1780, "seconds": 4.75 + 2.5 * BUSY_S}
    report.read(page(running=1, **later), 3.5 * BUSY_S)
    assert measured(report) == [(1000, 0, round(2.5e6 * BUSY_S))], "since the last one"


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": 9},
        {"computed": 700},
        {"seconds": 4.5},
        {"computed": 900},
        {"requests": 9.001},
        {"of_requests": 1 << 40},
    ],
)
def test_prefills_that_make_no_sense_are_not_measured(changes: dict[str, float]) -> None:
    report = served(page())
    report.read(page(**{**ALONE, **changes}), 1.0)
    assert not measured(report)


def test_a_bounded_number_of_measurements_waits() -> None:
    report = served(page())
    for number in range(1, PREFILLS_MAX + 10):
        some = {"of_requests": 900 + number, "computed": 700 + number}
        report.read(page(**some, requests=9 + number, seconds=4.5 + number), number)
    assert len(report.news().prefills) == PREFILLS_MAX


@pytest.mark.parametrize(
    ("later", "same"),
    [
        (page(prompt_tokens=901), True),
        (page(prompt_tokens=899), False),
        (page(prompt_tokens=901).replace(b"1.79596799715e+09", b"1.79596799815e+09"), False),
    ],
)
def test_another_life_of_the_server_is_noticed(later: bytes, same: bool) -> None:
    assert served(page()).read(later, 1.0) is same
