"""A long-lived stream to each load balancer of other regions: for requests, their answers and the region's state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field

from pinyon.api.lb.v1 import peer_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, InvalidArgument, PinyonError, Unavailable
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.frontdoor.regions.raw_streams import RawStreams
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.update_stream import WorkerStream, WorkerStreams
from pinyon.routing.target import UNKNOWN, Report
from pinyon.runtime.channel import OpenSession
from pinyon.runtime.duplex import Dialed, Method, Redialer
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outgoing import in_messages

PEERS_MAX = 256
PEER_VERSION = 2
TICK_S = 0.25
PROBE_TICKS = 4
"""The ticks between two probes of the latency."""
SILENT_TICKS = 12
"""The ticks after which a silent peer counts as frozen or cut off, so its requests go on elsewhere. Ticks are counted,
not timed, so that none passes while our own event loop is held up."""
REQUESTS_MAX = 8192
"""The maximum number of requests under way to one peer."""
SMOOTHING = 0.2
METHOD = Method("/pinyon.api.lb.v1.PeerService/Session", peer_pb2.SessionRequest, peer_pb2.SessionResponse)

_log = get_logger("lb.regions")


@dataclass(slots=True, eq=False)
class RegionLinks:
    """The links: ``know`` → ``talk`` → ``close``. Load balancers of the own region have none, as their instances are
    ours too. ``sessions_to`` returns what opens sessions to load balancers of a region."""

    own: PeerBalancer
    models: ServedModels
    unread_tokens: int
    clock: Clock
    sessions_to: Callable[[str], OpenSession]
    _links: dict[str, RegionLink] = field(default_factory=dict, init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _closed: bool = field(default=False, init=False)

    @property
    def links(self) -> Collection[RegionLink]:
        return self._links.values()

    def know(self, peers: Collection[PeerBalancer]) -> None:
        """Keeps links to exactly these peers; other links are ended, and their requests go on elsewhere."""
        if self._closed:
            return
        wanted = {
            peer.name: peer for peer in list(peers)[:PEERS_MAX] if peer.region != self.own.region and peer.address
        }
        for name, link in list(self._links.items()):
            if wanted.get(name) != link.peer:
                del self._links[name]
                self._close(link)
                if name not in wanted or wanted[name].region != link.peer.region:
                    self.models.gone(name)
                else:
                    self.models.away(name)
        for name, peer in wanted.items():
            if name not in self._links:
                self.models.expect(name, peer.region)
                self._links[name] = RegionLink(self, peer, self.sessions_to(peer.region))
                self._links[name].start()

    def talk(self, name: str) -> Talk:
        """Returns the session with that load balancer. Raises :class:`Unavailable`."""
        link = self._links.get(name)
        if link is None:
            raise Unavailable("That region is not known any more.", retry_after_s=1.0)
        talk = link.talk
        if talk is None or not talk.welcomed or link.streams >= REQUESTS_MAX:
            raise Unavailable(f"The load balancer of {link.peer.region} is away.", retry_after_s=1.0)
        return talk

    def region_of(self, name: str) -> str:
        """Returns the region of a load balancer; empty for an unknown one."""
        link = self._links.get(name)
        return "" if link is None else link.peer.region

    async def close(self) -> None:
        """Ends all links, and waits for that."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    # -- called by a link

    def heard(self, link: RegionLink, state: peer_pb2.RegionState) -> None:
        """Takes the present state of a region."""
        if self._links.get(link.peer.name) is not link:
            return
        models = {
            each.model: Report(
                pending=each.queued,
                running=each.running,
                room=each.credits if each.HasField("credits") else UNKNOWN,
                received=state.received,
                available=each.available_instances,
                instances=each.instances,
            )
            for each in state.models
            if each.instances
        }
        self.models.heard(link.peer.name, link.peer.region, models, link.distance_s, draining=state.draining)

    def away(self, link: RegionLink) -> None:
        """Takes note of a load balancer that does not answer any more."""
        if self._links.get(link.peer.name) is link:
            self.models.away(link.peer.name)

    def _close(self, link: RegionLink) -> None:
        task = asyncio.create_task(link.close(), name=f"close {link.peer.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class RegionLink(Redialer[peer_pb2.SessionRequest, peer_pb2.SessionResponse]):
    """The link to one load balancer: ``start`` → ``close``."""

    def __init__(self, owner: RegionLinks, peer: PeerBalancer, connect: OpenSession) -> None:
        name = f"load balancer of {peer.region}"
        super().__init__(name, peer.address, METHOD, self._speak, connect=connect, log=_log)
        self.owner, self.peer = owner, peer
        self.talk: Talk | None = None
        """The present session, if there is one."""
        self.distance_s = 0.0
        """The round-trip time, smoothed; 0 if not measured yet."""
        self.sessions = 0
        """The number of sessions in which the peer was found to be one of ours."""

    @property
    def connected(self) -> bool:
        return self.talk is not None and self.talk.welcomed

    @property
    def streams(self) -> int:
        return 0 if self.talk is None else len(self.talk.streams) + len(self.talk.raw)

    async def _speak(self, stream: Dialed[peer_pb2.SessionRequest, peer_pb2.SessionResponse]) -> None:
        talk = self.talk = Talk(self, stream)
        watch = asyncio.create_task(talk.watch(), name=f"watch {self.peer.region}")
        reason = "the stream ended"
        try:
            await stream.run(talk.take, talk.written())
        except PinyonError as error:
            reason = error.message or error.grpc_code
            raise
        finally:
            watch.cancel()
            self.talk = None
            if talk.welcomed:
                self.owner.away(self)
            talk.end(reason)

    def measured(self, seconds: float) -> None:
        """Takes a round-trip time."""
        known = self.distance_s
        self.distance_s = seconds if not known else known + SMOOTHING * (seconds - known)


class Talk:
    """One session: requests as tokens, and HTTP requests (``raw``)."""

    def __init__(self, link: RegionLink, stream: Dialed[peer_pb2.SessionRequest, peer_pb2.SessionResponse]) -> None:
        self._link = link
        self._stream = stream
        self.welcomed = False
        """True once the peer has said that it is one of ours."""
        self.streams = WorkerStreams(link.owner.unread_tokens, self._cancel)
        self.raw = RawStreams(link.peer.region, self._put)
        self._silent = 0
        self._probe = 0
        self._probed_s = 0.0
        self._version = 0
        self._ready: list[peer_pb2.SessionRequest] = []
        """The parts of the next messages."""
        self._news = asyncio.Event()

    # -- requests

    def open(self, gap_s: float) -> tuple[WorkerStream, worker_pb2.Submission]:
        """Returns a stream, and the submission to fill in and :meth:`send`."""
        stream = self.streams.open(gap_s)
        return stream, worker_pb2.Submission(stream_id=stream.stream_id)

    def send(self, submission: worker_pb2.Submission, gap_s: float) -> None:
        data = submission.SerializeToString()
        request = peer_pb2.ForwardedRequest(submission=data, hops=1, gap_ms=round(gap_s * 1e3))
        self._put(peer_pb2.SessionRequest(requests=[request]))

    def _cancel(self, stream_id: int) -> None:
        self._put(peer_pb2.SessionRequest(cancel_stream_ids=[stream_id]))

    def end(self, reason: str) -> None:
        region = self._link.peer.region
        error = Unavailable(f"The region {region} went away.")
        if count := self.streams.end(error, self._stream.connected) + self.raw.end():
            _log.warning("lost the load balancer of %s: %s", region, reason, extra={"requests": count})

    # -- the stream

    async def watch(self) -> None:
        """Probes the peer, and ends the session if it is silent."""
        ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            self._silent += 1
            if self._silent > SILENT_TICKS:
                self._stream.end(Unavailable("it is silent"))
                return
            ticks += 1
            if self.welcomed and ticks % PROBE_TICKS == 0:
                self._probe += 1
                self._probed_s = self._link.owner.clock()
                self._put(peer_pb2.SessionRequest(probe=self._probe))

    def take(self, message: peer_pb2.SessionResponse) -> None:
        self._silent = 0
        link = self._link
        if not self.welcomed:
            self._welcome(message.welcome if message.HasField("welcome") else None)
        if message.probe and message.probe == self._probe:
            link.measured(link.owner.clock() - self._probed_s)
        if message.HasField("state") and message.state.version > self._version:
            self._version = message.state.version
            link.owner.heard(link, message.state)
        self.streams.take(message.updates)
        self.raw.take(message.raw_pieces)

    def _welcome(self, welcome: peer_pb2.PeerWelcome | None) -> None:
        """Checks the peer's first message. Raises :class:`PinyonError` if the peer cannot take our requests."""
        link = self._link
        if welcome is None:
            raise InvalidArgument("its first message is no welcome")
        if welcome.region != link.peer.region:
            raise InvalidArgument(f"it says that it is of the region {welcome.region!r}, not {link.peer.region!r}")
        if welcome.kind != link.owner.own.kind:
            raise FailedPrecondition("one of the two is in front of --upstream servers, the other is not")
        self.welcomed = True
        link.sessions += 1
        self._put(peer_pb2.SessionRequest(probe=1))
        self._probe, self._probed_s = 1, link.owner.clock()

    def _put(self, part: peer_pb2.SessionRequest) -> None:
        self._ready.append(part)
        self._news.set()

    async def written(self) -> AsyncGenerator[peer_pb2.SessionRequest, None]:
        own = self._link.owner.own
        hello = peer_pb2.PeerHello(region=own.region, lb_id=own.name, version=PEER_VERSION, kind=own.kind)
        yield peer_pb2.SessionRequest(hello=hello)
        while True:
            await self._news.wait()
            self._news.clear()
            ready, self._ready = self._ready, []
            for message, *others in in_messages(ready):
                for part in others:
                    message.MergeFrom(part)
                yield message
                self.raw.written(message)
