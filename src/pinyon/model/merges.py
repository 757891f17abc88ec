"""Byte-pair encoding of one ASCII word (Sennrich et al. 2016).

The pair that was learned first is merged, again and again; of equal pairs, the leftmost goes first. The library does
the same, but spends 3 µs of each call on details of tokens besides their ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from librt.strings import BytesWriter, write_i32_le
from librt.vecs import vec
from mypy_extensions import i32, i64

WORD_BYTES: Final = 64
"""The maximum length of a word encoded here, since all pairs are examined after each merge."""
_ID_BITS: Final = 21
_END: Final = 1 << _ID_BITS
"""The exclusive upper bound of ids and of the number of merges."""
_NEVER: Final = 1 << 62
_ODD: Final = 0x9E3779B97F4A7C1


class Merges:
    """The merges of a vocabulary.

    ``letters`` has the token of each byte below 128; ``pairs`` has pairs of tokens, in the order in which they were
    learned, and the token that replaces them. The later of two equal pairs counts. Ids and the number of pairs are
    below 2^21."""

    def __init__(self, letters: Sequence[int], pairs: Sequence[tuple[int, int, int]]) -> None:
        if len(letters) != 128 or len(pairs) >= _END:
            raise ValueError(f"{len(letters)} letters and {len(pairs)} pairs")
        self._letters = vec[i64](letters)
        self._whole: dict[bytes, int] = {}
        size: i64 = 2
        while 3 * size < 4 * len(pairs):
            size *= 2
        self._mask: i64 = size - 1
        self._pairs = vec[i64]([0] * (2 * size))
        """A hash table with open addressing: the pair plus one, then its number and its token."""
        for number, (left, right, together) in enumerate(pairs):
            pair: i64 = left << _ID_BITS | right
            at = self._slot(pair)
            self._pairs[2 * at] = pair + 1
            self._pairs[2 * at + 1] = number << _ID_BITS | together

    def take_whole(self, words: Iterable[tuple[bytes, int]]) -> None:
        """Makes each of these words one token, whatever the pairs say; most words of a vocabulary are one anyway."""
        self._whole = {word: token for word, token in words if self.tokens(word) != token.to_bytes(4, "little")}

    def tokens(self, word: bytes) -> bytes:
        """Returns the tokens of a word of at most ``WORD_BYTES`` bytes below 128, as little-endian u32."""
        known = self._whole.get(word)
        if known is not None:
            return known.to_bytes(4, "little")
        left: i64 = len(word)
        ids = vec[i64]([0] * left)
        merges = vec[i64]([_NEVER] * left)
        """The number and token of each position's merge with the next one."""
        at: i64 = 0
        while at < left:
            ids[at] = self._letters[i64(word[at])]
            if at:
                merges[at - 1] = self._merge(ids[at - 1], ids[at])
            at += 1
        while left > 1:
            best: i64 = 0
            at = 1
            while at < left - 1:
                if merges[at] < merges[best]:
                    best = at
                at += 1
            if merges[best] == _NEVER:
                break
            ids[best] = merges[best] & (_END - 1)
            left -= 1
            at = best + 1
            while at < left:
                ids[at] = ids[at + 1]
                merges[at - 1] = merges[at]
                at += 1
            merges[left - 1] = _NEVER
            if best:
                merges[best - 1] = self._merge(ids[best - 1], ids[best])
            if best < left - 1:
                merges[best] = self._merge(ids[best], ids[best + 1])
        out = BytesWriter()
        at = 0
        while at < left:
            write_i32_le(out, i32(ids[at]))
            at += 1
        return out.getvalue()

    def _merge(self, left: i64, right: i64) -> i64:
        pair = left << _ID_BITS | right
        at = self._slot(pair)
        return self._pairs[2 * at + 1] if self._pairs[2 * at] else _NEVER

    def _slot(self, pair: i64) -> i64:
        """Returns the slot of this pair, or the free slot where it would be."""
        pairs, mask = self._pairs, self._mask
        at = (pair * _ODD) >> 24 & mask
        while pairs[2 * at] and pairs[2 * at] != pair + 1:
            at = (at + 1) & mask
        return at


def merges_of(rules: Mapping[str, Any], letters: Mapping[int, str]) -> Merges | None:
    """Returns the merges of a tokenizer.json's object; None if its model does more than merge.

    Its words are bytes, each written as one of ``letters``."""
    model = rules["model"]
    vocab: dict[str, int] = model.get("vocab") or {}
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    listed = [tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in model.get("merges") or ()]
    if any(letters[byte] not in vocab for byte in range(128)) or any(len(pair) != 2 for pair in listed):
        return None
    if len(listed) >= _END or max(vocab.values()) >= _END:
        return None
    if any(one not in vocab or other not in vocab or one + other not in vocab for one, other in listed):
        return None
    merges = Merges(
        [vocab[letters[byte]] for byte in range(128)],
        [(vocab[one], vocab[other], vocab[one + other]) for one, other in listed],
    )
    if model.get("ignore_merges"):
        bytes_of = {letters[byte]: byte for byte in range(128)}
        words = [(word, token) for word, token in vocab.items() if word and all(each in bytes_of for each in word)]
        merges.take_whole([(bytes([bytes_of[letter] for letter in word]), token) for word, token in words])
    return merges
