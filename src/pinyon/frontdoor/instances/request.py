"""One request from its acceptance to its last token, over as many instances as that takes. No I/O.

When an instance fails, the request goes on elsewhere with its prompt and the tokens generated so far. The sampler
depends only on logits, seed and index, so with the same weights the tokens continue exactly. The new instance replays
the text from the first generated token on; text that the client has already got is dropped by length."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.block_keys import tokens_to_bytes
from pinyon.core.clock import Clock
from pinyon.core.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from pinyon.core.request import FinishReason, RequestClass, SamplingParams, Usage
from pinyon.frontdoor.failures import REGION_FIELD, REJECTED_FIELD
from pinyon.frontdoor.flight import Flight
from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.frontdoor.request_loop import TRIES_MAX
from pinyon.messages.enums import finish_reason_from_proto
from pinyon.messages.error import error_from_proto
from pinyon.messages.logprobs import check_logprobs, logprobs_after
from pinyon.messages.request_class import class_to_proto
from pinyon.messages.sampling import put_sampling
from pinyon.runtime.telemetry import Span

PREFILL_FIELD, DECODE_FIELD = "prefill_instance", "decode_instance"
"""The ``error.field`` of errors that speak against the instance that computes the prompt, or the decoding one."""

PREFILL_TIMES = ("queue_ms", "fetch_ms", "compute_ms", "push_ms")
PREFILL_TOKENS = ("computed_tokens", "local_tokens", "peer_tokens", "store_tokens", "decode_local_tokens")
"""Fields of a prefill instance's report that clients can ask for, under the same names."""

NO_LOGPROBS = common_pb2.Logprobs()
"""An empty message, which must not be changed."""

STREAM_GAP_S = 0.002
"""The minimum time between two pieces of a stream: nobody notices 2 ms, and 500 a second suffice for a reader."""
WHOLE_GAP_S = 0.1
"""A longer minimum for an answer that is sent whole: nobody waits for its parts."""

RETRY_CODES = frozenset(("UNAVAILABLE", "FAILED_PRECONDITION", "CANCELLED"))
"""The codes that justify another instance: a peer has gone, restarted, or given up a request that nobody cancelled."""

QUICK_S = 0.5
"""The time within which a refusal by an instance costs nothing, so it does not count as an attempt."""


FIXED_BYTES = 1216
"""The bytes of a submission for numbers, the kind, the fingerprint, tags and lengths, and for the additions of a retry
and a trace to its id and traceparent."""
_UTF8_MAX = 4
NO_SLO_MS = 1 << 31
MS_MAX = (1 << 31) - 1
KEYS_BYTES_MAX = 512 << 10
"""The maximum size of block keys in a message: with the longest prompt, more would not fit. Only the first are sent."""


class Terms(NamedTuple):
    """The terms of one request besides its body: its arrival, its deadline, and the client's wishes."""

    arrived_s: float
    deadline_s: float
    whole: bool = False
    """True if the client gets the answer in one piece."""
    no_reuse: bool = False
    """True if the prompt must be computed anew."""
    ttft_slo_ms: int = 0
    """The time within which the first token must come; 0: within the conductor's SLO."""
    traceparent: str = ""
    """The trace that the request belongs to."""


class Delta:
    """The news of a request for its client."""

    __slots__ = ("logprobs", "text", "tokens")

    def __init__(self, text: str, tokens: Sequence[int], logprobs: common_pb2.Logprobs = NO_LOGPROBS) -> None:
        self.text = text
        self.tokens = tokens
        self.logprobs = logprobs
        """The log-probabilities of ``tokens``, if requested. Never changed: they may be part of a received message."""


Take = Callable[[Delta], Awaitable[None] | None]
"""A function that gets each delta in the request's task. While the client is behind, it returns what to await."""


