"""A client's request as plain values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

from pinyon.core.errors import InvalidArgument
from pinyon.core.field_kinds import FieldKind, Number, Switch, Texts, TokenBiases, TokenIds, Whole

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
    """The work of an instance: compute prompts, generate tokens, or both; or hold KV objects for others."""

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
    """The end of a generation: ``stop`` is EOS, a stop token or string; ``length`` is max_tokens or the context's
    end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


def _sampled(kind: FieldKind, *, of_logits: bool = False) -> dict[str, Any]:
    """Returns the metadata of a sampling field. ``of_logits``: an engine without logits must refuse the field."""
    return {"kind": kind, "of_logits": of_logits}


# Not frozen, like the other two classes: each process makes an instance per request, and a frozen one takes five times
# as long.
@dataclass(slots=True, unsafe_hash=True)
class SamplingParams:
    """Parameters that choose the next token; treated as immutable.

    This is the table of these fields: HTTP bodies and messages are read, checked and written by it. Values from outside
    are checked where they are read, and only those that were given; here are the rules over two fields.

    A ``temperature`` of 0 is greedy. Sampling is a pure function of (logits, ``seed``, index of the generated token),
    so a request that is resumed elsewhere continues with the same tokens. Values of ``top_k`` 0, ``top_p`` 1 and
    ``min_p`` 0 are off.

    Penalties are those of OpenAI and vLLM. The scores of tokens that were generated before are lowered by
    ``frequency_penalty`` (for each time) and ``presence_penalty`` (once). A ``repetition_penalty`` divides positive
    scores, and multiplies negative ones, of tokens that are in the prompt or were generated; 1 is off. A ``logit_bias``
    is added to the scores of tokens by id.

    Before ``min_tokens`` no EOS, stop token or stop string ends the generation. The number ``logprobs`` says how many
    likeliest tokens' log-probabilities are returned beside each token's own; -1 returns none at all."""

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
    """Biases by rising token id, each id once."""
    logprobs: int = field(default=-1, metadata=_sampled(Whole(0, LOGPROBS_MAX), of_logits=True))
    prompt_logprobs: bool = field(default=False, metadata=_sampled(Switch()))
    """True to include the prompt's tokens from the second one on; the prompt's KV is computed anew for that."""

    @property
    def penalised(self) -> bool:
        """True if the next token depends on earlier tokens in other ways than through the model."""
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
        """Returns this object. Raises :class:`InvalidArgument` if a value is beyond its limits."""
        for each, value in zip(SAMPLING_FIELDS, _values(self), strict=True):
            if value != each.default:
                each.kind.check(each.name, value)
        return self

    def settled(self, max_tokens: int, seed: int) -> SamplingParams:
        """Returns a copy with these two values, which a client may leave open."""
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
        """The maximum size of the lists in a message."""
        return sum([each.kind.list_bytes(getattr(self, each.name)) for each in _LISTS])


class SamplingField(NamedTuple):
    name: str
    default: Any
    kind: FieldKind
    of_logits: bool


SAMPLING_FIELDS = tuple(
    SamplingField(each.name, each.default, each.metadata["kind"], each.metadata["of_logits"])
    for each in fields(SamplingParams)
)
NO_LIMIT: Final = 1 << 32
"""The ``max_tokens`` of a call that does not set it, until the limit is known. No message can hold it."""

_NAMES = [each.name for each in SAMPLING_FIELDS]
_LISTS = [each for each in SAMPLING_FIELDS if each.default == ()]
_MAX_TOKENS, _SEED = _NAMES.index("max_tokens"), _NAMES.index("seed")
_values: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*_NAMES)


def check_kind(text: str, field: str) -> str:
    """Returns a request's type. Raises :class:`InvalidArgument` naming ``field``, like the other checks here."""
    if not _KIND.fullmatch(text):
        raise InvalidArgument(
            f"{field} must be 1 to 32 letters, digits, dots, dashes and underscores, a letter or digit first",
            field=field,
        )
    return text


def check_label(text: str, field: str, limit: int = LABEL_CHARS_MAX) -> str:
    """Returns a name that only its client understands; may be empty.

    Control characters and invalid Unicode (lone surrogates) are refused, since they break logs."""
    if len(text) > limit or _UNFIT.search(text):
        raise InvalidArgument(f"{field} must be at most {limit} characters, and no control characters", field=field)
    return text


def check_priority(priority: int, field: str) -> int:
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidArgument(f"{field} must be from {-PRIORITY_MAX} to {PRIORITY_MAX}", field=field)
    return priority


def check_geography(name: str, field: str) -> str:
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
    """The type of a request and its owner, set where it arrives and equal on every hop; treated as immutable.

    Raises :class:`InvalidArgument` naming the attribute: all values here come from outside and appear in logs."""

    kind: str = ""
    """The type, such as ``chat``, ``completion``, ``file``, ``search``; empty if unknown."""
    turn: int = 1
    """The number of the turn in its conversation; 1 is the first."""
    session: str = ""
    """The conversation's name, as the client gives it."""
    user: str = ""
    """The person or program that the request is for, as the client names it."""
    priority: int = 0
    """The priority, from -1000 to 1000; lower values go first."""
    arrived_unix_s: float = 0.0
    """The arrival time at the front door, by that host's clock in Unix seconds; 0 if unknown.

    It is only carried and compared roughly, never waited by: every process queues by its own monotonic clock."""
    tenant: str = ""
    """The tenant that pays and that shares KV with no other; empty for the public tenant."""
    geographies: tuple[str, ...] = ()
    """The places where the request may be served; empty for anywhere."""
    cache_salt: str = field(default="", repr=False)
    """The salt: a request shares KV only with requests of its tenant that have the same one. So timing reveals what was
    asked only to those who know it."""
    no_store: bool = False
    """True if no KV computed for the request is kept for others or put into the KV store."""

    @property
    def category(self) -> str:
        """The type and turn: how likely its KV is used again ("KVCache cache in the wild" §4.2); empty if unknown."""
        return f"{self.kind}/{self.turn}" if self.kind else ""

    def __post_init__(self) -> None:
        if self.kind:
            check_kind(self.kind, "kind")
        if not 1 <= self.turn <= TURN_MAX:
            raise InvalidArgument(f"turn must be from 1 to {TURN_MAX}, got {self.turn}", field="turn")
        # Three processes make one per request, and most requests set none of these.
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
"""The class of a request that carries no labels."""


@dataclass(slots=True, unsafe_hash=True)
class Usage:
    """Token counts of one finished request; treated as immutable. ``cached_tokens`` are prompt tokens whose KV was
    reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
