"""The recorded interface, and the order of calls that the double makes, are those of the real vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from launch.process import ROOT
from launch.vllm import START_S, VERSION, vllm_python
from pinyon.runtime.process import child_environment
from tests.vllm.ask import ask
from tests.vllm.conftest import serving
from tests.vllm_double import recorded


def test_the_recorded_interface_is_that_of_the_real_one(tmp_path: Path) -> None:
    written = tmp_path / f"{VERSION}.json"
    subprocess.run(
        [str(vllm_python()), "-m", "tests.vllm.recorded_interface", str(written)],
        env=child_environment(ROOT, os.getpid()), timeout=START_S, check=True,
    )  # fmt: skip
    assert json.loads(written.read_text()) == recorded(VERSION)


def test_vllm_calls_in_the_recorded_order(model: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with serving(model, tmp_path, {}, module="tests.vllm.traced", environment={"PINYON_TRACED": str(calls)}) as server:
        ask(server.url, "x" * 100, 3)
    lines = [line.split() for line in calls.read_text().splitlines()]
    scheduler = [name for role, name, _ in lines if role == "SCHEDULER"]
    request = next(subject for _, name, subject in lines if name == "on_new_request")
    of_request = [name for _, name, subject in lines if subject == request]
    assert of_request[:3] == ["on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"]
    assert of_request[-1] == "request_finished"
    assert scheduler.index("bind_gpu_block_pool") < scheduler.index("on_new_request")
    assert "set_xfer_handshake_metadata_pp_aware" in scheduler[: scheduler.index("on_new_request")]
    steps = re.findall(
        "[BU]", "".join({"build_connector_meta": "B", "update_connector_output": "U"}.get(n, "") for n in scheduler)
    )
    assert "".join(steps).removesuffix("B").replace("BU", "") == "", "each step is planned, then ended"
    worker = [name for role, name, _ in lines if role == "WORKER"]
    assert worker[0] == "register_kv_caches"
    step = worker[worker.index("bind_connector_metadata") :]
    step = step[: step.index("clear_connector_metadata") + 1]
    inner = ("wait_for_layer_load", "save_kv_layer")
    assert [name for name in step if name not in inner] == [
        "bind_connector_metadata", "start_load_kv", "wait_for_save", "get_finished", "get_block_ids_with_load_errors",
        "build_connector_worker_meta", "clear_connector_metadata",
    ]  # fmt: skip
