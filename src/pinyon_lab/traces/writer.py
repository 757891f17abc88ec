"""A trace as pinyon writes it: the format ``qwen`` (or ``mooncake``) with user ids, perhaps gzipped."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces.formats import TraceRow

STDOUT = Path("-")


def line_of(row: TraceRow, format_name: str = "qwen") -> str:
    """Returns the line of a row, with its end. In ``mooncake`` there are no ids of requests, and times in whole ms."""
    if format_name not in ("qwen", "mooncake"):
        raise ValueError(f"pinyon writes qwen and mooncake, not {format_name}")
    fields: dict[str, object] = {}
    lengths = {"input_length": row.input_tokens, "output_length": row.output_tokens}
    kind = {"type": row.kind, "turn": row.turn}
    if format_name == "qwen":
        time_s = round(row.time_s, 6) + 0.0  # never -0.0
        fields |= {"chat_id": row.chat, "parent_chat_id": row.parent or -1, "timestamp": time_s}
        fields |= lengths | kind | {"hash_ids": row.blocks}
    else:
        fields |= {"timestamp": round(row.time_s * 1e3), **lengths, "hash_ids": row.blocks}
        fields |= kind if row.kind else {}
    if row.user:
        fields["user_id"] = row.user
    if row.output_blocks and format_name == "qwen":
        fields["output_hash_ids"] = row.output_blocks
    return json.dumps(fields, separators=(",", ":")) + "\n"


class TraceWriter:
    """A context that writes one file; ``-`` is standard output. A name in ``.gz`` is gzipped, with the same bytes for
    the same rows. The file gets its name only once it is whole: after an error, what was begun is removed. Raises
    :class:`InvalidArgument` if the file cannot be written."""

    def __init__(self, path: Path, format_name: str = "qwen") -> None:
        self._path = path
        self._format_name = format_name
        self._unfinished = path.parent / f".{path.name}.{os.getpid()}.part"
        self._files = ExitStack()
        self._to: IO[bytes] = sys.stdout.buffer
        self.rows = 0

    def __enter__(self) -> TraceWriter:
        if self._path != STDOUT:
            if self._path.exists() and not self._path.is_file():  # writing would replace a device
                raise self._refused("it is there and no file")
            with self._refusing():
                self._to = self._files.enter_context(self._unfinished.open("wb"))
            if self._path.suffix == ".gz":
                zipped = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=self._to, mtime=0)
                self._files.callback(zipped.close)
                self._to = cast("IO[bytes]", zipped)
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
