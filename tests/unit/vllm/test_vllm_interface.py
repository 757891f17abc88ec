"""The connector has vLLM's methods and arguments, as recorded from each version that was tried."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.process import ROOT
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.core.orders import FetchSpan, KvSource
from pinyon.core.request import RequestClass
from pinyon.vllm import PinyonConnector
from pinyon.vllm.jobs import LoadJob, RankFacts, SaveJob, StepJobs, StepNews
from pinyon.vllm.parts import TRIED, ConnectorParts
from pinyon.vllm.scheduler_parts import model_fingerprint
from pinyon.vllm.settings import load_vllm_settings, server_url
from tests.vllm_double import VERSIONS, Block, BlockPool, ConnectorBase, FreeQueue, Output, Request, Role, recorded


@pytest.mark.parametrize("version", VERSIONS)
def test_the_connector_s_methods_have_vllm_s_arguments(version: str) -> None:
    for name, arguments in recorded(version)["KVConnectorBase_V1"].items():
        method = getattr(PinyonConnector, name, None) or getattr(ConnectorBase, name)
        assert list(inspect.signature(method).parameters) == arguments, name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_double_has_the_recorded_fields(version: str) -> None:
    there: dict[str, Any] = recorded(version)["fields"]
    names = {field.name for field in fields(Request)} | set(dir(Request))
    assert set(there["Request"]) <= names
    assert set(there["KVCacheBlock"]) <= {field.name for field in fields(Block)}
    assert set(there["BlockPool"]) <= set(vars(BlockPool(2)))
    queue = recorded(version)["FreeKVCacheBlockQueue"]
    assert list(inspect.signature(FreeQueue.prepend_n).parameters) == queue["prepend_n"]
    assert all(hasattr(FreeQueue, name) for name in there["FreeKVCacheBlockQueue"])
    assert Output(**dict.fromkeys(there["SchedulerOutput"]))


NEWER = {"has_pending_block_frees": "0.32.0"}
"""Methods that the connector can do without, and the first versions that were seen to have them."""


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_has_what_the_connector_needs(version: str) -> None:
    there, newest = recorded(version), recorded()
    assert there["fields"] == newest["fields"]
    later = {name for name, first in NEWER.items() if VERSIONS.index(version) < VERSIONS.index(first)}
    assert set(newest["KVConnectorBase_V1"]) - set(there["KVConnectorBase_V1"]) == later


def test_the_versions_with_a_record_are_those_that_were_tried() -> None:
    assert [version.rpartition(".")[0] for version in VERSIONS] == list(TRIED)
    for name, default in (
        ("launch/vllm.py", 'get("PINYON_ENGINE_VERSION", "{}")'),
        ("tools/vllm.sh", "PINYON_ENGINE_VERSION:-{}"),
        ("deploy/vllm.Dockerfile", "ARG VLLM={}\n"),
    ):
        assert default.format(VERSIONS[-1]) in (ROOT / name).read_text(), f"the newest is the default in {name}"


def test_sources_and_layouts_survive_pickling() -> None:
    span = FetchSpan("store-1", "127.0.0.1:7100", KvSource.STORE, 0, 2)
    work = LoadJob(7, "request", 0, [b"a" * 16, b"b" * 16], [3, 4], (span,), RequestClass(kind="chat"))
    facts = RankFacts(KvLayout(2, 1, 8, 32, packing="vllm", packed_bytes=64), "127.0.0.1:7200", "ab")
    for each in (work, facts):
        assert pickle.loads(pickle.dumps(each)) == each


def test_jobs_and_news_survive_vllm_s_pickling() -> None:
    jobs = StepJobs(
        [LoadJob(1, "r", 0, [b"k" * 16], [3], ())], [SaveJob(2, [0], [b"k" * 16], [4])], [5], [(b"k" * 16, 4)]
    )
    again = pickle.loads(pickle.dumps(jobs))
    assert (again.loads, again.saves, again.overwritten, again.complete) == (
        jobs.loads, jobs.saves, jobs.overwritten, jobs.complete,
    )  # fmt: skip
    both = StepNews({1: 1, 2: 1}).aggregate(StepNews({1: 1}, failed_sources=frozenset("x")))
    assert pickle.loads(pickle.dumps(both)).saved == {1: 2, 2: 1}


class Failing:
    """Parts of which every method fails."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.side = self

    def failed(self, method: str) -> None:
        self.failures.append(method)

    def step_failed(self) -> StepJobs:
        return StepJobs(forget=True)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_nothing_raises_into_vllm() -> None:
    connector = PinyonConnector.__new__(PinyonConnector)
    connector._parts, connector._connector_metadata = Failing(), object()
    connector._failed_blocks = set()
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    assert connector.request_finished(None, []) == (False, None)
    assert connector.get_finished(set()) == (None, None)
    assert connector.build_connector_worker_meta() is None
    assert connector.has_pending_push_work() is False
    assert connector.get_block_ids_with_load_errors() == set()
    for call in (
        lambda: connector.on_new_request(None),
        lambda: connector.update_state_after_alloc(None, None, 1),
        lambda: connector.update_connector_output(None),
        lambda: connector.bind_connector_metadata(StepJobs()),
        lambda: connector.start_load_kv(None),
        lambda: connector.wait_for_save(),
    ):
        call()
    assert connector.has_pending_block_frees() is False
    assert connector.build_connector_meta(None).forget
    assert len(connector._parts.failures) >= 12


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(**fields)


