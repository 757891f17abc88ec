"""A check that the books of a load balancer's queue balance."""

from __future__ import annotations

from collections.abc import Collection

from pinyon.routing.queue import RequestQueue


def check_queue(queue: RequestQueue, closed: Collection[int] = ()) -> None:
    """Raises :class:`AssertionError` on a broken bound or a needless wait. ``closed``: demands without room."""
    slots, limit, in_flight = queue._slots, queue._limit, queue.in_flight
    assert 0 <= in_flight <= slots, f"{in_flight} of {slots} slots are taken"
    held = in_flight + len(queue._places)
    assert held <= slots + limit, f"{held} have a place, at most {slots + limit} may"
    tenants = queue._tenants.values()
    assert sum(map(len, tenants)) == len(queue._places), "places and tenants differ"
    assert all(map(len, tenants)), "a tenant without a place is kept"
    everyone = [waiting for tenant in tenants for waiting in tenant.waiting.values()]
    assert len(everyone) == queue.queued, "those who wait are miscounted"
    if in_flight < slots:
        held_up = {waiting.demand for waiting in everyone} - set(closed)
        assert not held_up, f"somebody waits beside a free slot, and has room: demands {held_up}"
    assert queue._lengths.longest == max(map(len, tenants), default=0), "the longest queue is another one"
    turns: dict[int, list] = {}
    for tenant in tenants:
        lanes: dict[int, list] = {}
        for each in tenant.waiting.values():
            lanes.setdefault(each.demand, []).append((each.due_s, each.rank, each))
        assert tenant.lanes == {demand: sorted(lane) for demand, lane in lanes.items()}, "a lane is wrong"
        for demand in lanes:
            turns.setdefault(demand, []).append((tenant.start, tenant.turn, tenant))
    assert queue._turns._turns == {demand: sorted(each) for demand, each in turns.items()}, "a turn is wrong"
