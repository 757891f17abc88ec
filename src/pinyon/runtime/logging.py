"""Structured logs on stderr: one line per record, with the service, the instance and the request id."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

__all__ = ["configure_logging", "get_logger"]

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {
    "message",
    "asctime",
    "taskName",
}


_encode = json.JSONEncoder(default=str, ensure_ascii=False, check_circular=False).encode


def get_logger(name: str) -> logging.Logger:
    """A logger below ``pinyon``; pass facts as ``extra={"request_id": …}``."""
    return logging.getLogger(name if name.startswith("pinyon") else f"pinyon.{name}")


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _shown(value: Any) -> Any:
    """A fact as one word: quoted where it would end the line or look like another fact."""
    if isinstance(value, str) and not (value.isprintable() and " " not in value and value):
        return json.dumps(value)
    return value


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._base = _encode({"service": service, "instance_id": instance_id})[1:-1]

    def format(self, record: logging.LogRecord) -> str:
        line = {"logger": record.name, "message": record.getMessage(), **_facts(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        level = record.levelname.lower()
        return f'{{"time": {record.created:.6f}, "level": "{level}", {self._base}, {_encode(line)[1:]}'


class _TextFormatter(logging.Formatter):
    def __init__(self, instance_id: str) -> None:
        super().__init__()
        self._instance_id = instance_id
        self._second = 0
        self._clock = ""

    def format(self, record: logging.LogRecord) -> str:
        if (second := int(record.created)) != self._second:
            self._second, self._clock = second, time.strftime("%H:%M:%S", time.localtime(second))
        clock = self._clock
        facts = "".join(f" {key}={_shown(value)}" for key, value in _facts(record).items())
        line = f"{clock} {record.levelname.lower():7} {self._instance_id} {record.getMessage()}{facts}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(service: str, instance_id: str, level: str, log_format: str) -> None:
    """Send all of the process's records to stderr; libraries only from ``warning`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service, instance_id) if log_format == "json" else _TextFormatter(instance_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Nothing here shows them, and they are half of what a record costs.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.logAsyncioTasks = False  # type: ignore[attr-defined]  # from Python 3.12 on
    logging.getLogger("pinyon").setLevel(level.upper())
    logging.captureWarnings(True)
