"""The backend within the real SGLang, on a CPU; skipped where ``SGLANG_PYTHON`` names no Python that has SGLang."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.process import ROOT
from launch.redis_server import RedisServer, find_redis
from pinyon.runtime.process import child_environment
from tests.integration.kvstore_parts import running_node
from tests.sglang_double import recorded

PYTHON = os.environ.get("SGLANG_PYTHON", "")
START_S = 900.0
"""The time for SGLang's imports and more; half a minute is usual on an idle machine."""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip

pytestmark = pytest.mark.skipif(not PYTHON, reason="SGLANG_PYTHON names no Python that has SGLang")


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = find_redis()
    yield server
    server.close()


async def run(program: str, *arguments: str) -> str:
    """Returns what a program prints that SGLang's Python runs."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-m", program, *arguments),
        stdout=subprocess.PIPE, env=child_environment(ROOT, os.getpid()) | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return printed.decode()


async def test_the_recorded_interface_is_sglang_s() -> None:
    assert json.loads(await run("tests.sglang.recorded_interface")) == recorded()


async def test_sglang_s_controller_gets_back_what_it_put(redis_server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    async with running_node(redis_server.url, pool_mib=16):
        told = json.loads(await run("tests.sglang.round_trip", redis_server.url, str(tmp_path)))
    assert len(told) == 10
    for name, one in told.items():
        assert (one["stored"], one["found"], one["loaded"]) == (48, 3, 48), name
        assert one["equal"] == [True] * 3, name
        first, second = one["counts"]
        assert (first["stored"], second["loaded"], first["failed"] + second["failed"]) == (3, 3, 0), name
