"""Chains over the paths to a peer, on a transport whose attempts end when and how the test says.

Time is virtual. The threads are real, but nothing happens except by a step of the test, which then waits until all is
quiet."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pinyon.transfer import Nic, Opcode, Reason, SegmentDescriptor, Topology, TransferLimits, TransferStatus
from pinyon.transfer.chains.chain import LATE, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.region import Access
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.paths.peers import Peers
from pinyon.transfer.paths.reach import Reach
from pinyon.transfer.types.nic import Path
from tests.unit.transfer.conftest import GENEROUS_S, eventually, transfer_threads
from tests.unit.transfer.fake_device import fake_device

MIB = 1 << 20
BOOT = b"p" * 16
RAILS = 3
ROOM = 2
DONE = ChainOutcome(TransferStatus.COMPLETED)
UNREACHED = ChainOutcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
LOST = ChainOutcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)
STALLED = ChainOutcome(TransferStatus.TIMEOUT, Reason.STALLED)
REFUSED = ChainOutcome(TransferStatus.REFUSED, Reason.STALE_SEGMENT)
CANCEL = ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED)


def wait_for(event: threading.Event) -> None:
    assert event.wait(GENEROUS_S)


def nics(side: str, count: int = RAILS) -> tuple[Nic, ...]:
    return tuple(Nic(f"{side}{rail}", "tcp", f"10.0.{rail}.1", 1, f"10.0.{rail}.0/24") for rail in range(count))


def rail(index: int) -> Path:
    return Path("tcp", f"n{index}", f"m{index}")


class Attempt:
    """A chain on a path, until the test ends it or it is aborted."""

    def __init__(self, transport: Scripted, chain: Chain, path: Path) -> None:
        self._transport = transport
        self.chain = chain
        self.path = path
        self.outcome = LOST
        self.decided = threading.Event()

    def end(self, outcome: ChainOutcome) -> None:
        if self in self._transport.open:
            self._transport.open.remove(self)
            self.outcome = outcome
            self.decided.set()

    def abort(self) -> None:
        self.end(LOST)


class Scripted:
    """A transport whose ``run`` blocks until the test has decided."""

    endpoints = 0

    def __init__(self, name: str = "tcp") -> None:
        self.name = name
        self.open: list[Attempt] = []
        self.given: list[Chain] = []
        self.attempts: Counter[Chain] = Counter()
        """The attempts of each chain that had not ended before."""
        self.paths: list[Path] = []
        self.alive = True
        """The answer of probes."""
        self.probes: list[Path] = []
        self.on_dial: Callable[[Path], None] = lambda path: None
        self.on_run: Callable[[Chain, Path], None] = lambda chain, path: None
        self.on_probe: Callable[[Path], None] = lambda path: None
        self.on_forget: Callable[[], None] = lambda: None
        self.closed = False

    def run(self, chain: Chain, path: Path) -> ChainOutcome:
        attempt = Attempt(self, chain, path)
        self.given.append(chain)
        self.on_dial(path)
        if not chain.claim(attempt.abort):
            return CANCEL
        self.attempts[chain] += 1
        self.paths.append(path)
        self.on_run(chain, path)
        self.open.append(attempt)
        assert attempt.decided.wait(GENEROUS_S * 3)
        chain.unclaim()
        return attempt.outcome

    def probe(self, remote: SegmentDescriptor, path: Path, deadline: float) -> bool:
        self.probes.append(path)
        self.on_probe(path)
        return self.alive

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        self.on_forget()

    def maintain(self, now: float) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Bench:
    """The peers over scripted transports, one of these peers, and the books of all chains."""

    def __init__(
        self,
        *,
        rails: int = RAILS,
        shm: bool = False,
        topology: Topology | None = None,
        peer_topology: Topology | None = None,
        **limits: float,
    ) -> None:
        self.now = 1000.0
        self.tcp, self.shm = Scripted(), Scripted("shm")
        self.limits = TransferLimits(connections_per_peer=ROOM, **limits)
        self.reach = Reach(("shm", "tcp"), nics("n", rails), topology, b"i" * 16, "this host", self.limits, 8)
        self.memory = MemoryTable()
        context = EngineContext(b"i" * 16, self.memory, self.limits, clock=lambda: self.now)
        self.meter, self.rng = context.meter, random.Random(1)
        transports = {"tcp": self.tcp, "shm": self.shm}
        self.tended: list[float] = []
        self.peers = Peers(context, self.reach, transports, self.tended.append, self.rng)
        host = ("@peer", "this host") if shm else ("", "")
        self.remote = SegmentDescriptor("10.9.9.9", 1, BOOT, (), nics("m", rails), peer_topology, *host)
        peer = self.peers.peer(self.remote)
        assert peer is not None
        self.peer = peer
        self.chains: list[Chain] = []
        self.ended: dict[Chain, list[ChainOutcome]] = {}
        self.callers: list[threading.Thread] = []

    def chain(
        self, nbytes: int = MIB, here: str = "cpu:0", *, remote: SegmentDescriptor | None = None, budget_s: float = 60.0
    ) -> Chain:
        where = remote or self.remote
        plan = ChainPlan(where, Opcode.WRITE, [Slice(0, b"", 0, bytes(16), 0, nbytes)], nbytes, here, "cpu:0")
        chain = Chain(plan, {}, self.now + budget_s, self._end)
        self.chains.append(chain)
        self.ended[chain] = []
        return chain

    def _end(self, chain: Chain, outcome: ChainOutcome) -> None:
        self.ended[chain].append(outcome)

    def submit(self, count: int = 1, **arguments: object) -> list[Chain]:
        chains = [self.chain(**arguments) for _ in range(count)]  # type: ignore[arg-type]
        for chain in chains:
            self.peers.submit(chain)
        self.settle()
        return chains

    def call(self, chain: Chain) -> None:
        """Runs the chain like a blocking caller: in the caller's thread if possible."""
        caller = threading.Thread(target=self.peers.run, args=(chain,), name="caller", daemon=True)
        self.callers.append(caller)
        caller.start()
        self.settle()

    @property
    def open(self) -> list[Attempt]:
        return [*self.tcp.open, *self.shm.open]

    def on(self, path: Path) -> list[Attempt]:
        return [attempt for attempt in self.open if attempt.path == path]

    def end(self, attempt: Attempt, outcome: ChainOutcome = DONE) -> None:
        attempt.end(outcome)
        self.settle()

    def end_all(self, outcome: ChainOutcome = DONE) -> None:
        """Ends each attempt that begins, until there is none."""
        while self.open:
            self.end(self.open[0], outcome)

    def settle(self) -> None:
        """Waits until every chain has ended, waits, or runs in an attempt that the test can end."""
        tick = threading.Event()
        until = time.monotonic() + GENEROUS_S
        while not self._quiet():
            assert time.monotonic() < until, "it never became quiet"
            tick.wait(0.0003)

    def under_way(self) -> tuple[dict[Chain, Path], list[Chain]]:
        """Returns the running and the waiting chains, at one moment."""
        with self.peer.lock:
            return dict(self.peer.running), self.peer.waiting()

    def _quiet(self) -> bool:
        running, waiting = self.under_way()
        unfinished = {chain for chain in self.chains if not self.ended[chain]}
        return {(one.chain, one.path) for one in self.open} == set(running.items()) and unfinished <= {
            *waiting,
            *running,
        }

    def check(self) -> None:
        """Checks the invariants of a quiet peer."""
        peer = self.peer
        carried = Counter[Path]()
        queued = Counter[Path]()
        for chain, path in peer.running.items():
            carried[path] += 1
            queued[path] += chain.nbytes
        for path, room in peer.room.items():
            assert 0 <= carried[path] <= ROOM
            assert room + carried[path] == ROOM, f"{path} lost room"
        for state in self.peer.snapshot():
            assert state.queued_bytes == queued[state.path], f"{state.path} lost bytes"
        assert all(len(outcomes) <= 1 for outcomes in self.ended.values())
        for chain in peer.waiting():
            assert chain.done or peer.carries(peer.tiers(chain)), "nobody will wake a waiting chain"

    def results(self, chains: list[Chain]) -> Counter[ChainOutcome]:
        assert all(len(self.ended[chain]) == 1 for chain in chains)
        return Counter(self.ended[chain][0] for chain in chains)

    def usable(self) -> set[Path]:
        return {state.path for state in self.peer.snapshot() if state.usable}

    def close(self) -> None:
        self.peers.close()
        for one in self.callers:
            one.join(GENEROUS_S)
            assert not one.is_alive()
        assert all(len(outcomes) == 1 for outcomes in self.ended.values()), "a chain never ended, or twice"
        assert not self.under_way()[0]
        self.check()
        assert not transfer_threads()


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**arguments: object) -> Bench:
        benches.append(Bench(**arguments))  # type: ignore[arg-type]
        return benches[-1]

    yield make
    for bench in benches:
        bench.check()
        bench.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


