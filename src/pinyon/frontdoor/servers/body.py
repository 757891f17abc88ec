"""The body that an instance's server gets: the client's bytes, with what pinyon adds in front of them.

Clients can neither send nor see the parameters for KV transfers, by which a server's connector gets its plan."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic_core import from_json

from pinyon.core.errors import Internal
from pinyon.messages.plan import FIELD, NAME

SALT: Final = "cache_salt"
_MARK: Final = f'"{FIELD}"'.encode()
_SPACE: Final = b" \t\r\n"
_BETWEEN: Final = frozenset(" \t\r\n:")
_decoder = json.JSONDecoder()


def without(body: bytes | bytearray, names: frozenset[str]) -> bytes:
    """Returns the body without these members, as new JSON."""
    values: dict[str, Any] = from_json(body)
    return json.dumps({name: value for name, value in values.items() if name not in names}).encode()


def with_additions(body: bytes | bytearray, plan: str, salt: str, *more: bytes) -> bytes | bytearray:
    """Returns a JSON object's bytes with a sealed plan and a salt for the server's cache as its first members, if they
    are not empty, and further members. The body must not have these members."""
    parts = list(more)
    if plan:
        parts.append(b'"%b":{"%b":"%b"}' % (FIELD.encode(), NAME.encode(), plan.encode("ascii")))
    if salt:
        parts.append(b'"%b":"%b"' % (SALT.encode(), salt.encode("ascii")))
    if not parts:
        return body
    start = body.index(b"{") + 1
    rest = memoryview(body)[start:]
    follows = bytes(rest[:64]).lstrip(_SPACE)
    comma = b"" if follows[:1] == b"}" else b","
    return b"".join((body[:start], b",".join(parts), comma, rest))


def clean_answer(data: bytes) -> bytes:
    """Returns a part of an answer with null for parameters for KV transfers; the same bytes if there are none.

    This is a search for the member's name, which a text of the answer cannot contain: there, its quotes are escaped.
    Raises :class:`Internal` if the parameters do not end in this part."""
    at = data.find(_MARK)
    if at < 0:
        return data
    text, pieces, copied = data.decode("latin-1"), list[bytes](), 0  # a character for each byte
    while at >= 0:
        end = at + len(_MARK)
        while text[end : end + 1] in _BETWEEN:
            end += 1
        if text[end : end + 1] == "{":
            pieces += data[copied:end], b"null"
            try:
                _, end = _decoder.raw_decode(text, end)
            except (ValueError, RecursionError):
                raise Internal("The server's answer holds what no client may see.") from None
            copied = end
        at = data.find(_MARK, end)
    return b"".join((*pieces, data[copied:])) if pieces else data
