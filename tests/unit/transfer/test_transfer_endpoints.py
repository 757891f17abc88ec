"""The behaviour that tcp, shm and rdma share: keeping endpoints, replacing broken ones."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.transfer import Opcode, Reason, SegmentDescriptor, TransferLimits, TransferStatus
from pinyon.transfer.chains.chain import (
    BAD_BYTES,
    DONE,
    GONE,
    LATE,
    LOST,
    NO_CONNECTION,
    NO_ROOM,
    SHUTDOWN,
    STALLED,
    Chain,
    ChainOutcome,
)
from pinyon.transfer.chains.slicing import ChainPlan
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import DialRefused
from pinyon.transfer.links.endpoint import Endpoint, EndpointKey, TryAgain
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.nic import Path
from tests.unit.transfer.conftest import GENEROUS_S, eventually

READ, WRITE = Opcode.READ, Opcode.WRITE
REMOTE = SegmentDescriptor("127.0.0.1", 1, b"b" * 16)
PATH, OTHER = Path("fake", "a", "x"), Path("fake", "b", "x")
LIMITS = TransferLimits(max_endpoints=3, idle_s=10.0)


class FakeLink:
    def __init__(self, link_id: int) -> None:
        self.id = link_id


class FakeEndpoint(Endpoint):
    """An endpoint that does what the test says, chain after chain, and completes by default."""

    def __init__(self, link_id: int, replaces: int, script: list[object]) -> None:
        super().__init__(FakeLink(link_id))
        self.replaces = replaces
        self.script = script
        self.broken = False
        self.closed: list[bool] = []
        """The argument of each call of ``close``: whether to close hard."""

    def is_open(self) -> bool:
        return super().is_open() and not self.broken

    def exchange(self, chain: Chain) -> ChainOutcome:
        step = self.script.pop(0) if self.script else DONE
        if callable(step):
            step = step(self, chain)
        if isinstance(step, BaseException):
            raise step
        return step

    def abort(self) -> None:
        self.aborted = True

    def close(self, *, hard: bool) -> None:
        self.closed.append(hard)


class FakeTransport(Endpoints[FakeEndpoint]):
    def __init__(self, cap: int = 2) -> None:
        self.now = 100.0
        self.clock: Callable[[], float] = lambda: self.now
        context = EngineContext(bytes(16), MemoryTable(), LIMITS, clock=lambda: self.clock())
        self.meter = context.meter
        super().__init__(context, cap)
        self.made: list[FakeEndpoint] = []
        self.script: list[object] = []
        """The script of every endpoint made from now on: its steps are drawn from here."""
        self.dial_error: BaseException | None = None

    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> FakeEndpoint:
        if self.dial_error is not None:
            raise self.dial_error
        self.made.append(FakeEndpoint(len(self.made) + 1, replaces, self.script))
        return self.made[-1]

    def chain(self, opcode: Opcode = READ, timeout_s: float = 1000.0) -> Chain:
        return Chain(ChainPlan(REMOTE, opcode, [], 8), {}, self.now + timeout_s, lambda chain, outcome: None)

    def lease_all(self, path: Path = PATH) -> list[FakeEndpoint]:
        """Leases all endpoints that this path may have."""
        leased = [self.lease(self.chain(), path) for _ in range(2)]
        assert all(isinstance(endpoint, FakeEndpoint) for endpoint in leased)
        return leased


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def test_one_chain_after_another_uses_one_endpoint(transport) -> None:
    assert [transport.run(transport.chain(), PATH) for _ in range(5)] == [DONE] * 5
    assert len(transport.made) == transport.endpoints == 1
    assert transport.run(transport.chain(), OTHER) == DONE
    assert transport.endpoints == 2


def test_threads_share_few_endpoints_and_none_is_lost(transport) -> None:
    """Six threads share three paths and three endpoints, while paths are forgotten and endpoints maintained."""
    users: dict[FakeEndpoint, int] = {}
    shared: list[FakeEndpoint] = []

    def use(endpoint: FakeEndpoint, chain: Chain) -> ChainOutcome:
        users[endpoint] = users.get(endpoint, 0) + 1
        if users[endpoint] > 1:
            shared.append(endpoint)
        os.sched_yield()
        users[endpoint] -= 1
        return DONE

    class Forever(list):
        def pop(self, index: int) -> object:
            return use

    transport.script = Forever([use])
    paths = [PATH, OTHER, Path("fake", "c", "x")]

    def work(seed: int) -> list[ChainOutcome]:
        rng = random.Random(seed)
        return [transport.run(transport.chain(), rng.choice(paths)) for _ in range(400)]

    workers = [in_thread(lambda seed=seed: work(seed)) for seed in range(6)]
    while any(worker.is_alive() for worker, _ in workers):
        transport.forget(REMOTE, paths[0])
        transport.forget_if(lambda key: key[1].local_nic == "b")
        transport.maintain(transport.now)
        workers[0][0].join(0.005)
    assert [set(outcomes[0]) for _, outcomes in workers] == [{DONE}] * 6
    assert not shared
    assert transport.endpoints == sum(not endpoint.closed for endpoint in transport.made)
    transport.close()
    assert all(endpoint.closed == [False] for endpoint in transport.made)
    assert transport.endpoints == 0


@pytest.mark.parametrize("early", [False, True], ids=["released afterwards", "released meanwhile"])
def test_an_endpoint_leased_as_its_path_is_forgotten_is_closed(transport, early) -> None:
    """The lease of a handy endpoint takes no lock, so it may happen in the midst of ``forget``."""
    ends = [transport.lease(transport.chain(), path) for path in (OTHER, PATH, Path("fake", "c", "x"))]
    for endpoint in ends:
        transport.release(endpoint)
    release = threading.Event()

    def use() -> None:
        endpoint = transport.lease(transport.chain(), PATH)
        release.wait(GENEROUS_S)
        transport.release(endpoint)

    users: list[threading.Thread] = []

    def failed(key: EndpointKey) -> bool:
        if not users:
            users.append(in_thread(use)[0])
        elif early:
            release.set()
        users[0].join(0.1)  # it gets as far as it can before the path is forgotten
        return key[1] == PATH

    transport.forget_if(failed)
    release.set()
    users[0].join(GENEROUS_S)
    assert transport.lease(transport.chain(), PATH) is not ends[1]
    assert ends[1].closed == [False]


def test_an_endpoint_in_use_at_the_close_is_closed_on_release(transport) -> None:
    idle, used = transport.lease_all()
    transport.release(idle)
    transport.close()
    assert (idle.closed, used.closed) == ([False], [])
    transport.release(used)
    assert used.closed == [False]


# --- all in use ---


def waits(transport: FakeTransport, chain: Chain) -> tuple[threading.Thread, list[object]]:
    """Leases an endpoint in a thread, which waits when this returns."""
    before = len(transport._waiters)
    thread, leased = in_thread(lambda: transport.lease(chain, PATH))
    eventually(lambda: len(transport._waiters) > before, "the chain waits")
    return thread, leased


@pytest.mark.parametrize("freed", ["released", "broken"])
def test_a_chain_waits_for_an_endpoint_or_for_room(transport, freed: str) -> None:
    held = transport.lease_all()
    thread, leased = waits(transport, transport.chain())
    assert transport.run(transport.chain(), OTHER) == DONE, "it holds up no other path"
    (transport.release if freed == "released" else transport.discard)(held[0])
    thread.join(GENEROUS_S)
    assert leased == [held[0] if freed == "released" else transport.made[3]]
    assert not transport._waiters


def test_chains_are_served_in_turn_and_newcomers_come_last(transport) -> None:
    held = transport.lease_all()
    first, second = waits(transport, transport.chain()), waits(transport, transport.chain())
    for endpoint, (thread, leased) in zip(held, (first, second), strict=True):
        transport.release(endpoint)
        assert transport.lend(endpoint.key) is None, "it is given away already"
        thread.join(GENEROUS_S)
        assert leased == [endpoint]


def test_a_fenced_write_takes_the_place_of_a_free_endpoint(transport) -> None:
    for endpoint in transport.lease_all():
        transport.release(endpoint)
    fresh = transport.lease(transport.chain(WRITE), PATH, replaces=99)
    assert fresh is transport.made[2]
    assert fresh.replaces == 99
    assert transport.endpoints == 2


def test_the_limit_of_all_paths_is_waited_for_too(transport) -> None:
    held = [transport.lease(transport.chain(), Path("fake", name, "x")) for name in "cde"]
    thread, leased = waits(transport, transport.chain())
    transport.release(held[1])
    thread.join(GENEROUS_S)
    assert held[1].closed == [False]
    assert leased == [transport.made[3]]
    assert transport.endpoints == LIMITS.max_endpoints


@pytest.mark.parametrize("end", ["stop", "deadline", "close"])
def test_who_waits_in_vain_is_told_why(transport, end: str) -> None:
    held = transport.lease_all()
    chain = transport.chain(timeout_s=5.0)
    thread, leased = waits(transport, chain)
    if end == "stop":
        chain.stop(ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED))
    elif end == "deadline":
        transport.now += 5.0
    else:
        transport.close()
    thread.join(GENEROUS_S)
    assert leased[0] is {"stop": GONE, "deadline": NO_ROOM, "close": SHUTDOWN}[end]
    assert NO_ROOM == LATE, "both are the same to the caller"
    for endpoint in held:
        transport.release(endpoint)
    assert transport.endpoints == (0 if end == "close" else 2)


def test_what_is_used_again_and_again_stays_when_room_is_needed(transport) -> None:
    paths = [PATH, OTHER, Path("fake", "c", "x")]
    for path in (*paths, PATH):
        transport.now += 1.0
        assert transport.run(transport.chain(), path) == DONE
    in_use = transport.lease(transport.chain(), OTHER)
    assert transport.run(transport.chain(), Path("fake", "d", "x")) == DONE
    assert [endpoint.closed for endpoint in transport.made] == [[], [], [False], []]
    assert in_use is transport.made[1]


class Sieve:
    """Algorithm 1 of "SIEVE is Simpler than LRU" (NSDI '24), line by line: a list from the tail to the head."""

    def __init__(self) -> None:
        self.objects: list[str] = []
        self.visited: set[str] = set()
        self.hand: str | None = None

    def access(self, wanted: str) -> None:
        if wanted in self.objects:
            self.visited.add(wanted)
            return
        if len(self.objects) == LIMITS.max_endpoints:
            seen = self.objects[0] if self.hand is None else self.hand
            while seen in self.visited:
                self.visited.discard(seen)
                seen = self._before(seen) or self.objects[0]
            self.hand = self._before(seen)
            self.objects.remove(seen)
        self.objects.append(wanted)

    def _before(self, seen: str) -> str | None:
        place = self.objects.index(seen) + 1
        return self.objects[place] if place < len(self.objects) else None


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
def test_sieve_chooses_which_endpoint_makes_room(names: list[str]) -> None:
    transport, model = FakeTransport(), Sieve()
    for name in names:
        assert transport.run(transport.chain(), Path("fake", name, "x")) == DONE
        model.access(name)
        there = [each.key[1].local_nic for each in transport.made if not each.closed]
        assert sorted(there) == sorted(model.objects)


def test_an_evicted_endpoint_whose_close_fails_takes_no_room(transport) -> None:
    for path in (PATH, OTHER, Path("fake", "c", "x")):
        assert transport.run(transport.chain(), path) == DONE

    def fail(*, hard: bool) -> None:
        raise KeyError("a defect")

    for endpoint in transport.made:
        endpoint.close = fail
    with pytest.raises(KeyError):
        transport.run(transport.chain(), Path("fake", "d", "x"))
    assert transport.endpoints == 2
    for path in (OTHER, Path("fake", "c", "x"), PATH):
        assert isinstance(transport.lease(transport.chain(timeout_s=0.0), path), FakeEndpoint)


def test_the_cap_over_all_paths_evicts_what_rests(transport) -> None:
    for path in (PATH, OTHER, Path("fake", "c", "x"), Path("fake", "d", "x")):
        assert transport.run(transport.chain(), path) == DONE
        assert transport.endpoints <= LIMITS.max_endpoints
    assert sum(len(endpoint.closed) for endpoint in transport.made) == 1


def test_a_connection_that_cannot_be_made_leaves_its_room(transport) -> None:
    for error, outcome in (
        (ConnectionRefusedError(), NO_CONNECTION),
        (TimeoutError(), STALLED),
        (WireError("nonsense"), BAD_BYTES),
        (DialRefused(Reason.STALE_SEGMENT), ChainOutcome(TransferStatus.REFUSED, Reason.STALE_SEGMENT)),
        (DialRefused(Reason.BUSY), ChainOutcome(TransferStatus.FAILED, Reason.BUSY)),
    ):
        transport.dial_error = error
        for _ in range(3):
            assert transport.run(transport.chain(), PATH) == outcome
    transport.dial_error = KeyError("a defect")
    for _ in range(3):
        with pytest.raises(KeyError):
            transport.run(transport.chain(), PATH)
    transport.dial_error = None
    assert len(transport.lease_all()) == 2


# --- what breaks ---


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Stalled(), STALLED),
        (DeadlineReached(), LATE),
        (WireError("nonsense"), BAD_BYTES),
        (ConnectionResetError(), LOST),
        (ChainOutcome(TransferStatus.FAILED, Reason.CHECKSUM), ChainOutcome(TransferStatus.FAILED, Reason.CHECKSUM)),
    ],
)
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_what_fails_is_closed_hard_and_a_write_is_fenced(transport, opcode, error, outcome) -> None:
    chain = transport.chain(opcode)
    transport.script += [error]
    assert transport.run(chain, PATH) == outcome
    assert [endpoint.closed for endpoint in transport.made] == [[True]]
    assert transport.endpoints == 0
    assert chain.fence == (1 if opcode is WRITE else 0)
    assert transport.run(chain, PATH) == DONE
    assert transport.made[1].replaces == (1 if opcode is WRITE else 0)
    assert chain.fence == 0
    assert transport.meter.stats.retries == 0


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_an_idle_endpoint_that_the_peer_closed_is_replaced_once(transport, opcode) -> None:
    assert transport.run(transport.chain(opcode), PATH) == DONE
    transport.script += [ConnectionResetError(), DONE]
    assert transport.run(transport.chain(opcode), PATH) == DONE
    assert [endpoint.replaces for endpoint in transport.made] == [0, 1]
    assert transport.meter.stats.retries == 1
    transport.script += [ConnectionResetError(), ConnectionResetError()]
    assert transport.run(transport.chain(opcode), PATH) == LOST  # the second one was fresh
    assert len(transport.made) == 3
    assert transport.endpoints == 0


