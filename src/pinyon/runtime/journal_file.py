"""A journal in a file: bounded, in the file within a second, never in the way of what it records."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.journal import Codec, Journal
from pinyon.runtime.logging import get_logger
from pinyon.runtime.settings import ServiceSettings, service_config

BUFFER_BYTES = 1 << 16
"""So much is written at once, sooner than after ``FLUSH_S``."""
WAITING_BYTES = 8 << 20
"""Of lines that the disk has not taken yet. With more the journal ends."""
CLOSE_S = 5.0
"""For the last lines."""
FLUSH_S = 0.5
"""A line is in the file after that, at the latest: whoever reads a journal that is being written sees whole lines."""
EARLIER_MAX = 8
"""Journals of earlier starts that are kept beside the one that is written."""

_log = get_logger("journal")


class JournalSettings(ServiceSettings):
    """What a service that decides can be told about writing it down."""

    model_config = service_config("service")

    journal: str = Field("", description="file for what is decided and from which inputs; empty: none is written")
    journal_mib: int = Field(256, ge=1, le=1 << 20, description="size at which the journal ends")

    def open_journal(self, types: Iterable[type], header: Mapping[str, Any], clock: Clock) -> JournalFile | None:
        """None when none is wanted. Raises as :class:`JournalFile` does."""
        return JournalFile(self.journal, self.journal_mib << 20, types, header, clock) if self.journal else None


class _Writer:
    """A thread that writes lines. Nobody waits for the disk but who closes."""

    def __init__(self, descriptor: int, path: str, limit_bytes: int) -> None:
        """The descriptor is its own from now on."""
        self._descriptor = descriptor
        self._path = path
        self._left = limit_bytes
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._waiting = 0
        """Bytes that were put and are not written yet."""
        self._failure = ""
        self._wanted = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="pinyon-journal", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> str:
        """Why it is not taken; empty: it is."""
        with self._lock:
            self._left -= len(line)
            if self._failure:
                return self._failure
            if self._left < 0:
                return "it is as large as it may be"
            if self._waiting + len(line) > WAITING_BYTES:
                return "the disk is too slow"
            self._lines.append(line)
            self._waiting += len(line)
            full = self._waiting >= BUFFER_BYTES
        if full:
            self._wanted.set()
        return ""

    def finish(self) -> None:
        """Write what was put, and end."""
        self._finished = True
        self._wanted.set()

    def close(self) -> None:
        """:meth:`finish`, and wait for it."""
        self.finish()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("the end of the journal %s is lost: the disk is too slow", self._path)

    def _run(self) -> None:
        try:
            finished = False
            while not finished:
                self._wanted.wait(FLUSH_S)
                self._wanted.clear()
                finished = self._finished
                with self._lock:
                    lines, self._lines = self._lines, []
                data = b"".join(lines)
                at = 0
                while at < len(data):
                    at += os.write(self._descriptor, memoryview(data)[at:])
                with self._lock:
                    self._waiting -= len(data)
        except OSError as error:
            self._failure = error.strerror or type(error).__name__
            _log.warning("the journal %s cannot be written: %s", self._path, self._failure)
        finally:
            os.close(self._descriptor)


class JournalFile(Journal):
    """Takes lines until ``limit_bytes``, then says so and takes no more; so it does when the disk refuses one.

    What is recorded goes on in either case: a journal is for looking back, nobody waits for it. A thread of its own
    writes it; it ends with the journal, also with one that nobody has closed.
    """

    def __init__(
        self,
        path: str,
        limit_bytes: int,
        types: Iterable[type],
        header: Mapping[str, Any],
        clock: Clock = time.monotonic,
    ) -> None:
        """A journal that is there already is kept as ``NAME.1.jsonl``, see :func:`earlier`.

        Raises :class:`InvalidArgument` (field ``journal``) when the file cannot be written."""
        self._path = path
        try:
            descriptor = _open_new(Path(path))
        except OSError as error:
            taken = error.errno in (errno.EWOULDBLOCK, errno.EEXIST)
            reason = "another process writes its journal there" if taken else error.strerror
            raise InvalidArgument(f"cannot write {path}: {reason}", field="journal") from None
        self._writer = _Writer(descriptor, path, limit_bytes)
        weakref.finalize(self, self._writer.finish)
        super().__init__(self._take, clock, Codec(types), header)

    def _take(self, line: str) -> None:
        if not self.ended and (why := self._writer.put(line.encode() + b"\n")):
            self.end(why)

    def end(self, reason: str) -> None:
        if not self.ended:
            _log.warning("the journal %s ends: %s", self._path, reason)
        super().end(reason)
        self._writer.finish()

    def close(self) -> None:
        """Write what is buffered, and nothing after it. Closing twice is fine."""
        self.ended = self.ended or "closed"
        self._writer.close()


def earlier(path: Path, number: int) -> Path:
    """Where the journal of an earlier start is: ``decode-0.1.jsonl`` is the last before ``decode-0.jsonl``, ``.2`` the
    one before that."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _open_new(path: Path) -> int:
    """A descriptor of an empty file that only this process writes. Raises :class:`OSError`."""
    descriptor = _open_locked(path, 0)
    status = os.fstat(descriptor)
    if not (stat.S_ISREG(status.st_mode) and status.st_size):
        return descriptor
    try:  # the lock on the old file keeps others off until the new one has its own
        for number in range(EARLIER_MAX - 1, 0, -1):
            if earlier(path, number).exists():
                earlier(path, number).replace(earlier(path, number + 1))
        path.replace(earlier(path, 1))
        return _open_locked(path, os.O_EXCL)
    finally:
        os.close(descriptor)


def _open_locked(path: Path, flags: int) -> int:
    """Nobody else's: block keys say who asked for the same. What is no plain file, such as a pipe, has no lock."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, 0o600)
            if not os.path.samestat(os.fstat(descriptor), path.stat()):
                raise OSError(errno.EWOULDBLOCK, "another process has begun a new file there meanwhile")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
