"""The conductor's gRPC methods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.core.errors import ResourceExhausted
from pinyon.messages.checks import check_keys
from pinyon.messages.instance import instance_to_proto
from pinyon.messages.role import role_from_proto
from pinyon.placement.fleet import Fleet
from pinyon.runtime.logging import get_logger
from services.conductor.intake import ReportIntake
from services.conductor.membership import Membership
from services.conductor.metrics import ConductorMetrics
from services.conductor.placing import Placer

__all__ = ["ConductorServicer"]

Context = grpc.aio.ServicerContext[Any, Any]

_log = get_logger("conductor")


class ConductorServicer(conductor_pb2_grpc.ConductorServiceServicer):
    """Messages to values, ask, values to messages."""

    def __init__(
        self,
        fleet: Fleet,
        membership: Membership,
        intake: ReportIntake,
        placer: Placer,
        metrics: ConductorMetrics,
        lb_sessions_max: int,
    ) -> None:
        self._fleet = fleet
        self._membership = membership
        self._intake = intake
        self._placer = placer
        self._metrics = metrics
        self._lb_sessions_max = lb_sessions_max
        self._lb_sessions = 0

    async def Schedule(
        self, request: conductor_pb2.ScheduleRequest, context: Context
    ) -> conductor_pb2.ScheduleResponse:
        return self._placer.place(request)

    async def Release(self, request: conductor_pb2.ReleaseRequest, context: Context) -> conductor_pb2.ReleaseResponse:
        return conductor_pb2.ReleaseResponse(released=self._placer.release(request.request_id))

    async def ListInstances(
        self, request: conductor_pb2.ListInstancesRequest, context: Context
    ) -> conductor_pb2.ListInstancesResponse:
        role = role_from_proto(request.role)
        everything = self._instance_list()
        if role is not None:
            keep = [each for each in everything.instances if each.info.role == request.role]
            return conductor_pb2.ListInstancesResponse(version=everything.version, instances=keep)
        return conductor_pb2.ListInstancesResponse(version=everything.version, instances=everything.instances)

    async def LookupBlocks(
        self, request: conductor_pb2.LookupBlocksRequest, context: Context
    ) -> conductor_pb2.LookupBlocksResponse:
        match = self._fleet.index.match(check_keys(request.block_keys, "block_keys"))
        return conductor_pb2.LookupBlocksResponse(
            holders=[
                conductor_pb2.BlockHolder(instance_id=state.info.instance_id, prefix_blocks=blocks)
                for state in self._fleet.instances()
                if (blocks := match.held_by(state))
            ]
        )

    async def ReportSession(
        self, request_iterator: AsyncIterator[conductor_pb2.ReportSessionRequest], context: Context
    ) -> AsyncIterator[conductor_pb2.ReportSessionResponse]:
        reporter = None
        try:
            async for message in request_iterator:
                first = reporter is None
                if reporter is None:
                    reporter = self._intake.register(message)
                response = await self._intake.apply(reporter, message)
                if message.leaving:
                    return
                if first:
                    response = response or conductor_pb2.ReportSessionResponse()
                    response.lease_ms = round(self._membership.lease_s * 1e3)
                if response is not None:
                    yield response
        finally:
            if reporter is not None:
                self._membership.close(reporter)

    async def ScheduleSession(
        self, request_iterator: AsyncIterator[conductor_pb2.ScheduleSessionRequest], context: Context
    ) -> None:
        """Answers each message with one message. The instance list is pushed by a task that this call owns.

        A placement outlives its session: its request may be running. It ends by the instances' reports, by a release on
        any session, or by age. Only answers that could not be sent are taken back.
        """
        if self._lb_sessions >= self._lb_sessions_max:
            raise ResourceExhausted(f"{self._lb_sessions_max} sessions are open", retry_after_s=1.0)
        self._lb_sessions += 1
        self._metrics.lb_sessions.inc()
        write_lock = asyncio.Lock()  # one write at a time per stream
        pusher = asyncio.create_task(self._push_instances(context, write_lock))
        try:
            async for message in request_iterator:
                for request_id in message.released_request_ids:
                    self._placer.release(request_id)
                if message.requests:
                    await self._answer(message, context, write_lock)
        finally:
            pusher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pusher
            self._lb_sessions -= 1
            self._metrics.lb_sessions.dec()

    async def _answer(
        self, message: conductor_pb2.ScheduleSessionRequest, context: Context, write_lock: asyncio.Lock
    ) -> None:
        responses = [self._placer.answer(request) for request in message.requests]
        sent = False
        try:
            async with write_lock:
                await context.write(conductor_pb2.ScheduleSessionResponse(responses=responses))
            sent = True
        finally:
            if not sent:
                for response in responses:
                    if response.HasField("placement"):
                        self._placer.release(response.request_id)

    async def _push_instances(self, context: Context, write_lock: asyncio.Lock) -> None:
        try:
            while True:
                instances = self._instance_list()
                async with write_lock:
                    await context.write(conductor_pb2.ScheduleSessionResponse(instances=instances))
                await self._membership.wait_change(instances.version)
        except grpc.aio.BaseError:
            return  # the stream has ended; the call itself notices too
        except Exception:
            _log.exception("cannot push the instance list")

    def _instance_list(self) -> conductor_pb2.InstanceList:
        return conductor_pb2.InstanceList(
            version=self._membership.version,
            instances=[
                instance_to_proto(
                    state,
                    self._fleet.index.blocks_of(state),
                    self._membership.report_age_s(state.info.instance_id),
                )
                for state in self._fleet.instances()
            ],
        )
