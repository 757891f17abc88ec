"""A batching policy's learned table, kept in a file from one life of a worker to the next.

A table fits one kind of policy and one attention kernel: a table for others is not used, and a log line says so."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pinyon.batching import StepScheduler
from pinyon.runtime.logging import get_logger

FILE_BYTES_MAX = 1 << 20

_log = get_logger("batching")


def restore_learned(path: Path, steps: StepScheduler, batching: str, kernel: str) -> None:
    """Restores the table in the file, if it is for this policy and kernel.

    A missing file is made later. A file that cannot be used is logged, and overwritten when the worker ends."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        kept: Any = json.loads(data) if len(data) <= FILE_BYTES_MAX else None
        if not isinstance(kept, dict) or not isinstance(kept.get("table"), dict):
            raise ValueError("it is no table")
        if (kept.get("batching"), kept.get("kernel")) != (batching, kernel):
            raise ValueError(f"it is of {kept.get('batching')!r:.80} on kernel {kept.get('kernel')!r:.40}")
        steps.restore(kept["table"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, RecursionError) as error:
        _log.warning("what the batching policy had learned (%s) is not used: %s", path, error)
        return
    _log.info("batching begins with what was learned (%s): %d states", path, len(kept["table"]))


def save_learned(path: Path, table: Mapping[str, Sequence[float]], batching: str, kernel: str) -> None:
    """Saves the table whole or not at all. A failure is only logged: a worker that ends needs no table."""
    if not table:
        return
    text = json.dumps({"batching": batching, "kernel": kernel, "table": table}, indent=1)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        _log.warning("what the batching policy has learned cannot be kept in %s: %s", path, error.strerror)
        part.unlink(missing_ok=True)
