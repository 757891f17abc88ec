"""Who may call a store node, where connections have certificates."""

from __future__ import annotations

from pinyon.runtime.callers import Callers
from pinyon.runtime.identity import ADMIN, LB, WORKER

__all__ = ["BLOCK_READ_CALLERS", "KVSTORE_CALLERS"]

KVSTORE_CALLERS: Callers = {
    "PutStart": frozenset((WORKER,)),
    "PutEnd": frozenset((WORKER,)),
    "Exists": frozenset((WORKER,)),
    "Remove": frozenset((WORKER, ADMIN)),
    "GetNodeStatus": frozenset((LB, WORKER, ADMIN)),
}
BLOCK_READ_CALLERS: Callers = {
    "Acquire": frozenset((WORKER,)),
    "Release": frozenset((WORKER,)),
}
