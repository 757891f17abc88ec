"""Prompts for routers that choose by prefix: half of each is one of a few shared beginnings, the other half is its own.
No prompt comes twice, and no more than half of one can be hit."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.load import http_request
from bench.router_stub import MODEL

GROUPS = 64
STREAMED_TOKENS = 16
"""The tokens of a streamed answer; a whole answer has one."""

Write = Callable[[random.Random, int], str]
"""A function that returns text of so many bytes."""


def hex_text(random_: random.Random, size: int) -> str:
    return random_.randbytes(size // 2).hex()


class Prompts:
    """Prompts that come once each; another ``seed`` has other beginnings, too."""

    def __init__(self, seed: int | str, size_bytes: int, stream: bool, write: Write = hex_text) -> None:
        self._random = random.Random(f"{seed} {size_bytes} {stream}")
        self._half = size_bytes // 2
        self._stream = stream
        self._write = write
        self._shared = [write(self._random, self._half) for _ in range(GROUPS)]

    @property
    def max_tokens(self) -> int:
        return STREAMED_TOKENS if self._stream else 1

    def text(self) -> tuple[int, str]:
        """Returns the number of a prompt's beginning, and the prompt."""
        group = self._random.randrange(GROUPS)
        return group, self._shared[group] + self._write(self._random, self._half)

    def requests(self, host: str, count: int) -> list[bytes]:
        """Returns whole HTTP requests to ``host``."""
        bodies: list[dict[str, object]] = [
            {"model": MODEL, "prompt": self.text()[1], "max_tokens": self.max_tokens, "stream": self._stream,
             "temperature": 0}
            for _ in range(count)
        ]  # fmt: skip
        return [http_request(host, "/v1/completions", body) for body in bodies]