# ---------------------------------------------------------------- spreading


def test_chains_spread_by_the_speed_of_their_paths(bench: Bench) -> None:
    """Three rails of 1, 2 and 4 GB/s move 240 MiB in little more than their combined rate takes."""
    speeds = {rail(0): 1e9, rail(1): 2e9, rail(2): 4e9}
    began = bench.now
    chains = bench.submit(240)
    free = dict.fromkeys(speeds, began)
    ends: dict[Attempt, float] = {}
    shares: Counter[Path] = Counter()
    while bench.open:
        for attempt in bench.open:
            if attempt not in ends:
                free[attempt.path] = max(free[attempt.path], bench.now) + MIB / speeds[attempt.path]
                ends[attempt] = free[attempt.path]
        first = min(bench.open, key=lambda one: ends[one])
        bench.now = ends[first]
        shares[first.path] += 1
        bench.end(first)
        bench.check()
    assert bench.results(chains) == {DONE: 240}
    assert shares[rail(0)] < shares[rail(1)] < shares[rail(2)]
    ideal = 240 * MIB / sum(speeds.values())
    assert bench.now - began < 1.15 * ideal, shares


def test_no_more_run_on_a_path_than_it_has_room_for(bench: Bench) -> None:
    chains = bench.submit(20)
    assert Counter(one.path for one in bench.open) == {rail(index): ROOM for index in range(RAILS)}
    bench.end_all()
    assert bench.results(chains) == {DONE: 20}


