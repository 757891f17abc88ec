"""An engine that starts, closes or is interrupted while callers use it: none hangs, and nothing is left."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pinyon.transfer import (
    EngineClosed,
    InvalidTransfer,
    Network,
    Nic,
    Opcode,
    SegmentDescriptor,
    TransferEngine,
    TransferLimitReached,
    TransferRequest,
    TransferResult,
    TransferStatus,
)
from pinyon.transfer import submissions as submissions_module
from pinyon.transfer.chains.chain import LOST, Chain, ChainOutcome
from pinyon.transfer.handle import TransferHandle
from pinyon.transfer.small import SmallTransfers
from pinyon.transfer.types.limits import MAX_SUBMISSIONS
from pinyon.transfer.types.nic import Path
from tests.on_compiled import REPLACES_METHODS
from tests.unit.transfer.conftest import (
    GENEROUS_S,
    PATIENT,
    VARIANTS,
    eventually,
    nothing_left_behind,
    transfer_threads,
)

READ, WRITE = Opcode.READ, Opcode.WRITE
CALLERS = 8
SIZE = 4 << 20
FINAL = {TransferStatus.COMPLETED, TransferStatus.CANCELLED}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_left_behind():
        yield


def watch_transports(engine: TransferEngine) -> list[str]:
    """Yields the names of the transports that are closed from now on."""
    closed: list[str] = []
    for name, transport in engine._peers.transports.items():

        def close(name: str = name, close: Callable[[], None] = transport.close) -> None:
            closed.append(name)
            close()

        transport.close = close  # type: ignore[method-assign]
    return closed


def run_all(callers: list[threading.Thread]) -> None:
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(3 * GENEROUS_S)
    assert not any(caller.is_alive() for caller in callers), "a call hangs"


class Callers:
    """Threads that transfer in all available ways until the engine refuses."""

    def __init__(self, engine: TransferEngine, requests: list[list[TransferRequest]]) -> None:
        self._engine = engine
        self._requests = requests
        self.outcomes: Counter[object] = Counter()
        self.wrong: list[object] = []
        self.calls = itertools.count()
        self.threads = [threading.Thread(target=self._call, args=(index,), daemon=True) for index in range(CALLERS)]

    def _call(self, index: int) -> None:
        ways: list[Callable[[list[TransferRequest]], Any]] = [
            self._engine.transfer,
            lambda requests: self._engine.submit(requests).wait(),
            self._polled,
        ]
        for turn in itertools.count(index):
            requests = self._requests[turn % len(self._requests)]
            try:
                results = ways[turn // 2 % len(ways)](requests)
            except EngineClosed:
                self.outcomes["closed"] += 1
                return
            except InvalidTransfer as error:
                if error.field != "requests[0].local":  # the engine closed, so its regions are gone
                    self.wrong.append(error)
                return
            except BaseException as error:
                self.wrong.append(error)
                return
            next(self.calls)
            self.wrong += [one for one in results if one.status not in FINAL]
            self.outcomes.update(one.status for one in results)

    def _polled(self, requests: list[TransferRequest]) -> Any:
        handle, tick = self._engine.submit(requests), threading.Event()
        while not handle.done:
            tick.wait(0.001)
        return handle.results()


@pytest.mark.parametrize("variant", ["local", "shm", "tcp", "tcp-nics"])
@pytest.mark.parametrize("calls_before", [0, 3, 40])
def test_close_under_concurrent_calls(variant: str, calls_before: int) -> None:
    VARIANTS[variant].skip_if_it_cannot_be()
    engine = VARIANTS[variant].engine(PATIENT)
    server = engine if VARIANTS[variant].same_process else VARIANTS[variant].engine(PATIENT)
    engine.start()
    if server is not engine:
        server.start()
    local = engine.register_local_memory(bytearray(SIZE))
    remote = server.register_local_memory(bytearray(SIZE))
    segment = server.descriptor()

    def request(opcode: Opcode, at: int, length: int) -> TransferRequest:
        return TransferRequest(opcode, local.key, at, segment, remote.key, at, length)

    callers = Callers(
        engine,
        [
            [request(READ, 0, 100)],
            [request(WRITE, 0, SIZE)] * 3,
            [request(READ, at * 64, 64) for at in range(500)],
            [request(WRITE, 5, SIZE // 2), request(READ, 0, 10)],
        ],
    )

    def close() -> None:
        eventually(lambda: sum(callers.outcomes.values()) >= calls_before, "calls were made")
        engine.close()

    run_all([*callers.threads, threading.Thread(target=close, daemon=True)])
    assert callers.wrong == []
    assert engine.stats().requests_now == 0
    assert not local._holders
    server.close()


@REPLACES_METHODS
def test_a_request_that_ends_before_its_pin_holds_no_memory() -> None:
    """The test cancels the request, or closes the engine, in the moment between the two."""
    engine = TransferEngine(transports=("local",), limits=PATIENT)
    engine.start()
    local = engine.register_local_memory(bytearray(100))
    own = SegmentDescriptor("127.0.0.1", 1, engine.boot_id)
    pin = engine._memory.pin

    def late(regions: Any, holder: object, abort: Callable[[], None]) -> bool:
        abort()
        return pin(regions, holder, abort)

    engine._memory.pin = late  # type: ignore[method-assign]
    results = engine.submit([TransferRequest(WRITE, local.key, 0, own, local.key, 50, 50)] * 3).wait()
    assert {result.status for result in results} == {TransferStatus.CANCELLED}
    assert not local._holders
    engine.close()


def test_start_under_concurrent_calls() -> None:
    engine = TransferEngine(transports=("local",), limits=PATIENT)
    local = engine.register_local_memory(bytearray(100))
    own = SegmentDescriptor("127.0.0.1", 1, engine.boot_id)
    request = TransferRequest(WRITE, local.key, 0, own, local.key, 50, 50)
    for early in (engine.transfer, engine.submit):
        with pytest.raises(EngineClosed):
            early([request])
    starts: Counter[str] = Counter()
    refused = threading.Semaphore(0)
    wrong: list[object] = []

    def call(blocking: bool) -> None:
        while True:
            try:
                results = engine.transfer([request]) if blocking else engine.submit([request]).wait()
            except EngineClosed:
                refused.release()
                continue
            if not results[0].ok:
                wrong.append(results)
            return

    def start() -> None:
        refused.acquire(timeout=GENEROUS_S)
        try:
            engine.start()
            starts["started"] += 1
        except EngineClosed:
            starts["refused"] += 1

    run_all(
        [threading.Thread(target=call, args=(index % 2 == 0,), daemon=True) for index in range(4)]
        + [threading.Thread(target=start, daemon=True) for _ in range(4)]
    )
    assert starts == {"started": 1, "refused": 3}
    assert not wrong
    run_all([threading.Thread(target=engine.close, daemon=True) for _ in range(8)])
    eventually(lambda: not transfer_threads(), "the one that closes is through")


def test_a_start_that_fails_leaves_nothing_and_is_final() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments in ({"port": port}, {"network": Network([Nic("rail1", "tcp", "127.0.0.1", port)])}):
            with nothing_left_behind():
                engine = TransferEngine(transports=("tcp",), **arguments)  # type: ignore[arg-type]
                closed = watch_transports(engine)
                with pytest.raises(OSError, match="in use"):
                    engine.start()
                assert sorted(closed) == sorted(engine._peers.transports)
            with pytest.raises(EngineClosed):
                engine.start()
            engine.close()


def test_a_start_without_threads_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransferEngine()
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "pinyon-transfer-tend":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        engine.start()
    assert not transfer_threads()


def test_an_engine_that_never_started_closes() -> None:
    engine = TransferEngine()
    region = engine.register_local_memory(bytearray(10))
    closed = watch_transports(engine)
    engine.close()
    engine.close()
    assert sorted(closed) == sorted(engine._peers.transports)
    assert not region.alive
    with pytest.raises(EngineClosed):
        engine.start()


def test_nothing_is_left_of_many_lives() -> None:
    """Fifteen engines in a row have links to a server that goes on."""
    with TransferEngine(transports=("tcp",), limits=PATIENT) as server:
        remote = server.register_local_memory(bytearray(SIZE))
        segment = server.descriptor()
        with nothing_left_behind():
            for _ in range(15):
                nic = Nic("lo", "tcp", "127.0.0.1", 0)
                with TransferEngine(transports=("tcp",), limits=PATIENT, network=Network((nic,))) as engine:
                    local = engine.register_local_memory(bytearray(SIZE))
                    request = TransferRequest(READ, local.key, 0, segment, remote.key, 0, SIZE)
                    assert all(one.ok for one in engine.transfer([request] * 8))


@REPLACES_METHODS
def test_close_between_admission_and_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine closes after it has accepted a batch and before its chains exist: they end as stopped."""
    engine = TransferEngine(transports=("local",), limits=PATIENT)
    engine.start()
    local = engine.register_local_memory(bytearray(100))
    request = TransferRequest(WRITE, local.key, 0, engine.descriptor(), local.key, 50, 50)
    closer = threading.Thread(target=engine.close, daemon=True)
    plan = submissions_module.plan_chains

    def meanwhile(*arguments: Any) -> Any:
        closer.start()
        eventually(lambda: "pinyon-transfer-tend" not in transfer_threads(), "the peers are closing")
        return plan(*arguments)

    monkeypatch.setattr(submissions_module, "plan_chains", meanwhile)
    (result,) = engine.submit([request]).wait()
    assert result.status is TransferStatus.CANCELLED
    closer.join(GENEROUS_S)
    assert not closer.is_alive()
    assert engine.stats().requests_now == 0


