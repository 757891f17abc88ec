"""Both ends of a stream: its beginning, its end, and the reason that each side learns; with grpcio's servers too."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest

from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    PermissionDenied,
    PinyonError,
    ResourceExhausted,
    Unavailable,
)
from pinyon.runtime.channel import open_session
from pinyon.runtime.distance import delayed
from pinyon.runtime.duplex import Accepted, Dialed, Method, Redialer
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.http2 import client
from tests.ports import kept_port

WAIT_S = 60.0
Ask = worker_pb2.SessionRequest
Answer = worker_pb2.SessionResponse
METHOD = Method("/pinyon.api.worker.v1.WorkerService/Session", Ask, Answer)
Handler = Callable[[Accepted[Answer, Ask]], Awaitable[None]]


class Accepting:
    """The server of the running test."""

    within_the_loop = True


@pytest.fixture(autouse=True, params=[True, False], ids=["http2-http2", "http2-grpcio"])
def server_of_the_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accepting, "within_the_loop", request.param)
    monkeypatch.setattr(client, "CONNECT_S", WAIT_S)  # no test waits for this limit


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, handler: Handler, write_s: float) -> None:
        self._handler = handler
        self._write_s = write_s
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def Session(self, _: object, context: object) -> None:
        self.begun.put_nowait(None)
        try:
            await self._handler(Accepted(context, self._write_s))
        except BaseException as error:
            self.ended.put_nowait(error)
            raise
        self.ended.put_nowait(None)


class Server:
    def __init__(self, handler: Handler, write_s: float = WAIT_S, listen: str = "127.0.0.1:0") -> None:
        self._servicer = Servicer(handler, write_s)
        self._server = GrpcServer(listen, sessions=Accepting.within_the_loop)
        self._server.add(self._servicer, worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])
        self.address = ""

    async def begun(self) -> None:
        """Waits until a call of the handler has begun. A peer that left before that has no call."""
        await asyncio.wait_for(self._servicer.begun.get(), WAIT_S)

    async def ended(self) -> BaseException | None:
        """Returns the exception with which a call of the handler ended, or None."""
        return await asyncio.wait_for(self._servicer.ended.get(), WAIT_S)

    async def __aenter__(self) -> Server:
        self.address = await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.drain(0)


def dial(address: str, write_s: float = WAIT_S) -> Dialed[Ask, Answer]:
    return Dialed(address, METHOD, write_s)


async def says(*numbers: int, then: Awaitable[None] | None = None) -> AsyncGenerator[Ask, None]:
    for number in numbers:
        yield Ask(cancel_stream_ids=[number])
    if then is not None:
        await then


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def ends(run: Awaitable[None]) -> PinyonError | None:
    """Returns the error with which a stream ended, or None."""
    try:
        async with asyncio.timeout(WAIT_S):
            await run
    except PinyonError as error:
        return error
    return None


@asynccontextmanager
async def deaf_address() -> AsyncIterator[str]:
    """Yields the address of a peer that accepts connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def echo(stream: Accepted[Answer, Ask]) -> None:
    """Answers each message with its number, and sends what is left after the last one."""
    numbers: asyncio.Queue[int | None] = asyncio.Queue()

    async def answers() -> AsyncGenerator[Answer, None]:
        while (number := await numbers.get()) is not None:
            answer = Answer()
            answer.updates.add(stream_id=number)
            yield answer

    async def drain() -> None:
        numbers.put_nowait(None)

    def take(message: Ask) -> None:
        for number in message.cancel_stream_ids:
            numbers.put_nowait(number)

    await stream.run(take, answers(), drain)


async def deaf(stream: Accepted[Answer, Ask]) -> None:
    await never()


async def test_an_orderly_end_waits_until_everything_is_answered() -> None:
    got: list[int] = []
    async with Server(echo) as server:
        stream = dial(server.address)
        assert not stream.spoke
        run = stream.run(lambda answer: got.extend(each.stream_id for each in answer.updates), says(*range(100)))
        assert await ends(run) is None
        assert await server.ended() is None
    assert got == list(range(100))
    assert stream.spoke
    assert stream.ending