class Request(Flight):
    """The state of one request on instances of pinyon."""

    __slots__ = (
        "_drop_chars", "_drop_tokens", "_failed_lbs", "_failing_since_s", "_held", "_held_logprobs", "_sent_chars",
        "_submitted_s", "_usage", "block_keys", "class_message", "fingerprint", "finish_reason",
        "first_token_s", "gap_s", "lb", "listener", "lost", "model", "placed_by", "placed_s", "placement", "prefill",
        "prompt_logprobs", "reached", "region", "request_class", "resumed", "sampling", "take", "terms", "texts_bytes",
        "tokens", "tokens_le32", "whole",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        model: str,
        request_class: RequestClass,
        tokens_le32: bytes,
        block_keys: bytes,
        sampling: SamplingParams,
        terms: Terms,
    ) -> None:
        """Takes a client's checked request; nobody changes these values. ``block_keys`` are packed, and empty if the
        layout is unknown."""
        wanted = len(tokens_le32) // 4 + sampling.max_tokens
        super().__init__(name, terms.traceparent, terms.arrived_s, terms.deadline_s, wanted, request_class.priority)
        self.model, self.request_class, self.sampling, self.terms = model, request_class, sampling, terms
        self.tokens_le32, self.block_keys = tokens_le32, block_keys
        whose = request_class
        texts = [name, model, terms.traceparent, whose.session, whose.user, whose.tenant, whose.cache_salt]
        texts += whose.geographies
        self.texts_bytes = _UTF8_MAX * len("".join(texts)) + 4 * len(texts)
        """The maximum size of the texts in a message."""
        self.whole = terms.whole
        self.gap_s = WHOLE_GAP_S if terms.whole else STREAM_GAP_S
        self.listener: Callable[[str], bool] | None = None
        """A function that takes new text at once and returns True, or else returns False. The receiver of deltas sets
        it once it needs only text."""
        self.take: Take | None = None
        """The receiver of deltas, while the request runs."""
        self.placed_s = 0.0
        self.first_token_s = 0.0
        self.region: str = ""
        """The region that has the present attempt; empty for this region."""
        self.lb: str = ""
        """The load balancer in that region."""
        self.tokens: list[int] = []
        self.fingerprint = ""
        """The fingerprint of the weights that generated ``tokens``; empty if unknown."""
        self.placement: common_pb2.Placement | None = None
        self.placed_by: ConductorCluster | None = None
        """The placement of the next or the present attempt, and the cluster whose conductor made it, even if the
        cluster is given back meanwhile. Another region places an attempt itself."""
        self.prefill: worker_pb2.PrefillReport | None = None
        self.prompt_logprobs = NO_LOGPROBS
        """The log-probabilities of the prompt's tokens from the second one on, if requested. They come with the first
        token and stay in wire form, as there may be hundreds of thousands."""
        self.finish_reason: FinishReason | None = None
        self.reached = False
        """True if the last attempt's instance could be reached."""
        self.lost = False
        """True if the instance went away while it had the request; the request may be to blame."""
        self._failed_lbs: set[str] = set()
        self._usage: common_pb2.Usage | None = None
        self._held: list[str] = []
        self._held_logprobs = common_pb2.Logprobs()
        self._failing_since_s: float | None = None
        self._submitted_s = 0.0
        self.class_message = class_to_proto(request_class)
        """The request's class as a message, for the conductor and for the worker."""
        self.resumed = 0
        """The number of ``tokens`` that are part of the present attempt's prompt."""
        self._sent_chars = 0
        self._drop_chars = 0
        self._drop_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens_le32) // 4

    @property
    def size_bytes(self) -> int:
        """The maximum size in a message, without the placement and tokens that were generated already."""
        prompt = len(self.tokens_le32) + len(self.block_keys)
        return prompt + self.texts_bytes + self.sampling.list_bytes + FIXED_BYTES

    def traced(self, span: Span) -> None:
        span.classify(self.request_class)
        super().traced(span)

    @property
    def outcome(self) -> str:
        return "" if self.finish_reason is None else self.finish_reason.value

    @property
    def attempt_id(self) -> str:
        return self.name if not self.tries else f"{self.name}~{self.tries}"

    def begin_attempt(self, now_s: float, lb: str = "", region: str = "") -> None:
        """Begins an attempt by the ``placement``, or without one at the load balancer ``lb`` of another region."""
        # At least one token must be left to generate; if the last one is known already, it is generated again. Another
        # region does so by itself, and finds out which tokens are new.
        self.resumed = min(len(self.tokens), self.sampling.max_tokens - (0 if lb else 1))
        self.lb, self.region = lb, region
        self._drop_chars = self._sent_chars
        self._drop_tokens = len(self.tokens) - self.resumed
        self.tries += 1
        if lb:
            self.placement = None
        self.placed_s = self.placed_s or now_s
        self._submitted_s = now_s
        self.error = None
        self.reached = self.lost = False

    def fold(self, update: worker_pb2.StreamUpdate, now_s: float) -> Delta:
        """Takes one update and returns its news. Sets ``finish_reason`` or ``error`` if it was the attempt's last one.

        Raises :class:`Internal` if it lacks the log-probabilities that were requested."""
        text, tokens = update.text, update.tokens[:]
        logprobs = self._logprobs(update) if tokens and self.sampling.logprobs >= 0 else NO_LOGPROBS
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
        """Gives the text of updates, none of them the last, to the ``listener`` and folds the updates. Returns False if
        the listener did not take the text; then nothing has changed."""
        listener = self.listener
        if listener is None or self._drop_chars or self._drop_tokens:
            return False
        text = updates[0].text if len(updates) == 1 else "".join([update.text for update in updates])
        if text and not listener(text):
            return False
        if self.sampling.logprobs >= 0 or self.prefill is None or not (self.first_token_s and self.fingerprint):
            for update in updates:
                self.fold(update, clock())
            return True
        for update in updates:  # only the folding is left
            self.tokens += update.tokens
        self._failing_since_s = None
        self._sent_chars += len(text)
        return True

    def _logprobs(self, update: worker_pb2.StreamUpdate) -> common_pb2.Logprobs:
        """Returns the log-probabilities of an update's tokens; keeps those of the prompt."""
        sampling = self.sampling
        try:
            check_logprobs(update.logprobs, len(update.tokens))
            if sampling.prompt_logprobs and not self.tokens:
                check_logprobs(update.prompt_logprobs, self.prompt_tokens - 1)
                # a copy, as a part of a message keeps the whole message alive
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
        """The target that the last attempt's error speaks against; None if another target would answer the same."""
        error, placement = self.error, self.placement
        if self.lb and error is not None:
            is_its = error.grpc_code in RETRY_CODES or error.field in (REGION_FIELD, REJECTED_FIELD)
            return self.lb if is_its else None
        if error is None or placement is None or not (self.found_full or error.grpc_code in RETRY_CODES):
            return None
        return placement.prefill_instance_id if error.field == PREFILL_FIELD else placement.decode_instance_id

    @property
    def refused(self) -> bool:
        """True if the other region has not taken the request: that costs nothing, and another target may take it."""
        return bool(self.lb) and self.error is not None and self.error.field == REGION_FIELD

    @property
    def failed_instances(self) -> set[str]:
        """The instances that failed the request and are still excluded, without load balancers."""
        return self.exclude - self._failed_lbs

    @property
    def found_full(self) -> bool:
        """True if the last attempt met an instance without room: another one may have some."""
        error = self.error
        return isinstance(error, ResourceExhausted) and error.field in (PREFILL_FIELD, DECODE_FIELD)

    def retry(self, attempts: int, patience_s: float, now_s: float, *, leaving: bool = False) -> bool:
        """Returns whether another attempt is worthwhile after ``error``; if so, excludes the failed instance.

        ``attempts`` limits costly attempts: those whose instance was ``lost``, had generated tokens, or failed slowly.
        Any number of instances that were not ``reached``, or refused at once, are passed over for ``patience_s``
        without a token. So are instances that gave up because they were ``leaving``."""
        failed = self.failed_instance
        if failed is None:
            return False
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if self.refused:  # the region may have room soon; until then, it counts as full for all requests
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

    # -- messages to a conductor and to a worker

    def schedule_message(
        self, exclude: Collection[str] = (), block_keys: bytes | None = None
    ) -> conductor_pb2.ScheduleRequest:
        """Returns the conductor's message. ``exclude`` is added to the failed instances; ``block_keys`` replaces the
        request's own keys if the conductor's instances use others.

        Each attempt has its own id, so that late reports about one do not end another."""
        return conductor_pb2.ScheduleRequest(
            request_id=self.attempt_id,
            model=self.model,
            request_class=self.class_message,
            prompt_tokens=self.prompt_tokens,
            block_keys=(self.block_keys if block_keys is None else block_keys)[:KEYS_BYTES_MAX],
            max_tokens=self.sampling.max_tokens,
            # The client of a request that failed elsewhere has waited already: better late than rejected.
            ttft_slo_ms=NO_SLO_MS if self.tries else self.terms.ttft_slo_ms,
            tbt_slo_ms=NO_SLO_MS if self.tries else 0,
            exclude_instance_ids=sorted(self.failed_instances.union(exclude)),
            no_reuse=self.terms.no_reuse or (self.sampling.prompt_logprobs and not self.tokens),
            traceparent=self.traceparent,
        )

    def schedule_bytes(self, exclude: Collection[str] = ()) -> int:
        """Returns the maximum size of :meth:`schedule_message`; ``exclude`` includes the failed instances."""
        names = sum([4 * len(name) + 4 for name in exclude]) if exclude else 0
        return min(KEYS_BYTES_MAX, len(self.block_keys)) + self.texts_bytes + names + FIXED_BYTES

    def fill(
        self, message: worker_pb2.Submission, attempt_id: str, send_keys: bool, fingerprint: str, now_s: float
    ) -> None:
        """Writes the present attempt straight into a message that will be sent, as prompts are too large to copy.

        ``fingerprint`` names the weights that the instance should have, unless earlier tokens decide that."""
        if not self.tokens:
            self.fingerprint = fingerprint
        message.request_id = attempt_id
        message.model = self.model
        message.request_class.CopyFrom(self.class_message)
        if self.resumed:
            message.prompt_tokens_le32 = self.tokens_le32 + tokens_to_bytes(self.tokens[: self.resumed])
            message.generated_tokens = self.resumed
        else:
            message.prompt_tokens_le32 = self.tokens_le32
            if send_keys and len(self.block_keys) <= KEYS_BYTES_MAX:
                message.block_keys = self.block_keys
        put_sampling(message.sampling, self.sampling)
        slo_ms, placement = self.terms.ttft_slo_ms, self.placement
        if placement is not None:
            message.placement.CopyFrom(placement)
            slo_ms = placement.ttft_slo_ms
        if self.tokens:
            message.sampling.prompt_logprobs = False  # the client has got them with the first token
        elif slo_ms:
            message.ttft_left_ms = max(-MS_MAX, slo_ms - round((now_s - self.arrived_s) * 1e3))
        message.timeout_ms = max(1, round((self.deadline_s - now_s) * 1e3))
        message.traceparent = self.traceparent
        message.no_reuse = self.terms.no_reuse
        message.model_fingerprint = self.fingerprint

    # -- deltas held back from the client

    def hold(self, delta: Delta) -> None:
        """Keeps a delta until the answer is whole."""
        self._held.append(delta.text)
        if delta.logprobs is not NO_LOGPROBS:
            self._held_logprobs.MergeFrom(delta.logprobs)

    def held(self) -> Delta:
        """Returns the kept deltas as one."""
        return Delta("".join(self._held), self.tokens, self._held_logprobs)

    def start_over(self) -> None:
        """Forgets the generated tokens, which the client has not seen, as no instance could continue them."""
        self.tokens = []
        self.fingerprint = ""
        self.prefill, self.prompt_logprobs = None, NO_LOGPROBS
        self._held.clear()
        self._held_logprobs.Clear()
        self._sent_chars = self.resumed = 0

    @property
    def used_tokens(self) -> int:
        """The tokens of prompt and generation that instances were asked for."""
        return self.prompt_tokens + len(self.tokens) if self.tries else 0

    def usage(self) -> Usage:
        """Returns the usage of the whole request, over all attempts."""
        said = self._usage
        prompt = self.prompt_tokens
        if said is None:
            return Usage(prompt, len(self.tokens), 0)
        completion = said.completion_tokens if self.tries == 1 else len(self.tokens)
        return Usage(prompt, completion, min(said.cached_tokens, prompt))

    def usage_message(self) -> common_pb2.Usage:
        """Returns the usage, with the sources of the cached tokens."""
        usage, message = self.usage(), common_pb2.Usage()
        if self._usage is not None:
            message.CopyFrom(self._usage)
        message.prompt_tokens, message.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        message.cached_tokens = usage.cached_tokens
        return message

    def report(self, now_s: float) -> dict[str, object]:
        """Returns the facts for ``x-pinyon-report``: where the request ran, what was reused, and the times in ms."""
        placement = self.placement or common_pb2.Placement()
        prefill = self.prefill or worker_pb2.PrefillReport()
        return {
            "request_id": self.name,
            "policy": placement.policy,
            "prefill_instance": prefill.prefill_instance_id or placement.prefill_instance_id,
            "decode_instance": placement.decode_instance_id,
            **({"region": self.region} if self.region else {}),
            "attempts": self.tries,
            "lb_ms": round((self.placed_s - self.arrived_s) * 1e3, 3),
            **{name: round(getattr(prefill, name), 3) for name in PREFILL_TIMES},
            "ttft_ms": round((self.first_token_s - self.arrived_s) * 1e3, 3) if self.first_token_s else None,
            "total_ms": round((now_s - self.arrived_s) * 1e3, 3),
            "predicted_ttft_ms": round(placement.predicted_ttft_ms, 3),
            **{name: getattr(prefill, name) for name in PREFILL_TOKENS},
        }


def facts_of(requests: Sequence[Request]) -> dict[str, object]:
    """Returns the facts for the access log about all requests of one call."""
    request = requests[0]
    facts: dict[str, object] = {
        "model": request.model,
        "prompt_tokens": sum([each.prompt_tokens for each in requests]),
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
