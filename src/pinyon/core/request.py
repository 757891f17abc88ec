"""What a client asks for, as plain values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from pinyon.core.errors import InvalidArgument

__all__ = [
    "GEOGRAPHIES_MAX",
    "PRIORITY_MAX",
    "TURN_MAX",
    "UNKNOWN_CLASS",
    "FinishReason",
    "RequestClass",
    "Role",
    "SamplingParams",
    "Usage",
    "check_geographies",
    "check_geography",
    "check_kind",
    "check_label",
    "check_priority",
]

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
STOP_TOKENS_MAX = 64
LOGIT_BIAS_MAX = 1024
LOGPROBS_MAX = 20
REPETITION_PENALTY_MAX = 10.0

TENANT_CHARS_MAX = 128
LABEL_CHARS_MAX = 256
TURN_MAX = 1 << 20
PRIORITY_MAX = 1000
GEOGRAPHIES_MAX = 16

_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", re.ASCII)
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_GEOGRAPHY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Role(StrEnum):
    """What an instance does: compute prompts, generate tokens, or both; or hold KV objects for others."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    STORE = "store"

    @property
    def prefills(self) -> bool:
        return self is Role.PREFILL or self is Role.MIXED

    @property
    def decodes(self) -> bool:
        return self is Role.DECODE or self is Role.MIXED


class FinishReason(StrEnum):
    """Why a generation ended: ``stop`` is EOS, a stop token or a stop string, ``length`` is max_tokens or the context's
    end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


# Not frozen, like the other two: each process makes one of each request, and what is frozen takes five times as long.
@dataclass(slots=True, unsafe_hash=True)
class SamplingParams:
    """How the next token is chosen. Nobody changes one.

    ``temperature`` 0 is greedy. Sampling is a pure function of (logits, ``seed``, index of the generated token), so a
    request that is resumed elsewhere goes on with the same tokens. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    Penalties are those of OpenAI and vLLM: ``frequency_penalty`` (for each time) and ``presence_penalty`` (once) are
    taken from the scores of tokens that were generated before; ``repetition_penalty`` divides positive scores, and
    multiplies negative ones, of tokens that are in the prompt or were generated; 1 is off. ``logit_bias`` is added to
    the scores of tokens by id. Before ``min_tokens`` no EOS, stop token or stop string ends the generation.
    ``logprobs``: how many likeliest tokens' log-probabilities are told beside each token's own, -1 none at all.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = field(default=())
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """By token id, rising, each once."""
    logprobs: int = -1
    prompt_logprobs: bool = False
    """Also of the prompt's tokens from the second one on; its KV is computed anew for that."""

    @property
    def penalised(self) -> bool:
        """The next token depends on which ones came before, beside what the model makes of them."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def __post_init__(self) -> None:
        if self.max_tokens <= 0:
            raise InvalidArgument(f"max_tokens must be at least 1, got {self.max_tokens}", field="max_tokens")
        if not 0.0 <= self.temperature <= 2.0:
            raise InvalidArgument(f"temperature must be in [0, 2], got {self.temperature}", field="temperature")
        if self.top_k < 0:
            raise InvalidArgument(f"top_k must be 0 (off) or positive, got {self.top_k}", field="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument(f"top_p must be in (0, 1], got {self.top_p}", field="top_p")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed must be an unsigned 64-bit number, got {self.seed}", field="seed")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidArgument(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", field="stop")
        for text in self.stop:
            if not text or len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise InvalidArgument(f"a stop string must have 1 to {MAX_STOP_BYTES} bytes", field="stop")
        self._check_scores()
        self._check_ends()
        if not -1 <= self.logprobs <= LOGPROBS_MAX:
            raise InvalidArgument(f"logprobs must be from 0 to {LOGPROBS_MAX}, got {self.logprobs}", field="logprobs")
        if self.prompt_logprobs and self.logprobs < 0:
            raise InvalidArgument("prompt_logprobs needs logprobs", field="prompt_logprobs")

    def _check_scores(self) -> None:
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidArgument(f"min_p must be in [0, 1], got {self.min_p}", field="min_p")
        if not 0.0 < self.repetition_penalty <= REPETITION_PENALTY_MAX:
            raise InvalidArgument(
                f"repetition_penalty must be above 0 and at most {REPETITION_PENALTY_MAX:g}, got "
                f"{self.repetition_penalty}",
                field="repetition_penalty",
            )
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise InvalidArgument(f"{name} must be in [-2, 2], got {getattr(self, name)}", field=name)
        if len(self.logit_bias) > LOGIT_BIAS_MAX:
            raise InvalidArgument(f"logit_bias must have at most {LOGIT_BIAS_MAX} tokens", field="logit_bias")
        before = -1
        for token, bias in self.logit_bias:
            if not before < token < 1 << 32 or not -100.0 <= bias <= 100.0:
                raise InvalidArgument(
                    f"logit_bias must give different token ids a number in [-100, 100], got {token}: {bias}",
                    field="logit_bias",
                )
            before = token

    def _check_ends(self) -> None:
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidArgument(
                f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}",
                field="min_tokens",
            )
        if len(self.stop_token_ids) > STOP_TOKENS_MAX or not all(0 <= token < 1 << 32 for token in self.stop_token_ids):
            raise InvalidArgument(f"stop_token_ids must be at most {STOP_TOKENS_MAX} token ids", field="stop_token_ids")


def check_kind(text: str, field: str) -> str:
    """A request's type. Raises :class:`InvalidArgument` naming ``field``, like the others here."""
    if not _KIND.fullmatch(text):
        raise InvalidArgument(
            f"{field} must be 1 to 32 letters, digits, dots, dashes and underscores, a letter or digit first",
            field=field,
        )
    return text


