"""The handling of HTTP requests for models that instances with a server serve: read, tokenized, run by the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from xxhash import xxh3_128_hexdigest

from pinyon.core.block_keys import salt_of
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument, NotFound, Unavailable
from pinyon.core.request import LABEL_CHARS_MAX, RequestClass, SamplingParams, check_label
from pinyon.frontdoor.admission import TenantAdmission
from pinyon.frontdoor.head import Head, classify
from pinyon.frontdoor.instances.prompts import Prompts
from pinyon.frontdoor.instances.request import Request, Terms
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.frontdoor.request_loop import RequestLoop
from pinyon.frontdoor.routes import Generate
from pinyon.frontdoor.served_model import ServedModel
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.servers.body import SALT, without
from pinyon.frontdoor.servers.given_prompt import CHAT, COMPLETION, given_prompt
from pinyon.frontdoor.servers.instance_servers import InstanceServers
from pinyon.frontdoor.servers.request import ServerRequest
from pinyon.frontdoor.servers.so_far import followed
from pinyon.frontdoor.upstreams.forward import Forward, Incoming
from pinyon.frontdoor.upstreams.forwarding import Forwarding, server_fields
from pinyon.frontdoor.upstreams.reading import PROMPTS, Asked, read_with_values
from pinyon.http.answer import HttpError, Reply
from pinyon.messages.plan import FIELD
from pinyon.openai.format import model_object
from pinyon.openai.large import is_large
from pinyon.openai.parse import Call
from pinyon.runtime.logging import get_logger

_BESIDE: Final = frozenset(("/tokenize", "/detokenize"))
"""The paths that are not below ``/v1/`` and go to servers all the same."""
_BEGINNINGS: Final = (b"/v1/", b"/tokenize", b"/detokenize")
_OURS: Final = frozenset((FIELD, "ec_transfer_params"))
"""The fields that no client may send."""

_log = get_logger("lb.servers")


class ServerDoor(Forwarding):
    """The handler of requests for servers of instances, one per load balancer; see :class:`Forwarding`."""

    def __init__(
        self,
        admission: TenantAdmission,
        models: ServedModels,
        loop: RequestLoop[Forward],
        off_loop: OffLoop,
        request_s: float,
        default_tokens: int,
        secret: bytes,
        clock: Clock,
        servers: InstanceServers,
        prompts: Mapping[str, Prompts],
    ) -> None:
        super().__init__(admission, models, loop, off_loop, request_s, default_tokens, secret, clock)
        self.servers, self.prompts = servers, prompts
        self._created_s = int(time.time())

    async def choose(self, own: Generate | None, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Serves a request for a model of servers, and hands any other one to ``own``. Raises as :meth:`serve`."""
        if not self.servers and own is not None:
            return await own(head, body, reply)
        assert head.raw is not None
        large, tenant = is_large(body), head.client.tenant
        arguments = (head.path, head.raw.content_type, body, self.secret, self.default_tokens, tenant)
        try:
            asked, values = await self.off_loop.run_large(
                large, head.client.holder, partial(read_with_values, large=large), *arguments
            )
            served, adapter = self._served(asked.model)
        except (InvalidArgument, NotFound, Unavailable):
            if own is None:
                raise
            return await own(head, body, reply)  # which has its own words for that
        if served is None:
            if own is None:
                raise HttpError(404, f"The model '{asked.model}' is not served at this path.")
            return await own(head, body, reply)
        with self.admission.admit(head.client) as ticket:
            incoming = Incoming(ticket, self.request_s)
            read = partial(self._prepare, head, body, asked, values, served, adapter, reply, incoming)
            return await self.run(head, reply, incoming, read)

    def described(self) -> Iterator[Mapping[str, Any]]:
        """Yields the models without a folder here, and the adapters, as OpenAI's interface describes models."""
        announced = {each.info.model: each.info for each in self.servers if each.info.model not in self.prompts}
        for model, info in announced.items():
            yield model_object(model, self._created_s, info.max_context_tokens)
        yield from self.servers.described().values()

    def _served(self, name: str) -> tuple[ServedModel | None, str]:
        """Returns the model that servers serve under this name, and the adapter if it is one; None for other models.
        Raises as :meth:`ServedModels.of`."""
        base = "" if name in self.models.by_name else self.servers.base_of(name)
        served = self.models.of(base or name)
        return (served if served.by_servers else None), (name if base else "")

    async def _prepare(
        self,
        head: Head,
        body: bytes | bytearray,
        asked: Asked,
        values: dict[str, Any] | None,
        served: ServedModel,
        adapter: str,
        reply: Reply,
        incoming: Incoming,
    ) -> Forward:
        assert head.raw is not None
        if b"#" in head.raw.target or not head.raw.target.startswith(_BEGINNINGS):
            # As for other servers, the server must be asked for the path that was checked here.
            raise HttpError(404, f"Invalid URL (POST {head.path[:LABEL_CHARS_MAX]})")
        whose = self._class(head, asked, values or {}, served.name)
        if values is None and head.client.holder:
            raise InvalidArgument("This model's servers cannot keep the KV of forms apart by tenant.")
        beside = (values or {}).get("vllm_xargs")
        if type(beside) is dict and (ours := _OURS.intersection(beside)):
            raise InvalidArgument(f"vllm_xargs must not have {min(ours)}.", field="vllm_xargs")
        added = values is not None and head.path not in _BESIDE
        salt = salt_of(head.client.holder, whose.cache_salt, self.secret) if added else ""
        tokens, keys = await self._tokens(served.name, values, salt, adapter, head)
        limit = max(0, asked.tokens - asked.prompt_tokens)
        if count := len(tokens) // 4:
            asked = asked._replace(prompt_tokens=count, tokens=count + limit)
        deadline_s = head.arrived_s + incoming.limit_s
        terms = Terms(head.arrived_s, deadline_s, False, head.no_reuse, head.ttft_slo_ms, head.traceparent)
        sampling = SamplingParams(max_tokens=max(1, limit))
        asks = Request(head.log_id, served.name, whose, tokens, keys, sampling, terms)
        asks.tokens_wanted = 1  # whether it fits, the server says
        forward = ServerRequest(head, body, asked, server_fields(head), reply, incoming)
        forward.asks, forward.keyed, forward.adapter = asks, bool(tokens), adapter
        forward.planned, forward.salt = head.path in PROMPTS, salt
        forward.failed_at = {}
        forward.so_far = followed(head.path, values or {})
        if values is not None and added:
            theirs = _OURS.union((SALT,) if salt else ())
            if not theirs.isdisjoint(values):
                large = is_large(body)
                forward.body = await self.off_loop.run_large(large, head.client.holder, without, body, theirs)
        self.depart(forward, served)
        asks.served, asks.route = forward.served, forward.route
        return forward

    async def _tokens(
        self, model: str, values: dict[str, Any] | None, salt: str, adapter: str, head: Head
    ) -> tuple[bytes, bytes]:
        """Returns a prompt's tokens and block keys; empty ones if it is placed by its text."""
        prompts = self.prompts.get(model)
        if values is None or prompts is None or head.path not in (CHAT, COMPLETION):
            return b"", b""
        try:
            given = given_prompt(head.path, values)
            if given is not None:
                if self.servers.differs(model, given.kinds):
                    return b"", b""
                known_as = self.servers.named(adapter) if adapter else ""
                return await prompts.given(given.prompt, given.rendering, salt, known_as, head.client.holder)
        except Exception as error:  # the server may take it all the same
            _log.debug("the prompt of %s is placed by its text: %r", head.log_id, error)
        self.servers.warn(model, "unread", "some prompts have images, or a form that only its servers know")
        return b"", b""

    @staticmethod
    def _class(head: Head, asked: Asked, values: Mapping[str, Any], model: str) -> RequestClass:
        """Returns the request's class. What the client says in its body is never refused here."""
        messages, salt = values.get("messages"), values.get(SALT)
        call = Call(model, "", "prompt" if messages is None else "messages")
        if type(messages) is list and all(type(each) is dict for each in messages):
            call.prompt = messages
        call.user, call.priority = _label(asked.user), asked.priority
        call.cache_salt = _label(salt) if type(salt) is str else ""
        return classify(head.labels, call, head.client, time.time(), "x-pinyon-geographies")


def _label(text: str) -> str:
    """Returns a client's text as a label: itself if it is one, else its hash."""
    try:
        return check_label(text, "label")
    except InvalidArgument:
        return xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))
