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
    "check_kind",
    "check_label",
    "check_priority",
]

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256

TENANT_CHARS_MAX = 128
LABEL_CHARS_MAX = 256
TURN_MAX = 1 << 20
PRIORITY_MAX = 1000
GEOGRAPHIES_MAX = 16

_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", re.ASCII)
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
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
    """Why a generation ended: ``stop`` is EOS or a stop string, ``length`` is max_tokens or the context's end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen.

    ``temperature`` 0 is greedy. Sampling is a pure function of (logits, ``seed``, index of the generated token), so a
    request that is resumed elsewhere goes on with the same tokens. ``top_k`` 0 and ``top_p`` 1 are off.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = field(default=())
    ignore_eos: bool = False

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


def check_geographies(names: tuple[str, ...], field: str) -> tuple[str, ...]:
    if len(names) > GEOGRAPHIES_MAX or not all(map(_GEOGRAPHY.fullmatch, names)):
        raise InvalidArgument(
            f"{field} must be at most {GEOGRAPHIES_MAX} names of 1 to 64 letters, digits, dots, dashes and underscores",
            field=field,
        )
    return names


@dataclass(frozen=True, slots=True)
class RequestClass:
    """What kind of request it is, and whose. Said once, where the request arrives, and the same on every hop.

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


UNKNOWN_CLASS = RequestClass()
"""Of a request that nobody said anything of."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one finished request. ``cached_tokens`` are prompt tokens whose KV was reused, not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
