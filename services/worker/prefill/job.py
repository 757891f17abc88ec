"""A prompt from the queue to its first token: room, reused blocks, computing in chunks, sending.

The job's owner gets ``done`` exactly once. From then on the job touches no memory of its owner (blocks of this
instance) and sends nothing more to the target. What was sent may still arrive there until the target revokes its key.
The job's own blocks are released at the end of ``run``, which waits for a step that may still touch them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pinyon.batching import BatchRequest, LayerHook, Prompt, PromptQueue, TokenCounts
from pinyon.core.errors import Internal, PinyonError, ResourceExhausted
from pinyon.core.orders import PrefillOrder, PrefillReport
from pinyon.eviction import Traits, Use
from pinyon.messages.logprobs import SentLogprobs
from pinyon.messages.orders import FirstToken, PushTarget
from pinyon.paging import Reservation
from pinyon.runtime.logging import get_logger
from pinyon.runtime.telemetry import Span
from services.worker.instance.parts import Parts
from services.worker.instance.step_members import PrefillMember
from services.worker.kv.arrivals import LayerLost
from services.worker.kv.fetch import Fetched, SpanRead, WantedBlocks
from services.worker.kv.push import Push, SendingFailed
from services.worker.kv.swaps import Swapping
from services.worker.orders.abort import Abort

STOP_GRACE_S = 2.0
"""Writes under way are short, and cutting them off costs the target's other transfers a reconnect."""

_log = get_logger("prefill")