def config(groups: int = 1, kv: Any = None, **extra: Any) -> tuple[Any, Any]:
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy="recompute")
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0)
    group = SimpleNamespace(kv_cache_spec=kv or spec())
    return (
        SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel),
        SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=8),
    )


def test_hybrid_models_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidArgument, match="2 groups of KV"):
        ConnectorParts(*config(groups=2))


@pytest.mark.parametrize(
    "kv",
    [
        spec("MambaSpec"),
        spec("RSWASpec"),
        spec(non_causal=True),
        spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec(), "b": spec("SlidingWindowSpec")}),
    ],
)
def test_kv_that_is_no_function_of_its_prefix_is_refused(kv: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot reuse"):
        ConnectorParts(*config(kv=kv))


def test_the_failure_policy_that_fails_requests_is_refused() -> None:
    vllm_config, kv_cache = config()
    vllm_config.kv_transfer_config.kv_load_failure_policy = "fail"
    with pytest.raises(InvalidArgument, match="recompute"):
        ConnectorParts(vllm_config, kv_cache)


def test_a_mistake_in_the_settings_ends_vllm_with_the_reason() -> None:
    with pytest.raises(ValueError, match="redis_url"):
        PinyonConnector(*(config(redisurl="x")[0], Role.SCHEDULER, config()[1]))


def test_settings_come_from_the_extra_config_and_the_environment() -> None:
    environ = {"PINYON_VLLM_LOOK_S": "0.5", "PINYON_VLLM_CONDUCTOR": "a:1", "OTHER": "x"}
    settings = load_vllm_settings({"conductor": "b:2", "save": False}, environ)
    assert (settings.look_s, settings.conductor, settings.save) == (0.5, "b:2", False)
    for extra, environ in (({"look_s": "soon"}, {}), ({"x": 1}, {}), ({}, {"PINYON_VLLM_X": "1"})):
        with pytest.raises(InvalidArgument):
            load_vllm_settings(extra, environ)
    with pytest.raises(InvalidArgument, match="loopback"):
        load_vllm_settings({"listen": "0.0.0.0:0"}, {})


def test_the_server_s_address_is_read_off_vllm_s_command_line() -> None:
    settings = load_vllm_settings({}, {})
    assert server_url(settings, ["vllm", "serve", "m"]) == "http://127.0.0.1:8000"
    assert server_url(settings, ["vllm", "--port", "81", "--host=10.0.0.1"]) == "http://10.0.0.1:81"
    assert server_url(settings, ["vllm", "--port=82", "--host", "0.0.0.0"]) == "http://127.0.0.1:82"
    assert server_url(load_vllm_settings({"server_url": "http://x:1/"}, {}), []) == "http://x:1"
    with pytest.raises(InvalidArgument, match="--config"):
        server_url(settings, ["vllm", "serve", "--config", "x.yaml"])
    assert server_url(settings, ["--port", "1", "--config", "x", "--ssl_certfile", "c"]) == "https://127.0.0.1:1"
    outside = load_vllm_settings({"advertise_host": "node-1"}, {})
    assert server_url(outside, ["vllm", "--host", "0.0.0.0"]) == "http://node-1:8000"


def fingerprint(folder: Path, **changes: Any) -> str:
    model = {
        "model": str(folder), "revision": None, "dtype": "float32", "quantization": None, "seed": 0,
        "max_model_len": 4096, "hf_overrides": {}, "override_generation_config": {}, "hf_config": None,
    }  # fmt: skip
    return model_fingerprint(
        SimpleNamespace(
            model_config=SimpleNamespace(**model | changes),
            load_config=SimpleNamespace(load_format="auto"),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            speculative_config=None,
        )
    )


def test_the_fingerprint_tells_engines_apart_that_make_other_kv(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"one")
    (tmp_path / "gone").symlink_to("nowhere")
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    others = [
        fingerprint(tmp_path, max_model_len=8192),
        fingerprint(tmp_path, dtype="bfloat16"),
        fingerprint(tmp_path, override_generation_config={"attn_temperature_tuning": True}),
    ]
    weights.write_bytes(b"other")
    others.append(fingerprint(tmp_path))
    assert len({first, *others}) == 5
