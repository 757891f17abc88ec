"""The call that changes a running process: all or nothing, for permitted callers, and logged."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pinyon.api.admin.v1 import admin_pb2
from pinyon.core.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from pinyon.core.policies import NoSettings, Registry
from pinyon.runtime.admin import AdminServicer, changeable_flag, changeable_policy
from pinyon.runtime.identity import Identity

COLOURS: Registry[str] = Registry("colour", {name: (NoSettings, lambda _, name=name: name) for name in ("red", "blue")})


class Context:
    def __init__(self, peer: str = "ipv4:127.0.0.1:5000", identity: Identity | None = None) -> None:
        self._peer = peer
        self._names = [name.encode() for name in identity.names] if identity else None

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> list[bytes] | None:
        return self._names


class Process:
    """A process with a flag and a policy."""

    def __init__(self) -> None:
        self.draining = False
        self.colour = ("red", "red")
        self.servicer = AdminServicer(
            [
                changeable_flag("draining", lambda: self.draining, self.drain),
                changeable_policy(COLOURS, "red", lambda policy, choice: setattr(self, "colour", (policy, choice))),
            ],
            {"size": "it is made once"},
            None,
        )

    def drain(self, draining: bool) -> None:
        self.draining = draining

    async def apply(self, context: Any = None, **settings: str) -> dict[str, tuple[str, str]]:
        request = admin_pb2.ApplyRequest(
            settings=[admin_pb2.Setting(name=name, value=value) for name, value in settings.items()]
        )
        reply = await self.servicer.Apply(request, context or Context())
        return {each.name: (each.before, each.after) for each in reply.changes}


async def test_what_is_asked_for_changes_and_all_is_told(caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    assert await process.apply() == {"draining": ("false", "false"), "colour": ("red", "red")}
    with caplog.at_level(logging.WARNING):
        told = await process.apply(Context(identity=Identity("admin", "anna")), draining="true", colour="blue")
    assert told == {"draining": ("false", "true"), "colour": ("red", "blue")}
    assert (process.draining, process.colour) == (True, ("blue", "blue"))
    assert [record.getMessage() for record in caplog.records] == [
        "admin anna at ipv4:127.0.0.1:5000 changed draining from false to true",
        "admin anna at ipv4:127.0.0.1:5000 changed colour from red to blue",
    ]


@pytest.mark.parametrize(
    ("settings", "error", "word"),
    [
        ({"colour": "green"}, InvalidArgument, "known: red, blue"),
        ({"draining": "yes"}, InvalidArgument, "true or false"),
        ({"nonsense": "1"}, InvalidArgument, "colour, draining"),
        ({"color": "blue"}, InvalidArgument, r"'color' is no setting here \(did you mean 'colour'\?\)"),
        ({"size": "2"}, FailedPrecondition, "needs a restart: it is made once"),
    ],
)
async def test_one_bad_setting_changes_nothing(settings: dict[str, str], error: type[Exception], word: str) -> None:
    process = Process()
    with pytest.raises(error, match=word):
        await process.apply(**{"draining": "true", **settings} if "draining" not in settings else settings)
    assert (process.draining, process.colour) == (False, ("red", "red"))


async def test_names_come_once_and_are_few() -> None:
    twice = [admin_pb2.Setting(name="draining", value="true")] * 2
    for settings in (twice, [admin_pb2.Setting(name=str(number)) for number in range(17)]):
        with pytest.raises(InvalidArgument):
            await Process().servicer.Apply(admin_pb2.ApplyRequest(settings=settings), Context())


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:1", "ipv6:[::1]:1", "ipv6:%5B::1%5D:1", "unix:/run/x", "unix:"])
async def test_without_tls_this_machine_may(peer: str) -> None:
    assert await Process().apply(Context(peer), draining="true")


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.7:1", "ipv6:[2001:db8::1]:1", "", "ipv4:nonsense"])
async def test_without_tls_others_may_not(peer: str) -> None:
    process = Process()
    with pytest.raises(PermissionDenied):
        await process.apply(Context(peer), draining="true")
    assert not process.draining
