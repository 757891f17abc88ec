"""An agent between a fake engine (HTTP, events and their replay by ZeroMQ) and a real conductor."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pinyon.core.block_keys import chain_block_keys, namespace, pack_keys, salt_of, tokens_to_bytes, variant
from pinyon.core.errors import Unavailable
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.placement.instances import InstanceState
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.tasks import ended
from pinyon.runtime.telemetry import Telemetry
from services.agent.engine_blocks import COUNTED, EngineBlocks
from services.agent.report import ServerReport
from services.agent.settings import AgentSettings
from tests.integration.conductor_parts import WAIT_S, World
from tests.integration.lb_harness import port_of
from tests.integration.upstream_parts import FakeServer
from tests.unit.agent.engine_model import BLOCK_TOKENS, EngineModel, Prompt
from tests.waiting import eventually

zmq_asyncio = pytest.importorskip("zmq.asyncio")
zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

from services.agent.agent import PAGE_BYTES_MAX, Agent  # noqa: E402
from services.agent.app import serving  # noqa: E402  # needs what may be missing

LONG, SHORT = Prompt(tuple(range(41))), Prompt(tuple(range(100, 121)))
PAGE = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block}",engine="0",num_gpu_blocks="64",num_gpu_blocks_override="None"}} 1.0
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:prompt_tokens_total{{engine="0"}} {prompt_tokens}
process_start_time_seconds {started}
"""


