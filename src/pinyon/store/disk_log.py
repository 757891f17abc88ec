"""The log of a store node's disk: where objects lie in its file, and what a restart finds there again. Pure.

The file is a ring of *regions* of equal size. Objects are appended in *groups*: a head that names them, then their
bytes, all aligned to sectors. When the last region is full, the oldest one is emptied and filled anew. So the bytes
written are those of the objects and the heads. Objects in memory are written again when their region is emptied.
Nothing is ever changed in place.

A head also names keys that were removed since the last one, so that a restart does not find them again.

A head carries a checksum and its region's *generation*, which rises from region to region. So a restart knows the order
of the regions, and where the newest groups of each end. Before the first objects of a region are written, all earlier
regions are on the disk for good, and so is the head (the caller syncs the file). So only the objects of the newest
region may be torn: a restart checks their bytes, up to the first group that is torn. Each head says where the region
before ended, so that later restarts know it. The other objects are taken at their heads' word. Readers check all of
them all the same."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from pinyon.eviction.interface import NO_TRAITS, Traits

SECTOR = 4096
HEAD_MAX = 1 << 20
"""The largest head in bytes."""
GROUP_OBJECTS = 256
"""The largest number of objects in a group."""
REMOVED_MAX = 4096
"""The largest number of removed keys in a head."""
_MAGIC = b"pinyonK1"
_HEAD = struct.Struct(">8s8sQQIIQ")
"""The start of a head: magic, file id, generation, where the region before ended, bytes of the names, sectors of the
group, checksum of the rest and the names."""
_SUMMED = struct.Struct(">QQII")

Read = Callable[[int, int], bytes]
"""A function that reads (offset, length) of the file; it may return less at the end."""


def sectors(size_bytes: int) -> int:
    """Returns the bytes that so many bytes take on the disk."""
    return -(-size_bytes // SECTOR) * SECTOR


class DiskObject(NamedTuple):
    """An object on the disk: its ``size`` and ``offset`` in the file in bytes, and what is known of it."""

    key: bytes
    size: int
    checksums: bytes
    traits: Traits = NO_TRAITS
    place: int = 0
    """The position in the prompt that it was put for, in blocks."""
    offset: int = 0


class Group(NamedTuple):
    """Objects that are written together, at ``offset``: the head, padded to sectors, then each one's bytes, padded."""

    offset: int
    head: bytes
    objects: tuple[DiskObject, ...]
    removed: tuple[bytes, ...]
    fresh: bool
    """True for the first of its region: everything before must be on the disk for good."""


class _Found(NamedTuple):
    """A group that a restart found; ``end`` is where it ends in the file."""

    generation: int
    before: int
    end: int
    removed: list[bytes]
    objects: list[DiskObject]


@dataclass(slots=True, eq=False)
class _Region:
    generation: int = 0
    end: int = 0
    """The bytes that are taken."""
    keys: set[bytes] = field(default_factory=set)
    """The objects whose newest copy is here."""
    readers: int = 0
    closed: bool = False
    """True if nothing more is written here."""
    bad: bool = False
    """True if it cannot be written at all."""


