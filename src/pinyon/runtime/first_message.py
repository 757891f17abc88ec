"""Bounds on what a call makes a server hold before its message is read.

gRPC reads a call's one message before its method is called: up to 4 MiB each, from whoever reaches the port, for as
long as the sender likes. Here the method is called first, so that a call refused by role, by key or for lack of a place
is refused at its head. The wait for a message is limited.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pinyon.core.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from pinyon.runtime.interceptors import behaviour_of, doing

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs

MESSAGE_S = 30.0

Doors = Mapping[str, Callable[[Any], str]]
"""Checks of a call at its head, by the method's full name.

Each takes the call's context and returns in whose name the message is held, or raises if it need not be read."""


class FirstMessages:
    """The limits for methods that take one message, and for those that take many and are ``timed`` throughout.

    Other methods have a duplex session, which sets its own limits. Where there are ``doors``, anybody may call.
    Messages then need a place of their sender's, and a streaming method without a door keeps its place to its end.
    """

    def __init__(self, doors: Doors, timed: Collection[str], message_s: float = MESSAGE_S) -> None:
        self._doors = doors
        self._timed = timed
        self._message_s = message_s
        self._arrivals = Arrivals()

    def around(self, handler: Any, method: str) -> Any:
        look = self._doors.get(method)
        # On the wire, a method of one message is a stream with one message.
        if handler.request_streaming:
            behaviour = behaviour_of(handler)
            if handler.response_streaming and method in self._timed:
                behaviour = self._streams(behaviour, method)
        elif handler.response_streaming:
            behaviour = self._streaming(handler.unary_stream, method, look)
        else:
            behaviour = self._unary(handler.unary_unary, method, look)
        return doing(handler, behaviour, _parsing(handler.request_deserializer))

    def _unary(self, behaviour: Any, method: str, look: Callable[[Any], str] | None) -> Any:
        async def call(_: object, context: Any) -> Any:
            name = method if look is None else look(context)
            return await behaviour(await self._message(context, name), context)

        return call

    def _streaming(self, behaviour: Any, method: str, look: Callable[[Any], str] | None) -> Any:
        async def write(context: Any) -> None:
            name = method if look is None else look(context)
            with nullcontext() if look is not None else self._stay(method):
                result = behaviour(await self._message(context, name), context)
                if not hasattr(result, "__aiter__"):  # the method writes its answers itself
                    await result
                    return
                async with aclosing(result):
                    async for message in result:
                        await context.write(message)

        return lambda _, context: write(context)

    def _streams(self, behaviour: Any, method: str) -> Any:
        async def write(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            with self._stay(method):
                async for message in behaviour(self._each(requests), context):
                    yield message

        return write

    def _stay(self, method: str) -> AbstractContextManager[None]:
        """Returns a place for the call where there are doors, which may raise :class:`ResourceExhausted`."""
        return self._arrivals.stay(method) if self._doors else nullcontext()

    async def _message(self, context: Any, name: str) -> Any:
        """Reads the message. Raises :class:`DeadlineExceeded`, or :class:`InvalidArgument` if none comes."""
        try:
            async with asyncio.timeout(self._message_s), self._arrivals.place(name) if self._doors else nullcontext():
                message = await context.read()
        except TimeoutError:
            raise self._late() from None
        if message is _EOF:
            raise InvalidArgument("no message came")
        return message

    async def _each(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        messages = aiter(requests)
        while True:
            try:
                async with asyncio.timeout(self._message_s):
                    message = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise self._late() from None
            yield message

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no message came within {self._message_s:g} s")


def _parsing(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Makes a parser whose errors :func:`pinyon.runtime.interceptors.with_statuses` sees; else they are UNKNOWN."""

    def parse(raw: bytes) -> Any:
        if deserializer is None:
            return raw
        try:
            return deserializer(raw)
        except DecodeError:
            raise InvalidArgument("the message cannot be parsed") from None

    return parse


ALL_MAX = 256
EACH_MAX = 64


class Arrivals:
    """The places, for one event loop. Senders go by name; a sender that holds no place is forgotten."""

    def __init__(self, all_max: int = ALL_MAX, each_max: int = EACH_MAX) -> None:
        self._each_max = each_max
        self._all = asyncio.Semaphore(all_max)
        self._each: dict[str, tuple[asyncio.Semaphore, set[object]]] = {}
        self._staying: Counter[str] = Counter()

    def __len__(self) -> int:
        """Returns the number of senders that hold or wait for a place."""
        return len(self._each.keys() | self._staying.keys())

    @asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        """Waits for a place, in the order of asking; the caller limits how long."""
        own, here = self._each.setdefault(name, (asyncio.Semaphore(self._each_max), set()))
        ticket = object()
        here.add(ticket)
        try:
            async with own, self._all:
                yield
        finally:
            here.discard(ticket)
            if not here:
                del self._each[name]

    @contextmanager
    def stay(self, name: str) -> Iterator[None]:
        """Takes a place for a call that may last long; raises :class:`ResourceExhausted` if there is none now."""
        if self._staying[name] >= self._each_max:
            raise ResourceExhausted("too many of these calls at once", retry_after_s=1.0)
        self._staying[name] += 1
        try:
            yield
        finally:
            self._staying[name] -= 1
            if not self._staying[name]:
                del self._staying[name]