class Pages(dict[str, bytes]):
    """Pages that a server shows, and how often they were read."""

    reads = 0

    def get(self, path: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(path, default)


class FakeEngine:
    """An engine's life, and the next one after ``restart``."""

    def __init__(self) -> None:
        self.http = FakeServer(metrics=False)
        self.http.lists = (
            b'{"data": [{"id": "sql", "parent": "tiny"}, {"id": "tiny", "root": "/ck", "max_model_len": 4096}]}'
        )
        self.addresses = [f"tcp://127.0.0.1:{port_of(self)}" for _ in range(2)]
        self.context = zmq_asyncio.Context()
        self.started = itertools.count(1_000_000)
        self.pause_s = 0.0
        """The pause before each message of a replay."""
        self.topic = [b"kv"]
        """The topic as replays have it, if they have one."""
        self.losing: list[int] = []
        """The numbers of batches that the next replay loses."""
        self.begin()

    def begin(self) -> None:
        """Begins a life of the engine, with an empty cache."""
        self.model = EngineModel()
        self.published: deque[tuple[int, bytes]] = deque(maxlen=8)
        self.numbers = itertools.count()
        self.show(started=next(self.started))

    def show(self, **figures: float) -> None:
        self.figures = {"block": BLOCK_TOKENS, "running": 0, "waiting": 0, "prompt_tokens": 0, **figures}
        self.http.told["/metrics"] = PAGE.format(**self.figures).encode()

    async def start(self) -> None:
        # Like a PUB socket, but it tells of subscriptions.
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        self.pub.bind(self.addresses[0])
        self.router.bind(self.addresses[1])
        self.answering = asyncio.create_task(self._answer())
        await self.http.start()

    async def stop(self) -> None:
        await self.http.stop()
        await ended(self.answering)
        self.pub.close(linger=0)
        self.router.close(linger=0)

    async def publish(self, events: list[Any], lost: bool = False, batch: bytes = b"") -> None:
        number, payload = next(self.numbers), batch or msgpack.packb([1.5, events, 0])
        self.published.append((number, payload))
        if not lost:
            await self.pub.send_multipart((b"kv", number.to_bytes(8, "big"), payload))

    async def _answer(self) -> None:
        while True:
            caller, _, first = await self.router.recv_multipart()
            losing, self.losing = self.losing, []
            for number, payload in list(self.published):
                if number >= int.from_bytes(first, "big") and number not in losing:
                    await asyncio.sleep(self.pause_s)
                    await self.router.send_multipart((caller, b"", *self.topic, number.to_bytes(8, "big"), payload))
            if 1 << 64 not in losing:  # which stands for its end
                await self.router.send_multipart((caller, b"", *self.topic, b"\xff" * 8, b""))


class Bench:
    """The agent, the engine and the conductor."""

    def __init__(self, world: World, engine: FakeEngine, registry: CollectorRegistry) -> None:
        self.world, self.engine, self.registry = world, engine, registry

    def figure(self, name: str) -> float:
        value = self.registry.get_sample_value(f"pinyon_agent_{name}")
        assert value is not None, name
        return value

    @property
    def state(self) -> InstanceState | None:
        return self.world.conductor.fleet.get("agent")

    async def registered(self, other_than: str = "") -> InstanceState:
        """Waits for the registration, if named of another boot, and returns it."""
        await eventually(
            lambda: self.state is not None and self.state.info.boot_id != other_than and self.figure("report_sessions"),
            "registered",
        )
        assert self.state is not None
        return self.state

    async def subscribed(self) -> InstanceState:
        async with asyncio.timeout(WAIT_S):
            assert await self.engine.pub.recv() == b"\1"
        return await self.registered()

    async def known(self, blocks: int) -> None:
        """Waits until the conductor knows that many blocks, which the engine holds."""
        assert blocks in (len(self.engine.model.held()), 0)
        index = self.world.conductor.fleet.index

        def reached() -> bool:
            state = self.state
            return state is not None and index.blocks_of(state) == blocks == self.figure("held_blocks")

        await eventually(reached, f"{blocks} blocks are known")

    def prefix(self, root: bytes, prompt: Prompt) -> int:
        """Returns how many leading blocks of the prompt the conductor knows there, in a chain from this root."""
        assert self.state is not None
        keys = chain_block_keys(root, tokens_to_bytes(prompt.tokens), BLOCK_TOKENS)
        return self.world.conductor.fleet.index.match(pack_keys(keys)).held_by(self.state)


@asynccontextmanager
async def bench(
    replay: bool | str = True,
    begun: Sequence[Prompt] = (),
    topic_of_replays: Sequence[bytes] = (b"kv",),
    shown: bytes = b"",
    **settings: Any,
) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(World(index_stride_tokens=BLOCK_TOKENS))
        engine = FakeEngine()
        engine.topic = list(topic_of_replays)
        if shown:
            engine.http.told["/metrics"] = shown
        stack.callback(engine.context.destroy, linger=0)
        await engine.start()
        stack.push_async_callback(engine.stop)
        for prompt in begun:
            await engine.publish(engine.model.store(prompt))
        chosen = {
            "server": engine.http.url, "events": engine.addresses[0], "conductor": world.address,
            "replay": engine.addresses[1] if replay is True else replay or "", "gone_s": 1.0, **settings,
        }  # fmt: skip
        registry = CollectorRegistry()
        context = ServiceContext("agent", "agent", Telemetry("agent", "agent"), registry, asyncio.Event())
        await stack.enter_async_context(serving(AgentSettings(**chosen), context))
        yield Bench(world, engine, registry)


async def test_the_server_is_registered_as_an_instance() -> None:
    async with bench(advertise_host="gpu-3") as run:
        info = (await run.registered()).info
        assert (info.role, info.model, info.max_context_tokens, info.capacity_blocks) == (Role.MIXED, "tiny", 4096, 64)
        assert info.server_url == f"http://gpu-3:{run.engine.http.port}"
        assert info.address == f"gpu-3:{run.engine.http.port}"
        assert info.keeps_to_itself
        assert info.layout == KvLayout(1, 1, 1, BLOCK_TOKENS, "unknown", "agent", 1)
    assert run.state is None, "it has left"


@pytest.mark.parametrize("topic", [[b"kv"], []], ids=["topic", "no topic"])
async def test_what_was_there_before_is_replayed(topic: list[bytes]) -> None:
    async with bench(begun=[LONG, SHORT], topic_of_replays=topic) as run:
        await run.subscribed()
        await run.known(15)
        assert (run.figure("gaps_total"), run.figure("replays_total")) == (0, 1)


async def test_prompts_of_tenants_and_adapters_are_found() -> None:
    async with bench() as run:
        info, engine = (await run.subscribed()).info, run.engine
        assert info.layout is not None
        salt = salt_of("anna", "", b"")
        public, anna = (namespace(info.model_fingerprint, info.layout.layout_id, "", b"", each) for each in ("", salt))
        of_anna = Prompt(LONG.tokens, salt=salt, lora="sql")
        for prompt in (SHORT, of_anna):
            await engine.publish(engine.model.store(prompt))
        await run.known(15)
        assert run.prefix(public, SHORT) == 5
        assert run.prefix(variant(anna, "lora", "sql\0"), LONG) == 10
        assert not run.prefix(public, LONG)
        assert not run.prefix(anna, LONG)
        await engine.publish([event for _ in range(4) for event in engine.model.evict(-1)])
        await run.known(11)
        assert run.prefix(variant(anna, "lora", "sql\0"), LONG) == 6
        await engine.publish(engine.model.clear())
        await run.known(0)


async def test_batches_that_were_lost_are_replayed() -> None:
    async with bench() as run:
        await run.subscribed()
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)
        await run.engine.publish(run.engine.model.evict(0), lost=True)
        await run.engine.publish(run.engine.model.store(LONG), lost=True)
        await run.engine.publish([])
        await run.known(14)
        assert (run.figure("gaps_total"), run.figure("drops_total")) == (1, 0)


