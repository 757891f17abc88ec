"""The conductor's gRPC methods."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.core.errors import ResourceExhausted
from pinyon.messages.checks import check_keys
from pinyon.messages.instance import instance_to_proto
from pinyon.messages.role import role_from_proto
from pinyon.placement.fleet import Fleet
from pinyon.runtime.duplex import Accepted
from services.conductor.intake import ReportIntake
from services.conductor.membership import Membership, Reporter
from services.conductor.metrics import ConductorMetrics
from services.conductor.placing import Placer

__all__ = ["ConductorServicer"]

WRITE_S = 5.0
"""A session whose peer takes no message for this long has ended."""


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

    async def Schedule(self, request: conductor_pb2.ScheduleRequest, context: Any) -> conductor_pb2.ScheduleResponse:
        return self._placer.place(request)

    async def Release(self, request: conductor_pb2.ReleaseRequest, context: Any) -> conductor_pb2.ReleaseResponse:
        return conductor_pb2.ReleaseResponse(released=self._placer.release(request.request_id))

    async def ListInstances(
        self, request: conductor_pb2.ListInstancesRequest, context: Any
    ) -> conductor_pb2.ListInstancesResponse:
        role = role_from_proto(request.role)
        everything = self._instance_list()
        if role is not None:
            keep = [each for each in everything.instances if each.info.role == request.role]
            return conductor_pb2.ListInstancesResponse(version=everything.version, instances=keep)
        return conductor_pb2.ListInstancesResponse(version=everything.version, instances=everything.instances)

    async def LookupBlocks(
        self, request: conductor_pb2.LookupBlocksRequest, context: Any
    ) -> conductor_pb2.LookupBlocksResponse:
        match = self._fleet.index.match(check_keys(request.block_keys, "block_keys"))
        return conductor_pb2.LookupBlocksResponse(
            holders=[
                conductor_pb2.BlockHolder(instance_id=state.info.instance_id, prefix_blocks=blocks)
                for state in self._fleet.instances()
                if (blocks := match.held_by(state))
            ]
        )

    async def ReportSession(self, _: object, context: Any) -> None:
        stream = Accepted[conductor_pb2.ReportSessionResponse, conductor_pb2.ReportSessionRequest](context, WRITE_S)
        reporter: Reporter | None = None

        async def take(message: conductor_pb2.ReportSessionRequest) -> None:
            nonlocal reporter
            first = reporter is None
            if reporter is None:
                reporter = self._intake.register(message)
            response = await self._intake.apply(reporter, message)
            if message.leaving:
                stream.end()
                return
            if first:
                response = response or conductor_pb2.ReportSessionResponse()
                response.lease_ms = round(self._membership.lease_s * 1e3)
            if response is not None:
                await stream.write(response)

        try:
            await stream.run(take)
        finally:
            if reporter is not None:
                self._membership.close(reporter)

    async def ScheduleSession(self, _: object, context: Any) -> None:
        """Answers each message with one message, and pushes the instance list.

        A placement outlives its session: its request may be running. It ends by the instances' reports, by a release on
        any session, or by age. Only answers that could not be sent are taken back.
        """
        if self._lb_sessions >= self._lb_sessions_max:
            raise ResourceExhausted(f"{self._lb_sessions_max} sessions are open", retry_after_s=1.0)
        stream = Accepted[conductor_pb2.ScheduleSessionResponse, conductor_pb2.ScheduleSessionRequest](context, WRITE_S)

        async def take(message: conductor_pb2.ScheduleSessionRequest) -> None:
            for request_id in message.released_request_ids:
                self._placer.release(request_id)
            if message.requests:
                await self._answer(message.requests, stream)

        self._lb_sessions += 1
        self._metrics.lb_sessions.inc()
        try:
            await stream.run(take, self._instance_lists())
        finally:
            self._lb_sessions -= 1
            self._metrics.lb_sessions.dec()

    async def _answer(
        self,
        requests: Iterable[conductor_pb2.ScheduleRequest],
        stream: Accepted[conductor_pb2.ScheduleSessionResponse, conductor_pb2.ScheduleSessionRequest],
    ) -> None:
        responses = [self._placer.answer(request) for request in requests]
        sent = False
        try:
            await stream.write(conductor_pb2.ScheduleSessionResponse(responses=responses))
            sent = True
        finally:
            if not sent:
                for response in responses:
                    if response.HasField("placement"):
                        self._placer.release(response.request_id)

    async def _instance_lists(self) -> AsyncGenerator[conductor_pb2.ScheduleSessionResponse, None]:
        while True:
            instances = self._instance_list()
            yield conductor_pb2.ScheduleSessionResponse(instances=instances)
            await self._membership.wait_change(instances.version)

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
