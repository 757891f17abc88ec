"""A whole trace as arrays in order of time, with blocks numbered from 0: the input of every figure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces.formats import TraceRow

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


def numbered(ids: array[int]) -> tuple[Ints, int]:
    """Returns the number of each id in the order of their values, and how many there are."""
    values = np.asarray(ids)
    # NumPy's own ``unique`` hashes, and needs many times the memory and time.
    order = np.argsort(values)
    ranked = values[order]
    new = np.zeros(len(ranked), np.int32)
    new[1:] = ranked[1:] != ranked[:-1]
    del ranked
    numbers = np.empty(len(order), np.int32)
    numbers[order] = np.cumsum(new, dtype=np.int32)
    return numbers, int(numbers.max(initial=-1)) + 1


ROW_BYTES = 640
"""A bound on the memory of one row. These columns take 56 bytes, the names of its chat, user and parent some 300 in
dictionaries while it is read, and the figures the rest."""
ID_BYTES = 48
"""A bound on the memory of one block id in a row: 32 bytes while it is numbered, then 4. A block that no other row has
takes 14 more for its state and 12 for its lifespan and reuses, and 16 if only every other number is in use."""
NO_TURNS = "the trace tells neither turns nor sessions"
KINDS_MAX = 64
"""The limit of types; the others are one, ``other``."""
TURN_MAX = (1 << 31) - 1
ROWS_EVERY = 4096
IDS_EVERY = 1 << 18
"""The numbers of rows and of ids after which memory is checked."""


@dataclass
class TraceColumns:
    """The columns of a trace, with an element for each row. Only ``blocks`` has those of row ``i`` from ``starts[i]``
    up to ``starts[i + 1]``, as rows differ in length."""

    block_tokens: int
    time_s: Floats
    input_tokens: Longs
    output_tokens: Longs
    kind: Ints
    """The index into ``kinds``, whose names can be shown: unprintable characters are ``?``."""
    kinds: list[str]
    turn: Ints
    """The turn in the session; 0: unknown."""
    user: Ints
    """The user's number below ``users``, in order of appearance; all -1 if the format has none."""
    users: int
    session: Ints
    """The session's number below ``sessions``; -1: the row names no chat."""
    sessions: int
    parent: Ints
    """The row that this one follows in its session; -1: none, or not in the trace."""
    starts: Longs
    blocks: Ints
    numbers: int
    """A bound that all of ``blocks`` are below."""

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def lengths(self) -> Longs:
        return np.diff(self.starts)

    @property
    def has_turns(self) -> bool:
        return bool(self.turn.any())


class _Sessions:
    """The session of each row, and the row that it follows; rows come in the order of the file."""

    def __init__(self) -> None:
        self.count = 0
        self._session = array("i")
        self._row: dict[str, int] = {}
        """The last row of each chat; for a parent that is not in the trace, ``-1 - session``."""

    def place(self, row: TraceRow) -> tuple[int, int]:
        """Returns a row's session and the row before; -1: none. In a session of one name, each row follows the last."""
        if not row.chat:
            self._session.append(-1)
            return -1, -1
        before = self._row.get(row.parent or row.chat)
        if before is None:
            session, parent = self.count, -1
            self.count += 1
            if row.parent:
                self._row[row.parent] = -1 - session
        elif before < 0:
            session, parent = -1 - before, -1
        else:
            session, parent = self._session[before], before
        self._row[row.chat] = len(self._session)
        self._session.append(session)
        return session, parent


def read_columns(rows: Iterable[TraceRow], block_tokens: int, memory_bytes: int) -> TraceColumns:
    """Reads all rows. Raises :class:`InvalidArgument` as soon as they may need more than ``memory_bytes``, or if there
    are none."""
    numbers = [array(code) for code in "dqqiiiiiq"]
    times, inputs, outputs, kind_of, turns, user_of, session_of, parents, lengths = (each.append for each in numbers)
    kinds: dict[str, int] = {}
    users: dict[str, int] = {}
    sessions, ids = _Sessions(), array("q")
    count = looked_at = 0
    for count, row in enumerate(rows, 1):
        times(row.time_s)  # type: ignore[arg-type]
        inputs(row.input_tokens)
        outputs(row.output_tokens)
        kind = row.kind if row.kind.isprintable() else "".join(c if c.isprintable() else "?" for c in row.kind)
        known = len(kinds) < KINDS_MAX or kind in kinds
        kind_of(kinds.setdefault(kind if known else "other", len(kinds)))
        turns(min(row.turn, TURN_MAX))
        user_of(users.setdefault(row.user, len(users)) if row.user else -1)
        session, parent = sessions.place(row)
        session_of(session)
        parents(parent)
        lengths(len(row.blocks))
        ids.extend(row.blocks)
        if count % ROWS_EVERY == 0 or len(ids) - looked_at >= IDS_EVERY:
            looked_at = len(ids)
            _check(count, looked_at, memory_bytes)
    if not count:
        raise InvalidArgument("the trace has no whole row", field="trace")
    _check(count, len(ids), memory_bytes)
    time_s, input_tokens, output_tokens, kind_number, turn, user, session_number, parent_row, length = map(
        np.asarray, numbers
    )
    blocks, bound = numbered(ids)
    columns = TraceColumns(
        block_tokens,
        *(time_s, input_tokens, output_tokens, kind_number, list(kinds), turn),
        *(user, len(users), session_number, sessions.count, parent_row),
        *(np.concatenate(([0], np.cumsum(length))), blocks, bound),
    )
    return columns if (time_s[1:] >= time_s[:-1]).all() else _sorted(columns)


def _check(rows: int, ids: int, memory_bytes: int) -> None:
    if rows * ROW_BYTES + ids * ID_BYTES > memory_bytes:
        raise InvalidArgument(
            f"the trace's first {rows:,} rows with {ids:,} block ids may need more than "
            f"{memory_bytes / 2**30:.3g} GiB: allow more (--memory-gib), read fewer (--limit), "
            "or make the trace smaller (pinyon trace scale)",
            field="trace",
        )


def _sorted(old: TraceColumns) -> TraceColumns:
    """Returns the columns in order of time; equal times as in the file."""
    order = np.argsort(old.time_s, kind="stable")
    place = np.empty(len(order) + 1, np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    place[-1] = -1  # the parent -1 stays
    lengths = old.lengths[order]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    blocks = np.empty_like(old.blocks)
    for to, begin, length in zip(starts[:-1].tolist(), old.starts[:-1][order].tolist(), lengths.tolist(), strict=True):
        blocks[to : to + length] = old.blocks[begin : begin + length]
    by_row = ("time_s", "input_tokens", "output_tokens", "kind", "turn", "user", "session")
    rows = {name: getattr(old, name)[order] for name in by_row}
    return replace(old, **rows, parent=place[old.parent[order]], starts=starts, blocks=blocks)
