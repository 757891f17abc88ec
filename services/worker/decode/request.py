"""A request owned by this instance, from the reservation of its blocks to its last token."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from pinyon.api.worker.v1 import worker_pb2
from pinyon.batching import BatchRequest, DecodeSlot, TokenCounts
from pinyon.core.block_keys import BlockKey, chain_block_keys, tokens_to_bytes
from pinyon.core.errors import Cancelled, DeadlineExceeded, Internal, PinyonError, ResourceExhausted
from pinyon.core.logprobs import TokenLogprob
from pinyon.core.orders import GenerateOrder, PrefillReport
from pinyon.core.request import FinishReason
from pinyon.eviction import Traits, Use
from pinyon.messages.enums import finish_reason_to_proto
from pinyon.messages.error import error_to_proto
from pinyon.messages.logprobs import SentLogprobs, append_logprob
from pinyon.messages.orders import FirstToken, parse_first_token, prefill_to_proto
from pinyon.messages.prefill_report import report_to_proto
from pinyon.paging import Reservation
from pinyon.runtime.deadlines import deadlines_of
from pinyon.runtime.logging import get_logger
from pinyon.runtime.telemetry import Span
from pinyon.transfer import TransferError
from services.worker.decode.outgoing_updates import OutgoingUpdates
from services.worker.decode.transcript import Transcript
from services.worker.instance.parts import Parts
from services.worker.instance.step_members import DecodeMember
from services.worker.orders.abort import Abort
from services.worker.prefill.job import PrefillJob
from services.worker.prefill.peers import PrefillPeers, RemotePrefill
from services.worker.prefill.prefills import Prefills

_log = get_logger("decode")


class DecodeObserver(Protocol):
    """The receiver of what metrics count."""

    def first_token(self, seconds: float) -> None: ...

    def request_ended(self, reason: FinishReason) -> None: ...


class DecodeRequest:
    """A request, which ``abort.fire`` stops in any phase.

    Its last update goes out at once, and ``on_end`` is called; its blocks follow when nothing writes to them any more.
    """

    def __init__(
        self,
        parts: Parts,
        prefills: Prefills,
        peers: PrefillPeers,
        observer: DecodeObserver,
        order: GenerateOrder,
        stream_id: int,
        updates: OutgoingUpdates,
        on_end: Callable[[], None],
    ) -> None:
        self.number = parts.cache.number()
        self.order = order
        self.stream_id = stream_id
        self.abort = Abort()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when its last update was given out."""
        self._parts = parts
        self._prefills = prefills
        self._peers = peers
        self._observer = observer
        self._on_end = on_end
        self._updates = updates
        self._prompt = prompt = order.prompt
        """The tokens to compute before the next one: the prompt, and those generated before it gave way."""
        self._transcript = Transcript(parts.card, prompt.sampling)
        self._token_changes = 2 + prompt.sampling.logprobs
        """The changes that a token adds to an update: itself, and its log-probabilities."""
        self._replayed = ""
        self._keys = list(prompt.keys)
        """The keys of the full blocks of all tokens so far."""
        self._made = array("I")
        """The tokens generated here since ``_prompt``."""
        self._reservation: Reservation | None = None
        self._waiting: asyncio.Future[Reservation] | None = None
        self._turn: asyncio.Future[None] | None = None
        """Done when the request has given way, or ended."""
        self._decode_local = 0
        self._job: PrefillJob | None = None
        self._remote: RemotePrefill | None = None
        self._member: DecodeMember | None = None
        self._report: PrefillReport | None = None
        self._arrived_s = self._parts.clock()
        self._started = False
        self._traits = Traits.of(prompt.request_class)
        self._runs = parts.storage.new_runs()
        # The last full block's key and the tokens after it, from which the next block's key follows.
        asked = prompt.request_class
        start = parts.served.namespace(asked.tenant, asked.cache_salt)
        self._last_key = prompt.keys[-1] if prompt.keys else start
        covered = len(prompt.keys) * self._parts.served.layout.block_tokens
        self._tail = bytearray(tokens_to_bytes(prompt.tokens[covered:]))

    async def run(self) -> None:
        """Runs all phases. Never raises."""
        parts, prompt = self._parts, self.order.prompt
        deadlines = deadlines_of(asyncio.get_running_loop())
        slot = deadlines.add(self, deadlines.loop.time() + self.order.timeout_s)
        with parts.telemetry.span(
            "decode", prompt.traceparent, request_id=prompt.request_id, prompt_tokens=len(prompt.tokens)
        ) as span:
            span.classify(prompt.request_class)
            try:
                await self._phases(span)
            except PinyonError as error:
                span.error(error)
                self._end(error)
            except Exception as error:
                _log.exception("a request failed", extra={"request_id": prompt.request_id})
                span.error(error)
                self._end(Internal("the request failed"))
            finally:
                deadlines.remove(self, slot)
                if not self.ended.done():
                    self._end(Internal("the request ended unexpectedly"))
                span.set("completion_tokens", self._transcript.count)
                _log.debug("ended after %d tokens", self._transcript.count, extra={"request_id": prompt.request_id})
                await self._clean_up()

    def is_over(self) -> None:
        """Ends the request, as its time is up."""
        self.abort.fire(DeadlineExceeded(f"not finished within {self.order.timeout_s:g} s"))

    # -- phases

    async def _phases(self, span: Span) -> None:
        self._replay()
        if self.ended.done():
            return
        self._ask()
        while True:
            self._reservation = reservation = await self._room()
            self._waiting = None
            if not self._started:
                self._decode_local = reservation.held
            first = await self._prefill(reservation, span)
            if not self._started:
                self._report, seconds = first.report, self._parts.clock() - self._arrived_s
                self._observer.first_token(seconds)
                self._parts.ledger.first_token(self.order.placement_number, seconds, first.report)
            if not self._take(first.token, first.logprob, first.prompt_logprobs):
                return
            self._turn = asyncio.get_running_loop().create_future()
            self._join_batch(reservation, first.token)
            await self.abort.wait(self._turn)
            if self.ended.done():
                return
            _log.debug(
                "gave way after %d tokens", self._transcript.count, extra={"request_id": self._prompt.request_id}
            )

    def _replay(self) -> None:
        """Replays the text of tokens generated elsewhere; the caller drops the part that it sent already."""
        prompt = self._prompt
        for token in prompt.tokens[len(prompt.tokens) - prompt.sample_index :].tolist():
            self._replayed += self._transcript.push(token)
            if self._transcript.finish is not None:
                update = self._updates.update(self.stream_id)
                update.text = self._replayed
                self._last_update(update, self._transcript.finish)
                return

    def _ask(self, *, at_once: bool = True) -> None:
        """Asks for the blocks of the tokens to compute, and of the next token if one follows."""
        parts, prompt, asked = self._parts, self._prompt, self.order.prompt
        layout, tokens = parts.served.layout, len(prompt.tokens)
        more = self._transcript.count + 1 < prompt.sampling.max_tokens
        # If the prompt is computed here, the last token's logits are needed; elsewhere, all whole blocks may be kept.
        usable = tokens if self._goes_elsewhere else tokens - 1
        reusable = 0 if prompt.no_reuse or prompt.tells_prompt else min(len(self._keys), usable // layout.block_tokens)
        request = BatchRequest(
            number=self.number,
            prompt_tokens=tokens,
            blocks=layout.blocks_for(tokens + more),
            block_keys=tuple(self._keys),
            reusable=reusable,
            max_new_tokens=prompt.sampling.max_tokens - self._transcript.count,
            arrived_s=self._arrived_s,
            traits=Use.of(prompt.request_class).traits,
            seconds=asked.prefill_s,
            deadline_s=0.0 if asked.ttft_left_s == math.inf else self._arrived_s + asked.ttft_left_s,
            computes=reusable > 0 and prompt.shares and not self._goes_elsewhere,
        )
        self._waiting = parts.cache.reserve(request, at_once=at_once)

    @property
    def elsewhere(self) -> bool:
        """Another instance computes its prompt now, or is about to: it takes no place in the batch here yet."""
        if self._started or self._job is not None or not self._goes_elsewhere:  # asked often, of all requests here
            return False
        return self._waiting is None or self._waiting.done()

    @property
    def _goes_elsewhere(self) -> bool:
        """Another instance computes the prompt. Tokens that were generated here are recomputed here, if need be."""
        return bool(self.order.prefill_instance_id) and self._prompt is self.order.prompt

    async def _room(self) -> Reservation:
        if self._waiting is None:
            raise RuntimeError("no blocks were asked for")
        full = ResourceExhausted("no KV memory free", field="decode_instance", retry_after_s=1.0)
        # A request with tokens comes before all others, and waits as long as its time allows.
        limit_s = self.order.timeout_s if self._started else self._parts.limits.room_timeout_s
        return await self.abort.wait(self._waiting, full, limit_s)

    def _preempted(self) -> None:
        """Gives way between steps, for lack of room: its tokens, mostly cached, are recomputed with the prompt."""
        self._reservation = self._member = self._job = self._remote = None
        layout = self._parts.served.layout
        tokens = np.concatenate([self._prompt.tokens, np.asarray(self._made, np.uint32)])
        del self._made[:]
        if len(self._tail) == 4 * layout.block_tokens:  # the token that is fed next fills the block
            (self._last_key,) = chain_block_keys(self._last_key, bytes(self._tail), layout.block_tokens)
            self._keys.append(self._last_key)
            self._tail.clear()
        # A request that gave way gets blocks from the cache, and its client sees nothing come: it goes before all
        # others.
        self._prompt = replace(
            self._prompt,
            tokens=tokens,
            keys=self._keys,
            sample_index=self._transcript.count,
            fetches=(),
            prefill_s=0.0,
            ttft_left_s=math.inf,
            ask_store=False,
        )
        self._ask(at_once=False)
        self._turn_over()

    def _waited_s(self) -> float:
        return self._parts.clock() - self._arrived_s

    async def _prefill(self, reservation: Reservation, span: Span) -> FirstToken:
        if self._goes_elsewhere:
            try:
                return await self._prefill_elsewhere(reservation, span)
            except ResourceExhausted as error:
                if not self._computes_instead(reservation, error):
                    raise
            # Two instances could wait for each other's room, each in requests that hold their own; here room is
            # reserved.
            if self._remote is not None:
                await self._peers.settle(self._remote)
                self._remote = None
        prompt = self._prompt
        self._job = self._prefills.submit(
            replace(prompt, traceparent=span.traceparent, ttft_left_s=prompt.ttft_left_s - self._waited_s()),
            owned=reservation,
        )
        return await self.abort.wait(self._job.done)

    def _computes_instead(self, reservation: Reservation, error: ResourceExhausted) -> bool:
        """Returns whether this instance computes a prompt for which the prefill instance has no room."""
        served = self._parts.served
        left = len(self._prompt.tokens) - reservation.held * served.layout.block_tokens
        return error.field == "prefill_instance" and served.role.prefills and left > 0

    async def _prefill_elsewhere(self, reservation: Reservation, span: Span) -> FirstToken:
        parts, order, prompt = self._parts, self.order, self._prompt
        layout, first = parts.served.layout, reservation.held
        targets = reservation.table[first : layout.blocks_for(len(prompt.tokens))]
        await self.abort.wait(parts.cache.settled(reservation.table))
        offsets = [block * layout.block_bytes for block in targets]
        waited_s = self._waited_s()
        left_s = max(0.0, order.timeout_s - waited_s)
        start = prefill_to_proto(prompt, first, offsets, left_s, waited_s, span.traceparent)
        self._remote = self._peers.start(order.prefill_instance_id, order.prefill_address, start)
        first_token = parse_first_token(await self.abort.wait(self._remote.result), prompt, parts.served)
        if prompt.shares:
            self._publish(reservation.table, prompt.keys[first:], first)
        return first_token

    def _join_batch(self, reservation: Reservation, token: int) -> None:
        parts, prompt, made = self._parts, self._prompt, self._transcript.count
        counts = TokenCounts.needed(prompt.sampling, prompt.tokens, made - 1)
        if counts is not None:
            counts.add(token)
        self._member = DecodeMember(
            number=self.number,
            slot=DecodeSlot(token, len(prompt.tokens), reservation.table, prompt.sampling, made, counts),
            table=reservation.table,
            advanced=self._advanced,
            failed=self._failed,
            preempted=self._preempted,
        )
        parts.members.add_decode(self._member)
        parts.engine_loop.wake()

    # -- tokens

    def _take(self, token: int, logprob: TokenLogprob | None, prompt_logprobs: SentLogprobs | None = None) -> bool:
        """Passes a token on. Returns False for the last one."""
        self._tail += token.to_bytes(4, "little")
        self._made.append(token)
        text = self._transcript.push(token)
        update = self._updates.update(self.stream_id, self._token_changes)
        update.tokens.append(token)
        if logprob is not None:
            append_logprob(update.logprobs, logprob)
        if not self._started:
            self._started = True
            text = self._replayed + text
            if self._report is not None:
                held = self._decode_local * self._parts.served.layout.block_tokens
                update.prefill.CopyFrom(report_to_proto(self._report._replace(decode_local_tokens=held)))
            if prompt_logprobs is not None:
                prompt_logprobs.put(update.prompt_logprobs)
        if text:
            update.text += text
        finish = self._transcript.finish
        if finish is None:
            return True
        self._last_update(update, finish)
        return False

    def _advanced(self, token: int) -> bool:
        """Takes a token from the engine's loop: the KV of all tokens before it is in the pool."""
        member = self._member
        if member is not None and member.slot.position % self._parts.served.layout.block_tokens == 0:
            self._publish_block(member.slot.position // self._parts.served.layout.block_tokens - 1)
        return self._take(token, None if member is None else member.logprob)

    def _publish_block(self, index: int) -> None:
        """Publishes the block at this index of the table, which is full of tokens, generated ones at its end."""
        prompt, layout = self._prompt, self._parts.served.layout
        (self._last_key,) = chain_block_keys(self._last_key, bytes(self._tail), layout.block_tokens)
        self._tail.clear()
        made = [self._last_key]
        self._keys += made
        if self._reservation is not None and prompt.shares:
            self._publish(self._reservation.table, made, index)
            self._parts.storage.offer(made, self._runs, prompt.request_class, index)

    def _publish(self, table: list[int], keys: list[BlockKey], first: int) -> None:
        """Publishes between steps, or before the first: nothing reads the blocks whose places others take."""
        after = self._keys[first - 1] if first else None
        self._parts.cache.release(self._parts.cache.publish(table, keys, self._traits, first, after))

    def _failed(self, error: Exception) -> None:
        self.abort.fire(error if isinstance(error, PinyonError) else Internal("the engine failed on this request"))

    # -- the end

    def _end(self, error: PinyonError) -> None:
        if self.ended.done():
            return
        update = self._updates.update(self.stream_id)
        cancelled = isinstance(error, Cancelled)
        if not cancelled:
            update.error.CopyFrom(error_to_proto(error))
        self._last_update(update, FinishReason.CANCELLED if cancelled else FinishReason.ERROR)

    def _last_update(self, update: worker_pb2.StreamUpdate, reason: FinishReason) -> None:
        update.finish_reason = finish_reason_to_proto(reason)
        prompt = len(self.order.prompt.tokens) - self.order.prompt.sample_index
        usage = update.usage
        usage.prompt_tokens = prompt
        usage.completion_tokens = self._transcript.count
        report = self._report
        if report is not None:
            usage.cached_local_tokens = report.local_tokens
            usage.cached_peer_tokens = report.peer_tokens
            usage.cached_store_tokens = report.store_tokens
            # A resumed request reuses generated tokens, too, which are not part of the client's prompt.
            usage.cached_tokens = min(prompt, report.reused_tokens)
        self.ended.set_result(None)
        self._turn_over()
        self._on_end()
        self._parts.ledger.decode_ended(self._prompt.request_id)
        self._observer.request_ended(reason)

    def _turn_over(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    async def _clean_up(self) -> None:
        parts = self._parts
        if self._waiting is not None:
            parts.cache.withdraw(self.number, self._waiting)
        if self._member is not None:
            parts.members.remove_decode(self._member)
            await parts.engine_loop.step_over()
        if self._job is not None and not self._job.done.done():
            self._prefills.cancel(self._job, self.abort.error or Cancelled("the request ended"))
            await asyncio.wait((self._job.done,))
        if self._remote is not None:
            try:
                await self._peers.settle(self._remote)
            except TransferError:
                _log.error(
                    "blocks stay unused: a peer may still write to them", extra={"request_id": self._prompt.request_id}
                )
                parts.cache.end(self.number, ())
                return
        if self._reservation is not None:
            parts.cache.end(self.number, self._reservation.table)
