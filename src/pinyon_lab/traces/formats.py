"""The formats of public traces, parsed row by row; the first row of a file tells its format.

- ``mooncake``: ``timestamp`` in ms, ``hash_ids`` of 512 tokens (Mooncake, FAST '25 release); perhaps ``session_id``,
  or, as pinyon writes it, ``type``, ``turn``, ``user_id``.
- ``qwen``: ``timestamp`` in s, ``chat_id``, ``parent_chat_id``, ``type``, ``turn``, ``hash_ids`` of 16 tokens
  (qwen-bailian-usagetraces-anon); perhaps ``user_id``. Pinyon writes this format, too.
- ``bailian``: the record of "KVCache cache in the wild", Fig. 3: a date, user, request type, and a hash of each 4
  tokens alone. Here a block's id stands for all tokens up to its end.
- ``azure``: CSV of lengths without blocks (AzurePublicDataset, LLM inference 2023)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from pinyon.core.errors import InvalidArgument

LINE_CHARS_MAX = 64 << 20
"""The length of the longest row: a million ids and more."""
COUNT_END = 1 << 36
"""The end of the range of counts of tokens or turns. Sums over all rows that fit into memory stay far below 63 bits."""
TEXT_CHARS_MAX = 128
CHATS_MAX = 1 << 20
"""The number of conversations whose turns are counted at a time; the one that began first is forgotten first."""


class TraceRow(NamedTuple):
    """A request as ids, without text. What a format does not tell is empty, 0 or -1."""

    time_s: float
    """The time since the trace began, or since any other zero."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """The ids of the prompt's blocks, the last of which may not be full. Equal ids mean equal prefixes up to there."""
    kind: str = ""
    """The type of the request, as the load balancer's label ``kind``."""
    turn: int = 0
    """The turn in the conversation, from 1."""
    chat: str = ""
    """The id of the request, or of its session if the format has no other."""
    parent: str = ""
    """The request that this one follows in its conversation."""
    user: str = ""
    output_blocks: tuple[int, ...] = ()

    @property
    def category(self) -> str:
        """The category, as :attr:`pinyon.core.request.RequestClass.category`."""
        return f"{self.kind}/{self.turn}" if self.kind else ""


Turns = dict[str, int]
"""The last turn of each conversation of a file, by its last chat or its name."""


class TraceFormat(NamedTuple):
    """A trace format. ``parse`` reads a row of a file whose turns are counted; it raises ``ValueError`` for a broken
    row."""

    name: str
    block_tokens: int
    """The size of a block; 0: there are no blocks."""
    parse: Callable[[str, Turns], TraceRow]
    header: bool = False
    """True if the first line is a header."""

    def make(self) -> Callable[[str], TraceRow]:
        """Returns the parser of one file's rows."""
        turns: Turns = {}
        return lambda line: self.parse(line, turns)


def detect_format(line: str) -> TraceFormat:
    """Returns the format of a file by its first line. Raises :class:`InvalidArgument` if it is unknown."""
    if line.startswith("TIMESTAMP,"):
        return FORMATS["azure"]
    try:
        row = _object(line)
    except ValueError as error:
        raise InvalidArgument(f"no trace: its first line is neither JSON nor Azure's header ({error})") from None
    for name, field in (("bailian", "tokens_hashes_input"), ("qwen", "parent_chat_id"), ("mooncake", "hash_ids")):
        if field in row:
            return FORMATS[name]
    known = ", ".join(FORMATS)
    raise InvalidArgument(f"no trace: its first row has none of the fields of the known formats ({known})")


def _turn(turns: Turns, chat: str, parent: str) -> int:
    """Returns the turn of a chat that follows another one; in a session of one name, itself."""
    turn = turns.get(parent, 0) + 1
    if chat not in turns and len(turns) >= CHATS_MAX:
        del turns[next(iter(turns))]
    turns[chat] = turn
    return turn


def _mooncake(line: str, turns: Turns) -> TraceRow:
    row = _object(line)
    time_s = _number(row, "timestamp") / 1e3
    lengths = (_count(row, "input_length"), _count(row, "output_length"))
    blocks = _ids(row, "hash_ids")
    session, user = _text(row, "session_id"), _text(row, "user_id")
    if session:
        return TraceRow(time_s, *lengths, blocks, "session", _turn(turns, session, session), session, user=user)
    turn = _count(row, "turn") if "turn" in row else 0
    return TraceRow(time_s, *lengths, blocks, _text(row, "type"), turn, user=user)


def _qwen(line: str, _: Turns) -> TraceRow:
    row = _object(line)
    return TraceRow(
        _number(row, "timestamp"),
        _count(row, "input_length"),
        _count(row, "output_length"),
        _ids(row, "hash_ids"),
        _text(row, "type"),
        _count(row, "turn"),
        _text(row, "chat_id"),
        _parent(row),
        _text(row, "user_id"),
        _ids(row, "output_hash_ids") if "output_hash_ids" in row else (),
    )


