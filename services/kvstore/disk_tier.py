"""The disk tier of a store node: objects are saved behind puts, demoted instead of lost, and read back when asked for.

Saving never waits for anybody and nobody waits for it: an object that was put is saved when the disk has time. Room in
memory is made ahead: while less than a share of the pool is free, the coldest objects are *demoted*. They stay readable
until they are on the disk. If puts come faster than the disk writes, objects are evicted unsaved, as
without a disk. A disk that fails or hangs is a smaller cache: what cannot be read is a miss."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.eviction import Traits
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended
from pinyon.store.background import Background
from pinyon.store.disk_log import GROUP_OBJECTS, DiskObject, sectors
from pinyon.store.kv_object import KvObject, SlotState
from pinyon.store.objects import ObjectTable
from services.kvstore.disk_file import DiskFile

GROUP_BYTES = 16 << 20
"""The bytes of objects that are written at once."""
READ_BYTES = 8 << 20
"""The bytes that one thread reads at once."""
READ_OBJECTS = 64
THREADS = 8
HUNG_S = 2.0
"""The seconds after which a read that has not ended makes the disk count as hung: nothing more is read from it."""
FREE_SHARE = 0.05
"""The share of the pool that is kept free."""

T = TypeVar("T")

_log = get_logger("disk")


class DiskTier:
    """The tier below a table, on one event loop: ``start``, then ``close``."""

    def __init__(
        self,
        table: ObjectTable,
        file: DiskFile,
        pool: memoryview,
        changed: Callable[[], None],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """Takes the memory that the table is about, and ``changed``, which is called after each change."""
        self._changed = changed
        self._table, self._file, self._pool, self._clock = table, file, pool, clock
        self.log = file.log
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk")
        self._unsaved: OrderedDict[bytes, KvObject] = OrderedDict()
        """The objects in memory that are not on the disk, in the order in which they were put."""
        self._demoting: deque[KvObject] = deque()
        self._demoting_bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        """Set while there is nothing to save."""
        self._unpinned = asyncio.Event()
        self._loading: dict[bytes, asyncio.Task[None]] = {}
        self._loading_bytes = 0
        self._reads: dict[object, float] = {}
        """The reads under way, and when each began."""
        self._duties = Background()
        self._task: asyncio.Task[None] | None = None
        self.saved_bytes = self.written_bytes = self.read_bytes = self.failures = 0
        """Bytes of objects saved; bytes written, with heads and padding; bytes read; operations that failed."""

    @property
    def unsaved(self) -> int:
        """The number of objects that wait to be saved."""
        return len(self._unsaved)

    def start(self) -> None:
        self._task = asyncio.create_task(self._save(), name="disk-save")

    async def close(self, flush_s: float) -> None:
        """Saves what is left, for so many seconds at most, and closes the file."""
        if self._task is not None and not self._idle.is_set():
            try:
                async with asyncio.timeout(flush_s):
                    await self._idle.wait()
            except TimeoutError:
                _log.warning("%d objects were not saved in time", len(self._unsaved))
        if self._task is not None:
            await ended(self._task)
        await self._duties.close(HUNG_S)
        try:
            async with asyncio.timeout(HUNG_S):
                await self._in_thread(self._file.sync)
        except (OSError, TimeoutError):
            self.failures += 1
        self._threads.shutdown(wait=False, cancel_futures=True)
        if not self._reads:  # a thread that hangs still has the file
            self._file.close()

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # -- saving

    def removed(self) -> None:
        """Takes note that keys were removed, which a restart is to know."""
        if self.log.removals:
            self._idle.clear()
            self._wake.set()

    def stored(self, objects: Sequence[KvObject]) -> None:
        """Takes note of objects that became readable in memory."""
        for each in objects:
            if each.key not in self.log:
                self._unsaved[each.key] = each
        if len(self._unsaved) > 2 * len(self._table) + GROUP_OBJECTS:  # the disk hangs, and most of these are gone
            self._unsaved = OrderedDict((key, each) for key, each in self._unsaved.items() if each.listed)
        self.make_room()
        if self._unsaved or self._demoting:
            self._idle.clear()
            self._wake.set()

    def make_room(self) -> None:
        """Begins to make room, if little is free or becoming free: demotes the coldest objects."""
        table = self._table
        wanted = int(table.capacity_bytes * FREE_SHARE)
        if table.capacity_bytes - table.used_bytes + self._demoting_bytes >= wanted:
            return
        while table.capacity_bytes - table.used_bytes + self._demoting_bytes < 2 * wanted:
            held = table.demote(self._clock())
            if held is None:
                return
            if held.key in self.log:
                table.demoted(held)
                self._changed()
            else:
                self._demoting.append(held)
                self._demoting_bytes += sectors(held.size)
                self._wake.set()

    async def _save(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            demoting, objects = batch
            try:
                if objects or self.log.removals:
                    await self._write(objects)
            except Exception:
                self.failures += 1
                _log.exception("saving objects failed")
            finally:
                for each in demoting:
                    self._demoting_bytes -= sectors(each.size)
                    self._table.demoted(each)
                self._changed()

    def _next_batch(self) -> tuple[list[KvObject], list[KvObject]] | None:
        """Returns the objects to be demoted next, and those to be written for that, filled up with others."""
        demoting: list[KvObject] = []
        objects: dict[bytes, KvObject] = {}
        room = min(GROUP_BYTES, self.log.region_bytes // 2)
        while self._demoting and len(objects) < GROUP_OBJECTS and room > 0:
            each = self._demoting.popleft()
            demoting.append(each)
            if self._wants(each):
                objects[each.key] = each
                room -= sectors(each.size)
        while self._unsaved and len(objects) < GROUP_OBJECTS and room > 0:
            key, each = self._unsaved.popitem(last=False)
            if self._wants(each):
                objects[key] = each
                room -= sectors(each.size)
        return (demoting, list(objects.values())) if demoting or objects or self.log.removals else None

    def _wants(self, each: KvObject) -> bool:
        return each.listed and each.key not in self.log

    async def _write(self, objects: Sequence[KvObject]) -> None:
        """Writes objects that are in memory and not on the disk."""
        table, log = self._table, self.log
        table.hold(objects, self._clock())
        try:
            while log.next_busy(sum(sectors(each.size) for each in objects)):
                self._unpinned.clear()
                await self._unpinned.wait()
            begun = log.begin([DiskObject(o.key, o.size, o.checksums, _owned(o), o.place) for o in objects])
            if begun is None:  # too much for one group, or no region is usable
                alone = [[each] for each in objects] if len(objects) > 1 else [[]]
                for part in alone if objects else ():
                    await self._write(part)
                self.failures += len(objects) == 1
                if not objects:
                    log.forget_removals()
                return
            group, gone = begun
            for key in gone:
                held = table.in_memory(key)
                if held is None:
                    table.note(key, before=True)
                elif log.capacity_bytes >= 2 * table.capacity_bytes:  # else this would go on for ever
                    self._unsaved[key] = held  # it is hot, so its copy stays
            rooms = [self._pool[each.offset : each.offset + sectors(each.size)] for each in objects]
            written = False
            try:
                writing = self._duties.run(self._in_thread(self._file.write, group, rooms), "disk write")
                error = await asyncio.shield(writing)
                written = error is None
            finally:
                log.end(group, written=written)
            if error is not None:
                self.failures += 1
                _log.error("the disk does not take objects: %s", error)
            else:
                self.written_bytes += len(group.head) + sum([len(room) for room in rooms])
                self.saved_bytes += sum([each.size for each in objects])
                for each in objects:
                    if not each.listed:  # removed meanwhile
                        log.remove(each.key)
        finally:
            table.let_go(objects, self._clock())

    # -- reading

    async def load(self, keys: Sequence[bytes], timeout_s: float, *, allow_gaps: bool = False) -> None:
        """Reads those of the leading keys into memory that are only on the disk, as far as there are room and time.

        With ``allow_gaps``, all keys count. Returns after ``timeout_s`` at the latest; what is still read then stays.
        At most half of the memory is filled at once, by all reads together: more would push out what was just read."""
        room = self._table.capacity_bytes // 2 - self._loading_bytes
        wanted: list[DiskObject] = []
        held: list[KvObject] = []
        pending: set[asyncio.Task[None]] = set()
        for key in keys:
            above, below = self._table.in_memory(key), self.log.find(key)
            if above is not None:
                held.append(above)
            elif key in self._loading:
                pending.add(self._loading[key])
            elif below is not None:
                room -= sectors(below.size)
                if room < 0:
                    break
                wanted.append(below)
            elif not allow_gaps:
                break
        if not wanted and not pending:
            return
        now_s = self._clock()
        if any(now_s - began_s > HUNG_S for began_s in self._reads.values()):
            return
        self._table.rescue(held, now_s)
        self._table.hold(held, now_s)  # what is loaded must not push them out
        try:
            for part in _parts(wanted):
                task = self._duties.run(self._load(part), "disk read")
                for each in part:
                    self._loading[each.key] = task
                    self._loading_bytes += sectors(each.size)
                pending.add(task)
            await asyncio.wait(pending, timeout=timeout_s)
        finally:
            self._table.let_go(held, self._clock())

    async def _load(self, part: Sequence[DiskObject]) -> None:
        """Reads objects of one size and kind into memory."""
        table, began_s, token = self._table, self._clock(), object()
        put_id = 0
        bad: set[bytes] = set()
        try:
            keys, places = [each.key for each in part], [each.place for each in part]
            put_id, slots = table.put_start(keys, part[0].size, began_s, HUNG_S, part[0].traits, places, loading=True)
            if not put_id:
                return
            table.close_put(put_id)
            rooms = [
                (each, self._pool[slot.offset : slot.offset + sectors(each.size)])
                for each, slot in zip(part, slots, strict=True)
                if slot.state is SlotState.RESERVED
            ]
            for each, _ in rooms:
                self.log.pin(each)
            self._reads[token] = began_s
            good = await asyncio.shield(self._in_thread(self._file.read_objects, rooms))
            del self._reads[token]
            for (each, _), there, into in zip(rooms, good, table.closing(put_id), strict=True):
                self.log.unpin(each)
                into.checksums = each.checksums
                self.read_bytes += each.size if there else 0
                if not there:
                    bad.add(each.key)
            self._unpinned.set()
        except PinyonError as error:
            _log.info("nothing was read from the disk: %s", error.message)
        finally:
            if put_id:  # if this was cancelled, the thread may still write to the room
                gone = bad.union(each.key for each in part if each.key not in self.log)  # removed meanwhile
                table.end_put(put_id, commit=True, now_s=self._clock(), lost=token in self._reads, without=gone)
            for key in bad:
                self.failures += 1
                if self.log.drop(key):
                    table.note(key, before=True)
            for each in part:
                self._loading.pop(each.key, None)
                self._loading_bytes -= sectors(each.size)
            self._changed()  # perhaps nobody waits any more


def _owned(held: KvObject) -> Traits:
    """Returns the traits of an object with the tenant that put it, whoever read it last."""
    return Traits(held.traits.category, held.tenant)


def _parts(wanted: Sequence[DiskObject]) -> list[list[DiskObject]]:
    """Cuts objects into parts that one thread reads: of one size and kind, in the order of the disk."""
    kinds: dict[Any, list[DiskObject]] = {}
    for each in wanted:
        kinds.setdefault((each.size, each.traits), []).append(each)
    parts = []
    for (size, _), objects in kinds.items():
        step = max(1, min(READ_OBJECTS, READ_BYTES // sectors(size), -(-len(objects) // THREADS)))
        objects.sort(key=lambda each: each.offset)
        parts += [objects[at : at + step] for at in range(0, len(objects), step)]
    return parts
