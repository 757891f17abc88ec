"""Processes killed and frozen in mid-transfer, at random points, over tcp and shm.

Every decision comes from one seed, which is printed. Settings by environment:

``PINYON_CHAOS_SEED``
    repeats the decisions of an earlier run (not the scheduler's: how far a transfer had come may differ).
``PINYON_CHAOS_ROUNDS``
    rounds in total, 25 by default, 40 in a long run. Before a release:
    ``PINYON_CHAOS_ROUNDS=300 ./dev test integration -k chaos -s``; four fifths of them hit targets and one
    fifth initiators, half of each over tcp and half over shm."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pinyon.transfer import (
    Opcode,
    Reason,
    SegmentDescriptor,
    TransferEngine,
    TransferLimits,
    TransferRequest,
    TransferResult,
    TransferStatus,
)
from tests.integration.transfer_hosts import SEED, Bytes, HostProcess, SharedBuffer, pattern
from tests.long import usually
from tests.segments import segment_of, text_of
from tests.waiting import WAIT_S, wait_until

READ, WRITE = Opcode.READ, Opcode.WRITE
ROUNDS = int(os.environ.get("PINYON_CHAOS_ROUNDS") or usually(15, long=40))
STALL_S = 1.0
BOUNDS = {"stall_s": STALL_S, "connect_s": STALL_S, "base_deadline_s": 6.0, "idle_s": 2.0}
"""Limits short enough to wait for frozen processes, but longer than a busy machine keeps a thread waiting."""
SIZE = 32 << 20
PROBE = 4096
PEERS = 3


def anonymous_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def watch(condition: Callable[[], bool], what: str) -> None:
    """Waits without pauses, unlike ``wait_until``: a transfer by shared memory takes only a few milliseconds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        os.sched_yield()


def until_hit(faults: Chaos | Siege, rounds: int, hits: int) -> int:
    """Runs ``rounds``, and more until ``hits`` came in mid-transfer (a busy machine strikes late); returns how many."""
    for number in range(4 * rounds):
        if number >= rounds and faults.hits >= hits:
            return number
        faults.round(number)
    assert faults.hits >= hits, "the faults came too late: this tests nothing"
    return 4 * rounds


def transfer_threads() -> int:
    return sum(thread.name.startswith("pinyon-transfer") for thread in threading.enumerate())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def nothing_is_left(buffers: list[weakref.ref[Bytes]]) -> Iterator[None]:
    """Checks that threads, files and memory are back to what they were, and that ``buffers`` have been let go."""
    files, threads, memory = open_files(), transfer_threads(), anonymous_kib()
    yield
    wait_until(lambda: transfer_threads() <= threads, "threads are back to what they were")
    wait_until(lambda: open_files() <= files, "files are back to what they were")
    wait_until(lambda: not any(ref() is not None for ref in buffers), "buffers are let go")
    assert anonymous_kib() - memory < 4 * SIZE >> 10, "memory grew"


class Call(threading.Thread):
    """A caller that blocks on a transfer, or on another call that must end in time."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._error: BaseException | None = None
        self._value: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._run()
        except BaseException as error:
            self._error = error

    def value(self, bound_s: float, what: str) -> Any:
        """Returns the call's result, with ample time for a shared machine; only a call without an end fails."""
        self.join(bound_s + WAIT_S)
        assert not self.is_alive(), f"{what} outlived its bound of {bound_s} s by {WAIT_S} s"
        if self._error is not None:
            raise self._error
        return self._value


