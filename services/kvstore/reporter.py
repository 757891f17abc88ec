"""What a store node tells the conductor."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.request import Role
from pinyon.messages.instance import info_to_proto, load_to_proto
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from services.kvstore.node import StoreNode


def instance_info(node: StoreNode, address: str) -> conductor_pb2.InstanceInfo:
    """How the node registers. Its capacity in blocks depends on their size, so it is left open."""
    return info_to_proto(InstanceInfo(node.node_id, node.boot_id, Role.STORE, address))


class StoreReport:
    """See :class:`pinyon.runtime.report_session.ReportSource`."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._changes = node.table.listen()

    def snapshot_keys(self) -> Sequence[bytes]:
        return self._node.table.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._changes.drain()

    def load(self) -> conductor_pb2.InstanceLoad:
        table = self._node.table
        load = InstanceLoad(
            used_blocks=table.leased_objects + table.reserved_objects,
            cached_blocks=table.idle_objects,
            draining=self._node.draining,
        )
        return load_to_proto(load)

    def news(self) -> conductor_pb2.ReportSessionRequest:
        return conductor_pb2.ReportSessionRequest(load=self.load())

    def decoding(self) -> Sequence[str]:
        return ()