@pytest.mark.parametrize("refuses", [False, True])
async def test_far_away_all_comes_later_and_in_order(refuses: bool) -> None:
    loop, got = asyncio.get_running_loop(), list[int]()

    def take(answer: Answer) -> None:
        got.extend(each.stream_id for each in answer.updates)

    async def refuse(stream: Accepted[Answer, Ask]) -> None:
        raise FailedPrecondition("not now")

    async with Server(refuse if refuses else echo) as server:
        began_s = loop.time()
        stream = Dialed(server.address, METHOD, WAIT_S, delayed(open_session, 0.1))
        error = await ends(stream.run(take, says(*range(100))))
        took_s = loop.time() - began_s
        assert isinstance(error, FailedPrecondition) if refuses else error is None
    assert got == ([] if refuses else [*range(100)])
    assert took_s >= (0.1 if refuses else 0.2)


async def test_messages_larger_than_a_window_pass_both_ways() -> None:
    text = Random(1).randbytes(3 << 19).hex()

    async def mirror(stream: Accepted[Answer, Ask]) -> None:
        async def take(message: Ask) -> None:
            answer = Answer()
            answer.updates.add().error.message = message.submissions[0].request_id
            await stream.write(answer)

        await stream.run(take)

    async def large() -> AsyncGenerator[Ask, None]:
        for _ in range(3):
            yield Ask(submissions=[worker_pb2.Submission(request_id=text)])

    got: list[Answer] = []
    async with Server(mirror) as server:
        assert await ends(dial(server.address).run(got.append, large())) is None
    assert [each.updates[0].error.message == text for each in got] == [True] * 3


async def test_what_is_said_goes_at_once_where_the_carrier_can() -> None:
    at_once: list[tuple[bool, bool]] = []

    async def sayer(stream: Accepted[Answer, Ask]) -> None:
        def take(_: Ask) -> Awaitable[None] | None:
            had_room, saying = stream.has_room, stream.say(Answer())
            at_once.append((had_room, saying is None))
            return saying

        await stream.run(take)

    got: list[Answer] = []
    async with Server(sayer) as server:
        assert await ends(dial(server.address).run(got.append, says(1, 2))) is None
    assert got == [Answer()] * 2
    assert at_once == [(Accepting.within_the_loop, Accepting.within_the_loop)] * 2


async def test_a_message_that_is_too_large_ends_the_stream_and_says_so() -> None:
    async def large() -> AsyncGenerator[Ask, None]:
        yield Ask(submissions=[worker_pb2.Submission(prompt_tokens_le32=bytes(5 << 20))])
        await never()

    async with Server(echo) as server:
        error = await ends(dial(server.address).run(lambda _: None, large()))
    assert isinstance(error, ResourceExhausted)


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        error = await ends(dial(f"127.0.0.1:{taken.getsockname()[1]}").run(lambda _: None, says(then=never())))
    assert isinstance(error, Unavailable)


def all_calls() -> list[object]:
    return [each for each in gc.get_objects() if type(each).__name__ == "Http2Call"]


@pytest.fixture
def calls() -> Iterator[Callable[[], int]]:
    """Yields a function that counts the new calls, without Python's cyclic garbage collector.

    Calls that existed before do not count: an error in another test's parameters keeps its calls alive. Released calls
    must be freed without the collector."""
    gc.collect()
    before = all_calls()
    known = set(map(id, before))
    gc.disable()
    try:
        yield lambda: sum(id(each) not in known for each in all_calls())
    finally:
        gc.enable()


async def test_one_that_comes_back_is_there_at_once(calls: Callable[[], int]) -> None:
    """The failed attempt leaves nothing behind."""
    with kept_port() as port:
        await _comes_back(f"127.0.0.1:{port}", calls)


async def _comes_back(address: str, calls: Callable[[], int]) -> None:
    async with Server(echo, listen=address):
        pass
    error = await ends(dial(address).run(lambda _: None, says(1, then=never())))
    assert isinstance(error, Unavailable)
    del error  # its traceback has the call
    assert calls() == 0
    async with Server(echo, listen=address):
        stream = dial(address)
        assert await ends(stream.run(lambda _: None, says(1))) is None
        assert stream.spoke
    assert calls() == 0


