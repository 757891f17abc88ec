"""A journal in a file: bounded, written as it comes, never in the way of what it records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.journal import Codec, Journal
from pinyon.runtime.logging import get_logger

__all__ = ["JournalFile"]

BUFFER_BYTES = 1 << 16

_log = get_logger("journal")


class JournalFile:
    """Takes lines until ``limit_bytes``, then says so and takes no more; so it does when the disk refuses one.

    What is recorded goes on in either case: a journal is for looking back, nobody waits for it.
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
            self._file = Path(path).open("w", encoding="utf-8", buffering=BUFFER_BYTES)  # noqa: SIM115  # close()
        except OSError as error:
            raise InvalidArgument(f"cannot write {path}: {error.strerror}", field="journal") from None
        self.journal = Journal(self._write, clock, Codec(types), header)

    def _write(self, line: str) -> None:
        if self._file.closed:
            return
        self._left -= len(line) + 1  # JSON without other than ASCII: characters are bytes
        if self._left < 0:
            _log.warning("the journal %s is as large as it may be: nothing more is written", self._path)
            self.close()
            return
        try:
            self._file.write(line + "\n")
        except OSError as error:
            _log.warning("the journal %s ends: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Write what is buffered. Closing twice is fine."""
        try:
            self._file.close()
        except OSError as error:
            _log.warning("the end of the journal %s is lost: %s", self._path, error.strerror)
