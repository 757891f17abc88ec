"""Texts of single tokens, as shown in log-probabilities and by ``/tokenize``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from pinyon.model import HfTokenizer, Tokenizer

_SPACE_PIECE = "▁"
"""The character with which SentencePiece writes a leading space, which decoding a single token loses."""


class TokenTexts:
    """The texts of a tokenizer's single tokens.

    A token that is not a whole character is shown as U+FFFD, as in vLLM; its bytes tell more. A token without a text is
    shown as ``token_id:N``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._of = cache(self._make)  # bounded by the size of the vocabulary

    def text(self, token: int) -> str:
        return self._of(token)[0]

    def data(self, token: int) -> list[int]:
        """Returns the bytes that the token adds to a text."""
        return self._of(token)[1]

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Returns the tokens as the vocabulary writes them, like vLLM's ``token_strs``."""
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, HfTokenizer):
            return [self.text(token) for token in tokens]
        return [tokenizer.id_to_piece(token) or _unnamed(token) for token in tokens]

    def _make(self, token: int) -> tuple[str, list[int]]:
        tokenizer = self._tokenizer
        table = tokenizer.token_bytes()
        piece = tokenizer.id_to_piece(token) if isinstance(tokenizer, HfTokenizer) else None
        if table is not None and token < len(table) and table[token]:
            return table[token].decode("utf-8", "replace"), list(table[token])
        if piece is None:
            return _unnamed(token), []
        if piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:
            data = bytes((int(piece[3:5], 16),))
            return data.decode("utf-8", "replace"), list(data)
        text = tokenizer.decode([token])
        if not text:  # a special token
            return piece, []
        if piece.startswith(_SPACE_PIECE) and not text.startswith(" "):
            text = " " + text
        return text, list(text.encode("utf-8"))


def _unnamed(token: int) -> str:
    return f"token_id:{token}"
