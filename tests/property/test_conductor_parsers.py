"""Whatever a peer sends, the conductor's parsers give a value or an InvalidArgument that names a field."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.messages.instance import info_from_proto, load_from_proto
from pinyon.messages.placement import request_from_proto
from pinyon.messages.role import role_from_proto

U32 = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
U64 = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
TEXT = st.one_of(st.text(max_size=8), st.text(min_size=120, max_size=140))
# enums are open in proto3: a peer may send any number
ROLES = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 5)

REQUESTS = st.builds(
    conductor_pb2.ScheduleRequest,
    model=TEXT,
    tenant=TEXT,
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
    geography=TEXT,
)
LOADS = st.builds(conductor_pb2.InstanceLoad, used_blocks=U64, mean_tbt_ms=st.floats(), draining=st.booleans())


def names_a_field(parse) -> bool:
    """Whether it was refused; the refusal names a field."""
    refusal = None
    try:
        parse()
    except InvalidArgument as error:
        refusal = error
    assert refusal is None or (refusal.field and refusal.message)
    return refusal is not None


@given(REQUESTS, TEXT)
@settings(max_examples=200)
def test_requests(message, request_id):
    refused = names_a_field(lambda: request_from_proto(message, request_id, 30.0, 0.0))
    good = (
        0 < len(request_id) <= 128
        and 0 < len(message.model) <= 128
        and len(message.tenant) <= 128
        and message.prompt_tokens > 0
        and len(message.block_keys) % 16 == 0
        and len(message.exclude_instance_ids) <= 64
        and all(0 < len(name) <= 128 for name in message.exclude_instance_ids)
    )
    assert refused is not good


@given(INFOS)
@settings(max_examples=200)
def test_registrations(message):
    if not names_a_field(lambda: info_from_proto(message)):
        info = info_from_proto(message)
        assert info.instance_id == message.instance_id
        assert (info.layout is None) == (message.role == common_pb2.ROLE_STORE)


@given(LOADS)
@settings(max_examples=100)
def test_loads(message):
    refused = names_a_field(lambda: load_from_proto(message))
    assert refused is not (0 <= message.mean_tbt_ms < float("inf"))


@given(ROLES)
def test_roles(role):
    assert names_a_field(lambda: role_from_proto(role)) is (role not in common_pb2.Role.values())
