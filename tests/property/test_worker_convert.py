"""A caller's bytes give an order, or an error that names a field, and nothing else."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import PinyonError
from pinyon.core.request import Role
from pinyon.core.served import Served
from pinyon.messages.orders import parse_hello, parse_prefill, parse_submission, parse_target
from pinyon.model import load_card
from pinyon.transfer import SegmentDescriptor
from tests.long import usually

u32 = st.integers(0, 2**32 - 1)
small = st.integers(0, 40)
tokens = st.one_of(
    st.binary(max_size=40),
    st.lists(st.integers(0, 271), max_size=40).map(lambda t: b"".join(each.to_bytes(4, "little") for each in t)),
)
sampling = st.builds(
    common_pb2.SamplingParams,
    max_tokens=st.one_of(u32, small),
    temperature=st.floats(width=32),
    top_k=u32,
    top_p=st.floats(width=32),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(max_size=4), max_size=18),
)
spans = st.lists(
    st.builds(common_pb2.FetchSpan, source_id=st.text(max_size=3), first_block=small, block_count=small), max_size=4
)
placement = st.builds(
    common_pb2.Placement,
    prefill_instance_id=st.sampled_from(["", "w", "p"]),
    prefill_address=st.sampled_from(["", "a:1"]),
    decode_instance_id=st.sampled_from(["", "w"]),
    fetches=spans,
)
classes = st.builds(
    common_pb2.RequestClass,
    kind=st.sampled_from(["", "chat", "a b"]),
    turn=u32 | small,
    user=st.text(max_size=8),
    priority=st.integers(-1002, 1002),
    tenant=st.text(max_size=8),
    geographies=st.lists(st.sampled_from(["eu-west", "é"]), max_size=2),
)
submissions = st.builds(
    worker_pb2.Submission,
    request_id=st.text(max_size=140),
    request_class=st.none() | classes,
    model=st.sampled_from(["", "pinyon-tiny", "x"]),
    prompt_tokens_le32=tokens,
    block_keys=st.binary(max_size=40),
    sampling=sampling,
    generated_tokens=small,
    placement=st.none() | placement,
)
region = st.builds(
    common_pb2.Region, key=st.binary(max_size=17), location=st.sampled_from(["", "cpu:0"]), length_bytes=u32
)
starts = st.builds(
    worker_pb2.PrefillStart,
    request_class=st.none() | classes,
    prompt_tokens_le32=tokens,
    block_keys=st.binary(max_size=40),
    sampling=sampling,
    fetches=spans,
    target_offsets_bytes=st.lists(st.integers(0, 2**64 - 1) | small, max_size=4),
    first_target_block=small,
    target_region=st.none() | region | st.just(common_pb2.Region(key=bytes(16), location="cpu:0", length_bytes=10**6)),
)
hellos = st.builds(
    worker_pb2.PrefillHello,
    instance_id=st.text(max_size=140),
    model_fingerprint=st.sampled_from(["", load_card().fingerprint]),
    layout=st.sampled_from(
        [
            common_pb2.KvLayout(),
            common_pb2.KvLayout(layers=4, kv_heads=4, head_dim=32, block_tokens=16, dtype="float32"),
        ]
    ),
    segment=st.builds(
        common_pb2.Segment,
        host=st.text(max_size=3),
        port=u32,
        boot_id=st.sampled_from(["", "zz", "00" * 16]),
        regions=st.lists(region, max_size=2),
    ),
)


@cache
def served(role: Role) -> Served:
    card = load_card()
    model = (card.name, card.fingerprint, card.config.vocab_size, card.config.max_context)
    return Served("w", role, *model, card.config.kv_layout(16), 8)


def ask(parse, *arguments):
    """Returns the parsed value; None for a refusal, which must name a field."""
    try:
        return parse(*arguments)
    except PinyonError as refusal:
        field = refusal.field
    assert field
    return None


@settings(max_examples=usually(25, long=300))
@given(message=submissions, role=st.sampled_from(Role))
def test_submissions(message, role):
    order = ask(parse_submission, message, served(role), 1.0)
    if order is None:
        return
    prompt, new = order.prompt, order.prompt.sampling.max_tokens - order.prompt.sample_index
    assert prompt.tokens.size * 4 == len(message.prompt_tokens_le32)
    assert len(prompt.keys) == prompt.tokens.size // 16
    assert new > 0
    assert prompt.tokens.size + new <= served(role).max_context


@settings(max_examples=usually(25, long=300))
@given(message=starts)
def test_prefills(message):
    segment = SegmentDescriptor("h", 1, bytes(16))
    order = ask(parse_prefill, message, served(Role.PREFILL))
    target = ask(parse_target, message, segment, served(Role.PREFILL))
    if order is None or target is None:
        return
    blocks = served(Role.PREFILL).layout.blocks_for(order.tokens.size)
    assert len(target.offsets) + target.first_block == blocks


@settings(max_examples=usually(25, long=300))
@given(
    blocks=st.integers(0, 3),
    first=st.integers(0, 3),
    offsets=st.lists(st.integers(0, 10**6) | st.integers(0, 2**64 - 1), max_size=3),
    region=st.none() | region | st.just(common_pb2.Region(key=bytes(16), location="cpu:0", length_bytes=10**6)),
)
def test_targets(blocks, first, offsets, region):
    layout = served(Role.PREFILL).layout
    message = worker_pb2.PrefillStart(
        prompt_tokens_le32=bytes(4 * 16 * blocks),
        first_target_block=first,
        target_offsets_bytes=offsets,
        target_region=region,
    )
    target = ask(parse_target, message, SegmentDescriptor("h", 1, bytes(16)), served(Role.PREFILL))
    if target is None:
        return
    assert (target.first_block, list(target.offsets)) == (first, offsets)
    assert first + len(offsets) == blocks
    if offsets:
        (opened,) = target.segment.regions
        assert opened.key == target.region_key == region.key
        assert max(offsets) + layout.block_bytes <= opened.length == region.length_bytes


@settings(max_examples=usually(20, long=200))
@given(message=hellos)
def test_hellos(message):
    segment = ask(parse_hello, message, served(Role.PREFILL))
    if segment is not None:
        assert message.model_fingerprint == served(Role.PREFILL).fingerprint
        assert len(segment.regions) == len(message.segment.regions)
