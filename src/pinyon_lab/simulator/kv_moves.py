"""The transfers of KV between the machines of a simulated cluster: for reuse, and for decoding on another instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon.core.block_keys import BlockKey
from pinyon.placement.policy import Fetch
from pinyon_lab.simulator.attempt import Attempt
from pinyon_lab.simulator.engine import SimEngine
from pinyon_lab.simulator.host_store import HostStore
from pinyon_lab.simulator.links import Links
from pinyon_lab.simulator.members import Members
from pinyon_lab.simulator.world import World


class KvMoves:
    """The transfers between live ``members``."""

    def __init__(self, world: World, members: Members) -> None:
        self.links = Links(world.time, world.machine.nic_bytes_s, members.nodes)
        self._time, self._fleet, self._settings = world.time, world.fleet, world.settings
        self._machine, self._faults = world.machine, world.faults
        self._engines, self._stores, self._nodes = members.engines, members.stores, members.nodes
        self.fetches = self.fetched_bytes = 0
        self.fetch_s = 0.0
        """The sum of the times of all fetches, overlapping or not."""

    def fetch(self, attempt: Attempt, reader: SimEngine, then: Callable[[], None]) -> None:
        """Reads the planned blocks that are still there, then calls ``then`` unless the attempt is over."""
        self._next(attempt, reader, list(attempt.decision.fetches), then)

    def _next(self, attempt: Attempt, reader: SimEngine, spans: list[Fetch], then: Callable[[], None]) -> None:
        room = attempt.job_room
        assert room is not None
        while spans:
            span = spans.pop(0)
            first, end = room.held, span.first_block + span.block_count
            keys = attempt.request.keys[first : min(end, attempt.reusable(self._settings.block_tokens))]
            if span.first_block > first:
                break  # the blocks before it did not arrive
            if keys and self._read(attempt, reader, span, keys, lambda: self._next(attempt, reader, spans, then)):
                return
        then()

    def _read(
        self, attempt: Attempt, reader: SimEngine, span: Fetch, keys: Sequence[BlockKey], then: Callable[[], None]
    ) -> bool:
        """Reads blocks from one source; returns whether there is anything to read."""
        name = span.source.info.instance_id
        store, source = self._stores.get(name), self._engines.get(name)
        if store is not None:
            lease, found = 0, store.leading(keys)
        elif source is not None and source is not reader:
            lease, found = source.lease(keys, self._settings.lease_s)
        else:
            return False
        if not found:
            return False
        began_s = self._time.now_s
        size = found * self._settings.block_tokens * self._machine.kv_token_bytes
        forgets = self._faults is not None and self._faults.reader_forgets()

        def arrived() -> None:
            if source is not None and lease and not forgets:
                source.end_lease(lease)
            if attempt.over or not reader.alive:
                return
            if self._stores.get(name) is store and (source is None or source.alive):
                self.fetches += 1
                self.fetched_bytes += size
                self.fetch_s += self._time.now_s - began_s
                now_s = self._time.now_s
                self._fleet.learn_transfers(reader.state, [(size, now_s - began_s, span.source)], now_s)
                self._arrived(attempt, reader, keys[:found])
            then()

        if store is None:
            self.links.send(name, reader.name, size, arrived)
        else:
            self._read_store(store, reader, size, arrived)
        return True

    def _read_store(self, store: HostStore, reader: SimEngine, size: int, arrived: Callable[[], None]) -> None:
        nodes = self._nodes[store.host]

        def read() -> None:
            if store.host == reader.name:
                copy_s = size / (nodes * self._machine.dram_bytes_s)
                store.copied_until_s = max(store.copied_until_s, self._time.now_s) + copy_s
                self._time.at(store.copied_until_s, arrived)
            else:
                self.links.send(store.host, reader.name, size, arrived)

        if not self._settings.pool_on_ssd:
            read()
            return
        read_s = size / (nodes * self._machine.ssd_bytes_s)
        store.read_until_s = max(store.read_until_s, self._time.now_s) + read_s
        self._time.at(store.read_until_s, read)

    def _arrived(self, attempt: Attempt, reader: SimEngine, keys: Sequence[BlockKey]) -> None:
        room = attempt.job_room
        assert room is not None
        first = room.held
        room.held = first + len(keys)
        if attempt.request.attempts <= 1 and not attempt.request.generated:
            attempt.request.fetched_tokens += len(keys) * self._settings.block_tokens
        reader.publish(attempt, room, first, room.held)
        reader.prompts.published(attempt.job, keys)
        reader.pump()

    def push(self, attempt: Attempt, source: SimEngine, target: SimEngine, end: int, then: Callable[[], None]) -> None:
        """Sends the KV of the prompt's tokens up to ``end`` that is not under way yet. KV is sent while the chunk is
        being computed, as each layer's KV leaves as soon as it exists (§3.1)."""
        size = (end - attempt.pushed) * self._machine.kv_token_bytes
        if size > 0:
            attempt.pushed = end
            attempt.pushing += 1
            self.links.send(source.name, target.name, size, then)
