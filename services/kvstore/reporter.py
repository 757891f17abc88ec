"""The reports of a store node to the conductor."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.core.request import Role
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from services.kvstore.node import StoreNode


class StoreReport:
    """The :class:`pinyon.runtime.report_session.ReportSource` of a store node."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._changes = node.table.listen()

    def info(self, address: str) -> InstanceInfo:
        """Returns how the node registers. Its capacity in blocks depends on their size, so it is left open."""
        return InstanceInfo(self._node.node_id, self._node.boot_id, Role.STORE, address)

    def snapshot_keys(self) -> Sequence[bytes]:
        return self._node.table.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._changes.drain()

    def load(self) -> InstanceLoad:
        table = self._node.table
        return InstanceLoad(
            used_blocks=table.leased_objects + table.reserved_objects,
            cached_blocks=table.idle_objects,
            draining=self._node.draining,
        )

    def news(self) -> None:
        """Reports nothing, because a store node computes nothing."""

    def decoding(self) -> Sequence[str]:
        return ()
