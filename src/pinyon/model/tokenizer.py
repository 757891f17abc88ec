"""Text to tokens and back.

``encode`` returns little-endian u32, the form from which block keys are computed and which ``*_le32`` fields carry, so
no hop converts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

# One text is encoded at a time, so the library's own threads would only wait.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer as _RustTokenizer

from pinyon.core.errors import InvalidArgument
from pinyon.model.merges import merges_of
from pinyon.model.word_tokens import MuchNew, WordTokens, known_words

__all__ = ["ByteTokenizer", "HfTokenizer", "MuchNew", "TokenArray", "Tokenizer"]

TokenArray = npt.NDArray[np.uint32]

TEXT_BYTES_MAX = 64 << 20


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte, plus special tokens that only chat prompts have.

    No text can produce a special token: a text prompt is its bytes, with or without ``add_special_tokens``. Ids 0 to
    255 are the bytes; then BOS, EOS, one marker per chat role and the end of a turn. The vocabulary is padded to 272, a
    multiple of 16, for the matrix shapes."""

    BOS = 256
    EOS = 257
    SYSTEM = 258
    USER = 259
    ASSISTANT = 260
    TOOL = 261
    END_OF_TURN = 262
    VOCAB_SIZE = 272

    @property
    def vocab_size(self) -> int:
        return self.VOCAB_SIZE

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (self.EOS,)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, new_chars: int | None = None, whose: str = ""
    ) -> TokenArray:
        """Returns the bytes of ``text``; raises as :meth:`HfTokenizer.encode`, and no text takes it time."""
        return np.frombuffer(utf8(text), dtype=np.uint8).astype("<u4")

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", "replace")

    def token_bytes(self) -> list[bytes]:
        return _BYTE_TABLE


_BYTE_TABLE = [bytes((i,)) for i in range(256)] + [b""] * (ByteTokenizer.VOCAB_SIZE - 256)


