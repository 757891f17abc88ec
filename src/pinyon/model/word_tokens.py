"""Tokens of texts that byte-level BPE first cuts into words, with a cache of pieces and runs.

A piece is the text between spaces and line ends, a run a sequence of pieces. The library spends four fifths of its time
on cutting, and on looking up words that it has seen a thousand times. Here, a run of some 500 characters that came
before (a system prompt, an earlier turn) costs one lookup, and so does a known piece. Other text is cut into words,
which :mod:`pinyon.model.merges` merges. The tokens are the same as the library's, because
- a word's tokens depend on the word alone (:func:`known_words` returns a pattern only for tokenizers of that kind);
- no word of these tokenizers has a space after anything but whitespace, nor a line end after a letter. So a text can
  be cut there, and each part encoded on its own (:mod:`pinyon.model.word_table` says where else);
- their regular expressions have an ASCII version here, for which the classes of both libraries agree. Text that is not
  ASCII goes to the library, one run at a time. NFC changes no ASCII text, and nothing across such a cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from sys import getsizeof
from typing import Any

from librt.strings import BytesWriter
from mypy_extensions import i64

from pinyon.core.compiled import compiled
from pinyon.model.markers import MARKER_CHARS, Markers
from pinyon.model.merges import WORD_BYTES, Merges
from pinyon.model.word_table import WordTable

RUN_CHARS = 512
RUN_CHARS_MAX = 4 * RUN_CHARS
"""The maximum length of a run that is cached; a longer one has no place to cut it."""
RUNS_BYTES = 6 << 20
PIECES_BYTES = 6 << 20
"""The maximum size of each of two generations of pieces that have no place in the table: some 29,000."""
ENTRY_BYTES = 128
"""The size of an entry beside its two objects."""
_FEW_WORDS = 16
"""The maximum number of a run's new words merged here when not compiled; for more, the library is faster."""
KNOWN_PART = 8
"""The divisor for a run of known pieces, which takes less than an eighth of the library's time for it."""
PIECE_CHARS = 4
"""The cost of a piece that is not in the table: the number of characters that take the library as long."""
WORD_CHARS = 12
"""The minimum cost of each word of a new piece, in such characters; a longer word costs its length."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_END = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?" + _O200K_END
)
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*" + _O200K_END.replace(
    "{1,3}", ""
)
_KNOWN = frozenset((_GPT2, _LLAMA3, _QWEN, _O200K, _TEKKEN))
"""Patterns that match every character of a text and have no look-behind."""

_IN_ASCII = {
    r"[^\s\p{L}\p{N}]": r"[^\sA-Za-z0-9]",
    r"[^\r\n\p{L}\p{N}]": r"[^\r\nA-Za-z0-9]",
    _UPPER: "[A-Z]",
    _LOWER: "[a-z]",
    r"\p{L}": "[A-Za-z]",
    r"\p{N}": "[0-9]",
}


class MuchNew(Exception):
    """The error when a text has more new characters than may be processed now."""


class Memory:
    """A cache of recent texts: at least the last ``limit_bytes``, and less than twice as much.

    There are two generations: an entry found in the old one is copied to the young one. When the young one is full it
    becomes the old one, and the old one is dropped. Each step is a single operation of a dictionary, so threads may
    share the cache."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, text: str) -> bytes | None:
        found = self._young.get(text)
        if found is None and (found := self._old.get(text)) is not None:
            self.put(text, found)
        return found

    def put(self, text: str, tokens: bytes) -> None:
        known = self._young.get(text)
        size = getsizeof(tokens) - getsizeof(known) if known is not None else _size(text, tokens)
        if self._bytes + size > self._limit:
            self._old, self._young, self._bytes = self._young, {}, 0
            size = _size(text, tokens)
        self._young[text] = tokens
        self._bytes += size


def _size(text: str, tokens: bytes) -> int:
    return getsizeof(text) + getsizeof(tokens) + ENTRY_BYTES