@pytest.mark.parametrize("how", ["owner", "peer"])
async def test_a_stream_that_has_ended_leaves_no_call(how: str, calls: Callable[[], int]) -> None:
    async def refuse(stream: Accepted[Answer, Ask]) -> None:
        raise FailedPrecondition("not now")

    async with Server(refuse if how == "peer" else echo) as server:
        stream = dial(server.address)
        running = asyncio.ensure_future(ends(stream.run(lambda _: None, says(then=never()))))
        await server.begun()
        assert how == "peer" or calls() == 1, "that is what a call is called"
        if how == "owner":
            stream.end(Cancelled("closed"))
        error = await running
        assert isinstance(error, (Cancelled, FailedPrecondition))
        del error, running, stream
        assert calls() == 0


async def test_somebody_there_who_does_not_speak() -> None:
    async with deaf_address() as address:
        stream = dial(address)
        assert isinstance(await ends(stream.run(lambda _: None, says(1, then=never()))), Unavailable)
    assert not stream.spoke


async def test_it_is_ended_and_cancelled_while_it_connects() -> None:
    async with deaf_address() as address:
        stream = dial(address)
        run = asyncio.ensure_future(stream.run(lambda _: None, says(1, then=never())))
        await asyncio.sleep(0)
        stream.end(Cancelled("closed"))
        stream.end(Internal("too late"))
        assert isinstance(await ends(run), Cancelled)
        run = asyncio.ensure_future(dial(address).run(lambda _: None, says(1, then=never())))
        await asyncio.sleep(0)
        run.cancel()
        await asyncio.wait({run}, timeout=WAIT_S)
        assert run.cancelled()
        early = dial(address)
        early.end()
        assert await ends(early.run(lambda _: None, says(1, then=never()))) is None


async def test_an_end_before_it_runs_is_its_end() -> None:
    async with Server(echo) as server:
        for reason in (None, Unavailable("not wanted any more")):
            stream = dial(server.address)
            stream.end(reason)
            assert await ends(stream.run(lambda _: None, says(then=never()))) is reason


async def test_a_peer_that_takes_nothing_is_frozen() -> None:
    async def endless() -> AsyncGenerator[Ask, None]:
        ids = [1] * 100_000
        while True:
            yield Ask(cancel_stream_ids=ids)

    async with Server(deaf) as server:
        error = await ends(dial(server.address, write_s=0.1).run(lambda _: None, endless()))
    assert isinstance(error, ResourceExhausted)
    assert "0.1 s" in error.message


async def test_a_caller_that_takes_nothing_is_frozen() -> None:
    async def endless() -> AsyncGenerator[Answer, None]:
        answer = Answer()
        answer.updates.add(tokens=[1] * 100_000)
        while True:
            yield answer

    async def flood(stream: Accepted[Answer, Ask]) -> None:
        await stream.run(lambda _: None, endless())

    async with Server(flood, write_s=0.1) as server:
        reads = never()

        async def take(_: Answer) -> None:
            await reads

        run = asyncio.ensure_future(dial(server.address).run(take, says(then=never())))
        assert isinstance(await server.ended(), ResourceExhausted)
        reads.set_result(None)
        assert isinstance(await ends(run), ResourceExhausted)  # the error comes with the status


async def test_the_last_message_that_was_pushed_has_a_deadline_too() -> None:
    """The last message has no other message behind it that waits for its turn."""
    async with Server(deaf) as server:
        dialed = dial(server.address, 0.5)

        async def some() -> AsyncGenerator[Ask, None]:
            message = Ask(submissions=[worker_pb2.Submission(prompt_tokens_le32=bytes(600 << 10))])
            while True:  # until the error ends the loop
                dialed.push(message)
                await asyncio.sleep(0)
            yield message

        error = await ends(dialed.run(lambda _: None, some()))
        assert isinstance(error, ResourceExhausted)
        assert "took no message" in error.message


