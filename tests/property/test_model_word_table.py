"""A table of pieces returns for each piece the tokens it was given, or nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from librt.strings import BytesWriter

from pinyon.model.word_table import ID_END, PIECE_BYTES, TOKENS, WAYS, WordTable

WORD = st.text(st.characters(min_codepoint=33, max_codepoint=127), min_size=1, max_size=PIECE_BYTES + 2)
IDS = st.lists(st.one_of(st.integers(0, ID_END), st.integers(0, 9)), max_size=TOKENS + 1)


def packed(ids: list[int]) -> bytes:
    return b"".join(each.to_bytes(4, "little") for each in ids)


@given(st.lists(st.tuples(WORD, IDS), min_size=1, max_size=40), st.data())
def test_the_table_has_known_tokens_and_none_of_forgotten_pieces(
    entries: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    """The table has a single set, so that it forgets pieces."""
    table, given_ids, order = WordTable(line_ends=True, sets=1), dict[bytes, list[int]](), list[bytes]()
    for word, ids in entries:
        piece = b" " + word.encode()
        fits = len(piece) <= PIECE_BYTES and 0 < len(ids) <= TOKENS and max(ids) < ID_END
        assert table.put(piece, packed(ids)) is fits
        if fits:
            order = [*(each for each in order if each != piece), piece]
            given_ids[piece] = ids
    words = data.draw(st.lists(st.sampled_from([b" " + word.encode() for word, _ in entries]), max_size=20))
    text, at, out, missing = b"".join(words), 0, BytesWriter(), list[bytes]()
    while True:
        known_to, end = table.scan(text, at, out)
        if known_to == len(text):
            break
        missing.append(text[known_to:end])
        out.write(packed(given_ids.get(missing[-1], [])))
        at = end
    assert out.getvalue() == packed([each for word in words for each in given_ids.get(word, [])])
    assert set(missing) <= set(words)
    assert not order or order[-1] not in missing, "the latest is known"
    if len(given_ids) <= WAYS:
        assert not set(missing) & set(given_ids), "there is room for all"


@given(st.text("aZ09 \n\r\t\x0b\x0c\x1c/.'", max_size=80), st.booleans())
def test_pieces_are_all_of_a_text_in_order(text: str, line_ends: bool) -> None:
    table, at, pieces = WordTable(line_ends=line_ends, sets=1), 0, list[bytes]()
    while at < len(text):
        begin, end = table.scan(text.encode(), at, BytesWriter())
        assert begin == at < end <= len(text), "nothing is known"
        pieces.append(text.encode()[begin:end])
        at = end
    assert b"".join(pieces).decode() == text
