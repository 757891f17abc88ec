"""The registered memory that holds an engine's KV blocks, as ranges by block and layer.

Pinyon's own engine keeps a whole KV object in one range. Other engines have a tensor for each layer, so that an object
lies in as many pieces as the model has layers. Reads and puts take the pieces, whatever engine it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pinyon.transfer import Region, RegionDescriptor


class Piece(NamedTuple):
    """A range of registered memory: the key of its region, and bytes from the region's start."""

    region_key: bytes
    offset: int
    length: int


Pieces = Sequence[Piece]
"""The memory of one object, in the object's order."""


class RemotePiece(NamedTuple):
    """A range of a peer's memory, in bytes from the region's start."""

    region: RegionDescriptor
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def part_of(pieces: Sequence[RemotePiece], start: int, length: int) -> list[RemotePiece]:
    """Returns ``length`` bytes of an object that lies in these pieces, from byte ``start`` of it on."""
    found: list[RemotePiece] = []
    for piece in pieces:
        skipped = min(start, piece.length)
        step = min(piece.length - skipped, length)
        if step:
            found.append(piece._replace(offset=piece.offset + skipped, length=step))
        start, length = start - skipped, length - step
    return found


def side_by_side(here: Pieces, there: Sequence[RemotePiece]) -> Iterator[tuple[Piece, RemotePiece]]:
    """Yields both halves of an object's parts, cut so that each part is one range here and one range there.

    Both are of the same length in all."""
    if len(here) == len(there) == 1:
        yield here[0], there[0]
        return
    others = iter(there)
    piece, done = next(others), 0
    for key, offset, length in here:
        end = offset + length
        while offset < end:
            if done == piece.length:
                piece, done = next(others), 0
            part = min(end - offset, piece.length - done)
            yield Piece(key, offset, part), piece._replace(offset=piece.offset + done, length=part)
            offset, done = offset + part, done + part


class LayerMemory(NamedTuple):
    """One layer of all blocks: block ``b`` has ``length`` bytes at ``base + b * stride`` of the region."""

    region: Region
    base: int
    stride: int
    length: int


class KvMemory:
    """The memory of a paged pool. An object is the concatenation of its block's layers."""

    def __init__(self, layers: Sequence[LayerMemory]) -> None:
        self._layers = [(each.region.key, each.base, each.stride, each.length) for each in layers]
        self.object_bytes = sum(each.length for each in layers)

    @classmethod
    def whole(cls, region: Region, object_bytes: int) -> KvMemory:
        """Returns the memory of a pool in which each block's object is one range, from the region's start on."""
        return cls([LayerMemory(region, 0, object_bytes, object_bytes)])

    def pieces(self, block: int) -> list[Piece]:
        """Returns where the block's object lies."""
        return [Piece(key, base + block * stride, length) for key, base, stride, length in self._layers]
