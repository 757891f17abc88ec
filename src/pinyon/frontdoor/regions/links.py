"""One long-lived stream to each load balancer of other regions: requests there, what comes back, and how it is."""

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
from pinyon.runtime.outbox import FRAME_BYTES, MESSAGE_BYTES

PEERS_MAX = 256
PEER_VERSION = 2
WRITE_S = 5.0
TICK_S = 0.25
PROBE_TICKS = 4
"""Between two probes of the latency."""
SILENT_TICKS = 12
"""A peer that says nothing in so many is frozen, or cut off: what it has goes on elsewhere. They are counted, not
timed: while our own loop is held up, none passes."""
REQUESTS_MAX = 8192
"""Under way to one peer."""
SMOOTHING = 0.2
METHOD = Method("/pinyon.api.lb.v1.PeerService/Session", peer_pb2.SessionRequest, peer_pb2.SessionResponse)

_log = get_logger("lb.regions")


class RegionLinks:
    """``know`` → ``talk`` → ``close``. Those of the own region are not among them: what they serve is served here as
    well."""

    def __init__(
        self,
        own: Peer,
        models: ServedModels,
        unread_tokens: int,
        clock: Clock,
        sessions_to: Callable[[str], OpenSession],
    ) -> None:
        """``sessions_to``: what opens them to load balancers of a region."""
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
        """These are all there are; links to others are ended, and requests there go on elsewhere."""
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
        """The session with that load balancer. Raises :class:`Unavailable`."""
        link = self._links.get(name)
        if link is None:
            raise Unavailable("That region is not known any more.", retry_after_s=1.0)
        return link.talk()

    def region_of(self, name: str) -> str:
        """Empty for one that is not there."""
        link = self._links.get(name)
        return "" if link is None else link.peer.region

    async def close(self) -> None:
        """End them all, and wait for that."""
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
    """``start`` → ``talk`` → ``close``. ``on_state`` hears each state of the region, ``on_away`` that it
    does not answer any more."""

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
        """There and back, smoothed; 0: not measured yet."""
        self.sessions = 0
        """How often the peer was found to be one of ours."""

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
        """The present session. Raises :class:`Unavailable`."""
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

    # -- the talk's part

    def _measured(self, seconds: float) -> None:
        known = self.distance_s
        self.distance_s = seconds if not known else known + SMOOTHING * (seconds - known)


class Talk:
    """One session's life: requests as tokens, and HTTP requests (``raw``)."""

    def __init__(self, link: RegionLink, stream: Dialed[peer_pb2.SessionRequest, peer_pb2.SessionResponse]) -> None:
        self._link = link
        self._stream = stream
        self.welcomed = False
        """The peer has said that it is one of ours."""
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
        """A stream, and the submission to fill in and :meth:`send`."""
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
        """Probe it, and end the session if it is silent."""
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
        """Raises :class:`PinyonError` if that is nobody to send requests to."""
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
        """Into the message that is being filled, or one after it."""
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
