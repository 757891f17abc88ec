"""Simulated disks, and the ``os`` and ``fcntl`` that :mod:`services.kvstore.disk_file` sees.

What was written and not synced may be lost or torn when the process dies; sectors of 512 bytes are whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

from services.kvstore.disk_tier import HUNG_S
from tests.vopr.loop import PROCESS, Process, SimLoop

ATOM = 512


class SimDisk:
    """The disk of one node, which outlives its processes. It has one file."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.loop, self.random = loop, random
        self.image = bytearray()
        self._unsynced: list[tuple[int, bytes, bytes]] = []
        """Offset, the bytes before and the bytes after of each write since the last sync, in order."""
        self.owner: Process | None = None
        self.read_errors = self.write_errors = self.short_writes = 0.0
        self.mean_s = random.choice([0.0002, 0.001, 0.01])
        self.hangs_until_s = 0.0
        self.busy_share = 0.1
        """The share of jobs that take much longer than most."""
        self.flipped: set[int] = set()
        """The offsets at which bits were flipped at rest, and nothing was written since."""
        self.flips = self.torn = self.errors = self.syncs = self.hangs = 0

    def job_delay_s(self) -> float:
        wait_s = max(0.0, self.hangs_until_s - self.loop.time())
        busy = 40 if self.random.random() < self.busy_share else 1
        return wait_s + min(HUNG_S / 4, busy * self.random.expovariate(1 / self.mean_s))  # longer would be a fault

    def resize(self, size: int) -> None:
        if size < len(self.image):
            del self.image[size:]
        self.image.extend(bytes(size - len(self.image)))

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail(self.read_errors)
        total = 0
        for buffer in buffers:
            part = self.image[offset + total : offset + total + len(buffer)]
            buffer[: len(part)] = part
            total += len(part)
            if len(part) < len(buffer):
                break
        return total

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail(self.write_errors)
        data = b"".join(buffers)
        if self.short_writes and self.random.random() < self.short_writes:
            data = data[: max(ATOM, self.random.randrange(len(data)) // ATOM * ATOM)]
        end = offset + len(data)
        assert end <= len(self.image), "a write beyond the file's end"
        self._unsynced.append((offset, bytes(self.image[offset:end]), data))
        self.image[offset:end] = data
        self.flipped = {at for at in self.flipped if not offset <= at < end} if self.flipped else self.flipped
        return len(data)

    def sync(self) -> None:
        self._fail(self.write_errors)
        self.syncs += 1
        self._unsynced.clear()

    def _fail(self, share: float) -> None:
        if share and self.random.random() < share:
            self.errors += 1
            raise OSError(errno.EIO, "simulated")

    def crash(self) -> None:
        """Loses or tears what was not synced."""
        for offset, before, _ in reversed(self._unsynced):
            self.image[offset : offset + len(before)] = before
        for offset, _, after in self._unsynced:
            fate = self.random.random()
            if fate < 0.4:  # whole
                self.image[offset : offset + len(after)] = after
            elif fate < 0.8:
                self.torn += 1
                for at in range(0, len(after), ATOM):
                    if self.random.random() < 0.7:
                        self.image[offset + at : offset + at + ATOM] = after[at : at + ATOM]
        self._unsynced.clear()

    def flip(self, offset: int) -> None:
        self.flips += 1
        self.image[offset] ^= 1 << self.random.randrange(8)
        self.flipped.add(offset)

    def sound(self, offset: int, length: int) -> bool:
        """Returns whether no bit was flipped there."""
        return not any(offset <= at < offset + length for at in self.flipped)


class SimFolder:
    """The folder of a disk, in the place of a :class:`pathlib.Path`; ``/`` gives the name of its one file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def mkdir(self, **_: Any) -> None:
        """Does nothing: the folder is there."""

    def __truediv__(self, name: str) -> str:
        return self._name


class SimThreads:
    """The threads of a disk tier or of a policy that learns; :meth:`SimLoop.run_in_executor` does their jobs."""

    def __init__(self, *_: Any, thread_name_prefix: str = "", **__: Any) -> None:
        self.name = thread_name_prefix

    def shutdown(self, **_: Any) -> None:
        """Does nothing: jobs under way go on, as in threads."""


def system_calls(disks: dict[str, SimDisk]) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Returns ``os`` and ``fcntl`` for files on these disks, which are named by their nodes."""
    numbers: dict[int, tuple[SimDisk, Process]] = {}

    def opened(path: str, flags: int, mode: int = 0) -> int:
        numbers[len(numbers) + 3] = disks[path], PROCESS.get()
        return len(numbers) + 2

    def lock(number: int, how: int) -> None:
        disk, process = numbers[number]
        if disk.owner is not None and disk.owner is not process and not disk.owner.dead:
            raise BlockingIOError(errno.EWOULDBLOCK, "simulated")
        disk.owner = process

    def close(number: int) -> None:
        disk, process = numbers[number]
        if disk.owner is process:
            disk.owner = None

    calls = SimpleNamespace(
        open=opened,
        close=close,
        preadv=lambda number, buffers, offset: numbers[number][0].read(buffers, offset),
        pwritev=lambda number, buffers, offset: numbers[number][0].write(buffers, offset),
        fdatasync=lambda number: numbers[number][0].sync(),
        ftruncate=lambda number, size: numbers[number][0].resize(size),
        **{name: getattr(os, name) for name in ("O_RDWR", "O_CREAT", "O_CLOEXEC", "O_DIRECT")},
    )
    return calls, SimpleNamespace(flock=lock, LOCK_EX=2, LOCK_NB=4)
