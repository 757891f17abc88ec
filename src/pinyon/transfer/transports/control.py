"""Control links, and the keys that are asked for over them: shared by transports whose bytes go one-sided.

Control links carry requests and answers only, while the payload goes another way. For memory that the initiator reaches
by itself, it asks the owner once per key what that key opens."""

from __future__ import annotations

import select
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, NoReturn, Protocol, TypeVar

from pinyon.transfer.chains.chain import Chain
from pinyon.transfer.links.acceptor import InboundLink
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link
from pinyon.transfer.links.endpoint import Endpoint, TryAgain
from pinyon.transfer.links.stream import Stream
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.types.request import Reason
from pinyon.transfer.types.spans import Spans

_TOUCH_S = 1.0
"""Seconds of silence after which a TOUCH is sent. The peer evicts only links that were silent for longer."""


class Opened(Protocol):
    """An answer to what a key opens, as a transport's peers exchange it."""

    @property
    def code(self) -> int:
        """Zero, or the ``Reason`` number why the key opens nothing."""
        ...

    @property
    def spans(self) -> Spans:
        """The ranges that the key opens; empty if it opens nothing."""
        ...


P = TypeVar("P", bound=Opened)


class KnownKeys(Generic[P]):
    """The answers that one endpoint of the initiator remembers.

    Refusals are not remembered: a region may be registered or opened later."""

    def __init__(self, most_keys: int, most_spans: int, most_asked: int) -> None:
        """Keeps about ``most_keys`` keys and ``most_spans`` spans at most; asks for ``most_asked`` keys at a time."""
        self.opened: dict[bytes, P] = {}
        self._most_keys = most_keys
        self._most_spans = most_spans
        self._most_asked = most_asked
        self._spans = 0

    def find(self, keys: Collection[bytes], ask: Callable[[list[bytes]], Iterable[P]]) -> Mapping[bytes, P]:
        """Returns the answers for these keys, among others.

        The keys that are not known yet are answered by ``ask``, in order. Raises what ``ask`` raises."""
        opened = self.opened
        unknown = [key for key in keys if key not in opened]
        if unknown and (len(opened) + len(unknown) > self._most_keys or self._spans > self._most_spans):
            self.forget()  # most of the keys belong to leases that are over
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


class ControlEndpoint(Endpoint, Generic[P]):
    """The initiator's end of a control link. The peer sends nothing unasked, so a readable byte means the end."""

    def __init__(self, context: EngineContext, link: Link, touch: bytes, keys: KnownKeys[P]) -> None:
        """Takes ``touch``, the message that says that the link is in use and that has no answer."""
        super().__init__(link)
        self._keys = keys
        self._known: Mapping[bytes, P] = keys.opened
        """The answers for the present chain by key, including the peer's refusals."""
        self._limits = context.limits
        self._clock = context.clock
        self._watch = LinkWatch(link.stream)
        self._touching = touch
        self._spoke = 0.0

    def is_open(self) -> bool:
        return super().is_open() and self._watch.is_open()

    def prepare(self, chain: Chain) -> None:
        """Asks the peer about those keys of the chain's remote regions that are not known yet."""
        keys = {part.remote_region for part in chain.slices}
        self._known = self._keys.find(keys, lambda asked: self._resolve(asked, chain.deadline))

    @abstractmethod
    def _resolve(self, keys: list[bytes], deadline: float) -> Iterable[P]:
        """Asks the peer what these keys open, and returns its answers in their order. Raises like ``exchange``."""

    def _answer(self, question: bytes, header_bytes: int, deadline: float) -> bytes:
        """Sends the question and returns the answer's header. Raises TryAgain, OSError, Stalled, DeadlineReached."""
        try:
            self._say(question, deadline)
        except OSError:
            self._link_ended()
        header = self._receive(header_bytes, deadline)
        self.answered = True
        return header

    def _receive(self, count: int, deadline: float) -> bytes:
        """Returns the next ``count`` bytes of the peer's answer. Raises like :meth:`_answer`."""
        try:
            return self.link.stream.receive_bytes(count, deadline)
        except OSError:
            self._link_ended()

    def _say(self, message: bytes, deadline: float) -> None:
        """Sends the message. Raises OSError, Stalled, DeadlineReached."""
        self._spoke = self._clock()
        self.link.stream.send([message], deadline)

    def _touch(self, deadline: float) -> None:
        """Says that the link is in use, if it was silent for ``_TOUCH_S``. Raises like :meth:`_answer`."""
        if self._clock() - self._spoke >= _TOUCH_S:
            try:
                self._say(self._touching, deadline)
            except OSError:
                self._link_ended()

    def _link_ended(self) -> NoReturn:
        """Raises TryAgain for an endpoint that sat idle, else ConnectionResetError.

        The peer may end a link that sat idle, and ``is_open`` is asked too early to notice every such end."""
        if self.reused:
            raise TryAgain("the control link ended") from None
        raise ConnectionResetError("the control link ended") from None


def tell(
    context: EngineContext,
    inbound: InboundLink,
    keys: Iterable[bytes],
    most_spans: int,
    opens: Callable[[Grant], P],
    refusal: Callable[[int], P],
) -> list[P]:
    """Returns what each of these keys opens to the peer of a link: the owner's side of :class:`KnownKeys`.

    ``opens`` makes the answer for a grant, which is pinned meanwhile; ``refusal`` makes one from a ``Reason`` number.
    All answers together have at most ``most_spans`` spans; a key that needs more is refused as ``OTHER_TRANSPORT``.
    Raises what ``opens`` raises."""
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
