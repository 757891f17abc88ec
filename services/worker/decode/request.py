"""One request owned by this instance, from the reservation of its blocks to its last token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.batching import BatchRequest
from pinyon.core.block_keys import chain_block_keys, pack_keys, tokens_to_bytes
from pinyon.core.errors import Cancelled, DeadlineExceeded, Internal, PinyonError, ResourceExhausted
from pinyon.core.request import FinishReason
from pinyon.paging import Reservation
from pinyon.runtime.interceptors import error_to_proto
from pinyon.runtime.logging import get_logger
from pinyon.runtime.telemetry import Span
from pinyon.transfer import TransferError
from services.worker.abort import Abort
from services.worker.decode.transcript import Transcript
from services.worker.decode.updates import UpdateBuffer
from services.worker.orders import GenerateOrder, PrefillOrder
from services.worker.prefill.job import PrefillJob
from services.worker.prefill.peers import RemotePrefill
from services.worker.prefill.session import report_to_proto
from services.worker.step_members import DecodeMember

if TYPE_CHECKING:
    from services.worker.decode.decodes import Decodes

__all__ = ["DecodeRequest"]

_log = get_logger("decode")

_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


class DecodeRequest:
    """``abort.fire`` stops it in any phase. Its last update goes out at once; its blocks follow when nobody writes to
    them any more."""

    def __init__(
        self, decodes: Decodes, number: int, order: GenerateOrder, stream_id: int, updates: UpdateBuffer
    ) -> None:
        self.number = number
        self.order = order
        self.stream_id = stream_id
        self.abort = Abort()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Its last update was given out."""
        self._decodes = decodes
        self._core = decodes.core
        self._updates = updates
        self._transcript = Transcript(self._core.served.card, order.sampling)
        self._replayed = ""
        self._reservation: Reservation | None = None
        self._decode_local = 0
        self._job: PrefillJob | None = None
        self._remote: RemotePrefill | None = None
        self._member: DecodeMember | None = None
        self._report: worker_pb2.PrefillReport | None = None
        self._arrived_s = self._core.clock()
        self._started = False
        # The last full block's key and the tokens after it: what the next block's key follows from.
        self._last_key = order.keys[-1] if order.keys else self._core.served.namespace(order.tenant)
        covered = len(order.keys) * self._core.served.layout.block_tokens
        self._tail = bytearray(tokens_to_bytes(order.tokens[covered:]))

    async def run(self) -> None:
        """Its whole life. Never raises."""
        core, order = self._core, self.order
        timer = asyncio.get_running_loop().call_later(order.timeout_s, self._on_deadline)
        with core.telemetry.span(
            "decode", order.traceparent, request_id=order.request_id, prompt_tokens=len(order.tokens)
        ) as span:
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
        self._decodes.first_token(self._core.clock() - self._arrived_s)
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
        core, order = self._core, self.order
        layout = core.served.layout
        # The last token sampled is never fed, so it needs no room.
        total = layout.blocks_for(len(order.tokens) + order.max_new_tokens - 1)
        # Computed here, the last token needs its logits; computed elsewhere, all whole blocks may be kept.
        tokens = len(order.tokens) - (0 if order.prefill_instance_id else 1)
        keys = [] if order.no_reuse else order.keys[: tokens // layout.block_tokens]
        waiting = core.cache.reserve(keys, total)
        full = ResourceExhausted("no KV memory free", retry_after_s=1.0)
        try:
            self._reservation = await self.abort.wait(waiting, full, order.timeout_s)
        except BaseException:
            core.cache.withdraw(waiting)
            raise
        self._decode_local = self._reservation.held

    async def _prefill(self, span: Span) -> int:
        reservation = self._reservation
        if reservation is None:
            raise RuntimeError("no blocks are reserved")
        if self.order.prefill_instance_id:
            return await self._prefill_elsewhere(reservation, span)
        order = self.order
        self._job = self._decodes.prefills.submit(
            PrefillOrder(
                request_id=order.request_id,
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
        self._report = report_to_proto(outcome, self._core.served.instance_id)
        return outcome.token

    async def _prefill_elsewhere(self, reservation: Reservation, span: Span) -> int:
        core, order = self._core, self.order
        layout = core.served.layout
        size = layout.block_bytes
        targets = reservation.table[reservation.held : layout.blocks_for(len(order.tokens))]
        left_s = max(0.001, order.timeout_s - (core.clock() - self._arrived_s))
        sampling = order.sampling
        start = worker_pb2.PrefillStart(
            request_id=order.request_id,
            request_class=common_pb2.RequestClass(tenant=order.tenant),
            prompt_tokens_le32=tokens_to_bytes(order.tokens),
            block_keys=pack_keys(order.keys),
            sampling=common_pb2.SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed,
            ),
            generated_tokens=order.generated,
            fetches=[
                common_pb2.FetchSpan(
                    source_id=fetch.source_id,
                    source_address=fetch.address,
                    source=fetch.source,  # type: ignore[arg-type]  # an enum's number
                    first_block=fetch.first,
                    block_count=fetch.end - fetch.first,
                )
                for fetch in order.fetches
            ],
            target_offsets_bytes=[block * size for block in targets],
            first_target_block=reservation.held,
            timeout_ms=max(1, round(1000 * left_s)),
            traceparent=span.traceparent,
            no_reuse=order.no_reuse,
        )
        self._remote = self._decodes.peers.start(order.prefill_instance_id, order.prefill_address, start)
        result = await self.abort.wait(self._remote.result)
        if not 0 <= result.first_token < core.served.card.config.vocab_size:
            raise Internal("the prefill instance sent no token of the vocabulary")
        if not order.no_reuse:
            held, end = reservation.held, len(order.keys)
            core.cache.publish(reservation.table[held:end], order.keys[held:end])
        self._report = result.report
        return result.first_token

    def _join_batch(self, token: int) -> None:
        core, order = self._core, self.order
        if self._reservation is None:
            raise RuntimeError("no blocks are reserved")
        self._member = DecodeMember(
            request=BatchRequest(
                number=self.number,
                prompt_tokens=len(order.tokens),
                max_new_tokens=order.max_new_tokens,
                block_keys=tuple(order.keys),
                arrived_s=self._arrived_s,
            ),
            token=token,
            position=len(order.tokens),
            table=self._reservation.table,
            sampling=order.sampling,
            sample_index=order.generated + 1,
            advanced=self._advanced,
            failed=self._failed,
        )
        core.members.add_decode(self._member)
        core.engine_loop.wake()

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
                self._report.decode_local_tokens = self._decode_local * self._core.served.layout.block_tokens
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
        if member is not None and member.position % self._core.served.layout.block_tokens == 0:
            self._publish_block(member.position // self._core.served.layout.block_tokens - 1)
        return self._take(token)

    def _publish_block(self, index: int) -> None:
        """The block with this index in the table is full of tokens, generated ones at its end."""
        order, layout = self.order, self._core.served.layout
        parent = self._last_key
        (self._last_key,) = chain_block_keys(parent, bytes(self._tail), layout.block_tokens)
        self._tail.clear()
        if self._reservation is not None and not order.no_reuse:
            self._core.cache.publish([self._reservation.table[index]], [self._last_key])
            self._core.storage.offer([self._last_key], order.keys[0] if order.keys else self._last_key)

    def _failed(self, error: Exception) -> None:
        self.abort.fire(error if isinstance(error, PinyonError) else Internal("the engine failed on this request"))

    # -- the end

    def _end_well(self, update: worker_pb2.StreamUpdate, finish: FinishReason) -> None:
        update.finish_reason = _FINISH[finish]
        self._last_update(update)

    def _end(self, error: PinyonError) -> None:
        if self.ended.done():
            return
        update = self._updates.update(self.stream_id)
        if isinstance(error, Cancelled):
            update.finish_reason = common_pb2.FINISH_REASON_CANCELLED
        else:
            update.finish_reason = common_pb2.FINISH_REASON_ERROR
            update.error.CopyFrom(error_to_proto(error))
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
        self._decodes.ended(self, update)

    async def _clean_up(self) -> None:
        core = self._core
        if self._member is not None:
            core.members.remove_decode(self._member)
            await core.step_over()
        if self._job is not None and not self._job.done.done():
            self._decodes.prefills.cancel(self._job, self.abort.error or Cancelled("the request ended"))
            await asyncio.wait((self._job.done,))
        if self._remote is not None:
            try:
                await self._decodes.peers.settle(self._remote)
            except TransferError:
                _log.error(
                    "blocks stay unused: a peer may still write to them", extra={"request_id": self.order.request_id}
                )
                return
        if self._reservation is not None:
            core.cache.release(self._reservation.table)
