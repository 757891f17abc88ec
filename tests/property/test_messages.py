"""Messages read back equal the values written into them, over the wire too."""

from __future__ import annotations

from typing import TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.core.logprobs import TokenLogprob
from pinyon.core.orders import FETCH_SPANS_MAX, FetchSpan, KvSource
from pinyon.core.request import FinishReason, RequestClass, Role, SamplingParams
from pinyon.messages.enums import finish_reason_from_proto, finish_reason_to_proto, role_from_proto, role_to_proto
from pinyon.messages.instance import (
    LOAD_MS_MAX,
    info_from_proto,
    info_to_proto,
    layout_from_proto,
    layout_to_proto,
    load_from_proto,
    load_to_proto,
)
from pinyon.messages.logprobs import logprobs_from_proto
from pinyon.messages.orders import fetch_span_to_proto, fetch_spans_from_proto
from pinyon.messages.request_class import class_from_proto, class_to_proto
from pinyon.messages.sampling import sampling_from_proto, sampling_to_proto
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from tests.sent_logprobs import logprobs_to_proto

AnyMessage = TypeVar("AnyMessage", bound=Message)

u16 = st.integers(1, 1 << 16)
u32 = st.integers(0, (1 << 32) - 1)
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=128)
labels = st.text("abc ü/:", max_size=256)
geographies = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
layouts = st.builds(KvLayout, u16, u16, u16, u16, st.sampled_from(["float32", "float16", "bfloat16"]))
classes = st.builds(
    RequestClass,
    st.just("") | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", fullmatch=True),
    st.integers(1, 1 << 20),
    labels,
    labels,
    st.integers(-1000, 1000),
    st.floats(0, 1e12),
    st.text("abc ü", max_size=128),
    st.lists(geographies, max_size=16).map(tuple),
    labels,
    st.booleans(),
)
signed = st.integers(-200, 200).map(lambda hundredths: hundredths / 100)
samplings = st.builds(
    SamplingParams,
    st.integers(99, (1 << 32) - 1),
    st.integers(0, 2000).map(lambda thousandths: thousandths / 1000),
    u32,
    st.integers(1, 1000).map(lambda thousandths: thousandths / 1000),
    st.integers(0, (1 << 64) - 1),
    st.lists(st.text("abü", min_size=1, max_size=9), max_size=16).map(tuple),
    st.booleans(),
    min_p=st.integers(0, 1000).map(lambda thousandths: thousandths / 1000),
    min_tokens=st.integers(0, 99),
    stop_token_ids=st.lists(u32, max_size=64).map(tuple),
    repetition_penalty=st.integers(1, 1000).map(lambda hundredths: hundredths / 100),
    frequency_penalty=signed,
    presence_penalty=signed,
    logit_bias=st.dictionaries(u32, signed, max_size=9).map(lambda biases: tuple(sorted(biases.items()))),
    logprobs=st.integers(0, 20),
    prompt_logprobs=st.booleans(),
)
logprobs = st.integers(0, 3).flatmap(
    lambda top: st.lists(
        st.builds(
            TokenLogprob,
            st.floats(max_value=0, width=32),
            st.lists(st.tuples(u32, st.floats(max_value=0, width=32)), min_size=top, max_size=top).map(tuple),
        ),
        max_size=9,
    )
)


def travelled(message: AnyMessage) -> AnyMessage:
    return type(message).FromString(message.SerializeToString())


@given(logprobs)
def test_logprobs(value):
    assert logprobs_from_proto(travelled(logprobs_to_proto(value))) == value


@pytest.mark.parametrize(("tokens", "top", "told"), [(2, 1, 1), (1, 0, 1), (1, 21, 21), (0, 1, 1)])
def test_logprobs_that_do_not_fit_together_are_refused(tokens, top, told):
    message = common_pb2.Logprobs(
        logprobs=[-1.0] * tokens, top_count=top, top_tokens=[1] * told, top_logprobs=[-1.0] * told
    )
    with pytest.raises(InvalidArgument, match="likeliest"):
        logprobs_from_proto(message)


@given(classes)
def test_classes(value):
    assert class_from_proto(travelled(class_to_proto(value))) == value


@given(samplings)
def test_sampling(value):
    assert sampling_from_proto(travelled(sampling_to_proto(value))) == value


@given(layouts)
def test_layouts(value):
    assert layout_from_proto(travelled(layout_to_proto(value))) == value


def test_roles_and_finish_reasons_are_those_of_the_protos():
    assert {role_to_proto(role) for role in Role} == set(common_pb2.Role.values()) - {common_pb2.ROLE_UNSPECIFIED}
    assert [role_from_proto(role_to_proto(role)) for role in Role] == list(Role)
    assert role_from_proto(common_pb2.ROLE_UNSPECIFIED) is None
    numbers = {finish_reason_to_proto(reason) for reason in FinishReason}
    assert numbers == set(common_pb2.FinishReason.values()) - {common_pb2.FINISH_REASON_UNSPECIFIED}
    assert [finish_reason_from_proto(finish_reason_to_proto(reason)) for reason in FinishReason] == list(FinishReason)
    assert finish_reason_from_proto(common_pb2.FINISH_REASON_UNSPECIFIED) is None


@given(names, names, st.sampled_from(Role), names, layouts, u32)
def test_instances(name, model, role, boot, layout, limit):
    info = InstanceInfo(name, boot, role, "host:1")
    if role is not Role.STORE:
        info = InstanceInfo(name, boot, role, "[::1]:1", model, "f", layout, limit, limit, limit)
    assert info_from_proto(travelled(info_to_proto(info))) == info
    load = InstanceLoad(limit, limit, limit, limit, limit, min(limit / 8, LOAD_MS_MAX), True)
    assert load_from_proto(travelled(load_to_proto(load))) == load


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from(KvSource)), max_size=20), names)
def test_fetch_spans(steps, name):
    spans, at = [], 0
    for gap, count, source in steps:
        spans.append(FetchSpan(name, "host:1", source, at + gap, at + gap + count))
        at += gap + count
    assert fetch_spans_from_proto([travelled(fetch_span_to_proto(span)) for span in spans], at) == tuple(spans)
    if spans:
        with pytest.raises(InvalidArgument):
            fetch_spans_from_proto(map(fetch_span_to_proto, spans), at - 1)


def test_as_many_spans_as_are_planned_are_taken():
    planned = [FetchSpan("s", "host:1", KvSource.STORE, index, index + 1) for index in range(FETCH_SPANS_MAX + 1)]
    assert len(fetch_spans_from_proto(map(fetch_span_to_proto, planned[:-1]), 1000)) == FETCH_SPANS_MAX
    with pytest.raises(InvalidArgument) as caught:
        fetch_spans_from_proto(map(fetch_span_to_proto, planned), 1000)
    assert caught.value.field == "fetches"
