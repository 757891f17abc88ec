"""What a client asks for, as plain values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

from pinyon.core.errors import InvalidArgument
from pinyon.core.field_kinds import Kind, Number, Switch, Texts, TokenBiases, TokenIds, Whole

LOGPROBS_MAX = 20

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


def _sampled(kind: Kind, *, of_logits: bool = False) -> dict[str, Any]:
    """``of_logits``: an engine that computes no logits cannot heed the field, and refuses it."""
    return {"kind": kind, "of_logits": of_logits}


# Not frozen, like the other two: each process makes one of each request, and what is frozen takes five times as long.
@dataclass(slots=True, unsafe_hash=True)
class SamplingParams:
    """How the next token is chosen. Nobody changes one.

    This is the table of these fields: HTTP bodies and messages are read, checked and written by it. What comes from
    outside is checked where it is read, and only what was said; here are the rules over two fields.

    ``temperature`` 0 is greedy. Sampling is a pure function of (logits, ``seed``, index of the generated token), so a
    request that is resumed elsewhere goes on with the same tokens. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    Penalties are those of OpenAI and vLLM: ``frequency_penalty`` (for each time) and ``presence_penalty`` (once) are
    taken from the scores of tokens that were generated before; ``repetition_penalty`` divides positive scores, and
    multiplies negative ones, of tokens that are in the prompt or were generated; 1 is off. ``logit_bias`` is added to
    the scores of tokens by id. Before ``min_tokens`` no EOS, stop token or stop string ends the generation.
    ``logprobs``: how many likeliest tokens' log-probabilities are told beside each token's own, -1 none at all.
    """

    max_tokens: int = field(default=16, metadata=_sampled(Whole(1)))
    temperature: float = field(default=0.0, metadata=_sampled(Number(0.0, 2.0)))
    top_k: int = field(default=0, metadata=_sampled(Whole(0)))
    top_p: float = field(default=1.0, metadata=_sampled(Number(0.0, 1.0, above=True)))
    seed: int = field(default=0, metadata=_sampled(Whole(0, (1 << 64) - 1)))
    stop: tuple[str, ...] = field(default=(), metadata=_sampled(Texts(16, 256)))
    ignore_eos: bool = field(default=False, metadata=_sampled(Switch()))
    min_p: float = field(default=0.0, metadata=_sampled(Number(0.0, 1.0), of_logits=True))
    min_tokens: int = field(default=0, metadata=_sampled(Whole(0)))
    stop_token_ids: tuple[int, ...] = field(default=(), metadata=_sampled(TokenIds(64)))
    repetition_penalty: float = field(default=1.0, metadata=_sampled(Number(0.0, 10.0, above=True), of_logits=True))
    frequency_penalty: float = field(default=0.0, metadata=_sampled(Number(-2.0, 2.0), of_logits=True))
    presence_penalty: float = field(default=0.0, metadata=_sampled(Number(-2.0, 2.0), of_logits=True))
    logit_bias: tuple[tuple[int, float], ...] = field(
        default=(), metadata=_sampled(TokenBiases(1024, 100.0), of_logits=True)
    )
    """By token id, rising, each once."""
    logprobs: int = field(default=-1, metadata=_sampled(Whole(0, LOGPROBS_MAX), of_logits=True))
    prompt_logprobs: bool = field(default=False, metadata=_sampled(Switch()))
    """Also of the prompt's tokens from the second one on; its KV is computed anew for that."""

    @property
    def penalised(self) -> bool:
        """The next token depends on which ones came before, beside what the model makes of them."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument(
                f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}",
                field="min_tokens",
            )
        if self.prompt_logprobs and self.logprobs < 0:
            raise InvalidArgument("prompt_logprobs needs logprobs", field="prompt_logprobs")

    def checked(self) -> SamplingParams:
        """Returns this. Raises :class:`InvalidArgument` if a value is beyond its limits: for whoever has not looked."""
        for each, value in zip(SAMPLING_FIELDS, _values(self), strict=True):
            if value != each.default:
                each.kind.check(each.name, value)
        return self

    def settled(self, max_tokens: int, seed: int) -> SamplingParams:
        """Returns the same with these two, which a client may leave open."""
        values = list(_values(self))
        values[_MAX_TOKENS], values[_SEED] = max_tokens, seed
        return SamplingParams(*values)

    def check_tokens(self, vocab_size: int) -> None:
        """Raises :class:`InvalidArgument` if a field names a token outside the vocabulary."""
        for each in _LISTS:
            if value := getattr(self, each.name):
                token = each.kind.highest_token(value)
                if token >= vocab_size:
                    raise InvalidArgument(
                        f"{each.name} names token {token}, which is outside the vocabulary of {vocab_size}.",
                        field=each.name,
                    )

    @property
    def list_bytes(self) -> int:
        """What its lists take in a message at most."""
        return sum([each.kind.list_bytes(getattr(self, each.name)) for each in _LISTS])


class SamplingField(NamedTuple):
    """One field of :class:`SamplingParams`."""

    name: str
    default: Any
    kind: Kind
    of_logits: bool


SAMPLING_FIELDS = tuple(
    SamplingField(each.name, each.default, each.metadata["kind"], each.metadata["of_logits"])
    for each in fields(SamplingParams)
)
NO_LIMIT: Final = 1 << 32
"""``max_tokens`` of a call that names none, until it is known how many there may be. No message can hold it."""

_NAMES = [each.name for each in SAMPLING_FIELDS]
_LISTS = [each for each in SAMPLING_FIELDS if each.default == ()]
_MAX_TOKENS, _SEED = _NAMES.index("max_tokens"), _NAMES.index("seed")
_values: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*_NAMES)


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
