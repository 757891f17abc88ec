"""The scheduler's side of the connector, driven as vLLM drives it: right content in every block, and no pin left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.block_keys import chain_block_keys, tokens_to_bytes
from pinyon.core.orders import FetchSpan, KvSource
from pinyon.vllm.jobs import Loaded, LoadJob, SaveJob, StepJobs, StepNews
from pinyon.vllm.prompt_keys import KeySpace
from pinyon.vllm.scheduler import SchedulerSide
from pinyon.vllm.times import Times
from tests.vllm_double import VERSIONS, BlockPool, Engine, Request

SIZE = 4
RANKS = 2


class World:
    """One engine, its workers and a store; jobs take random times and sometimes fail."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        self.store: dict[bytes, Any] = {}
        self.looks: list[tuple[Future[tuple[FetchSpan, ...]], list[bytes]]] = []
        self.loads: list[tuple[int, LoadJob]] = []
        self.came: dict[int, int] = {}
        """The blocks of each load that came at all ranks so far."""
        self.saves: list[tuple[int, SaveJob]] = []
        self.pool = BlockPool(rng.choice((16, 24, 48)))
        self.fails = rng.choice((0.0, 0.3))
        self.space = KeySpace("weights", "layout", SIZE, b"")
        self.side = SchedulerSide(
            self.space, RANKS, self._look, Times("x", SIZE), lambda: self.now_s,
            look_s=5.0, saves=True, pinned_share=rng.choice((0.1, 0.5)), secret=b"",
        )  # fmt: skip
        steps, version = rng.choice((8, 64)), rng.choice(VERSIONS)
        self.engine = Engine(self.side, self.pool, SIZE, self.work, step_tokens=steps, version=version)
        self.lent: dict[bytes, int] = {}
        """The blocks that other instances may read, by key."""
        self.forgets = rng.random() < 0.2
        self.families = [[rng.randrange(100) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
        self.made = 0

    def _look(self, keys: Sequence[bytes]) -> Future[tuple[FetchSpan, ...]]:
        future: Future[tuple[FetchSpan, ...]] = Future()
        self.looks.append((future, list(keys)))
        return future

    def request(self) -> None:
        rng = self.rng
        self.made += 1
        prompt = rng.choice(self.families) + [rng.randrange(100) for _ in range(rng.randrange(1, 12))]
        salt = rng.choice((None, None, "salt"))
        self.engine.add(Request(f"r{self.made}", prompt, rng.randrange(1, 9), cache_salt=salt))

    def answer(self) -> None:
        """Answers a question to the store, late or never as it may be."""
        if self.looks:
            future, keys = self.looks.pop(self.rng.randrange(len(self.looks)))
            if not future.set_running_or_notify_cancel():
                return
            if self.rng.random() < self.fails:
                future.set_exception(OSError("away"))
                return
            count = next((place for place, key in enumerate(keys) if key not in self.store), len(keys))
            half = self.rng.randrange(count + 1)
            ends = [(0, half), (half, count)]
            future.set_result(tuple(FetchSpan("s", "a:1", KvSource.STORE, a, b) for a, b in ends if b > a))

    def work(self, jobs: StepJobs) -> Any:
        """Does some of the jobs: each rank reports each job once."""
        rng, news = self.rng, StepNews()
        for block in jobs.overwritten:
            self.lent = {key: each for key, each in self.lent.items() if each != block}
        self.lent |= dict(jobs.complete)
        self.loads += [(rank, job) for job in jobs.loads for rank in range(RANKS)]
        self.saves += [(rank, job) for job in jobs.saves for rank in range(RANKS)]
        blocks = self.pool.blocks
        for job in jobs.saves:
            assert all(blocks[block].ref_cnt for block in job.blocks), "what is saved is pinned"
        done, invalid = set(), set()
        for part in list(self.loads):
            if rng.random() < 0.4:
                self.loads.remove(part)
                job = part[1]
                good = rng.randrange(len(job.keys)) if rng.random() < self.fails else len(job.keys)
                good = next((at for at, key in enumerate(job.keys[:good]) if key not in self.store), good)
                assert all(blocks[block].ref_cnt for block in job.blocks), "the targets of a load are pinned"
                invalid.update(job.blocks[good:])
                self.came[job.job_id] = good = min(good, self.came.get(job.job_id, good))
                news.loaded.append(Loaded(job.job_id, 0, good, 0.1))
                if not any(each is job for _, each in self.loads):  # vLLM waits for all ranks
                    done.add(job.request_id)
                    for key, block in zip(job.keys[:good], job.blocks, strict=False):
                        blocks[block].content = self.store[key]
                        self.lent[key] = block
        for entry in list(self.saves):
            if rng.random() < 0.4:
                self.saves.remove(entry)
                job = entry[1]
                for key, block in zip(job.keys, job.blocks, strict=True):
                    content = blocks[block].content
                    assert len(content[1]) % SIZE == 0, "only complete blocks are saved"
                    assert self.store.setdefault(key, content) == content, "one key, two contents"
                news = news.aggregate(StepNews({job.job_id: 1}))  # type: ignore[assignment]
        if rng.random() < 0.02 and not self.loads:
            self.store.clear()
        return SimpleNamespace(kv_connector_worker_meta=news, finished_recving=done, invalid_block_ids=invalid)

    def key_of(self, content: Any) -> bytes:
        salt, tokens = content
        root = self.space.root(SimpleNamespace(cache_salt=salt, lora_request=None))
        return chain_block_keys(root, tokens_to_bytes(tokens), SIZE)[-1]

    def check(self) -> None:
        """Checks what the conductor is told and what is lent against what the blocks hold."""
        for key, block in self.lent.items():
            assert self.key_of(self.pool.blocks[block].content) == key, "what is lent has other content"
        if not self.forgets:
            for number, key in self.side.cached._key_of.items():
                known = self.pool.blocks[number].block_hash
                assert known is None or self.key_of(known) == key, "the conductor is told of old content"

    def held(self) -> set[Any]:
        """Returns what blocks hold of what the engine may reuse."""
        return {block.content for block in self.pool.blocks if block.block_hash is not None}


@given(st.integers(0, 1 << 30))
def test_content_is_right_and_nothing_stays_pinned(seed: int) -> None:
    world = World(seed)
    rng, told = world.rng, set[bytes]()
    for _ in range(rng.randrange(20, 120)):
        world.now_s += rng.random() * 2
        for action in rng.sample((world.request, world.answer, world.engine.step, world.engine.step), 3):
            action()
        if rng.random() < 0.1 and world.engine.requests:
            world.engine.abort(rng.choice(list(world.engine.requests)))
        if world.forgets and rng.random() < 0.1:
            world.pool.forget()
        world.check()
        stored, removed = world.side.changes()
        assert told.isdisjoint(stored)
        assert told.issuperset(removed)
        told = (told | set(stored)) - set(removed)
        assert told == set(world.side.cached.keys())
    for _ in range(2000):
        if not world.engine.requests and not world.side.pins:
            break
        world.now_s += 1.0
        world.answer()
        world.engine.step()
    assert not world.engine.requests
    assert not world.side.pins
    assert not world.side.prompts
    assert world.pool.get_num_free_blocks() == len(world.pool.blocks) - 1
    assert len(world.side.snapshot()) == len(world.held())
