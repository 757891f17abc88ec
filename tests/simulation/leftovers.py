"""Checks that nothing is left of the requests of a simulation that is over."""

from __future__ import annotations

from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.engine import SimEngine
from pinyon_lab.simulator.prefill_reference import PrefillReference
from pinyon_lab.simulator.reference_memory import PooledCache
from tests.queue_integrity import check_queue
from tests.worker_integrity import check_admission, check_prompts


def check_idle(engine: SimEngine) -> None:
    """Raises ``AssertionError`` if anything of a request is left, ``RuntimeError`` if the books do not balance."""
    check_admission(engine.admission)
    check_prompts(engine.prompts)
    held = {
        "blocks": engine.pool.used,
        "waiting": engine.admission.waiting,
        "admitted": engine.admission.admitted,
        "leases": engine.reservations.leases,
        "prompts": engine.prompts.queued + engine.prompts.active,
        "prompt tokens": engine.prompts.pending_tokens + engine._passing,
        "steps": engine.steps.waiting + engine.steps.running + engine.steps.prefilling,
        "jobs": len(engine.jobs) + len(engine.decodes) + len(engine._wanted) + len(engine._after_step),
    }
    assert not any(held.values()), f"{engine.name}: {held}"


def check_cluster(cluster: SimCluster) -> None:
    """Raises if a request has not ended, or anything is left anywhere."""
    front, inflight = cluster.front, cluster.fleet.inflight
    assert not front.requests, sorted(front.requests)
    assert (front.queue.in_flight, front.queue.queued) == (0, 0)
    check_queue(front.queue)
    assert (inflight.prefills, inflight.decodes, len(inflight.expected)) == (0, 0, 0)
    assert not cluster.moves.links._flows
    assert not cluster._attempts.movable
    cluster.fleet.index.check_integrity()
    for engine in cluster.members.engines.values():
        check_idle(engine)
        state = engine.state
        assert (state.queued_prefill_us, state.inflight_decode_blocks, state.inflight_reads) == (0, 0, 0)


def check_reference(reference: PrefillReference) -> None:
    """Asserts that nothing is left of served requests, and that the books agree."""
    fleet = reference._fleet
    assert not any(len(each.waiting) or each.served for each in reference._instances)
    assert not reference._ends
    assert not fleet.inflight.prefills
    assert not fleet.inflight.decodes
    assert not len(fleet.inflight.expected)
    fleet.inflight.check_integrity()
    fleet.index.check_integrity()
    for each in reference._instances:
        ssd = each.cache._ssd if isinstance(each.cache, PooledCache) else ()
        assert fleet.index.blocks_of(each.state) == len(each.cache.cache.resident) + len(ssd)
        assert len(each.cache.cache.resident) <= each.cache.cache.capacity
        assert each.state.queued_prefill_us == each.state.computing == 0
