"""The form of log records, for people or for programs. No I/O."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

_encode = json.JSONEncoder(default=str, ensure_ascii=False, check_circular=False).encode


class TextLines:
    """Lines of time, level, process, message, and facts as ``key=value``."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._second = 0
        self._clock = ""

    def line(self, unix_s: float, level: str, logger: str, message: str, facts: Mapping[str, Any], error: str) -> str:
        """Returns a line without its end; ``level`` is in small letters, ``error`` a traceback or empty."""
        second = int(unix_s)
        if second != self._second:
            self._second, self._clock = second, time.strftime("%H:%M:%S", time.localtime(second))
        said = [f"{self._clock} {level.ljust(7)} {self._instance_id} {message}"]
        for key, value in facts.items():
            said.append(f"{key}={_shown(value)}")
        line = " ".join(said)
        return f"{line}\n{error}" if error else line


class JsonLines:
    """Lines that are JSON objects."""

    def __init__(self, service: str, instance_id: str) -> None:
        self._base: str = _encode({"service": service, "instance_id": instance_id})[1:-1]

    def line(self, unix_s: float, level: str, logger: str, message: str, facts: Mapping[str, Any], error: str) -> str:
        said: dict[str, Any] = {"logger": logger, "message": message}
        said.update(facts)
        if error:
            said["exception"] = error
        rest: str = _encode(said)
        return f'{{"time": {unix_s:.6f}, "level": "{level}", {self._base}, {rest[1:]}'


def _shown(value: Any) -> str:
    """Returns a fact as one word, quoted if it could end the line or look like another fact."""
    text = str(value)
    if not isinstance(value, str) or (text.isprintable() and " " not in text and text != ""):
        return text
    return json.dumps(text)