class DiskLog:
    """The objects of one file. It has one owner. Only one group is under way at a time: begun, then ended."""

    def __init__(self, file_id: bytes, region_bytes: int, regions: int) -> None:
        """Takes 8 random bytes that name the file's content, and its layout: the first region begins at a sector."""
        self.file_id, self.region_bytes = file_id, region_bytes
        self._regions = [_Region() for _ in range(regions)]
        self._at = -1
        """The region that is being filled; none yet."""
        self._generation = 0
        self._objects: dict[bytes, DiskObject] = {}
        self._removed: dict[bytes, None] = {}
        """Keys that the next heads name as removed."""
        self.used_bytes = 0
        """The bytes of the objects on the disk, with their padding."""
        self._ended = 0
        """The bytes that were taken of the region before, when this one was begun."""

    # -- what is there

    def find(self, key: bytes) -> DiskObject | None:
        return self._objects.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._objects

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._objects)

    @property
    def removals(self) -> int:
        """The number of removed keys that no head names yet."""
        return len(self._removed)

    @property
    def capacity_bytes(self) -> int:
        """The bytes of the regions that can be used."""
        return self.region_bytes * sum(not each.bad for each in self._regions)

    def remove(self, key: bytes) -> bool:
        """Forgets an object, and has the next group say so on the disk. Returns whether it was there."""
        if not self.drop(key):
            return False
        self._removed[key] = None
        return True

    def forget_removals(self) -> None:
        """Gives up telling the disk what was removed, as nothing can be written."""
        self._removed.clear()

    def drop(self, key: bytes) -> bool:
        """Forgets an object, which a restart may find again. Returns whether it was there."""
        found = self._objects.pop(key, None)
        if found is None:
            return False
        self.used_bytes -= sectors(found.size)
        self._region_of(found.offset).keys.discard(key)
        return True

    def pin(self, found: DiskObject) -> None:
        """Keeps the object's region from being emptied until :meth:`unpin`."""
        self._region_of(found.offset).readers += 1

    def unpin(self, found: DiskObject) -> None:
        self._region_of(found.offset).readers -= 1

    # -- writing

    def next_busy(self, size_bytes: int) -> bool:
        """Returns whether a group with so many bytes of objects has to wait for a reader of the oldest region."""
        return not self._fits(size_bytes) and (following := self._following()) is not None and bool(following.readers)

    def begin(self, objects: Sequence[DiskObject]) -> tuple[Group, list[bytes]] | None:
        """Returns a group for these objects, and the keys that are no longer on the disk, as their region is emptied.

        Returns None if they do not fit into a region, or no region is usable."""
        removed = list(islice(self._removed, REMOVED_MAX))
        named = [
            [each.key.hex(), each.size, each.checksums.hex(), each.traits.tenant, each.traits.category, each.place]
            for each in objects
        ]
        names = json.dumps({"objects": named, "removed": [key.hex() for key in removed]}).encode()
        head_bytes = sectors(_HEAD.size + len(names))
        whole = head_bytes + sum(sectors(each.size) for each in objects)
        if head_bytes > HEAD_MAX or whole > self.region_bytes or len(objects) > GROUP_OBJECTS:
            return None
        gone: list[bytes] = []
        if self._at < 0 or self._region.closed or self._region.end + whole > self.region_bytes:
            following = self._following()
            if following is None:
                return None
            self._ended = self._region.end if self._at >= 0 else 0
            self._at = self._regions.index(following)
            gone = list(following.keys)
            for key in gone:
                self.drop(key)
            self._generation += 1
            self._regions[self._at] = _Region(self._generation)
        region = self._region
        offset = self._start(self._at) + region.end
        figures = region.generation, self._ended, len(names), whole // SECTOR
        head = _HEAD.pack(_MAGIC, self.file_id, *figures, xxh3_64_intdigest(_SUMMED.pack(*figures) + names))
        at, placed = offset + head_bytes, []
        for each in objects:
            placed.append(each._replace(offset=at))
            at += sectors(each.size)
        for key in removed:
            self._removed.pop(key)
        padded = (head + names).ljust(head_bytes, b"\0")
        return Group(offset, padded, tuple(placed), tuple(removed), fresh=not region.end), gone

    def end(self, group: Group, *, written: bool) -> None:
        """Ends the group: its objects are on the disk, or nothing more is written to its region.

        A region whose first group could not be written is not used any more."""
        region = self._region
        if not written:
            region.bad, region.closed = group.fresh, True
            self._removed |= dict.fromkeys(group.removed)
            return
        for each in group.objects:
            self._add(region, each)
        end = group.offset + len(group.head) + sum([sectors(each.size) for each in group.objects])
        region.end = end - self._start(self._at)

    # -- a restart

    def recover(self, read: Read, whole: Callable[[DiskObject], bool]) -> None:
        """Finds the objects of an earlier process again. ``whole`` says whether an object's bytes are all there."""
        starts = {}
        for index in range(len(self._regions)):
            first = next(self._groups(index, read), None)
            if first is not None:
                starts[first.generation] = index, first.before
        for generation, index in sorted((generation, index) for generation, (index, _) in starts.items()):
            region = self._regions[index] = _Region(generation, closed=True)
            self._generation, self._at = generation, index
            following = starts.get(generation + 1)
            for group in self._groups(index, read):
                end = group.end - self._start(index)
                if group.generation != generation or (following is not None and end > following[1]):
                    break
                if following is None and not all(map(whole, group.objects)):
                    break  # torn
                for key in group.removed:
                    self.drop(key)
                for each in group.objects:
                    self._add(region, each)
                region.end = end

    def _groups(self, index: int, read: Read) -> Iterator[_Found]:
        """Yields the groups at the start of a region, up to the first head that does not make sense."""
        at, end = self._start(index), self._start(index) + self.region_bytes
        while at + SECTOR <= end:
            head = read(at, SECTOR)
            if len(head) < SECTOR:
                return
            magic, file_id, *figures, checksum = _HEAD.unpack_from(head)
            generation, before, length, count = figures
            if magic != _MAGIC or file_id != self.file_id or length > HEAD_MAX or at + count * SECTOR > end:
                return
            if _HEAD.size + length > SECTOR:
                head = read(at, sectors(_HEAD.size + length))
            names = head[_HEAD.size : _HEAD.size + length]
            if xxh3_64_intdigest(_SUMMED.pack(*figures) + names) != checksum:
                return
            told = json.loads(names)
            offset, objects = at + sectors(_HEAD.size + length), []
            for key, size, sums, tenant, category, place in told["objects"]:
                traits = Traits(category, tenant)
                objects.append(DiskObject(bytes.fromhex(key), size, bytes.fromhex(sums), traits, place, offset))
                offset += sectors(size)
            at += count * SECTOR
            yield _Found(generation, before, at, [bytes.fromhex(key) for key in told["removed"]], objects)

    # -- helpers

    @property
    def _region(self) -> _Region:
        return self._regions[self._at]

    def _start(self, index: int) -> int:
        return SECTOR + index * self.region_bytes

    def _region_of(self, offset: int) -> _Region:
        return self._regions[(offset - SECTOR) // self.region_bytes]

    def _fits(self, size_bytes: int) -> bool:
        room = self.region_bytes - self._region.end if self._at >= 0 and not self._region.closed else 0
        return size_bytes + HEAD_MAX <= room

    def _following(self) -> _Region | None:
        """Returns the region to be filled next: the next usable one of the ring; None if there is none."""
        count = len(self._regions)
        order = (self._regions[(self._at + step) % count] for step in range(1, count + 1))
        return next((each for each in order if not each.bad), None)

    def _add(self, region: _Region, each: DiskObject) -> None:
        self.drop(each.key)  # an older copy
        self._objects[each.key] = each
        region.keys.add(each.key)
        self.used_bytes += sectors(each.size)
