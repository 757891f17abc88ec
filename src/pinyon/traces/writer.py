"""A trace as pinyon writes it: the format ``qwen`` with user ids, perhaps gzipped."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from pinyon.traces.row import TraceRow

__all__ = ["TraceWriter", "line_of"]

STDOUT = Path("-")


def line_of(row: TraceRow) -> str:
    """Its line, with the end."""
    fields: dict[str, object] = {
        "chat_id": row.chat,
        "parent_chat_id": row.parent or -1,
        "timestamp": round(row.time_s, 6),
        "input_length": row.input_tokens,
        "output_length": row.output_tokens,
        "type": row.kind,
        "turn": row.turn,
        "hash_ids": row.blocks,
    }
    if row.user:
        fields["user_id"] = row.user
    if row.output_blocks:
        fields["output_hash_ids"] = row.output_blocks
    return json.dumps(fields, separators=(",", ":")) + "\n"


class TraceWriter:
    """Of one file (``-``: standard output; a name that ends in ``.gz``: gzipped, the same bytes for the same rows).

    As a context. The file has its name only once it is whole: what was begun is removed after an error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._files: list[IO[bytes]] = []
        self._to: IO[bytes] = sys.stdout.buffer
        self.rows = 0

    def __enter__(self) -> TraceWriter:
        if self._path != STDOUT:
            raw = self._unfinished.open("wb")
            self._files.append(raw)
            if self._path.suffix == ".gz":
                zipped = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0)
                self._files.insert(0, zipped)  # type: ignore[arg-type]
            self._to = self._files[0]
        return self

    def write(self, row: TraceRow) -> None:
        self.write_line(line_of(row).encode())
        self.rows += 1

    def write_line(self, line: bytes) -> None:
        """One that is as it should be, of any format; its end is added where it has none."""
        self._to.write(line if line.endswith(b"\n") else line + b"\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for file in self._files:
                file.close()
            if self._files and kind is None:
                self._unfinished.replace(self._path)
        finally:
            if self._files:
                self._unfinished.unlink(missing_ok=True)
            else:
                self._to.flush()
