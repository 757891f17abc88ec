"""Structured logs on stderr: one line per record, with the service, the instance and the request id."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from pinyon.runtime.log_lines import JsonLines, TextLines

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "taskName"}
SELDOM_S = 10.0
_LEVELS = {level: logging.getLevelName(level).lower() for level in (10, 20, 30, 40, 50)}


def get_logger(name: str) -> logging.Logger:
    """Returns a logger below ``pinyon``; pass facts as ``extra={"request_id": …}``."""
    return logging.getLogger(name if name.startswith("pinyon") else f"pinyon.{name}")


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class _LineFormatter(logging.Formatter):
    def __init__(self, lines: TextLines | JsonLines) -> None:
        super().__init__()
        self.lines = lines

    def format(self, record: logging.LogRecord) -> str:
        error = self.formatException(record.exc_info) if record.exc_info else ""
        level, message = record.levelname.lower(), record.getMessage()
        return self.lines.line(record.created, level, record.name, message, _facts(record), error)


def log_line(log: logging.Logger, level: int, message: str, facts: Mapping[str, Any]) -> None:
    """Writes a record as the logger would, for a third of the CPU time; for records of every request.

    ``level`` is one that the logger is enabled for."""
    handlers = logging.root.handlers
    handler = handlers[0] if len(handlers) == 1 else None
    if isinstance(handler, logging.StreamHandler) and isinstance(formatter := handler.formatter, _LineFormatter):
        line = formatter.lines.line(time.time(), _LEVELS[level], log.name, message, facts, "") + "\n"
        handler.acquire()
        try:
            handler.stream.write(line)
            handler.stream.flush()
            return
        except (OSError, ValueError):
            pass  # logging writes the record its own way, or not at all
        finally:
            handler.release()
    # info() would search the stack for the caller, which costs as much as all of the rest.
    record = logging.LogRecord(log.name, level, "", 0, message, None, None)
    vars(record).update(facts)
    log.handle(record)


def configure_logging(service: str, instance_id: str, level: str, log_format: str) -> None:
    """Sends all of the process's records to stderr; those of libraries only from ``warning`` on."""
    handler = logging.StreamHandler(sys.stderr)
    lines = JsonLines(service, instance_id) if log_format == "json" else TextLines(instance_id)
    handler.setFormatter(_LineFormatter(lines))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # No format shows these, and they are half of a record's cost.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.logAsyncioTasks = False  # type: ignore[attr-defined]  # from Python 3.12 on
    logging.getLogger("pinyon").setLevel(level.upper())
    logging.captureWarnings(True)


def show_logs(level: str) -> None:
    """Sends pinyon's records to stderr in an inference engine's process: engines show their own only.

    Of records with one text, which a store that is away makes with every request, one is shown in a while."""
    log, shown_s = logging.getLogger("pinyon"), dict[object, float]()

    def is_due(record: logging.LogRecord) -> bool:
        due = record.created - shown_s.get(record.msg, -SELDOM_S) >= SELDOM_S
        shown_s[record.msg] = record.created if due else shown_s[record.msg]
        return due

    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(is_due)
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level.upper())
