"""One request from its acceptance to its last token, over as many instances as that takes. No I/O.

When an instance fails, the request goes on elsewhere with its prompt and the tokens generated so far: the sampler
depends only on logits, seed and index, so the tokens continue exactly, on the same weights. The new instance replays
the text from the first generated token on; what was handed to the client already is dropped by length.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import Internal, InvalidArgument, PinyonError, ResourceExhausted, Unavailable
from pinyon.core.request import FinishReason, Usage
from pinyon.frontdoor.failures import REGION_FIELD, REJECTED_FIELD
from pinyon.frontdoor.flight import Flight
from pinyon.frontdoor.instances.ask import Ask
from pinyon.frontdoor.instances.clusters import Cluster
from pinyon.frontdoor.request_loop import TRIES_MAX
from pinyon.messages.error import error_from_proto
from pinyon.messages.finish_reason import finish_reason_from_proto
from pinyon.messages.logprobs import check_logprobs, logprobs_after
from pinyon.messages.request_class import class_to_proto
from pinyon.runtime.telemetry import Span

PREFILL_FIELD, DECODE_FIELD = "prefill_instance", "decode_instance"
"""``error.field`` when it speaks against the instance that computes the prompt, or the one that decodes."""

NO_LOGPROBS = common_pb2.Logprobs()
"""Not to be changed."""

STREAM_GAP_S = 0.002
"""Least time between two pieces of a stream: nobody sees 2 ms, and 500 pieces a second are enough for one reader."""
WHOLE_GAP_S = 0.1
"""The same for an answer that is sent whole: nobody waits for its parts."""

RETRY_CODES = frozenset(("UNAVAILABLE", "FAILED_PRECONDITION", "CANCELLED"))
"""Worth another instance: a peer is gone, a restarted one took its address, or it gave up what nobody cancelled."""

QUICK_S = 0.5
"""An instance that refuses sooner than this has cost nothing: that is no attempt."""


class Delta:
    """What is new for the client."""

    __slots__ = ("logprobs", "text", "tokens")

    def __init__(self, text: str, tokens: Sequence[int], logprobs: common_pb2.Logprobs = NO_LOGPROBS) -> None:
        self.text = text
        self.tokens = tokens
        self.logprobs = logprobs
        """Of ``tokens``, if they were asked for. Never changed: it may be a part of what arrived."""


Take = Callable[[Delta], Awaitable[None] | None]
"""Is handed what is new for a client, in the request's task. While the client is behind it says what to await."""


