"""A memory of peers that failed lately and should be avoided for a while, used wherever calls are retried."""

from __future__ import annotations

import math

from pinyon.core.errors import PinyonError

_NOT_THE_PEER = frozenset(("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"))
_FAIR_SHARE = 0.25


class Avoidance:
    """A pause per peer that doubles with every failure and is forgotten at the first success or other good news.

    A failure that comes more than the longest pause after the end of the last pause is unrelated to those before."""

    def __init__(self, *, first_s: float = 0.5, max_s: float = 30.0, max_peers: int = 1024) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._max_peers = max_peers
        self._until: dict[str, tuple[float, float, float, bool]] = {}
        """The end of the pause, its length, the last failure and whether a caller is trying the peer, by peer."""

    def failed(self, peer: str, now_s: float) -> None:
        until, pause, _, tried = self._until.pop(peer, (0.0, 0.0, 0.0, False))
        if now_s - until > self._max_s:
            pause = 0.0
        if not pause or tried or now_s >= until:  # calls that began together and failed together count once
            pause = min(self._max_s, pause * 2 or self._first_s)
            until = now_s + pause
        if len(self._until) >= self._max_peers:
            del self._until[next(iter(self._until))]  # the peer that failed longest ago
        self._until[peer] = (until, pause, now_s, False)

    def tried(self, peer: str, now_s: float) -> None:
        """Notes that one caller tries a peer whose pause is over; others avoid it for another pause of that length."""
        known = self._until.get(peer)
        if known is not None and now_s >= known[0]:
            self._until[peer] = (now_s + known[1], known[1], known[2], True)

    def succeeded(self, peer: str, since_s: float = math.inf) -> None:
        """Forgets the peer's failures, unless the last one came after ``since_s``, the start of the successful call."""
        known = self._until.get(peer)
        if known is not None and known[2] <= since_s:
            del self._until[peer]

    def avoids(self, peer: str, now_s: float) -> bool:
        return self.left_s(peer, now_s) > 0

    def left_s(self, peer: str, now_s: float) -> float:
        """Returns the seconds until the peer's pause ends; 0 when there is none."""
        known = self._until.get(peer)
        return 0.0 if known is None else max(0.0, known[0] - now_s)

    def avoided(self, now_s: float) -> list[str]:
        """Returns all peers for which :meth:`avoids` is true, those that failed last at the end."""
        # of a copy: another thread may ask
        return [peer for peer, (until, *_) in list(self._until.items()) if until > now_s]

    def __contains__(self, peer: object) -> bool:
        """Returns whether the peer has failed and no good news came since; its pause may be over."""
        return peer in self._until


def blames_peer(error: PinyonError, offered_s: float = math.inf, whole_s: float = math.inf) -> bool:
    """Returns whether the error speaks against the peer.

    A mistake of the caller does not, nor a report that the peer is busy. Lateness does not either if the call was
    offered only a small remainder of the ``whole_s`` that there was."""
    if error.grpc_code == "DEADLINE_EXCEEDED" and offered_s < whole_s * _FAIR_SHARE:
        return False
    return error.grpc_code not in _NOT_THE_PEER
