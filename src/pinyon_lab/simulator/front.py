"""The front of a simulated cluster: clients send requests, a queue admits them, and each of them ends once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.decisions import FrontDecisions
from pinyon.eviction import Traits
from pinyon.eviction.interface import kind_and_turn
from pinyon_lab.simulator.attempt import SimRequest
from pinyon_lab.simulator.clients import Clients
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.report import RequestOutcome
from pinyon_lab.simulator.virtual_time import VirtualTime
from pinyon_lab.simulator.workload import Arrival, answers, key_of


class Front:
    """The front of a cluster. It passes each admitted request to ``place``, with the time at which to give up, and
    tells ``log`` how each request ends."""

    def __init__(
        self,
        time: VirtualTime,
        settings: ClusterSettings,
        decisions: FrontDecisions,
        place: Callable[[SimRequest, float], None],
        log: Callable[..., None],
    ) -> None:
        self.queue = decisions.queue
        self.requests: dict[int, SimRequest] = {}
        """The requests that have not ended."""
        self._left = 0
        """The number of ended requests whose places have not been given to others yet."""
        self._time, self._settings = time, settings
        self._blocks_max = settings.hbm_tokens // settings.block_tokens
        self._place, self._log = place, log
        self._arrivals: Sequence[Arrival] = ()
        self._answers: dict[int, tuple[int, ...]] = {}
        self._clients = Clients(())
        self._outcomes: dict[int, RequestOutcome] = {}
        self._progress: Callable[[int], None] = lambda done: None

    def open(self, arrivals: Sequence[Arrival], clients: int, progress: Callable[[int], None]) -> None:
        """Lets the requests arrive from now on."""
        self._arrivals, self._clients, self._progress = arrivals, Clients(arrivals, clients), progress
        self._answers = answers(arrivals, self._settings.block_tokens)
        self._send(self._clients.first())

    def outcomes(self) -> list[RequestOutcome]:
        """Returns the outcomes of all requests once all have ended."""
        return [self._outcomes[number] for number in range(len(self._arrivals))]

    @property
    def over(self) -> bool:
        """True if all requests have ended."""
        return len(self._outcomes) == len(self._arrivals)

    def _send(self, due: Sequence[tuple[float, int]]) -> None:
        now_s = self._time.now_s
        for when_s, number in due:
            self._time.at(max(when_s, now_s), lambda number=number: self._arrive(number))  # type: ignore[misc]

    def _arrive(self, number: int) -> None:
        arrival, block_tokens = self._arrivals[number], self._settings.block_tokens
        traits, keeps = arrival.traits, self._settings.prefix_cache
        keys = tuple(map(key_of, arrival.blocks[: arrival.tokens // block_tokens] if keeps else ()))
        answer = tuple(map(key_of, self._answers.get(number, ())))
        sent = max(1, arrival.output_tokens), self._time.now_s
        request = SimRequest(number, keys, arrival.tokens, *sent, traits, _class_of(traits), answer, keeps)
        self.requests[number] = request
        if -(-(request.tokens + request.max_tokens) // block_tokens) > self._blocks_max:
            self.end(request, "too long")
        elif self._settings.path_s:
            self._time.after(self._settings.path_s, lambda: self._enter(request))
        else:
            self._enter(request)

    def _enter(self, request: SimRequest) -> None:
        """Takes a request at the front's door."""
        if request.ends:  # the client left while the request was under way
            return
        request.entered, number = True, request.number
        try:
            displaced = self.queue.reserve(number, request.traits.tenant, self._time.now_s)
        except ResourceExhausted:
            self.end(request, "refused")
            return
        if displaced is not None:
            self.requests[displaced].queued = False
            self.end(self.requests[displaced], "refused")
        if self.queue.enter(number, request.tokens + request.max_tokens, self._time.now_s):
            self._let_in(request)
        else:
            request.queued = True

    def _let_in(self, request: SimRequest) -> None:
        self._place(request, self._time.now_s + self._settings.placement_wait_s)

    def leave(self, request: SimRequest, how: str) -> None:
        """Ends an admitted request, and admits waiting ones in its place."""
        self.end(request, how)
        self._left += 1
        if self._left > 1:  # called from the loop below for a request rejected at once: the loop goes on
            return
        while self._left:
            following = self.queue.leave(self._time.now_s)
            if following is not None:
                waiting = self.requests[following]
                waiting.queued = False
                self._let_in(waiting)
            self._left -= 1

    def end(self, request: SimRequest, how: str) -> None:
        request.ends.append(how)
        request.ended_s = self._time.now_s
        self._log(how, request.number, request.attempts)
        attempt, request.attempt = request.attempt, None
        prefill, decode = ("", "") if attempt is None else attempt.names
        self._outcomes[request.number] = RequestOutcome.of(request, prefill, decode)
        del self.requests[request.number]
        self._progress(len(self._outcomes))
        self._send(self._clients.ended(request.number, self._time.now_s))


def _class_of(traits: Traits) -> RequestClass:
    """Returns the class that a load balancer would give a request; eviction learns it wherever blocks are used."""
    kind, turn = kind_and_turn(traits.category)
    try:
        return RequestClass(kind=kind, turn=max(1, turn), tenant=traits.tenant)
    except InvalidArgument:  # a trace may name kinds that no client could
        return UNKNOWN_CLASS
