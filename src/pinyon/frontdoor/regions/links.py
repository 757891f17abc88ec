"""A long-lived stream to each load balancer of other regions: for requests, their answers and the region's state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection

from pinyon.api.lb.v1 import peer_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, InvalidArgument, PinyonError, Unavailable
from pinyon.frontdoor.regions.peer import Peer
from pinyon.frontdoor.regions.raw_streams import RawStreams
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.update_stream import WorkerStream, WorkerStreams
from pinyon.routing.target import UNKNOWN, Report
from pinyon.runtime.channel import OpenSession, open_session
from pinyon.runtime.duplex import Dialed, Method, Redialer
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outgoing import FRAME_BYTES, MESSAGE_BYTES

PEERS_MAX = 256
PEER_VERSION = 2
WRITE_S = 5.0
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


class RegionLinks:
    """The links: ``know`` → ``talk`` → ``close``. Load balancers of the own region have none, as their instances are
    ours too."""

    def __init__(
        self,
        own: Peer,
        models: ServedModels,
        unread_tokens: int,
        clock: Clock,
        sessions_to: Callable[[str], OpenSession],
    ) -> None:
        """Starts without links. ``sessions_to`` returns what opens sessions to load balancers of a region."""
        self.own = own
        self._models = models
        self._unread_tokens = unread_tokens
        self._clock = clock
        self._sessions_to = sessions_to
        self._links: dict[str, RegionLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._links)

    @property
    def links(self) -> Collection[RegionLink]:
        return self._links.values()

    def know(self, peers: Collection[Peer]) -> None:
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
                    self._models.gone(name)
                else:
                    self._models.away(name)
        for name, peer in wanted.items():
            if name not in self._links:
                self._models.expect(name, peer.region)
                link = self._links[name] = RegionLink(
                    self.own, peer, self._unread_tokens, self._state, self._away, self._clock,
                    self._sessions_to(peer.region),
                )  # fmt: skip
                link.start()

    def talk(self, name: str) -> Talk:
        """Returns the session with that load balancer. Raises :class:`Unavailable`."""
        link = self._links.get(name)
        if link is None:
            raise Unavailable("That region is not known any more.", retry_after_s=1.0)
        return link.talk()

    def region_of(self, name: str) -> str:
        """Returns the region of a load balancer; empty for an unknown one."""
        link = self._links.get(name)
        return "" if link is None else link.peer.region

    async def close(self) -> None:
        """Ends all links, and waits for that."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    def _state(self, link: RegionLink, state: peer_pb2.RegionState) -> None:
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
        self._models.heard(link.peer.name, link.peer.region, models, link.distance_s, draining=state.draining)

    def _away(self, link: RegionLink) -> None:
        if self._links.get(link.peer.name) is link:
            self._models.away(link.peer.name)

    def _close(self, link: RegionLink) -> None:
        task = asyncio.create_task(link.close(), name=f"close {link.peer.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class RegionLink:
    """The link to one load balancer: ``start`` → ``talk`` → ``close``. ``on_state`` is called with each state of the
    region, ``on_away`` when the load balancer does not answer any more."""

    def __init__(
        self,
        own: Peer,
        peer: Peer,
        unread_tokens: int,
        on_state: Callable[[RegionLink, peer_pb2.RegionState], None],
        on_away: Callable[[RegionLink], None],
        clock: Clock,
        connect: OpenSession = open_session,
    ) -> None:
        self.peer = peer
        self._own = own
        self._unread_limit = unread_tokens
        self._on_state, self._on_away = on_state, on_away
        self._clock = clock
        self._talk: Talk | None = None
        self._link = Redialer(
            f"load balancer of {peer.region}", peer.address, METHOD, self._converse,
            write_s=WRITE_S, connect=connect, log=_log,
        )  # fmt: skip
        self.distance_s = 0.0
        """The round-trip time, smoothed; 0 if not measured yet."""
        self.sessions = 0
        """The number of sessions in which the peer was found to be one of ours."""

    def start(self) -> None:
        self._link.start()

    async def close(self) -> None:
        await self._link.close()

    @property
    def connected(self) -> bool:
        return self._talk is not None and self._talk.welcomed

    @property
    def streams(self) -> int:
        return 0 if self._talk is None else len(self._talk.streams) + len(self._talk.raw)

    def talk(self) -> Talk:
        """Returns the present session. Raises :class:`Unavailable`."""
        talk = self._talk
        if talk is None or not talk.welcomed or self.streams >= REQUESTS_MAX:
            raise Unavailable(f"The load balancer of {self.peer.region} is away.", retry_after_s=1.0)
        return talk

    async def _converse(self, stream: Dialed[peer_pb2.SessionRequest, peer_pb2.SessionResponse]) -> None:
        talk = self._talk = Talk(self, stream)
        watch = asyncio.create_task(talk.watch(), name=f"watch {self.peer.region}")
        reason = "the stream ended"
        try:
            await stream.run(talk.take, talk.written())
        except PinyonError as error:
            reason = error.message or error.grpc_code
            raise
        finally:
            watch.cancel()
            self._talk = None
            if talk.welcomed:
                self._on_away(self)
            talk.end(reason)

    # -- called by the talk

    def _measured(self, seconds: float) -> None:
        known = self.distance_s
        self.distance_s = seconds if not known else known + SMOOTHING * (seconds - known)


class Talk:
    """One session: requests as tokens, and HTTP requests (``raw``)."""

    def __init__(self, link: RegionLink, stream: Dialed[peer_pb2.SessionRequest, peer_pb2.SessionResponse]) -> None:
        self._link = link
        self._stream = stream
        self.welcomed = False
        """True once the peer has said that it is one of ours."""
        self.streams = WorkerStreams(link._unread_limit, self._cancel)
        self.raw = RawStreams(link.peer.region, self._put)
        self._silent = 0
        self._probe = 0
        self._probed_s = 0.0
        self._version = 0
        self._ready: list[peer_pb2.SessionRequest] = []
        self._size = 0
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
                self._probed_s = self._link._clock()
                self._put(peer_pb2.SessionRequest(probe=self._probe))

    def take(self, message: peer_pb2.SessionResponse) -> None:
        self._silent = 0
        link = self._link
        if not self.welcomed:
            self._welcome(message.welcome if message.HasField("welcome") else None)
        if message.probe and message.probe == self._probe:
            link._measured(link._clock() - self._probed_s)
        if message.HasField("state") and message.state.version > self._version:
            self._version = message.state.version
            link._on_state(link, message.state)
        self.streams.take(message.updates)
        self.raw.take(message.raw_pieces)

    def _welcome(self, welcome: peer_pb2.PeerWelcome | None) -> None:
        """Checks the peer's first message. Raises :class:`PinyonError` if the peer cannot take our requests."""
        link = self._link
        if welcome is None:
            raise InvalidArgument("its first message is no welcome")
        if welcome.region != link.peer.region:
            raise InvalidArgument(f"it says that it is of the region {welcome.region!r}, not {link.peer.region!r}")
        if welcome.kind != link._own.kind:
            raise FailedPrecondition("one of the two is in front of --upstream servers, the other is not")
        self.welcomed = True
        link.sessions += 1
        self._put(peer_pb2.SessionRequest(probe=1))
        self._probe, self._probed_s = 1, link._clock()

    def _put(self, message: peer_pb2.SessionRequest) -> None:
        """Adds to the message that is being filled, or begins the next one."""
        size = message.ByteSize() + FRAME_BYTES
        if self._ready and self._size + size <= MESSAGE_BYTES:
            self._ready[-1].MergeFrom(message)
            self._size += size
        else:
            self._ready.append(message)
            self._size = size
        self._news.set()

    async def written(self) -> AsyncGenerator[peer_pb2.SessionRequest, None]:
        own = self._link._own
        yield peer_pb2.SessionRequest(
            hello=peer_pb2.PeerHello(region=own.region, lb_id=own.name, version=PEER_VERSION, kind=self._link._own.kind)
        )
        while True:
            await self._news.wait()
            self._news.clear()
            messages, self._ready, self._size = self._ready, [], 0
            for message in messages:
                yield message
                self.raw.written(message)
