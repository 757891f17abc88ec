"""The connector's cost in one step of vLLM in which nothing is loaded, saved or completed: all hooks of both sides, and
what vLLM pickles between them. It runs with vLLM's Python; no model computes."""

from __future__ import annotations

import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from bench.report import Aim, Report, parser, percentile
from launch import vllm
from launch.process import ROOT
from pinyon.runtime.process import child_environment

RUNNING = (1, 8, 64, 256)
"""The numbers of requests that decode."""
BLOCK_TOKENS = 1 << 20
"""The size of a block, of which none is completed: what is measured is the cost of nothing."""


def run(quick: bool) -> Report:
    steps = 300 if quick else 2000
    report = Report("connector", {"steps": steps, "vllm": vllm.VERSION})
    for running in RUNNING:
        times = [1e6 * each for each in _step_times(running, steps)]
        found = {"step_us": statistics.median(times), "step_p99_us": percentile(times, 99)}
        report.results[f"running_{running}"] = found
        report.aims.append(Aim(f"connector's cost per step in us, {running} running", 100.0, found["step_us"]))
    return report


def _step_times(running: int, steps: int) -> Iterator[float]:
    """Yields the seconds that each step takes the connector."""
    names = ("", ".prompt_keys", ".scheduler", ".times", ".worker")
    ours = {name: import_module(f"pinyon.vllm{name}") for name in names}
    from pinyon.runtime.loop_thread import LoopThread
    from pinyon.store.sync_store import SyncStore

    space = ours[".prompt_keys"].KeySpace("bench", "layout", BLOCK_TOKENS, b"")
    side = ours[".scheduler"].SchedulerSide(
        space, 1, None, ours[".times"].Times("bench", BLOCK_TOKENS), time.monotonic, look_s=0.2, saves=True,
        pinned_share=0.25, secret=b"",
    )  # fmt: skip
    side.bind(SimpleNamespace(enable_caching=True, blocks=[], get_num_free_blocks=lambda: 0))
    thread = LoopThread("bench")
    memory: Any = SimpleNamespace(fence=lambda: None)
    worker = ours[".worker"].WorkerSide(
        thread, SyncStore(thread, None, None), memory, None, rank=0, ranks=1, load_s=1, store_s=1, store_queue_s=1
    )
    scheduler, workers = (_connector(ours[""], each) for each in (side, worker))
    requests = [f"cmpl-{number:032x}-0" for number in range(running)]
    for name in requests:
        scheduler.on_new_request(_request(name))
    for number in range(steps):
        output = _planned(requests, number)
        began_s = time.perf_counter()
        jobs = pickle.loads(pickle.dumps(scheduler.build_connector_meta(output)))
        workers.bind_connector_metadata(jobs)
        workers.start_load_kv(None)
        workers.wait_for_save()
        received = workers.get_finished(set())[1]
        news = pickle.loads(pickle.dumps(workers.build_connector_worker_meta()))
        failed = workers.get_block_ids_with_load_errors()
        workers.clear_connector_metadata()
        scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=news, finished_recving=received, invalid_block_ids=failed)
        )
        yield time.perf_counter() - began_s
    thread.close(1.0)


def _connector(module: Any, side: Any) -> Any:
    connector = module.PinyonConnector.__new__(module.PinyonConnector)
    connector._parts, connector._connector_metadata = SimpleNamespace(side=side, failed=sys.exit), None
    connector._failed_blocks = set()
    return connector


def _request(name: str) -> Any:
    nothing = dict.fromkeys(("kv_transfer_params", "cache_salt", "lora_request", "pooling_params", "prompt_embeds"))
    tokens = list(range(8))
    return SimpleNamespace(
        request_id=name, prompt_token_ids=tokens, all_token_ids=tokens, num_prompt_tokens=8, num_tokens=8,
        num_preemptions=0, mm_features=[], skip_reading_prefix_cache=False, **nothing,
    )  # fmt: skip


def _planned(names: list[str], number: int) -> Any:
    """Returns the plan of a step: the first one takes up all requests, each later one decodes a token of each."""
    first = number == 0
    new = [SimpleNamespace(req_id=name, block_ids=([1],), num_computed_tokens=0) for name in names if first]
    known = [] if first else names
    cached = SimpleNamespace(
        req_ids=known, new_block_ids=[None] * len(known), num_computed_tokens=[7 + number] * len(known),
        resumed_req_ids=set(),
    )  # fmt: skip
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(names, 8 if first else 1),
    )


def main() -> None:
    given = parser(__doc__).parse_args()
    if sys.executable != (python := str(vllm.vllm_python())):
        environment = child_environment(ROOT, os.getpid()) | vllm.ENVIRONMENT
        command = [python, "-m", "bench.connector", *sys.argv[1:]]
        sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)
    run(given.quick).emit()


if __name__ == "__main__":
    main()