class PrefillJob:
    """A prompt either for a ``target``, a decode instance elsewhere, or in ``owned`` blocks of a request here.

    When the job told the queue something that may let other prompts start, it calls ``wake``."""

    def __init__(
        self,
        parts: Parts,
        queue: PromptQueue,
        wake: Callable[[], None],
        prompt: Prompt,
        order: PrefillOrder,
        target: PushTarget | None,
        owned: Reservation | None,
    ) -> None:
        self.prompt = prompt
        self.order = order
        self.abort = Abort()
        self.done: asyncio.Future[FirstToken] = asyncio.get_running_loop().create_future()
        self._parts = parts
        self._queue = queue
        self._wake = wake
        self._target = target
        self._owned = owned
        self._reservation = owned
        self._number = 0
        """The number under which it has blocks of its own."""
        self._push: Push | None = None
        self._behind: asyncio.Future[None] | None = None
        """Done when no other prompt computes the blocks that it needs next."""
        self._finishing: asyncio.Task[None] | None = None
        self._layered: SpanRead | None = None
        self._swapping: Swapping | None = None
        """The copies that the present chunk waits for."""
        self._complete = 0
        """The number of leading reused blocks that were here when computing began."""
        self._member: PrefillMember | None = None
        self._computed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._prompt_logprobs: SentLogprobs | None = None
        self._compute_s = 0.0
        self._told_begun = False
        self._duplicates: list[int] = []
        """Blocks that others have replaced in the table."""
        self._published = 0
        self._position = 0
        """The number of tokens computed or reused, as the queue knows it."""
        self._reusable = order.keys[: prompt.reusable]
        self._traits = Traits.of(order.request_class)
        self._runs = parts.storage.new_runs()

    @property
    def pushing(self) -> bool:
        return self._push is not None

    async def run(self) -> None:
        """Runs all phases after the queue. Never raises; ``done`` has the outcome."""
        first: FirstToken | None = None
        error: PinyonError = Internal("the prefill ended unexpectedly")
        with self._parts.telemetry.span(
            "prefill", self.order.traceparent, request_id=self.order.request_id, tokens=len(self.order.tokens)
        ) as span:
            span.classify(self.order.request_class)
            try:
                first = await self._phases(span)
            except PinyonError as failure:
                error = failure
                span.error(failure)
            except Exception as failure:
                _log.exception("a prefill failed", extra={"request_id": self.order.request_id})
                span.error(failure)
            finally:
                try:
                    await self._stop_sending()
                    if self._owned is None:
                        self.finish(first, error)  # before the step is over, which may take long
                    await self._clean_up()
                finally:
                    self.finish(first, error)

    def _tell_begun(self) -> None:
        """Reports the beginning to the conductor, once: prompts that end without it count as cancelled or failed."""
        if not self._told_begun:
            self._told_begun = True
            self._parts.ledger.prefill_begun(self.order.request_id)

    def go_on(self) -> None:
        """Ends the waiting for blocks that another prompt computes."""
        if self._behind is not None and not self._behind.done():
            self._behind.set_result(None)

    def finish(self, first: FirstToken | None, error: PinyonError) -> None:
        if self.done.done():
            return
        ended = "computed" if first is not None else error.message
        _log.debug("prompt: %s", ended, extra={"request_id": self.order.request_id})
        if first is not None:
            self.done.set_result(first)
        else:
            self.done.set_exception(error)
            self.done.exception()  # an owner that went away does not look

    # -- phases

    async def _phases(self, span: Span) -> FirstToken:
        parts, order = self._parts, self.order
        self.abort.check()
        queue_s = parts.clock() - self.prompt.arrived_s
        reservation = await self._reserve()
        self._queue.reserved(self.prompt.number)
        while self._queue.held_back(self.prompt.number):
            self._behind = asyncio.get_running_loop().create_future()
            await self.abort.wait(self._behind)
            parts.cache.extend(reservation, self._reusable, self._traits)
        local = reservation.held
        parts.storage.reused(self._reusable[:local], reservation.table, self._runs, order.request_class)
        fetched = await self._fetch(reservation, span)
        try:
            token = await self._compute(reservation, local)
        except LayerLost as error:
            _log.info("%s: computing it instead", error.message, extra={"request_id": order.request_id})
            await self._forget_layers(reservation, local)
            fetched = Fetched(fetched.start_s, begun_s=fetched.begun_s)
            token = await self._compute(reservation, local)
        pushed_from = parts.clock()
        if self._push is not None:
            await self._finish_push(self._push)
        block_tokens = parts.served.layout.block_tokens
        report = PrefillReport(
            prefill_instance_id=parts.served.instance_id,
            queue_ms=1e3 * queue_s,
            fetch_ms=1e3 * fetched.seconds,
            compute_ms=1e3 * self._compute_s,
            push_ms=1e3 * (parts.clock() - pushed_from),
            computed_tokens=len(order.tokens) - reservation.held * block_tokens,
            local_tokens=local * block_tokens,
            peer_tokens=fetched.peer_blocks * block_tokens,
            store_tokens=fetched.store_blocks * block_tokens,
        )
        for part in ("queue", "fetch", "compute", "push"):
            span.set(f"{part}_s", getattr(report, f"{part}_ms") / 1e3)
        span.set("computed_tokens", report.computed_tokens)
        span.set("reused_tokens", report.reused_tokens)
        self._tell_begun()  # a prompt of one chunk was not reported while it was computed
        parts.ledger.prefill_measured(report, fetched.bytes, fetched.measured())
        logprob = None if self._member is None else self._member.logprob
        return FirstToken(token, report, logprob, self._prompt_logprobs)

    async def _reserve(self) -> Reservation:
        cache = self._parts.cache
        if self._owned is not None:
            cache.extend(self._owned, self._reusable, Use.of(self.order.request_class).traits)
            return self._owned
        self._number = number = cache.number()
        waiting = cache.reserve(self._ask(number))
        full = ResourceExhausted("no KV memory free for the prompt", field="prefill_instance", retry_after_s=1)
        late = not waiting.done()
        if late:
            self._queue.waits_for_room(self.prompt.number)
            self._wake()
        try:
            self._reservation = await self.abort.wait(waiting, full, self._parts.limits.room_timeout_s)
        except BaseException:
            cache.withdraw(number, waiting)
            raise
        finally:
            if late:
                self._queue.has_room(self.prompt.number)
                self._wake()
        return self._reservation

    def _ask(self, number: int) -> BatchRequest:
        order = self.order
        return BatchRequest(
            number,
            len(order.tokens),
            self._parts.served.layout.blocks_for(len(order.tokens)),
            tuple(order.keys),
            self.prompt.reusable,
            decodes=False,
            arrived_s=self._parts.clock(),
            traits=Use.of(order.request_class).traits,
        )

    async def _fetch(self, reservation: Reservation, span: Span) -> Fetched:
        """Fetches blocks from elsewhere, as far as they arrive in time; the rest is computed."""
        parts, order = self._parts, self.order
        first = reservation.held
        if order.no_reuse or not (order.fetches or order.ask_store) or first >= len(self._reusable):
            return Fetched()
        await self.abort.wait(parts.cache.settled(reservation.table[first:]))
        wanted = WantedBlocks(order, self._reusable, reservation.table, self.abort, span.traceparent)
        fetched = await parts.fetcher.fetch(wanted, first)
        reservation.held = first + fetched.blocks
        self._layered = fetched.layered
        return fetched

    async def _forget_layers(self, reservation: Reservation, local: int) -> None:
        """Returns to the blocks held here, with no transfer under way in either direction."""
        parts = self._parts
        if self._layered is not None:
            parts.fetcher.lost(self._layered)
            await self._layered.stop()
            self._layered = None
        if self._push is not None:
            push, self._push = self._push, None
            if not await push.stop(STOP_GRACE_S):  # late writes would overwrite KV that is sent again
                raise SendingFailed("sending KV to the decode instance failed")
        reservation.held = local
        self._computed = asyncio.get_running_loop().create_future()

    def _start_push(self, reservation: Reservation, complete: int) -> None:
        """Starts sending; the content of the first ``complete`` blocks is here."""
        if self._target is None:
            return
        parts = self._parts
        self._push = Push(
            parts.transfer,
            parts.region.key,
            parts.served.layout,
            reservation.table,
            self._target,
            parts.limits.push_timeout_s,
        )
        self._push.blocks(0, complete)

    async def _compute(self, reservation: Reservation, local: int) -> int:
        """Returns the first token; the KV of the first ``reservation.held`` blocks is reused.

        Raises :class:`LayerLost` if reused KV that was under way did not come. The engine runs nothing for this job
        then."""
        order, layered = self.order, self._layered
        cache = self._parts.cache
        complete = cache.ready(reservation.table[: reservation.held - (0 if layered is None else layered.blocks)])
        start = reservation.held * self._parts.served.layout.block_tokens
        self._advance_to(start)
        self._complete = complete
        self._start_push(reservation, complete)
        self._published = local
        if layered is None:
            self._publish(start, store=False)
        if order.tells_prompt:
            self._prompt_logprobs = SentLogprobs()
        self._member = PrefillMember(
            self._queue.work(self.prompt.number, start),
            order,
            reservation.table,
            self._chunk_computed,
            self._failed,
            hooks=self._hooks if self._push is not None or layered is not None or cache.swaps is not None else None,
            counts=TokenCounts.needed(order.sampling, order.tokens, order.sample_index),
        )
        self._parts.members.add_prefill(self._member)
        self._parts.engine_loop.wake()
        token = await self.abort.wait(self._computed)
        if layered is not None:
            await self._settle_layers(layered, start)
        return token

    async def _settle_layers(self, layered: SpanRead, start: int) -> None:
        """Waits until the reader says whether the layers, which were all used, are valid."""
        await self.abort.wait(asyncio.ensure_future(asyncio.wait((layered.reading,))))
        if not layered.came:
            raise LayerLost("the lease did not cover the reused KV")
        if layered.arrivals is not None:
            # In a step with other prompts it has a share of the seconds, but the waits of all of them.
            self._compute_s = max(0.0, self._compute_s - layered.arrivals.stalled_s)
        self._layered = None
        self._publish(start, store=False)
        self._publish(len(self.order.tokens))

    def _hooks(self, start: int, end: int) -> tuple[LayerHook | None, LayerHook | None]:
        push, reservation = self._push, self._reservation
        arrivals = None if self._layered is None else self._layered.arrivals
        if reservation is None:
            raise RuntimeError("a prompt is computed without blocks")
        layout = self._parts.served.layout
        self._swapping = swapping = self._parts.cache.swapping([reservation.table[: layout.blocks_for(end)]])
        begins = start == reservation.held * layout.block_tokens
        first, last = self._complete * layout.block_tokens, reservation.held * layout.block_tokens
        on_layer: LayerHook | None = None
        wait_layer: LayerHook | None = None
        if push is not None:

            def on_layer(layer: int) -> None:
                push.layer(layer, start, end)

        if swapping is not None or (begins and first < last):

            def wait_layer(layer: int) -> None:
                if swapping is not None:
                    swapping.wait(layer)
                if begins and arrivals is not None:
                    arrivals.wait(layer)
                if begins and push is not None:
                    push.layer(layer, first, last)

        return wait_layer, on_layer

    def _chunk_computed(self, start: int, end: int, token: int | None, seconds: float) -> None:
        if token is None:
            self._tell_begun()
        self._compute_s += max(0.0, seconds - (0.0 if self._swapping is None else self._swapping.stalled_s))
        self._advance_to(end)
        member = self._member
        if self._prompt_logprobs is not None and member is not None and member.prompt_logprobs is not None:
            self._prompt_logprobs.add_rows(member.prompt_logprobs)  # now, as all at once would take long
            member.prompt_logprobs = None
        if self._layered is None:  # layered KV counts only when the reader has said so
            self._publish(end)
        if self._computed.done():
            return
        if self._push is not None and self._push.error is not None:
            self._failed(self._push.error)
        elif token is not None:
            self._computed.set_result(token)

    def _advance_to(self, position: int) -> None:
        self._queue.advanced(self.prompt.number, position - self._position)
        self._position = position

    def _publish(self, end: int, *, store: bool = True) -> None:
        """Publishes the whole blocks of ``[0, end)``, whose KV is in the pool: they may be reused from now on."""
        order, reservation = self.order, self._reservation
        until = min(end // self._parts.served.layout.block_tokens, len(order.keys))
        if not order.shares or reservation is None or until <= self._published:
            return
        first = self._published
        keys, after = order.keys[first:until], order.keys[first - 1] if first else None
        duplicates = self._parts.cache.publish(reservation.table, keys, self._traits, first, after)
        if self._owned is None:
            self._duplicates += duplicates  # a push may still be sending them
        else:
            self._parts.cache.release(duplicates)
        if store:  # fetched blocks are in the store, or on their way there from where they were computed
            self._parts.storage.offer(keys, self._runs, order.request_class, first)
        self._published = until
        self._queue.published(self.prompt.number, keys)
        self._wake()

    def _failed(self, error: Exception) -> None:
        if self._member is not None:
            self._parts.members.remove_prefill(self._member)
        if not self._computed.done():
            self._computed.set_exception(
                error if isinstance(error, PinyonError) else Internal("the engine failed on this prompt")
            )
            self._computed.exception()

    async def _finish_push(self, push: Push) -> None:
        self._finishing = finishing = asyncio.ensure_future(push.finish())
        try:
            await self.abort.wait(finishing)
        except PinyonError as error:
            if error is self.abort.error:
                raise  # the writes are not aborted: ``_clean_up`` waits for them
            raise SendingFailed(f"sending KV to the decode instance failed: {error.message}") from error
        self._push = None

    async def _stop_sending(self) -> None:
        """Stops sending: on return nothing of ours writes to the target any more."""
        if self._member is not None:
            self._parts.members.remove_prefill(self._member)
        if self._push is not None:
            await self._push.stop(STOP_GRACE_S)
            self._push = None
        if self._finishing is not None:
            await asyncio.wait((self._finishing,))
            self._finishing.exception()

    async def _clean_up(self) -> None:
        parts = self._parts
        if self._member is not None and not self._computed.done():
            await parts.engine_loop.step_over()
        if self._layered is not None:
            await self._layered.stop()
        if self._owned is None and self._reservation is not None:
            parts.cache.end(self._number, self._duplicates + self._reservation.table)
