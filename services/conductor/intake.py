"""The intake of instances' reports into the fleet and the block index."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import TypeVar

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.block_keys import KEY_BYTES, secret_id
from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, InvalidArgument
from pinyon.core.key_sample import key_sample
from pinyon.core.request import Role
from pinyon.messages.checks import check_keys
from pinyon.messages.instance import info_from_proto, load_from_proto
from pinyon.messages.prefill_report import first_token_from_proto
from pinyon.placement.decision_log import DecisionLog
from pinyon.placement.fleet import Fleet
from pinyon.placement.hot_copies import HotCopies
from pinyon.placement.index import Intake
from pinyon.placement.instances import InstanceState
from pinyon.placement.planned_fetches import PlannedFetches
from services.conductor.membership import Membership, Reporter
from services.conductor.metrics import ConductorMetrics

Part = TypeVar("Part")
Value = TypeVar("Value")
Steps = Generator[None, None, Value]
"""A generator that lets other tasks have the event loop at each ``yield``."""

# Keys that are indexed in one go (~2 ms, in Python ~20 ms) before other tasks get the event loop.
STEP_KEYS = 2_048
STEP_BYTES = STEP_KEYS * KEY_BYTES
# The same limit for parts of a report that carry few keys, or none.
STEP_PARTS = 1024
# Only this many measurements of a report, the newest, are learned from: they replace each other anyway.
MEASUREMENTS_MAX = 256
# A longer measurement comes from a broken clock.
MEASURED_US_MAX = 3_600_000_000
# A larger fetch is ignored like a longer measurement.
FETCHED_BYTES_MAX = 1 << 50
# Only the last fetches of one prompt are learned from.
SPANS_MAX = 16


class ReportIntake:
    """The intake of reports, each in this order: registration, load, snapshot, deltas, measurements, begins, endings.

    The cost model learns from measured prefills; the decision log is told the measured times to first token."""

    def __init__(
        self,
        fleet: Fleet,
        membership: Membership,
        metrics: ConductorMetrics,
        clock: Clock,
        planned: PlannedFetches,
        secret: bytes = b"",
        log: DecisionLog | None = None,
    ) -> None:
        """Takes the fetches that placements ``planned``, and the ``log`` of decisions, which is told their results.

        If this process knows the cluster's ``secret``, workers with another one are refused."""
        self._log = log
        self._planned = planned
        self._secret_id = secret_id(secret)
        self._fleet = fleet
        self._membership = membership
        self._metrics = metrics
        self._clock = clock
        self._hot_copies = HotCopies()

    def register(self, message: conductor_pb2.ReportSessionRequest) -> Reporter:
        """Registers the instance that a session's first message names, and returns its reporter.

        Raises :class:`InvalidArgument` without a (good) registration, and :class:`FailedPrecondition` for a worker
        whose block keys would never match those of other workers."""
        if not message.HasField("registration"):
            raise InvalidArgument("the first message must register the instance", field="registration")
        info = info_from_proto(message.registration)
        if self._secret_id and info.role is not Role.STORE and info.key_secret_id != self._secret_id:
            raise FailedPrecondition(
                f"the block keys of {info.instance_id} start from another secret than the conductor's: "
                "give both the same --cluster-secret-file",
                field="registration.key_secret_id",
            )
        return self._membership.open(info)

    def apply(
        self, reporter: Reporter, message: conductor_pb2.ReportSessionRequest
    ) -> Steps[conductor_pb2.ReportSessionResponse | None]:
        """Applies one report in steps, and returns the answer, or None if there is nothing to say.

        Raises :class:`InvalidArgument` for malformed reports and :class:`FailedPrecondition` if the session is void."""
        self._membership.heard(reporter)
        state = reporter.state
        # protobuf makes a new object at each access of a field, so each field is read once
        if message.HasField("load"):
            self._membership.set_load(reporter, load_from_proto(message.load))
        resync = changed = False
        if message.HasField("snapshot"):
            changed = True
            resync = (yield from self._apply_snapshot(reporter, message.snapshot)) is Intake.GAP
        if deltas := message.deltas:
            changed = True
            resync |= yield from self._apply_deltas(reporter, deltas)
        now_s, inflight = self._clock(), self._fleet.inflight
        if prefills := message.prefills:
            self._learn(state, prefills[-MEASUREMENTS_MAX:], now_s)
        if told := message.first_tokens:
            yield from self._in_turns(reporter, told, partial(self._first_tokens, state))
        if begun := message.begun_decode_request_ids:
            yield from self._in_turns(reporter, begun, partial(inflight.begin_decodes, state))
        over = message.ended_prefill_request_ids
        if begun := message.begun_prefill_request_ids:
            begin = partial(inflight.begin_prefills, state, now_s, frozenset(over))
            yield from self._in_turns(reporter, begun, begin)
        if over:
            yield from self._in_turns(reporter, over, partial(inflight.end_prefills, state, now_s))
        if over := message.ended_decode_request_ids:
            yield from self._in_turns(reporter, over, partial(inflight.end_decodes, state))
        if resync:
            self._metrics.gaps.add()
        if message.leaving:
            self._membership.leave(reporter)
            return None
        # a store node's sample changes as layouts of longer blocks come and go; without layouts, no keys are requested
        had, every = reporter.every, self._fleet.sample_for(state.info)
        another = self._fleet.has_layouts and reporter.wants(every, now_s)
        wanted = message.HasField("reads") and state.info.role is Role.STORE
        copies = self._copies(state, message.reads, now_s) if wanted else None
        if not changed and not another and copies is None:
            return None
        response = conductor_pb2.ReportSessionResponse(acked_seq=self._fleet.index.seq_of(state), resync=resync)
        if another:
            response.sample_every = every
            # The instance will not report removals of keys outside a sparser sample: a snapshot drops them.
            response.resync |= every > had
        if copies is not None:
            response.copies.CopyFrom(copies)
        return response

    def _copies(
        self, state: InstanceState, reads: conductor_pb2.WindowReads, now_s: float
    ) -> conductor_pb2.CopyOrder | None:
        """Returns what a store node is to copy elsewhere after it was read so, or None."""
        stores = [each for each in self._fleet.instances() if each.info.role is Role.STORE]
        others = [each.info for each in stores if each is not state and each.schedulable]
        # Readers prefer copies in their own zone.
        near = [each for each in others if each.zone == state.info.zone] or others
        order = self._hot_copies.plan(
            state.info.instance_id,
            max(1, reads.window_ms) * 1e-3,
            reads.reads,
            min(reads.hot_reads, reads.reads),
            [each.instance_id for each in near],
            now_s,
        )
        if order is None:
            return None
        self._metrics.copy_orders.add()
        return conductor_pb2.CopyOrder(target=order.target, reads=order.reads)

    def _apply_deltas(self, reporter: Reporter, deltas: Sequence[conductor_pb2.CacheDelta]) -> Steps[bool]:
        """Returns whether there was a gap; later deltas are then ignored, as a snapshot will replace them."""
        for at in range(0, len(deltas), STEP_PARTS):
            if at:
                yield from self._others_turn(reporter)
            # A slice is a list, while iteration over the field itself ends by an exception. Slices are short, since an
            # instance may send millions of deltas, each of which becomes an object when it is read.
            for delta in deltas[at : at + STEP_PARTS]:
                taken = yield from self._apply_delta(reporter, delta)
                if taken is Intake.APPLIED:
                    self._metrics.deltas.add()
                elif taken is Intake.GAP:
                    return True
        return False

    def _learn(self, state: InstanceState, prefills: Sequence[conductor_pb2.PrefillMeasurement], now_s: float) -> None:
        self._fleet.learn_prefills(
            state,
            [
                (each.computed_tokens, each.prefix_tokens, each.compute_us * 1e-6)
                for each in prefills
                if each.compute_us <= MEASURED_US_MAX
            ],
            now_s,
        )
        if fetches := self._fetches(state, prefills, now_s):
            self._fleet.learn_transfers(state, fetches, now_s)

    def _fetches(
        self, state: InstanceState, prefills: Sequence[conductor_pb2.PrefillMeasurement], now_s: float
    ) -> list[tuple[int, float, InstanceState | None]]:
        """Returns bytes, seconds and source of each credible fetch.

        Without sources, a prompt's fetches are one sum, which tells something of the worker alone. A fetch from a named
        source counts only if a placement had planned that the worker fetches as much from there."""
        measured: list[tuple[int, int, str]] = []
        for prefill in prefills:
            if fetches := prefill.fetches:
                measured += [(span.fetched_bytes, span.fetch_us, span.source_id) for span in fetches[-SPANS_MAX:]]
            elif prefill.fetched_bytes:
                measured.append((prefill.fetched_bytes, prefill.fetch_us, ""))
        believed: list[tuple[int, float, InstanceState | None]] = []
        for size, us, source_id in measured[-MEASUREMENTS_MAX:]:
            if us > MEASURED_US_MAX or size > FETCHED_BYTES_MAX:
                continue
            source = self._fleet.get(source_id) if source_id else None
            if not source_id or (source is not None and self._planned.came(state, source, size, now_s)):
                believed.append((size, us * 1e-6, source))
        return believed

    def _first_tokens(self, state: InstanceState, told: Sequence[conductor_pb2.FirstTokenMeasurement]) -> None:
        if self._log is None:
            return
        for each in told:
            ttft_us = each.ttft_us
            if ttft_us > MEASURED_US_MAX:
                continue
            logged = self._log.measured(each.placement_number, first_token_from_proto(each), state)
            if logged is not None and logged.seen is not None:
                self._metrics.first_token(logged.request.model, logged.seen.decision.ttft_s, ttft_us * 1e-6)

    def _apply_snapshot(self, reporter: Reporter, snapshot: conductor_pb2.CacheSnapshot) -> Steps[Intake]:
        packed = key_sample(check_keys(snapshot.keys, "snapshot.keys"), reporter.every)
        taken = Intake.APPLIED
        for at in range(0, max(1, len(packed)), STEP_BYTES):
            if at:
                yield from self._others_turn(reporter)
            taken = self._fleet.index.apply_snapshot(
                reporter.state,
                snapshot.seq,
                packed[at : at + STEP_BYTES],
                first=snapshot.first and at == 0,
                last=snapshot.last and at + STEP_BYTES >= len(packed),
            )
            if taken is not Intake.APPLIED:
                return taken
        if snapshot.last:
            self._metrics.snapshots.add()
        return taken

    def _apply_delta(self, reporter: Reporter, delta: conductor_pb2.CacheDelta) -> Steps[Intake]:
        stored = key_sample(check_keys(delta.stored_keys, "deltas.stored_keys"), reporter.every)
        removed = key_sample(check_keys(delta.removed_keys, "deltas.removed_keys"), reporter.every)
        if len(stored) + len(removed) <= STEP_BYTES:
            return self._fleet.index.apply_delta(reporter.state, delta.seq, stored, removed)
        steps = [(stored[at : at + STEP_BYTES], b"") for at in range(0, len(stored), STEP_BYTES)]
        steps += [(b"", removed[at : at + STEP_BYTES]) for at in range(0, len(removed), STEP_BYTES)]
        taken = Intake.APPLIED
        for number, (new, gone) in enumerate(steps):
            if number:
                yield from self._others_turn(reporter)
            taken = self._fleet.index.apply_delta(reporter.state, delta.seq, new, gone, more=number > 0)
            if taken is not Intake.APPLIED:
                return taken
        return taken

    def _in_turns(
        self, reporter: Reporter, parts: Sequence[Part], take: Callable[[Sequence[Part]], object]
    ) -> Steps[None]:
        """Takes the parts in portions, between which other tasks get the event loop."""
        take(parts[:STEP_PARTS])
        for at in range(STEP_PARTS, len(parts), STEP_PARTS):
            yield from self._others_turn(reporter)
            take(parts[at : at + STEP_PARTS])

    def _others_turn(self, reporter: Reporter) -> Steps[None]:
        yield
        self._membership.heard(reporter)


def now_or_in_turns(steps: Steps[Value], then: Callable[[Value], Awaitable[None] | None]) -> Awaitable[None] | None:
    """Does all steps and calls ``then`` with their value; returns what the caller has to await, if anything.

    Most messages need one step, and a task's turn would cost as much as their work."""
    try:
        next(steps)
        return _rest(steps, then)
    except StopIteration as end:
        value: Value = end.value
    return then(value)


async def _rest(steps: Steps[Value], then: Callable[[Value], Awaitable[None] | None]) -> None:
    await asyncio.sleep(0)
    doing = then(await in_turns(steps))
    if doing is not None:
        await doing


async def in_turns(steps: Steps[Value]) -> Value:
    """Does all steps, and returns their value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: Value = end.value
            return value
        await asyncio.sleep(0)
