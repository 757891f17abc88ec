"""Frames of a WRITE that arrive late, or a second time: after the transfer that sent them has ended."""

from __future__ import annotations

from typing import Any

from pinyon.transfer import Grant, Opcode, TransferRequest
from pinyon.transfer.types.segment import Range

FROZEN_S = 0.1
"""The pause, in seconds, between two looks at a frozen process: its frames lie in the kernel's buffers."""


class Move:
    """A transfer under way, or a late frame: the holder of pins at its peer."""

    def __init__(self, engine: Any, remote: Any, pinned: set[Grant]) -> None:
        self.engine, self.remote, self.pinned = engine, remote, pinned
        self.aborted = False
        remote.moves[self] = None

    def abort(self) -> None:
        self.aborted = True
        self.end()

    def end(self) -> None:
        if self in self.remote.moves:
            del self.remote.moves[self]
            self.remote.unpin(self.pinned, self)


def double(engine: Any, remote: Any, request: TransferRequest, data: bytes) -> None:
    """Has a frame arrive once more, later: what its head asks for is checked first, then its bytes come."""
    random = engine.wire.random
    engine.wire.network.later(random.uniform(0, 0.01), _head, engine, remote, request, data, random.uniform(0, 0.3))


def _head(engine: Any, remote: Any, request: TransferRequest, data: bytes, body_s: float) -> None:
    if remote.process.dead or remote.closed:
        return
    if remote.process.frozen:
        engine.wire.network.later(FROZEN_S, _head, engine, remote, request, data, body_s)
        return
    move = Move(engine, remote, set())
    wanted = [Range(request.remote_region, request.remote_offset, request.length)]
    _, refusals, pinned = remote.memory.admit(Opcode.WRITE, wanted, move, move.abort)
    move.pinned |= pinned
    if refusals is None:
        engine.wire.network.later(body_s, _body, move, request, data)
    else:
        move.end()


def _body(move: Move, request: TransferRequest, data: bytes) -> None:
    remote, wire = move.remote, move.engine.wire
    if move not in remote.moves or remote.process.dead:
        return
    if remote.process.frozen:
        wire.network.later(FROZEN_S, _body, move, request, data)
        return
    wire.watcher.landing(move.engine, remote, request.remote_offset, request.length, flipped=False)
    there = remote.view_of_grant(request.remote_region)
    there[request.remote_offset : request.remote_offset + request.length] = data
    move.end()
