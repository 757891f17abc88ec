"""A table of the tokens of short ASCII pieces; texts are cut and looked up in one pass.

A lookup in a dictionary costs an object for the piece, and a cache line each for the dictionary's index, its entry, the
key and the value. Here a piece and its tokens are four adjacent numbers."""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i32_le, write_i32_le
from librt.threading import Lock
from librt.vecs import vec
from mypy_extensions import i32, i64

PIECE_BYTES: Final = 17
TOKENS: Final = 6
"""The maximum number of tokens of a piece."""
ID_END: Final = (1 << 21) - 1
"""The exclusive upper bound of token ids."""
SETS: Final = 1 << 14
WAYS: Final = 4
"""The number of pieces in each set. 65,536 pieces take 2 MiB.

A full set replaces its last piece. With each use a piece changes places with the one before it (transposition, Rivest
1976), so rare pieces do not displace frequent ones."""

_NUMBERS: Final = 4
"""The numbers of an entry: its first characters; the others with the length; three tokens; three more tokens."""
_SET: Final = _NUMBERS * WAYS
_LOW: Final = 9
"""The number of characters in the first number, 7 bits each."""
_LENGTH: Final = 56
_ODD: Final = 0x9E3779B97F4A7C1
_ODDER: Final = 0xC2B2AE3D27D4EB5
_TOGETHER: Final = 3
_ID_BITS: Final = 21
"""The bits of an id plus one, so that no stored token is 0."""


class WordTable:
    """A table of pieces that evicts by itself and that threads may share.

    ``line_ends``: a line end belongs to the word or the whitespace before it, and no word continues after it. Otherwise
    only a line end that stands by itself is known to end a word."""

    def __init__(self, *, line_ends: bool, sets: int = SETS) -> None:
        """Creates an empty table; ``sets`` is a power of two."""
        self._line_ends = line_ends
        self._sets: i64 = sets
        self._table = vec[i64]([0] * (sets * _SET))
        self._lock = Lock()

    def scan(self, text: bytes, at: i64, out: BytesWriter) -> tuple[i64, i64]:
        """Writes tokens from ``at`` up to the first unknown piece; returns that piece's span, or the text's end
        twice."""
        size: i64 = len(text)
        table = self._table
        self._lock.acquire()
        try:
            while at < size:
                end, low, high = self._piece(text, at, size)
                if end - at > PIECE_BYTES:
                    return at, end
                place = self._place(low, high)
                last = place + _SET
                while place < last and not (table[place] == low and table[place + 1] == high):
                    place += _NUMBERS
                if place == last:
                    return at, end
                one, other = table[place + 2], table[place + 3]
                _write(out, one)
                _write(out, other)
                if place > last - _SET:  # one place forward: only the last entry of a set is evicted
                    number: i64 = 0
                    while number < _NUMBERS:
                        table[place + number] = table[place + number - _NUMBERS]
                        number += 1
                    table[place - 4], table[place - 3], table[place - 2], table[place - 1] = low, high, one, other
                at = end
            return size, size
        finally:
            self._lock.release()

    def put(self, piece: bytes, tokens_le32: bytes) -> bool:
        """Adds a piece that :meth:`scan` has returned; returns False if it or its tokens do not fit."""
        size: i64 = len(piece)
        count: i64 = len(tokens_le32) // 4
        if size > PIECE_BYTES or not 0 < count <= TOKENS:
            return False
        one: i64 = 0
        other: i64 = 0
        at: i64 = 0
        while at < count:
            token = i64(read_i32_le(tokens_le32, 4 * at))
            if not 0 <= token < ID_END:
                return False
            if at < _TOGETHER:
                one |= token + 1 << _ID_BITS * at
            else:
                other |= token + 1 << _ID_BITS * (at - _TOGETHER)
            at += 1
        _, low, high = self._piece(piece, 0, size)
        table = self._table
        start = self._place(low, high)
        self._lock.acquire()
        place = start
        while place < start + _SET and table[place + 1] and not (table[place] == low and table[place + 1] == high):
            place += _NUMBERS
        if place == start + _SET:
            place -= _NUMBERS
        table[place] = low
        table[place + 1] = high
        table[place + 2] = one
        table[place + 3] = other
        self._lock.release()
        return True

    def _place(self, low: i64, high: i64) -> i64:
        return ((low * _ODD + high * _ODDER) >> 28 & (self._sets - 1)) * _SET

    def _piece(self, text: bytes, at: i64, size: i64) -> tuple[i64, i64, i64]:
        """Returns the end of the piece that begins at ``at``, and its two numbers if it is not too long.

        A text may be cut before a space that is the last whitespace before another character. It may also be cut after
        a line end, unless the next character could continue the word (``/`` does in one tokenizer)."""
        low: i64 = text[at]
        high: i64 = 0
        before: i64 = low
        end = at + 1
        while end < size:
            byte: i64 = text[end]
            if byte == 32:
                if end + 1 < size:
                    following: i64 = text[end + 1]
                    if following > 32 or not _is_space(following):
                        break
                    if (before == 10 or before == 13) and self._line_ends and _is_indent(text, end, size):
                        break
            elif (before == 10 or before == 13) and self._may_follow(text, at, end, size):
                break
            if end - at < _LOW:
                low = low << 7 | byte
            elif end - at < PIECE_BYTES:
                high = high << 7 | byte
            before = byte
            end += 1
        return end, low, high | end - at << _LENGTH

    def _may_follow(self, text: bytes, at: i64, end: i64, size: i64) -> bool:
        """Returns whether the line end before ``end`` also ends a word."""
        byte: i64 = text[end]
        if byte == 9:
            return self._line_ends and _is_indent(text, end, size)
        if byte <= 32 or byte == 47:
            return False
        return self._line_ends or end - at < 2 or not _is_space(text[end - 2])


def _write(out: BytesWriter, together: i64) -> None:
    while together:
        write_i32_le(out, i32((together & ID_END) - 1))
        together >>= _ID_BITS


def _is_space(byte: i64) -> bool:
    return byte == 32 or 9 <= byte <= 13


def _is_indent(text: bytes, at: i64, size: i64) -> bool:
    """Returns whether only spaces and tabs precede the next character that is not whitespace."""
    while at < size:
        byte: i64 = text[at]
        if byte != 32 and byte != 9:
            return not _is_space(byte)
        at += 1
    return False
