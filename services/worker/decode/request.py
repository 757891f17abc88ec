"""One request owned by this instance, from the reservation of its blocks to its last token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pinyon.api.worker.v1 import worker_pb2
from pinyon.batching import BatchRequest
from pinyon.core.block_keys import BlockKey, chain_block_keys, tokens_to_bytes
from pinyon.core.errors import Cancelled, DeadlineExceeded, Internal, PinyonError, ResourceExhausted
from pinyon.core.request import FinishReason
from pinyon.eviction import Traits
from pinyon.messages.finish_reason import finish_reason_to_proto
from pinyon.paging import Reservation
from pinyon.runtime.logging import get_logger
from pinyon.runtime.telemetry import Span
from pinyon.transfer import TransferError
from services.worker.abort import Abort
from services.worker.convert import failed_update, prefill_to_proto, report_to_proto
from services.worker.decode.transcript import Transcript
from services.worker.decode.updates import UpdateBuffer
from services.worker.orders import GenerateOrder, PrefillOrder
from services.worker.parts import Parts
from services.worker.prefill.job import PrefillJob
from services.worker.prefill.peers import PrefillPeers, RemotePrefill
from services.worker.prefill.prefills import Prefills
from services.worker.step_members import DecodeMember

__all__ = ["DecodeObserver", "DecodeRequest"]

_log = get_logger("decode")


class DecodeObserver(Protocol):
    """Told of what metrics count."""

    def first_token(self, seconds: float) -> None: ...

    def request_ended(self, update: worker_pb2.StreamUpdate) -> None: ...


class DecodeRequest:
    """``abort.fire`` stops it in any phase. Its last update goes out at once; its blocks follow when nobody writes to
    them any more."""

    def __init__(
        self,
        parts: Parts,
        prefills: Prefills,
        peers: PrefillPeers,
        observer: DecodeObserver,
        number: int,
        order: GenerateOrder,
        stream_id: int,
        updates: UpdateBuffer,
        on_end: Callable[[], None],
    ) -> None:
        """``on_end`` is called when its last update was given out; it may still hold blocks then."""
        self.number = number
        self.order = order
        self.stream_id = stream_id
        self.abort = Abort()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Its last update was given out."""
        self._parts = parts
        self._prefills = prefills
        self._peers = peers
        self._observer = observer
        self._on_end = on_end
        self._updates = updates
        self._transcript = Transcript(parts.served.card, order.sampling)
        self._replayed = ""
        self._reservation: Reservation | None = None
        self._decode_local = 0
        self._job: PrefillJob | None = None
        self._remote: RemotePrefill | None = None
        self._member: DecodeMember | None = None
        self._report: worker_pb2.PrefillReport | None = None
        self._arrived_s = self._parts.clock()
        self._started = False
        self._traits = Traits.of(order.request_class)
        self._runs = parts.storage.new_runs()
        # The last full block's key and the tokens after it: what the next block's key follows from.
        self._last_key = order.keys[-1] if order.keys else self._parts.served.namespace(order.request_class.tenant)
        covered = len(order.keys) * self._parts.served.layout.block_tokens
        self._tail = bytearray(tokens_to_bytes(order.tokens[covered:]))

    async def run(self) -> None:
        """Its whole life. Never raises."""
        parts, order = self._parts, self.order
        timer = asyncio.get_running_loop().call_later(order.timeout_s, self._on_deadline)
        with parts.telemetry.span(
            "decode", order.traceparent, request_id=order.request_id, prompt_tokens=len(order.tokens)
        ) as span:
            span.classify(order.request_class)
            try:
                await self._phases(span)
            except PinyonError as error:
                span.error(error)
                self._end(error)
            except Exception as error:
                _log.exception("a request failed", extra={"request_id": order.request_id})
                span.error(error)
                self._end(Internal("the request failed"))
            finally:
                timer.cancel()
                if not self.ended.done():
                    self._end(Internal("the request ended unexpectedly"))
                span.set("completion_tokens", self._transcript.count)
                await self._clean_up()

    def _on_deadline(self) -> None:
        self.abort.fire(DeadlineExceeded(f"not finished within {self.order.timeout_s:g} s"))

    # -- phases

    async def _phases(self, span: Span) -> None:
        self._replay()
        if self.ended.done():
            return
        await self._reserve()
        token = await self._prefill(span)
        self._observer.first_token(self._parts.clock() - self._arrived_s)
        if not self._take(token):
            return
        self._join_batch(token)
        await self.abort.wait(self.ended)

    def _replay(self) -> None:
        """Tokens generated elsewhere before give their text again; the caller drops what it sent already."""
        generated = self.order.generated
        for token in self.order.tokens[len(self.order.tokens) - generated :].tolist() if generated else ():
            self._replayed += self._transcript.push(token)
            if self._transcript.finish is not None:
                update = self._updates.update(self.stream_id)
                update.text = self._replayed
                self._end_well(update, self._transcript.finish)
                return

    async def _reserve(self) -> None:
        parts, order = self._parts, self.order
        layout = parts.served.layout
        # The last token sampled is never fed, so it needs no room.
        total = layout.blocks_for(len(order.tokens) + order.max_new_tokens - 1)
        # Computed here, the last token needs its logits; computed elsewhere, all whole blocks may be kept.
        tokens = len(order.tokens) - (0 if order.prefill_instance_id else 1)
        keys = [] if order.no_reuse else order.keys[: tokens // layout.block_tokens]
        waiting = parts.cache.reserve(keys, total)
        full = ResourceExhausted("no KV memory free", field="decode_instance", retry_after_s=1.0)
        try:
            self._reservation = await self.abort.wait(waiting, full, order.timeout_s)
        except BaseException:
            parts.cache.withdraw(waiting)
            raise
        self._decode_local = self._reservation.held

    async def _prefill(self, span: Span) -> int:
        reservation = self._reservation
        if reservation is None:
            raise RuntimeError("no blocks are reserved")
        if self.order.prefill_instance_id:
            try:
                return await self._prefill_elsewhere(reservation, span)
            except ResourceExhausted as error:
                if not self._computes_instead(reservation, error):
                    raise
            # Two instances may wait for each other's room, each in requests that hold their own: here room is reserved.
            if self._remote is not None:
                await self._peers.settle(self._remote)
                self._remote = None
        order = self.order
        self._job = self._prefills.submit(
            PrefillOrder(
                request_id=order.request_id,
                request_class=order.request_class,
                tokens=order.tokens,
                keys=order.keys,
                sampling=order.sampling,
                sample_index=order.generated,
                fetches=order.fetches,
                no_reuse=order.no_reuse,
                traceparent=span.traceparent,
            ),
            owned=reservation,
        )
        outcome = await self.abort.wait(self._job.done)
        self._report = report_to_proto(outcome, self._parts.served.instance_id)
        return outcome.token

    def _computes_instead(self, reservation: Reservation, error: ResourceExhausted) -> bool:
        """Whether this instance computes the prompt that another one, which was asked to, has no room for."""
        served = self._parts.served
        left = len(self.order.tokens) - reservation.held * served.layout.block_tokens
        return error.field == "prefill_instance" and served.role.prefills and left > 0

    async def _prefill_elsewhere(self, reservation: Reservation, span: Span) -> int:
        parts, order = self._parts, self.order
        layout, first = parts.served.layout, reservation.held
        targets = reservation.table[first : layout.blocks_for(len(order.tokens))]
        offsets = [block * layout.block_bytes for block in targets]
        left_s = max(0.0, order.timeout_s - (parts.clock() - self._arrived_s))
        start = prefill_to_proto(order, first, offsets, left_s, span.traceparent)
        self._remote = self._peers.start(order.prefill_instance_id, order.prefill_address, start)
        result = await self.abort.wait(self._remote.result)
        if not 0 <= result.first_token < parts.served.card.config.vocab_size:
            raise Internal("the prefill instance sent no token of the vocabulary")
        if not order.no_reuse:
            self._publish(reservation.table, order.keys[reservation.held :], reservation.held)
        self._report = result.report
        return result.first_token

    def _join_batch(self, token: int) -> None:
        parts, order = self._parts, self.order
        if self._reservation is None:
            raise RuntimeError("no blocks are reserved")
        self._member = DecodeMember(
            request=BatchRequest(
                number=self.number,
                prompt_tokens=len(order.tokens),
                max_new_tokens=order.max_new_tokens,
                block_keys=tuple(order.keys),
                arrived_s=self._arrived_s,
                request_class=order.request_class,
            ),
            token=token,
            position=len(order.tokens),
            table=self._reservation.table,
            sampling=order.sampling,
            sample_index=order.generated + 1,
            advanced=self._advanced,
            failed=self._failed,
        )
        parts.members.add_decode(self._member)
        parts.engine_loop.wake()

    # -- tokens

    def _take(self, token: int) -> bool:
        """Pass a token on. False when it is the last one."""
        self._tail += token.to_bytes(4, "little")
        text = self._transcript.push(token)
        update = self._updates.update(self.stream_id)
        update.tokens.append(token)
        if not self._started:
            self._started = True
            text = self._replayed + text
            if self._report is not None:
                self._report.decode_local_tokens = self._decode_local * self._parts.served.layout.block_tokens
                update.prefill.CopyFrom(self._report)
        if text:
            update.text += text
        finish = self._transcript.finish
        if finish is None:
            return True
        self._end_well(update, finish)
        return False

    def _advanced(self, token: int) -> bool:
        """From the engine's loop: the KV of all tokens before this one is in the pool."""
        member = self._member
        if member is not None and member.position % self._parts.served.layout.block_tokens == 0:
            self._publish_block(member.position // self._parts.served.layout.block_tokens - 1)
        return self._take(token)

    def _publish_block(self, index: int) -> None:
        """The block with this index in the table is full of tokens, generated ones at its end."""
        order, layout = self.order, self._parts.served.layout
        parent = self._last_key
        (self._last_key,) = chain_block_keys(parent, bytes(self._tail), layout.block_tokens)
        self._tail.clear()
        if self._reservation is not None and not order.no_reuse:
            made = [self._last_key]
            self._publish(self._reservation.table, made, index)
            self._parts.storage.offer(made, self._runs, order.request_class)

    def _publish(self, table: list[int], keys: list[BlockKey], first: int) -> None:
        """Between steps, or before it is in any: nobody reads the blocks whose places others take."""
        self._parts.cache.release(self._parts.cache.publish(table, keys, self._traits, first))

    def _failed(self, error: Exception) -> None:
        self.abort.fire(error if isinstance(error, PinyonError) else Internal("the engine failed on this request"))

    # -- the end

    def _end_well(self, update: worker_pb2.StreamUpdate, finish: FinishReason) -> None:
        update.finish_reason = finish_reason_to_proto(finish)
        self._last_update(update)

    def _end(self, error: PinyonError) -> None:
        if self.ended.done():
            return
        update = self._updates.update(self.stream_id)
        if isinstance(error, Cancelled):
            update.finish_reason = finish_reason_to_proto(FinishReason.CANCELLED)
        else:
            failed_update(update, error)
        self._last_update(update)

    def _last_update(self, update: worker_pb2.StreamUpdate) -> None:
        prompt = len(self.order.tokens) - self.order.generated
        usage = update.usage
        usage.prompt_tokens = prompt
        usage.completion_tokens = self._transcript.count
        report = self._report
        if report is not None:
            usage.cached_local_tokens = report.local_tokens
            usage.cached_peer_tokens = report.peer_tokens
            usage.cached_store_tokens = report.store_tokens
            # A resumed request reuses generated tokens too; they are not of the prompt that the client sent.
            usage.cached_tokens = min(prompt, report.local_tokens + report.peer_tokens + report.store_tokens)
        self.ended.set_result(None)
        self._on_end()
        self._parts.ledger.decode_ended(self.order.request_id)
        self._observer.request_ended(update)

    async def _clean_up(self) -> None:
        parts = self._parts
        if self._member is not None:
            parts.members.remove_decode(self._member)
            await parts.step_over()
        if self._job is not None and not self._job.done.done():
            self._prefills.cancel(self._job, self.abort.error or Cancelled("the request ended"))
            await asyncio.wait((self._job.done,))
        if self._remote is not None:
            try:
                await self._peers.settle(self._remote)
            except TransferError:
                _log.error(
                    "blocks stay unused: a peer may still write to them", extra={"request_id": self.order.request_id}
                )
                return
        if self._reservation is not None:
            parts.cache.release(self._reservation.table)
