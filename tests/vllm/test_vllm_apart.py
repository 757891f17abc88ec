"""One vLLM server for prompts and two that decode answer as one alone does, also where streams lose their server."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import LocalCluster
from launch.process import ROOT, Process
from launch.vllm import ENVIRONMENT, START_S, VllmServer, vllm_python
from pinyon.runtime.process import child_environment
from tests.vllm import soak
from tests.vllm.ask import ask, ask_chat_stream, ask_stream, counter, prompts, text
from tests.vllm.cutting import CuttingProxy
from tests.vllm.pairs import cutting, own_metrics, resumes, servers, started_pairs
from tests.waiting import wait_until

SEED = 42
PROMPTS = 200
TOKENS = 24
SOAK_S = 60.0


@pytest.fixture(scope="module")
def cut_pairs(model: Path) -> Iterator[tuple[LocalCluster, list[CuttingProxy]]]:
    with started_pairs(model, SEED, TOKENS) as both:
        yield both


@pytest.fixture(scope="module")
def pairs(cut_pairs: tuple[LocalCluster, list[CuttingProxy]]) -> LocalCluster:
    return cut_pairs[0]


@pytest.fixture(scope="module")
def proxies(cut_pairs: tuple[LocalCluster, list[CuttingProxy]]) -> list[CuttingProxy]:
    return cut_pairs[1]


@pytest.fixture(scope="module")
def expected(alone: VllmServer) -> dict[str, tuple[int, ...]]:
    return {prompt: ask(alone.url, prompt, TOKENS).tokens for prompt in prompts(SEED, PROMPTS)}


def back(server: VllmServer) -> None:
    """Starts a server again, and waits for it."""
    server.start_again()
    wait_until(server.announced, f"{server.name} is back", timeout_s=START_S, poll_s=0.1)


def test_prompts_computed_apart_give_equal_tokens(pairs: LocalCluster, expected: dict[str, tuple[int, ...]]) -> None:
    with ThreadPoolExecutor(8) as callers:
        told = list(callers.map(lambda prompt: ask(pairs.http, prompt, TOKENS).tokens, expected))
    assert sum(a == b for a, b in zip(told, expected.values(), strict=True)) == PROMPTS
    (prefill,) = servers(pairs, "prefill")
    computed = counter(prefill.url, "vllm:request_success_total")
    loaded, from_peers = (
        sum(counter(own_metrics(each), f"pinyon_vllm_{name}_total") for each in servers(pairs, "decode"))
        for name in ("loaded_blocks", "peer_blocks")
    )
    print(f"{computed:g} of {PROMPTS} prompts computed apart; {loaded:g} blocks loaded, {from_peers:g} from peers")
    assert computed > PROMPTS / 4
    assert from_peers > computed, "decodes read the prefill server's memory"


def test_streams_that_are_cut_give_equal_tokens(
    pairs: LocalCluster, proxies: list[CuttingProxy], expected: dict[str, tuple[int, ...]]
) -> None:
    before = resumes(pairs)
    with cutting(proxies), ThreadPoolExecutor(8) as callers:
        told = list(callers.map(lambda prompt: ask_stream(pairs.http, prompt, TOKENS).tokens, expected))
    went_on = resumes(pairs) - before
    print(f"{went_on:g} of {PROMPTS} streams went on elsewhere")
    assert sum(a == b for a, b in zip(told, expected.values(), strict=True)) == PROMPTS
    assert went_on > PROMPTS / 2


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 60},
        {"max_tokens": 60, "stream_options": {"include_usage": True}},
        {"max_tokens": 60, "return_token_ids": True},
        {"max_tokens": 60, "stop": ["e", "a"]},
        {"max_completion_tokens": 60, "ignore_eos": True},
        {"stop": ["a", "k", "5"]},
    ],
    ids=["limit", "usage", "token ids", "stop", "newer limit", "no limit"],
)
def test_chats_that_are_cut_are_told_as_by_one(
    pairs: LocalCluster, proxies: list[CuttingProxy], alone: VllmServer, fields: dict[str, Any]
) -> None:
    rng = random.Random(SEED)
    asked = [[{"role": "user", "content": text(rng, rng.randrange(20, 300))}] for _ in range(8)]
    bodies = [{"model": "tiny", "messages": messages, "temperature": 0, **fields} for messages in asked]
    before = resumes(pairs)
    with ThreadPoolExecutor(4) as callers:
        by_one = list(callers.map(partial(ask_chat_stream, alone.url), bodies))
        with cutting(proxies):
            told = list(callers.map(partial(ask_chat_stream, pairs.http), bodies))
    assert told == by_one
    assert resumes(pairs) > before


@soak.long_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_streams_outlive_a_server_that_ends(
    pairs: LocalCluster, expected: dict[str, tuple[int, ...]], number: signal.Signals
) -> None:
    ending, before = servers(pairs, "decode")[-1], resumes(pairs)
    known = list(expected)[:8]
    long = {prompt: ask(pairs.http, prompt, 300).tokens for prompt in known}
    told: dict[str, tuple[int, ...]] = {}

    def stream(prompt: str) -> None:
        told[prompt] = ask_stream(pairs.http, prompt, 300).tokens

    callers = [threading.Thread(target=stream, args=(prompt,)) for prompt in known]
    for caller in callers:
        caller.start()
    wait_until(lambda: counter(ending.url, "vllm:num_requests_running") >= 1, "it has a stream", poll_s=0.02)
    ending.signal(number)
    for caller in callers:
        caller.join()
    assert told == long
    assert resumes(pairs) > before
    ending.kill()
    back(ending)


def bench(cluster: LocalCluster, folder: Path, ends: threading.Event) -> list[dict[str, Any]]:
    """Runs vLLM's own benchmark over and over, once more after ``ends``; returns its results."""
    results: list[dict[str, Any]] = []
    environment = child_environment(ROOT, os.getpid()) | ENVIRONMENT
    environment.pop("PYTHONSAFEPATH", None)
    last = False
    while not last:
        last, name = ends.is_set(), f"{len(results)}.json"
        command = [
            str(vllm_python()), "-m", "launch.vllm_main", "bench", "serve", "--backend", "openai", "--base-url",
            cluster.http, "--model", "tiny", "--tokenizer", str(cluster.spec.model), "--endpoint", "/v1/completions",
            "--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "40", "--num-prompts", "60",
            "--request-rate", "4", "--ignore-eos", "--save-result", "--result-dir", str(folder), "--result-filename",
            name, "--disable-tqdm",
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S)
        assert not done.returncode, (done.stderr or done.stdout)[-800:]
        results.append(json.loads((folder / name).read_text()))
    return results


