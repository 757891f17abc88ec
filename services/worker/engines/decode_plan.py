"""The plan of a step's decoding: which KV is read, and by which requests together. It holds for all layers.

A segment of KV is shared by requests whose tables name the same blocks for all of it. It must lie wholly before each
one's next position. Tables that share a segment share all before it, so groups only ever split: they form a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import InvalidArgument
from services.worker.engines.segments import SEGMENT_TOKENS, last_length

_I64 = npt.NDArray[np.int64]

KERNELS = ("plain", "whole", "grouped")
"""The ways to read KV. With ``plain`` each request reads its own.

With ``whole`` KV that all requests of the batch share is read once; with ``grouped`` also KV that two or more share."""

KERNEL_DEFAULT = "grouped"

STACK_TOKENS = 2048
"""The keys of one call: several segments share its fixed cost, and its K, V and scores stay in a cache."""


def check_kernel(kernel: str) -> str:
    """Raises :class:`InvalidArgument` unless it is one of :data:`KERNELS`."""
    if kernel not in KERNELS:
        raise InvalidArgument(f"kernel must be one of {list(KERNELS)}, got {kernel!r}", field="attention_kernel")
    return kernel


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Neighbouring segments that the requests ``[first, first + count)`` of the plan share.

    ``pieces``: ``(segments, pieces of each)``. ``places``: ``(segments, count)``, the plan's places for the parts."""

    first: int
    count: int
    pieces: _I64
    places: _I64


@dataclass(frozen=True, slots=True)
class Stack:
    """Segments of one length, each of one request of the plan, that one call takes.

    ``pieces``: ``(segments, pieces of each)``; a request's last segment may need fewer and then names piece 0.
    ``ends``: the number of keys of each that count; None: all."""

    requests: _I64
    pieces: _I64
    places: _I64
    length: int
    ends: list[int] | None