async def test_what_a_replay_loses_is_asked_for_again() -> None:
    async with bench() as run:
        await run.subscribed()
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)
        for at in range(6):
            await run.engine.publish(run.engine.model.store(Prompt((at,) * BLOCK_TOKENS)), lost=True)
        replays = run.figure("replays_total")
        run.engine.losing = [3, 4]
        await run.engine.publish([])
        await run.known(11)
        assert (run.figure("gaps_total"), run.figure("drops_total")) == (1, 0)
        assert run.figure("replays_total") == replays + 2


async def test_the_lost_end_of_a_replay_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.agent.feed.REPLAYING_S", 0.1)
    async with bench() as run:
        await run.subscribed()
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)
        await run.engine.publish(run.engine.model.store(LONG), lost=True)
        run.engine.losing = [1 << 64]
        await run.engine.publish([])
        await run.known(15)
        assert (run.figure("gaps_total"), run.figure("drops_total")) == (1, 0)


async def test_a_slow_replay_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.agent.feed.REPLAY_S", 2.0)
    async with bench() as run:
        await run.subscribed()
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)  # the first replay, which may come after the subscription, has ended
        for at in range(7):
            await run.engine.publish(run.engine.model.store(Prompt((at,) * BLOCK_TOKENS)), lost=True)
        run.engine.pause_s = 0.3
        await run.engine.publish([])
        await run.known(12)
        assert (run.figure("gaps_total"), run.figure("drops_total")) == (1, 0)


async def test_a_replay_that_does_not_come_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.agent.feed.REPLAY_S", 0.05)
    async with bench(replay="ipc:///nobody/is/here", topic="k") as run:
        async with asyncio.timeout(WAIT_S):
            assert await run.engine.pub.recv() == b"\1k"
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)
        assert run.figure("replays_total") == 1


@pytest.mark.parametrize("replay", [True, False])
async def test_without_the_lost_batches_all_is_unknown(replay: bool) -> None:
    async with bench(replay) as run:
        await run.subscribed()
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)
        run.engine.published = deque(maxlen=2)  # too short
        for _ in range(3):
            await run.engine.publish([], lost=True)
        run.engine.model.clear()
        await run.engine.publish(run.engine.model.store(LONG))
        await run.known(10)
        assert (run.figure("gaps_total"), run.figure("drops_total")) == (1, 1)


async def test_numbers_that_begin_again_are_a_restart() -> None:
    async with bench() as run:
        boot_id = (await run.subscribed()).info.boot_id
        for prompt in (SHORT, LONG):
            await run.engine.publish(run.engine.model.store(prompt))
        await run.known(15)
        run.engine.begin()
        run.engine.show(started=1_000_000)
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)
        assert run.figure("restarts_total") == 1
        assert run.state is not None
        assert run.state.info.boot_id == boot_id


async def test_a_process_that_started_later_is_a_restart() -> None:
    async with bench() as run:
        boot_id = (await run.subscribed()).info.boot_id
        await run.engine.publish(run.engine.model.store(LONG))
        await run.known(10)
        run.engine.begin()
        await run.registered(other_than=boot_id)
        await run.known(0)
        assert run.figure("restarts_total") == 1


async def test_a_server_that_is_gone_leaves_until_it_is_back() -> None:
    async with bench() as run:
        boot_id = (await run.subscribed()).info.boot_id
        await run.engine.publish(run.engine.model.store(LONG))
        await run.known(10)
        await run.engine.stop()
        await eventually(lambda: run.state is None, "it has left")
        assert run.figure("held_blocks") == run.figure("report_sessions") == 0
        run.engine.begin()
        await run.engine.start()
        assert (await run.subscribed()).info.boot_id != boot_id
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)


async def test_an_unwell_server_drains() -> None:
    async with bench(gone_s=60) as run:
        state = await run.registered()
        run.engine.http.health = 503
        await eventually(lambda: state.load.draining, "it drains")
        run.engine.http.health = 200
        await eventually(lambda: state.schedulable, "it serves")
        assert run.state is state


