"""The common part of shm and rdma: their links carry only requests and answers, while the payload goes another way.

To reach the owner's memory by itself, an initiator asks the owner once per key what that key opens."""

from __future__ import annotations

import select
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from pinyon.transfer.links.acceptor import InboundLink
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.stream import Stream
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.types.limits import MAX_FRAME_REQUESTS
from pinyon.transfer.types.request import Reason
from pinyon.transfer.types.spans import MAX_SPANS, Spans


class Opened(Protocol):
    """An answer to the question what a key opens, as a transport's peers exchange it."""

    @property
    def code(self) -> int:
        """Zero, or the number of the ``Reason`` why the key opens nothing."""
        ...

    @property
    def spans(self) -> Spans:
        """The ranges that the key opens; empty if it opens nothing."""
        ...


P = TypeVar("P", bound=Opened)


class KnownKeys(Generic[P]):
    """The answers that one endpoint of the initiator remembers.

    Refusals are not remembered: a region may be registered or opened later."""

    def __init__(self, most_keys: int) -> None:
        """Keeps about ``most_keys`` keys at most."""
        self.opened: dict[bytes, P] = {}
        self._most_keys = most_keys
        self._spans = 0

    def find(self, keys: Collection[bytes], ask: Callable[[list[bytes]], Iterable[P]]) -> Mapping[bytes, P]:
        """Returns the answers for these keys, among others.

        The keys that are not known yet are answered by ``ask``, in order. Raises what ``ask`` raises."""
        opened = self.opened
        unknown = [key for key in keys if key not in opened]
        if unknown and (len(opened) + len(unknown) > self._most_keys or self._spans > MAX_SPANS):
            self.forget()  # most of the keys belong to leases that have ended
            unknown = list(keys)
        refused: dict[bytes, P] = {}
        for start in range(0, len(unknown), MAX_FRAME_REQUESTS):
            asked = unknown[start : start + MAX_FRAME_REQUESTS]
            for key, answer in zip(asked, ask(asked), strict=True):
                spans = len(answer.spans.starts)
                (opened if spans else refused)[key] = answer
                self._spans += spans
        return opened | refused if refused else opened

    def forget(self) -> None:
        """Forgets all answers, so that every key is asked for again."""
        self.opened.clear()
        self._spans = 0


class LinkWatch:
    """A watch on a link that notices its end. It works only while the peer has nothing to send."""

    def __init__(self, stream: Stream) -> None:
        self._poll = select.poll()
        self._poll.register(stream.sock, select.POLLIN | select.POLLRDHUP)

    def is_open(self, wait_s: float = 0.0) -> bool:
        """Returns whether the link is open, after watching it for up to ``wait_s`` seconds.

        False means that a side has closed the link, or that the peer sent something at a time when it may not."""
        return not self._poll.poll(wait_s * 1000)


def tell(
    context: EngineContext,
    inbound: InboundLink,
    keys: Iterable[bytes],
    opens: Callable[[Grant], P],
    refusal: Callable[[int], P],
) -> list[P]:
    """Returns what each of these keys opens to the peer of a link: the owner's side of :class:`KnownKeys`.

    ``opens`` makes the answer for a grant, which is pinned meanwhile; ``refusal`` makes one from a ``Reason`` number.
    All answers together have at most ``MAX_SPANS`` spans; a key that needs more is refused as ``OTHER_TRANSPORT``.
    Raises what ``opens`` raises."""
    memory, told, room = context.memory, list[P](), MAX_SPANS
    for key in keys:
        grant = memory.opened(key, inbound, inbound.abort)
        if grant is None:
            told.append(refusal(Reason.UNKNOWN_REGION))
            continue
        try:
            fits = len(grant.spans.starts) <= room
            answer = opens(grant) if fits else refusal(Reason.OTHER_TRANSPORT)
        finally:
            memory.unpin([grant], inbound)
        room -= len(answer.spans.starts)
        told.append(answer)
    with context.meter.lock:
        context.meter.refused([answer.code for answer in told])
    return told
