"""The length of the prefix that names a request, by how hot prefixes are (DualMap §3.2).

It is long enough to spread what many requests share, and no longer, so that what belongs together stays together. A
prefix is named by the key of its last block, which is chained from all before it. The paper's blocks have 512 tokens
(A.2.1), those of instances may be shorter. Then a prefix ends only at multiples of a *stride* of several blocks, or
where the prompt ends. What a user says after a long system prompt may be short, as are the last blocks of the traces.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from pinyon.core.block_keys import KEY_BYTES, BlockKey

DEPTH_MAX: Final = 256
"""The maximum number of strides of a prefix."""
REQUESTS_MAX: Final = 65_536
"""The maximum number of requests in a window of time."""


@dataclass(frozen=True, slots=True)
class HotnessSettings:
    """The bounds by which prefixes are hot or cold, as shares of the requests in a window. A prefix above ``hot`` is
    extended by one block, until it is below ``cold``. 0 is the paper's: 2 / n and 1 / n of n instances. The window is
    the last ``window_requests`` requests, or where that is 0 the last ``window_s`` seconds; with fewer than ``samples``
    in it nothing is hot."""

    hot: float = 0.0612
    cold: float = 0.02
    window_requests: int = 200
    window_s: float = 30.0
    samples: int = 20


class HotnessTree:
    """The prefixes of the requests in the window; each takes memory for a few numbers."""

    def __init__(self, settings: HotnessSettings) -> None:
        self._settings = settings
        self._extended: dict[BlockKey, BlockKey | None] = {}
        """Prefixes that are extended, each with the prefix before it."""
        self._counts: dict[BlockKey, int] = {}
        self._window: deque[tuple[float, list[BlockKey]]] = deque()

    def __len__(self) -> int:
        return len(self._counts)

    def key_of(self, packed_keys: bytes, now_s: float, instances: int, stride: int = 1) -> BlockKey:
        """Returns the key that names a request with these blocks, at least one, and counts the request. A request that
        is tried again counts again: ids are the client's, who could use them to keep its prefixes cold."""
        self._forget(now_s)
        path = self._path(packed_keys, stride)
        self._window.append((now_s, path))
        for key in path:
            self._counts[key] = self._counts.get(key, 0) + 1
        settings = self._settings
        seen = len(self._window)
        if seen < settings.samples:
            return path[-1]
        hot, cold = settings.hot or 2 / instances, settings.cold or 1 / instances
        for place, key in enumerate(path[:-1]):
            if self._counts[key] < cold * seen:
                self._shorten(key)
                return path[place]
        last = path[-1]
        if self._counts[last] > hot * seen and len(path) < DEPTH_MAX and last != packed_keys[-KEY_BYTES:]:
            self._extended[last] = path[-2] if len(path) > 1 else None
        return last

    def _path(self, packed_keys: bytes, stride: int) -> list[BlockKey]:
        """Returns the keys of the request's prefixes: strides, then the rest. A prompt shorter than a stride begins
        with its first block. Named by its end, no turn of a short conversation would be named as the one before."""
        step, whole = stride * KEY_BYTES, len(packed_keys)
        path: list[BlockKey] = []
        end = step if whole >= step else KEY_BYTES
        while True:
            key = packed_keys[end - KEY_BYTES : end]
            if path and path[-1] == key:
                return path
            path.append(key)
            if key not in self._extended or end == whole or len(path) == DEPTH_MAX:
                return path
            end = min(end + step, whole)

    def _forget(self, now_s: float) -> None:
        """Forgets requests that leave the window, until it has room for one more."""
        settings, counts, window = self._settings, self._counts, self._window
        most = settings.window_requests or REQUESTS_MAX
        since_s = -math.inf if settings.window_requests else now_s - settings.window_s
        while len(window) >= most or (window and window[0][0] <= since_s):
            for key in window.popleft()[1]:
                left = counts[key] - 1
                if left:
                    counts[key] = left
                else:
                    del counts[key]
                    self._shorten(key)

    def _shorten(self, key: BlockKey) -> None:
        """Stops extending this prefix and all prefixes that extend it."""
        if key not in self._extended:
            return
        del self._extended[key]
        below = {key}
        while more := {each for each, before in self._extended.items() if before in below}:
            for each in more:
                del self._extended[each]
            below = more