async def test_the_peer_s_error_is_the_reason() -> None:
    async def refuse(stream: Accepted[Answer, Ask]) -> None:
        raise FailedPrecondition("not here", field="hello")

    async def many() -> AsyncGenerator[Ask, None]:
        while True:  # the task is writing when the stream ends
            yield Ask()

    async def refuse_at_the_end(stream: Accepted[Answer, Ask]) -> None:
        await stream.run(lambda _: None)
        await refuse(stream)

    # Nothing is being written when the status comes: the peer refuses a silent client, or has read to the end.
    for handler, messages in ((refuse, says(then=never())), (refuse_at_the_end, says(1)), (refuse_at_the_end, says())):
        async with Server(handler) as server:
            error = await ends(dial(server.address).run(lambda _: None, messages))
            assert isinstance(error, FailedPrecondition)
            assert (error.message, error.field) == ("not here", "hello")
    # The status may be lost to a write, or to the end of messages, that fails at the same moment.
    async with Server(refuse) as server:
        for messages in (says(1), says(), many()):
            error = await ends(dial(server.address).run(lambda _: None, messages))
            assert isinstance(error, (FailedPrecondition, Unavailable))


@pytest.mark.parametrize("raised", [Unavailable("it is enough"), ValueError("a defect")])
async def test_what_fails_on_this_side_ends_both_ways(raised: Exception) -> None:
    def take(_: Answer) -> None:
        raise raised

    async def messages() -> AsyncGenerator[Ask, None]:
        yield Ask(cancel_stream_ids=[1])
        await server.begun()
        raise raised

    expected = type(raised) if isinstance(raised, PinyonError) else Internal
    async with Server(echo) as server:
        assert type(await ends(dial(server.address).run(take, says(1, then=never())))) is expected
        await server.begun()
        await server.ended()  # cancelled, or as if no more messages came, whatever gRPC sees first
        assert type(await ends(dial(server.address).run(lambda _: None, messages()))) is expected
        await server.ended()  # cancelled, or as if no more messages came, whatever gRPC sees first


@pytest.mark.parametrize("raised", [Unavailable("it is enough"), ValueError("a defect")])
async def test_what_fails_where_it_was_accepted_is_told(raised: Exception) -> None:
    """The failure is told although no write meets the end of the call, where gRPC loses the status."""
    written = asyncio.Event()

    async def after() -> None:
        written.set()
        await never()

    async def fail_reading(stream: Accepted[Answer, Ask]) -> None:
        async def take(_: Ask) -> None:
            await written.wait()
            raise raised

        await stream.run(take)

    async def fail_writing(stream: Accepted[Answer, Ask]) -> None:
        async def messages() -> AsyncGenerator[Answer, None]:
            yield Answer()
            await written.wait()
            raise raised

        await stream.run(lambda _: None, messages())

    expected = type(raised) if isinstance(raised, PinyonError) else Internal
    for handler in (fail_reading, fail_writing):
        written.clear()
        async with Server(handler) as server:
            error = await ends(dial(server.address).run(lambda _: None, says(1, then=after())))
            assert type(error) is expected
            assert error is not None
            assert "defect" not in error.message


async def test_the_iterator_is_closed_with_its_stream() -> None:
    closed = []

    async def messages() -> AsyncGenerator[Ask, None]:
        try:
            yield Ask(cancel_stream_ids=[1])
            await never()
        finally:
            closed.append(True)

    async with Server(echo) as server:
        stream = dial(server.address)
        await ends(stream.run(lambda _: stream.end(), messages()))
    assert closed == [True]


async def test_the_accepting_side_may_end_a_stream_and_write_freely() -> None:
    async def serve(stream: Accepted[Answer, Ask]) -> None:
        async def take(message: Ask) -> None:
            if message.cancel_stream_ids[0] == 3:
                stream.end()
            else:
                await stream.write(Answer())

        await stream.run(take)

    got: list[Answer] = []
    async with Server(serve) as server:
        assert await ends(dial(server.address).run(got.append, says(1, 2, 3, then=never()))) is None
        assert await server.ended() is None
    assert len(got) == 2


