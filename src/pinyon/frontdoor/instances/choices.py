"""Answers to calls that want more than one text: several choices or prompts, echoes, log-probabilities, token ids."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import NamedTuple

from pinyon.core.clock import Clock
from pinyon.core.errors import Internal
from pinyon.core.request import Usage
from pinyon.frontdoor.admission import Ticket
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.instances.ask import Ask
from pinyon.frontdoor.instances.dispatcher import Dispatcher
from pinyon.frontdoor.instances.prompts import Prompts
from pinyon.frontdoor.instances.request import Delta, Request, facts_of
from pinyon.frontdoor.line import Place, Turn
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.frontdoor.rate_limits import rate_fields
from pinyon.http.answer import EVENT_STREAM, JSON, Reply, field
from pinyon.messages.logprobs import SentLogprobs
from pinyon.openai.choices import ChatChoices, Choice, Choices, CompletionChoices
from pinyon.openai.format import DONE, Facts
from pinyon.openai.parse import Call

NO_CACHE = field(b"cache-control", "no-cache")
INLINE_ENTRIES = 4096
"""The log-probabilities and token ids that are formatted at once on the event loop, in about 5 ms."""
_GRANTED = Turn()
"""The turn of a choice, whose slot is held for it."""


def begin_events(reply: Reply, ticket: Ticket) -> None:
    """Begins a streamed answer."""
    reply.begin(EVENT_STREAM, NO_CACHE + rate_fields(ticket.levels))


class AnswerTools(NamedTuple):
    """The tools and values that answers are made with."""

    dispatcher: Dispatcher
    prompts: Prompts
    off_loop: OffLoop
    clock: Clock
    created_s: int
    """The time that the answer states as its creation (Unix time)."""


class ChoicesAnswer:
    """The answer to one call, whose choices run side by side."""

    def __init__(
        self,
        call: Call,
        asks: Sequence[Ask],
        head: Head,
        reply: Reply,
        ticket: Ticket,
        deadline_s: float,
        tools: AnswerTools,
    ) -> None:
        self._call = call
        self._head = head
        self._tools = tools
        self._reply = reply
        self._ticket = ticket
        self._waiting: deque[int] = deque()
        """The choices that do not run yet."""
        self._writing = asyncio.Lock()
        make = ChatChoices if call.prompt_field == "messages" else CompletionChoices
        self._format: Choices = make(head.unique, tools.created_s, call, tools.prompts.tokenizer, tools.prompts.texts)
        self._requests = [Request(ask, head.arrived_s, deadline_s, whole=not call.stream) for ask in asks]
        head.facts = partial(facts_of, self._requests)
        self._choices = [
            Choice(index, memoryview(ask.tokens_le32).cast("I")) for index, ask in enumerate(asks)
        ]  # fmt: skip

    async def run(self) -> None:
        """Writes the answer. Raises the :class:`PinyonError` of the first failed choice; then none runs any more."""
        requests, ticket = self._requests, self._ticket
        try:
            total, first = sum(request.tokens_wanted for request in requests), requests[0]
            demand = self._tools.dispatcher.demand(first)
            if not ticket.enter(total, priority=first.priority, demand=demand):
                await ticket.wait()
            ticket.release()  # each choice gets a target of its own
            if self._call.echo:
                await self._read_prompts()
            await self._run_all()
        finally:
            ticket.leave(sum(request.used_tokens for request in requests))
        if self._call.stream:
            await self._reply.end(self._format.usage(self._usage(), self._facts()) + DONE)
        else:
            arguments = (self._choices, self._usage(), self._facts())
            if sum(map(self._format.entries, self._choices)) > INLINE_ENTRIES:
                body = await self._tools.off_loop.run(self._head.client.holder, self._format.whole, *arguments)
            else:
                body = self._format.whole(*arguments)
            self._reply.whole(200, body, JSON, rate_fields(ticket.levels))

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
                text = await self._tools.prompts.decode(prompt, "prompt", self._head.client.holder)
            for choice in self._choices[first : first + call.n]:
                choice.prompt_text = str(text)

    async def _run(self, index: int) -> None:
        call, request, choice = self._call, self._requests[index], self._choices[index]
        rich = call.sampling.logprobs >= 0 or call.return_token_ids

        def take(delta: Delta) -> Awaitable[None] | None:
            self._add(request, choice, delta)
            if call.stream and not request.finished and (choice.text or (rich and choice.tokens)):
                return self._send(choice)
            return None

        await self._tools.dispatcher.run(request, _GRANTED, take)
        assert request.finish_reason is not None
        choice.reason = "length" if call.unseen else request.finish_reason.value
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
            if self._format.entries(choice) > INLINE_ENTRIES:
                events += await self._tools.off_loop.run(self._head.client.holder, self._format.event, choice)
            else:
                events += self._format.event(choice)
            if not self._reply.begun:
                begin_events(self._reply, self._ticket)
            await self._reply.send(events)

    def _usage(self) -> Usage:
        """Returns the usage of the call. Each prompt counts once, with the tokens that its first choice reused."""
        firsts = [request.usage() for request in self._requests[:: self._call.n]]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(choice.completion_tokens for choice in self._choices),
            sum(usage.cached_tokens for usage in firsts),
        )

    def _facts(self) -> Facts | None:
        if not self._head.report:
            return None
        reports = [request.report(self._tools.clock()) for request in self._requests]
        return reports[0] if len(reports) == 1 else {"choices": reports}


def _leave(place: Place, _: asyncio.Task[None]) -> None:
    place.leave()
