"""The controller's gRPC methods."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, InvalidArgument, PermissionDenied, PinyonError, ResourceExhausted
from pinyon.core.request import check_geography
from pinyon.federation.view import Federation
from pinyon.messages.checks import check_id
from pinyon.messages.federation import (
    check_instance,
    check_load,
    federation_from_proto,
    federation_to_proto,
    latencies_from_proto,
    lb_info_from_proto,
)
from pinyon.runtime.admin import admitted
from pinyon.runtime.callers import Callers, Refusals
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.identity import ADMIN, LB, check_claim, check_region_claim
from pinyon.runtime.logging import get_logger
from services.controller.control import Control
from services.controller.metrics import ControllerMetrics

CONTROLLER_CALLERS: Callers = {
    # The servicer compares the id in a registration with that of the certificate.
    "Session": frozenset((LB,)),
    "ListRegions": frozenset((LB, ADMIN)),
    # These decide where requests go: without TLS, the servicer lets in only callers on this machine.
    "AddInstance": frozenset((ADMIN,)),
    "RemoveInstance": frozenset((ADMIN,)),
    "ForgetLoadBalancer": frozenset((ADMIN,)),
}
FIRST_S = 10.0
"""The seconds after which a session ends if its peer says nothing at all."""
SESSIONS_MAX = 512

_log = get_logger("controller")


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    """The methods: they turn messages into values, tell the control, and turn values into messages."""

    def __init__(self, control: Control, metrics: ControllerMetrics, clock: Clock) -> None:
        self._control = control
        self._metrics = metrics
        self._clock = clock
        self._places = asyncio.Semaphore(SESSIONS_MAX)
        self._refusals = Refusals(_log, clock)

    async def Session(self, _: object, context: Any) -> None:
        if self._places.locked():
            raise ResourceExhausted(f"{SESSIONS_MAX} sessions are open", retry_after_s=1.0)
        async with self._places:
            with self._metrics.sessions.track_inprogress():
                await self._converse(context)

    async def _converse(self, context: Any) -> None:
        stream = Accepted[controller_pb2.SessionResponse, controller_pb2.SessionRequest](context)
        first = await stream.first(FIRST_S)
        if first is None:
            return
        if not first.HasField("registration"):
            raise InvalidArgument("must be in the first message", field="registration")
        info = lb_info_from_proto(first.registration)
        try:
            check_claim(context, LB, info.lb_id)
            check_region_claim(context, info.region)
        except PermissionDenied as error:
            self._refusals.log("", context, "refused %s of %s: %s", info.lb_id, info.region, error.message)
            raise
        session = self._control.register(info, known_of(first, context))

        def take(message: controller_pb2.SessionRequest) -> None:
            if message.leaving:
                self._control.left(session)
                stream.end()
                return
            if message.HasField("registration") and message is not first:
                self._control.update(session, lb_info_from_proto(message.registration))
            load = check_load(message.load) if message.HasField("load") else None
            if not self._control.heard(session, load, latencies_from_proto(message.latencies_ms), message.draining):
                stream.end(FailedPrecondition(f"a later session of {info.lb_id} has begun"))

        try:
            take(first)
            await stream.run(take, self._control.messages())
        finally:
            self._control.lost(session)

    async def ListRegions(
        self, request: controller_pb2.ListRegionsRequest, context: Any
    ) -> controller_pb2.ListRegionsResponse:
        now_s = self._clock()
        registry = self._control.registry
        return controller_pb2.ListRegionsResponse(
            federation=federation_to_proto(registry.federation),
            reports={
                member.info.lb_id: controller_pb2.LoadBalancerReport(
                    load=member.load,
                    age_ms=max(0, round((now_s - member.heard_s) * 1e3)),
                    latencies_ms=member.latencies_ms,
                )
                for member in registry.watched()
                if member.session
            },
            settling=registry.settling(now_s),
        )

    async def AddInstance(
        self, request: controller_pb2.AddInstanceRequest, context: Any
    ) -> controller_pb2.AddInstanceResponse:
        who = admitted(context)
        changed = self._control.registry.add_instance(*_named(request))
        version = await self._control.written()
        _log.warning("%s added %s to %s", who, request.instance, request.region)
        return controller_pb2.AddInstanceResponse(version=version, changed=changed)

    async def RemoveInstance(
        self, request: controller_pb2.RemoveInstanceRequest, context: Any
    ) -> controller_pb2.RemoveInstanceResponse:
        who = admitted(context)
        changed = self._control.registry.remove_instance(*_named(request))
        version = await self._control.written()
        _log.warning("%s removed %s from %s", who, request.instance, request.region)
        return controller_pb2.RemoveInstanceResponse(version=version, changed=changed)

    async def ForgetLoadBalancer(
        self, request: controller_pb2.ForgetLoadBalancerRequest, context: Any
    ) -> controller_pb2.ForgetLoadBalancerResponse:
        who = admitted(context)
        self._control.registry.forget(check_id(request.lb_id, "lb_id"))
        version = await self._control.written()
        _log.warning("%s made it forget %s", who, request.lb_id)
        return controller_pb2.ForgetLoadBalancerResponse(version=version)


def known_of(message: controller_pb2.SessionRequest, context: Any) -> Federation | None:
    """Returns what a load balancer knows of the federation, without changes by hand if it may make none itself.

    ``None``: another version of the suite has told it things not understood here. That is no reason to refuse it."""
    if not message.HasField("known"):
        return None
    try:
        known = federation_from_proto(message.known)
    except PinyonError as error:
        _log.warning("cannot take what a load balancer knows: %s: %s", error.field, error.message)
        return None
    try:
        admitted(context)
    except PermissionDenied:
        known = replace(known, clusters=tuple([replace(each, added=(), removed=()) for each in known.clusters]))
    return known


def _named(request: controller_pb2.AddInstanceRequest | controller_pb2.RemoveInstanceRequest) -> tuple[str, str, str]:
    """Returns region, cluster and instance."""
    cluster = check_geography(request.cluster, "cluster") if request.cluster else ""
    return check_geography(request.region, "region"), cluster, check_instance(request.instance, "instance")