@dataclass(frozen=True)
class Layout:
    """Disjoint ranges ``(local offset, remote offset, length)`` in two memories of ``nbytes``, with gaps between."""

    nbytes: int
    ranges: list[tuple[int, int, int]]

    @classmethod
    def draw(cls, rng: random.Random) -> Layout:
        count = rng.choice([1, 4, 96, 1536])
        cell = SIZE // count
        here, there = list(range(count)), list(range(count))
        rng.shuffle(here)
        rng.shuffle(there)
        ranges = []
        for near, far in zip(here, there, strict=True):
            length = rng.randrange(cell // 2, cell - 64)
            near_gap, far_gap = rng.randrange(1, cell - length), rng.randrange(1, cell - length)
            ranges.append((near * cell + near_gap, far * cell + far_gap, length))
        return cls(count * cell, ranges)

    @property
    def moved(self) -> int:
        return sum(length for _, _, length in self.ranges)


class Target:
    """A peer process with memory that the test maps too; its successor gets the same memory."""

    def __init__(self, transport: str) -> None:
        self.memory = SharedBuffer(SIZE)
        self._probe = SharedBuffer(PROBE)
        self._config = {"limits": BOUNDS, "transports": [transport]}
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self.process = HostProcess(self._config)
        self.starts += 1
        # The answer comes when the process is up, so a successor starts while the test continues with other peers.
        self.process.send("region", path=self._probe.path, nbytes=PROBE)
        self._segment: SegmentDescriptor | None = None

    @property
    def segment(self) -> SegmentDescriptor:
        if self._segment is None:
            self.probe_key = bytes.fromhex(self.process.answer()["key"])
            self.register()
        assert self._segment is not None
        return self._segment

    def register(self) -> None:
        made = self.process.ask("region", path=self.memory.path, nbytes=SIZE)
        self.key, self._region = bytes.fromhex(made["key"]), made["region"]
        self._segment = segment_of(self.process.ask("descriptor")["segment"])

    def unregister(self) -> None:
        self.process.ask("unregister", region=self._region)

    def restart(self) -> None:
        self.process.close()
        self._start()

    def close(self) -> None:
        self.process.close()
        self.memory.close()
        self._probe.close()


DONE = (TransferStatus.COMPLETED, Reason.NONE)
STALLED = (TransferStatus.TIMEOUT, Reason.STALLED)
LOST = {(TransferStatus.FAILED, reason) for reason in (Reason.CONNECTION_LOST, Reason.CONNECT_FAILED, Reason.NO_PATH)}
ALLOWED = {"kill": {DONE, *LOST}, "freeze": {DONE, STALLED}, "freeze, kill": {DONE, STALLED, *LOST}, "pause": {DONE}}


class Chaos:
    """One initiator over all rounds, in which leaks would show, and a few targets that come and go."""

    def __init__(self, transport: str, rng: random.Random) -> None:
        self.rng = rng
        self.targets = [Target(transport) for _ in range(PEERS)]
        self.engine = TransferEngine(limits=TransferLimits(**BOUNDS), transports=(transport,))
        self.engine.start()
        self.probe = self.engine.register_local_memory(bytearray(PROBE))
        self.buffers: list[weakref.ref[Bytes]] = []
        self.outcomes: Counter[str] = Counter()
        self.submitted = 0
        self.hits = 0
        """Rounds in which some of the bytes had moved and some had not."""
        self.unclear = 0
        """Rounds that ended by a stall so late that the machine may have caused it."""
        # Reused, as fresh pages take time.
        self._finals: list[Bytes] = [np.ones(SIZE, np.uint8) for _ in range(2)]
        self._last: tuple[Bytes, Bytes] | None = None
        """The destination of the last READ, and its content at the final status."""

    def close(self) -> None:
        for target in self.targets:
            target.close()
        self.engine.close()

    def round(self, number: int) -> None:
        rng = self.rng
        target = rng.choice(self.targets)
        segment = target.segment
        layout = Layout.draw(rng)
        opcode = rng.choice([READ, WRITE])
        fault = rng.choices(list(ALLOWED), [5, 3, 2, 2])[0]
        even = rng.randrange(128) * 2
        odd = pattern(rng.randrange(1 << 32), layout.nbytes)
        near: Bytes = np.empty(layout.nbytes, np.uint8)
        far = target.memory.array[: layout.nbytes]
        source, sink = (near, far) if opcode is WRITE else (far, near)
        source[:], sink[:] = odd, even
        region = self.engine.register_local_memory(near)
        self.buffers.append(weakref.ref(near))
        requests = [
            TransferRequest(opcode, region.key, here, segment, target.key, there, length)
            for here, there, length in layout.ranges
        ]
        print(f"round {number}: {opcode.name} {len(requests)} x <= {requests[0].length}, {fault}, ", end="", flush=True)

        begun = time.monotonic()
        call, wait = self._submit(requests, rng.random() < 0.5)
        watched = rng.choice(layout.ranges) if rng.random() < 0.9 else None  # None: at once
        if watched is not None:
            here, there, length = watched
            inside = rng.randrange(length)
            at = (there if opcode is WRITE else here) + inside
            watch(lambda: sink[at] != even or not call.is_alive(), "the fault's point is reached")
        struck = time.monotonic()
        self._strike(target, fault)
        results: list[TransferResult] = call.value(self.engine.limits.budget_s(layout.moved), "a transfer")
        ended = time.monotonic()

        at_final = self._finals[number % 2][: layout.nbytes]
        at_final[:] = sink
        statuses = Counter(f"{one.status.value}/{one.reason.name}" for one in results)
        print(dict(statuses), f"at {struck - begun:.2f} s, end at {ended - begun:.2f} s", flush=True)
        self.outcomes += statuses
        # A busy machine stalls a transfer too; the round then does not show the effect of the fault alone.
        unclear = STALLED not in ALLOWED[fault] and ended - begun > STALL_S / 2
        outcomes = {(one.status, one.reason) for one in results}
        assert outcomes <= ALLOWED[fault] | ({STALLED} if unclear else set())
        self.unclear += unclear and STALLED in outcomes
        check_data(layout, opcode, source, odd, at_final, even, results)
        self.hits += not all(one.ok for one in results) and bool((at_final != even).any())
        self._mend(target, fault, opcode, sink, at_final)

        if wait is not None:
            assert wait() == results, "a final status changed"
        if opcode is READ:
            assert np.array_equal(sink, at_final), "bytes landed after the final status"
        if self._last is not None:
            assert np.array_equal(*self._last), "bytes landed a round after the final status"
        self._last = (sink, at_final) if opcode is READ else None
        self.engine.unregister(region)
        stats = self.engine.stats()
        assert stats.requests_now == 0
        assert sum(stats.requests.values()) == self.submitted, "not one final status per request"
        most = PEERS * self.engine.limits.connections_per_peer
        wait_until(lambda: self.engine.stats().outbound_connections_now <= most, "endpoints are bounded")

    def _submit(
        self, requests: list[TransferRequest], synchronous: bool
    ) -> tuple[Call, Callable[[], list[TransferResult]] | None]:
        """Returns a call that ends with the results, and for a handle a function that returns them again."""
        self.submitted += len(requests)
        if synchronous:  # runs a part of the transfer in the caller's own thread
            return Call(lambda: self.engine.transfer(requests)), None
        handle = self.engine.submit(requests)
        ended: list[object] = []
        handle.add_done_callback(ended.append)

        def again() -> list[TransferResult]:
            assert ended == [handle], "not one end"
            return handle.results()

        return Call(handle.wait), again

    def _strike(self, target: Target, fault: str) -> None:
        if fault != "kill":
            target.process.freeze()
        if fault == "pause":
            threading.Event().wait(self.rng.random() * STALL_S / 10)
            target.process.thaw()
        if fault == "freeze, kill":
            threading.Event().wait(self.rng.random() * STALL_S)
        if "kill" in fault:
            target.process.kill()

    def _mend(self, target: Target, fault: str, opcode: Opcode, sink: Bytes, at_final: Bytes) -> None:
        """Makes the target work again. Once it has taken its key back, no byte of a failed WRITE can arrive there."""
        if "kill" in fault:
            target.restart()
            return
        if fault == "freeze":
            target.process.thaw()
        self._probe(target)
        if opcode is WRITE:
            target.unregister()
            sink[:] = 2
            self._probe(target)
            assert (sink == 2).all(), "a WRITE landed after its final status and the end of its key"
            target.register()

    def _probe(self, target: Target) -> None:
        """Checks that a thawed target serves the first request."""
        requests = [
            TransferRequest(opcode, self.probe.key, 0, target.segment, target.probe_key, 0, PROBE)
            for opcode in (WRITE, READ)
        ]
        for request in requests:
            self.submitted += 1
            (result,) = self.engine.transfer([request])
            assert result.ok, f"a transfer after the thaw: {result}"


def check_data(
    layout: Layout, opcode: Opcode, source: Bytes, odd: Bytes, sink: Bytes, even: int, results: list[TransferResult]
) -> None:
    """Checks the destination: right bytes after COMPLETED, else each byte old or new, and all gaps untouched."""
    assert np.array_equal(source, odd), "the source was written to"
    for (here, there, length), result in zip(layout.ranges, results, strict=True):
        start, end = (here, there) if opcode is WRITE else (there, here)
        wanted, got = source[start : start + length], sink[end : end + length]
        if result.ok:
            assert result.transferred_bytes == length
            assert np.array_equal(got, wanted), "COMPLETED with wrong data"
        else:
            assert result.transferred_bytes < length
            assert ((got == wanted) | (got == even)).all(), "bytes of neither the old nor the new data"
    behind = 0
    for begin, length in sorted((there if opcode is WRITE else here, length) for here, there, length in layout.ranges):
        assert (sink[behind:begin] == even).all(), "bytes outside the ranges were written"
        behind = begin + length
    assert (sink[behind:] == even).all(), "bytes outside the ranges were written"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """A pause of the garbage collector: it comes late, and buffers of ended transfers are too large to wait for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_targets_killed_and_frozen(transport: str) -> None:
    rounds = max(1, ROUNDS * 2 // 5)
    print(f"PINYON_CHAOS_SEED={SEED}, {rounds} rounds over {transport}")
    begun = time.monotonic()
    chaos = Chaos(transport, random.Random(f"{SEED} targets {transport}"))
    try:
        for target in chaos.targets:
            chaos._probe(target)
        with nothing_is_left(chaos.buffers):  # but the memory of one transfer per target
            rounds = until_hit(chaos, rounds, rounds // 4)
            print(f"{rounds} rounds in {time.monotonic() - begun:.1f} s, {chaos.hits} of them in mid-transfer")
            print(f"{sum(target.starts for target in chaos.targets)} targets, outcomes {dict(chaos.outcomes)}")
            # Half of the hits are kills.
            assert chaos.unclear <= max(1, chaos.hits // 3), "kills and pauses end transfers by stalls"
            chaos._last = None
            for target in chaos.targets:
                chaos._probe(target)
    finally:
        chaos.close()


class Siege:
    """One target in this process over all rounds; initiators come, are hit in mid-transfer and go."""

    def __init__(self, transport: str, rng: random.Random) -> None:
        self.rng = rng
        self._transport = transport
        self.engine = TransferEngine(limits=TransferLimits(**BOUNDS), transports=(transport,))
        self.engine.start()
        self.there = SharedBuffer(SIZE)
        self.initiators = [self._start() for _ in range(2)]
        self.buffers: list[weakref.ref[Bytes]] = []
        self.hits = 0

    def _start(self) -> HostProcess:
        initiator = HostProcess({"limits": BOUNDS, "transports": [self._transport]})
        initiator.send("region", path=self.there.path, nbytes=SIZE)
        return initiator

    def close(self) -> None:
        for initiator in self.initiators:
            initiator.close()
        self.there.close()
        self.engine.close()

    def round(self, number: int) -> None:
        rng = self.rng
        initiator = self.initiators.pop(0)
        self.initiators.append(self._start())
        try:
            self._round(number, rng, initiator)
        finally:
            initiator.close()
        wait_until(lambda: self.engine.stats().inbound_connections_now == 0, "a dead initiator's links end")

    def _round(self, number: int, rng: random.Random, initiator: HostProcess) -> None:
        layout = Layout.draw(rng)
        opcode = rng.choice([WRITE, WRITE, READ])
        fault = rng.choice(["kill", "freeze, unregister", "freeze, wait"])
        even, odd = rng.randrange(128) * 2, pattern(rng.randrange(1 << 32), layout.nbytes)
        memory: Bytes = np.empty(layout.nbytes, np.uint8)
        self.buffers.append(weakref.ref(memory))
        there = self.there.array[: layout.nbytes]
        source, sink = (there, memory) if opcode is WRITE else (memory, there)
        source[:], sink[:] = odd, even
        region = self.engine.register_local_memory(memory)
        segment = text_of(self.engine.descriptor())
        print(f"round {number}: {opcode.name} {len(layout.ranges)}, {fault}, ", end="", flush=True)

        batch = [[opcode.name, 0, here, region.key.hex(), far, length] for here, far, length in layout.ranges]
        initiator.send("submit", remote=segment, batch=batch)
        here, far, length = rng.choice(layout.ranges)
        at = (far if opcode is WRITE else here) + rng.randrange(length)
        try:
            watch(lambda: sink[at] != even, "the fault's point is reached")
        except AssertionError as error:
            raise AssertionError(initiator.ask("progress", handle=0)) from error
        if fault == "kill":
            initiator.kill()
        else:
            initiator.freeze()
        landed = sum(
            int((sink[(far if opcode is WRITE else here) :][:length] != even).sum())
            for here, far, length in layout.ranges
        )
        self.hits += landed < layout.moved
        print(f"{landed} of {layout.moved} bytes", flush=True)

        if fault in ("kill", "freeze, wait"):
            wait_until(lambda: self.engine.stats().inbound_connections_now == 0, "its links end by themselves")
        self._check(layout, opcode, source, odd, sink, even)
        Call(lambda: self.engine.unregister(region)).value(2 * STALL_S, "unregister")
        memory[:] = 4
        if fault != "kill":
            initiator.thaw()
            answer = initiator.ask("wait", self.engine.limits.budget_s(layout.moved) + WAIT_S, handle=0)
            assert answer["final"]
            print(f"    there: {answer['outcomes']}")
        assert (memory == 4).all(), "bytes landed after unregister"

    @staticmethod
    def _check(layout: Layout, opcode: Opcode, source: Bytes, odd: Bytes, sink: Bytes, even: int) -> None:
        pending = TransferResult(TransferStatus.PENDING, 0)
        check_data(layout, opcode, source, odd, sink, even, [pending] * len(layout.ranges))


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_initiators_killed_and_frozen(transport: str) -> None:
    rounds = max(1, ROUNDS // 10)
    print(f"PINYON_CHAOS_SEED={SEED}, {rounds} rounds over {transport}")
    begun = time.monotonic()
    siege = Siege(transport, random.Random(f"{SEED} initiators {transport}"))
    try:
        siege.round(-1)
        with nothing_is_left(siege.buffers):
            rounds = until_hit(siege, rounds, rounds // 4 + 1)
            print(f"{rounds} rounds in {time.monotonic() - begun:.1f} s, {siege.hits} of {rounds + 1} in mid-transfer")
    finally:
        siege.close()
