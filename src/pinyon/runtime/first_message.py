"""Bounds on what a call makes a server hold before its message is read.

gRPC reads a call's one message before its method is called: up to 4 MiB each, from whoever reaches the port, for as
long as the sender likes. Here the method is called first, so that a call refused by role, by key or for lack of a place
is refused at its head. The wait for a message is limited."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError

from pinyon.core.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from pinyon.runtime.interceptors import Behaviour

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs

MESSAGE_S = 30.0

Doors = Mapping[str, Callable[[Any], str]]
"""Checks of a call at its head, by the method's full name.

Each takes the call's context and returns in whose name the message is held, or raises if it need not be read."""


class FirstMessages:
    """The limits for methods that take one message, and for those that take many and are ``timed`` throughout.

    Other methods have a duplex session, which sets its own limits. Where there are ``doors``, anybody may call.
    Messages then need a place of their sender's, and a streaming method without a door keeps its place to its end."""

    def __init__(self, doors: Doors, message_s: float = MESSAGE_S) -> None:
        self._doors = doors
        self._message_s = message_s
        self._arrivals = Arrivals()

    def behaviour(self, own: Any, method: MethodDescriptor, path: str, *, timed: bool = False) -> Behaviour:
        """Returns the behaviour of a servicer's ``own`` method, which gets its one message, or an iterator of many."""
        many = method.client_streaming
        look = None if many else self._doors.get(path)
        stays = timed or not (many or look)

        # On the wire, a method of one message is a stream with one message.
        async def answer(requests: Any, context: Any) -> Any:
            if not many:
                requests = await self._message(context, path if look is None else look(context))
            return await own(requests, context)

        async def write(requests: Any, context: Any) -> None:
            # It would go with the first write. If that is cancelled on its way, no status could follow.
            await context.send_initial_metadata(())
            name = path if look is None else look(context)
            with self._arrivals.stay(path) if stays and self._doors else nullcontext():
                if timed:
                    requests = self._each(requests)
                result = own(requests if many else await self._message(context, name), context)
                if not hasattr(result, "__aiter__"):  # the method writes its answers itself
                    await result
                    return
                async with aclosing(result):
                    async for message in result:
                        await context.write(message)

        return write if method.server_streaming else answer

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


def parsing(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Makes a parser whose errors :func:`pinyon.runtime.interceptors.with_statuses` sees; else they are UNKNOWN."""

    def parse(raw: bytes) -> Any:
        try:
            return deserializer(raw)
        except DecodeError:
            raise InvalidArgument("the message cannot be parsed") from None

    return parse


ALL_MAX = 256
EACH_MAX = 64


class Arrivals:
    """The places, for one event loop. Senders go by name; a sender that holds no place is forgotten."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(ALL_MAX)
        self._each: dict[str, tuple[asyncio.Semaphore, set[object]]] = {}
        self._staying: Counter[str] = Counter()

    @asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        """Waits for a place, in the order of asking; the caller limits how long."""
        own, here = self._each.setdefault(name, (asyncio.Semaphore(EACH_MAX), set()))
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
        if self._staying[name] >= EACH_MAX:
            raise ResourceExhausted("too many of these calls at once", retry_after_s=1.0)
        self._staying[name] += 1
        try:
            yield
        finally:
            self._staying[name] -= 1
            if not self._staying[name]:
                del self._staying[name]
