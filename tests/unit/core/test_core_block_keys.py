"""Block keys against the definition, computed by the hash's streaming interface."""

import hmac
import random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.block_keys import (
    KEY_BYTES,
    chain_block_keys,
    namespace,
    pack_keys,
    salt_of,
    secret_id,
    tokens_to_bytes,
    unpack_keys,
)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def keys_by_definition(parent: bytes, tokens: list[int], block_tokens: int) -> list[bytes]:
    keys = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        hasher = xxhash.xxh3_128()
        hasher.update(parent)
        for token in tokens[start : start + block_tokens]:
            hasher.update(token.to_bytes(4, "little"))
        parent = hasher.digest()[:15] + bytes([(len(keys) + 1) % 256])
        keys.append(parent)
    return keys


@given(TOKENS, st.integers(1, 9))
def test_chain_equals_the_definition(tokens, block_tokens):
    root = namespace("model", "layout", "tenant")
    assert chain_block_keys(root, tokens_to_bytes(tokens), block_tokens) == keys_by_definition(
        root, tokens, block_tokens
    )


def test_a_key_tells_its_place_for_ever():
    root = namespace("m", "l", "t")
    keys = chain_block_keys(root, bytes(4 * 600), 1)
    assert keys == keys_by_definition(root, [0] * 600, 1)
    assert [key[-1] for key in keys[253:258]] == [254, 255, 0, 1, 2]
    assert chain_block_keys(keys[254], bytes(4), 1) == keys[255:256]


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_equal_keys_mean_equal_prefixes(left, right, block_tokens):
    root = namespace("m", "l", "t")
    pairs = zip(
        chain_block_keys(root, tokens_to_bytes(left), block_tokens),
        chain_block_keys(root, tokens_to_bytes(right), block_tokens),
        strict=False,
    )
    for index, (one, other) in enumerate(pairs):
        end = (index + 1) * block_tokens
        assert (one == other) == (left[:end] == right[:end])


@given(TOKENS, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_can_be_continued(tokens, block_tokens, blocks):
    root = namespace("m", "l", "t")
    packed = tokens_to_bytes(tokens)
    whole = chain_block_keys(root, packed, block_tokens)
    blocks = min(blocks, len(whole))
    head = chain_block_keys(root, packed[: 4 * block_tokens * blocks], block_tokens)
    tail = chain_block_keys(head[-1] if head else root, packed[4 * block_tokens * blocks :], block_tokens)
    assert head + tail == whole


@pytest.mark.parametrize("secret", [b"", b"s"])
def test_a_salt_is_a_namespace_of_its_own(secret):
    plain = namespace("m", "l", "t", secret)
    assert namespace("m", "l", "t", secret, "") == plain
    starts = {namespace("m", "l", tenant, secret, salt) for tenant, salt in (("t", "a"), ("t", "b"), ("ta", ""))}
    assert len({*starts, plain}) == 4


def test_an_engine_gets_another_salt_for_each_owner():
    owners = [("t", ""), ("t", "a"), ("ta", ""), ("", "a"), ("", "ta")]
    salts = {salt_of(*owner, secret) for owner in owners for secret in (b"", b"one", b"two")}
    assert len(salts) == 3 * len(owners)
    assert all(salt.startswith("pinyon:") and salt.isascii() for salt in salts)
    assert salt_of("", "", b"one") == ""


def test_no_two_owners_share_a_namespace():
    triples = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("", "ab", "c"), ("a", "b", "d"), ("a", "b", "")]
    assert len({namespace(*triple) for triple in triples}) == len(triples)


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=10))
def test_packing_round_trip(keys):
    assert unpack_keys(pack_keys(keys)) == keys


@pytest.mark.parametrize("count", [63, 64, 65, 127, 128, 1000])
def test_many_keys_are_taken_apart_as_they_were(count):
    packed = random.Random(count).randbytes(count * KEY_BYTES)
    assert unpack_keys(packed) == [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def test_a_torn_pack_is_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        unpack_keys(b"x" * 17)


def test_tokens_travel_little_endian():
    assert tokens_to_bytes(np.array([1, 256])) == b"\x01\0\0\0\0\x01\0\0"


def test_a_secret_starts_another_chain_and_is_not_told():
    plain = namespace("m", "l", "t")
    starts = {namespace("m", "l", "t", secret) for secret in (b"", b"one", b"two")}
    assert plain in starts
    assert len(starts) == 3
    assert {len(start) for start in starts} == {KEY_BYTES}
    data = b"".join(len(part).to_bytes(4, "little") + part for part in (b"pinyon-v1", b"m", b"l", b"t"))
    assert namespace("m", "l", "t", b"one") == hmac.new(b"one", data, "sha256").digest()[:15] + b"\0"
    assert secret_id(b"") == ""
    assert len({secret_id(b"one"), secret_id(b"two")}) == 2
    assert namespace("m", "l", "t", b"one").hex()[:16] != secret_id(b"one")
