"""Links that carry questions and answers only, while the bytes go another way."""

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
"""The peer hears at least this often that the link is in use: it evicts only what was silent for longer."""


class LinkWatch:
    """Tells without waiting whether a link is open. Nothing may be on its way to us meanwhile."""

    def __init__(self, stream: Stream) -> None:
        self._poll = select.poll()
        self._poll.register(stream.sock, select.POLLIN | select.POLLRDHUP)

    def is_open(self, wait_s: float = 0.0) -> bool:
        """As far as is known, neither side has closed the link (nor sent what nobody may send now). ``wait_s``: so
        long it is watched."""
        return not self._poll.poll(wait_s * 1000)


class ControlEndpoint(Endpoint, Generic[P]):
    """The initiator's end of such a link. Nothing comes on it unasked, so whatever there is to read is its end."""

    def __init__(self, context: EngineContext, link: Link, touch: bytes, keys: KnownKeys[P]) -> None:
        """``touch``: the message that says that the link is in use; it has no answer."""
        super().__init__(link)
        self._keys = keys
        self._known: Mapping[bytes, P] = keys.opened
        """What keys open, with what the peer has refused to the present chain."""
        self._limits = context.limits
        self._clock = context.clock
        self._watch = LinkWatch(link.stream)
        self._touching = touch
        self._spoke = 0.0

    def is_open(self) -> bool:
        return super().is_open() and self._watch.is_open()

    def prepare(self, chain: Chain) -> None:
        """Ask for what is not known of the chain's remote regions."""
        keys = {part.remote_region for part in chain.slices}
        self._known = self._keys.find(keys, lambda asked: self._resolve(asked, chain.deadline))

    @abstractmethod
    def _resolve(self, keys: list[bytes], deadline: float) -> Iterable[P]:
        """What the peer says that these keys open, in order. Raises like ``exchange``."""

    def _answer(self, question: bytes, header_bytes: int, deadline: float) -> bytes:
        """The header of the peer's answer. Raises TryAgain, OSError, Stalled, DeadlineReached."""
        try:
            self._say(question, deadline)
        except OSError:
            self._link_ended()
        header = self._receive(header_bytes, deadline)
        self.answered = True
        return header

    def _receive(self, count: int, deadline: float) -> bytes:
        """So much of the peer's answer. Raises like :meth:`_answer`."""
        try:
            return self.link.stream.receive_bytes(count, deadline)
        except OSError:
            self._link_ended()

    def _say(self, message: bytes, deadline: float) -> None:
        """Raises OSError, Stalled, DeadlineReached."""
        self._spoke = self._clock()
        self.link.stream.send([message], deadline)

    def _touch(self, deadline: float) -> None:
        """Raises TryAgain, OSError, Stalled, DeadlineReached."""
        if self._clock() - self._spoke >= _TOUCH_S:
            try:
                self._say(self._touching, deadline)
            except OSError:
                self._link_ended()

    def _link_ended(self) -> NoReturn:
        """As the peer may do with one that sat idle; ``is_open`` comes too early to see all of them."""
        if self.reused:
            raise TryAgain("the control link ended") from None
        raise ConnectionResetError("the control link ended") from None
