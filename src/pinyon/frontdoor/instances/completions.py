"""``/v1/completions`` and ``/v1/chat/completions``, from a body to an answer, whole or as events; and ``/tokenize`` and
``/detokenize``."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pinyon.core.clock import Clock
from pinyon.core.errors import Internal
from pinyon.core.request import Usage
from pinyon.frontdoor.admission import TenantAdmission, Ticket
from pinyon.frontdoor.failures import broken_by
from pinyon.frontdoor.head import Head, classify
from pinyon.frontdoor.instances.kind import Dispatcher
from pinyon.frontdoor.instances.prompts import Prompts, prompts_of
from pinyon.frontdoor.instances.request import Delta, Request, Terms, facts_of
from pinyon.frontdoor.line import Place
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.http.answer import EVENT_STREAM, JSON, Reply, field
from pinyon.messages.logprobs import SentLogprobs
from pinyon.openai.choices import ChatChoices, Choice, Choices, CompletionChoices
from pinyon.openai.format import DONE, AnswerFormat, Facts, error_event
from pinyon.openai.large import is_large
from pinyon.openai.parse import Call, parse_detokenize, parse_tokenize
from pinyon.runtime.deadlines import TimeLimit

NO_CACHE = field(b"cache-control", "no-cache")
INLINE_ENTRIES = 4096
"""The log-probabilities and token ids that are formatted at once on the event loop, in about 5 ms."""
PIECE_TOKENS = 4096
"""The tokens that are written at once, in less than 1 ms."""
PIECE_CHARS = 64 << 10

Parse = Callable[[bytes | bytearray], Call]


@dataclass(slots=True, eq=False)
class Completions:
    """The handlers of these routes; ``timeout_s`` is for a whole request, from its head to its last byte."""

    admission: TenantAdmission
    dispatcher: Dispatcher
    models: Mapping[str, Prompts]
    off_loop: OffLoop
    timeout_s: float
    clock: Clock

    async def answer(
        self, parse: Parse, make_format: type[AnswerFormat], head: Head, body: bytes | bytearray, reply: Reply
    ) -> int:
        """Answers a call and returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        deadline_s = head.arrived_s + self.timeout_s
        try:
            with TimeLimit(deadline_s - self.clock()), self.admission.admit(head.client) as ticket:
                holder, now_s = head.client.holder, time.time()
                call = await self.off_loop.run(holder, parse, body) if is_large(body) else parse(body)
                request_class = classify(head.labels, call, head.client, now_s, "x-pinyon-geographies")
                prompts, created_s = prompts_of(self.models, call.model), int(now_s)
                wishes = (head.no_reuse, head.ttft_slo_ms, head.traceparent)
                terms = Terms(head.arrived_s, deadline_s, not call.stream, *wishes)
                requests = await prompts.requests(
                    call, head.log_id, request_class, terms, holder=holder, numbered=not call.plain
                )
                head.facts = partial(facts_of, requests)
                if not call.plain:
                    await _Choices(self, prompts, call, requests, head, reply, ticket, created_s).run()
                    return 200
                request = requests[0]
                answer_format = make_format(head.unique, call.model, created_s, call.include_usage)
                text = _OneText(request, ticket, answer_format, reply)
                await self.dispatcher.run(request, ticket, text.take)
                await text.end(call.include_usage, self.facts(head, requests))
            return 200
        except Exception as raised:
            error = broken_by(raised, reply, self.timeout_s, head.log_id)
        # The status line has gone out as 200, so the error travels as an event.
        head.broken = error.grpc_code.lower()
        await reply.end(error_event(error) + DONE)
        return 200

    async def tokenize(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Answers with the tokens of a text, as vLLM does. Takes no place in the queue, but counts in the limit of the
        tenant per minute. Long work runs beside the event loop, where places are limited."""
        self.admission.count(head.client)
        holder = head.client.holder
        call = await self.off_loop.run_large(is_large(body), holder, parse_tokenize, body)
        prompts = prompts_of(self.models, call.model)
        tokens = await prompts.tokenize(call.prompt, call.prompt_field, call.rendering, holder)
        arguments = (prompts, tokens, call.strings)
        answer = await self.off_loop.run_large(len(tokens) // 4 > PIECE_TOKENS, holder, _tokenized, *arguments)
        reply.whole(200, answer, JSON)
        return 200

    async def detokenize(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Answers with the text of tokens. Counts as :meth:`tokenize` does."""
        self.admission.count(head.client)
        holder = head.client.holder
        model, tokens = await self.off_loop.run_large(is_large(body), holder, parse_detokenize, body)
        text = await prompts_of(self.models, model).decode(tokens, "tokens", holder, skip_special_tokens=False)
        answer = await self.off_loop.run_large(len(text) > PIECE_CHARS, holder, _detokenized, text)
        reply.whole(200, answer, JSON)
        return 200

    def facts(self, head: Head, requests: Sequence[Request]) -> Facts | None:
        """Returns the facts about all requests of one call, if the client asked for them."""
        if not head.report:
            return None
        reports = [request.report(self.clock()) for request in requests]
        return reports[0] if len(reports) == 1 else {"choices": reports}


class _OneText:
    """The answer to a call that wants one text. A stream begins with the first text: until then, a failure still has a
    status of its own. From then on text goes out as it comes, and :meth:`take` is called only while the client does not
    keep up."""

    def __init__(self, request: Request, ticket: Ticket, answer_format: AnswerFormat, reply: Reply) -> None:
        self._request = request
        self._ticket = ticket
        self._format = answer_format
        self._reply = reply
        self._tail = ""
        """The text that came with the last update: all of it, if the answer is not streamed."""

    def take(self, delta: Delta) -> Awaitable[None] | None:
        request = self._request
        if request.finish_reason is not None:
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
        _begin_events(self._reply, self._ticket)
        return self._format.first + events

    async def end(self, include_usage: bool, facts: Facts | None) -> None:
        request, answer_format = self._request, self._format
        if request.whole:
            body = answer_format.whole(self._tail, request.outcome, request.usage(), facts)
            self._reply.whole(200, body, JSON, self._ticket.rate_fields)
            return
        events = answer_format.finish(self._tail, request.outcome, None if include_usage else facts)
        if include_usage:
            events += answer_format.usage(request.usage(), facts)
        await self._reply.end(self._opened(events).encode("ascii") + DONE)


class _Choices:
    """The answer to a call that wants more than one text: several choices or prompts, echoes, log-probabilities, token
    ids. Its choices run side by side."""

    def __init__(
        self,
        owner: Completions,
        prompts: Prompts,
        call: Call,
        requests: Sequence[Request],
        head: Head,
        reply: Reply,
        ticket: Ticket,
        created_s: int,
    ) -> None:
        """Takes the time that the answer states as its creation (Unix time)."""
        self._owner, self._prompts = owner, prompts
        self._call, self._requests = call, requests
        self._head, self._reply, self._ticket = head, reply, ticket
        self._waiting: deque[int] = deque()
        """The choices that do not run yet."""
        self._writing = asyncio.Lock()
        make = ChatChoices if call.prompt_field == "messages" else CompletionChoices
        self._format: Choices = make(head.unique, created_s, call, prompts.tokenizer, prompts.texts)
        prompts_of = [memoryview(request.tokens_le32).cast("I") for request in requests]
        self._choices = [Choice(index, tokens) for index, tokens in enumerate(prompts_of)]

    async def run(self) -> None:
        """Writes the answer. Raises the :class:`PinyonError` of the first failed choice; then none runs any more."""
        requests, ticket = self._requests, self._ticket
        try:
            total, first = sum(request.tokens_wanted for request in requests), requests[0]
            demand = self._owner.dispatcher.demand(first)
            if not ticket.enter(total, priority=first.priority, demand=demand):
                await ticket.wait()
            ticket.release()  # each choice gets a target of its own
            if self._call.echo:
                await self._read_prompts()
            await self._run_all()
        finally:
            ticket.leave(sum(request.used_tokens for request in requests))
        usage, facts = self._usage(), self._owner.facts(self._head, requests)
        if self._call.stream:
            await self._reply.end(self._format.usage(usage, facts) + DONE)
        else:
            large = sum(map(self._format.entries, self._choices)) > INLINE_ENTRIES
            run = self._owner.off_loop.run_large
            body = await run(large, self._head.client.holder, self._format.whole, self._choices, usage, facts)
            self._reply.whole(200, body, JSON, ticket.rate_fields)

    async def _run_all(self) -> None:
        """Runs all choices. The call's own slot runs one after the other, so the call ends however full the queue is,
        and never waits for a second slot. Spare slots run others at the same time, each one choice; then a waiting
        request gets the slot. Raises the first error, when all choices have ended."""
        waiting = self._waiting
        waiting.extend(range(len(self._requests)))
        try:
            async with asyncio.TaskGroup() as group:
                while waiting:
                    index = waiting.popleft()
                    self._spread(group)
                    await self._run(index)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _spread(self, group: asyncio.TaskGroup) -> None:
        while self._waiting and (place := self._ticket.spare()) is not None:
            task = group.create_task(self._run_in(place, group, self._waiting.popleft()))
            task.add_done_callback(partial(_leave, place))

    async def _run_in(self, place: Place, group: asyncio.TaskGroup, index: int) -> None:
        place.release()
        await self._run(index)
        place.leave()
        self._spread(group)

    async def _read_prompts(self) -> None:
        call = self._call
        for number, prompt in enumerate((call.prompt, *call.others)):
            first = number * call.n
            text = prompt
            if type(prompt) is bytes:
                text = await self._prompts.decode(prompt, "prompt", self._head.client.holder)
            for choice in self._choices[first : first + call.n]:
                choice.prompt_text = str(text)

    async def _run(self, index: int) -> None:
        call, request, choice = self._call, self._requests[index], self._choices[index]
        rich = call.sampling.logprobs >= 0 or call.return_token_ids

        def take(delta: Delta) -> Awaitable[None] | None:
            self._add(request, choice, delta)
            if call.stream and request.finish_reason is None and (choice.text or (rich and choice.tokens)):
                return self._send(choice)
            return None

        await self._owner.dispatcher.run(request, None, take)
        choice.reason = "length" if call.unseen else request.outcome
        if not call.unseen:
            choice.completion_tokens = request.usage().completion_tokens
        if call.stream:
            await self._send(choice)

    def _add(self, request: Request, choice: Choice, delta: Delta) -> None:
        call = self._call
        if call.sampling.logprobs >= 0:
            missing = len(delta.logprobs.logprobs) != len(delta.tokens)
            if call.sampling.prompt_logprobs and not choice.begun:
                missing = missing or len(request.prompt_logprobs.logprobs) != len(choice.prompt_tokens) - 1
                choice.prompt_logprobs = SentLogprobs(request.prompt_logprobs)
            if missing:
                raise Internal("The instance did not tell the log-probabilities that were asked for.")
        if call.unseen:
            return
        choice.text += delta.text
        choice.tokens += delta.tokens
        if delta.logprobs.logprobs:
            told = choice.logprobs
            if not isinstance(told, SentLogprobs):
                told = choice.logprobs = SentLogprobs()
            told.add(delta.logprobs)
        choice.completion_tokens += len(delta.tokens)

    async def _send(self, choice: Choice) -> None:
        """Sends the news of a choice, one choice at a time, as the client reads one stream."""
        async with self._writing:
            events = b"" if choice.begun else self._format.begin(choice)
            large = self._format.entries(choice) > INLINE_ENTRIES
            run = self._owner.off_loop.run_large
            events += await run(large, self._head.client.holder, self._format.event, choice)
            if not self._reply.begun:
                _begin_events(self._reply, self._ticket)
            await self._reply.send(events)

    def _usage(self) -> Usage:
        """Returns the usage of the call. Each prompt counts once, with the tokens that its first choice reused."""
        firsts = [request.usage() for request in self._requests[:: self._call.n]]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(choice.completion_tokens for choice in self._choices),
            sum(usage.cached_tokens for usage in firsts),
        )


