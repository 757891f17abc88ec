"""Who may call what: one table per server, one interceptor.

It is asked on connections with client certificates only. Without TLS nobody has an identity, and everybody may call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pinyon.core.clock import Clock
from pinyon.core.errors import PermissionDenied, PinyonError, Unauthenticated
from pinyon.runtime.identity import ROLES, WORKER, Identity, caller
from pinyon.runtime.interceptors import Interceptor, behaviour_of, doing
from pinyon.runtime.logging import get_logger

Callers = Mapping[str, frozenset[str]]
"""Which roles may call a method, by the method's name."""

MEMBERS = frozenset(ROLES)
"""Whoever has a certificate of the cluster."""
ANYBODY: frozenset[str] = frozenset(("",))
"""Also those without a certificate: the method looks at its callers itself, or tells nothing."""

BLOCK_READ_CALLERS: Callers = {"Acquire": frozenset((WORKER,)), "Release": frozenset((WORKER,))}
"""Of ``BlockReadService``, which workers and store nodes have alike."""

LOG_EVERY_S = 10.0
_UNKNOWN: frozenset[str] = frozenset()

_log = get_logger("callers")


class CallerInterceptor(Interceptor):
    """``table`` maps ``/package.Service/Method`` to roles; what is not in it may be called by nobody."""

    def __init__(self, table: Mapping[str, frozenset[str]], clock: Clock = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}
        """Per method and role, as many as there are of these: when a refusal was logged last, how many since."""

    def remade(self, handler: Any, method: str) -> Any:
        roles = self._table.get(method, _UNKNOWN)
        if roles is ANYBODY:
            return handler
        behaviour = behaviour_of(handler)

        def call(requests: Any, context: Any) -> Any:
            self._check(method, roles, context)
            return behaviour(requests, context)

        return doing(handler, call)

    def _check(self, method: str, roles: frozenset[str], context: Any) -> None:
        """Raises :class:`Unauthenticated` or :class:`PermissionDenied`."""
        known = caller(context)
        if known is not None and known.role in roles:
            return
        error: PinyonError
        if known is None:
            error = Unauthenticated("this needs a certificate of the cluster that names a role and an instance")
        else:
            error = PermissionDenied(f"role {known.role} may not call {method}")
        self._log(method, known, str(context.peer()))
        raise error

    def _log(self, method: str, known: Identity | None, peer: str) -> None:
        key = (method, "" if known is None else known.role)
        last_s, more = self._logged.get(key, (-LOG_EVERY_S, 0))
        now_s = self._clock()
        if now_s - last_s < LOG_EVERY_S:
            self._logged[key] = last_s, more + 1
            return
        self._logged[key] = now_s, 0
        _log.warning("refused %s to %s", method, known or "nobody", extra={"peer": peer, "refused_since": more})
