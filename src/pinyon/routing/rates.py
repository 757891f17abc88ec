"""Limits on a tenant's requests and tokens per minute, each a bucket that fills evenly.

A bucket holds a minute's worth, so what was not used in the last minute may come at once. A request takes its tokens
(prompt and all it may generate) before it waits for its turn, and gives back what it did not use."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from pinyon.core.errors import ResourceExhausted

MINUTE_S = 60.0
TENANTS_MAX = 65_536
"""Tenants whose buckets are kept; the tenant unseen for longest has full buckets again."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests and tokens per minute; 0 means no limit."""

    rpm: int = 0
    tpm: int = 0


class Level(NamedTuple):
    """The remainder of one limit."""

    limit: int
    """Requests or tokens per minute."""
    remaining: int
    """Requests or tokens that are left now."""
    full_s: float
    """Seconds until the bucket is full, if nothing more is taken."""


class _Bucket:
    """The amount missing from a full bucket, which stays the same when the limit changes."""

    __slots__ = ("_missing", "_since_s")

    def __init__(self, now_s: float) -> None:
        self._missing = 0.0
        self._since_s = now_s

    def missing(self, per_minute: int, now_s: float) -> float:
        filled = max(0.0, now_s - self._since_s) * per_minute / MINUTE_S
        return min(float(per_minute), max(0.0, self._missing - filled))

    def set_missing(self, missing: float, now_s: float) -> None:
        self._missing, self._since_s = missing, max(self._since_s, now_s)


class TenantRates:
    """The buckets of all tenants. ``rates`` come with each call, as they may change at any time."""

    def __init__(self, tenants_max: int = TENANTS_MAX) -> None:
        self._tenants_max = tenants_max
        self._buckets: OrderedDict[str, tuple[_Bucket, _Bucket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def request(self, tenant: str, rates: Rates, now_s: float) -> None:
        """Takes one request. Raises a :class:`ResourceExhausted` that says when to retry."""
        _take(self._of(tenant, now_s)[0], rates.rpm, 1, "requests", now_s)

    def check(self, tenant: str, rates: Rates, now_s: float) -> None:
        """Raises as :meth:`request` would now, and takes nothing."""
        known = self._buckets.get(tenant)
        if known is not None and rates.rpm:
            _missing_with(known[0], rates.rpm, 1, "requests", now_s)

    def take(self, tenant: str, rates: Rates, tokens: int, now_s: float) -> None:
        """Takes tokens that a request may need. Raises :class:`ResourceExhausted`, without a time if it never can."""
        _take(self._of(tenant, now_s)[1], rates.tpm, tokens, "tokens", now_s)

    def give_back(self, tenant: str, rates: Rates, tokens: int, now_s: float) -> None:
        """Gives back tokens that the request did not need after all."""
        known = self._buckets.get(tenant)
        if known is not None and rates.tpm:
            bucket = known[1]
            bucket.set_missing(max(0.0, bucket.missing(rates.tpm, now_s) - tokens), now_s)

    def levels(self, tenant: str, rates: Rates, now_s: float) -> tuple[Level | None, Level | None]:
        """Returns the levels of requests and of tokens; None where there is no limit. Changes nothing."""
        requests, tokens = self._buckets.get(tenant, (None, None))
        return _level(requests, rates.rpm, now_s), _level(tokens, rates.tpm, now_s)

    def _of(self, tenant: str, now_s: float) -> tuple[_Bucket, _Bucket]:
        known = self._buckets.get(tenant)
        if known is None:
            if len(self._buckets) >= self._tenants_max:
                self._buckets.popitem(last=False)
            known = self._buckets[tenant] = _Bucket(now_s), _Bucket(now_s)
        else:
            self._buckets.move_to_end(tenant)
        return known


def _take(bucket: _Bucket, per_minute: int, amount: int, what: str, now_s: float) -> None:
    if per_minute:
        bucket.set_missing(_missing_with(bucket, per_minute, amount, what, now_s), now_s)


def _missing_with(bucket: _Bucket, per_minute: int, amount: int, what: str, now_s: float) -> float:
    """Returns what is missing with ``amount`` taken. Raises :class:`ResourceExhausted` if that exceeds the limit."""
    limit = f"Rate limit reached: {per_minute} {what} per minute"
    if amount > per_minute:
        raise ResourceExhausted(f"{limit}, and the request alone may need {amount}.")
    missing = bucket.missing(per_minute, now_s) + amount
    over = missing - per_minute
    if over > _ROUNDING * per_minute:
        wait_s = over * MINUTE_S / per_minute
        raise ResourceExhausted(f"{limit}. Please try again in {wait_s:.3g} s.", retry_after_s=wait_s)
    return missing


def _level(bucket: _Bucket | None, per_minute: int, now_s: float) -> Level | None:
    if not per_minute:
        return None
    missing = 0.0 if bucket is None else bucket.missing(per_minute, now_s)
    return Level(per_minute, int(per_minute - missing), missing * MINUTE_S / per_minute)
