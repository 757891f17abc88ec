"""Links between machines: transfers at the same time share the NICs at both ends.

Every machine sends and receives at most so many bytes a second. Flows get max-min fair shares by progressive filling:
all grow alike until one of their ends is full. Many long flows of a fair transport get the same shares. Whenever a flow
begins or ends, shares are recomputed for the flows that share an end with it, directly or through others. All other
shares stay the same."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from pinyon_lab.simulator.virtual_time import VirtualTime

ROUNDING = 1e-6
"""The number of bytes that counts as nothing."""
STALE_MAX = 64
"""The number of outdated times above which they are removed; each flow adds some to it."""


@dataclass(eq=False, slots=True)
class _Flow:
    ends: tuple[_End, _End]
    left: float
    done: Callable[[], None]
    counted_s: float
    """The time at which ``left`` was last updated."""
    rate: float = 0.0
    end_s: float = 0.0


@dataclass(eq=False, slots=True)
class _End:
    """The NICs of one machine in one direction."""

    bytes_s: float
    flows: dict[_Flow, None] = field(default_factory=dict)


class Links:
    """The links between machines by name; a machine in ``nodes`` has the NICs of that many nodes."""

    def __init__(self, time: VirtualTime, bytes_s: float, nodes: Mapping[str, int] = {}) -> None:
        self._time = time
        self._bytes_s, self._nodes = bytes_s, nodes
        self._out: dict[str, _End] = {}
        self._in: dict[str, _End] = {}
        self._flows: dict[_Flow, None] = {}
        self._soonest: list[tuple[float, int, _Flow]] = []
        """A heap of the times when flows end, including outdated times."""
        self._order = count()
        self._looks_s = float("inf")
        """The time for which the next check is scheduled."""
        self.sent_bytes = 0.0

    def send(self, source: str, target: str, size_bytes: float, done: Callable[[], None]) -> None:
        """Sends bytes; calls ``done`` when all have arrived, but never from within this call."""
        self.sent_bytes += size_bytes
        if size_bytes <= 0:
            self._time.after(0.0, done)
            return
        ends = self._end(self._out, source), self._end(self._in, target)
        flow = _Flow(ends, size_bytes, done, self._time.now_s)
        self._flows[flow] = None
        for end in ends:
            end.flows[flow] = None
        self._share(ends)

    def _end(self, ends: dict[str, _End], name: str) -> _End:
        end = ends.get(name)
        if end is None:
            end = ends[name] = _End(self._bytes_s * self._nodes.get(name, 1))
        return end

    def _share(self, changed: Iterable[_End]) -> None:
        """Recomputes the rates and end times of all flows that depend on these ends."""
        room = {end: end.bytes_s for end in changed if end.flows}
        flows: dict[_Flow, None] = {}
        reached = list(room)
        while reached:
            for flow in reached.pop().flows:
                if flow not in flows:
                    flows[flow] = None
                    for end in flow.ends:
                        if end not in room:
                            room[end] = end.bytes_s
                            reached.append(end)
        now_s = self._time.now_s
        for flow in flows:
            flow.left -= flow.rate * (now_s - flow.counted_s)
            flow.counted_s = now_s
        self._fill(room)
        for flow in flows:
            flow.end_s = now_s + (flow.left / flow.rate if flow.left > ROUNDING else 0.0)
            heapq.heappush(self._soonest, (flow.end_s, next(self._order), flow))
        self._look()

    @staticmethod
    def _fill(room: dict[_End, float]) -> None:
        """Sets rates by progressive filling: the end with the least bandwidth per flow is full first."""
        open_flows = {end: dict(end.flows) for end in room}
        while room:
            full = min(room, key=lambda end: room[end] / len(open_flows[end]))
            rate = room[full] / len(open_flows[full])
            touched: dict[_End, None] = {}
            for flow in list(open_flows[full]):
                flow.rate = rate
                for end in flow.ends:
                    room[end] -= rate
                    del open_flows[end][flow]
                    touched[end] = None
            for end in touched:
                if not open_flows[end]:
                    del room[end], open_flows[end]

    def _look(self) -> None:
        """Schedules a check at the time when the next flow ends."""
        soonest, flows = self._soonest, self._flows
        if len(soonest) > STALE_MAX + 4 * len(flows):
            soonest[:] = [each for each in soonest if each[2] in flows and each[2].end_s == each[0]]
            heapq.heapify(soonest)
        while soonest and (soonest[0][2] not in flows or soonest[0][2].end_s != soonest[0][0]):
            heapq.heappop(soonest)
        if soonest and soonest[0][0] < self._looks_s:
            self._looks_s = when_s = soonest[0][0]
            self._time.at(when_s, lambda: self._ended(when_s))

    def _ended(self, when_s: float) -> None:
        if when_s != self._looks_s:
            return  # another flow was to end sooner, and its check came first
        self._looks_s = float("inf")
        soonest, over = self._soonest, []
        changed: dict[_End, None] = {}
        while soonest and soonest[0][0] <= when_s:
            end_s, _, flow = heapq.heappop(soonest)
            if flow in self._flows and flow.end_s == end_s:
                over.append(flow)
                del self._flows[flow]
                for end in flow.ends:
                    del end.flows[flow]
                    changed[end] = None
        self._share(changed)
        for flow in over:
            flow.done()
