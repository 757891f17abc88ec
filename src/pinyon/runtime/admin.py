"""The ``AdminService``, with one call that changes how a process behaves and one that records what it serves.

A service names the settings that can be changed, and for others why they cannot. Only admins may call; where nobody has
an identity (no TLS), only processes of this machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pinyon.api.admin.v1 import admin_pb2, admin_pb2_grpc
from pinyon.core.address import is_loopback
from pinyon.core.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from pinyon.core.near import did_you_mean
from pinyon.core.policies import Registry
from pinyon.runtime.callers import Callers
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.identity import ADMIN, caller
from pinyon.runtime.logging import get_logger

SETTINGS_MAX = 16
SALT_BYTES = range(16, 65)
_CALLERS: Callers = {"Apply": frozenset((ADMIN,)), "Record": frozenset((ADMIN,))}

Record = Callable[[bytes], AsyncGenerator[admin_pb2.RecordResponse, None]]
"""A function that yields the messages of a recording, given its salt."""

_log = get_logger("admin")


@dataclass(frozen=True)
class Changeable:
    """A setting that can be changed while the process runs."""

    name: str
    value: Callable[[], str]
    """Returns the present value, as it would be written."""
    parse: Callable[[str], Callable[[], None]]
    """Checks a value and returns a function that applies it; raises a ``ValueError`` that says what is wrong."""


def changeable_flag(name: str, read: Callable[[], bool], write: Callable[[bool], None]) -> Changeable:
    """Returns a changeable setting that is ``true`` or ``false``."""

    def parse(text: str) -> Callable[[], None]:
        if text not in ("true", "false"):
            raise ValueError(f"must be true or false, got {text!r}")
        return lambda: write(text == "true")

    return Changeable(name, lambda: "true" if read() else "false", parse)


def changeable_policy(
    registry: Registry[Any], chosen: str, use: Callable[[Any, str], None], make: Callable[[str], Any] | None = None
) -> Changeable:
    """Returns a changeable policy of the registry's kind, ``chosen`` at the start.

    ``use`` gets what ``make`` makes of a new choice (by default a policy), and the choice as it was written."""
    now = chosen
    make = make or registry.make

    def parse(text: str) -> Callable[[], None]:
        policy = make(text)

        def make_it_count() -> None:
            nonlocal now
            now = text
            use(policy, text)

        return make_it_count

    return Changeable(registry.kind, lambda: now, parse)


def add_admin(
    server: GrpcServer,
    changeable: Sequence[Changeable],
    fixed: Mapping[str, str] | None = None,
    record: Record | None = None,
) -> None:
    """Adds the service to a server; without ``record`` there is nothing to record.

    ``fixed`` names settings that people may expect here, and why they cannot be changed."""
    server.add(
        AdminServicer(changeable, fixed or {}, record), admin_pb2.DESCRIPTOR.services_by_name["AdminService"], _CALLERS
    )


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The service; it checks all changes before it makes any."""

    def __init__(self, changeable: Sequence[Changeable], fixed: Mapping[str, str], record: Record | None) -> None:
        self._changeable = {each.name: each for each in changeable}
        self._fixed = fixed
        self._record = record

    async def Apply(self, request: admin_pb2.ApplyRequest, context: Any) -> admin_pb2.ApplyResponse:
        who = admitted(context)
        changes = self._checked(request.settings)
        before = {name: each.value() for name, each in self._changeable.items()}
        for make_it_count in changes.values():
            make_it_count()
        after = {name: each.value() for name, each in self._changeable.items()}
        for name in changes:
            _log.warning("%s changed %s from %s to %s", who, name, before[name], after[name])
        return admin_pb2.ApplyResponse(
            changes=[admin_pb2.Change(name=name, before=before[name], after=after[name]) for name in sorted(before)]
        )

    async def Record(self, request: admin_pb2.RecordRequest, context: Any) -> None:
        """Writes messages itself instead of yielding them, so that a cancel arrives in this method."""
        who = admitted(context)
        if self._record is None:
            raise FailedPrecondition("only a load balancer sees whole requests")
        if len(request.salt) not in SALT_BYTES:
            raise InvalidArgument(f"a salt has {SALT_BYTES[0]} to {SALT_BYTES[-1]} bytes", field="salt")
        _log.warning("%s records a trace", who)
        async with aclosing(self._record(request.salt)) as messages:
            async for message in messages:
                await context.write(message)

    def _checked(self, settings: Sequence[admin_pb2.Setting]) -> dict[str, Callable[[], None]]:
        if len(settings) > SETTINGS_MAX:
            raise InvalidArgument(f"at most {SETTINGS_MAX} settings", field="settings")
        changes: dict[str, Callable[[], None]] = {}
        for setting in settings:
            if reason := self._fixed.get(setting.name):
                raise FailedPrecondition(f"{setting.name} needs a restart: {reason}")
            known = self._changeable.get(setting.name)
            if known is None:
                hint = did_you_mean(setting.name, self._changeable)
                names = ", ".join(sorted(self._changeable)) or "nothing"
                raise InvalidArgument(f"{setting.name!r} is no setting here{hint}; what can be changed: {names}")
            if setting.name in changes:
                raise InvalidArgument(f"{setting.name} is given twice")
            try:
                changes[setting.name] = known.parse(setting.value)
            except ValueError as error:
                raise InvalidArgument(f"{setting.name}: {error}") from None
        return changes


def admitted(context: Any) -> str:
    """Returns the caller of a method for admins, for the log.

    Raises :class:`PermissionDenied` for a caller without an identity that is not on this machine."""
    known, peer = caller(context), str(context.peer())
    if known is not None:
        return f"{known} at {peer}"
    kind, _, address = peer.partition(":")
    host = address.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    if kind == "unix" or is_loopback(host):
        return f"somebody at {peer}"
    raise PermissionDenied("without TLS this is for processes of this machine only")
