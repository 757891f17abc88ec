"""A journal in a file: bounded, written within a second, and never blocking what it records."""

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
from typing import Any, ClassVar

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.journal import Codec, Journal
from pinyon.runtime.logging import get_logger
from pinyon.runtime.settings import ServiceSettings, setting

BUFFER_BYTES = 1 << 16
"""The number of waiting bytes that are written without waiting for ``FLUSH_S``."""
WAITING_BYTES = 8 << 20
"""The limit of bytes that the disk has not taken yet; with more, the journal ends."""
CLOSE_S = 5.0
"""Seconds for the last lines when a journal is closed."""
FLUSH_S = 0.5
"""Seconds after which a line is in the file at the latest; readers of an open journal see whole lines."""
EARLIER_MAX = 8
"""The number of journals of earlier starts that are kept besides the present one."""

_log = get_logger("journal")


class JournalSettings(ServiceSettings):
    """The settings of a service that writes its decisions down."""

    further: ClassVar[dict[str, str]] = {"journal": "journal journal_mib"}

    journal: str = setting("", "file that records decisions and their inputs; empty: none is written")
    journal_mib: int = setting(256, "size at which the journal ends", ge=1, le=1 << 20)

    def open_journal(self, types: Iterable[type], header: Mapping[str, Any], clock: Clock) -> JournalFile | None:
        """Opens the journal; returns None if none is wanted. Raises as :class:`JournalFile` does."""
        return JournalFile(self.journal, self.journal_mib << 20, types, header, clock) if self.journal else None


class _Writer:
    """A thread that writes lines, so that only :meth:`close` waits for the disk."""

    def __init__(self, descriptor: int, path: str, limit_bytes: int) -> None:
        """Takes over the descriptor, and writes ``limit_bytes`` at most."""
        self._descriptor = descriptor
        self._path = path
        self._left = limit_bytes
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._waiting = 0
        """The number of bytes that were put and are not written yet."""
        self._failure = ""
        self._wanted = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="pinyon-journal", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> str:
        """Takes a line, and returns an empty text, or why the line is refused."""
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
        """Lets the thread write what was put, and end."""
        self._finished = True
        self._wanted.set()

    def close(self) -> None:
        """Does :meth:`finish`, and waits for the thread."""
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
    """A journal in a file, which ends with a warning at ``limit_bytes``, or when the disk refuses a line.

    The recorded service goes on in either case: a journal is for looking back, and nobody waits for it. Its own thread
    writes it, and ends with the journal, even if nobody closes that."""

    def __init__(
        self,
        path: str,
        limit_bytes: int,
        types: Iterable[type],
        header: Mapping[str, Any],
        clock: Clock = time.monotonic,
    ) -> None:
        """Opens the file; a journal that is there already is kept as ``NAME.1.jsonl``, see :func:`earlier`.

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
        """Writes what is buffered, and nothing after it. Closing twice is fine."""
        self.ended = self.ended or "closed"
        self._writer.close()


def earlier(path: Path, number: int) -> Path:
    """Returns the path of an earlier start's journal: ``decode-0.1.jsonl`` is the last before ``decode-0.jsonl``."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _open_new(path: Path) -> int:
    """Returns a descriptor of an empty file that only this process writes. Raises :class:`OSError`."""
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
    """Opens a file for its owner only, since block keys show who asked for the same. Locks it if it is a plain file."""
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
