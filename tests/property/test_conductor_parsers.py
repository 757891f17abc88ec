"""The conductor's parsers return a value or an InvalidArgument that names a field, whatever a peer sends."""

import string
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import Role
from pinyon.messages.enums import role_from_proto
from pinyon.messages.instance import (
    BATCH_MAX,
    KV_TOKENS_MAX,
    LOAD_MS_MAX,
    info_from_proto,
    load_from_proto,
    load_to_proto,
)
from pinyon.messages.placement import request_from_proto
from pinyon.messages.request_class import class_from_proto, class_to_proto
from tests.long import usually
from tests.unit.placement.conftest import make_fleet, member

U32 = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
U64 = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
TEXT = st.one_of(st.text(max_size=8), st.text(min_size=120, max_size=140))
NAME_CHARS = set(string.ascii_letters + string.digits + "._-")
# Enums are open in proto3: a peer may send any number.
ROLES = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 5)

CLASSES = st.builds(
    common_pb2.RequestClass,
    kind=st.just("chat") | TEXT,
    turn=U32,
    session=TEXT,
    user=st.text(max_size=300),
    priority=st.integers(-1001, 1001) | st.integers(-(2**31), 2**31 - 1),
    arrived_unix_s=st.floats(),
    tenant=TEXT,
    geographies=st.lists(st.just("eu-west") | TEXT, max_size=18),
)
REQUESTS = st.builds(
    conductor_pb2.ScheduleRequest,
    model=TEXT,
    request_class=st.none() | CLASSES,
    prompt_tokens=U32,
    block_keys=st.binary(max_size=70),
    max_tokens=U32,
    ttft_slo_ms=U32,
    tbt_slo_ms=U32,
    exclude_instance_ids=st.lists(TEXT, max_size=70),
    no_reuse=st.booleans(),
)
LAYOUTS = st.builds(
    common_pb2.KvLayout, layers=U32, kv_heads=U32, head_dim=U32, block_tokens=U32, dtype=st.just("float32") | TEXT
)
INFOS = st.builds(
    conductor_pb2.InstanceInfo,
    instance_id=TEXT,
    boot_id=TEXT,
    role=ROLES,
    address=st.just("h:1") | TEXT,
    model=TEXT,
    model_fingerprint=TEXT,
    layout=st.none() | LAYOUTS,
    capacity_blocks=U64,
    max_batch=U32,
    max_context_tokens=U32,
)
LOADS = st.builds(
    conductor_pb2.InstanceLoad,
    running_requests=U32,
    used_blocks=U64,
    kv_tokens=U64 | st.integers(0, KV_TOKENS_MAX),
    mean_batch=st.floats() | st.floats(0, 1024),
    mean_kv_tokens=st.floats() | st.floats(0, 2 * KV_TOKENS_MAX),
    mean_tbt_ms=st.floats() | st.floats(0, 2 * LOAD_MS_MAX),
    room_wait_ms=st.floats(),
    draining=st.booleans(),
    failed_source_addresses=st.sets(st.text(max_size=20), max_size=3).map(sorted),
)


def names_a_field(parse) -> bool:
    """Returns whether the input was refused; a refusal must name a field."""
    refusal = None
    try:
        parse()
    except InvalidArgument as error:
        refusal = error
    assert refusal is None or (refusal.field and refusal.message)
    return refusal is not None


def is_name(text: str, limit: int) -> bool:
    return 0 < len(text) <= limit and text[0].isalnum() and text.isascii() and set(text) <= NAME_CHARS


def is_writable(text: str) -> bool:
    return not any(unicodedata.category(character) == "Cc" for character in text)


def good_class(message) -> bool:
    return (
        (not message.kind or is_name(message.kind, 32))
        and message.turn <= 1 << 20
        and all(len(text) <= 256 and is_writable(text) for text in (message.session, message.user))
        and len(message.tenant) <= 128
        and is_writable(message.tenant)
        and -1000 <= message.priority <= 1000
        and 0 <= message.arrived_unix_s < float("inf")
        and len(message.geographies) <= 16
        and all(is_name(name, 64) for name in message.geographies)
    )


@given(CLASSES)
@settings(max_examples=usually(25, long=300))
def test_classes(message):
    assert names_a_field(lambda: class_from_proto(message)) is not good_class(message)
    if good_class(message):
        value = class_from_proto(message)
        assert class_from_proto(class_to_proto(value)) == value
        assert (value.kind, value.turn, value.tenant) == (message.kind, message.turn or 1, message.tenant)
        assert value.geographies == tuple(message.geographies)


@given(REQUESTS, TEXT)
@settings(max_examples=usually(20, long=200))
def test_requests(message, request_id):
    refused = names_a_field(lambda: request_from_proto(message, request_id, 30.0, 0.0))
    good = (
        0 < len(request_id) <= 128
        and 0 < len(message.model) <= 128
        and good_class(message.request_class)
        and message.prompt_tokens > 0
        and len(message.block_keys) % 16 == 0
        and len(message.exclude_instance_ids) <= 64
        and all(0 < len(name) <= 128 for name in message.exclude_instance_ids)
    )
    assert refused is not good


@given(INFOS)
@settings(max_examples=usually(20, long=200))
def test_registrations(message):
    if not names_a_field(lambda: info_from_proto(message)):
        info = info_from_proto(message)
        assert info.instance_id == message.instance_id
        assert (info.layout is None) == (message.role == common_pb2.ROLE_STORE)


@given(LOADS)
@settings(max_examples=usually(20, long=100))
def test_loads(message):
    refused = names_a_field(lambda: load_from_proto(message))
    times = message.mean_tbt_ms, message.room_wait_ms
    tokens = message.mean_kv_tokens, message.kv_tokens
    assert refused is not (
        all(0 <= each <= LOAD_MS_MAX for each in times)
        and all(0 <= each <= KV_TOKENS_MAX for each in tokens)
        and 0 <= message.mean_batch <= BATCH_MAX
    )
    if refused:
        return
    load = load_from_proto(message)
    assert load_to_proto(load) == message
    fleet = make_fleet(("d0", Role.DECODE))
    state = member(fleet, "d0")
    for now_s in (1.0, 2.0):
        fleet.set_load(state, load, now_s)
    assert 0 <= state.decode_s(0) <= state.decode_s(1 << 20) < float("inf")


@given(ROLES)
def test_roles(role):
    assert names_a_field(lambda: role_from_proto(role)) is (role not in common_pb2.Role.values())


@pytest.mark.parametrize(
    ("groups", "level", "good"),
    [
        ([(b"k" * 16, 4, 2), (b"j" * 16, 8, 3)], 4, True),
        ([(b"k" * 16, 4, 2)], 0, False),
        ([(b"k" * 16, 4, 1)], 4, False),
        ([(b"k" * 16, 4, 0)], 4, False),
        ([(b"k" * 16, 0, 2)], 4, False),
        ([(b"k" * 16, 1 << 31, 2)], 4, False),
        ([(b"k" * 15, 4, 2)], 4, False),
        ([(b"k" * 16, 4, 2), (b"k" * 16, 4, 2)], 4, False),
        ([(bytes([each]) * 16, 4, 2) for each in range(5)], 4, False),
    ],
)
def test_what_a_batch_shares_is_checked(groups: list[tuple[bytes, int, int]], level: int, good: bool) -> None:
    shared = [conductor_pb2.SharedPrefix(block_key=key, blocks=blocks, requests=count) for key, blocks, count in groups]
    message = conductor_pb2.InstanceLoad(prefix_level_blocks=level, shared_prefixes=shared)
    assert names_a_field(lambda: load_from_proto(message)) is not good
