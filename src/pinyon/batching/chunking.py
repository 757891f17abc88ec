"""How many prompt tokens of whom go into the next step (chunked prefill with a budget per step, as Sarathi's)."""

from __future__ import annotations

from collections.abc import Iterable

from pinyon.batching.step_cost import TimeLeft


def plan_chunks(
    spans: Iterable[tuple[int, int]],
    *,
    budget_tokens: int,
    chunk_tokens: int,
    block_tokens: int,
    time: TimeLeft | None = None,
) -> list[int]:
    """Tokens to compute now for each ``(position, end)`` span, as they come; trailing zeros are left out.

    The first span gets all it can use before the second gets anything. No span gets more than ``chunk_tokens``. A chunk
    that does not reach the span's end is cut at a block boundary where that leaves at least one token, so that blocks
    become complete (and whole ranges to send) as early as possible.

    ``time``: what the chunks may take beside those that are decoded. The first one has a block (``chunk_tokens``, if
    that is less) in any case, so that prompts always advance; another one has none rather than a part of a block.
    """
    taken: list[int] = []
    for position, end in spans:
        take = min(end - position, chunk_tokens, budget_tokens)
        if take <= 0:
            break
        if time is not None:
            block = min(take, block_tokens)
            take = time.tokens(position, take)
            if take < block:
                if taken:
                    break
                take = block
        if position + take < end:
            over = (position + take) % block_tokens
            if over < take:
                take -= over
        taken.append(take)
        if time is not None:
            time.spend(position, take)
        budget_tokens -= take
    return taken