async def test_a_server_whose_metrics_fail_is_well() -> None:
    async with bench(gone_s=0.5, block_tokens=BLOCK_TOKENS) as run:
        state = await run.registered()
        run.engine.http.told = pages = Pages({"/metrics": b"#" * (PAGE_BYTES_MAX + 1)})
        await eventually(lambda: pages.reads >= 4, "it was asked again")
        assert run.state is state
        assert not state.load.draining


async def test_metrics_are_not_needed_if_the_block_is_known() -> None:
    large = b"#" * (PAGE_BYTES_MAX + 1)
    async with bench(begun=[SHORT], shown=large, block_tokens=BLOCK_TOKENS) as run:
        assert (await run.subscribed()).info.capacity_blocks == 0
        await run.known(5)


async def test_one_missed_answer_is_no_reason_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.agent.agent.POLL_S", 0.0)
    healths = iter((200, 503, 200, 503, 503, 200, 200))
    page, restarted = (b"process_start_time_seconds %d" % at for at in (1, 2))
    seen: list[tuple[int, bool]] = []

    class Asked:
        questions = 0

        async def ask(self, path: bytes, *_: Any) -> tuple[int, bytes]:
            if path == b"/health":
                self.questions += 1
                return next(healths), b""
            return 200, page if self.questions < 7 else restarted

    asked, counts = Asked(), dict.fromkeys(COUNTED, 0)
    settings: Any = AgentSettings(server="http://127.0.0.1:1", conductor="127.0.0.1:1")
    agent = Agent(settings, asked, "", "agent", b"", None, counts=counts)  # type: ignore[arg-type]
    report = ServerReport(None, 0, EngineBlocks(partial(namespace, "", "", ""), 1, 1, counts))
    session: Any = SimpleNamespace(wake=lambda: seen.append((asked.questions, report.draining)))
    await agent._watch(report, session)
    assert seen == [(5, True), (6, False)]


async def test_adapters_that_are_loaded_later_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.agent.agent.ADAPTERS_S", 0.0)
    sql, law = b'{"id": "sql", "parent": "tiny", "root": "/sql"}', b'{"id": "law", "parent": "tiny"}'
    listed = iter([(503, b""), *((200, b'{"data": [{"id": "tiny"}, %b]}' % each) for each in (sql, law))])
    tables: list[dict[str, str]] = []
    done = asyncio.Event()

    class Asked:
        async def ask(self, path: bytes, *_: Any) -> tuple[int, bytes]:
            assert path == b"/v1/models"
            tables.append(dict(agent.adapters))
            if (answer := next(listed, None)) is None:
                done.set()
                raise Unavailable("gone")
            return answer

    settings: Any = AgentSettings(server="http://127.0.0.1:1", conductor="127.0.0.1:1")
    agent = Agent(settings, Asked(), "", "agent", b"", None)  # type: ignore[arg-type]
    adapters = agent.adapters
    asking = asyncio.create_task(agent._ask_adapters())
    async with asyncio.timeout(WAIT_S):
        await done.wait()
    await ended(asking)
    assert tables[:4] == [{}, {}, {"sql": "/sql"}, {"law": ""}]
    assert agent.adapters is adapters


async def test_several_engines_behind_one_server_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    rank = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="9"} 1.0\n'
    async with bench(shown=rank % 0 + rank % 1) as run:
        await eventually(lambda: "it has 2 engines" in caplog.text, "the reason is told")
        assert run.state is None


async def test_the_load_is_that_of_the_metrics() -> None:
    async with bench(begun=[LONG, LONG]) as run:
        state = await run.registered()
        run.engine.show(started=1_000_000, running=3, waiting=2)
        await eventually(lambda: state.load.running_requests == 3, "the load is reported")
        load = state.load
        assert (load.pending_requests, load.waiting_for_room, load.used_blocks, load.kv_tokens) == (2, 2, 16, 64)
        assert not load.draining


async def test_rubbish_ends_nothing_but_what_was_known() -> None:
    async with bench() as run:
        await run.subscribed()
        await run.engine.publish(run.engine.model.store(LONG))
        await run.known(10)
        await run.engine.pub.send_multipart([b"kv", b"7", b"", b""])
        await run.engine.publish([], batch=b"\xc1rubbish")
        await run.known(0)
        run.engine.model.clear()
        await run.engine.publish(run.engine.model.store(SHORT))
        await run.known(5)
        assert run.figure("malformed_batches_total") == 2
