"""Which peers to leave alone for a while because they just failed. Pure."""

from __future__ import annotations

__all__ = ["Avoidance"]


class Avoidance:
    """A pause per peer that doubles with every failure and is forgotten at the first success."""

    def __init__(self, *, first_s: float = 0.5, max_s: float = 30.0, max_peers: int = 1024) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._max_peers = max_peers
        self._until: dict[str, tuple[float, float]] = {}  # peer → (until, length of the pause)

    def failed(self, peer: str, now_s: float) -> None:
        until, pause = self._until.pop(peer, (0.0, 0.0))
        if now_s >= until:  # calls that began together and fail together count once
            pause = min(self._max_s, pause * 2 or self._first_s)
            until = now_s + pause
        if len(self._until) >= self._max_peers:
            del self._until[next(iter(self._until))]  # the one that failed longest ago
        self._until[peer] = (until, pause)

    def succeeded(self, peer: str) -> None:
        self._until.pop(peer, None)

    def avoids(self, peer: str, now_s: float) -> bool:
        return now_s < self._until.get(peer, (0.0, 0.0))[0]

    def __len__(self) -> int:
        return len(self._until)