def test_an_endpoint_broken_after_its_first_byte_is_not_replaced(transport) -> None:
    assert transport.run(transport.chain(), PATH) == DONE

    def half(endpoint: FakeEndpoint, chain: Chain) -> BaseException:
        endpoint.answered = True
        return ConnectionResetError()

    transport.script += [half]
    assert transport.run(transport.chain(), PATH) == LOST
    assert len(transport.made) == 1


def test_what_is_known_to_be_closed_is_not_leased(transport) -> None:
    assert transport.run(transport.chain(), PATH) == DONE
    transport.made[0].broken = True
    assert transport.run(transport.chain(), PATH) == DONE
    assert transport.made[0].closed == [True]
    assert transport.endpoints == 1
    assert transport.meter.stats.retries == 0


def test_revoked_grants_are_asked_for_again_but_not_for_ever(transport) -> None:
    transport.script += [TryAgain(), TryAgain(), DONE]
    assert transport.run(transport.chain(WRITE), PATH) == DONE
    assert [endpoint.replaces for endpoint in transport.made] == [0, 1, 2]
    transport.script += [TryAgain()] * 9
    assert transport.run(transport.chain(WRITE), PATH) == LOST
    assert len(transport.script) == 6


def test_a_broken_transfer_whose_peer_is_gone_counts_as_lost(transport) -> None:
    def die(endpoint: FakeEndpoint, chain: Chain) -> BaseException:
        transport.dial_error = ConnectionRefusedError()
        return TryAgain()

    transport.script += [die]
    assert transport.run(transport.chain(), PATH) == LOST
    assert transport.run(transport.chain(), PATH) == NO_CONNECTION


