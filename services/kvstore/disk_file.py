"""The file of a store node's disk tier. All methods block: they are for threads."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from pinyon.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from pinyon.store.checksums import checksums_of
from pinyon.store.disk_log import HEAD_MAX, SECTOR, DiskLog, DiskObject, Group, sectors
from pinyon.store.kv_memory import Piece
from pinyon.store.kv_object import CHECKSUM_BYTES

FILE = "objects.log"
REGIONS_MIN = 8
REGION_BYTES_MAX = 256 << 20
_VERSION = 1


class DiskFile:
    """An open file with its log's layout. One process at a time uses a folder."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Opens the file of this folder, or makes it. A file of another size or version is begun anew.

        Raises :class:`InvalidArgument` for a folder that cannot be used, :class:`FailedPrecondition` if another process
        uses it, and :class:`Unavailable` if the disk fails."""
        region_bytes = min(REGION_BYTES_MAX, size_bytes // REGIONS_MIN) // SECTOR * SECTOR
        if region_bytes < 2 * HEAD_MAX:
            raise InvalidArgument(f"a disk tier has at least {2 * REGIONS_MIN * HEAD_MAX >> 20} MiB", field="disk_mib")
        regions = size_bytes // region_bytes
        path = folder / FILE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file, self.direct = _open(path)
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be used: {error.strerror}", field="disk_dir") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise FailedPrecondition(f"another process uses {path}") from None
        self._scratch = memoryview(mmap.mmap(-1, HEAD_MAX))  # aligned, as direct access needs it
        layout = {"version": _VERSION, "region_bytes": region_bytes, "regions": regions}
        file_id = self._file_id(layout)
        self.fresh = file_id is None
        if file_id is None:
            file_id = secrets.token_bytes(8)
            head = json.dumps({**layout, "file_id": file_id.hex()}).encode()
            self._scratch[:SECTOR] = head.ljust(SECTOR, b"\0")
            try:
                os.ftruncate(self._file, 0)
                os.ftruncate(self._file, SECTOR + regions * region_bytes)  # sparse: a block is taken when it is written
                self._write([self._scratch[:SECTOR]], 0)
                os.fdatasync(self._file)
            except OSError as error:
                os.close(self._file)
                raise Unavailable(f"{path} cannot be written: {error.strerror}") from None
        self.log = DiskLog(file_id, region_bytes, regions)

    def _file_id(self, layout: dict[str, int]) -> bytes | None:
        """Returns the id of the file's content, if it has this layout."""
        try:
            found = json.loads(self._read_some(0, SECTOR).rstrip(b"\0"))
            file_id = bytes.fromhex(found.pop("file_id"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return file_id if found == layout and len(file_id) == 8 else None

    def _read_some(self, offset: int, length: int) -> bytes:
        """Reads at most ``HEAD_MAX`` bytes; fewer at the end of the file."""
        count = os.preadv(self._file, [self._scratch[:length]], offset)
        return bytes(self._scratch[:count])

    def recover(self, pool: memoryview) -> None:
        """Finds the objects of an earlier process. Uses the start of ``pool``, which is empty yet, to look at some."""

        def whole(each: DiskObject) -> bool:
            room = pool[: sectors(each.size)]
            return len(room) == sectors(each.size) and self.read_objects([(each, room)]) == [True]

        def read(offset: int, length: int) -> bytes:
            try:
                return self._read_some(offset, length)
            except OSError:
                return b""

        self.log.recover(read, whole)

    def read_objects(self, wanted: Sequence[tuple[DiskObject, memoryview]]) -> list[bool]:
        """Reads objects, in the order of the disk, into rooms of whole sectors.

        Returns for each whether its bytes are here and match its checksums."""
        found: list[bool] = []
        at = 0
        while at < len(wanted):
            end = at + 1
            while end < len(wanted) and wanted[end][0].offset == wanted[end - 1][0].offset + len(wanted[end - 1][1]):
                end += 1
            side_by_side = wanted[at:end]
            try:
                got = os.preadv(self._file, [room for _, room in side_by_side], side_by_side[0][0].offset)
            except OSError:
                got = 0
            for each, room in side_by_side:
                got -= len(room)
                found.append(got >= 0 and _matches(each, room))
            at = end
        return found

    def write(self, group: Group, rooms: Sequence[memoryview]) -> OSError | None:
        """Writes a group, its objects from these rooms with their padding. Returns what went wrong, if anything."""
        try:
            self._scratch[: len(group.head)] = group.head
            if group.fresh:
                os.fdatasync(self._file)
                # A crash must not leave the head of what was here before above the bytes of new objects.
                self._write([self._scratch[: len(group.head)]], group.offset)
                os.fdatasync(self._file)
            self._write([self._scratch[: len(group.head)], *rooms], group.offset)
        except OSError as error:
            return error
        return None

    def _write(self, buffers: list[memoryview], offset: int) -> None:
        while buffers:
            count = os.pwritev(self._file, buffers, offset)
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            offset += count
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if count:
                buffers[0] = buffers[0][count:]

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)


def _matches(each: DiskObject, room: memoryview) -> bool:
    parts = max(1, len(each.checksums) // CHECKSUM_BYTES)
    return checksums_of([Piece(b"", 0, each.size)], lambda _: room, parts) == each.checksums


def _open(path: Path) -> tuple[int, bool]:
    """Opens a file for direct access, if its file system can; returns whether it can."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600), False
