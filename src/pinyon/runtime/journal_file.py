"""A journal in a file: bounded, in the file within a second, never in the way of what it records."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.journal import Codec, Journal
from pinyon.runtime.logging import get_logger
from pinyon.runtime.settings import ServiceSettings, service_config

__all__ = ["JournalFile", "JournalSettings"]

BUFFER_BYTES = 1 << 16
FLUSH_S = 0.5
"""A line is in the file after that, at the latest: whoever reads a journal that is being written sees whole lines."""

_log = get_logger("journal")


class JournalSettings(ServiceSettings):
    """What a service that decides can be told about writing it down."""

    model_config = service_config("service")

    journal: str = Field("", description="file for what is decided and from which inputs; empty: none is written")
    journal_mib: int = Field(256, ge=1, le=1 << 20, description="size at which the journal ends")

    def open_journal(self, types: Iterable[type], header: Mapping[str, Any], clock: Clock) -> JournalFile | None:
        """None when none is wanted. Raises as :class:`JournalFile` does."""
        return JournalFile(self.journal, self.journal_mib << 20, types, header, clock) if self.journal else None


class JournalFile(Journal):
    """Takes lines until ``limit_bytes``, then says so and takes no more; so it does when the disk refuses one.

    What is recorded goes on in either case: a journal is for looking back, nobody waits for it. A thread of its own
    writes what is buffered every ``FLUSH_S``.
    """

    def __init__(
        self,
        path: str,
        limit_bytes: int,
        types: Iterable[type],
        header: Mapping[str, Any],
        clock: Clock = time.monotonic,
    ) -> None:
        """Raises :class:`InvalidArgument` (field ``journal``) when the file cannot be written; replaces an old one."""
        self._path = path
        self._left = limit_bytes
        try:
            # Nobody else's: block keys say who asked for the same.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(f"cannot write {path}: {error.strerror}", field="journal") from None
        try:
            if Path(path).is_file():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fchmod(descriptor, 0o600)
                os.ftruncate(descriptor, 0)
        except OSError as error:
            os.close(descriptor)
            reason = "another process writes its journal there" if error.errno == errno.EWOULDBLOCK else error.strerror
            raise InvalidArgument(f"cannot write {path}: {reason}", field="journal") from None
        self._file = os.fdopen(descriptor, "wb", buffering=BUFFER_BYTES)
        self._lock = threading.RLock()
        self._closed = threading.Event()
        super().__init__(self._take, clock, Codec(types), header)
        threading.Thread(target=self._write_now_and_then, name="pinyon-journal", daemon=True).start()

    def _take(self, line: str) -> None:
        data = line.encode() + b"\n"
        with self._lock:
            self._left -= len(data)
            if self._left < 0:
                self.end("it is as large as it may be")
            if self.ended:
                return
            try:
                self._file.write(data)
            except OSError as error:
                self.end(str(error.strerror))

    def _write_now_and_then(self) -> None:
        while not self._closed.wait(FLUSH_S):
            with self._lock:
                if self.ended:
                    return
                try:
                    self._file.flush()
                except OSError as error:
                    self.end(str(error.strerror))

    def end(self, reason: str) -> None:
        with self._lock:
            if not self.ended:
                _log.warning("the journal %s ends: %s", self._path, reason)
            super().end(reason)
            self.close()

    def close(self) -> None:
        """Write what is buffered, and nothing after it. Closing twice is fine."""
        with self._lock:
            self.ended = self.ended or "closed"
            self._closed.set()
            try:
                self._file.close()
            except OSError as error:
                _log.warning("the end of the journal %s is lost: %s", self._path, error.strerror)
