"""Live requests as rows that reveal neither what was asked nor by whom ("KVCache cache in the wild" §3.1).

Where the requests are served, their blocks and names are hashed (:mod:`pinyon.core.trace_hashes`). Where the file is
written, all hashes become small numbers in order of appearance (:class:`Renumbering`), and the salt is forgotten. So
nothing in the file was computed from a prompt or a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pinyon.core.block_keys import unpack_keys
from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.core.trace_hashes import BLOCK_TOKENS
from pinyon_lab.traces.formats import TraceRow

BLOCKS_MAX = 1 << 22
"""The limit of different blocks of one trace: 67 million tokens, and half a gigabyte to number them."""
NAMES_MAX = 1 << 20
"""The limit of different users, and of sessions at a time; the session used least recently is forgotten first."""


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
    """The numbers of one trace. Ids of blocks and requests are consecutive from 0, those of users from 1."""

    def __init__(self, blocks_max: int = BLOCKS_MAX, names_max: int = NAMES_MAX) -> None:
        self._blocks_max, self._names_max = blocks_max, names_max
        self._blocks: dict[bytes, int] = {}
        self._users: dict[bytes, int] = {}
        self._sessions: dict[bytes, int] = {}
        self._session = 0
        self._rows = 0

    def row(self, seen: Recorded) -> TraceRow:
        """Returns the row of a request with its arrival in Unix seconds. Its ``parent`` is the number of its session,
        see :func:`in_sessions`. Raises :class:`InvalidArgument` for a request that makes no sense,
        :class:`ResourceExhausted` if there are too many different blocks or users; nothing has changed then."""
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
    """Yields rows of :class:`Renumbering` in order of arrival; the parent is now the session's preceding request."""
    last: dict[str, str] = {}
    for row in rows:
        before = last.pop(row.parent, "")
        if row.parent:
            if len(last) >= names_max:
                del last[next(iter(last))]
            last[row.parent] = row.chat
        yield row._replace(parent=before)
