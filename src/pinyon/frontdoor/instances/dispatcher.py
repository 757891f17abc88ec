"""Runs requests on instances of pinyon, and says which part of the queue they wait in."""

from __future__ import annotations

from pinyon.frontdoor.instances.ask import Ask
from pinyon.frontdoor.instances.recorder import Recorder
from pinyon.frontdoor.instances.request import Request, Take
from pinyon.frontdoor.line import Turn
from pinyon.frontdoor.request_loop import RequestLoop
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.routing_keys import keys_of_blocks, routing_root, token_keys
from pinyon.routing.target_policy import Routed

ROOTS_MAX = 4096


class Routing:
    """What requests are routed by: keys of their prompts, and whose they are. Keys start from ``secret``, the
    cluster's."""

    def __init__(self, models: ServedModels, secret: bytes) -> None:
        self._models = models
        self._secret = secret
        self._roots: dict[tuple[str, str, str], bytes] = {}

    def routed(self, ask: Ask) -> Routed:
        """Returns what the target of a request is chosen by. It is remembered of every request, whoever chooses, so it
        must cost little."""
        whose = ask.request_class
        key = whose.session or whose.user
        return Routed(self._keys(ask), f"{whose.tenant}/{key}" if key else "")

    def _keys(self, ask: Ask) -> bytes:
        """Where a conductor chooses and there are no other regions, those that are made for it will do."""
        if not self._models.selective and ask.block_keys:
            return keys_of_blocks(ask.block_keys)
        whose = ask.request_class
        name = ask.model, whose.tenant, whose.cache_salt
        root = self._roots.get(name)
        if root is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[name] = routing_root(ask.model, whose.tenant, self._secret, whose.cache_salt)
        return token_keys(root, ask.tokens_le32)


class Dispatcher:
    """One per load balancer. Every request runs in the task that calls :meth:`run`."""

    def __init__(self, loop: RequestLoop[Request], models: ServedModels, secret: bytes, recorder: Recorder) -> None:
        self._loop = loop
        self._models = models
        self._routing = Routing(models, secret)
        self._recorder = recorder

    async def run(self, request: Request, ticket: Turn, take: Take) -> None:
        """Until the request has its ``finish_reason``, ``take`` what is new for the client; of a whole one all at once.

        Raises the :class:`PinyonError` it failed with, and what ``take`` does. It leaves the ticket; wherever it ends,
        also by cancelling, nothing of the request is left on any hop.
        """
        self._depart(request)
        request.take = take
        try:
            await self._loop.run(request, ticket)
        finally:
            request.take = None
            self._recorder.ended(request)
        if request.whole and (doing := take(request.held())) is not None:
            await doing

    def demand(self, request: Request) -> int:
        """The number of what it may go to, which it waits for in the queue."""
        self._depart(request)
        return self._models.demand(request.served, request.route)

    def _depart(self, request: Request) -> None:
        if not request.departed:
            ask, whose = request.ask, request.ask.request_class
            request.depart(self._models.of(ask.model), self._routing.routed(ask), whose.geographies, whose.tenant)
