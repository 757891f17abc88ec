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
from pinyon.store.records import MAX_OBJECT_BYTES, Life, NodeRecord, parse_life, parse_node, parse_replica
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


@given(node_ids, boots)
def test_lives_round_trip(node_id: str, boot: str) -> None:
    assert parse_life(str(Life(node_id, boot)).encode()) == Life(node_id, boot)


@given(st.binary(max_size=120) | st.text(max_size=120).map(str.encode))
def test_any_bytes_as_a_life(raw: bytes) -> None:
    life = parse_life(raw)
    assert life is None or str(life).encode() == raw


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


@given(st.binary(max_size=80), st.binary(max_size=30))
def test_any_bytes_as_a_replica(field: bytes, value: bytes) -> None:
    assert parse_replica(field, value) is None or parse_life(field)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (b"1", 1),
        (b"32768", 32768),
        (str(MAX_OBJECT_BYTES).encode(), MAX_OBJECT_BYTES),
        (str(MAX_OBJECT_BYTES + 1).encode(), None),
        (b"9" * 5000, None),
        (b"0", None),
        (b"-1", None),
        (b" 1", None),
        (b"1e3", None),
        (b"", None),
        ("٣".encode(), None),
    ],
)
def test_sizes(value: bytes, size: int | None) -> None:
    parsed = parse_replica(f"kv-0/{BOOT}".encode(), value)
    assert parsed == (None if size is None else (Life("kv-0", BOOT), size))


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
