"""The load balancer of one region: a queue, and both layers of routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

from pinyon.routing.interface import PushingRule, TargetPolicy
from pinyon.routing.layer import Layer
from pinyon.routing.plain import PlainPolicy
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES, UNLIMITED
from pinyon.routing.queue import RequestQueue
from pinyon.routing.target import Report, Routed, Target, least_full
from pinyon.routing.two_layers import RoutedRequest, TwoLayers, Where
from pinyon_lab.simulator.regions.calls import ClientCall, Hop
from pinyon_lab.simulator.regions.instances import Instances
from pinyon_lab.simulator.regions.programs import block_keys
from pinyon_lab.simulator.regions.settings import GLOBAL_VIEW, RoutingSystem
from pinyon_lab.simulator.virtual_time import VirtualTime


class GlobalView(PlainPolicy):
    """A policy that takes an instance that holds the longest prefix of a prompt now; of several, the least busy."""

    name: ClassVar[str] = "global_view"

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        keys = block_keys(request.keys)
        held = [self._instances.held(target.name, keys) for target in available]
        most = max(held)
        return least_full([target for target, blocks in zip(available, held, strict=True) if blocks == most])


ENDLESS = 1 << 30
"""The number of slots. Only the pushing rule limits what is pushed on; clients of a closed loop limit the queue."""

ELSEWHERE = "elsewhere"
"""The sender of a call that may not be forwarded again; no region's law matters in the simulator."""


class _DoorDemand(NamedTuple):
    """The calls that may go to the same places: those from another region stay here, and none goes where it failed."""

    forwarded: bool
    exclude: tuple[str, ...]


class Door:
    """A load balancer that serves first come, first served (§4.1). A call that cannot go on does not block others that
    wait for something else. Calls to an instance go to ``push``, calls to another region to ``forward``, and those that
    have waited for ``wait_s`` to ``give_up``."""

    def __init__(
        self,
        region: str,
        system: RoutingSystem,
        time: VirtualTime,
        global_view: TargetPolicy,
        push: Callable[[Door, ClientCall], None],
        forward: Callable[[Door, ClientCall], None],
        give_up: Callable[[ClientCall], None],
        wait_s: float,
    ) -> None:
        self.region = region
        self._system, self._time, self._global_view = system, time, global_view
        self._push, self._forward, self._give_up, self._wait_s = push, forward, give_up, wait_s
        self._begin()

    def _begin(self) -> None:
        """Begins without any call, and without any knowledge of instances and of others."""
        self.layers = TwoLayers(self.region, Layer(*self._rules()), Layer(*self._rules()))
        self._queue = RequestQueue(ENDLESS, ENDLESS)
        self._waiting: dict[int, tuple[ClientCall, float]] = {}
        """The calls that wait, and since when."""
        self._demands: list[_DoorDemand] = []
        self._numbers: dict[_DoorDemand, int] = {}
        self._received: dict[str, int] = {}
        """The number of calls from each other region since the load balancer began."""

    def _rules(self) -> tuple[PushingRule, TargetPolicy]:
        system = self._system
        own = system.policy == GLOBAL_VIEW
        return PUSHING_RULES.make(system.pushing), self._global_view if own else ROUTING_POLICIES.make(system.policy)

    @property
    def queued(self) -> int:
        return self._queue.queued

    def arrive(self, call: ClientCall, sender: str, *, again: bool = False) -> None:
        """Takes a call from ``sender``, another region or "" for a client. ``again``: it is back, in its old place."""
        if sender and not again:
            self._received[sender] = self._received.get(sender, 0) + 1
        now_s, number = self._time.now_s, call.number
        demand = self._demand(bool(sender), call.exclude)
        self._queue.reserve(number, "", now_s)
        tokens = call.request.tokens + call.request.max_tokens
        came_s = call.sent_s if again else now_s
        if self._queue.enter(number, tokens, came_s, demand=demand, open=self._open(demand)):
            self._go(call, demand)
        else:
            self._waiting[number] = call, now_s
            self._time.after(self._wait_s, partial(self._expire, call, now_s))

    def _demand(self, forwarded: bool, exclude: tuple[str, ...]) -> int:
        demand = _DoorDemand(forwarded or not self._system.forwards, exclude)
        number = self._numbers.setdefault(demand, len(self._demands))
        if number == len(self._demands):
            self._demands.append(demand)
        return number

    def _open(self, number: int) -> bool:
        """Returns whether there is room now for calls of this demand."""
        demand, now_s = self._demands[number], self._time.now_s
        if self.layers.local.available(now_s, exclude=demand.exclude):
            return True
        return not demand.forwarded and bool(self.layers.remote.available(now_s, exclude=demand.exclude))

    def _expire(self, call: ClientCall, since_s: float) -> None:
        if self._waiting.get(call.number) == (call, since_s):  # it may have gone on and come back
            self.forget(call)
            self._give_up(call)

    def forget(self, call: ClientCall) -> None:
        """Removes a call from the queue if it waits there."""
        if self._waiting.pop(call.number, None) is not None:
            self._queue.cancel(call.number, self._time.now_s)

    def pump(self) -> None:
        """Sends on every call that can go on."""
        queue = self._queue
        while queue.queued:
            closed = [number for number in queue.waiting_demands if not self._open(number)]
            number = queue.next(self._time.now_s, closed)
            if number is None:
                return
            call, _ = self._waiting.pop(number)
            self._go(call, self._demand(call.forwarded_to(self.region), call.exclude))

    def _go(self, call: ClientCall, number: int) -> None:
        """Sends a call on, for which there is room."""
        demand, now_s = self._demands[number], self._time.now_s
        self._queue.leave(now_s, self._queue.waiting_demands)
        choice = self.layers.choose(
            RoutedRequest(call.routed, sender=ELSEWHERE if demand.forwarded else "", exclude=demand.exclude), now_s
        )
        if choice.where is Where.LOCAL:
            layer, carry = self.layers.local, self._push
        else:
            assert choice.where is Where.REMOTE, f"nobody has room, though {call.number} was let go on"
            layer, carry = self.layers.remote, self._forward
        call.hops.append(Hop(self.region, choice.target, layer.sent(call.routed, choice.target)))
        carry(self, call)

    def report(self, sender: str, peers: int) -> Report:
        """Returns the answer to a probe by another region's load balancer. The room here is shared among ``peers``."""
        local, now_s = self.layers.local, self._time.now_s
        spare = local.spare(now_s)
        room = UNLIMITED if spare >= UNLIMITED else min(spare, max(1, spare // max(1, peers)))
        return Report(self.queued, room=room, received=self._received.get(sender, 0), available=local.with_room(now_s))
