"""Files of API keys, for the load balancer that asks for keys and for programs that start one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import cast

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import TENANT_CHARS_MAX, check_geographies, check_kind, check_priority
from pinyon.runtime.files import read_file

KEY_CHARS_MAX = 512
KEYS_MAX = 100_000
FILE_BYTES_MAX = 32 << 20

LIMIT_MAX = 1 << 40
_INTEGER = re.compile(r"[+-]?[0-9]{1,13}", re.ASCII)
_NUMBERS = frozenset(("priority", "rpm", "tpm"))


@dataclass(frozen=True, slots=True)
class Client:
    """The holder of a key.

    ``kind`` and ``priority`` are for requests that name none. If there are ``geographies``, the client's requests may
    name no others, and carry these. No placement uses them yet. ``rpm`` and ``tpm`` are requests and tokens per minute
    for all keys of the tenant; 0 is no limit, None the load balancer's default."""

    tenant: str
    kind: str = ""
    priority: int = 0
    geographies: tuple[str, ...] = ()
    rpm: int | None = None
    tpm: int | None = None

    @property
    def holder(self) -> str:
        """The name in which bytes and places are held; empty for :data:`PUBLIC`, which is the only client."""
        return "" if self is PUBLIC else self.tenant


PUBLIC = Client("public")
"""The client that everyone is where no keys are configured."""


def read_api_keys(path: str) -> dict[str, Client]:
    """Returns the clients by key from a file.

    The file is a JSON object ``{key: tenant}``, or lines ``key tenant`` (``#`` begins a comment line). Instead of the
    tenant, JSON may have an object with ``tenant`` and optionally ``type``, ``priority``, ``geographies`` (a list),
    ``rpm`` and ``tpm``. After the tenant, a line may have ``type=chat priority=5 geographies=eu-west,eu-north rpm=600
    tpm=100000``. Limits are the tenant's: one of its entries is enough, and no two may differ.
    Raises :class:`InvalidArgument` if the file is not as above; the message never holds a key."""
    try:
        text = read_file(path, FILE_BYTES_MAX, "api_keys_file").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _bad("is not UTF-8") from None
    pairs = _from_json(text) if text.lstrip().startswith("{") else _from_lines(text)
    if not pairs:
        raise _bad("holds no key")
    if len(pairs) > KEYS_MAX:
        raise _bad(f"holds more than {KEYS_MAX} keys")
    keys: dict[str, Client] = {}
    for number, (key, entry) in enumerate(pairs, 1):
        try:
            client = _client(entry)
        except InvalidArgument as error:
            raise _bad(f"entry {number}: {error.message}") from None
        if not 0 < len(key) <= KEY_CHARS_MAX or not key.isprintable() or " " in key:
            raise _bad(f"entry {number}: the key must be 1 to {KEY_CHARS_MAX} printable characters without spaces")
        if keys.setdefault(key, client) != client:
            raise _bad(f"entry {number}: the key stands in the file already, with another entry")
    return _with_limits(keys)


class _Object(list[tuple[str, object]]):
    """The members of a JSON object, including repeated ones."""


def _client(entry: object) -> Client:
    """Returns an entry's client. Raises :class:`InvalidArgument`, whose message holds only names of the entry."""
    members = dict(entry) if isinstance(entry, _Object) else {"tenant": entry}
    unknown = set(members) - {"tenant", "type", "priority", "geographies", "rpm", "tpm"}
    if unknown or (isinstance(entry, _Object) and len(entry) != len(members)):
        raise InvalidArgument("only tenant, type, priority, geographies, rpm and tpm are known, each once")
    tenant, kind, priority = members.get("tenant"), members.get("type", ""), members.get("priority", 0)
    geographies = members.get("geographies", [])
    if not isinstance(tenant, str) or not 0 < len(tenant) <= TENANT_CHARS_MAX or not tenant.isprintable():
        raise InvalidArgument(f"the tenant must be 1 to {TENANT_CHARS_MAX} printable characters")
    if not isinstance(kind, str):
        raise InvalidArgument("the type must be a string")
    if type(priority) is not int:
        raise InvalidArgument("the priority must be a whole number")
    if not isinstance(geographies, list) or not all(isinstance(name, str) for name in geographies):
        raise InvalidArgument("the geographies must be a list of strings")
    if "type" in members:
        check_kind(kind, "type")
    check_geographies(tuple(geographies), "geographies")
    limits = [members.get(name) for name in ("rpm", "tpm")]
    for name, limit in zip(("rpm", "tpm"), limits, strict=True):
        if limit is not None and not (type(limit) is int and 0 <= limit <= LIMIT_MAX):
            raise InvalidArgument(f"{name} must be a whole number from 0 (no limit) to {LIMIT_MAX}")
    rpm, tpm = cast("list[int | None]", limits)
    return Client(tenant, kind, check_priority(priority, "priority"), tuple(geographies), rpm, tpm)


def _with_limits(keys: dict[str, Client]) -> dict[str, Client]:
    """Gives every key the limits of its tenant, whichever entry names them."""
    rpm: dict[str, int] = {}
    tpm: dict[str, int] = {}
    for client in keys.values():
        for name, here, of_tenant in (("rpm", client.rpm, rpm), ("tpm", client.tpm, tpm)):
            if here is not None and of_tenant.setdefault(client.tenant, here) != here:
                raise _bad(f"gives the tenant {client.tenant!r} two values of {name}")
    return {
        key: replace(client, rpm=rpm.get(client.tenant), tpm=tpm.get(client.tenant)) for key, client in keys.items()
    }


def _from_json(text: str) -> _Object:
    try:
        pairs: object = json.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError):
        raise _bad("begins like JSON but is not valid JSON") from None
    assert isinstance(pairs, _Object)
    return pairs


def _from_lines(text: str) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2 or not all("=" in word for word in words[2:]):
            raise _bad(f"line {number} is not 'KEY TENANT' or 'KEY TENANT NAME=VALUE ...'")
        pairs.append((words[0], _Object([("tenant", words[1]), *map(_member, words[2:])])))
    return pairs


def _member(word: str) -> tuple[str, object]:
    name, _, text = word.partition("=")
    if name == "geographies":
        return name, text.split(",")
    return name, int(text) if name in _NUMBERS and _INTEGER.fullmatch(text) else text


def _bad(what: str) -> InvalidArgument:
    return InvalidArgument(f"the API keys file {what}", field="api_keys_file")
