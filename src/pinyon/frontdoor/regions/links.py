"""The streams to all load balancers of other regions, and what of their states routing needs to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from pinyon.api.lb.v1 import peer_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.regions.link import RegionLink
from pinyon.frontdoor.regions.peer import Peer
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.update_stream import WorkerStream
from pinyon.routing.target import UNKNOWN, Report
from pinyon.runtime.channel import OpenSession
from pinyon.runtime.logging import get_logger

PEERS_MAX = 256

_log = get_logger("lb.regions")


class RegionLinks:
    """``know`` → ``open`` and ``send`` → ``close``. Those of the own region are not among them: what they serve is
    served here as well."""

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

    def open(self, name: str, gap_s: float) -> tuple[WorkerStream, worker_pb2.Submission]:
        """A stream to that load balancer, and the submission to fill in and :meth:`send`. Raises
        :class:`Unavailable`."""
        link = self._links.get(name)
        if link is None:
            raise Unavailable("That region is not known any more.", retry_after_s=1.0)
        return link.open(gap_s)

    def send(self, name: str, stream: WorkerStream, submission: worker_pb2.Submission, gap_s: float) -> None:
        link = self._links.get(name)
        if link is not None:
            link.send(stream, submission, gap_s)

    def ask(self, name: str, head: peer_pb2.RawHead, body: bytes | bytearray) -> Answer:
        """Send an HTTP request there; the caller closes its answer. Raises :class:`Unavailable`."""
        link = self._links.get(name)
        if link is None:
            raise Unavailable("That region is not known any more.", retry_after_s=1.0)
        return link.ask(head, body)

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
