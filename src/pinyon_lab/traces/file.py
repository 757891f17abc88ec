"""A trace file, plain or gzipped, read or written row by row. Broken rows are counted, reported and left out."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, cast

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon.core.near import did_you_mean
from pinyon_lab.traces.formats import FORMATS, LINE_CHARS_MAX, TraceFormat, TraceRow, detect_format, line_of

NAMED_MAX = 10
PROGRESS_EVERY = 1024
Progress = Callable[[int], None]
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""The exceptions that reading a damaged compressed file raises."""
STDOUT = Path("-")
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
        self.format: TraceFormat = FORMATS[name] if name else self._detect()
        self.broken = 0
        self.reasons: list[str] = []
        """The reasons of the first broken rows, with line numbers."""
        self.header = b""
        """The line before the rows, in formats that have one; known once a row is read."""

    def _detect(self) -> TraceFormat:
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


class TraceWriter:
    """A context that writes one file; ``-`` is standard output. A name in ``.gz`` is gzipped, with the same bytes for
    the same rows. The file gets its name only once it is whole: after an error, what was begun is removed. Raises
    :class:`InvalidArgument` if the file cannot be written."""

    def __init__(self, path: Path, format_name: str = "qwen") -> None:
        self._path, self._format_name = path, format_name
        self._unfinished = path.parent / f".{path.name}.{os.getpid()}.part"
        self._files = ExitStack()
        self._to: IO[bytes] = sys.stdout.buffer
        self.rows = 0

    def __enter__(self) -> TraceWriter:
        if self._path == STDOUT:
            return self
        if self._path.exists() and not self._path.is_file():  # writing would replace a device
            raise self._refused("it is there and no file")
        with self._refusing():
            self._to = self._files.enter_context(self._unfinished.open("wb"))
        if self._path.suffix == ".gz":
            zipped = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=self._to, mtime=0)
            self._to = cast("IO[bytes]", self._files.enter_context(zipped))
        return self

    def write(self, row: TraceRow) -> None:
        self.write_line(line_of(row, self._format_name).encode())
        self.rows += 1

    def write_line(self, line: bytes) -> None:
        """Writes a line of any format, which must be correct; its end is added if missing."""
        with self._refusing():
            self._to.write(line if line.endswith(b"\n") else line + b"\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._refusing():
            if self._path == STDOUT:
                self._to.flush()
                return
            try:
                self._files.close()
                if kind is None:
                    self._unfinished.replace(self._path)
            finally:
                self._unfinished.unlink(missing_ok=True)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # the reader of standard output has enough: this is no error of ours
            raise
        except OSError as error:
            raise self._refused(error.strerror) from None

    def _refused(self, why: str | None) -> InvalidArgument:
        return InvalidArgument(f"cannot write {self._path}: {why}", field="out")
