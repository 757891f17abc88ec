"""Batches as vLLM's own encoder writes them: vLLM 0.24 to 0.32 as maps, some older versions as lists."""

from __future__ import annotations

import pytest

from pinyon.core.block_keys import tokens_to_bytes
from services.agent.cache_events import Removed, Stored, read_events

msgpack = pytest.importorskip("msgpack")

MAPS = (
    "93cb3ff8000000000000958aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf800000000000"
    "000107b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739801020304050607ce00011170aa626c6f63"
    "6b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392"
    "91d92770696e796f6e3a6162616261626162616261626162616261626162616261626162616261623030c0a967726f75705f"
    "696478008aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c420010101010101010101010101"
    "0101010101010101010101010101010101010101b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f69647394"
    "09090909aa626c6f636b5f73697a6504a76c6f72615f696403a66d656469756da3475055a96c6f72615f6e616d65a373716c"
    "aa65787472615f6b6579739191a373716ca967726f75705f696478008aa474797065ab426c6f636b53746f726564ac626c6f"
    "636b5f686173686573920b0cb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980101010102020202"
    "aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f"
    "6b65797392c09192a56d6d2d696403a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f63"
    "6b5f6861736865739107a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c"
    "656172656400"
)
LISTS = (
    "93cb3ff8000000000000959aab426c6f636b53746f72656492cf800000000000000107c09801020304050607ce0001117004"
    "c0a3475055c09291d92770696e796f6e3a6162616261626162616261626162616261626162616261626162616261623030c0"
    "009aab426c6f636b53746f72656491c420010101010101010101010101010101010101010101010101010101010101010107"
    "94090909090403a3475055a373716c9191a373716c009aab426c6f636b53746f726564920b0cc098010101010202020204c0"
    "a3475055c092c09192a56d6d2d6964030094ac426c6f636b52656d6f7665649107a34750550091b0416c6c426c6f636b7343"
    "6c656172656400"
)
OLDEST = (
    "92cb3ff80000000000009396ab426c6f636b53746f726564920506c098010203040506070804c092ac426c6f636b52656d6f"
    "766564910691b0416c6c426c6f636b73436c6561726564"
)
"""The events of vLLM before it named the medium, and of SGLang."""
SALT = "pinyon:" + "ab" * 15 + "00"
EVENTS = [
    Stored([2**63 + 1, 7], None, tokens_to_bytes([1, 2, 3, 4, 5, 6, 7, 70_000]), 4, 2, "", SALT),
    Stored([b"\1" * 32], 7, tokens_to_bytes([9] * 4), 4, 1, "sql", ""),
    Stored([11, 12], None, tokens_to_bytes([1] * 4 + [2] * 4), 4, 1, "", ""),
    Removed([7]),
    Removed(None),
]


@pytest.mark.parametrize("written", [MAPS, LISTS], ids=["maps", "lists"])
def test_both_encodings_are_read(written: str) -> None:
    assert read_events(msgpack.unpackb(bytes.fromhex(written))) == EVENTS


def test_events_of_the_oldest_servers_are_read() -> None:
    stored, *others = read_events(msgpack.unpackb(bytes.fromhex(OLDEST)))
    assert stored == Stored([5, 6], None, tokens_to_bytes(range(1, 9)), 4, 2, "", "")
    assert others == [Removed([6]), Removed(None)]


def test_of_pairs_of_tokens_the_first_ones_count() -> None:
    event = {"type": "BlockStored", "block_hashes": [5], "token_ids": [[1, 2], [2, 3]], "block_size": 2}
    assert read_events([1.5, [event]]) == [Stored([5], None, tokens_to_bytes([1, 2]), 2, 1, "", "")]


def test_the_group_of_layers_and_its_kind_are_read() -> None:
    event = {"type": "BlockStored", "block_hashes": [5], "token_ids": [1], "block_size": 1, "group_idx": 2}
    (stored,) = read_events([1.5, [event | {"kv_cache_spec_kind": "mla_attention"}]])
    assert isinstance(stored, Stored)
    assert (stored.group, stored.attention) == (2, "mla_attention")
    assert read_events([1.5, [["BlockRemoved", [5], "GPU", 2]]]) == [Removed([5], 2)]


SGLANG = (
    "93cb41dac35c8513241d9187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393d3f822adfcc5e6"
    "c10dd395ea67b8926dd8ead3cc251696f31c7f32b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc"
    "00300a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f30313233343536373839"
    "aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da347505500"
)
SGLANG_SALTED = (
    "93cb41dac35c8532b64c9188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393cf2eb2a6d5c19a"
    "b480d3df3933cc25ecc5f3cf03145f60dee0ba47b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc"
    "00300a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f30313233343536373839"
    "aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055aa63616368655f73616c74ab70696e796f6e"
    "3a73616c7400"
)
SGLANG_CLEARED = "93cb41dac35c85ae77019181a474797065b0416c6c426c6f636b73436c656172656400"
"""Batches that an SGLang 0.5.23 published: a prompt of 50 tokens, then with a salt, and a flush of its cache."""


def test_events_of_sglang_are_read() -> None:
    plain, salted, cleared = (
        read_events(msgpack.unpackb(bytes.fromhex(each))) for each in (SGLANG, SGLANG_SALTED, SGLANG_CLEARED)
    )
    tokens = tokens_to_bytes(range(10, 58))
    names = [-566699301931663091, -7644183375079679766, -3736555478254321870]
    assert plain == [Stored(names, None, tokens, 16, 3, "", "")]
    assert isinstance(salted[0], Stored)
    assert (salted[0].tokens, salted[0].salt, salted[0].plain) == (tokens, "pinyon:salt", 3)
    assert not set(salted[0].hashes) & set(names)
    assert cleared == [Removed(None)]


def test_of_sglang_only_blocks_in_gpu_memory_count() -> None:
    event = {"type": "BlockStored", "block_hashes": [5], "token_ids": [1], "block_size": 1, "lora_id": None}
    tiers = [event | {"medium": medium} for medium in ("CPU_PINNED", "DISK", "EXTERNAL")]
    assert read_events([1.5, tiers, 0]) == []
    (stored,) = read_events([1.5, [event | {"medium": "GPU", "lora_name": "sql", "session_id": "s"}], 0])
    assert isinstance(stored, Stored)
    assert (stored.lora, stored.plain) == ("sql", 1)
