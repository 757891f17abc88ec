"""Any content of Redis or of messages gives values or a counted refusal, never another exception."""

from __future__ import annotations

import contextlib
import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.messages.checks import keys_from_proto
from pinyon.messages.segment import segment_from_proto, segment_to_proto
from pinyon.store.records import (
    ENTRY_BYTES,
    MAX_OBJECT_BYTES,
    NodeRecord,
    Tier,
    entry_of,
    is_node_id,
    parse_entry,
    parse_node,
)
from pinyon.transfer import RegionDescriptor, SegmentDescriptor

BOOT = "0123456789abcdef" * 2
node_ids = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=64).filter(
    lambda text: text[0] not in "._-"
)
boots = st.binary(min_size=16, max_size=16).map(bytes.hex)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.integers(1, MAX_OBJECT_BYTES), st.sampled_from(Tier), st.text(max_size=8))
def test_entries_round_trip(size: int, tier: Tier, tenant: str) -> None:
    entry = entry_of(size, tier, tenant)
    assert parse_entry(entry[:ENTRY_BYTES]) == (size, tier)
    assert entry[ENTRY_BYTES:].decode() == tenant


@given(node_ids)
def test_node_ids_are_recognised(node_id: str) -> None:
    assert is_node_id(node_id.encode())
    assert not is_node_id(node_id.encode() + b"{")
    assert not is_node_id(b"\xff" + node_id.encode())


@given(
    st.binary(max_size=60)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries({"boot": json_values, "address": json_values, "capacity_bytes": json_values}).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_any_bytes_as_a_node(raw: bytes) -> None:
    node = parse_node("kv-0", raw)
    assert node is None or isinstance(node, NodeRecord)


def test_a_node_that_is_one() -> None:
    raw = json.dumps({"boot": BOOT, "address": "10.0.0.1:70", "capacity_bytes": 5, "later": "field"}).encode()
    assert parse_node("kv-0", raw) == NodeRecord("kv-0", BOOT, "10.0.0.1:70", 5)
    assert parse_node("no such id!", raw) is None
    assert parse_node("kv-0", b"[" * 100_000) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"node_id": "a/b"}, "node_id"),
        ({"boot_id": BOOT.upper()}, "boot_id"),
        ({"address": "nowhere"}, "address"),
        ({"capacity_bytes": -1}, "capacity_bytes"),
    ],
)
def test_a_record_is_checked_before_it_is_written(change: dict[str, object], field: str) -> None:
    values = {"node_id": "kv-0", "boot_id": BOOT, "address": "127.0.0.1:1", "capacity_bytes": 1} | change
    with pytest.raises(InvalidArgument) as caught:
        NodeRecord(**values)  # type: ignore[arg-type]
    assert caught.value.field == field


@given(st.binary(max_size=30) | st.from_regex(rb"[mdx][0-9a-f]{11}", fullmatch=True))
def test_any_bytes_as_an_entry(entry: bytes) -> None:
    parsed = parse_entry(entry)
    assert parsed is None or entry_of(*parsed) == entry


@pytest.mark.parametrize("size", [0, -1, MAX_OBJECT_BYTES + 1])
def test_no_entry_has_an_impossible_size(size: int) -> None:
    with pytest.raises(ValueError, match="no object"):
        entry_of(size)
    assert parse_entry(f"m{size:011x}".encode()) is None


@given(st.binary(max_size=200))
def test_any_bytes_as_packed_keys(packed: bytes) -> None:
    if len(packed) % 16 or not 16 <= len(packed) <= 128:
        with pytest.raises(InvalidArgument) as caught:
            keys_from_proto(packed, at_most=8)
        assert caught.value.field == "keys"
    else:
        assert b"".join(keys_from_proto(packed, at_most=8)) == packed


@given(
    st.builds(
        common_pb2.Segment,
        host=st.text(max_size=300),
        port=st.integers(0, 2**32 - 1),
        boot_id=st.text(max_size=40) | boots,
        regions=st.lists(
            st.builds(
                common_pb2.Region,
                key=st.binary(max_size=20) | st.binary(min_size=16, max_size=16),
                location=st.text(max_size=80),
                length_bytes=st.integers(0, 2**64 - 1),
            ),
            max_size=2,
        ),
    )
)
def test_any_segment(message: common_pb2.Segment) -> None:
    with contextlib.suppress(InvalidArgument):
        assert segment_to_proto(segment_from_proto(message)).regions == message.regions


def test_segments_round_trip() -> None:
    segment = SegmentDescriptor("127.0.0.1", 70, bytes(16), (RegionDescriptor(bytes(range(16)), "cpu:0", 9),))
    assert segment_from_proto(segment_to_proto(segment)) == segment