@dataclass(frozen=True, slots=True)
class Merge:
    """Requests with ``segments`` segments each; their parts lie from ``place`` on, ``(segments, requests)``."""

    place: int
    segments: int
    requests: _I64


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The plan of a step; ``rows`` are the step's rows in the plan's order of requests.

    ``parts``: the number of places for the results of each segment of each request. ``tokens_read``: KV tokens per
    layer; shared ones count once."""

    rows: _I64
    shared: list[SharedRun]
    stacks: list[Stack]
    merges: list[Merge]
    parts: int
    tokens_read: int


def plan_decodes(
    rows: Sequence[int], positions: Sequence[int], tables: Sequence[_I64], kernel: str, piece_tokens: int
) -> DecodePlan:
    """Plans decoded tokens, one per request, at ``rows`` of the step.

    The pieces of the pool that hold each request's KV up to its position are in ``tables``; a piece has
    ``piece_tokens`` tokens, which divide :data:`LENGTH_STEP`."""
    wholes = [(position + 1) // SEGMENT_TOKENS for position in positions]
    per_segment = SEGMENT_TOKENS // piece_tokens
    segments = [
        table[: whole * per_segment].reshape(whole, per_segment) for table, whole in zip(tables, wholes, strict=True)
    ]
    order, spans, own_from = _share(segments, kernel)
    counts = [position // SEGMENT_TOKENS + 1 for position in positions]
    merges, base, stride = _places(order, counts)
    shared = [
        SharedRun(
            *(first, count, segments[order[first]][start:stop]),
            base[first : first + count] + np.arange(start, stop)[:, None] * stride[first : first + count],
        )
        for first, count, start, stop in spans
    ]
    read = SEGMENT_TOKENS * sum(stop - start for _, _, start, stop in spans)

    alone: list[tuple[int, int, int]] = []
    tails: dict[int, list[int]] = {}
    for number, request in enumerate(order):
        if own_from[request] < wholes[request]:
            alone.append((number, own_from[request], wholes[request]))
        if counts[request] > wholes[request]:
            tails.setdefault(last_length(positions[request]), []).append(number)
        read += positions[request] + 1 - SEGMENT_TOKENS * own_from[request]
    stacks: list[Stack] = []
    if alone:
        requests = np.repeat([number for number, _, _ in alone], [stop - start for _, start, stop in alone])
        numbers = np.concatenate([np.arange(start, stop) for _, start, stop in alone])
        pieces = np.concatenate([segments[order[number]][start:stop] for number, start, stop in alone])
        places = base[requests] + numbers * stride[requests]
        size = max(1, STACK_TOKENS // SEGMENT_TOKENS)
        for at in range(0, len(requests), size):
            part = slice(at, at + size)
            stacks.append(Stack(requests[part], pieces[part], places[part], SEGMENT_TOKENS, None))
    for length, members in tails.items():
        size = max(1, STACK_TOKENS // length)
        for at in range(0, len(members), size):
            part_of = members[at : at + size]
            requests = np.array(part_of)
            ends = [positions[order[number]] % SEGMENT_TOKENS + 1 for number in part_of]
            pieces = np.zeros((len(part_of), length // piece_tokens), np.int64)
            for row, number in enumerate(part_of):
                first = wholes[order[number]] * per_segment
                need = -(-ends[row] // piece_tokens)
                pieces[row, :need] = tables[order[number]][first : first + need]
            last = np.array([wholes[order[number]] for number in part_of])
            stacks.append(Stack(requests, pieces, base[requests] + last * stride[requests], length, ends))
    return DecodePlan(np.array(rows, np.int64)[order], shared, stacks, merges, sum(counts), read)


def _share(segments: Sequence[_I64], kernel: str) -> tuple[list[int], list[tuple[int, int, int, int]], list[int]]:
    """Returns the order, the shared runs, and per request the first segment that it reads alone.

    In the order, the requests of every group are neighbours. Each run is (first request, number of requests, first
    segment, end of segments)."""
    own_from = [0] * len(segments)
    everyone = list(range(len(segments)))
    spans: list[tuple[int, int, int, int]] = []
    if kernel == "plain" or len(segments) < 2:
        return everyone, spans, own_from
    if kernel == "whole":
        if common := _common(segments, everyone, 0):
            spans.append((0, len(segments), 0, common))
        return everyone, spans, [common] * len(segments)
    order, groups = _split(segments, everyone, 0)
    waiting = [(members, 0) for members in groups]
    while waiting:
        members, start = waiting.pop()
        stop = _common(segments, members, start)
        spans.append((len(order), len(members), start, stop))
        for member in members:
            own_from[member] = stop
        apart, groups = _split(segments, members, stop)
        order += apart
        waiting += [(group, stop) for group in groups]
    return order, spans, own_from


def _split(segments: Sequence[_I64], members: Sequence[int], at: int) -> tuple[list[int], list[list[int]]]:
    """Returns the members that read segment ``at`` alone or lack it, and the groups of two or more that share it."""
    by_pieces: dict[bytes, list[int]] = {}
    apart: list[int] = []
    for member in members:
        if len(segments[member]) > at:
            by_pieces.setdefault(segments[member][at].tobytes(), []).append(member)
        else:
            apart.append(member)
    groups = []
    for group in by_pieces.values():
        if len(group) > 1:
            groups.append(group)
        else:
            apart += group
    return apart, groups


def _common(segments: Sequence[_I64], members: Sequence[int], start: int) -> int:
    """Returns the end of the segments from ``start`` on that all members share."""
    stop = min(len(segments[member]) for member in members)
    reference = segments[members[0]]
    told = reference[start:stop].tobytes()
    for member in members[1:]:
        if stop <= start:
            return start
        mine = segments[member][start:stop]
        if mine.tobytes() != told:
            differ = (mine != reference[start:stop]).any(axis=1)
            stop = start + int(np.argmax(differ))
            told = reference[start:stop].tobytes()
    return max(start, stop)


def _places(order: Sequence[int], counts: Sequence[int]) -> tuple[list[Merge], _I64, _I64]:
    """Returns the merges, ``base`` and ``stride``: segment ``s`` of request ``i`` is at ``base[i] + s * stride[i]``.

    Requests with equally many segments lie together."""
    by_count: dict[int, list[int]] = {}
    for number, request in enumerate(order):
        by_count.setdefault(counts[request], []).append(number)
    base, stride = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    merges, place = [], 0
    for count, members in by_count.items():
        requests = np.array(members)
        base[requests] = place + np.arange(len(members))
        stride[requests] = len(members)
        merges.append(Merge(place, count, requests))
        place += count * len(members)
    return merges, base, stride