class WordTokens:
    """An encoder to little-endian u32. ``merges`` encode a word, ``whole`` any text without ``markers``."""

    def __init__(
        self, pattern: str, markers: Mapping[str, bytes], merges: Merges, whole: Callable[[str], bytes]
    ) -> None:
        """Takes a pattern of :func:`known_words`, and added tokens by text."""
        for theirs, ours in _IN_ASCII.items():
            pattern = pattern.replace(theirs, ours)
        self._find = re.compile(pattern, re.ASCII).findall
        self._added = markers
        self._markers = Markers(markers) if markers else None
        self._merges, self._whole = merges, whole
        self._pieces, self._runs = Memory(PIECES_BYTES), Memory(RUNS_BYTES)
        self._table = WordTable(line_ends=r"\s*[\r\n]+" in pattern)

    def encode(self, text: str, new_chars: int | None = None, whose: str = "") -> bytes:
        """Returns the tokens of ``text``; runs are cached per owner (``whose``).

        So timing does not reveal what others have asked, except for single words, as far as a few microseconds show.

        Raises :class:`MuchNew` if there are more than ``new_chars`` characters in new runs; known words and markers
        count in part. Finished work stays cached."""
        work = self._markers.work((text,)) if self._markers is not None else 0
        if self._markers is None or not work:
            parts = [text]
        else:
            new_chars = _left(new_chars, work)
            parts = self._markers.split(text)
            new_chars = _left(new_chars, MARKER_CHARS * (len(parts) // 2))
        tokens: list[bytes] = []
        owner = f"{len(whose)}:{whose}"
        for number, part in enumerate(parts):
            if number & 1:
                tokens.append(self._added[part])
            elif part:
                new_chars = self._add(tokens, part, new_chars, owner)
        return b"".join(tokens)

    def _add(self, tokens: list[bytes], text: str, new_chars: int | None, owner: str) -> int | None:
        """Appends the tokens of a text without markers; returns the rest of ``new_chars``."""
        start, size = 0, len(text)
        while start < size:
            end = _cut(text, start + RUN_CHARS, size)
            run = text if end - start == size else text[start:end]
            name = owner + run
            found = self._runs.get(name)
            if found is None:
                if new_chars is not None and (new_chars < 0 or end - start > max(new_chars, RUN_CHARS_MAX)):
                    raise MuchNew
                found, taken = self._new_run(run, name)
                if new_chars is not None:
                    new_chars -= taken
            tokens.append(found)
            start = end
        return new_chars

    def _new_run(self, run: str, name: str) -> tuple[bytes, int]:
        """Returns the tokens of a run and its cost in characters."""
        if len(run) > RUN_CHARS_MAX:
            return self._whole(run), len(run)
        found = self._by_words(run) if run.isascii() else (self._whole(run), len(run))
        self._runs.put(name, found[0])
        return found

    def _by_words(self, run: str) -> tuple[bytes, int]:
        text, out = run.encode("ascii"), BytesWriter()
        size: i64 = len(text)
        work = len(run) // KNOWN_PART
        found = 0
        at, end = self._table.scan(text, 0, out)
        while at < size:
            piece = run[at:end]
            work += PIECE_CHARS
            tokens = self._pieces.get(piece)
            if tokens is None:
                words = self._find(piece)
                found += len(words)
                if found > _FEW_WORDS and not compiled():  # the library takes less time than merges in Python
                    return self._whole(run), work + size - at
                work += sum([max(WORD_CHARS, len(word)) for word in words])
                tokens = b"".join([self._word(word) for word in words])
                if not self._table.put(text[at:end], tokens):
                    self._pieces.put(piece, tokens)
            out.write(tokens)
            at, end = self._table.scan(text, end, out)
        return out.getvalue(), work

    def _word(self, word: str) -> bytes:
        return self._merges.tokens(word.encode("ascii")) if len(word) <= WORD_BYTES else self._whole(word)


def _cut(text: str, at: i64, size: i64) -> i64:
    """Returns the first place after ``at`` between a letter and a space or newline; ``size`` if there is none."""
    before: i64 = 0
    while at < size:
        char: i64 = ord(text[at])
        if (char == 32 or char == 10) and (65 <= before <= 90 or 97 <= before <= 122):
            return at
        before = char
        at += 1
    return size


def _left(new_chars: int | None, work: int) -> int | None:
    """Returns ``new_chars`` less ``work``. Raises :class:`MuchNew` if that is negative."""
    if new_chars is None:
        return None
    if work > new_chars:
        raise MuchNew
    return new_chars - work


def known_words(rules: Mapping[str, Any]) -> str:
    """Returns the pattern by which a tokenizer cuts a text into words that are encoded independently.

    Returns "" if it does not, or cuts in a way that is not known here. ``rules`` is tokenizer.json's object."""
    model, normalizer = rules.get("model"), rules.get("normalizer")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("dropout"):
        return ""
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return ""
    if not _puts_around(rules.get("post_processor")):
        return ""
    # Added tokens that absorb spaces, or are searched in normalized text, are left to the library.
    added = rules.get("added_tokens") or ()
    if any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")):
        return ""
    normalized = {bool(token.get("normalized")) for token in added}
    if len(normalized) > 1 or (True in normalized and normalizer is not None):
        return ""
    return _pattern(rules.get("pre_tokenizer"))


def _pattern(step: Any) -> str:
    steps = step.get("pretokenizers") if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    if not isinstance(steps, list) or not all(isinstance(each, dict) for each in steps) or not steps:
        return ""
    *splits, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return ""
    if not splits:
        return _GPT2 if last.get("use_regex", True) else ""
    (split, *more) = splits
    pattern = split.get("pattern")
    isolated = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    if more or not isolated or last.get("use_regex", True) or not isinstance(pattern, dict):
        return ""
    regex = pattern.get("Regex")
    return regex if regex in _KNOWN else ""


def _puts_around(step: Any) -> bool:
    """Returns whether the post-processor puts the same tokens, if any, around every text."""
    if step is None:
        return True
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence":
        return all(map(_puts_around, step.get("processors", ())))
    return kind in ("ByteLevel", "TemplateProcessing")
