"""The check that a caller may call a method: one table per server.

It applies only to connections with client certificates. Without TLS, callers have no identity, and all may call."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Hashable, Mapping
from math import inf
from typing import Any

from pinyon.core.clock import Clock
from pinyon.core.errors import PermissionDenied, Unauthenticated
from pinyon.runtime.identity import ROLES, WORKER, caller
from pinyon.runtime.interceptors import Behaviour, Interceptor
from pinyon.runtime.logging import get_logger

Callers = Mapping[str, frozenset[str]]
"""The roles that may call each method, by the method's name."""

MEMBERS = frozenset(ROLES)
"""All callers with a certificate of the cluster."""
ANYBODY: frozenset[str] = frozenset(("",))
"""All callers, even without a certificate: the method checks its callers itself, or reveals nothing."""

BLOCK_READ_CALLERS: Callers = {each: frozenset((WORKER,)) for each in ("Acquire", "Renew", "Release")}
"""The callers of ``BlockReadService``, which both workers and store nodes serve."""

LOG_EVERY_S = 10.0

_log = get_logger("callers")


class Refusals:
    """A log of refusals with one line per kind in ten seconds, as a refused caller comes again and again."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._told: dict[Hashable, tuple[float, int]] = {}
        """The time when each kind (there are few) was last logged, and the number of refusals since."""

    def log(self, kind: Hashable, context: Any, text: str, *args: object) -> None:
        last_s, more = self._told.get(kind, (-inf, 0))
        now_s = self._clock()
        if now_s - last_s < LOG_EVERY_S:
            self._told[kind] = last_s, more + 1
            return
        self._told[kind] = now_s, 0
        self._log.warning(text, *args, extra={"peer": str(context.peer()), "refused_since": more})


def caller_check(table: Mapping[str, frozenset[str]]) -> Interceptor:
    """Returns the check. ``table`` maps ``/package.Service/Method`` to roles; nobody may call other methods.

    A call raises :class:`Unauthenticated` or :class:`PermissionDenied` if its caller has none of the roles."""
    refusals = Refusals(_log, time.monotonic)

    def around(behaviour: Behaviour, method: str) -> Behaviour:
        roles: frozenset[str] = table.get(method, frozenset())

        def call(requests: Any, context: Any) -> Awaitable[Any]:
            known = caller(context)
            if known is not None and known.role in roles:
                return behaviour(requests, context)
            role = "" if known is None else known.role
            refusals.log((method, role), context, "refused %s to %s", method, known or "nobody")
            if known is None:
                raise Unauthenticated("this needs a certificate of the cluster that names a role and an instance")
            raise PermissionDenied(f"role {role} may not call {method}")

        return behaviour if roles is ANYBODY else call

    return around
