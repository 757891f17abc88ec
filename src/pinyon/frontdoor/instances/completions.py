"""``/v1/completions`` and ``/v1/chat/completions``: from a body to an answer, whole or as events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from pinyon.core.clock import Clock
from pinyon.frontdoor.admission import Admission, Ticket
from pinyon.frontdoor.failures import broken_by
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.instances.ask import Wishes
from pinyon.frontdoor.instances.choices import AnswerTools, ChoicesAnswer, begin_events
from pinyon.frontdoor.instances.dispatcher import Dispatcher
from pinyon.frontdoor.instances.prompts import Models
from pinyon.frontdoor.instances.request import Delta, Request, facts_of
from pinyon.frontdoor.labels import classify
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.frontdoor.rate_limits import rate_fields
from pinyon.http.answer import JSON, Reply
from pinyon.openai.format import DONE, ChatFormat, CompletionFormat, Facts, Format, error_event
from pinyon.openai.large import is_large
from pinyon.openai.parse import Call, parse_chat, parse_completion
from pinyon.runtime.deadlines import TimeLimit

Parse = Callable[[bytes | bytearray], Call]


@dataclass(slots=True, eq=False)
class Completions:
    """The handlers of both routes; ``timeout_s`` is for a whole request, from its head to its last byte."""

    admission: Admission
    dispatcher: Dispatcher
    models: Models
    off_loop: OffLoop
    timeout_s: float
    clock: Clock

    async def completion(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Answers a completion and returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        return await self._answer(head, body, parse_completion, CompletionFormat, reply)

    async def chat(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Answers a chat and returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        return await self._answer(head, body, parse_chat, ChatFormat, reply)

    async def _answer(
        self, head: Head, body: bytes | bytearray, parse: Parse, make_format: type[Format], reply: Reply
    ) -> int:
        deadline_s = head.arrived_s + self.timeout_s
        try:
            with TimeLimit(deadline_s - self.clock()), self.admission.admit(head.client) as ticket:
                holder, now_s = head.client.holder, time.time()
                call = await self.off_loop.run(holder, parse, body) if is_large(body) else parse(body)
                request_class = classify(head.labels, call, head.client, now_s, "x-pinyon-geographies")
                prompts, created_s = self.models.of(call.model), int(now_s)
                wishes = Wishes(head.no_reuse, head.ttft_slo_ms, head.traceparent)
                asks = await prompts.asks(
                    call, head.log_id, request_class, holder=holder, wishes=wishes, numbered=not call.plain
                )
                if not call.plain:
                    tools = AnswerTools(self.dispatcher, prompts, self.off_loop, self.clock, created_s)
                    await ChoicesAnswer(call, asks, head, reply, ticket, deadline_s, tools).run()
                    return 200
                request = Request(asks[0], head.arrived_s, deadline_s, whole=not call.stream)
                head.facts = partial(facts_of, (request,))
                answer_format = make_format(head.unique, call.model, created_s, call.include_usage)
                if call.stream:
                    events = _Events(request, ticket, answer_format, reply)
                    await self.dispatcher.run(request, ticket, events.take)
                    await events.end(call.include_usage, self._facts(head, request))
                else:
                    await self._whole(head, request, ticket, answer_format, reply)
            return 200
        except Exception as raised:
            error = broken_by(raised, reply, self.timeout_s, head.log_id)
        # The status line has gone out as 200, so the error travels as an event.
        head.broken = error.grpc_code.lower()
        await reply.end(error_event(error) + DONE)
        return 200

    async def _whole(self, head: Head, request: Request, ticket: Ticket, answer_format: Format, reply: Reply) -> None:
        texts: list[str] = []
        await self.dispatcher.run(request, ticket, lambda delta: texts.append(delta.text))
        assert request.finish_reason is not None
        facts, usage = self._facts(head, request), request.usage()
        body = answer_format.whole("".join(texts), request.finish_reason.value, usage, facts)
        reply.whole(200, body, JSON, rate_fields(ticket.levels))

    def _facts(self, head: Head, request: Request) -> Facts | None:
        return request.report(self.clock()) if head.report else None


class _Events:
    """A streamed answer. It begins with the first text: until then, a failure still has a status of its own. From then
    on text goes out as it comes, and :meth:`take` is called only while the client does not keep up."""

    def __init__(self, request: Request, ticket: Ticket, answer_format: Format, reply: Reply) -> None:
        self._request = request
        self._ticket = ticket
        self._format = answer_format
        self._reply = reply
        self._tail = ""
        """The text that came with the last update."""

    def take(self, delta: Delta) -> Awaitable[None] | None:
        request = self._request
        if request.finished:
            self._tail += delta.text
            return None
        if not delta.text:
            return None
        events = self._opened(self._format.text(delta.text)).encode("ascii")
        request.listener = self._push
        return None if self._reply.push(events) else self._reply.send(events)

    def _push(self, text: str) -> bool:
        return self._reply.push(self._format.text(text).encode("ascii"))

    def _opened(self, events: str) -> str:
        """Returns the events, after the beginning of the answer if it has not begun."""
        if self._reply.begun:
            return events
        begin_events(self._reply, self._ticket)
        return self._format.first + events

    async def end(self, include_usage: bool, facts: Facts | None) -> None:
        request, answer_format = self._request, self._format
        reason = request.finish_reason
        assert reason is not None
        events = answer_format.finish(self._tail, reason.value, None if include_usage else facts)
        if include_usage:
            events += answer_format.usage(request.usage(), facts)
        await self._reply.end(self._opened(events).encode("ascii") + DONE)
