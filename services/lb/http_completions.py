"""``/v1/completions`` and ``/v1/chat/completions``: from a body to an answer, whole or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, Internal, PinyonError
from pinyon.runtime.logging import get_logger
from services.lb.admission import Admission, Ticket
from services.lb.dispatcher import Dispatcher
from services.lb.http_answer import JSON, Send, answer
from services.lb.http_head import Head
from services.lb.labels import classify
from services.lb.openai_format import DONE, ChatFormat, CompletionFormat, Format, error_event
from services.lb.openai_parse import Call, parse_chat, parse_completion
from services.lb.prompts import Prompts
from services.lb.rate_limits import rate_headers
from services.lb.request import Delta, Request

__all__ = ["Completions"]

EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE = (b"cache-control", b"no-cache")

_log = get_logger("lb.http")


class Completions:
    """Both routes; ``timeout_s`` is for a whole request, its last byte included."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        prompts: Prompts,
        timeout_s: float,
        clock: Clock,
        unix_clock: Clock = time.time,
    ) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._timeout_s = timeout_s
        self._clock = clock
        self._unix_clock = unix_clock

    async def completion(self, head: Head, body: bytes, send: Send) -> int:
        """Returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        call = parse_completion(body)
        answer_format = CompletionFormat(head.unique, call.model, int(self._unix_clock()), call.include_usage)
        return await self._answer(head, call, answer_format, send)

    async def chat(self, head: Head, body: bytes, send: Send) -> int:
        """Returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        call = parse_chat(body)
        return await self._answer(
            head, call, ChatFormat(head.unique, call.model, int(self._unix_clock()), call.include_usage), send
        )

    async def _answer(self, head: Head, call: Call, answer_format: Format, send: Send) -> int:
        arrived_s = self._clock()
        request_class = classify(head.labels, call, head.client, self._unix_clock(), "x-pinyon-geographies")
        begun: list[bool] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._admission.admit(head.client) as ticket:
                    ask = await self._prompts.ask(
                        call,
                        head.log_id,
                        request_class,
                        no_reuse=head.no_reuse,
                        ttft_slo_ms=head.ttft_slo_ms,
                        traceparent=head.traceparent,
                    )
                    request = Request(ask, arrived_s, arrived_s + self._timeout_s, whole=not call.stream)
                    async with aclosing(self._dispatcher.run(request, ticket)) as deltas:
                        if call.stream:
                            await self._stream(
                                head, request, ticket, deltas, answer_format, call.include_usage, send, begun
                            )
                        else:
                            await self._whole(head, request, ticket, deltas, answer_format, send)
        except TimeoutError:
            error: PinyonError = DeadlineExceeded(f"The request took longer than {self._timeout_s:g} s.")
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
        await send({"type": "http.response.body", "body": error_event(error) + DONE})
        return error.http_status

    async def _whole(
        self,
        head: Head,
        request: Request,
        ticket: Ticket,
        deltas: AsyncGenerator[Delta, None],
        answer_format: Format,
        send: Send,
    ) -> None:
        texts = [delta.text async for delta in deltas]
        assert request.finish_reason is not None
        facts = request.report(self._clock()) if head.report else None
        body = answer_format.whole("".join(texts), request.finish_reason.value, request.usage(), facts)
        extra = {b"x-request-id": head.request_id.encode("ascii"), **rate_headers(ticket.levels)}
        await answer(send, 200, body, JSON, extra)

    async def _stream(
        self,
        head: Head,
        request: Request,
        ticket: Ticket,
        deltas: AsyncGenerator[Delta, None],
        answer_format: Format,
        include_usage: bool,
        send: Send,
        begun: list[bool],
    ) -> None:
        """The answer begins with the first text: until then a failure still has a status of its own."""
        tail = ""
        async for delta in deltas:
            if request.finish_reason is not None:
                tail += delta.text
            elif delta.text:
                events = answer_format.text(delta.text)
                if not begun:
                    events = answer_format.first + events
                    await self._begin(head, ticket, send, begun)
                await send({"type": "http.response.body", "body": events.encode("ascii"), "more_body": True})
        assert request.finish_reason is not None
        facts = request.report(self._clock()) if head.report else None
        events = answer_format.finish(tail, request.finish_reason.value, None if include_usage else facts)
        if include_usage:
            events += answer_format.usage(request.usage(), facts)
        if not begun:
            events = answer_format.first + events
            await self._begin(head, ticket, send, begun)
        await send({"type": "http.response.body", "body": events.encode("ascii") + DONE})

    @staticmethod
    async def _begin(head: Head, ticket: Ticket, send: Send, begun: list[bool]) -> None:
        begun.append(True)
        headers = [EVENT_STREAM, NO_CACHE, (b"x-request-id", head.request_id.encode("ascii"))]
        headers += rate_headers(ticket.levels).items()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