def _bailian(line: str, turns: Turns) -> TraceRow:
    row = _object(line)
    chat, parent = _text(row, "chat_id"), _parent(row)
    blocks = _chained(_ids(row, "tokens_hashes_input"))
    answer = _ids(row, "tokens_hashes_output") if "tokens_hashes_output" in row else ()
    return TraceRow(
        _date(row["timestamp"]) if isinstance(row.get("timestamp"), str) else _number(row, "timestamp"),
        _count(row, "num_input_tokens"),
        _count(row, "num_output_tokens"),
        blocks,
        _text(row, "req_type"),
        _turn(turns, chat, parent),
        chat,
        parent,
        _text(row, "user_id"),
        _chained(answer, blocks[-1] if blocks else 0),
    )


def _azure(line: str, _: Turns) -> TraceRow:
    parts = line.strip().split(",")
    if len(parts) != 3:
        raise ValueError(f"{len(parts)} columns instead of 3")
    return TraceRow(_date(parts[0]), _tokens(parts[1]), _tokens(parts[2]), ())


FORMATS = {
    each.name: each
    for each in (
        TraceFormat("mooncake", 512, _mooncake),
        TraceFormat("qwen", 16, _qwen),
        TraceFormat("bailian", 4, _bailian),
        TraceFormat("azure", 0, _azure, header=True),
    )
}


def line_of(row: TraceRow, format_name: str = "qwen") -> str:
    """Returns the line of a row, with its end. In ``mooncake`` there are no ids of requests, and times in whole ms."""
    if format_name not in ("qwen", "mooncake"):
        raise ValueError(f"pinyon writes qwen and mooncake, not {format_name}")
    fields: dict[str, object] = {}
    lengths = {"input_length": row.input_tokens, "output_length": row.output_tokens}
    kind = {"type": row.kind, "turn": row.turn}
    if format_name == "qwen":
        time_s = round(row.time_s, 6) + 0.0  # never -0.0
        fields |= {"chat_id": row.chat, "parent_chat_id": row.parent or -1, "timestamp": time_s}
        fields |= lengths | kind | {"hash_ids": row.blocks}
    else:
        fields |= {"timestamp": round(row.time_s * 1e3), **lengths, "hash_ids": row.blocks}
        fields |= kind if row.kind else {}
    if row.user:
        fields["user_id"] = row.user
    if row.output_blocks and format_name == "qwen":
        fields["output_hash_ids"] = row.output_blocks
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _object(line: str) -> Mapping[str, Any]:
    if len(line) > LINE_CHARS_MAX:
        raise ValueError(f"a line of more than {LINE_CHARS_MAX} characters")
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    return row


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if type(value) is not int and type(value) is not float:
        raise ValueError(f"{name} is no number")
    if not abs(value) < 1e15:
        raise ValueError(f"{name} is out of range")
    return float(value)


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 0 <= value < COUNT_END:
        raise ValueError(f"{name} is no count")
    return value


def _text(row: Mapping[str, Any], name: str) -> str:
    """Returns a short text or a number as text; "" if the field is missing."""
    value = row.get(name)
    if value is None:
        return ""
    if type(value) is not str and type(value) is not int:
        raise ValueError(f"{name} is neither a text nor an integer")
    text = str(value)
    if len(text) > TEXT_CHARS_MAX:
        raise ValueError(f"{name} has more than {TEXT_CHARS_MAX} characters")
    return text


def _ids(row: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value: Any = row.get(name)
    integers = isinstance(value, list) and set(map(type, value)) <= {int}
    if not integers or (value and not (min(value) >= 0 and max(value) < 1 << 63)):
        raise ValueError(f"{name} is no list of ids")
    return tuple(value)


def _chained(hashes: Sequence[int], before: int = 0) -> tuple[int, ...]:
    """Returns 63-bit ids of prefixes from hashes of single blocks; ``before`` is the id before the first block."""
    ids = []
    for each in hashes:
        before = xxh3_64_intdigest((before << 64 | each).to_bytes(16, "little")) >> 1
        ids.append(before)
    return tuple(ids)


def _parent(row: Mapping[str, Any]) -> str:
    """Returns the preceding chat; "" if there is none, which some traces write as -1."""
    parent = _text(row, "parent_chat_id")
    return "" if parent == "-1" else parent


def _tokens(text: str) -> int:
    """Returns the number of tokens in a column."""
    value = int(text) if len(text) < 20 else -1
    if not 0 <= value < COUNT_END:
        raise ValueError(f"no count of tokens: {text!r:.40}")
    return value


def _date(text: str) -> float:
    """Returns the seconds since 1970 of ``2023-11-16 18:15:46.6805900``, with any number of digits."""
    head, _, fraction = text.partition(".")
    if fraction and not (fraction.isascii() and fraction.isdecimal()):
        raise ValueError(f"no time: {text!r:.60}")
    moment = datetime.strptime(head, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
