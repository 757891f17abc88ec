"""A double of vLLM for tests without it: its interface as recorded, and an engine that calls a connector as vLLM does.

``tests/vllm`` compares the recorded interface with the real one."""

from __future__ import annotations

import json
import random
import sys
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "data" / "vllm_interface"
VERSIONS = sorted(
    (path.stem for path in RECORDED.glob("*.json")), key=lambda name: [int(part) for part in name.split(".")]
)
"""The versions with a recorded interface, the newest last."""
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@cache
def recorded(version: str = VERSIONS[-1]) -> dict[str, dict[str, list[str]]]:
    """Returns the recorded names and arguments, by class and method."""
    interface: dict[str, dict[str, list[str]]] = json.loads((RECORDED / f"{version}.json").read_text())
    return interface


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class ConnectorBase:
    """The base class, with no more than its constructor and its metadata."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata


def install() -> None:
    """Makes ``import vllm...`` find the double, where vLLM is not installed."""
    if BASE in sys.modules:
        return
    parts = BASE.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        sys.modules[name] = types.ModuleType(name)
    base: Any = sys.modules[BASE]
    base.KVConnectorBase_V1, base.KVConnectorRole = ConnectorBase, Role
    for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorHandshakeMetadata"):
        setattr(base, name, type(name, (), {}))


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: Any = None
    content: Any = None
    """The content: the salt and the tokens up to its end, or 'part'."""
    next_free_block: Any = None


class FreeQueue:
    """The pool's free blocks as vLLM links them, the one that is handed out next first."""

    def __init__(self, free: deque[Block]) -> None:
        self._free = free

    @property
    def fake_free_list_head(self) -> Any:
        head = types.SimpleNamespace(next_free_block=None)
        last: Any = head
        for block in self._free:
            last.next_free_block = last = block
        if self._free:
            last.next_free_block = types.SimpleNamespace(block_hash=None, block_id=-1)
        return head

    def prepend_n(self, blocks: list[Block]) -> None:
        self._free.extendleft(reversed(blocks))


class BlockPool:
    """vLLM's pool: blocks that nobody references wait, the oldest first, to be handed out anew."""

    def __init__(self, count: int) -> None:
        self.enable_caching = True
        self.blocks = [Block(number) for number in range(count)]
        self.free: deque[Block] = deque(self.blocks[1:])
        self.free_block_queue = FreeQueue(self.free)
        self.cached: dict[Any, Block] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if not block.ref_cnt:
                self.free.append(block)

    def take(self, count: int) -> list[Block]:
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            if self.cached.get(block.block_hash) is block:
                del self.cached[block.block_hash]
            block.block_hash, block.ref_cnt = None, 1  # the content stays until somebody writes
        return taken

    def forget(self) -> None:
        """Resets the prefix cache."""
        for block in self.cached.values():
            block.block_hash = None
        self.cached.clear()


@dataclass(eq=False)
class Request:
    """A request as a connector sees it."""

    request_id: str
    prompt_token_ids: list[int]
    output_tokens: int
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    pooling_params: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    all_token_ids: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    waits_for_kv: bool = False
    finished: bool = False
    seen_by_workers: bool = False

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class Output(types.SimpleNamespace):
    """A bag of fields, such as ``SchedulerOutput``."""


