"""Lists of a store node's objects: in an order, by prompt, and one page at a time. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from math import inf
from struct import Struct

from pinyon.core.errors import InvalidArgument
from pinyon.store.disk_log import DiskObject
from pinyon.store.kv_object import KvObject

_TOKEN = Struct(">d16s")


def with_disk(memory: Sequence[KvObject], disk: Iterable[DiskObject]) -> list[KvObject]:
    """Returns the objects in memory, and one for each that is only on the disk, last used at -inf."""
    above = {each.key for each in memory}
    below = [KvObject(o.key, 0, o.size, traits=o.traits, used_s=-inf) for o in disk if o.key not in above]
    return [*memory, *below]


def hottest_first(memory: Sequence[KvObject], disk: Iterable[DiskObject]) -> list[KvObject]:
    """Returns the objects with the last used first, in the order of their prompt; those only on the disk come last."""
    ranked = [(-each.used_s, each.place, number, each) for number, each in enumerate(with_disk(memory, disk))]
    return [each for *_, each in sorted(ranked)]  # figures may change meanwhile: they are read once


def anchors(keys: Sequence[bytes], held_of: Callable[[bytes], KvObject | None]) -> list[bytes]:
    """Returns for each key the first one of the blocks that were put before it for the same prompt, as far as held.

    Places fall along the way, so that each way ends even if a put named wrong predecessors."""
    known: dict[bytes, bytes] = {}
    for key in keys:
        way, at = [], key
        while at not in known:
            way.append(at)
            held = held_of(at)
            before = held_of(held.after) if held is not None and held.after is not None else None
            if held is None or before is None or before.place >= held.place:
                known[at] = at
            else:
                at = before.key
        known |= dict.fromkeys(way, known[at])
    return [known[key] for key in keys]


def page_of(
    objects: Iterable[KvObject], limit: int, token: bytes = b"", *, largest: bool = False
) -> tuple[list[KvObject], bytes]:
    """Returns the ``limit`` coldest (or largest) objects behind the page that gave this token, in order.

    Also returns the token for the next page, empty if there is none. Raises :class:`InvalidArgument` for a token that
    no page gave."""

    def rank(each: KvObject) -> tuple[float, bytes]:
        return (-each.size if largest else each.used_s), each.key

    ranked = [(*rank(each), each) for each in objects]  # figures may change meanwhile: they are read once
    if token:
        if len(token) != _TOKEN.size:
            raise InvalidArgument("no page gave this token", field="page_token")
        after = _TOKEN.unpack(token)
        ranked = [each for each in ranked if each[:2] > after]
    found = heapq.nsmallest(limit + 1, ranked, key=lambda each: each[:2])
    page = found[:limit]
    return [each for _, _, each in page], _TOKEN.pack(*page[-1][:2]) if len(found) > limit else b""
