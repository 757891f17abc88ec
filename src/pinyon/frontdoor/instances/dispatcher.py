"""Runs requests on instances of pinyon, and says which part of the queue they wait in."""

from __future__ import annotations

from functools import lru_cache

from pinyon.frontdoor.instances.ask import Ask
from pinyon.frontdoor.instances.recorder import Recorder
from pinyon.frontdoor.instances.request import Request, Take
from pinyon.frontdoor.line import Turn
from pinyon.frontdoor.request_loop import RequestLoop
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.routing_keys import keys_of_blocks, routing_root, token_keys
from pinyon.routing.target_policy import Routed

ROOTS_MAX = 4096


def routed(ask: Ask, models: ServedModels, secret: bytes) -> Routed:
    """Returns what the target of a request is chosen by: keys of its prompt, which start from ``secret``, the
    cluster's, and whose it is. It is remembered of every request, whoever chooses, so it must cost little."""
    whose = ask.request_class
    if not models.selective and ask.block_keys:
        # Where a conductor chooses and there are no other regions, those that are made for it will do.
        keys = keys_of_blocks(ask.block_keys)
    else:
        keys = token_keys(_root(ask.model, whose.tenant, secret, whose.cache_salt), ask.tokens_le32)
    key = whose.session or whose.user
    return Routed(keys, f"{whose.tenant}/{key}" if key else "")


@lru_cache(maxsize=ROOTS_MAX)
def _root(model: str, tenant: str, secret: bytes, cache_salt: str) -> bytes:
    return routing_root(model, tenant, secret, cache_salt)


class Dispatcher:
    """One per load balancer. Every request runs in the task that calls :meth:`run`."""

    def __init__(self, loop: RequestLoop[Request], models: ServedModels, secret: bytes, recorder: Recorder) -> None:
        self._loop = loop
        self._models, self._secret = models, secret
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
            target = routed(ask, self._models, self._secret)
            request.depart(self._models.of(ask.model), target, whose.geographies, whose.tenant)