@pytest.mark.parametrize("failed", [False, True])
def test_waiting_for_one_nic_does_not_hold_up_another(make_bench: Callable[..., Bench], failed: bool) -> None:
    bench = make_bench(topology=Topology({"cuda:0": (("n0",), ()), "cuda:1": (("n1",), ())}))
    slow = bench.submit(10, here="cuda:0")
    fast = bench.submit(10, here="cuda:1")
    if failed:
        bench.end(bench.on(rail(0))[0], UNREACHED)
    running = len(bench.on(rail(0)))
    assert running == ROOM - failed
    while bench.on(rail(1)):
        assert len(bench.on(rail(0))) == running
        bench.end(bench.on(rail(1))[0])
    assert bench.results(fast) == {DONE: 10}
    assert not any(bench.ended[chain] for chain in slow)
    bench.end_all()


def test_locations_that_share_a_nic_take_turns(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(rails=1)
    for here in ("cuda:0", "cuda:1"):
        bench.submit(6, here=here)
    order = []
    while bench.open:
        order.append(bench.open[0].chain.local_location)
        bench.end(bench.open[0])
    assert order == ["cuda:0"] * ROOM + ["cuda:0", "cuda:1"] * 4 + ["cuda:1"] * 2


def test_waiting_chains_follow_what_is_learned_of_the_peer(make_bench: Callable[..., Bench]) -> None:
    """A path over a NIC that was published later runs with the descriptor that names the NIC."""
    bench = make_bench(rails=1)
    chains = bench.submit(ROOM + 1)
    new = SegmentDescriptor("10.9.9.9", 1, BOOT, (), (Nic("later", "tcp", "10.0.0.9", 2, "10.0.0.0/24"),))
    (last,) = bench.submit(1, remote=new)
    waiting = chains[ROOM]
    bench.end_all()
    assert bench.results([*chains, last]) == {DONE: ROOM + 2}
    assert waiting.remote is new
    assert bench.tcp.paths[-1].remote_nic == "later"
    bare = SegmentDescriptor("10.9.9.9", 1, BOOT)
    bench.submit(1, remote=bare)  # names less: known facts stay
    assert bench.open[0].path.remote_nic == "later"
    bench.end_all()


# ---------------------------------------------------------------- failing


def test_a_failed_paths_chains_complete_elsewhere(bench: Bench) -> None:
    chains = bench.submit(12)
    victim = bench.on(rail(1))[0]
    bench.end(victim, UNREACHED)
    assert bench.tcp.attempts[victim.chain] in (1, 2)
    assert rail(1) not in bench.usable()
    for attempt in bench.on(rail(1)):
        bench.end(attempt, UNREACHED)
    bench.tcp.paths.clear()
    bench.end_all()
    assert bench.results(chains) == {DONE: 12}
    assert rail(1) not in bench.tcp.paths
    assert bench.meter.stats.retries == ROOM


@pytest.mark.parametrize("outcome", [UNREACHED, STALLED, LOST])
def test_when_all_paths_fail_every_chain_ends_once_and_says_why(bench: Bench, outcome: ChainOutcome) -> None:
    chains = bench.submit(12)
    bench.end_all(outcome)
    assert bench.results(chains) == {outcome: 12}
    # A chain tries a path once, or twice if its link broke; the queue behind it does not try at all.
    assert max(bench.tcp.attempts.values()) <= RAILS + 1
    assert sum(bench.tcp.attempts.values()) <= RAILS * ROOM * (RAILS + 1)


@pytest.mark.parametrize(("outcome", "attempts"), [(LOST, 2), (UNREACHED, 1), (STALLED, 1), (REFUSED, 1)])
def test_only_a_broken_connection_is_made_anew_on_the_same_path(
    make_bench: Callable[..., Bench], outcome: ChainOutcome, attempts: int
) -> None:
    bench = make_bench(rails=1)
    (chain,) = bench.submit()
    bench.end_all(outcome)
    assert bench.results([chain]) == {outcome: 1}
    assert bench.tcp.attempts[chain] == attempts
    assert (rail(0) in bench.usable()) is (outcome is REFUSED)


def test_a_connection_made_anew_may_complete(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(rails=1)
    (chain,) = bench.submit()
    bench.end(bench.open[0], LOST)
    bench.end_all()
    assert bench.results([chain]) == {DONE: 1}
    assert rail(0) in bench.usable()


def test_attempts_are_bounded(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(rails=8, max_attempts=3)
    (chain,) = bench.submit()
    bench.end_all(UNREACHED)
    assert bench.results([chain]) == {UNREACHED: 1}
    assert bench.tcp.attempts[chain] == 3
    assert len(set(bench.tcp.paths)) == 3


def test_no_retry_beyond_the_deadline(bench: Bench) -> None:
    (chain,) = bench.submit()
    bench.now += 61
    bench.end(bench.open[0], STALLED)
    assert bench.results([chain]) == {STALLED: 1}


def test_a_refusal_is_the_requests_and_not_the_paths(bench: Bench) -> None:
    chains = bench.submit(RAILS * ROOM + 1)
    bench.end_all(REFUSED)
    assert bench.results(chains) == {REFUSED: len(chains)}
    assert len(bench.usable()) == RAILS


def test_fresh_chains_try_avoided_paths(bench: Bench) -> None:
    """The peer was dead and is back: the chain waits for no probe."""
    bench.submit(1)
    bench.end_all(UNREACHED)
    assert not bench.usable()
    chains = bench.submit(2)
    bench.end_all()
    assert bench.results(chains) == {DONE: 2}
    assert bench.usable()


def test_a_frozen_process_behind_shm_is_not_tried_by_tcp_too(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(shm=True)
    first, second = bench.submit(2)
    bench.end(bench.shm.open[0], STALLED)
    assert bench.results([first]) == {STALLED: 1}
    assert not bench.tcp.paths
    bench.end(bench.shm.open[0], LOST)  # but a broken link says nothing about the process
    bench.end_all()
    assert bench.results([second]) == {DONE: 1}
    assert len(bench.tcp.paths) == 1


def test_a_transports_defect_ends_its_chain_and_keeps_the_books(bench: Bench) -> None:
    def fail(chain: Chain, path: Path) -> None:
        raise RuntimeError("a defect")

    bench.tcp.on_run = fail
    (chain,) = bench.submit()
    assert bench.results([chain]) == {ChainOutcome(TransferStatus.FAILED, Reason.INTERNAL): 1}
    bench.check()
    bench.tcp.on_run = lambda chain, path: None

    def cannot_forget() -> None:
        raise RuntimeError("another")

    bench.tcp.on_forget = cannot_forget
    (chain,) = bench.submit()
    bench.end(bench.open[0], UNREACHED)
    bench.end_all()
    assert bench.results([chain]) == {DONE: 1}


def test_a_signal_in_a_blocking_caller_keeps_the_books_right(bench: Bench) -> None:
    def interrupted(chain: Chain, path: Path) -> None:
        raise KeyboardInterrupt

    bench.tcp.on_run = interrupted
    chains = [bench.chain() for _ in range(RAILS * ROOM + 1)]
    for chain in chains:
        with pytest.raises(KeyboardInterrupt):
            bench.peers.run(chain)
    bench.settle()
    assert bench.results(chains) == {ChainOutcome(TransferStatus.FAILED, Reason.INTERNAL): len(chains)}
    bench.check()


@pytest.mark.parametrize("nbytes", [10, MIB])
def test_memory_a_transport_cannot_reach_is_reached_by_another(make_bench: Callable[..., Bench], nbytes: int) -> None:
    bench = make_bench(shm=True)
    bench.call(bench.chain(nbytes))
    bench.end(bench.shm.open[0])
    bench.call(bench.chain(nbytes))
    bench.end(bench.shm.open[0], ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, bytes([Reason.OTHER_TRANSPORT])))
    bench.check()
    bench.end(bench.tcp.open[0])
    bench.call(bench.chain(nbytes))  # the region is known now
    assert not bench.shm.open
    bench.end(bench.tcp.open[0])
    assert bench.results(bench.chains) == {DONE: 3}


def test_device_memory_that_waits_for_an_endpoint_blames_nobody(bench: Bench) -> None:
    with fake_device() as driver:
        chain = bench.chain(100, "fake:0")
        chain.regions[b""] = bench.memory.register(driver.tensor(bytearray(100)), None, Access.READ)
        waited: list[tuple[Path, list[ChainOutcome]]] = []

        def expire(path: Path) -> None:
            bench.now = chain.deadline + 1
            chain.stop(LATE)
            waited.append((path, list(bench.ended[chain])))

        bench.tcp.on_dial = expire
        bench.peers.submit(chain)
        bench.settle()
        ((path, ended_at_once),) = waited
        assert ended_at_once == [LATE]
        assert path in bench.usable()


@pytest.mark.parametrize("outcome", [UNREACHED, LOST, REFUSED, CANCEL])
def test_the_short_way_of_small_calls_ends_in_the_same_books(
    make_bench: Callable[..., Bench], outcome: ChainOutcome
) -> None:
    bench = make_bench(rails=1)
    for end in (DONE, DONE, outcome, DONE):
        chain = bench.chain(10)
        bench.call(chain)
        bench.end(bench.open[0], end)
        bench.check()
        bench.end_all()
        assert len(bench.ended[chain]) == 1


def test_the_short_way_ends_when_its_path_fails(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(shm=True)
    for outcome in (DONE, UNREACHED):
        bench.call(bench.chain(10))
        bench.end(bench.shm.open[0], outcome)
    bench.end(bench.tcp.open[0])
    bench.call(bench.chain(10))
    assert bench.tcp.open
    bench.end_all()
    assert bench.results(bench.chains) == {DONE: 3}


# ---------------------------------------------------------------- threads


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_one_thread_serves_a_path_when_no_more_can_be_had(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(rails=1)
    bench.submit()
    with monkeypatch.context() as patch:
        no_threads(patch)
        chains = [bench.chain() for _ in range(4)]
        for chain in chains:
            bench.peers.submit(chain)
        for _ in range(5):
            eventually(lambda: len(bench.open) == 1, "the thread took the next chain")
            bench.open[0].end(DONE)
        eventually(lambda: all(bench.ended.values()), "all through")
    assert bench.results(chains) == {DONE: 4}


def test_without_any_thread_chains_end_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        no_threads(patch)
        chains = bench.submit(3)
    assert bench.results(chains) == {ChainOutcome(TransferStatus.FAILED, Reason.INTERNAL): 3}
    bench.check()
    bench.submit()
    bench.end_all()


# ---------------------------------------------------------------- links and probes


def test_a_nic_that_goes_down_gets_new_chains_only_after_a_probe(bench: Bench) -> None:
    chains = bench.submit(12)
    victims = {one.chain for one in bench.on(rail(0))}
    bench.peer.nic_down("n0")
    bench.settle()
    assert not bench.on(rail(0))
    assert rail(0) not in bench.usable()
    for chain in victims:
        assert not bench.ended[chain]
    assert bench.peer.due_probes(bench.now + 100, 9) == []  # not while it is down

    bench.peer.nic_up("n0")
    bench.settle()
    assert rail(0) not in bench.usable()
    assert bench.peer.due_probes(bench.now, 9) == [rail(0)]
    assert bench.peer.due_probes(bench.now, 9) == []  # one at a time
    bench.tcp.alive = False
    bench.peer.probe(rail(0), bench.now)
    assert bench.peer.due_probes(bench.now, 9) == []
    assert rail(0) not in bench.usable()
    bench.now += 60
    assert bench.peer.due_probes(bench.now, 9) == [rail(0)]
    bench.tcp.alive = True
    bench.tcp.paths.clear()
    bench.peer.probe(rail(0), bench.now)
    bench.settle()
    assert len(bench.on(rail(0))) == ROOM  # waiting chains go there at once
    bench.end_all()
    assert bench.results(chains) == {DONE: 12}


def test_a_chain_is_interrupted_only_while_it_is_on_that_nic(bench: Bench) -> None:
    """The lock is held, so that the chain cannot have changed to a sound path, which would be blamed."""
    held: list[bool] = []

    class Watched(Chain):
        def interrupt(self) -> None:
            held.append(bench.peer.lock.locked() and bench.peer.running[self] == rail(0))
            super().interrupt()

    bench.peer.nic_down("n1")
    bench.peer.nic_down("n2")
    plain = bench.chain()
    plan = ChainPlan(plain.remote, plain.opcode, plain.slices, plain.nbytes, "cpu:0", "cpu:0")
    plain.finish(CANCEL)
    chain = Watched(plan, {}, plain.deadline, bench._end)
    bench.chains.append(chain)
    bench.ended[chain] = []
    bench.peers.submit(chain)
    bench.settle()
    bench.peer.nic_down("n0")
    bench.settle()
    assert held == [True]
    bench.end_all()


def test_a_nic_that_came_up_counts_as_untried(make_bench: Callable[..., Bench]) -> None:
    """The last sound NIC fails just after another came up, and before that NIC was probed."""
    bench = make_bench(rails=2)
    (chain,) = bench.submit()
    first = bench.open[0].path
    other = rail(1) if first == rail(0) else rail(0)
    bench.peer.nic_down(first.local_nic)
    bench.settle()
    assert bench.open[0].path == other
    bench.peer.nic_up(first.local_nic)
    bench.peer.nic_down(other.local_nic)
    bench.settle()
    assert [one.path for one in bench.open] == [first]
    bench.end_all()
    assert bench.results([chain]) == {DONE: 1}


def test_peers_met_while_a_nic_is_down_do_not_use_it(bench: Bench) -> None:
    bench.peers.link_changed("n0", False)
    other = SegmentDescriptor("10.9.9.8", 1, b"q" * 16, (), nics("m"))
    chains = [bench.chain(remote=other) for _ in range(4)]
    for chain in chains:
        bench.peers.submit(chain)
    eventually(lambda: len(bench.open) == 4, "all run")
    assert not bench.on(rail(0))
    bench.peers.link_changed("n0", True)
    assert dict(bench.peers.path_states())
    for attempt in list(bench.open):
        attempt.end(DONE)
    eventually(lambda: all(bench.ended[chain] for chain in chains), "all through")


def test_probes_are_few_and_only_of_avoided_paths(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(rails=20, max_attempts=64)
    (chain,) = bench.submit()
    bench.end_all(UNREACHED)
    assert bench.results([chain]) == {UNREACHED: 1}
    gate = threading.Event()
    usable_when_probed: list[Path] = []

    def probed(path: Path) -> None:
        usable_when_probed.extend({path} & bench.usable())
        wait_for(gate)

    bench.tcp.on_probe = probed
    later = bench.now + 100
    for _ in range(3):
        bench.peers.start_probes(later)
    eventually(lambda: len(bench.tcp.probes) == 8, "probes run")
    bench.peers.start_probes(later)
    assert len(bench.tcp.probes) == 8
    gate.set()
    while len(bench.usable()) < 20:
        eventually(lambda: not bench.peers._probing, "probes have ended")
        bench.peers.start_probes(later)
    eventually(lambda: not bench.peers._probing, "probes have ended")
    assert Counter(bench.tcp.probes) == {rail(index): 1 for index in range(20)}
    bench.peers.start_probes(later)
    assert len(bench.tcp.probes) == 20
    assert not usable_when_probed


def test_a_probe_that_is_a_defect_counts_as_failed(bench: Bench) -> None:
    bench.submit()
    bench.end_all(UNREACHED)

    def fail(path: Path) -> None:
        raise RuntimeError("a defect")

    bench.tcp.on_probe = fail
    bench.now += 60
    for path in bench.peer.due_probes(bench.now, 9):
        bench.peer.probe(path, bench.now)
    assert not bench.usable()
    bench.now += 60
    assert len(bench.peer.due_probes(bench.now, 9)) == RAILS


def test_probes_end_with_the_peers(make_bench: Callable[..., Bench]) -> None:
    """``close`` waits for a probe under way, which would else leave a thread and a connection behind."""
    bench = make_bench(rails=1)
    bench.submit()
    bench.end_all(UNREACHED)
    gate = threading.Event()
    bench.tcp.on_probe = lambda path: wait_for(gate)
    bench.peers.start_probes(bench.now + 100)
    (probe,) = bench.peers._workers._threads
    join = probe.join

    def joined(timeout: float | None = None) -> None:
        gate.set()  # a thread waits for it: now it may end
        join(timeout)

    probe.join = joined  # type: ignore[method-assign]
    bench.peers.close()
    waited = gate.is_set()
    gate.set()
    assert waited
    assert not probe.is_alive()
    bench.peers.start_probes(bench.now + 1000)
    assert len(bench.tcp.probes) == 1


# ---------------------------------------------------------------- stopping


def test_waiting_chains_end_at_their_deadline(bench: Bench) -> None:
    chains = bench.submit(RAILS * ROOM + 3, budget_s=5.0)
    later = bench.submit(1, budget_s=50.0)
    bench.peer.expire(bench.now + 4)
    assert not any(bench.ended.values())
    bench.peer.expire(bench.now + 6)
    expired = [chain for chain in chains if bench.ended[chain]]
    assert bench.results(expired) == {ChainOutcome(TransferStatus.TIMEOUT, Reason.DEADLINE): 3}
    bench.end_all()
    assert bench.results([*chains, *later])[DONE] == RAILS * ROOM + 1


def test_cancelled_chains_end_whether_they_wait_or_run(bench: Bench) -> None:
    chains = bench.submit(RAILS * ROOM + 4)
    running = [one.chain for one in bench.open]
    waiting = [chain for chain in chains if chain not in running]
    for chain in waiting[:2]:
        chain.stop(CANCEL)
    assert bench.results(waiting[:2]) == {CANCEL: 2}
    for chain in running:
        chain.stop(CANCEL)
        chain.stop(SHUTDOWN)
    bench.settle()
    assert bench.results(running) == {CANCEL: len(running)}
    assert {one.chain for one in bench.open} == set(waiting[2:])
    assert len(bench.usable()) == RAILS, "that the caller gave up says nothing about the path"
    bench.end_all()
    assert set(bench.tcp.given).isdisjoint(waiting[:2])


def test_close_ends_what_waits_what_runs_and_what_callers_run(bench: Bench) -> None:
    inline = bench.chain()
    bench.call(inline)
    chains = [inline, *bench.submit(12)]
    waiting = bench.under_way()[1]
    bench.peers.close()
    eventually(lambda: all(bench.ended.values()), "all ended")
    assert bench.results(chains) == {SHUTDOWN: 13}
    assert set(bench.tcp.given).isdisjoint(waiting)
    assert not transfer_threads()
    assert bench.tcp.closed
    late = bench.chain()
    bench.peers.run(late)
    assert bench.results([late]) == {SHUTDOWN: 1}
    assert late not in bench.tcp.attempts


def test_close_stops_an_attempt_that_has_not_begun(bench: Bench) -> None:
    """The chain has its path, but its thread has not reached it: the attempt must not begin after ``close``."""
    chain = bench.chain()
    path = bench.peer.submit(chain, inline=True)
    assert path is not None
    bench.peers.close()
    assert bench.results([chain]) == {SHUTDOWN: 1}
    bench.peer.run(chain, path)
    assert chain not in bench.tcp.attempts


# ---------------------------------------------------------------- many peers


def test_a_chain_on_its_way_to_a_forgotten_peer_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = bench.peer.learn

    def meanwhile(remote: SegmentDescriptor) -> None:
        learn(remote)
        bench.peers.drop_idle(bench.now + 2 * bench.limits.idle_s)
        assert not bench.peers.known()

    monkeypatch.setattr(bench.peer, "learn", meanwhile)
    chain = bench.chain()
    bench.peers.submit(chain)
    eventually(lambda: len(bench.open) == 1, "it runs")
    bench.open[0].end(DONE)
    eventually(lambda: bool(bench.ended[chain]), "it ended")
    assert bench.results([chain]) == {DONE: 1}


def test_idle_peers_are_forgotten_and_busy_ones_are_not(bench: Bench) -> None:
    idle_s = bench.limits.idle_s
    bench.submit()
    began = bench.now
    bench.peers.drop_idle(began + idle_s * 2)
    assert bench.peers.known()
    bench.end_all()
    bench.peers.drop_idle(began + idle_s / 2)
    assert bench.peers.known()
    bench.peers.drop_idle(began + idle_s * 2)
    assert not bench.peers.known()
    eventually(lambda: not transfer_threads(), "its threads ended")


def test_more_peers_than_are_remembered_cost_only_idle_ones(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_peers=2)
    (busy,) = bench.submit()  # the least recently used peer
    peers = [SegmentDescriptor("10.9.9.1", port, BOOT, (), nics("m")) for port in (1, 2, 3)]

    def one_to(remote: SegmentDescriptor) -> Chain:
        bench.now += 1
        chain = bench.chain(remote=remote)
        before = len(bench.open)
        bench.peers.submit(chain)
        eventually(lambda: len(bench.open) == before + 1, "it runs")
        return chain

    def end(chain: Chain) -> None:
        next(one for one in bench.open if one.chain is chain).end(DONE)
        eventually(lambda: bool(bench.ended[chain]), "it ended")

    end(one_to(peers[0]))
    second = one_to(peers[1])
    assert set(dict(bench.peers.known())) == {bench.remote.peer, peers[1].peer}
    third = one_to(peers[2])  # no peer is idle, so it is remembered on top
    assert set(dict(bench.peers.known())) == {bench.remote.peer, peers[1].peer, peers[2].peer}
    for chain in (busy, second, third):
        end(chain)
    assert bench.results([busy, second, third]) == {DONE: 3}


# ---------------------------------------------------------------- anything, in any order


class AnyOrder(RuleBasedStateMachine):
    """Any order of events: chains end once, and each path carries what its books say."""

    ROWS = Topology({"cpu:0": (("n0", "n1"), ("n2",)), "cuda:0": (("n2",), ()), "cuda:1": (("n1", "n2"), ())})
    FAILURES = (UNREACHED, LOST, STALLED, ChainOutcome(TransferStatus.FAILED, Reason.BUSY))

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(topology=self.ROWS, max_attempts=4)

    @initialize(seed=st.integers(0, 1 << 16))
    def seed(self, seed: int) -> None:
        self.bench.rng.seed(seed)

    def teardown(self) -> None:
        self.bench.close()
        outcomes = {outcome for ended in self.bench.ended.values() for outcome in ended}
        assert outcomes <= {
            DONE,
            REFUSED,
            CANCEL,
            SHUTDOWN,
            ChainOutcome(TransferStatus.TIMEOUT, Reason.DEADLINE),
        } | set(self.FAILURES)

    def attempts(self, index: int) -> list[Attempt]:
        """Returns the attempt of this index, or none when nothing runs.

        This is not a precondition: what runs may depend on the scheduler, and which rules there are must not."""
        attempts = sorted(self.bench.open, key=lambda one: self.bench.chains.index(one.chain))
        return attempts[index % len(attempts) :][:1] if attempts else []

    @rule(
        count=st.integers(1, 8),
        nbytes=st.sampled_from([1, MIB, 8 * MIB]),
        here=st.sampled_from(["cpu:0", "cuda:0", "cuda:1"]),
        budget_s=st.sampled_from([0.5, 20.0]),
    )
    def submit(self, count: int, nbytes: int, here: str, budget_s: float) -> None:
        self.bench.submit(count, nbytes=nbytes, here=here, budget_s=budget_s)

    @rule(nbytes=st.sampled_from([1, MIB]), here=st.sampled_from(["cpu:0", "cuda:0"]))
    def call(self, nbytes: int, here: str) -> None:
        self.bench.call(self.bench.chain(nbytes, here))

    @rule(index=st.integers(0, 20))
    def complete(self, index: int) -> None:
        for attempt in self.attempts(index):
            self.bench.end(attempt)
            assert self.bench.ended[attempt.chain] == [DONE]

    @rule(index=st.integers(0, 20), outcome=st.sampled_from(FAILURES))
    def fail(self, index: int, outcome: ChainOutcome) -> None:
        for attempt in self.attempts(index):
            self.bench.end(attempt, outcome)
            assert attempt.chain.attempts <= 4
            assert self.bench.ended[attempt.chain] in ([], [outcome])

    @rule(index=st.integers(0, 20))
    def refuse(self, index: int) -> None:
        for attempt in self.attempts(index):
            self.bench.end(attempt, REFUSED)
            assert self.bench.ended[attempt.chain] == [REFUSED]

    @rule(index=st.integers(0, 200))
    def stop(self, index: int) -> None:
        if not self.bench.chains:
            return
        chain = self.bench.chains[index % len(self.bench.chains)]
        before = list(self.bench.ended[chain])
        chain.stop(CANCEL)
        self.bench.settle()
        assert self.bench.ended[chain] == (before or [CANCEL])

    @rule(name=st.sampled_from(["n0", "n1", "n2"]), up=st.booleans())
    def link(self, name: str, up: bool) -> None:
        self.bench.peers.link_changed(name, up)
        self.bench.settle()

    @rule(most=st.integers(0, 3), alive=st.booleans())
    def probe(self, most: int, alive: bool) -> None:
        bench = self.bench
        usable = bench.usable()
        due = bench.peer.due_probes(bench.now, most)
        assert len(due) <= most
        assert usable.isdisjoint(due)
        bench.tcp.alive = alive
        for path in due:
            bench.peer.probe(path, bench.now)
            bench.settle()
            assert not alive or path in bench.usable()

    @rule(seconds=st.sampled_from([0.05, 1.5, 40.0]))
    def later(self, seconds: float) -> None:
        self.bench.now += seconds
        self.bench.peer.expire(self.bench.now)
        self.bench.settle()

    @invariant()
    def books(self) -> None:
        self.bench.check()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
