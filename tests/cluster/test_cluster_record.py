"""Chats through the OpenAI API, recorded as a trace: it has what they share, and nothing of their text."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pinyon.core.block_keys import chain_block_keys, namespace
from pinyon.eviction import Lru, Traits
from pinyon.frontdoor.instances.tokenizer_process import strftime_now, tokenize
from pinyon.model import load_card
from pinyon_lab.caches.replay import CacheReplay
from pinyon_lab.traces import TraceFile
from tests.cluster.asking import MODEL, ask
from tests.waiting import WAIT_S

USERS = ("anna", "ben", "carla")
FIELDS = {
    *("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn", "hash_ids", "user_id")
}


def chat(cluster: Any, user: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, int]]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, "user": user}
    reply = ask(cluster, "/v1/chat/completions", body, {"x-pinyon-session": f"session of {user}"}).json
    return reply["choices"][0]["message"]["content"], reply["usage"]


def test_chats_as_a_trace(cluster: Any, tmp_path: Path) -> None:
    out = tmp_path / "live.jsonl"
    lb = cluster.services["lb-0"]
    address = lb.endpoints.get("admin", lb.endpoints["grpc"])
    command = [sys.executable, "-m", "pinyon.cli", "trace", "record", str(out), "--lb", address, "--requests", "9"]
    if cluster.access.admin is not None:
        command += ["--tls-dir", str(cluster.access.admin)]
    recording = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    card = load_card(None, None, strftime_now)
    asked: list[tuple[str, bytes, dict[str, int]]] = []
    try:
        while "records a trace" not in lb.log_path.read_text():
            assert recording.poll() is None, recording.stderr and recording.stderr.read()
            time.sleep(0.02)  # the command gives up by itself after a while
        chats: dict[str, list[dict[str, str]]] = {
            user: [{"role": "system", "content": "You know herons and magpies. " * 4}] for user in USERS
        }
        for turn in range(3):
            for user, messages in chats.items():
                messages.append({"role": "user", "content": f"Tell {user} of wading birds, part {turn}."})
                tokens = tokenize(card, list(messages))
                answer, usage = chat(cluster, user, messages)
                asked.append((user, tokens, usage))
                messages.append({"role": "assistant", "content": answer})
        _, said = recording.communicate(timeout=WAIT_S)
    finally:
        recording.kill()
        recording.wait()
    assert recording.returncode == 0, said
    assert f"{len(asked)} requests of 1 load balancer" in said

    trace = TraceFile(out)
    rows = list(trace.rows())
    assert (trace.broken, len(rows)) == (0, len(asked))
    numbers: dict[str, str] = {}
    for row, (user, tokens, usage) in zip(rows, asked, strict=True):
        assert (row.input_tokens, row.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert row.input_tokens == len(tokens) // 4
        assert row.user == numbers.setdefault(user, str(len(numbers) + 1))
    assert [row.category for row in rows] == [f"chat/{turn}" for turn in (1, 2, 3) for _ in USERS]
    assert [row.parent for row in rows] == ["", "", "", *(rows[at].chat for at in range(6))]

    # The ideal hit ratio of the prompts: the share of their beginnings that came before.
    seen: set[bytes] = set()
    hits = []
    for _, tokens, _ in asked:
        beginnings = [tokens[: 64 * (at + 1)] for at in range(-(-len(tokens) // 64))]
        hits.append(next((at for at, each in enumerate(beginnings) if each not in seen), len(beginnings)))
        seen.update(beginnings)
    cache = CacheReplay(Lru[int](), 1_000_000)
    assert [cache.request(row.blocks, row.time_s, Traits(row.category)) for row in rows] == hits
    assert len(cache.resident) == len(seen)
    assert 0.3 < cache.hit_blocks / cache.blocks < 0.95

    text = out.read_text()
    assert set(re.findall(r"[A-Za-z_]+", text)) == FIELDS | {"chat"}, "names, words, anything that is no number"
    for each in {row.user for row in rows} | {row.chat for row in rows}:
        assert each.isdecimal()
    layout = card.config.kv_layout(32).layout_id
    for tenant in ("", "public", "default"):
        start = namespace(card.fingerprint, layout, tenant, cluster.access.secret)
        for key in chain_block_keys(start, asked[-1][1], 32):
            shapes = (key.hex(), base64.b64encode(key).decode(), *map(str, np.frombuffer(key, "<u8").tolist()))
            assert not any(shape in text for shape in shapes)
