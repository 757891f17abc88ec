"""Checks that the books of a worker's decisions balance: pool, prompts, and admitted requests. O(blocks)."""

from __future__ import annotations

from pinyon.batching import PromptQueue
from pinyon.decisions import Admission
from pinyon.eviction.interface import NO_TRAITS
from pinyon.paging import BlockPool, SecondTier


def check_pool(pool: BlockPool) -> None:
    free, refs, contents, eviction = pool._free, pool._refs, pool._contents, pool.eviction
    key_of, block_of = contents.key_of, contents.block_of
    assert len(set(free)) == len(free), "a block is free twice"
    assert not any(refs[block] or key_of[block] is not None for block in free), "a free block is in use"
    assert min(refs) >= 0
    assert {key: block for block, key in enumerate(key_of) if key is not None} == block_of
    assert all((key in eviction) == (not held and key is not None) for key, held in zip(key_of, refs, strict=True))
    assert pool.used == sum(held > 0 for held in refs), "used blocks are not those with references"
    stale = [traits for key, traits in zip(key_of, contents._traits, strict=True) if key is None]
    assert all(traits is NO_TRAITS for traits in stale), "traits of a block without a key"
    promised = pool._promises._block_of.values()
    assert all(refs[block] and key_of[block] is None for block in promised), "promised without a holder, or with a key"
    if pool.below is not None:
        check_tier(pool.below)
        assert not any(key in pool.below for key in block_of), "a key in both tiers"
        assert len(pool.of_all) == len(eviction) + len(pool.below)


def check_tier(tier: SecondTier) -> None:
    taken = [held.slot for held in tier._held.values()]
    assert sorted([*taken, *tier._free]) == list(range(tier.slots)), "slots are neither held nor free"
    assert all(key in tier.eviction for key in tier._held), "a key of the tier that its eviction does not know"


def check_prompts(queue: PromptQueue) -> None:
    queued, active, here = queue._queue.keys(), queue._active.keys(), queue._left.keys()
    computed = active - queue._roomless
    assert not queued & active, "a prompt is both queued and in progress"
    assert here == queued | active
    assert queued == set(queue._order), "the order of service does not hold the queued prompts"
    assert set(queue._owned) == {number for number, prompt in queue._queue.items() if prompt.owned}
    assert queue.pending_tokens == sum(queue._left.values())
    assert queue._wanted.keys() <= here, "blocks are spared for prompts that have gone"
    assert queue._roomless <= active, "a prompt that waits for room is not in progress"
    assert queue._back.keys() <= computed, "a prompt without room is held back"
    assert set(queue._claims.values()) <= computed, "a claim of a prompt that is not being computed"


def check_admission(admission: Admission) -> None:
    check_pool(admission._pool)
    admission.check_integrity()
