"""How a stream ends: well, or with an error, in the words of each interface that has streams."""

from __future__ import annotations

import json
from typing import Final

from pinyon.core.errors import PinyonError
from pinyon.openai.format import DONE, error_event, error_object

_LAST: Final = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.failed",
                b"event: response.incomplete")  # fmt: skip
"""How the last event of a stream begins: of completions and chats, of Anthropic's messages, of responses."""


def has_ended(events: bytes) -> bool:
    """Whether these events, the last ones that came, are the end of a stream."""
    last = events.rstrip()
    start = max(last.rfind(b"\n\n") + 2, last.rfind(b"\n\r\n") + 3)
    return last[start if start > 2 else 0 :].startswith(_LAST)


def stream_error(path: str, error: PinyonError) -> bytes:
    """The events that end a stream of this route which has broken off: such that clients of the route raise it."""
    said = error_object(error, error.http_status)["error"]
    assert isinstance(said, dict)
    if path == "/v1/messages":
        return _event({"type": "error", "error": {"type": "api_error", "message": said["message"]}})
    if path == "/v1/responses":
        return _event({"type": "error", "code": said["code"], "message": said["message"], "param": None})
    return error_event(error) + DONE


def _event(data: dict[str, object]) -> bytes:
    return b"event: error\ndata: %b\n\n" % json.dumps(data).encode("ascii")