@soak.long_only
def test_servers_come_and_go_under_load(pairs: LocalCluster, tmp_path: Path) -> None:
    first, second = servers(pairs, "decode")
    soak.drain(pairs, second)
    ends = threading.Event()
    with ThreadPoolExecutor(1) as callers:
        told = callers.submit(bench, pairs, tmp_path, ends)
        try:
            back(second)
            served = "vllm:request_success_total"
            wait_until(lambda: told.done() or counter(second.url, served), "it serves", timeout_s=START_S, poll_s=0.1)
            soak.drain(pairs, first)
        finally:
            ends.set()
        results = told.result()
    print([(each["completed"], each["failed"]) for each in results])
    assert all((each["completed"], each["failed"]) == (60, 0) for each in results)
    back(first)


@soak.long_only
def test_a_soak_of_pairs_leaves_equal_tokens(pairs: LocalCluster, expected: dict[str, tuple[int, ...]]) -> None:
    known = dict(list(expected.items())[:60])
    faults: list[tuple[str, Process]] = [
        (kind, process)
        for process in (*pairs.of_kind("kvstore"), *pairs.of_kind("conductor"))
        for kind in ("kill", "freeze")
    ]
    last = servers(pairs, "decode")[-1]
    faults += [*(("freeze", server) for server in servers(pairs)), ("kill", last), ("drain", last)]
    take_away = partial(soak.drain, pairs)
    count = soak.Soak([pairs.http], known, SEED, tokens=TOKENS, take_away=take_away).run(SOAK_S, faults, START_S)
    print(count)
    assert count.equal > 50
    assert not count.different
    assert not count.errors
    soak.at_rest(pairs, servers(pairs))
