"""The dispatcher: runs requests on instances of pinyon, and computes the demand that they wait with."""

from __future__ import annotations

from functools import lru_cache

from pinyon.frontdoor.instances.recorder import Recorder
from pinyon.frontdoor.instances.request import Request, Take
from pinyon.frontdoor.line import Place
from pinyon.frontdoor.request_loop import RequestLoop
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.routing_keys import keys_of_blocks, routing_root, token_keys
from pinyon.routing.target import Routed
from pinyon.routing.two_layers import RoutedRequest

ROOTS_MAX = 4096


def routed(request: Request, models: ServedModels, secret: bytes) -> Routed:
    """Returns what the target of a request is chosen by: keys of its prompt, starting from the cluster's ``secret``,
    and its session or user. It must be cheap, as it is recorded for every request, whatever chooses the target."""
    whose = request.request_class
    if not models.selective and request.block_keys:
        # Where a conductor chooses and there are no other regions, the block keys made for it are good enough.
        keys = keys_of_blocks(request.block_keys)
    else:
        keys = token_keys(_root(request.model, whose.tenant, secret, whose.cache_salt), request.tokens_le32)
    key = whose.session or whose.user
    return Routed(keys, f"{whose.tenant}/{key}" if key else "")


@lru_cache(maxsize=ROOTS_MAX)
def _root(model: str, tenant: str, secret: bytes, cache_salt: str) -> bytes:
    return routing_root(model, tenant, secret, cache_salt)


class Dispatcher:
    """The dispatcher of a load balancer. Every request runs in the task that calls :meth:`run`."""

    def __init__(self, loop: RequestLoop[Request], models: ServedModels, secret: bytes, recorder: Recorder) -> None:
        self._loop = loop
        self._models, self._secret = models, secret
        self._recorder = recorder

    async def run(self, request: Request, ticket: Place | None, take: Take) -> None:
        """Runs the request until it has its ``finish_reason``. ``take`` gets its news; for a whole answer, all at once.

        Raises the :class:`PinyonError` it failed with, and what ``take`` raises. However it ends, even if cancelled,
        its ticket is left and no hop keeps anything of it.
        """
        target, whose = routed(request, self._models, self._secret), request.request_class
        request.depart(self._models.of(request.model), target, whose.geographies, whose.tenant)
        request.take = take
        try:
            await self._loop.run(request, ticket)
        finally:
            request.take = None
            self._recorder.ended(request)
        if request.whole and (doing := take(request.held())) is not None:
            await doing

    def demand(self, request: Request) -> int:
        """Returns the demand of the request: the number of the set of targets that it waits for in the queue."""
        # The keys of its prompt say nothing about that: they are made when it runs.
        whose = request.request_class
        route = RoutedRequest(Routed(), whose.geographies, whose.tenant, request.sender, request.exclude)
        return self._models.demand(self._models.of(request.model), route)