def test_an_interrupted_chain_is_not_repeated(transport) -> None:
    assert transport.run(transport.chain(), PATH) == DONE

    def interrupt(endpoint: FakeEndpoint, chain: Chain) -> BaseException:
        chain.interrupt()
        return ConnectionAbortedError()

    transport.script += [interrupt]
    assert transport.run(transport.chain(), PATH) == LOST
    assert len(transport.made) == 1


def test_completing_while_stopped_leaves_no_aborted_endpoint(transport) -> None:
    def stop(endpoint: FakeEndpoint, chain: Chain) -> ChainOutcome:
        chain.stop(ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED))
        return DONE

    transport.script += [stop]
    assert transport.run(transport.chain(), PATH) == DONE
    assert transport.made[0].closed == [True]
    assert transport.endpoints == 0


def test_a_chain_that_ended_before_leaves_the_endpoint_as_it_is(transport) -> None:
    chain = transport.chain()
    chain.stop(ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED))
    assert transport.run(chain, PATH) is GONE
    assert transport.endpoints == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), KeyError("a defect")])
def test_a_defect_leaves_nothing_behind(transport, error) -> None:
    transport.script += [error]
    chain = transport.chain()
    with pytest.raises(type(error)):
        transport.run(chain, PATH)
    assert transport.made[0].closed == [True]
    assert transport.endpoints == 0
    assert chain.claim(lambda: None)  # no thread runs it


