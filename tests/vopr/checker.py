"""Checks of all that must hold at every moment of a simulation. The first one that fails ends it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

from pinyon.core.block_keys import KEY_BYTES
from pinyon.store.disk_log import sectors
from pinyon.store.metadata_scripts import OK
from pinyon.transfer import Access, Grant, Opcode
from services.kvstore.copier import COPIES_AT_ONCE
from tests.store_integrity import check_table
from tests.vopr.engine import SimEngine
from tests.vopr.loop import Process
from tests.vopr.swarm import content_of

EARLY_S = 0.002
"""Leases are told in whole milliseconds."""
EVICTING_S = 30.0
"""The seconds for which an object may still be evicted after a node was asked to."""


class Checker:
    """The model: the content of an object is a function of its key. Implements the engine's watcher."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.failure = ""
        self.poisoned: set[tuple[str, bytes]] = set()
        """Keys of which a fault has changed the copy of this node."""
        self.flipped: dict[SimEngine, set[int]] = {}
        self._snapshots: dict[Grant, list[tuple[int, bytes]]] = {}
        self._promised: dict[bytes, float] = {}
        """The time until which each reader's key must open its ranges, as its reader was told."""
        self._putting: Counter[bytes] = Counter()
        """The number of puts and copies under way for each key."""
        self._put_until_s: dict[bytes, float] = {}
        self._pins: dict[tuple[Any, bytes], float] = {}
        """The time until which a node keeps an object in memory."""
        self._evicted: dict[tuple[Any, bytes], float] = {}
        """The last time that a node was asked to remove an object."""
        self._removed: dict[tuple[Process, bytes], float] = {}

    def fail(self, what: str) -> None:
        self.failure = self.failure or f"at {self._now():.3f} s: {what}"

    # -- memory and keys, as engines see them

    def granted(self, engine: SimEngine, grant: Grant) -> None:
        ranges = list(zip(grant.spans.starts, grant.spans.ends, strict=True))
        if grant.access is Access.READ:
            view = grant.region.view
            self._snapshots[grant] = [(start, bytes(view[start:end])) for start, end in ranges]
            for open_to in engine.memory._open.values():
                if open_to.given and open_to.access is Access.WRITE and _meet(open_to, ranges):
                    self.fail("a reader's lease covers memory that a writer's key opens")
        elif self._readable_in(engine, ranges):
            self.fail("a writer's key opens a readable object")

    def revoking(self, engine: SimEngine, grant: Grant) -> None:
        snapshot = self._snapshots.pop(grant, None)
        if snapshot is None:
            return
        self._unchanged(engine, grant, snapshot)
        if self._promised.pop(grant.key, 0.0) - EARLY_S > self._now() and not engine.process.node.draining:  # type: ignore[attr-defined]
            self.fail("a lease ended before its time, and its reader had not released it")

    def landing(self, source: SimEngine, engine: SimEngine, offset: int, length: int, *, flipped: bool) -> None:
        found = self._readable_in(engine, [(offset, offset + length)])
        if found:
            self.fail(f"a write hit the readable object {found[0].key.hex()}")
        node = engine.process.node  # type: ignore[attr-defined]
        for key, held in node.table._reserved.items() if self.poisoned or flipped else ():
            hit = held.offset < offset + length and offset < held.offset + held.size
            if hit and (flipped or (source.process.name, key) in self.poisoned):
                self.poisoned.add((engine.process.name, key))

    def reading(self, engine: SimEngine, key: bytes, offset: int, length: int) -> None:
        for grant, snapshot in self._snapshots.items():
            if grant.key == key:
                self._unchanged(engine, grant, snapshot)

    def refused(self, engine: SimEngine, key: bytes, opcode: Opcode) -> None:
        if opcode is Opcode.READ and self._promised.get(key, 0.0) - EARLY_S > self._now():
            self.fail("a reader's key was refused before its lease ended")

    def _unchanged(self, engine: SimEngine, grant: Grant, snapshot: list[tuple[int, bytes]]) -> None:
        for start, before in snapshot:
            now = grant.region.view[start : start + len(before)]
            if now != before:
                known = self.flipped.get(engine, set())
                if any(a != b and start + at not in known for at, (a, b) in enumerate(zip(now, before, strict=True))):
                    self.fail("leased memory has changed")

    @staticmethod
    def _readable_in(engine: SimEngine, ranges: list[tuple[int, int]]) -> list[Any]:
        held = engine.process.node.table._readable.values()  # type: ignore[attr-defined]
        return [o for o in held for start, end in ranges if o.offset < end and start < o.offset + o.size]

    # -- calls, as servers see them

    def tap(self, process: Any, method: str, request: Any, reply: Any) -> None:
        """Takes note of a node's calls; ``reply`` is None before one is handled."""
        keys = process.node.readers._grants
        if method == "Acquire" and reply is not None and reply.lease_id in keys:
            self._promised[keys[reply.lease_id].key] = self._now() + reply.lease_ms / 1000
        elif method == "Renew" and reply is not None and reply.lease_ms:
            if request.lease_id not in keys:
                self.fail("a lease that is over was renewed")
            else:
                self._promised[keys[request.lease_id].key] = self._now() + reply.lease_ms / 1000
        elif method == "Release" and reply is None and request.lease_id in keys:
            self._promised.pop(keys[request.lease_id].key, None)
        elif method == "PutStart" and reply is not None and reply.put_id:
            self._within_quota(process.node.table, request.request_class.tenant)
        elif method in ("Pin", "Unpin", "Remove", "Evict"):
            self._tap_pins(process, method, request, reply)

    def _within_quota(self, table: Any, tenant: str) -> None:
        """Checks that a tenant who was given room may hold what it holds now."""
        limit, account = table.quotas.limit(tenant), table.quotas.accounts.get(tenant)
        if limit is not None and (account is None or account.held > limit):
            self.fail(f"tenant {tenant!r} got room beyond its quota")

    def _tap_pins(self, process: Any, method: str, request: Any, reply: Any) -> None:
        now_s = self._now()
        if method == "Pin":
            end_s = now_s + request.duration_ms / 1000 if request.duration_ms else inf
            for key in _unpacked(reply.pinned) if reply is not None else ():
                if self._evicted.get((process, key), -inf) < now_s - EVICTING_S:
                    self._pins[process, key] = end_s
            return
        for key in _unpacked(request.keys):
            self._pins.pop((process, key), None)
            if method != "Unpin":
                self._evicted[process, key] = now_s

    def changed(self, process: Any, boot: bytes | None, reply: Any) -> None:
        """Checks a change of a node's entries in Redis, which were those of the life ``boot``."""
        if isinstance(reply, list) and reply[0] == OK and boot not in (None, process.node.boot_id.encode()):
            self.fail(f"a process that has lost the name {process.name} changed the entries")

    # -- removed keys stay away

    def put_begins(self, keys: list[bytes]) -> None:
        self._putting.update(set(keys))
        self._removed = {each: when for each, when in self._removed.items() if each[1] not in self._putting}

    def put_ended(self, keys: list[bytes], after_s: float) -> None:
        """Takes note that a put of these keys, or a copy, is over in so many seconds at the latest, at every node."""
        end_s = self._now() + after_s
        self._putting -= Counter(set(keys))
        self._put_until_s |= {key: max(end_s, self._put_until_s.get(key, 0.0)) for key in keys}

    def removed(self, process: Process, keys: list[bytes], asked_s: float) -> None:
        for key in keys:
            if key not in self._putting and asked_s >= self._put_until_s.get(key, 0.0):
                self._removed[process, key] = asked_s

    # -- a look at a node

    def inspect(self, process: Any) -> None:
        """Looks at all books of a node, and at all bytes of its memory."""
        node = getattr(process, "node", None)
        if node is None or process.dead or self.failure:
            return
        try:
            check_table(
                node.table, copying=process.copier is not None and process.copier._turns._value < COPIES_AT_ONCE
            )
        except AssertionError as error:
            self.fail(f"the table of {process.name}: {error or 'its books do not balance'}")
        view = node._region.view
        for held in node.table._readable.values():
            now = view[held.offset : held.offset + held.size]
            if now != content_of(held.key, held.size) and (process.name, held.key) not in self.poisoned:
                self.fail(f"{process.name} holds other bytes for {held.key.hex()} than were put")
        for (pinned_at, key), end_s in self._pins.items():
            kept = key in node.table.pinned or (process.name, key) in self.poisoned
            if pinned_at is process and end_s > self._now() and not kept:
                self.fail(f"{process.name} has not kept {key.hex()}, which is pinned")
        for gone_from, key in self._removed:
            if gone_from is process and key in node.table:
                self.fail(f"{process.name} has {key.hex()} again, which was removed")

    def inspect_disk(self, process: Any, disk: Any) -> None:
        """Looks at all bytes that the log says are on the disk."""
        node = getattr(process, "node", None)
        if node is None or node.tier is None or process.dead or self.failure:
            return
        for key in node.tier.log:
            found = node.tier.log.find(key)
            there = disk.image[found.offset : found.offset + found.size]
            if there == content_of(key, found.size) or (process.name, key) in self.poisoned:
                continue
            if disk.sound(found.offset, sectors(found.size)):
                self.fail(f"the disk of {process.name} has other bytes for {key.hex()} than were put")


def _unpacked(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def _meet(grant: Grant, ranges: list[tuple[int, int]]) -> bool:
    own = list(zip(grant.spans.starts, grant.spans.ends, strict=True))
    return any(a < end and start < b for a, b in own for start, end in ranges)


class LogWatch(logging.Handler):
    """Takes an exception that the product logs for a defect, and shows all lines if asked to."""

    def __init__(self, checker: Checker, show: Callable[[str], None] | None) -> None:
        super().__init__(logging.DEBUG if show else logging.ERROR)
        self._checker, self._show = checker, show

    def emit(self, record: logging.LogRecord) -> None:
        if self._show is not None:
            self._show(f"{record.name}: {record.getMessage()}")
        if record.exc_info is not None and record.exc_info[0] is not None:
            text = logging.Formatter().formatException(record.exc_info).splitlines()
            self._checker.fail(f"{record.getMessage()}: {' | '.join(text[-4:])}")
