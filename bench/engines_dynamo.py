"""A worker of Dynamo that forwards requests to a stock vLLM server, and passes the server's KV events on to Dynamo's
router; and the broker of these events. The program runs in an environment that has Dynamo, and nothing of ours.

Dynamo's own worker for vLLM runs the engine itself and needs torchvision, of which there is no build for CPUs on
PyPI."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

ENDPOINT = "bench.backend.generate"
"""Workers of one endpoint share its requests."""


class Worker:
    def __init__(self, server: str, served: str, session: Any) -> None:
        self._url, self._served, self._session = f"{server}/v1/completions", served, session

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yields the tokens that the server computes for the request's tokens."""
        stop, sampling = request.get("stop_conditions") or {}, request.get("sampling_options") or {}
        asked = {
            "max_tokens": stop.get("max_tokens"),
            "min_tokens": stop.get("min_tokens"),
            "ignore_eos": stop.get("ignore_eos"),
            "temperature": sampling.get("temperature"),
            "top_p": sampling.get("top_p"),
            "seed": sampling.get("seed"),
        }
        body = {key: value for key, value in asked.items() if value is not None}
        body |= {"model": self._served, "prompt": list(request["token_ids"]), "stream": True, "return_token_ids": True}
        async with self._session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"vLLM answered {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield _chunk(choice)


def _chunk(choice: dict[str, Any]) -> dict[str, Any]:
    told = {"token_ids": choice.get("token_ids") or [], "index": 0}
    if choice.get("finish_reason"):
        told["finish_reason"] = choice["finish_reason"]
    return told


def broker(into: str, out: str) -> None:
    """Passes events on from all publishers to all subscribers until it is ended."""
    zmq = importlib.import_module("zmq")
    context = zmq.Context()
    publishers, subscribers = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    publishers.bind(into)
    subscribers.bind(out)
    zmq.proxy(publishers, subscribers)


async def work(server: str, events: str, model: str, served: str, config: str) -> None:
    """Serves until it is ended. ``config`` has what the router must know of the server, as JSON."""
    runtime_of, llm = importlib.import_module("dynamo.runtime"), importlib.import_module("dynamo.llm")
    aiohttp = importlib.import_module("aiohttp")
    numbers = json.loads(config)
    runtime = runtime_of.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint(ENDPOINT)
    publisher = llm.KvEventPublisher(
        endpoint=endpoint,
        kv_block_size=numbers["block_tokens"],
        zmq_endpoint=events,
        zmq_topic="",
        enable_local_indexer=True,
    )
    known = llm.ModelRuntimeConfig()
    known.total_kv_blocks = numbers["blocks"]
    known.max_num_seqs = numbers["requests"]
    known.max_num_batched_tokens = numbers["batch_tokens"]
    known.context_length = numbers["context"]
    known.enable_local_indexer = True
    known.kv_event_publishing_enabled = True
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await llm.register_model(
            llm.ModelInput.Tokens,
            llm.ModelType.Completions,
            endpoint,
            model,
            served,
            kv_cache_block_size=numbers["block_tokens"],
            runtime_config=known,
            worker_type=llm.WorkerType.Aggregated,
        )
        await endpoint.serve_endpoint(Worker(server, served, session).generate)
    del publisher


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "broker":
        broker(*given)
    else:
        importlib.import_module("uvloop").run(work(*given))
