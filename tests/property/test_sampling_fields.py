"""Each field of the table of sampling parameters reaches the engine from an HTTP body, for any set of fields."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.field_kinds import FieldKind, Number, Switch, Texts, TokenBiases, TokenIds, Whole
from pinyon.core.request import NO_LIMIT, SAMPLING_FIELDS, SamplingField, SamplingParams
from pinyon.messages.sampling import put_sampling, sampling_from_proto, sampling_to_proto
from pinyon.openai.fields import CHAT, COMPLETION, INT_MAX
from pinyon.openai.parse import parse_chat, parse_completion

PROTO = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
BODIES = {
    "completion": (COMPLETION, parse_completion, {"model": "m", "prompt": "a"}, {"prompt_logprobs"}),
    "chat": (
        *(CHAT, parse_chat, {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
        {"prompt_logprobs", "logprobs"},  # a chat has two other fields for its logprobs
    ),
}
ABOVE = [each.name for each in SAMPLING_FIELDS if isinstance(each.kind, Number) and each.kind.above]
"""Fields for which 0 is refused."""
VOCAB = 1000
SEED_MAX = (1 << 64) - 1
"""The largest seed that a message holds."""


def values_of(kind: FieldKind) -> st.SearchStrategy[Any]:
    """Returns Python values. Numbers have few decimals, and no bias is 0, which equals no bias."""
    if isinstance(kind, Switch):
        return st.booleans()
    if isinstance(kind, Whole):
        return st.integers(kind.low, INT_MAX if kind.high is None else kind.high)
    if isinstance(kind, Number):
        return st.integers(round(kind.low * 100) + kind.above, round(kind.high * 100)).map(lambda number: number / 100)
    if isinstance(kind, Texts):
        return st.lists(st.text("abü", min_size=1, max_size=9), max_size=kind.count).map(tuple)
    if isinstance(kind, TokenIds):
        return st.lists(st.integers(0, VOCAB - 1), max_size=kind.count).map(tuple)
    assert isinstance(kind, TokenBiases)
    biases = st.integers(round(-4 * kind.most), round(4 * kind.most)).filter(bool).map(lambda number: number / 4)
    pairs = st.dictionaries(st.integers(0, VOCAB - 1), biases, max_size=9)
    return pairs.map(lambda by_token: tuple(sorted(by_token.items())))


def beyond(kind: FieldKind) -> list[Any]:
    """Returns values that messages must not have."""
    if isinstance(kind, Whole):
        return [kind.low - 1] * (kind.low > 0) + ([] if kind.high is None or kind.high == SEED_MAX else [kind.high + 1])
    if isinstance(kind, Number):
        return [kind.high + 0.1, float("nan"), kind.low - 0.1, *([kind.low] if kind.above else [])]
    if isinstance(kind, Texts):
        return [("a",) * (kind.count + 1), ("",), ("ü" * kind.size_bytes,)]
    if isinstance(kind, TokenIds):
        return [(1,) * (kind.count + 1)]
    if isinstance(kind, TokenBiases):
        return [tuple((token, 1.0) for token in range(kind.count + 1)), ((1, kind.most + 1),), ((1, -kind.most - 1),)]
    return []


def as_json(kind: FieldKind, value: Any) -> Any:
    return {str(token): bias for token, bias in value} if isinstance(kind, TokenBiases) else value


@st.composite
def said(draw: st.DrawFn) -> dict[str, Any]:
    """Returns some fields, by name, which are valid together."""
    chosen = draw(st.lists(st.sampled_from(SAMPLING_FIELDS), unique_by=lambda field: field.name))
    values = {field.name: draw(values_of(field.kind)) for field in chosen}
    values["min_tokens"] = min(values.get("min_tokens", 0), values.setdefault("max_tokens", 16))
    if values.get("prompt_logprobs"):
        values.setdefault("logprobs", 0)
    return values


def travelled(sampling: SamplingParams) -> SamplingParams:
    return sampling_from_proto(common_pb2.SamplingParams.FromString(sampling_to_proto(sampling).SerializeToString()))


def test_the_message_has_the_same_fields() -> None:
    assert {field.name for field in SAMPLING_FIELDS} == set(PROTO)


@pytest.mark.parametrize("field", SAMPLING_FIELDS, ids=lambda field: field.name)
def test_what_a_message_does_not_say_is_the_default(field: SamplingField) -> None:
    """A message with another default than zero refuses zero, or distinguishes zero from absence."""
    proto = PROTO[field.name]
    if field.name == "max_tokens":
        assert sampling_from_proto(common_pb2.SamplingParams(), NO_LIMIT) == SamplingParams(NO_LIMIT)
        with pytest.raises(InvalidArgument) as caught:
            sampling_from_proto(common_pb2.SamplingParams())
        assert caught.value.field == field.name
    elif field.default and not proto.has_presence:
        with pytest.raises(InvalidArgument):
            field.kind.check(field.name, 0)


@given(said())
def test_what_is_said_arrives_in_messages(values: dict[str, Any]) -> None:
    sampling = SamplingParams(**values).checked()
    assert travelled(sampling) == sampling
    written = {descriptor.name for descriptor, _ in sampling_to_proto(sampling).ListFields()}
    defaults = {field.name: field.default for field in SAMPLING_FIELDS}
    assert written == {name for name, value in values.items() if value != defaults[name]} | {"max_tokens"}


@pytest.mark.parametrize("tiny", [1e-6, 1e-7, 1e-60])
@pytest.mark.parametrize("name", ABOVE)
def test_a_tiny_number_is_neither_off_nor_refused(name: str, tiny: float) -> None:
    assert getattr(travelled(SamplingParams(**{name: tiny})), name) == 1e-6


@pytest.mark.parametrize("value", [0.0, -0.0, -1e-9])
@pytest.mark.parametrize("name", ABOVE)
def test_nothing_is_made_a_number_above_zero(name: str, value: float) -> None:
    message = common_pb2.SamplingParams(max_tokens=1)
    setattr(message, name, value)
    if message.HasField(name) if PROTO[name].has_presence else value or math.copysign(1, value) < 0:
        with pytest.raises(InvalidArgument):
            sampling_from_proto(message)


@pytest.mark.parametrize("body", BODIES)
@given(values=said())
def test_what_a_body_says_arrives_at_the_engine(body: str, values: dict[str, Any]) -> None:
    known, parse, beside, others = BODIES[body]
    kinds = {field.name: field.kind for field in SAMPLING_FIELDS}
    assert {name for name in kinds if known[name].sampled is None} == others
    values = {name: value for name, value in values.items() if name not in others}
    call = parse(
        json.dumps({**beside, **{name: as_json(kinds[name], value) for name, value in values.items()}}).encode()
    )
    assert call.sampling == SamplingParams(**{"temperature": 1.0, **values})
    assert call.seeded == ("seed" in values)
    call.sampling.check_tokens(VOCAB)
    settled = call.sampling.settled(values["max_tokens"] + 1, 7)
    assert settled == SamplingParams(
        **{"temperature": 1.0, **values, "max_tokens": values["max_tokens"] + 1, "seed": 7}
    )
    message = common_pb2.SamplingParams()
    put_sampling(message, settled)
    assert sampling_from_proto(message) == settled


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_says_nothing_leaves_it_open(body: str) -> None:
    _, parse, beside, _ = BODIES[body]
    null = {field.name: None for field in SAMPLING_FIELDS}
    for fields in ({}, null):
        call = parse(json.dumps({**beside, **fields}).encode())
        assert call.sampling == SamplingParams(NO_LIMIT, temperature=1.0)
        assert not call.seeded


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in SAMPLING_FIELDS for value in beyond(field.kind)],
    ids=lambda one: one.name if isinstance(one, SamplingField) else repr(one)[:20],
)
def test_what_is_beyond_the_limits_is_refused_by_name(field: SamplingField, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field.name: value}).checked()
    assert caught.value.field == field.name
    if value or PROTO[field.name].has_presence or field.default == value:  # otherwise a message cannot express it
        with pytest.raises(InvalidArgument) as caught:
            travelled(SamplingParams(**{field.name: value}))
        assert caught.value.field == field.name
    for known, parse, beside, _ in BODIES.values():
        if known[field.name].sampled is not None and value == value:
            with pytest.raises(InvalidArgument) as caught:
                parse(json.dumps({**beside, field.name: as_json(field.kind, value)}).encode())
            assert caught.value.field == field.name


@pytest.mark.parametrize(
    "field",
    [field for field in SAMPLING_FIELDS if isinstance(field.kind, TokenIds | TokenBiases)],
    ids=lambda field: field.name,
)
def test_a_token_outside_the_vocabulary_is_refused_by_name(field: SamplingField) -> None:
    tokens: Any = (3, VOCAB) if isinstance(field.kind, TokenIds) else ((3, 1.0), (VOCAB, 1.0))
    sampling = SamplingParams(**{field.name: tokens})
    sampling.check_tokens(VOCAB + 1)
    with pytest.raises(InvalidArgument, match=str(VOCAB)) as caught:
        sampling.check_tokens(VOCAB)
    assert caught.value.field == field.name
