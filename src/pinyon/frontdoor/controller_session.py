"""The load balancer's stream to the regional controller: reports of its identity and load, and news of the federation.

No request waits for the controller. While it is away, the load balancer goes on with the last federation. For how long
it keeps adopted clusters then, :meth:`pinyon.federation.view.Federation.adopted_now` says.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import suppress

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.federation.view import Cluster, Federation, LbInfo
from pinyon.messages.federation import (
    LATENCIES_MAX,
    federation_from_proto,
    federation_to_proto,
    lb_info_to_proto,
)
from pinyon.runtime.channel import OpenSession, open_session
from pinyon.runtime.duplex import Dialed, Method, Redialer
from pinyon.runtime.logging import get_logger

PERIOD_S = 1.0
GAP_S = 0.05
"""The minimum time between two reports; changes in between travel together."""
LEASE_S = 5.0
"""The lease until the controller names another one."""
LATENCY_CHANGE = 0.1
"""A round trip is reported again when it differs by this share from the reported value."""

Request = controller_pb2.SessionRequest
Response = controller_pb2.SessionResponse
METHOD = Method("/pinyon.api.controller.v1.ControllerService/Session", Request, Response)

_log = get_logger("lb.controller")


class ControllerSession:
    """The session with the controller: ``start`` → (``wake`` at a change) → ``close``; without an address it does
    nothing.

    ``on_federation`` is called on the event loop with each new federation. The load balancer's own clusters are
    ``federation.owned_by(lb_id)`` (with instances added and removed), its peers are ``federation.peers_of(lb_id)``, and
    it serves :meth:`adopted` for others at the moment. The callables are called before each report.
    """

    def __init__(
        self,
        address: str,
        on_federation: Callable[[Federation], None],
        load: Callable[[], controller_pb2.LoadBalancerLoad],
        latencies_ms: Callable[[], Mapping[str, float]] = dict,
        draining: Callable[[], bool] = lambda: False,
        connect: OpenSession = open_session,
        clock: Clock = time.monotonic,
        period_s: float = PERIOD_S,
    ) -> None:
        self._address = address
        self._on_federation = on_federation
        self._load = load
        self._latencies_ms = latencies_ms
        self._draining = draining
        self._clock = clock
        self._period_s = period_s
        self._link = Redialer("controller", address, METHOD, self._converse, connect=connect, log=_log)
        self._info: LbInfo | None = None
        self._wake = asyncio.Event()
        self._stream: Dialed[Request, Response] | None = None
        self._told_ms: dict[str, float] = {}
        """The round trips that were reported in this session."""
        self._lease_s = LEASE_S
        self._heard_s = -math.inf
        self.federation: Federation | None = None
        """The last federation that the controller sent; None before the first."""

    @property
    def connected(self) -> bool:
        """True once a controller has answered on the present stream."""
        return self._stream is not None

    def start(self, info: LbInfo) -> None:
        """Starts the session, once the load balancer's addresses are known."""
        self._info = info
        if self._address:
            self._link.start()

    def wake(self) -> None:
        """Reports a change soon."""
        self._wake.set()

    async def close(self, farewell_s: float = 1.0) -> None:
        """Reports that the load balancer leaves, if a controller listens, and ends the session."""
        self._wake.set()
        await self._link.close(farewell_s if self.connected else 0.0)

    def adopted(self, reachable: Collection[str] = ()) -> tuple[Cluster, ...]:
        """Returns the clusters served for others now; ``reachable`` are the ids of load balancers with open streams.

        The answer changes when the controller is silent for longer than its lease: ask when a peer comes or goes.
        """
        federation = self.federation
        if self._info is None or federation is None:
            return ()
        return federation.adopted_now(self._info.lb_id, self._clock() - self._heard_s, self._lease_s, reachable)

    async def _converse(self, stream: Dialed[Request, Response]) -> None:
        self._told_ms.clear()
        try:
            await stream.run(lambda message: self._take(stream, message), self._reports())
        finally:
            self._stream = None

    def _take(self, stream: Dialed[Request, Response], message: Response) -> None:
        if self._stream is None:
            self._stream = stream
            _log.info("registered with the controller at %s", self._address)
        self._heard_s = self._clock()
        if message.lease_ms:
            self._lease_s = message.lease_ms / 1e3
        if not message.HasField("federation"):
            return
        try:
            federation = federation_from_proto(message.federation)
        except PinyonError as error:
            _log.warning("cannot take what the controller says: %s", error.message)
            return
        if not federation.follows(self.federation):
            return  # no newer version of the same epoch
        self.federation = federation
        try:
            self._on_federation(federation)
        except Exception:  # the stream must survive an error in the callback
            _log.exception("cannot take the controller's federation")

    async def _reports(self) -> AsyncGenerator[Request, None]:
        """Yields all reports of one stream, the farewell last."""
        first = self._report()
        if self._info is not None:
            first.registration.CopyFrom(lb_info_to_proto(self._info))
        if self.federation is not None:
            first.known.CopyFrom(federation_to_proto(self.federation))
        yield first
        leaving = False
        while not leaving:
            if not self._link.closing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._period_s):
                        await self._wake.wait()
            self._wake.clear()
            report = self._report()
            report.leaving = leaving = self._link.closing
            yield report
            if not leaving:
                await asyncio.sleep(GAP_S)

    def _report(self) -> Request:
        latencies_ms = dict(list(self._latencies_ms().items())[:LATENCIES_MAX])
        told_ms = {lb_id: self._told_ms[lb_id] for lb_id in latencies_ms if lb_id in self._told_ms}
        news = {
            lb_id: now_ms
            for lb_id, now_ms in latencies_ms.items()
            if lb_id not in told_ms or abs(now_ms - told_ms[lb_id]) > LATENCY_CHANGE * told_ms[lb_id]
        }
        self._told_ms = told_ms | news
        return Request(load=self._load(), latencies_ms=news, draining=self._draining())