class Engine:
    """An engine's scheduler over a connector's scheduler side, in vLLM's order of calls.

    ``work`` is given each step's jobs when the step runs, and returns the workers' output."""

    def __init__(
        self,
        side: Any,
        pool: BlockPool,
        block_tokens: int,
        work: Callable[[Any], Any],
        step_tokens: int = 64,
        version: str = VERSIONS[-1],
    ) -> None:
        self.side, self.pool, self.size, self._work, self._budget = side, pool, block_tokens, work, step_tokens
        self._waits_for_frees = "has_pending_block_frees" in recorded(version)["KVConnectorBase_V1"]
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._arrived_kv: set[str] = set()
        self.refused = 0
        side.bind(pool)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.side.arrived(request)

    def abort(self, name: str) -> None:
        if name in self.requests and not self.requests[name].finished:
            self._finish(self.requests[name])

    def hash_of(self, request: Request, block: int) -> Any:
        return request.cache_salt, tuple(request.all_token_ids[: (block + 1) * self.size])

    # -- one step

    def step(self) -> None:
        new, cached, resumed, scheduled, budget = [], [], set(), {}, self._budget
        for request in list(self.running):
            if request not in self.running:
                continue
            wanted = min(budget, request.num_tokens - request.num_computed_tokens)
            if wanted <= 0:
                continue
            blocks = self._grow(request, request.num_computed_tokens + wanted)
            if blocks is None:
                continue
            scheduled[request.request_id] = wanted
            cached.append((request, request.num_computed_tokens, blocks))
            budget -= wanted
        scheduled = {name: count for name, count in scheduled.items() if self.requests[name] in self.running}
        cached = [each for each in cached if each[0].request_id in scheduled]
        for request in list(self.waiting):
            if request.waits_for_kv:
                if request.request_id not in self._arrived_kv:
                    continue
                self._arrived_kv.discard(request.request_id)
                request.waits_for_kv = False
            if budget <= 0:
                break
            loaded = bool(request.blocks)
            external = self._admit(request)
            if external is None:
                continue
            wanted = min(budget, request.num_tokens - request.num_computed_tokens)
            if self._grow(request, request.num_computed_tokens + wanted, preempt=False) is None:
                if not loaded:
                    self._release(request)
                continue
            self.side.allocated(request, _Blocks(request.blocks), 0)
            self.waiting.remove(request)
            self.running.append(request)
            scheduled[request.request_id] = wanted
            if request.num_preemptions:  # vLLM tells of all of its blocks among the running ones
                resumed.add(request.request_id)
                cached.append((request, request.num_computed_tokens, request.blocks))
            else:
                new.append((request, request.num_computed_tokens))
            budget -= wanted
        output = Output(
            scheduled_new_reqs=[
                Output(req_id=request.request_id, block_ids=([b.block_id for b in request.blocks],),
                       num_computed_tokens=computed)
                for request, computed in new
            ],
            scheduled_cached_reqs=Output(
                req_ids=[request.request_id for request, _, _ in cached],
                new_block_ids=[([b.block_id for b in blocks],) if blocks else None for _, _, blocks in cached],
                num_computed_tokens=[computed for _, computed, _ in cached],
                resumed_req_ids=resumed,
            ),
            num_scheduled_tokens=scheduled,
        )  # fmt: skip
        for name, count in scheduled.items():
            self._cache(self.requests[name], self.requests[name].num_computed_tokens + count)
        jobs = self.side.step(output)
        assert scheduled or not (jobs.saves or jobs.complete), "before 0.32, wait_for_save comes only after computing"
        self._compute(scheduled)
        self._after(scheduled, self._work(jobs))

    def _admit(self, request: Request) -> int | None:
        """Finds what is computed; returns the tokens from elsewhere, or None if the request does not run now."""
        if request.num_computed_tokens:
            return 0
        hits: list[Block] = []
        limit = (request.num_tokens - 1) // self.size
        while len(hits) < limit and (block := self.pool.cached.get(self.hash_of(request, len(hits)))) is not None:
            hits.append(block)
        external, beside = self.side.matched(request, len(hits) * self.size)
        if external is None:
            return None
        assert external % self.size == 0
        assert len(hits) * self.size + external < request.num_tokens, "a token is left to be computed"
        wanted = external // self.size
        self.pool.touch(hits)
        # Requests that hold loaded blocks cannot be preempted, so each must have room to its end.
        holding = [each for each in self.waiting if each.blocks] + [request]
        room = sum(
            -(-(each.num_prompt_tokens + each.output_tokens) // self.size) - len(each.blocks) for each in holding
        )
        if external and room - len(hits) > self.pool.get_num_free_blocks():
            self.pool.free_blocks(reversed(hits))
            return None
        request.blocks = hits + self.pool.take(wanted)
        request.num_computed_tokens = len(hits) * self.size + external
        if not external:
            return 0
        assert beside
        self.side.allocated(request, _Blocks(request.blocks), external)
        request.waits_for_kv = True
        return None

    def _grow(self, request: Request, tokens: int, preempt: bool = True) -> list[Block] | None:
        wanted = -(-tokens // self.size) - len(request.blocks)
        while wanted > self.pool.get_num_free_blocks():
            if not preempt or not self.running or (self._waits_for_frees and self.side.frees):
                return None
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return None
        blocks = self.pool.take(max(0, wanted))
        request.blocks += blocks
        return blocks

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks, request.num_computed_tokens = [], 0

    def _cache(self, request: Request, tokens: int) -> None:
        """Makes full blocks known to other requests, before they are computed, as vLLM does."""
        for place in range(min(tokens, request.num_tokens) // self.size):
            block = request.blocks[place]
            if block.block_hash is None:
                block.block_hash = self.hash_of(request, place)
                self.pool.cached.setdefault(block.block_hash, block)

    def _compute(self, scheduled: dict[str, int]) -> None:
        for name, count in scheduled.items():
            request = self.requests[name]
            end = request.num_computed_tokens + count
            for place in range(request.num_computed_tokens // self.size, -(-end // self.size)):
                start = place * self.size
                if start < request.num_computed_tokens or place == 0:
                    pass
                elif request.blocks[place - 1].content != self.hash_of(request, place - 1):
                    raise AssertionError(f"{name} reads block {place - 1}, which holds something else")
                full = end >= start + self.size
                request.blocks[place].content = self.hash_of(request, place) if full else "part"
            request.num_computed_tokens = end

    def _after(self, scheduled: dict[str, int], output: Any) -> None:
        invalid = output.invalid_block_ids
        for request in self.waiting:
            if request.waits_for_kv:
                bad = next((n for n, b in enumerate(request.blocks) if b.block_id in invalid), None)
                if bad is not None:  # ranks may report in different steps
                    request.num_computed_tokens = min(request.num_computed_tokens, bad * self.size)
        self.side.news(output)
        for name in output.finished_recving:
            request = self.requests[name]
            if request.finished:
                self._release(request)
                del self.requests[name]
                continue
            for place in range(request.num_computed_tokens // self.size):
                assert request.blocks[place].content == self.hash_of(request, place), f"{name} loaded something else"
            self._cache(request, request.num_computed_tokens)
            if not request.num_computed_tokens:
                self._release(request)
            self._arrived_kv.add(name)
        for name in scheduled:
            request = self.requests.get(name)
            if request is None or request.finished or request not in self.running:
                continue
            if request.num_computed_tokens == request.num_tokens:
                made = request.num_tokens - request.num_prompt_tokens
                if made >= request.output_tokens:
                    self._finish(request)
                else:
                    request.all_token_ids.append(random.Random(str(request.all_token_ids[-3:])).randrange(100))

    def _finish(self, request: Request) -> None:
        request.finished = True
        self.side.ended(request)
        if request in self.running:
            self.running.remove(request)
        if request.waits_for_kv and request.request_id not in self._arrived_kv:
            self.waiting.remove(request)
            return  # its blocks stay until the load has ended
        if request in self.waiting:
            self.waiting.remove(request)
        self._arrived_kv.discard(request.request_id)
        self._release(request)
        del self.requests[request.request_id]


class _Blocks:
    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks

    def get_block_ids(self) -> tuple[list[int]]:
        return ([block.block_id for block in self._blocks],)