class BreaksThenHangs:
    """A transport whose first attempt breaks, and whose second, in another thread, goes on until it is aborted."""

    name = "tcp"
    endpoints = 0

    def __init__(self, began: Callable[[], None]) -> None:
        self._began = began
        self._attempts = itertools.count()
        self.aborted = threading.Event()
        self.pinned: list[bool] = []

    def run(self, chain: Chain, path: Path) -> ChainOutcome:
        if not next(self._attempts):
            return LOST
        assert chain.claim(self.aborted.set)
        self._began()
        assert self.aborted.wait(GENEROUS_S)
        self.pinned = [chain in region._holders for region in chain.regions.values()]
        chain.unclaim()
        return LOST

    def forget(self, *_: object) -> None: ...

    def maintain(self, *_: object) -> None: ...

    def close(self) -> None: ...


@REPLACES_METHODS
def test_an_interrupted_call_returns_once_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user presses Ctrl-C while a blocking transfer goes on in another thread."""
    waits = threading.Event()
    wait = TransferHandle.wait

    def waiting(self: TransferHandle, timeout_s: float | None = None) -> list[TransferResult]:
        waits.set()
        return wait(self, timeout_s)

    monkeypatch.setattr(TransferHandle, "wait", waiting)
    main = threading.get_ident()
    interrupted = threading.Event()

    def interrupt() -> None:
        """Sends signals: one that comes just before the thread falls asleep is seen only at the next signal."""
        assert waits.wait(GENEROUS_S)
        while not transport.aborted.wait(0.1):
            signal.pthread_kill(main, signal.SIGINT)

    def once(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    handler = signal.signal(signal.SIGINT, once)
    try:
        with TransferEngine(transports=("tcp",), limits=PATIENT) as engine:
            transport = BreaksThenHangs(interrupt)
            engine._peers.transports["tcp"] = transport  # type: ignore[index]
            local = engine.register_local_memory(bytearray(10))
            peer = SegmentDescriptor("127.0.0.1", 1, b"p" * 16)
            with pytest.raises(KeyboardInterrupt):
                engine.transfer([TransferRequest(READ, local.key, 0, peer, bytes(16), 0, 10)])
            assert transport.aborted.is_set()
            assert transport.pinned == [True]
            assert not local._holders
            assert engine.stats().requests_now == 0
    finally:
        signal.signal(signal.SIGINT, handler)


@REPLACES_METHODS
def test_an_interrupted_call_ends_what_went_on_as_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user presses Ctrl-C while a call waits for the chain that took up its small request."""
    with TransferEngine(transports=("tcp",), limits=PATIENT) as engine, socket.create_server(("127.0.0.1", 0)) as mute:
        local = engine.register_local_memory(bytearray(10))
        peer = SegmentDescriptor("127.0.0.1", mute.getsockname()[1], b"p" * 16)
        request = TransferRequest(READ, local.key, 0, peer, bytes(16), 0, 10)
        handle, wait = engine.submit([request]), TransferHandle.wait

        def interrupted(self: TransferHandle, timeout_s: float | None = None) -> list[TransferResult]:
            monkeypatch.setattr(TransferHandle, "wait", wait)
            raise KeyboardInterrupt

        monkeypatch.setattr(TransferHandle, "wait", interrupted)
        monkeypatch.setattr(SmallTransfers, "set_out", lambda *_: "a trip")
        monkeypatch.setattr(SmallTransfers, "_move", lambda *_: handle)
        with pytest.raises(KeyboardInterrupt):
            engine.transfer([request])
        assert handle.results()[0].status is TransferStatus.CANCELLED
        assert not local._holders


