"""The time that KV takes from one instance to another: by the kind of path and by who sends."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar, Final

from pinyon.placement.cost_model import NonNegativeLeastSquares

PRIOR_SHARE_MIN = 1e-3
"""The least share of its prior from which a new path's coefficient starts, even if other paths seem to be without."""
RATE_EASING = 1.02
"""The time of the fastest read counts as so much more with each read: a source may have become slower."""
FASTER_MAX = 2.0
"""One read shows a source to be at most so many times faster than it was, and than the reader's path. Its time is known
to a microsecond and less its start, and its reader may say anything."""
SLOWER_MAX = 16.0
"""A first read shows a source as at most so many times slower than the reader's path: it may be a byte in an hour."""
READ_BYTES_S_MAX = 1e13
"""The bound of any read's speed. The adapters of a host have 0.8 TB/s (sixteen of 400 Gbit/s), its memory one or two,
the links between all of its GPUs 7."""
RATE_S = 60.0
"""A source that nobody has read from for so long may be fast again: a source that seems slow is not read from."""


class PathKind(IntEnum):
    """The kind of path between who sends KV and who reads it."""

    HOST = 0
    """The memory of the host that both are on."""
    NETWORK = 1
    STORE = 2
    """The memory of the host that both are on: the pool of a store node."""
    SSD = 3
    """The SSDs of a store node, wherever it is."""

    @property
    def shared(self) -> bool:
        """True if others' reads go through the same adapters."""
        return self in (PathKind.NETWORK, PathKind.SSD)


PATH_KINDS: Final = 4
HOST: Final = PathKind.HOST
NETWORK: Final = PathKind.NETWORK
STORE: Final = PathKind.STORE
SSD: Final = PathKind.SSD
"""Aliases of the kinds: a look-up in their class takes ten times as long."""

TransferPriors = tuple[tuple[float, float], ...]
"""A start in seconds, and seconds per byte, for each kind of path."""


class TransferCostModel:
    """Seconds to fetch KV into one instance: a start plus bytes over bandwidth, for each kind of path.

    A kind that was not measured is as many times slower than its prior as the reader's other paths are than theirs. As
    long as nothing was measured, it is as its prior: 1 ms and 1 GB/s."""

    __slots__ = ("_all", "_known", "_paths", "_priors")

    PRIOR: ClassVar[tuple[float, float]] = (1e-3, 1e-9)

    def __init__(self, priors: TransferPriors | None = None) -> None:
        self._priors = priors or (self.PRIOR,) * PATH_KINDS
        # the fit of all kinds, in multiples of their priors
        self._all = NonNegativeLeastSquares((1.0, 1.0))
        self._paths: dict[PathKind, NonNegativeLeastSquares] = {}
        self._known: list[tuple[float, float] | None] = [None] * PATH_KINDS

    @property
    def samples(self) -> int:
        return self._all.count

    def coefficients(self, kind: PathKind) -> tuple[float, float]:
        """Returns ``(start in seconds, seconds per byte)``."""
        known = self._known[kind]
        if known is None:
            path = self._paths.get(kind)
            if path is not None:
                start, per_byte = path.coefficients
            else:
                prior, multiples = self._priors[kind], self._all.multiples
                start, per_byte = prior[0] * multiples[0], prior[1] * multiples[1]
            known = self._known[kind] = start, per_byte
        return known

    def predict_s(self, size_bytes: float, kind: PathKind = PathKind.NETWORK) -> float:
        """Returns the seconds of one read from one source, with nothing else on its way."""
        start, per_byte = self.coefficients(kind)
        return start + per_byte * size_bytes if size_bytes else 0.0

    def observe(self, size_bytes: float, seconds: float, kind: PathKind | None = None) -> None:
        """Learns from one measured read, of ``size_bytes`` and what moved before or beside it. Without a kind (several
        kinds, or unknown) it tells of the reader's paths as a whole."""
        if size_bytes <= 0:
            return
        prior = self._priors[PathKind.NETWORK if kind is None else kind]
        if kind is not None:
            path = self._paths.get(kind)
            if path is None:
                floors = [PRIOR_SHARE_MIN * each for each in prior]
                path = NonNegativeLeastSquares([*map(max, self.coefficients(kind), floors)])
                self._paths[kind] = path
            path.observe((1.0, size_bytes), seconds)
        self._all.observe((prior[0], prior[1] * size_bytes), seconds)
        self._known = [None] * PATH_KINDS

    def copy_from(self, other: TransferCostModel) -> None:
        """Starts from what another instance's model has learned."""
        self._priors = other._priors
        self._all.copy_from(other._all)
        self._paths = {}
        for kind, path in other._paths.items():
            mine = self._paths[kind] = NonNegativeLeastSquares((1.0, 1.0))
            mine.copy_from(path)
        self._known = [None] * PATH_KINDS


class SendRate:
    """The fastest that one source was seen to send lately, to any reader: a slower read may be the reader's fault."""

    __slots__ = ("_read_s", "per_byte_s")

    def __init__(self) -> None:
        self.per_byte_s = 0.0
        """Seconds per byte; 0: nobody has read from it lately."""
        self._read_s = 0.0

    def look(self, now_s: float) -> None:
        """Forgets what was seen too long ago."""
        if now_s - self._read_s > RATE_S:
            self.per_byte_s = 0.0

    def observe(self, size_bytes: float, seconds: float, now_s: float, path_s: float = 0.0) -> None:
        """Learns from a read of ``size_bytes`` with what moved before or beside it; ``path_s``: what the read alone
        takes on its reader's path."""
        self._read_s = now_s
        if size_bytes > 0 and seconds > 0:
            fastest = self.per_byte_s
            per_byte_s = max(seconds / size_bytes, path_s / size_bytes / FASTER_MAX, fastest / FASTER_MAX)
            if path_s and not fastest:
                per_byte_s = min(per_byte_s, SLOWER_MAX * path_s / size_bytes)
            self.per_byte_s = min(per_byte_s, fastest * RATE_EASING) if fastest else per_byte_s