class Request(Flight):
    """State of one request on instances of pinyon."""

    __slots__ = (
        "_drop_chars",
        "_drop_tokens",
        "_failed_lbs",
        "_failing_since_s",
        "_held",
        "_held_logprobs",
        "_sent_chars",
        "_submitted_s",
        "_usage",
        "ask",
        "chosen",
        "class_message",
        "fingerprint",
        "finish_reason",
        "first_token_s",
        "gap_s",
        "lb",
        "listener",
        "lost",
        "placed_by",
        "placed_s",
        "placement",
        "prefill",
        "prompt_logprobs",
        "reached",
        "region",
        "resumed",
        "take",
        "tokens",
        "whole",
    )

    def __init__(self, ask: Ask, arrived_s: float, deadline_s: float, whole: bool = False) -> None:
        wanted = ask.prompt_tokens + ask.sampling.max_tokens
        super().__init__(
            ask.request_id, ask.wishes.traceparent, arrived_s, deadline_s, wanted, ask.request_class.priority
        )
        self.ask = ask
        self.whole = whole
        """The client gets the answer in one piece."""
        self.gap_s = WHOLE_GAP_S if whole else STREAM_GAP_S
        self.listener: Callable[[str], bool] | None = None
        """Takes new text at once, if it can: False, and it was not taken. Set by whoever takes what the dispatcher
        hands on, once it needs only the text of what is to come."""
        self.take: Take | None = None
        """Takes what is new for the client, while it runs."""
        self.placed_s = 0.0
        self.first_token_s = 0.0
        self.region: str = ""
        """Another region that has the present attempt."""
        self.lb: str = ""
        """The load balancer there."""
        self.tokens: list[int] = []
        self.fingerprint = ""
        """Of the weights that generated ``tokens``; empty: not known."""
        self.chosen: common_pb2.Placement | None = None
        self.placed_by: Cluster | None = None
        """Where the next attempt runs, or the present one: the placement, and the cluster whose conductor made it. It
        stays that one's, though the cluster may be given back meanwhile."""
        self.placement: common_pb2.Placement | None = None
        """Of the present one."""
        self.prefill: worker_pb2.PrefillReport | None = None
        self.prompt_logprobs = NO_LOGPROBS
        """Of the prompt's tokens from the second one on, if they were asked for; they come with the first token. As
        they travel: there may be hundreds of thousands."""
        self.finish_reason: FinishReason | None = None
        self.reached = False
        """The last attempt's instance was there."""
        self.lost = False
        """It went away while it had the request, which may be to blame."""
        self._failed_lbs: set[str] = set()
        self._usage: common_pb2.Usage | None = None
        self._held: list[str] = []
        self._held_logprobs = common_pb2.Logprobs()
        self._failing_since_s: float | None = None
        self._submitted_s = 0.0
        self.class_message = class_to_proto(ask.request_class)
        """As it travels, to the conductor and to the worker."""
        self.resumed = 0
        """Of ``tokens``: so many are in the present attempt's prompt."""
        self._sent_chars = 0
        self._drop_chars = 0
        self._drop_tokens = 0

    @property
    def finished(self) -> bool:
        """It has its ``finish_reason``."""
        return self.finish_reason is not None

    @property
    def over(self) -> bool:
        """The last attempt is: there is a ``finish_reason``, or an ``error``."""
        return self.finish_reason is not None or self.error is not None

    def traced(self, span: Span) -> None:
        span.classify(self.ask.request_class)
        super().traced(span)

    @property
    def outcome(self) -> str:
        return "" if self.finish_reason is None else self.finish_reason.value

    @property
    def attempt_id(self) -> str:
        return self.name if not self.tries else f"{self.name}~{self.tries}"

    def begin_attempt(
        self, placement: common_pb2.Placement | None, now_s: float, lb: str = "", region: str = ""
    ) -> None:
        """The request was placed: it begins, or goes on, there. Without a placement, at the load balancer of another
        region."""
        # At least one token must be left to generate; if the last one is known already it is simply generated again.
        # Another region sees to that by itself, and to what of it is new.
        self.resumed = min(len(self.tokens), self.ask.sampling.max_tokens - (0 if lb else 1))
        self.lb, self.region = lb, region
        self._drop_chars = self._sent_chars
        self._drop_tokens = len(self.tokens) - self.resumed
        self.tries += 1
        self.placement = placement
        self.placed_s = self.placed_s or now_s
        self._submitted_s = now_s
        self.error = None
        self.reached = self.lost = False

    def fold(self, update: worker_pb2.StreamUpdate, now_s: float) -> Delta:
        """Take one update. ``finish_reason`` or ``error`` is set if it was the attempt's last one.

        Raises :class:`Internal` if it has not the log-probabilities that were asked for.
        """
        text, tokens = update.text, update.tokens[:]
        logprobs = self._logprobs(update) if tokens and self.ask.sampling.logprobs >= 0 else NO_LOGPROBS
        if self._drop_chars and text:
            dropped = min(self._drop_chars, len(text))
            self._drop_chars -= dropped
            text = text[dropped:]
        if self._drop_tokens and tokens:
            dropped = min(self._drop_tokens, len(tokens))
            self._drop_tokens -= dropped
            tokens = tokens[dropped:]
            if logprobs is not NO_LOGPROBS:
                logprobs = logprobs_after(logprobs, dropped) if tokens else NO_LOGPROBS
        if update.model_fingerprint and not self.fingerprint:
            self.fingerprint = update.model_fingerprint
        if tokens:
            if not self.first_token_s:
                self.first_token_s = now_s
            self.tokens += tokens
            self._failing_since_s = None
        self._sent_chars += len(text)
        if update.HasField("prefill") and self.prefill is None:
            self.prefill = update.prefill
        if update.finish_reason:
            self._finish(update)
        return Delta(text, tokens, logprobs)

    def pass_on(self, clock: Clock, updates: Sequence[worker_pb2.StreamUpdate]) -> bool:
        """Give the text of updates that are not the last to the ``listener``, and fold them; False: it has not taken
        it, and nothing has changed."""
        listener = self.listener
        if listener is None or self._drop_chars or self._drop_tokens:
            return False
        text = updates[0].text if len(updates) == 1 else "".join([update.text for update in updates])
        if text and not listener(text):
            return False
        if self.ask.sampling.logprobs >= 0 or self.prefill is None or not (self.first_token_s and self.fingerprint):
            for update in updates:
                self.fold(update, clock())
            return True
        for update in updates:  # all that is left of it
            self.tokens += update.tokens
        self._failing_since_s = None
        self._sent_chars += len(text)
        return True

    def _logprobs(self, update: worker_pb2.StreamUpdate) -> common_pb2.Logprobs:
        """Of its tokens; those of the prompt are kept."""
        sampling = self.ask.sampling
        try:
            check_logprobs(update.logprobs, len(update.tokens))
            if sampling.prompt_logprobs and not self.tokens:
                check_logprobs(update.prompt_logprobs, self.ask.prompt_tokens - 1)
                # A copy: a part of a message keeps all of it.
                self.prompt_logprobs = common_pb2.Logprobs()
                self.prompt_logprobs.CopyFrom(update.prompt_logprobs)
        except InvalidArgument as error:
            raise Internal(f"The instance's log-probabilities are wrong: {error.message}.") from error
        return update.logprobs

    def _finish(self, update: worker_pb2.StreamUpdate) -> None:
        reason = finish_reason_from_proto(update.finish_reason)
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self.finish_reason = reason
            if update.HasField("usage"):
                self._usage = update.usage
        elif update.HasField("error"):
            self.error = error_from_proto(update.error)
        else:
            self.error = Unavailable("The instance gave the request up.")

    @property
    def failed_instance(self) -> str | None:
        """Whom the last attempt's error speaks against; None when another instance would say the same."""
        error, placement = self.error, self.placement
        if self.lb:
            return self.lb if error is not None and self._region_failed(error) else None
        if error is None or placement is None or not (self.found_full or error.grpc_code in RETRY_CODES):
            return None
        return placement.prefill_instance_id if error.field == PREFILL_FIELD else placement.decode_instance_id

    def _region_failed(self, error: PinyonError) -> bool:
        return error.grpc_code in RETRY_CODES or error.field in (REGION_FIELD, REJECTED_FIELD)

    @property
    def refused(self) -> bool:
        """The other region has not taken it: it costs nothing, and somebody else may."""
        return bool(self.lb) and self.error is not None and self.error.field == REGION_FIELD

    @property
    def failed_instances(self) -> set[str]:
        """Of those that failed it, and are not forgiven: instances, which a conductor knows."""
        return self.exclude - self._failed_lbs

    @property
    def found_full(self) -> bool:
        """The last attempt met an instance without room: another one may have some."""
        error = self.error
        return isinstance(error, ResourceExhausted) and error.field in (PREFILL_FIELD, DECODE_FIELD)

    def retry(self, attempts: int, patience_s: float, now_s: float, *, leaving: bool = False) -> bool:
        """After ``error``: whether another attempt is worthwhile; if so, the failed instance is excluded.

        ``attempts`` bounds those that cost something: instances that were ``lost``, that generated, or that failed it
        slowly. Those that were not ``reached`` or that refused it at once are passed over, as many as there are, for
        ``patience_s`` without a token; so are those that gave it up when they were ``leaving``, which is not its fault.
        """
        failed = self.failed_instance
        if failed is None:
            return False
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if self.refused:  # it may have room soon; until then it counts as full for everybody
            self._failing_since_s = None
            return self.tries < TRIES_MAX
        rejected = bool(self.lb) and self.error is not None and self.error.field == REJECTED_FIELD
        generated = len(self.tokens) > self.resumed
        slow = self.reached and now_s - self._submitted_s >= QUICK_S
        paid = self.lost or ((generated or slow) and not leaving)
        paid = paid and not rejected
        self.paid += paid
        if self.paid >= attempts or self.tries >= TRIES_MAX:
            return False
        self.exclude.add(failed)
        if self.lb:
            self._failed_lbs.add(failed)
        return paid or now_s - self._failing_since_s <= patience_s

    def go_on_after(self, tokens_le32: bytes) -> None:
        """These were generated before, in another region, where their text is known."""
        self.tokens = np.frombuffer(tokens_le32, "<u4").tolist()

    # -- what nobody has seen yet

    def hold(self, delta: Delta) -> None:
        """Keep it until the answer is whole."""
        self._held.append(delta.text)
        if delta.logprobs is not NO_LOGPROBS:
            self._held_logprobs.MergeFrom(delta.logprobs)

    def held(self) -> Delta:
        """All of it."""
        return Delta("".join(self._held), self.tokens, self._held_logprobs)

    @property
    def can_start_over(self) -> bool:
        """There are tokens, and the client has seen none of them."""
        return self.whole and bool(self.tokens)

    def start_over(self) -> None:
        """Forget what was generated: nobody is left who could go on with it."""
        self.tokens = []
        self.fingerprint = ""
        self.prefill, self.prompt_logprobs = None, NO_LOGPROBS
        self._held.clear()
        self._held_logprobs.Clear()
        self._sent_chars = self.resumed = 0

    @property
    def used_tokens(self) -> int:
        """Prompt and generation, as far as instances were asked for them."""
        return self.ask.prompt_tokens + len(self.tokens) if self.tries else 0

    def usage(self) -> Usage:
        """Of the whole request, whatever attempts it took."""
        said = self._usage
        prompt = self.ask.prompt_tokens
        if said is None:
            return Usage(prompt, len(self.tokens), 0)
        completion = said.completion_tokens if self.tries == 1 else len(self.tokens)
        return Usage(prompt, completion, min(said.cached_tokens, prompt))

    def usage_message(self) -> common_pb2.Usage:
        usage, said = self.usage(), self._usage or common_pb2.Usage()
        return common_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            cached_local_tokens=said.cached_local_tokens,
            cached_peer_tokens=said.cached_peer_tokens,
            cached_store_tokens=said.cached_store_tokens,
        )

    def report(self, now_s: float) -> dict[str, object]:
        """For ``x-pinyon-report``: where the request ran, what was reused and what took how long (ms)."""
        placement = self.placement or common_pb2.Placement()
        prefill = self.prefill or worker_pb2.PrefillReport()
        return {
            "request_id": self.ask.request_id,
            "policy": placement.policy,
            "prefill_instance": prefill.prefill_instance_id or placement.prefill_instance_id,
            "decode_instance": placement.decode_instance_id,
            **({"region": self.region} if self.region else {}),
            "attempts": self.tries,
            "lb_ms": round((self.placed_s - self.arrived_s) * 1e3, 3),
            "queue_ms": round(prefill.queue_ms, 3),
            "fetch_ms": round(prefill.fetch_ms, 3),
            "compute_ms": round(prefill.compute_ms, 3),
            "push_ms": round(prefill.push_ms, 3),
            "ttft_ms": round((self.first_token_s - self.arrived_s) * 1e3, 3) if self.first_token_s else None,
            "total_ms": round((now_s - self.arrived_s) * 1e3, 3),
            "predicted_ttft_ms": round(placement.predicted_ttft_ms, 3),
            "computed_tokens": prefill.computed_tokens,
            "local_tokens": prefill.local_tokens,
            "peer_tokens": prefill.peer_tokens,
            "store_tokens": prefill.store_tokens,
            "decode_local_tokens": prefill.decode_local_tokens,
        }


def facts_of(requests: Sequence[Request]) -> dict[str, object]:
    """Returns what the access log says of the generations that one call became."""
    request = requests[0]
    facts: dict[str, object] = {
        "model": request.ask.model,
        "prompt_tokens": sum([each.ask.prompt_tokens for each in requests]),
        "completion_tokens": sum([len(each.tokens) for each in requests]),
    }
    if len(requests) > 1:
        facts["choices"] = len(requests)
    if (placement := request.placement) is not None:
        facts["prefill"] = placement.prefill_instance_id
        facts["decode"] = placement.decode_instance_id
    if (attempts := max([each.tries for each in requests])) > 1:
        facts["attempts"] = attempts
    return facts