async def test_a_hello_comes_first_or_not_at_all() -> None:
    firsts: list[Ask | None] = []

    async def serve(stream: Accepted[Answer, Ask]) -> None:
        firsts.append(await stream.first(WAIT_S))

    async with Server(serve) as server:
        assert await ends(dial(server.address).run(lambda _: None, says(7, then=never()))) is None
        assert await ends(dial(server.address).run(lambda _: None, says())) is None
    assert firsts == [Ask(cancel_stream_ids=[7]), None]

    async def impatient(stream: Accepted[Answer, Ask]) -> None:
        await stream.first(0.01)

    async with Server(impatient) as server:
        assert isinstance(await ends(dial(server.address).run(lambda _: None, says(then=never()))), DeadlineExceeded)


# ---------------------------------------------------------------- again and again


class Naps:
    """Pauses that pass at once; after ``enough`` pauses the test ends."""

    def __init__(self, enough: int) -> None:
        self.pauses: list[float] = []
        self.enough = enough
        self.done = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(round(seconds, 3))
        if len(self.pauses) == self.enough:
            self.done.set()
            await never()


def redialer(address: str, naps: Naps, converse: Callable[[Dialed[Ask, Answer]], Awaitable[None]]) -> Redialer:
    return Redialer("peer", address, METHOD, converse, sleep=naps.sleep)


async def test_the_pause_doubles_until_the_peer_speaks() -> None:
    naps, tries = Naps(enough=9), 0

    async def converse(stream: Dialed[Ask, Answer]) -> None:
        nonlocal tries
        tries += 1
        stream.spoke = tries == 8
        raise ValueError if tries == 2 else Unavailable("nobody")

    link = redialer("nowhere:1", naps, converse)
    link.start()
    with pytest.raises(RuntimeError):
        link.start()
    await asyncio.wait_for(naps.done.wait(), WAIT_S)
    await link.close()
    assert naps.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 0.05, 0.1]


async def test_a_peer_that_refuses_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    naps = Naps(enough=2)
    reasons = iter((PermissionDenied("the certificate is another's"), Unavailable("nobody"), Unavailable("nobody")))

    async def converse(stream: Dialed[Ask, Answer]) -> None:
        raise next(reasons)

    link = redialer("somewhere:1", naps, converse)
    with caplog.at_level(logging.WARNING):
        link.start()
        await asyncio.wait_for(naps.done.wait(), WAIT_S)
        await link.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the peer at somewhere:1 refuses: the certificate is another's"
    ], "that nobody is there is no news"


async def test_a_peer_that_comes_back_is_found_again() -> None:
    naps, heard = Naps(enough=1000), asyncio.Event()

    async def converse(stream: Dialed[Ask, Answer]) -> None:
        await stream.run(lambda _: heard.set(), says(1, then=never()))

    with kept_port() as port:
        address = f"127.0.0.1:{port}"
        async with Server(echo, listen=address):
            link = redialer(address, naps, converse)
            link.start()
            await asyncio.wait_for(heard.wait(), WAIT_S)
        heard.clear()
        async with Server(echo, listen=address):
            await asyncio.wait_for(heard.wait(), WAIT_S)
            await link.close()
    assert naps.pauses[0] == 0.05
    await link.close()


@pytest.mark.parametrize("answered", [True, False])
async def test_a_farewell_is_waited_for_but_not_for_ever(answered: bool) -> None:
    naps, open_, leave = Naps(enough=1000), asyncio.Event(), asyncio.Event()
    messages: list[Ask] = []

    async def serve(stream: Accepted[Answer, Ask]) -> None:
        open_.set()
        await stream.run(messages.append)
        if not answered:
            with suppress(asyncio.CancelledError):
                await never()

    async def farewell() -> AsyncGenerator[Ask, None]:
        yield Ask(cancel_stream_ids=[1])
        await leave.wait()
        yield Ask(cancel_stream_ids=[2])

    async def converse(stream: Dialed[Ask, Answer]) -> None:
        await stream.run(lambda _: None, farewell())

    async with Server(serve) as server:
        link = redialer(server.address, naps, converse)
        link.start()
        await asyncio.wait_for(open_.wait(), WAIT_S)
        leave.set()
        await link.close(WAIT_S if answered else 0.05)
        await server.ended()
    assert not naps.pauses
    if answered:
        assert messages == [Ask(cancel_stream_ids=[1]), Ask(cancel_stream_ids=[2])]
