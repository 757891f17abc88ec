"""The blocks that vLLM drops next, apart from the scheduler."""

from pinyon.core.request import RequestClass
from pinyon.vllm.drops import Drops
from tests.vllm_double import BlockPool


def test_what_was_offered_first_is_still_dropped_first() -> None:
    pool, drops = BlockPool(8), Drops()
    assert drops.bind(pool)
    for block in pool.blocks[1:6]:
        block.block_hash = block.block_id
    jobs = [1, 2], [3, 4]
    for blocks, kind in zip(jobs, ("chat", "file"), strict=True):
        drops.used(0, blocks, RequestClass(kind=kind))
    found = drops.next(lambda block: b"%d" % block)
    assert [[block for _, _, block in each] for each in found.values()] == [*jobs]
    drops.used(0, [5], RequestClass())
    for blocks in jobs:
        pool.touch([pool.blocks[block] for block in blocks])
    for job_id, blocks in enumerate(jobs):
        drops.saved(job_id, [pool.blocks[block] for block in blocks])
    assert [block.block_id for block in pool.free] == [1, 2, 3, 4, 5, 6, 7]
    assert not any(block.ref_cnt for block in pool.blocks)
