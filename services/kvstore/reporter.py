"""What a store node tells the conductor."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from services.kvstore.node import StoreNode

__all__ = ["StoreReport", "instance_info"]


def instance_info(node: StoreNode, address: str, region: str) -> conductor_pb2.InstanceInfo:
    """How the node registers. Its capacity in blocks depends on their size, so it is left open."""
    return conductor_pb2.InstanceInfo(
        instance_id=node.node_id,
        boot_id=node.boot_id,
        role=common_pb2.ROLE_STORE,
        address=address,
        region=region,
    )


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
        return conductor_pb2.InstanceLoad(
            used_blocks=table.leased_objects + table.reserved_objects,
            cached_blocks=table.idle_objects,
            draining=self._node.draining,
        )

    def drain_measurements(self) -> Sequence[conductor_pb2.PrefillMeasurement]:
        return ()

    def drain_begun(self) -> Sequence[str]:
        return ()

    def drain_ended(self) -> tuple[Sequence[str], Sequence[str]]:
        return (), ()
