"""The objects that all parts of a worker share: made once by ``app.py``, or by a test with other parts."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.core.clock import Clock
from pinyon.core.errors import Unavailable
from pinyon.core.served import Served
from pinyon.model import ModelCard
from pinyon.runtime.channel import PLAIN_CHANNELS, Channels
from pinyon.runtime.ledger import Ledger
from pinyon.runtime.telemetry import Telemetry
from pinyon.transfer import Region, TransferEngine
from services.worker.instance.engine_loop import EngineLoop
from services.worker.instance.step_members import StepMembers
from services.worker.kv.cache import KvCache
from services.worker.kv.fetch import Fetcher
from services.worker.kv.storage import Storage
from services.worker.orders.limits import WorkerLimits


@dataclass(eq=False)
class Parts:
    """The shared parts, which live on one event loop, except the engine's thread and the transfer engine's."""

    limits: WorkerLimits
    served: Served
    card: ModelCard
    cache: KvCache
    members: StepMembers
    engine_loop: EngineLoop
    transfer: TransferEngine
    region: Region
    """The pool, readable by peers; the engine's own requests name it as the local side."""
    fetcher: Fetcher
    storage: Storage
    ledger: Ledger
    telemetry: Telemetry
    clock: Clock
    channels: Channels = PLAIN_CHANNELS
    draining: bool = False

    @property
    def refusing(self) -> bool:
        """The instance takes in nothing new: it is draining, or the engine hangs."""
        return self.draining or self.engine_loop.hangs

    def check_serving(self, field: str) -> None:
        """Raises :class:`Unavailable` if nothing is taken in; ``field`` names this instance's part in the request."""
        if self.refusing:
            why = "is draining" if self.draining else "has an engine that hangs"
            raise Unavailable(f"{self.served.instance_id} {why}", field=field)
