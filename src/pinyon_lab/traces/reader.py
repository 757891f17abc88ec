"""A trace file, plain or gzipped, read row by row. Broken rows are counted, reported and left out."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon.core.near import did_you_mean
from pinyon_lab.traces.formats import FORMATS, LINE_CHARS_MAX, Format, TraceRow, detect_format

NAMED_MAX = 10
PROGRESS_EVERY = 1024
Progress = Callable[[int], None]
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""The exceptions that reading a damaged compressed file raises."""
_GZIP = b"\x1f\x8b"


class TraceFile:
    """A trace file. ``rows`` may be read once at a time; ``broken`` and ``reasons`` are those of the last reading."""

    def __init__(self, path: Path, name: str = "") -> None:
        """Opens a trace in the format ``name``; empty: the first row tells. Raises :class:`NotFound` or
        :class:`InvalidArgument` if there is none."""
        if not path.is_file():
            raise NotFound(f"no trace file at {path}", field="trace")
        if name and name not in FORMATS:
            hint = did_you_mean(name, FORMATS)
            raise InvalidArgument(f"no trace format {name!r}{hint}; known: {', '.join(FORMATS)}", field="format")
        self.path = path
        self.size_bytes = path.stat().st_size
        self.format: Format = FORMATS[name] if name else self._detect()
        self.broken = 0
        self.reasons: list[str] = []
        """The reasons of the first broken rows, with line numbers."""
        self.header = b""
        """The line before the rows, in formats that have one; known once a row is read."""

    def _detect(self) -> Format:
        with _opened(self.path) as (_, lines):
            try:
                for line in lines:
                    if line.strip():
                        return detect_format(line.decode("utf-8", "replace"))
            except DAMAGED as error:
                raise InvalidArgument(f"{self.path} is damaged: {error}", field="trace") from None
            except InvalidArgument as error:
                raise InvalidArgument(f"{self.path} is {error.message}", field="trace") from None
        raise InvalidArgument(f"{self.path} is empty", field="trace")

    def rows(self, limit: int = 0, progress: Progress = lambda _: None) -> Iterator[TraceRow]:
        """Yields the rows in the order of the file, at most ``limit`` (0: all). Calls ``progress`` now and then with
        the bytes of the raw file read so far."""
        return (row for _, row in self.lines(limit, progress))

    def lines(self, limit: int = 0, progress: Progress = lambda _: None) -> Iterator[tuple[bytes, TraceRow]]:
        """Yields each line of the file with its row, as :meth:`rows` does."""
        self.broken, self.reasons = 0, []
        parse, count, skip = self.format.make(), 0, self.format.header
        with _opened(self.path) as (raw, lines):
            try:
                for number, line in enumerate(lines, 1):
                    if skip or not line.strip():
                        self.header = line if skip else self.header
                        skip = False
                        continue
                    try:
                        row = parse(line.decode("utf-8"))
                    except ValueError as error:
                        self._broke(f"line {number}: {error}")
                        continue
                    yield line, row
                    count += 1
                    if count % PROGRESS_EVERY == 0:
                        progress(raw.tell())
                    if count == limit:
                        return
            except DAMAGED as error:
                self._broke(f"the file ends or is damaged after {count} rows: {error}")

    def _broke(self, reason: str) -> None:
        self.broken += 1
        if len(self.reasons) < NAMED_MAX:
            self.reasons.append(reason[:200])

    def sorted_rows(self, limit: int = 0, progress: Progress = lambda _: None) -> list[TraceRow]:
        """Returns what :meth:`rows` yields in order of time, all in memory; equal times as in the file."""
        return sorted(self.rows(limit, progress), key=lambda row: row.time_s)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Iterator[bytes]]]:
    """Opens a file; yields the raw file, whose position shows the progress, and its lines of bounded length."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == _GZIP
        raw.seek(0)
        file = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if zipped else raw
        yield raw, iter(lambda: file.readline(LINE_CHARS_MAX + 1), b"")
