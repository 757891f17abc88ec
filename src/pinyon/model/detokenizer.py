"""Tokens to text as they arrive, never half a character.

However the tokens are split into pieces, the deltas put together are exactly ``tokenizer.decode(all tokens)``, with or
without the texts of special tokens."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable
from functools import partial

from pinyon.model.tokenizer import HfTokenizer, Tokenizer

_REPLACEMENT = "\ufffd"
_HELD_MAX = 32
"""The maximum number of times that tokens wait for others that might change them.

No character has so many tokens, but a token that is U+FFFD itself may come for ever, and waiting tokens are decoded
again with each new one."""


class IncrementalDetokenizer:
    """The output text of one request.

    If all tokens are byte strings (:meth:`HfTokenizer.token_bytes`), an incremental UTF-8 decoder is used. Otherwise
    tokens are decoded over a sliding window: text is returned once a later token cannot change it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        table = tokenizer.token_bytes() if skip_special_tokens else None  # the table lacks texts of special tokens
        self._impl: _Bytes | _Window = _Window(tokenizer, skip_special_tokens) if table is None else _Bytes(table)

    def push(self, tokens: Iterable[int]) -> str:
        """Returns the text that became certain with ``tokens``; may be empty."""
        return self._impl.push(tokens)

    def flush(self) -> str:
        """Returns the rest at the end; an incomplete character becomes U+FFFD. No push may follow."""
        return self._impl.flush()


class _Bytes:
    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._begun = b""
        """The bytes of an incomplete character."""

    def push(self, tokens: Iterable[int]) -> str:
        table = self._table
        size = len(table)
        return self._decode(b"".join([table[token] for token in tokens if 0 <= token < size]), False)

    def flush(self) -> str:
        return self._decode(b"", True)

    def _decode(self, more: bytes, final: bool) -> str:
        data = self._begun + more if self._begun else more
        text, used = utf_8_decode(data, "replace", final)
        self._begun = data[used:]
        return text


class _Window:
    """A sliding window: ``tokens[anchor:]`` is decoded with and without the new tokens; the difference is the delta.

    The anchor lies at least one emitted token back, so that decoders which treat the text's start specially (strip a
    leading space) do so in both. While the tail ends in U+FFFD or in a byte-fallback piece (``<0xE2>``), a later token
    can still change it, and none of it is returned."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._tokens: list[int] = []
        self._read = 0
        self._held = 0
        """The number of times in a row that no text was returned."""

    def push(self, tokens: Iterable[int]) -> str:
        # Skipped tokens do not even end a run of byte pieces.
        kept = [token for token in tokens if not self._is_left_out(token)]
        end = next((end for end in range(len(kept), 0, -1) if not self._is_byte_piece(kept[end - 1])), 0)
        self._tokens += kept[:end]
        delta = self._advance(final=False) if end else ""
        self._tokens += kept[end:]
        return delta

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._read])
        after = self._decode(self._tokens)
        self._held += 1
        unsure = after.endswith(_REPLACEMENT) or len(after) <= len(before)
        if unsure and not final and self._held < _HELD_MAX:
            return ""
        self._held = 0
        # The new window begins with the tokens just emitted: the next delta is measured from their end.
        self._tokens = self._tokens[self._read :]
        self._read = len(self._tokens)
        return after[len(before) :]

    def _is_left_out(self, token: int) -> bool:
        tokenizer = self._tokenizer
        return self._skips and isinstance(tokenizer, HfTokenizer) and tokenizer.is_left_out(token)

    def _is_byte_piece(self, token: int) -> bool:
        if not isinstance(self._tokenizer, HfTokenizer):
            return False
        piece = self._tokenizer.id_to_piece(token)
        return piece is not None and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