def test_submissions_in_flight_are_bounded() -> None:
    """The bound counts submissions, for each may have one request: waiting submissions take memory too."""
    with TransferEngine(transports=("tcp",), limits=PATIENT) as engine, socket.create_server(("127.0.0.1", 0)) as mute:
        local = engine.register_local_memory(bytearray(1))
        peer = SegmentDescriptor("127.0.0.1", mute.getsockname()[1], b"p" * 16)
        request = TransferRequest(WRITE, local.key, 0, peer, bytes(16), 0, 1)
        handles = [engine.submit([request]) for _ in range(MAX_SUBMISSIONS)]
        for ask in (engine.submit, engine.transfer):
            with pytest.raises(TransferLimitReached, match=f"{MAX_SUBMISSIONS} submissions are in flight"):
                ask([request])
        handles[-1].cancel()
        assert engine.submit([request])
        mute.close()


def test_limits_of_a_stopped_engine_are_free_again() -> None:
    """Requests that were cut off count as ended: the stats of a closed engine show none in flight."""
    with TransferEngine(transports=("tcp",), limits=PATIENT) as engine, socket.create_server(("127.0.0.1", 0)) as mute:
        local = engine.register_local_memory(bytearray(SIZE))
        peer = SegmentDescriptor("127.0.0.1", mute.getsockname()[1], b"p" * 16)
        request = TransferRequest(WRITE, local.key, 0, peer, bytes(16), 0, SIZE)
        handles = [engine.submit([request] * 4) for _ in range(4)]
        closer = threading.Thread(target=engine.close, daemon=True)
        closer.start()
        assert {one.status for handle in handles for one in handle.wait(GENEROUS_S)} == {TransferStatus.CANCELLED}
        mute.close()  # the handshake no longer waits
        closer.join(GENEROUS_S)
        assert not closer.is_alive()
        assert engine.stats().requests_now == 0
