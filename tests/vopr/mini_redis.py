"""A Redis in this process: the commands that the store's metadata uses, and its scripts run as they are, by Lua 5.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lupa import lua51
from redis.exceptions import ResponseError

_lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
_current: list[MiniRedis] = []
"""The server whose script runs, as the last one."""
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Status(bytes):
    """A reply such as OK, which Lua sees as a table."""


class MiniRedis:
    """A server's data: strings, hashes and sets by key, some of which expire."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[bytes, Any] = {}
        self._ends: dict[bytes, float] = {}

    def snapshot(self) -> tuple[dict[bytes, Any], dict[bytes, float]]:
        """Returns a copy of everything, for :meth:`restore`."""
        values = {key: value if isinstance(value, bytes) else value.copy() for key, value in self._values.items()}
        return values, dict(self._ends)

    def restore(self, snapshot: tuple[dict[bytes, Any], dict[bytes, float]]) -> None:
        self._values, self._ends = snapshot

    def execute(self, *command: str | bytes | int) -> Any:
        """Carries a command out. Raises :class:`ResponseError`."""
        name, *arguments = [each if type(each) is bytes else raw(each) for each in command]
        return getattr(self, _method(name))(*arguments)

    # -- commands

    def _find(self, key: bytes, kind: type) -> Any:
        end_s = self._ends.get(key)
        if end_s is not None and self._clock() >= end_s:
            self._drop(key)
        value = self._values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ResponseError(WRONG_TYPE)
        return value

    def _drop(self, key: bytes) -> bool:
        self._ends.pop(key, None)
        return self._values.pop(key, None) is not None

    def _do_get(self, key: bytes) -> bytes | None:
        return self._find(key, bytes)

    def _do_set(self, key: bytes, value: bytes, *options: bytes) -> Status:
        self._drop(key)
        self._values[key] = value
        if options:
            unit, number = options
            self._ends[key] = self._clock() + int(number) / {b"PX": 1000, b"EX": 1}[unit]
        return Status(b"OK")

    def _do_exists(self, *keys: bytes) -> int:
        return sum(self._find(key, object) is not None for key in keys)

    def _do_type(self, key: bytes) -> Status:
        value = self._find(key, object)
        return Status({bytes: b"string", dict: b"hash", set: b"set", type(None): b"none"}[type(value)])

    def _do_del(self, *keys: bytes) -> int:
        return sum(self._find(key, object) is not None and self._drop(key) for key in keys)

    _do_unlink = _do_del

    def _do_hget(self, key: bytes, field: bytes) -> bytes | None:
        return (self._find(key, dict) or {}).get(field)

    def _do_hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        held = self._find(key, dict) or {}
        return [held.get(field) for field in fields]

    def _do_hset(self, key: bytes, *pairs: bytes) -> int:
        held = self._find(key, dict)
        if held is None:
            held = self._values[key] = {}
        before = len(held)
        held.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(held) - before

    def _do_hdel(self, key: bytes, *fields: bytes) -> int:
        held = self._find(key, dict) or {}
        gone = sum(held.pop(field, None) is not None for field in fields)
        if gone and not held:
            self._drop(key)
        return gone

    def _do_hlen(self, key: bytes) -> int:
        return len(self._find(key, dict) or ())

    def _do_hgetall(self, key: bytes) -> dict[bytes, bytes]:
        return dict(self._find(key, dict) or {})

    def _do_hscan(self, key: bytes, cursor: bytes, *_: bytes) -> tuple[int, dict[bytes, bytes]]:
        return 0, self._do_hgetall(key)

    def _do_sadd(self, key: bytes, *members: bytes) -> int:
        held = self._find(key, set)
        if held is None:
            held = self._values[key] = set()
        before = len(held)
        held.update(members)
        return len(held) - before

    def _do_srem(self, key: bytes, *members: bytes) -> int:
        held = self._find(key, set) or set()
        before = len(held)
        held.difference_update(members)
        if before and not held:
            self._drop(key)
        return before - len(held)

    def _do_smembers(self, key: bytes) -> list[bytes]:
        return sorted(self._find(key, set) or ())

    # -- scripts

    def _do_eval(self, script: bytes, count: bytes, *rest: bytes) -> Any:
        keys, arguments = rest[: int(count)], rest[int(count) :]
        _current.append(self)
        try:
            found = _compiled(script)(_lua.table_from(keys), _lua.table_from(arguments))
        except lua51.LuaError as error:
            raise ResponseError(str(error)) from None
        finally:
            _current.pop()
        return _from_lua(found)


def raw(value: str | bytes | int) -> bytes:
    """Returns an argument as it is on the wire."""
    return value if isinstance(value, bytes) else str(value).encode()


@cache
def _method(name: bytes) -> str:
    found = f"_do_{name.decode().lower()}"
    if not hasattr(MiniRedis, found):
        raise ResponseError(f"unknown command {name!r}")
    return found


@cache
def _status(text: bytes) -> Any:
    return _lua.table_from({b"ok": text})


def _to_lua(reply: Any) -> Any:
    if reply is None:
        return False
    if isinstance(reply, Status):
        return _status(reply)
    return _lua.table_from([_to_lua(each) for each in reply]) if isinstance(reply, list) else reply


def _from_lua(value: Any) -> Any:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, float):
        return int(value)
    if lua51.lua_type(value) != "table":
        return value
    if (error := value[b"err"]) is not None:
        raise ResponseError(error.decode())
    if (told := value[b"ok"]) is not None:
        return Status(told)
    found = []
    while (each := value[len(found) + 1]) is not None:
        found.append(_from_lua(each))
    return found


def _call(*command: Any) -> Any:
    return _to_lua(_current[-1].execute(*command))


def _pcall(*command: Any) -> Any:
    try:
        return _call(*command)
    except ResponseError as error:
        return _lua.table_from({b"err": str(error).encode()})


_lua.globals()[b"redis"] = _lua.table_from({b"call": _call, b"pcall": _pcall})


@cache
def _compiled(script: bytes) -> Any:
    return _lua.eval(b"function(KEYS, ARGV)\n" + script + b"\nend")


def replies(server: MiniRedis, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns a reply for each command; that to a failed one is its error."""
    found: list[Any] = []
    for command in commands:
        try:
            found.append(server.execute(*command))
        except ResponseError as error:
            found.append(error)
    return found
