"""The last known instances: what the conductor listed, and what this load balancer has in flight on them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.block_keys import BlockKey, namespace
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.messages.layout import layout_from_proto
from pinyon.messages.role import role_from_proto
from pinyon.routing.policy import Candidate, RoutingPolicy, serving_groups

__all__ = ["InstanceView", "ModelView"]

TENANTS_MAX = 4096
FIRST_PAUSE_S = 2.5
"""Before an instance that failed a request is tried again although nothing new was heard of it."""
MAX_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelView:
    """What the instances of one model have in common. ``max_context`` is in tokens, 0 when none named it."""

    fingerprint: str
    layout: KvLayout
    max_context: int


class InstanceView:
    """Kept while the conductor is away: serving goes on with what was known last."""

    def __init__(self, routing: RoutingPolicy) -> None:
        self._routing = routing
        self._failures = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)
        self._heard: dict[str, tuple[str, str, bool]] = {}
        """Boot id, address and whether it took requests, as listed last."""
        self._candidates: dict[str, list[Candidate]] = {}
        self._models: dict[str, ModelView] = {}
        self._groups: dict[str, str] = {}
        self._in_flight: dict[str, int] = {}
        self._namespaces: dict[tuple[str, str], BlockKey] = {}
        self._changed = asyncio.Event()
        self.version = 0
        self.renewed: frozenset[str] = frozenset()
        """Addresses of instances that came, came back or restarted with the last list."""
        self.addresses: frozenset[str] = frozenset()

    def update(self, message: conductor_pb2.InstanceList) -> None:
        """Take a new list. Instances that contradict themselves (no layout, no role) are left out."""
        candidates: dict[str, list[Candidate]] = {}
        models: dict[str, ModelView] = {}
        groups: dict[str, str] = {}
        heard: dict[str, tuple[str, str, bool]] = {}
        renewed: set[str] = set()
        for instance in message.instances:
            info, load = instance.info, instance.load
            if not info.model or not info.address:
                continue
            try:
                role, layout = role_from_proto(info.role), layout_from_proto(info.layout)
            except InvalidArgument:
                continue
            if role is None or role is Role.STORE:
                continue
            group = f"{info.model_fingerprint}/{layout.layout_id}"
            groups[info.instance_id] = group
            heard[info.instance_id] = facts = info.boot_id, info.address, instance.schedulable
            if instance.schedulable and facts != self._heard.get(info.instance_id):
                self._failures.succeeded(info.instance_id)  # it has restarted or come back
                renewed.add(info.address)
            known = models.get(info.model)
            if known is None:
                models[info.model] = ModelView(info.model_fingerprint, layout, info.max_context_tokens)
            elif info.max_context_tokens and (not known.max_context or info.max_context_tokens < known.max_context):
                models[info.model] = ModelView(known.fingerprint, known.layout, info.max_context_tokens)
            if instance.schedulable:
                reported = load.pending_requests + load.running_requests
                candidates.setdefault(info.model, []).append(
                    Candidate(
                        *(info.instance_id, info.address, role, group, reported),
                        *(info.max_batch, info.max_context_tokens),
                    )
                )
        if models != self._models:
            self._namespaces.clear()
        self._candidates, self._models, self._groups, self._heard = candidates, models, groups, heard
        self.addresses = frozenset(each.address for found in candidates.values() for each in found)
        self.renewed = frozenset(renewed)
        self.version = message.version
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout_s: float) -> None:
        """Until the next list, or for ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def model(self, name: str) -> ModelView | None:
        """None when no instance of it was ever listed."""
        return self._models.get(name)

    def servable(self, name: str) -> bool:
        """Whether some pair of instances could take a request."""
        return bool(serving_groups(self._candidates.get(name, ()), 1))

    def namespace(self, name: str, tenant: str) -> BlockKey | None:
        """Where the key chain of a tenant begins; None while the model's layout is unknown."""
        key = self._namespaces.get((name, tenant))
        if key is None:
            known = self._models.get(name)
            if known is None:
                return None
            if len(self._namespaces) >= TENANTS_MAX:
                self._namespaces.clear()
            key = namespace(known.fingerprint, known.layout.layout_id, tenant)
            self._namespaces[name, tenant] = key
        return key

    def keys_fit(self, model: str, instance_id: str) -> bool:
        """Whether keys computed for ``model`` mean the same to this instance (same weights, same layout)."""
        known, group = self._models.get(model), self._groups.get(instance_id)
        return known is None or group is None or group == f"{known.fingerprint}/{known.layout.layout_id}"

    def failed(self, instance_id: str, now_s: float) -> None:
        """It failed a request: left alone for a while, or until something new is heard of it."""
        self._failures.failed(instance_id, now_s)

    def succeeded(self, instance_id: str, placed_s: float) -> None:
        """It did its part of an attempt that was placed then: no news about failures since."""
        self._failures.succeeded(instance_id, placed_s)

    def avoided(self, instance_ids: Iterable[str], now_s: float) -> set[str]:
        """Those of them that failed lately."""
        return {each for each in instance_ids if self._failures.avoids(each, now_s)}

    def choose(self, model: str, total_tokens: int, exclude: Collection[str], now_s: float) -> common_pb2.Placement:
        """A placement without the conductor. Raises :class:`Unavailable`."""
        known = self._candidates.get(model, ())
        avoided = self.avoided((each.instance_id for each in known), now_s)
        pair = self._routing.choose(serving_groups(known, total_tokens, exclude, avoided), self._in_flight)
        if pair is None:
            raise Unavailable("No instance is available for this model.", retry_after_s=1.0)
        return common_pb2.Placement(
            prefill_instance_id=pair.prefill.instance_id,
            prefill_address=pair.prefill.address,
            decode_instance_id=pair.decode.instance_id,
            decode_address=pair.decode.address,
            policy=f"lb_{self._routing.name}",
        )

    def begin(self, placement: common_pb2.Placement) -> tuple[str, str]:
        """Count a request on its instances until :meth:`end` is called with what this returns."""
        ids = (placement.prefill_instance_id, placement.decode_instance_id)
        for instance_id in ids:
            self._in_flight[instance_id] = self._in_flight.get(instance_id, 0) + 1
        return ids

    def end(self, ids: tuple[str, str]) -> None:
        for instance_id in ids:
            left = self._in_flight[instance_id] - 1
            if left:
                self._in_flight[instance_id] = left
            else:
                del self._in_flight[instance_id]

    @property
    def in_flight(self) -> int:
        """Requests counted on instances, once per role."""
        return sum(self._in_flight.values())