# --- keeping house ---


def test_a_probe_is_fresh_and_kept_if_there_is_room(transport) -> None:
    deadline = transport.now + 1.0
    for number in range(1, 5):
        assert transport.probe(REMOTE, PATH, deadline)
        assert len(transport.made) == number
        assert transport.endpoints == min(number, 2)
    held = [transport.lease(transport.chain(), PATH) for _ in range(2)]
    assert transport.probe(REMOTE, PATH, deadline)  # all are in use: it is alive
    assert transport.made[-1].closed == [False]
    assert transport.endpoints == 2
    for endpoint in held:
        transport.release(endpoint)
    transport.dial_error = ConnectionRefusedError()
    assert not transport.probe(REMOTE, PATH, deadline)


def test_a_forgotten_path_closes_idle_endpoints_now_others_later(transport) -> None:
    used, idle = transport.lease_all()
    transport.release(idle)
    assert transport.run(transport.chain(), OTHER) == DONE
    transport.forget(REMOTE, PATH)
    assert idle.closed == [False]
    assert transport.endpoints == 2
    transport.release(used)
    assert used.closed == [False]
    assert transport.endpoints == 1


def test_the_paths_of_a_lost_nic_are_forgotten(transport) -> None:
    for path in (PATH, OTHER):
        assert transport.run(transport.chain(), path) == DONE
    transport.forget_if(lambda key: key[1].local_nic in ("b", "none of ours"))
    assert [endpoint.closed for endpoint in transport.made] == [[], [False]]


def test_what_is_not_used_expires(transport) -> None:
    assert transport.run(transport.chain(), PATH) == DONE
    transport.maintain(transport.now)  # the time from which it counts as idle
    transport.now += 5.0
    assert transport.run(transport.chain(), OTHER) == DONE
    transport.maintain(transport.now + 4.0)
    assert transport.endpoints == 2
    transport.maintain(transport.now + 5.0)
    assert [endpoint.closed for endpoint in transport.made] == [[False], []]
    transport.maintain(transport.now + 10.0)
    assert transport.endpoints == 0
