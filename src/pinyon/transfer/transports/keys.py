"""What a peer's keys open, where the initiator reaches its memory by himself: he asks once per key, its owner tells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from pinyon.transfer.links.acceptor import Inbound
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.types.request import Reason
from pinyon.transfer.types.spans import Spans


class Opened(Protocol):
    """What a key opens, as a transport's peers tell each other."""

    @property
    def code(self) -> int:
        """0, or the ``Reason`` number why it opens nothing."""
        ...

    @property
    def spans(self) -> Spans:
        """Empty: it opens nothing."""
        ...


P = TypeVar("P", bound=Opened)


class KnownKeys(Generic[P]):
    """The initiator's side, for one endpoint. What opens nothing is not remembered: a region may be registered or
    opened later."""

    def __init__(self, most_keys: int, most_spans: int, most_asked: int, forgotten: Callable[[], None]) -> None:
        """``most_keys``, ``most_spans``: that are remembered, about. ``most_asked``: keys at a time. ``forgotten``:
        called by :meth:`forget`."""
        self.opened: dict[bytes, P] = {}
        self._most_keys = most_keys
        self._most_spans = most_spans
        self._most_asked = most_asked
        self._forgotten = forgotten
        self._spans = 0

    def find(self, keys: Collection[bytes], ask: Callable[[list[bytes]], Iterable[P]]) -> Mapping[bytes, P]:
        """What these keys open, among others; ``ask`` answers for those that are not known, in order. Raises what that
        raises."""
        opened = self.opened
        unknown = [key for key in keys if key not in opened]
        if unknown and (len(opened) + len(unknown) > self._most_keys or self._spans > self._most_spans):
            self.forget()  # keys of leases that are over, mostly
            unknown = list(keys)
        refused: dict[bytes, P] = {}
        for start in range(0, len(unknown), self._most_asked):
            asked = unknown[start : start + self._most_asked]
            for key, answer in zip(asked, ask(asked), strict=True):
                spans = len(answer.spans.starts)
                (opened if spans else refused)[key] = answer
                self._spans += spans
        return opened | refused if refused else opened

    def forget(self) -> None:
        """Ask anew for all."""
        self.opened.clear()
        self._spans = 0
        self._forgotten()


def tell(
    context: EngineContext,
    inbound: Inbound,
    keys: Iterable[bytes],
    most_spans: int,
    opens: Callable[[Grant], P],
    refusal: Callable[[int], P],
) -> list[P]:
    """The owner's side: what each of these keys opens to the peer of a link, with no more than ``most_spans`` spans
    together. ``opens``: what a grant does, which is held meanwhile. Raises what that raises."""
    memory, told, room = context.memory, list[P](), most_spans
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
