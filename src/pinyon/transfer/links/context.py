"""The values that all parts of one engine share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pinyon.core.clock import Clock
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.stats import Meter

if TYPE_CHECKING:
    from pinyon.transfer.links.tls import TlsContexts


@dataclass(frozen=True, slots=True)
class EngineContext:
    """One process life: how it proves itself, its memory, its bounds and its counters."""

    boot_id: bytes
    memory: MemoryTable
    limits: TransferLimits
    secret: bytes | None = field(default=None, repr=False)
    """The cluster secret: both sides of every link prove that they know it."""
    tls: TlsContexts | None = None
    """TLS for tcp links, if they are encrypted; either the whole cluster uses it or no process does."""
    meter: Meter = field(default_factory=Meter)
    clock: Clock = time.monotonic
    """Monotonic seconds, by which deadlines, pauses and measured rates go."""
