"""``/v1/completions`` and ``/v1/chat/completions``: from a body to an answer, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypedDict

from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, Internal, PinyonError
from pinyon.core.request import RequestClass
from pinyon.runtime.logging import get_logger
from services.lb.admission import Admission, Ticket
from services.lb.auth import Client
from services.lb.dispatcher import Dispatcher
from services.lb.http_answer import EVENT_STREAM, JSON, Reply, field, rate_fields
from services.lb.http_choices import ChoicesAnswer
from services.lb.http_head import Head
from services.lb.labels import classify
from services.lb.models import Models
from services.lb.off_loop import OffLoop
from services.lb.openai_format import DONE, ChatFormat, CompletionFormat, Format, error_event
from services.lb.openai_large import is_large
from services.lb.openai_parse import Call, parse_chat, parse_completion
from services.lb.request import Delta, Request
from services.lb.time_limit import TimeLimits

__all__ = ["Completions"]

NO_CACHE = field(b"cache-control", "no-cache")

Parse = Callable[[bytes | bytearray], Call]

_log = get_logger("lb.http")


class Completions:
    """Both routes; ``timeout_s`` is for a whole request, from its head to its last byte.

    ``broken`` is told the error's code of a stream that had begun.
    """

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        models: Models,
        off_loop: OffLoop,
        broken: Callable[[str], None],
        timeout_s: float,
        clock: Clock,
        unix_clock: Clock = time.time,
    ) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._models = models
        self._off_loop = off_loop
        self._broken = broken
        self._timeout_s = timeout_s
        self._clock = clock
        self._unix_clock = unix_clock
        self._time_limits = TimeLimits(clock)

    def check_place(self, client: Client) -> None:
        """Raises :class:`ResourceExhausted` if there is no place in the queue: then there is no need to read a body."""
        self._admission.check(client)

    async def completion(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        return await self._answer(head, body, parse_completion, CompletionFormat, reply)

    async def chat(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        return await self._answer(head, body, parse_chat, ChatFormat, reply)

    async def _answer(
        self, head: Head, body: bytes | bytearray, parse: Parse, make_format: type[Format], reply: Reply
    ) -> int:
        begun: list[bool] = []
        deadline_s = head.arrived_s + self._timeout_s
        try:
            with self._time_limits.until(deadline_s), self._admission.admit(head.client) as ticket:
                call, request_class = await self._read(head, body, parse)
                del body
                if not call.plain:
                    await self._several(head, call, request_class, ticket, reply, begun, deadline_s)
                    return 200
                ask = await self._models.of(call.model).ask(call, head.log_id, request_class, **_said(head))
                answer_format = make_format(head.unique, call.model, int(self._unix_clock()), call.include_usage)
                request = Request(ask, head.arrived_s, deadline_s, whole=not call.stream)
                head.requests = (request,)
                async with aclosing(self._dispatcher.run(request, ticket)) as deltas:
                    if call.stream:
                        await self._stream(
                            head, request, ticket, deltas, answer_format, call.include_usage, reply, begun
                        )
                    else:
                        await self._whole(head, request, ticket, deltas, answer_format, reply)
        except TimeoutError:
            error: PinyonError = DeadlineExceeded(
                f"The request took longer than {self._timeout_s:g} s, the load balancer's --request-timeout-s."
            )
        except PinyonError as raised:
            error = raised
        except Exception:
            if not begun:
                raise
            _log.exception("uncaught error in a stream", extra={"request_id": head.log_id})
            error = Internal("internal error")
        else:
            return 200
        if not begun:
            raise error
        # The status line has gone out as 200: the error travels as an event.
        head.broken = error.grpc_code.lower()
        self._broken(head.broken)
        await reply.end(error_event(error) + DONE)
        return 200

    async def _read(self, head: Head, body: bytes | bytearray, parse: Parse) -> tuple[Call, RequestClass]:
        if is_large(body):
            call = await self._off_loop.run(head.client.holder, parse, body)
        else:
            call = parse(body)
        return call, classify(head.labels, call, head.client, self._unix_clock(), "x-pinyon-geographies")

    async def _several(
        self,
        head: Head,
        call: Call,
        request_class: RequestClass,
        ticket: Ticket,
        reply: Reply,
        begun: list[bool],
        deadline_s: float,
    ) -> None:
        prompts = self._models.of(call.model)
        asks = await prompts.asks(call, head.log_id, request_class, **_said(head))

        def begin() -> None:
            self._begin(ticket, reply, begun)

        answer = ChoicesAnswer(
            call, asks, head, self._dispatcher, prompts, self._off_loop, reply, begin, deadline_s,
            int(self._unix_clock()), self._clock,
        )  # fmt: skip
        await answer.run(ticket)

    async def _whole(
        self,
        head: Head,
        request: Request,
        ticket: Ticket,
        deltas: AsyncGenerator[Delta, None],
        answer_format: Format,
        reply: Reply,
    ) -> None:
        texts = [delta.text async for delta in deltas]
        assert request.finish_reason is not None
        facts = request.report(self._clock()) if head.report else None
        body = answer_format.whole("".join(texts), request.finish_reason.value, request.usage(), facts)
        reply.whole(200, body, JSON, rate_fields(ticket.levels))

    async def _stream(
        self,
        head: Head,
        request: Request,
        ticket: Ticket,
        deltas: AsyncGenerator[Delta, None],
        answer_format: Format,
        include_usage: bool,
        reply: Reply,
        begun: list[bool],
    ) -> None:
        """The answer begins with the first text: until then a failure still has a status of its own. From then on
        text goes out as it comes, and this is woken only while the client does not keep up."""
        tail = ""
        async for delta in deltas:
            if request.finish_reason is not None:
                tail += delta.text
            elif delta.text:
                events = answer_format.text(delta.text)
                if not begun:
                    events = answer_format.first + events
                    self._begin(ticket, reply, begun)
                await reply.send(events.encode("ascii"))
                request.listener = lambda text: reply.push(answer_format.text(text).encode("ascii"))
        assert request.finish_reason is not None
        facts = request.report(self._clock()) if head.report else None
        events = answer_format.finish(tail, request.finish_reason.value, None if include_usage else facts)
        if include_usage:
            events += answer_format.usage(request.usage(), facts)
        if not begun:
            events = answer_format.first + events
            self._begin(ticket, reply, begun)
        await reply.end(events.encode("ascii") + DONE)

    @staticmethod
    def _begin(ticket: Ticket, reply: Reply, begun: list[bool]) -> None:
        begun.append(True)
        reply.begin(EVENT_STREAM, NO_CACHE + rate_fields(ticket.levels))


class _Said(TypedDict):
    holder: str
    no_reuse: bool
    ttft_slo_ms: int
    traceparent: str


def _said(head: Head) -> _Said:
    """What a head says for its asks."""
    return _Said(
        holder=head.client.holder, no_reuse=head.no_reuse, ttft_slo_ms=head.ttft_slo_ms, traceparent=head.traceparent
    )
