"""The log of a disk against a plain model: whatever is cut off or flipped, a restart finds whole objects only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_digest

from pinyon.eviction.interface import Traits
from pinyon.store.disk_log import HEAD_MAX, SECTOR, DiskLog, DiskObject, sectors
from tests.long import usually

REGION = HEAD_MAX + 16 * SECTOR
REGIONS = 4
KEYS = [bytes([number]) * 16 for number in range(1, 13)]


def content(key: bytes) -> bytes:
    """Returns the bytes of this key, which are never others: 1 byte to 5 sectors."""
    return (key * 1280)[: 1 + 1707 * (key[0] - 1)]


class Disk:
    """A file in memory."""

    def __init__(self) -> None:
        self.bytes = bytearray(SECTOR + REGIONS * REGION)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.bytes[offset : offset + length])

    def object(self, each: DiskObject) -> bytes:
        return self.read(each.offset, each.size)

    def whole(self, each: DiskObject) -> bool:
        return xxh3_64_digest(self.object(each)) == each.checksums


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.log = DiskLog(b"the file", REGION, REGIONS)
        self.expected: set[bytes] = set()
        self.maybe: set[bytes] = set()
        """Keys that are gone, although the disk may still have them: it did not take what came after."""
        self.stale: set[bytes] = set()
        """Keys that may still be in a region that could not be written: a restart may find them at any time."""
        self.written: set[bytes] = set()

    @rule(
        keys=st.lists(st.sampled_from(KEYS), max_size=6, unique=True),
        fate=st.sampled_from(["written", "written", "written", "failed", "half", "torn"]),
        cut=st.integers(0, 1 << 20),
    )
    def write(self, keys: list[bytes], fate: str, cut: int) -> None:
        objects = [
            DiskObject(key, len(content(key)), xxh3_64_digest(content(key)), Traits("text/1", "t"), 7) for key in keys
        ]
        begun = self.log.begin(objects)
        if begun is None:
            assert not self.log.capacity_bytes
            return
        group, gone = begun
        self.expected.difference_update(gone)
        self.maybe.update(gone)
        data = group.head + b"".join(content(key).ljust(sectors(len(content(key))), b"\0") for key in keys)
        assert group.offset % SECTOR == 0
        assert (group.offset - SECTOR) // REGION == (group.offset + len(data) - 1 - SECTOR) // REGION
        if fate in ("half", "torn"):
            data = data[: cut % len(data)]
        if fate != "failed":
            self.disk.bytes[group.offset : group.offset + len(data)] = data
        if fate == "torn":
            self.maybe.update(keys)
            self.stale |= self.written
            self.restart()
            return
        self.log.end(group, written=fate == "written")
        if fate == "written":
            self.expected.update(keys)
            self.written.update(keys)
            self.maybe = set()
        else:
            self.maybe.update(keys)
            # If the head after it is torn later, a restart takes what is whole.
            self.stale |= self.written | set(keys)

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: bytes) -> None:
        assert self.log.remove(key) == (key in self.expected)
        if key in self.expected:
            self.expected.discard(key)
            self.maybe.add(key)

    @rule()
    def restart(self) -> None:
        self.log = DiskLog(b"the file", REGION, REGIONS)
        self.log.recover(self.disk.read, self.disk.whole)
        found = set(self.log)
        assert found >= self.expected, "what was written is found again"
        assert found - self.expected <= self.maybe | self.stale, "nothing else is found"
        self.expected = found

    @invariant()
    def the_bytes_are_where_the_log_says(self) -> None:
        assert set(self.log) == self.expected
        for key in self.expected:
            each = self.log.find(key)
            assert each is not None
            assert self.disk.object(each) == content(key)
            assert (each.traits, each.place) == (Traits("text/1", "t"), 7)
        assert self.log.used_bytes == sum(sectors(len(content(key))) for key in self.expected)


TestDiskLog = LogMachine.TestCase
TestDiskLog.settings = settings(max_examples=usually(60, long=600), stateful_step_count=40, deadline=None)


@given(st.integers(0, SECTOR + REGION), st.integers(0, 7))
@settings(max_examples=usually(200, long=2000), deadline=None)
def test_a_flipped_bit_never_makes_a_wrong_object(at: int, bit: int) -> None:
    disk, log = Disk(), DiskLog(b"the file", REGION, REGIONS)
    contents = {key: content(key) for key in KEYS[:6]}
    for key, data in contents.items():
        begun = log.begin([DiskObject(key, len(data), xxh3_64_digest(data))])
        assert begun is not None
        group, _ = begun
        whole = group.head + data.ljust(sectors(len(data)), b"\0")
        disk.bytes[group.offset : group.offset + len(whole)] = whole
        log.end(group, written=True)
    disk.bytes[at] ^= 1 << bit
    again = DiskLog(b"the file", REGION, REGIONS)
    again.recover(disk.read, disk.whole)
    for key in again:
        each = again.find(key)
        assert each is not None
        assert disk.object(each) == contents[key]


def test_another_files_groups_are_not_found() -> None:
    disk, log = Disk(), DiskLog(b"the file", REGION, REGIONS)
    begun = log.begin([DiskObject(KEYS[0], 5, b"")])
    assert begun is not None
    disk.bytes[begun[0].offset : begun[0].offset + SECTOR] = begun[0].head
    other = DiskLog(b"another!", REGION, REGIONS)
    other.recover(disk.read, lambda _: True)
    assert not len(other)
