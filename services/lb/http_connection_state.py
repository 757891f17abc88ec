"""Where a connection is in the exchange of requests and answers."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["State"]


class State(IntEnum):
    HEAD = 0  # of the next request
    BODY = 1
    ANSWER = 2
    DISCARD = 3  # the body of a request that has its answer
    LINGER = 4  # whatever comes
    CLOSED = 5