class HfTokenizer:
    """A tokenizer of the ``tokenizers`` library, from a ``tokenizer.json``."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Reads the file's text. Raises :class:`InvalidArgument` when the library cannot read it."""
        try:
            self._plain = _RustTokenizer.from_str(tokenizer_json)
            self._marked = _RustTokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise InvalidArgument(f"tokenizer.json cannot be read: {error}", field="tokenizer") from error
        rules = json.loads(tokenizer_json)
        pattern = known_words(rules)
        self._inner = _without_first_space(self._plain, rules)
        for tokenizer in (self._plain, self._inner):
            tokenizer.encode_special_tokens = True
        for tokenizer in (self._plain, self._inner, self._marked):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.eos_token_ids = eos_token_ids
        self.vocab_size = int(self._plain.get_vocab_size(with_added_tokens=True))
        added = self._plain.get_added_tokens_decoder()
        self._special = {token.content: int(i) for i, token in added.items() if token.special}
        self._special_ids = frozenset(self._special.values())
        self._byte_level = _is_byte_level(rules)
        self._words: WordTokens | None = None
        merges = merges_of(rules, _byte_letters()) if pattern else None
        if merges is not None and all(token.content for token in added.values()):
            markers = {token.content: int(i).to_bytes(4, "little") for i, token in added.items()}
            self._words = WordTokens(pattern, markers, merges, self._whole)

    @property
    def remembers(self) -> bool:
        """True if text that was encoded before takes hardly any time."""
        return self._words is not None

    def _whole(self, text: str) -> bytes:
        """Returns the tokens by the library."""
        return _ids(self._marked, text, False).tobytes()

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids, by marker text, of the tokens that only a chat template may write."""
        return dict(self._special)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, new_chars: int | None = None, whose: str = ""
    ) -> TokenArray:
        """Returns the tokens of a text prompt, dtype ``<u4``, as ``transformers`` has them.

        Markers of special tokens in ``text`` become these tokens. ``add_special_tokens`` adds the tokens that the
        tokenizer puts around a text.

        Raises :class:`InvalidArgument` when ``text`` is not valid Unicode or over the size limit. Raises
        :class:`MuchNew` when more than ``new_chars`` characters take the tokenizer time, because similar text of the
        same owner (``whose``) was not encoded lately."""
        utf8(text)
        if self._words is not None:
            tokens = self._words.encode(text, new_chars, whose)
            if add_special_tokens:
                before, behind = self.around
                tokens = b"%b%b%b" % (before, tokens, behind)
            return np.frombuffer(tokens, dtype="<u4")
        if new_chars is not None and len(text) > new_chars:
            raise MuchNew
        return _ids(self._marked, text, add_special_tokens)

    def encode_plain(self, text: str, *, goes_on: bool = False) -> TokenArray:
        """Encodes like :meth:`encode`, but no text becomes a special token: ``<|im_end|>`` is ten characters.

        With ``goes_on``, other text precedes this one, so the space that some tokenizers begin with is not added."""
        utf8(text)
        tokenizer = self._inner if goes_on else self._plain
        return _ids(tokenizer, text, False)

    @cached_property
    def around(self) -> tuple[bytes, bytes]:
        """The tokens, little-endian u32, that ``add_special_tokens`` puts before and after a text."""
        bare, whole = (_ids(self._marked, "a", added) for added in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if np.array_equal(whole[start : start + len(bare)], bare):
                return whole[:start].tobytes(), whole[start + len(bare) :].tobytes()
        return b"", b""

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ``tokens``; invalid UTF-8 becomes U+FFFD.

        Special tokens are left out, or become their markers, if any, when not skipped. Ids outside the vocabulary are
        left out; ids in it never raise."""
        return str(self._plain.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens))

    def is_left_out(self, token: int) -> bool:
        """Returns whether ``decode`` skips this id: a special token, or an id outside the vocabulary."""
        return token in self._special_ids or self._plain.id_to_token(token) is None

    def id_to_piece(self, token: int) -> str | None:
        """Returns the vocabulary's entry, as written in ``tokenizer.json``."""
        piece: str | None = self._plain.id_to_token(token)
        return piece

    def token_bytes(self) -> list[bytes] | None:
        """Returns the bytes of each token id, if ``decode`` is their concatenation read as UTF-8; else None.

        Always returns the same list, which must not be changed: each request's detokenizer asks for it."""
        return self._token_bytes if self._byte_level else None

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        alphabet = _byte_alphabet()
        table: list[bytes] = []
        for token in range(self.vocab_size):
            piece = self._plain.id_to_token(token)
            if piece is None or token in self._special_ids:
                table.append(b"")
                continue
            # As in the library, a piece with a character outside the alphabet (an added token) is taken literally.
            if all(c in alphabet for c in piece):
                table.append(bytes(alphabet[c] for c in piece))
            else:
                table.append(piece.encode("utf-8"))
        return table


Tokenizer = ByteTokenizer | HfTokenizer


def utf8(text: str) -> bytes:
    """Returns ``text`` as UTF-8. Raises :class:`InvalidArgument` for lone surrogates or over ``TEXT_BYTES_MAX``."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument("text holds a lone surrogate, which is not valid Unicode", field="prompt") from None
    if len(data) > TEXT_BYTES_MAX:
        raise InvalidArgument(f"text has {len(data)} bytes, at most {TEXT_BYTES_MAX} are allowed", field="prompt")
    return data


def _ids(tokenizer: _RustTokenizer, text: str, add_special_tokens: bool) -> TokenArray:
    """Returns the tokens by a batch of one, which skips the tokens' places in the text: a quarter less CPU."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return np.array(encoding.ids, dtype="<u4")


def _without_first_space(tokenizer: _RustTokenizer, rules: dict[str, Any]) -> _RustTokenizer:
    """Returns a tokenizer that does not put a space before a text.

    This is ``tokenizer`` itself unless it adds a space once per text (not per piece of it). ``rules``, from which the
    tokenizer was read, are changed."""
    before = rules.get("pre_tokenizer")
    steps = before.get("pretokenizers", [before]) if isinstance(before, dict) else []
    first = [step for step in steps if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"]
    if not first:
        return tokenizer
    for step in first:
        step["prepend_scheme"] = "never"
    return _RustTokenizer.from_str(json.dumps(rules))


def _is_byte_level(rules: dict[str, Any]) -> bool:
    decoder = rules.get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _byte_letters() -> dict[int, str]:
    """Returns the characters with which a vocabulary of bytes writes those below 128."""
    return {byte: letter for letter, byte in _byte_alphabet().items() if byte < 128}


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's mapping of the 256 bytes to printable characters, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    alphabet.update({chr(256 + i): b for i, b in enumerate(others)})
    return alphabet
