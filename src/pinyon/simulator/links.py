"""Links between machines: what moves at the same time shares the NICs at both ends.

Every machine sends and receives at most so many bytes a second. Flows get max-min fair shares (progressive filling:
all grow alike until an end of theirs is full), which is what many long flows of a fair transport come to, and shares
are worked out again whenever a flow begins or ends.
"""

from __future__ import annotations

from collections.abc import Callable

from pinyon.simulator.virtual_time import VirtualTime

__all__ = ["Links"]

ROUNDING = 1e-6
"""Of a byte: less is nothing."""


class _Flow:
    __slots__ = ("done", "ends", "left", "rate")

    def __init__(self, ends: tuple[_End, _End], size_bytes: float, done: Callable[[], None]) -> None:
        self.ends = ends
        self.left = size_bytes
        self.rate = 0.0
        self.done = done


class _End:
    """One direction of one machine's NICs."""

    __slots__ = ("bytes_s", "flows")

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.flows: dict[_Flow, None] = {}


class Links:
    """Between machines by name."""

    def __init__(self, time: VirtualTime, bytes_s: float) -> None:
        self._time = time
        self._bytes_s = bytes_s
        self._out: dict[str, _End] = {}
        self._in: dict[str, _End] = {}
        self._flows: dict[_Flow, None] = {}
        self._counted_s = 0.0
        self._turn = 0
        self.sent_bytes = 0.0

    @property
    def flows(self) -> int:
        """Under way."""
        return len(self._flows)

    def send(self, source: str, target: str, size_bytes: float, done: Callable[[], None]) -> None:
        """``done`` is called when all of it has arrived; never from here."""
        self.sent_bytes += size_bytes
        if size_bytes <= 0:
            self._time.after(0.0, done)
            return
        self._count()
        ends = self._end(self._out, source), self._end(self._in, target)
        flow = _Flow(ends, size_bytes, done)
        self._flows[flow] = None
        for end in ends:
            end.flows[flow] = None
        self._share()

    def _end(self, ends: dict[str, _End], name: str) -> _End:
        end = ends.get(name)
        if end is None:
            end = ends[name] = _End(self._bytes_s)
        return end

    def _count(self) -> None:
        """What has moved until now."""
        seconds = self._time.now_s - self._counted_s
        self._counted_s = self._time.now_s
        if seconds > 0:
            for flow in self._flows:
                flow.left -= flow.rate * seconds

    def _share(self) -> None:
        """Work out the rates, and when the next flow ends."""
        self._turn += 1
        if not self._flows:
            return
        room = {end: end.bytes_s for flow in self._flows for end in flow.ends}
        open_flows = {end: dict(end.flows) for end in room}
        left = dict(self._flows)
        while left:
            full = min(room, key=lambda end: room[end] / len(open_flows[end]))
            rate = room[full] / len(open_flows[full])
            for flow in list(open_flows[full]):
                flow.rate = rate
                del left[flow]
                for end in flow.ends:
                    room[end] -= rate
                    del open_flows[end][flow]
            for end in [end for end in room if not open_flows[end]]:
                del room[end], open_flows[end]
        turn = self._turn
        self._time.after(max(0.0, min(flow.left / flow.rate for flow in self._flows)), lambda: self._ended(turn))

    def _ended(self, turn: int) -> None:
        if turn != self._turn:
            return  # shares have changed since
        self._count()
        soonest = min(flow.left / flow.rate for flow in self._flows)
        over = [flow for flow in self._flows if flow.left <= ROUNDING or flow.left / flow.rate <= soonest]
        for flow in over:
            del self._flows[flow]
            for end in flow.ends:
                del end.flows[flow]
        self._share()
        for flow in over:
            flow.done()
