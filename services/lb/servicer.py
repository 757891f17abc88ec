"""The gRPC front door, whose requests take the same path as those of HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc

from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import NO_LIMIT, SAMPLING_FIELDS, check_geographies
from pinyon.frontdoor.access_log import grpc_call, metadata
from pinyon.frontdoor.admission import TenantAdmission, Ticket
from pinyon.frontdoor.auth import ApiKeys, Client
from pinyon.frontdoor.failures import late
from pinyon.frontdoor.head import Labels, classify, traceparent
from pinyon.frontdoor.instances.kind import Dispatcher
from pinyon.frontdoor.instances.prompts import Prompts, prompts_of
from pinyon.frontdoor.instances.request import Delta, Request, Terms, facts_of
from pinyon.frontdoor.served_models import ServedModels
from pinyon.messages.enums import finish_reason_to_proto
from pinyon.messages.sampling import sampling_from_proto
from pinyon.openai.parse import Call, PromptInput, Rendering
from pinyon.runtime.callers import ANYBODY, Callers
from pinyon.runtime.first_message import Doors

LB_CALLERS: Callers = {
    # Callers are users' programs: the servicer checks their API keys.
    "Generate": ANYBODY,
    "ListModels": ANYBODY,
    "WhereTo": ANYBODY,
}

Context = grpc.aio.ServicerContext[Any, Any]

_LABELS = ("kind", "turn", "session", "user", "cache_salt", "no_store")
_SAMPLING = frozenset(each.name for each in SAMPLING_FIELDS)


@dataclass(slots=True, eq=False)
class LbServicer(lb_pb2_grpc.LbServiceServicer):
    """Converts messages to values, dispatches requests and converts values to messages."""

    admission: TenantAdmission
    dispatcher: Dispatcher
    models: Mapping[str, Prompts]
    keys: ApiKeys
    ways: ServedModels
    timeout_s: float
    clock: Clock
    unix_clock: Clock = time.time

    @property
    def doors(self) -> Doors:
        """Returns the checks that reject a caller without a key or a place before a message is read."""
        return {"Generate": self._enter, "ListModels": self._known, "WhereTo": self._known}

    def _known(self, context: Context) -> str:
        return self._client(context).tenant

    def _enter(self, context: Context) -> str:
        client = self._client(context)
        self.admission.check(client)
        return client.tenant

    async def ListModels(self, request: lb_pb2.ListModelsRequest, context: Context) -> lb_pb2.ListModelsResponse:
        self._client(context)
        return lb_pb2.ListModelsResponse(
            models=[
                lb_pb2.Model(name=each.model, max_context_tokens=each.max_context()) for each in self.models.values()
            ]
        )

    async def WhereTo(self, request: lb_pb2.WhereToRequest, context: Context) -> lb_pb2.WhereToResponse:
        client = self._client(context)
        model = prompts_of(self.models, request.model or None).model
        labels = Labels(geographies=check_geographies(tuple(request.geographies), "geographies"))
        whose = classify(labels, Call(model=model, prompt="", prompt_field="prompt"), client, self.unix_clock())
        found = self.ways.dry_run(self.ways.of(model), whose.geographies, whose.tenant)
        return lb_pb2.WhereToResponse(
            ways=[
                lb_pb2.Way(region=region, lb_id=target, allowed=allowed, available=available, reason=reason)
                for region, target, allowed, available, reason in found
            ]
        )

    async def Generate(self, request: lb_pb2.GenerateRequest, context: Context) -> None:
        """Writes responses itself, so that a cancellation always arrives here, where everything is released at once."""
        arrived_s, arrived_unix_s = self.clock(), self.unix_clock()
        client, seen = self._client(context), grpc_call()
        left_s = context.time_remaining()
        timeout_s = self.timeout_s if left_s is None else max(0.001, min(left_s, self.timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                with self.admission.admit(client) as ticket:
                    parent = traceparent(metadata(context, "traceparent"))
                    wishes = (request.no_reuse, request.ttft_slo_ms, parent)
                    terms = Terms(arrived_s, arrived_s + timeout_s, False, *wishes)
                    state = await self._request(request, client, arrived_unix_s, terms, seen.log_id)
                    seen.facts = partial(facts_of, (state,))
                    await self._serve(state, ticket, context, seen.request_id)
        except TimeoutError:
            if timeout_s < self.timeout_s:
                raise late(timeout_s, ", the call's deadline") from None
            raise late(timeout_s) from None

    async def _serve(self, state: Request, ticket: Ticket, context: Context, request_id: str) -> None:
        asks, told = state.sampling.prompt_logprobs, False
        last = lb_pb2.GenerateResponse(request_id=request_id)

        def take(delta: Delta) -> Awaitable[None] | None:
            nonlocal told, last
            message = lb_pb2.GenerateResponse(request_id=request_id, text=delta.text, tokens=delta.tokens)
            if delta.logprobs.logprobs:
                message.logprobs.CopyFrom(delta.logprobs)
            if asks and not told and delta.tokens:
                message.prompt_logprobs.CopyFrom(state.prompt_logprobs)
                told = True
            if state.finish_reason is not None:
                last = message
                return None
            return context.write(message)

        await self.dispatcher.run(state, ticket, take)
        assert state.finish_reason is not None
        last.finish_reason = finish_reason_to_proto(state.finish_reason)
        last.usage.CopyFrom(state.usage_message())
        await context.write(last)

    async def _request(
        self, request: lb_pb2.GenerateRequest, client: Client, arrived_unix_s: float, terms: Terms, log_id: str
    ) -> Request:
        """Returns the request. Raises :class:`InvalidArgument` or :class:`NotFound` naming the message's field."""
        call = _call(request, next(iter(self.models)))
        self.ways.check_own(call.model)
        try:
            request_class = classify(_labels(request.labels), call, client, arrived_unix_s)
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=f"labels.{error.field}") from None
        try:
            prompts = prompts_of(self.models, call.model)
            return (await prompts.requests(call, log_id, request_class, terms, holder=client.holder))[0]
        except InvalidArgument as error:
            kind = request.WhichOneof("input")
            field = error.field or ""
            if field in ("prompt", "messages") and kind is not None:
                field = kind
            elif field in _SAMPLING:
                field = f"sampling.{field}"
            raise InvalidArgument(error.message, field=field or None) from None

    def _client(self, context: Context) -> Client:
        client = self.keys.client(metadata(context, "authorization"))
        grpc_call().holder = client.holder
        return client


