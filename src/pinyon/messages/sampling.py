"""Sampling parameters as messages: each field has the kind that the table of :class:`SamplingParams` gives it."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.field_kinds import FieldKind, Number, Switch, Texts, TokenBiases, TokenIds, Whole
from pinyon.core.request import SAMPLING_FIELDS, SamplingParams

DECIMALS = 6
"""The decimals to which a float32 is rounded, which restores the number as it was written."""

LEAST = 10.0**-DECIMALS
"""The least number that is sent where 0 is refused; smaller ones are replaced by it.

Clients send a ``top_p`` of 1e-50, which a float32 cannot hold, and mean the likeliest token."""

_OFTEN = ("max_tokens", "temperature", "top_p", "seed")
"""Fields that many requests set: written without the table, which takes longer."""

_Put = Callable[[common_pb2.SamplingParams, str, Any], None]
_Read = Callable[[Any], Any]


def _extend(message: common_pb2.SamplingParams, name: str, value: Any) -> None:
    getattr(message, name).extend(value)


def _add(message: common_pb2.SamplingParams, name: str, value: Any) -> None:
    pairs = getattr(message, name)
    for token, bias in value:
        pairs.add(token=token, bias=bias)


def _set_above(message: common_pb2.SamplingParams, name: str, value: Any) -> None:
    setattr(message, name, LEAST if 0.0 < value < LEAST else value)


def _rounded(value: Any) -> Any:
    return round(value, DECIMALS)


def _rounded_above(value: Any) -> Any:
    """Returns a rounded value that stays above 0, as the field must not be 0."""
    return round(value, DECIMALS) or (LEAST if value > 0.0 else value)


def _pairs(value: Any) -> tuple[tuple[int, float], ...]:
    return tuple(sorted({each.token: round(each.bias, DECIMALS) for each in value}.items()))


_WAYS: dict[type[FieldKind], tuple[_Put, _Read]] = {
    Number: (setattr, _rounded),
    Switch: (setattr, lambda value: value),
    Texts: (_extend, tuple),
    TokenBiases: (_add, _pairs),
    TokenIds: (_extend, tuple),
    Whole: (setattr, lambda value: value),
}


def _ways(kind: FieldKind) -> tuple[_Put, _Read]:
    """Returns the functions that put a value of this kind into a message, and read it there."""
    return (_set_above, _rounded_above) if isinstance(kind, Number) and kind.above else _WAYS[type(kind)]


_DESCRIPTORS = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
_FIELDS = {_DESCRIPTORS[each.name]: (each.name, _ways(each.kind)[1], each.kind.check) for each in SAMPLING_FIELDS}
_RARE = [(each.name, each.default, _ways(each.kind)[0]) for each in SAMPLING_FIELDS if each.name not in _OFTEN]
_RARE_DEFAULTS = tuple([default for _, default, _ in _RARE])
_rare_values: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*[name for name, _, _ in _RARE])


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams()
    put_sampling(message, sampling)
    return message


def put_sampling(message: common_pb2.SamplingParams, sampling: SamplingParams) -> None:
    """Fills a new message; only fields that differ from the default are set, since each field takes time."""
    message.max_tokens = sampling.max_tokens
    if sampling.temperature:
        message.temperature = sampling.temperature
    if sampling.top_p != 1.0:
        _set_above(message, "top_p", sampling.top_p)
    if sampling.seed:
        message.seed = sampling.seed
    values = _rare_values(sampling)
    if values != _RARE_DEFAULTS:
        for (name, default, put), value in zip(_RARE, values, strict=True):
            if value != default:
                put(message, name, value)


def sampling_from_proto(message: common_pb2.SamplingParams, max_tokens: int = 0) -> SamplingParams:
    """Returns checked sampling parameters. Raises :class:`InvalidArgument` naming the field.

    ``max_tokens`` applies to a message that does not set it; 0 makes the field mandatory."""
    said: dict[str, Any] = {"max_tokens": max_tokens}
    for descriptor, value in message.ListFields():
        name, read, check = _FIELDS[descriptor]
        value = read(value)
        check(name, value)
        said[name] = value
    if not said["max_tokens"]:
        raise InvalidArgument("max_tokens must be at least 1, got 0", field="max_tokens")
    return SamplingParams(**said)