def check_label(text: str, field: str, limit: int = LABEL_CHARS_MAX) -> str:
    """A name that only its client understands; may be empty. Refused is what breaks logs: control characters, and what
    is no Unicode (lone surrogates)."""
    if len(text) > limit or _UNFIT.search(text):
        raise InvalidArgument(f"{field} must be at most {limit} characters, and no control characters", field=field)
    return text


def check_priority(priority: int, field: str) -> int:
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidArgument(f"{field} must be from {-PRIORITY_MAX} to {PRIORITY_MAX}", field=field)
    return priority


def check_geography(name: str, field: str) -> str:
    """One name."""
    if not _GEOGRAPHY.fullmatch(name):
        raise InvalidArgument(
            f"{field} must be a name of 1 to 64 letters, digits, dots, dashes and underscores", field=field
        )
    return name


def check_geographies(names: tuple[str, ...], field: str) -> tuple[str, ...]:
    if len(names) > GEOGRAPHIES_MAX or not all(map(_GEOGRAPHY.fullmatch, names)):
        raise InvalidArgument(
            f"{field} must be at most {GEOGRAPHIES_MAX} names of 1 to 64 letters, digits, dots, dashes and underscores",
            field=field,
        )
    return names


@dataclass(slots=True, unsafe_hash=True)
class RequestClass:
    """What kind of request it is, and whose. Said once, where the request arrives, and the same on every hop. Nobody
    changes one.

    Raises :class:`InvalidArgument` naming the attribute: everything here comes from outside and ends up in logs.
    """

    kind: str = ""
    """Its type, such as ``chat``, ``completion``, ``file``, ``search``; empty: nobody said."""
    turn: int = 1
    """The how manieth of its conversation; 1 is the first."""
    session: str = ""
    """The conversation it belongs to, as its client names it."""
    user: str = ""
    """The person or program it is for, as the client names it."""
    priority: int = 0
    """Lower goes first, from -1000 to 1000."""
    arrived_unix_s: float = 0.0
    """When it came to the front door, by that host's real-time clock in Unix seconds; 0: nobody said. To be carried and
    compared roughly, never to wait by: every process queues by a monotonic clock of its own."""
    tenant: str = ""
    """Who pays, and who never shares KV with others; empty is the public tenant."""
    geographies: tuple[str, ...] = ()
    """Where it may be served; empty: anywhere."""
    cache_salt: str = field(default="", repr=False)
    """It shares KV with requests of its tenant that have the same one, and with no others. Who does not know it cannot
    find out by timing what was asked."""
    no_store: bool = False
    """Nothing that is computed for it is kept for others, or put into the KV store."""

    @property
    def category(self) -> str:
        """Type and turn: how likely its KV is used again ("KVCache cache in the wild" §4.2); empty: unknown."""
        return f"{self.kind}/{self.turn}" if self.kind else ""

    def __post_init__(self) -> None:
        if self.kind:
            check_kind(self.kind, "kind")
        if not 1 <= self.turn <= TURN_MAX:
            raise InvalidArgument(f"turn must be from 1 to {TURN_MAX}, got {self.turn}", field="turn")
        # Three processes make one of each request, and most say nothing here.
        if self.session:
            check_label(self.session, "session")
        if self.user:
            check_label(self.user, "user")
        if self.priority:
            check_priority(self.priority, "priority")
        if not 0 <= self.arrived_unix_s < math.inf:
            raise InvalidArgument("arrived_unix_s must be a non-negative number", field="arrived_unix_s")
        if self.tenant:
            check_label(self.tenant, "tenant", TENANT_CHARS_MAX)
        if self.geographies:
            check_geographies(self.geographies, "geographies")
        if self.cache_salt:
            check_label(self.cache_salt, "cache_salt")


UNKNOWN_CLASS = RequestClass()
"""Of a request that nobody said anything of."""


@dataclass(slots=True, unsafe_hash=True)
class Usage:
    """Token counts of one finished request; nobody changes one. ``cached_tokens`` are prompt tokens whose KV was
    reused, not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
