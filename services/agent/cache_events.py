"""The KV cache events of vLLM and SGLang, read from a decoded batch.

A batch is a list of time, events and, in some versions, rank. An event is a map with its ``type``, or in older versions
a list that begins with it. Both may lack members at their end."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from pinyon.core.block_keys import tokens_to_bytes

BlockHash = int | bytes
"""The engine's own name of a block's content, which says nothing to others."""
_MEMBERS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": ("medium",),
}


class Stored(NamedTuple):
    """Blocks that the engine now holds, one behind the other. ``tokens`` are little-endian u32.

    They are of the layers of ``group``, whose kind is ``attention``, if the engine tells.

    ``plain`` of them depend only on tokens, adapter and salt, but later ones on images for example. ``lora`` is the
    adapter's name. ``salt`` is the request's ``cache_salt``, if the blocks begin a prompt."""

    hashes: list[BlockHash]
    parent: BlockHash | None
    tokens: bytes
    block_tokens: int
    plain: int
    lora: str
    salt: str
    group: int = 0
    attention: str = ""


class Removed(NamedTuple):
    """Blocks of which the engine has dropped one copy each; None: all copies of all blocks."""

    hashes: list[BlockHash] | None
    group: int = 0


def read_events(batch: Any) -> list[Stored | Removed]:
    """Returns the batch's events about blocks that the engine computes with. Unknown kinds are left out.

    Raises ``ValueError`` for a batch that cannot be understood."""
    try:
        return [event for each in batch[1] if (event := _event(each)) is not None]
    except (TypeError, LookupError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _event(raw: Any) -> Stored | Removed | None:
    kind = raw["type"] if isinstance(raw, dict) else raw[0]
    members = _MEMBERS.get(kind, ())
    event: dict[str, Any] = raw if isinstance(raw, dict) else dict(zip(members, raw[1:], strict=False))
    if not members or event.get("medium") not in (None, "GPU"):  # which builds for CPUs say, too
        return None
    if kind == "AllBlocksCleared":
        return Removed(None)
    hashes, parent, group = list(event["block_hashes"]), event.get("parent_block_hash"), event.get("group_idx") or 0
    if type(group) is not int or not {type(each) for each in (*hashes, parent)} <= {int, bytes, type(None)}:
        raise ValueError("not a block's hash")
    return Removed(hashes, group) if kind == "BlockRemoved" else _stored(event, hashes, parent, group)


def _stored(event: dict[str, Any], hashes: list[BlockHash], parent: BlockHash | None, group: int) -> Stored:
    lora, size, salt = event.get("lora_name") or "", event["block_size"], event.get("cache_salt") or ""
    plain = 0 if event.get("lora_id") is not None and not lora else len(hashes)
    for place, keys in enumerate(event.get("extra_keys") or ()):
        others = list(keys or ())
        if lora and others[:1] == [lora]:
            del others[0]
        if parent is None and not place and len(others) == 1 and isinstance(others[0], str):
            salt = others[0]
        elif others:
            plain = min(plain, place)
            break
    attention, ids = event.get("kv_cache_spec_kind") or "", event["token_ids"]
    if not (isinstance(lora, str) and isinstance(salt, str) and isinstance(attention, str) and type(size) is int):
        raise ValueError("not a stored block")
    if ids and isinstance(ids[0], list | tuple):  # SGLang, speculating: each token with the next one
        ids = [first for first, _ in ids]
    return Stored(hashes, parent, tokens_to_bytes(array("I", ids)), size, plain, lora, salt, group, attention)
