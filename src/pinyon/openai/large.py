"""Large JSON bodies, read in a thread beside the event loop without holding the GIL for more than some 10 ms.

Parsing JSON holds the GIL while it creates objects, 0.1 to 0.8 µs for each. So a long list of token ids is cut out of
the text and read by NumPy in pieces. In the rest, strings and values are counted before it is parsed."""

from __future__ import annotations

import re
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from pinyon.core.errors import InvalidArgument

SMALL_BYTES = 32 << 10
LARGE_BYTES = 256 << 10
SMALL_COMMAS = 8 << 10
"""Bodies up to ``SMALL_BYTES``, or up to ``LARGE_BYTES`` with at most this many commas, are read on the event loop.

That takes about 2 ms, 5 ms at worst."""
STRINGS_MAX = 16 << 10
VALUES_MAX = 32 << 10
"""The maximum number of values in one body, beside a prompt of token ids."""
TOKENS_BYTES_MIN = 8 << 10
"""The minimum size of a list of token ids that is cut out; a shorter list is parsed as JSON just as well."""
PIECE_BYTES = 64 << 10
TRIES = 8
LISTS_MAX = 1024
"""The maximum number of lists that are cut out; more are parsed as JSON and refused by the check of their number."""

_TOKENS = re.compile(rb'"[a-z]+"[ \t\r\n]*+:[ \t\r\n]*+(?:\[[ \t\r\n]*+){1,2}(?=[0-9])')
_NEXT = re.compile(rb"[ \t\r\n]*+,[ \t\r\n]*+\[")
_BACKSLASHES = re.compile(rb"\\*")
_SPACE = b" \t\r\n"
_COMMA = ord(",")
_TOKEN_CHARS = b"0123456789," + _SPACE
_DIGITS_MAX = 10  # the digits of 2**32 - 1


def is_large(body: bytes | bytearray) -> bool:
    """Returns whether parsing this body on the event loop would delay other requests."""
    size = len(body)
    if size <= SMALL_BYTES or size > LARGE_BYTES:
        return size > LARGE_BYTES
    # This takes a third of the time of ``bytes.count``: 3.5 µs for 32 KB.
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == _COMMA)) > SMALL_COMMAS


def read_large(body: bytes | bytearray, tokens: str = "prompt") -> Any:
    """Parses a body as ``from_json`` does, but without creating an object for each token id.

    The field ``tokens`` becomes ``bytes`` (token ids as little-endian u32) or a list of these if it holds long lists of
    token ids. Raises :class:`ValueError` for malformed JSON, and :class:`InvalidArgument`."""
    found = _find_tokens(body, b'"%b"' % tokens.encode("ascii"))
    if found is not None:
        # No client can guess the stand-in. So if the prompt turns out to be the stand-in, the lists stood in its place.
        stand_in = secrets.token_hex(16)
        rest = b"".join((body[: found[0][0]], b'"', stand_in.encode("ascii"), b'"', body[found[-1][1] :]))
        values = _read_weighed(rest)
        if type(values) is dict and values.get(tokens) in (stand_in, [stand_in]):
            lists = [_tokens(body, start + 1, end - 1, tokens) for start, end in found]
            values[tokens] = lists if len(lists) > 1 else lists[0]
            return values
    return _read_weighed(body)


def _read_weighed(body: bytes | bytearray) -> Any:
    if is_large(body):
        _weigh(body)
    return from_json(body, allow_inf_nan=False, cache_strings="none")


def _weigh(body: bytes | bytearray) -> None:
    """Raises :class:`InvalidArgument` for too many strings or values.

    A string is the text between two quotes that no backslash escapes. In malformed JSON, that holds up to the first
    fault, and no parser gets beyond it."""
    quotes = values = start = 0
    while start < len(body):
        # A piece ends after a run of backslashes and the character that they escape.
        end = min(len(body), _BACKSLASHES.match(body, start + PIECE_BYTES).end() + 1)  # type: ignore[union-attr]
        piece = body[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        outside = b"".join(piece.split(b'"')[quotes & 1 :: 2])
        quotes += piece.count(b'"')
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if quotes > 2 * STRINGS_MAX:
            raise InvalidArgument(f"The body has more than {STRINGS_MAX} JSON strings.")
        if values > VALUES_MAX:
            raise InvalidArgument(f"The body has more than {VALUES_MAX} JSON values beside a prompt of token ids.")
        start = end


def _find_tokens(body: bytes | bytearray, name: bytes) -> list[tuple[int, int]] | None:
    """Returns the span, brackets included, of each list in what looks like a prompt of many token ids; or None."""
    position = 0
    for _ in range(TRIES):
        position = body.find(name, position)
        if position < 0:
            return None
        match = _TOKENS.match(body, position)
        if match is not None:
            start, nested = body.rfind(b"[", position, match.end()), match[0].count(b"[") > 1
            del match
            found = _find_lists(body, start, nested=nested)
            return found if found and found[-1][1] - start >= TOKENS_BYTES_MIN else None
        position += 1
    return None


def _find_lists(body: bytes | bytearray, start: int, *, nested: bool) -> list[tuple[int, int]]:
    """Returns the spans of the list of token ids at ``start`` and, if ``nested``, of those after it; else none."""
    found: list[tuple[int, int]] = []
    while len(found) <= LISTS_MAX:
        end = body.find(b"]", start) + 1
        if not end or not _are_tokens(body, start + 1, end - 1):
            return []
        found.append((start, end))
        match = _NEXT.match(body, end) if nested else None
        if match is None:
            return found
        start = match.end() - 1
    return []


def _are_tokens(body: bytes | bytearray, start: int, end: int) -> bool:
    return not any(
        body[at : min(at + PIECE_BYTES, end)].translate(None, _TOKEN_CHARS) for at in range(start, end, PIECE_BYTES)
    )


def _tokens(body: bytes | bytearray, start: int, end: int, field: str) -> bytes:
    pieces = []
    while start < end:
        cut = end if end - start <= PIECE_BYTES else body.rfind(b",", start, start + PIECE_BYTES)
        if cut < 0:
            raise _malformed()
        pieces.append(_piece(bytes(body[start:cut]), field).tobytes())
        start = cut + 1
        if start == end:
            raise _malformed()  # a comma before the bracket
    return b"".join(pieces)


def _piece(text: bytes, field: str) -> npt.NDArray[np.uint32]:
    """Returns numbers with commas between them and space around them. Raises :class:`ValueError` for anything else."""
    digit = (np.frombuffer(text, np.uint8) - 48) < 10
    runs = np.count_nonzero(digit[1:] & ~digit[:-1]) + int(digit[:1].any())
    packed = np.frombuffer(text.translate(None, _SPACE), np.uint8)
    ends = np.append(np.flatnonzero(packed == 44), len(packed))
    lengths = np.diff(ends, prepend=-1) - 1
    if runs != len(ends) or lengths.min() < 1:
        raise _malformed()
    if ((packed[ends - lengths] == 48) & (lengths > 1)).any():
        raise _malformed()  # a leading zero
    longest = int(lengths.max())
    numbers = np.zeros(len(ends), np.int64)
    for place in range(min(longest, _DIGITS_MAX)):
        digits = packed[np.maximum(ends - 1 - place, 0)].astype(np.int64) - 48
        numbers += np.where(lengths > place, digits, 0) * 10**place
    if longest > _DIGITS_MAX or numbers.max() >= 1 << 32:
        raise InvalidArgument(f"{field} holds a token id outside the vocabulary.", field=field)
    return numbers.astype("<u4")


def _malformed() -> ValueError:
    return ValueError("malformed list of token ids")
