"""The durations of a prefill: in milliseconds to load balancers, in microseconds to the conductor."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.orders import PrefillReport
from pinyon.placement.decision_log import MeasuredFirstToken

NAME_CHARS_MAX = 128
MS_MAX = 3_600_000
"""An hour; a longer duration comes from a broken clock."""
_PARTS = ("queue", "fetch", "compute", "push")
_SAME = ("prefill_instance_id", "computed_tokens", "local_tokens", "peer_tokens", "store_tokens")
"""Fields with the same name in both messages."""
_values: Callable[[worker_pb2.PrefillReport], tuple[Any, ...]] = attrgetter(*PrefillReport._fields)


def report_to_proto(report: PrefillReport) -> worker_pb2.PrefillReport:
    return worker_pb2.PrefillReport(**report._asdict())


def report_from_proto(message: worker_pb2.PrefillReport) -> PrefillReport:
    """Returns a peer's report unchecked: it is shown and counted, but no decision depends on it."""
    return PrefillReport(*_values(message))


def first_token_to_proto(number: int, value: MeasuredFirstToken) -> conductor_pb2.FirstTokenMeasurement:
    """Returns the measured result of the placement with this number."""
    report = value.report
    said: dict[str, Any] = {name: getattr(report, name) for name in _SAME}
    said |= {f"{part}_us": _us(getattr(report, f"{part}_ms")) for part in _PARTS}
    return conductor_pb2.FirstTokenMeasurement(placement_number=number, ttft_us=round(value.ttft_s * 1e6), **said)


def first_token_from_proto(message: conductor_pb2.FirstTokenMeasurement) -> MeasuredFirstToken:
    """Returns an instance's measurement, unchecked like :func:`report_from_proto`."""
    said: dict[str, Any] = {name: getattr(message, name) for name in _SAME}
    said["prefill_instance_id"] = message.prefill_instance_id[:NAME_CHARS_MAX]
    said |= {f"{part}_ms": getattr(message, f"{part}_us") * 1e-3 for part in _PARTS}
    return MeasuredFirstToken(message.ttft_us * 1e-6, PrefillReport(**said))


def _us(milliseconds: float) -> int:
    """Returns microseconds; an impossible duration becomes 0, since a peer's report never causes an error."""
    return round(1e3 * milliseconds) if 0 <= milliseconds <= MS_MAX else 0