def _call(request: lb_pb2.GenerateRequest, default_model: str) -> Call:
    """Returns the message as the values that HTTP bodies also become; ``temperature`` 0 means greedy here."""
    kind = request.WhichOneof("input")
    field, prompt = "prompt", cast("PromptInput", request.prompt)
    if kind is None:
        raise InvalidArgument("one of prompt, prompt_tokens_le32 and conversation must be set", field="input")
    if kind == "prompt_tokens_le32":
        prompt = request.prompt_tokens_le32
        if len(prompt) % 4:
            raise InvalidArgument(f"{len(prompt)} bytes are no u32 tokens", field=kind)
        if request.HasField("add_special_tokens"):
            raise InvalidArgument("nothing is added to a prompt of tokens", field="add_special_tokens")
    elif kind == "conversation":
        field = "messages"
        prompt = [{"role": each.role, "content": each.content} for each in request.conversation.messages]
    call = Call(request.model or default_model, prompt, field)
    try:
        call.sampling = sampling_from_proto(request.sampling, NO_LIMIT)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"sampling.{error.field}") from None
    call.seeded = True
    if request.HasField("add_special_tokens"):
        call.rendering = Rendering(request.add_special_tokens)
    return call


def _labels(message: lb_pb2.RequestLabels) -> Labels:
    labels = Labels(**{name: getattr(message, name) for name in _LABELS})
    labels.priority = message.priority if message.HasField("priority") else None
    labels.geographies = tuple(message.geographies)
    return labels
