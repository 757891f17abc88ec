"""Control links: they carry requests and answers only, while the payload goes another way."""

from __future__ import annotations

import select
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, NoReturn

from pinyon.transfer.chains.chain import Chain
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link
from pinyon.transfer.links.endpoint import Endpoint, TryAgain
from pinyon.transfer.links.stream import Stream
from pinyon.transfer.transports.keys import KnownKeys, P

_TOUCH_S = 1.0
"""Seconds of silence after which a TOUCH is sent. The peer evicts only links that were silent for longer."""


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
