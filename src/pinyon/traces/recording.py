"""From live requests to rows that tell nothing of what was asked, and by whom ("KVCache cache in the wild" §3.1).

In two steps. Where the requests are, their blocks and names are hashed with a salt that this one trace has
(:func:`hashed_blocks`, :func:`hashed_name`): what leaves that process cannot be compared with block keys, with another
trace, or with a guess. Where the file is written, all hashes become small numbers in the order of their coming
(:class:`Renumbering`), and the salt is forgotten: nothing in the file was computed from a prompt or a name.

The paper hashes by SipHash. Here blocks have the chained XXH3 of block keys, which starts from an HMAC under the salt:
its numbers are never published, so all it must do is not to collide, and 128 bits are enough for that.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from xxhash import xxh3_128_digest

from pinyon.core.block_keys import KEY_BYTES, chain_block_keys, namespace, pack_keys, unpack_keys
from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.core.request import RequestClass
from pinyon.traces.row import TraceRow

__all__ = ["BLOCK_TOKENS", "Recorded", "Renumbering", "hashed_blocks", "hashed_name", "in_sessions"]

BLOCK_TOKENS = 16
"""Of the format ``qwen``, whatever the size of the suite's KV blocks."""
BLOCKS_MAX = 1 << 22
"""Different blocks of one trace: 67 million tokens, and half a gigabyte to number them."""
NAMES_MAX = 1 << 20
"""Different users; sessions at a time, the one that was used least lately is forgotten first."""


def hashed_blocks(salt: bytes, model: str, asked: RequestClass, tokens_le32: bytes) -> bytes:
    """Packed, of the prompt's blocks, the last one perhaps not full. Equal ones: an equal prefix that may be shared."""
    start = namespace(model, "", asked.tenant, salt, asked.cache_salt)
    keys = chain_block_keys(start, tokens_le32, BLOCK_TOKENS)
    rest = tokens_le32[4 * BLOCK_TOKENS * len(keys) :]
    if rest:
        keys.append(xxh3_128_digest((keys[-1] if keys else start) + rest))
    return pack_keys(keys)


def hashed_name(salt: bytes, *names: str) -> bytes:
    """Of who or what is called so; empty if all of them are."""
    if not any(names):
        return b""
    data = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (name.encode() for name in names))
    return hmac.digest(salt, data, "sha256")[:KEY_BYTES]


class Recorded(NamedTuple):
    """A request as it leaves the process that served it."""

    arrived_unix_s: float
    kind: str
    turn: int
    user: bytes
    session: bytes
    prompt_tokens: int
    generated_tokens: int
    blocks: bytes


class Renumbering:
    """Rows of one trace. Ids of blocks and requests are the consecutive naturals from 0 on, those of users from 1."""

    def __init__(self, blocks_max: int = BLOCKS_MAX, names_max: int = NAMES_MAX) -> None:
        self._blocks_max, self._names_max = blocks_max, names_max
        self._blocks: dict[bytes, int] = {}
        self._users: dict[bytes, int] = {}
        self._sessions: dict[bytes, int] = {}
        self._session = 0
        self._rows = 0

    def row(self, seen: Recorded) -> TraceRow:
        """Its time is still that of its arrival in Unix seconds, and for ``parent`` it has its session's number, see
        :func:`in_sessions`.

        Raises :class:`InvalidArgument` for one that makes no sense, :class:`ResourceExhausted` when there are too many
        different blocks or users; nothing has changed then.
        """
        try:
            keys = unpack_keys(seen.blocks)
        except ValueError as error:
            raise InvalidArgument(str(error), field="blocks") from None
        if len(keys) != -(-seen.prompt_tokens // BLOCK_TOKENS):
            raise InvalidArgument(f"{len(keys)} blocks of {seen.prompt_tokens} tokens", field="blocks")
        if len(self._blocks) + len(keys) > self._blocks_max or len(self._users) >= self._names_max:
            raise ResourceExhausted("the trace has as many different blocks or users as can be numbered")
        blocks = self._blocks
        session = self._number_of(seen.session) if seen.session else ""
        row = TraceRow(
            seen.arrived_unix_s,
            seen.prompt_tokens,
            seen.generated_tokens,
            tuple([blocks.setdefault(key, len(blocks)) for key in keys]),
            seen.kind,
            seen.turn,
            str(self._rows),
            session,
            str(self._users.setdefault(seen.user, len(self._users) + 1)) if seen.user else "",
        )
        self._rows += 1
        return row

    def _number_of(self, session: bytes) -> str:
        number = self._sessions.pop(session, None)
        if number is None:
            number = self._session
            self._session += 1
            if len(self._sessions) >= self._names_max:
                del self._sessions[next(iter(self._sessions))]
        self._sessions[session] = number
        return str(number)


def in_sessions(rows: Iterable[TraceRow], names_max: int = NAMES_MAX) -> Iterator[TraceRow]:
    """Of :class:`Renumbering`, now in the order in which the requests came: the parent is the request of the session
    that came before."""
    last: dict[str, str] = {}
    for row in rows:
        before = last.pop(row.parent, "")
        if row.parent:
            if len(last) >= names_max:
                del last[next(iter(last))]
            last[row.parent] = row.chat
        yield row._replace(parent=before)