def _leave(place: Place, _: asyncio.Task[None]) -> None:
    place.leave()


def _begin_events(reply: Reply, ticket: Ticket) -> None:
    """Begins a streamed answer."""
    reply.begin(EVENT_STREAM, NO_CACHE + ticket.rate_fields)


def _tokenized(prompts: Prompts, tokens: bytes, strings: bool) -> bytes:
    ids = np.frombuffer(tokens, "<u4")
    # in pieces, so that other threads get the GIL in between
    pieces = [ids[at : at + PIECE_TOKENS].tolist() for at in range(0, len(ids), PIECE_TOKENS)]
    numbers = ",".join([",".join(map(str, piece)) for piece in pieces])
    texts = "null"
    if strings:
        texts = "[" + ",".join([json.dumps(prompts.texts.pieces(piece))[1:-1] for piece in pieces]) + "]"
    return (
        f'{{"count":{len(ids)},"max_model_len":{prompts.max_context()},"tokens":[{numbers}],"token_strs":{texts}}}'
    ).encode("ascii")


def _detokenized(text: str) -> bytes:
    pieces = [json.dumps(text[start : start + PIECE_CHARS])[1:-1] for start in range(0, len(text), PIECE_CHARS)]
    return f'{{"prompt":"{"".join(pieces)}"}}'.encode("ascii")
