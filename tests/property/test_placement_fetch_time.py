"""Predicted fetch times, and plans against the rule written as a loop over holders.

Times are never negative, and grow with the bytes to fetch and with other fetches."""

from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.request import Role
from pinyon.placement.fetch_plan import FetchPlanner
from pinyon.placement.fetch_time import fetch_s
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.policy import Fetch, PlacementDecision
from tests.unit.placement.conftest import LAYOUT, hold, info, keys, make_fleet, member

BLOCKS = 8
ROLES = (Role.PREFILL, Role.MIXED, Role.STORE)
HOSTS = ("a", "b", "")


@st.composite
def worlds(draw):
    """Returns a fleet in which some fetches were measured and some are under way."""
    fleet = make_fleet(("r0", Role.PREFILL), ("d0", Role.DECODE))
    names = ["r0"]
    for number in range(draw(st.integers(1, 6))):
        role, host = draw(st.sampled_from(ROLES)), draw(st.sampled_from(HOSTS))
        name = f"n{number}"
        address = f"{host}:{number}" if host else name
        fleet.join(info(name, role, address=address, on_ssd=role is Role.STORE and draw(st.booleans())), 0.0)
        hold(fleet, name, sorted(draw(st.sets(st.integers(0, BLOCKS - 1)))))
        names.append(name)
    readers = [name for name in names if member(fleet, name).info.role is not Role.STORE]
    pairs = st.tuples(st.sampled_from(readers), st.sampled_from(names)).filter(lambda pair: pair[0] != pair[1])
    placed = draw(st.lists(st.tuples(pairs, st.integers(1, BLOCKS)), max_size=8)) if len(names) > 1 else []
    for number, ((reader, source), blocks) in enumerate(placed):
        fetches = (Fetch(member(fleet, source), 0, blocks),)
        decision = PlacementDecision(
            member(fleet, reader), member(fleet, "d0"), 0, fetches, transfer_s=0.1, prefill_s=0.1
        )
        fleet.inflight.add(str(number), decision, 1, 0.0)
    for number in range(draw(st.integers(0, len(placed)))):
        fleet.inflight.begin_prefill(str(number), member(fleet, placed[number][0][0]), 1.0)
    sizes, seconds = st.integers(0, 1 << 40), st.floats(0, 3600)
    for (reader, source), size, took_s, said in draw(
        st.lists(st.tuples(pairs, sizes, seconds, st.booleans()), max_size=12)
    ):
        fleet.learn_transfers(member(fleet, reader), [(size, took_s, member(fleet, source) if said else None)], 2.0)
    return fleet, names, readers


@given(worlds(), st.integers(0, 1 << 40), st.integers(1, 1 << 40), st.data())
def test_more_bytes_take_longer(world, size, more, data):
    fleet, names, readers = world
    source = member(fleet, data.draw(st.sampled_from(names)))
    for name in readers:
        state = member(fleet, name)
        took_s = fetch_s(state, [(source, size)])
        assert 0 <= took_s <= fetch_s(state, [(source, size + more)]) * (1 + 1e-9)
        assert took_s <= fetch_s(state, [(source, size), (source, more)]) * (1 + 1e-9)


@given(worlds(), st.integers(1, 1 << 30), st.integers(1, BLOCKS), st.data())
def test_what_is_on_its_way_delays_and_then_no_longer(world, size, blocks, data):
    fleet, names, readers = world
    reader, other = (member(fleet, data.draw(st.sampled_from(readers))) for _ in range(2))
    source = member(fleet, data.draw(st.sampled_from([name for name in names if name != other.info.instance_id])))
    before_s = fetch_s(reader, [(source, size)])
    fetches = (Fetch(source, 0, blocks),)
    decision = PlacementDecision(other, member(fleet, "d0"), 0, fetches, transfer_s=0.1, prefill_s=0.1)
    fleet.inflight.add("more", decision, 1, 0.0)
    assert fetch_s(reader, [(source, size)]) >= before_s
    end = data.draw(st.sampled_from(("computes", "released", "leaves", "source leaves")))
    if end == "computes":
        fleet.inflight.begin_prefill("more", other, 1.0)
    elif end == "released":
        fleet.inflight.release("more")
    elif end == "leaves" and other is not reader and other is not source:
        fleet.leave(other.info.instance_id)
    elif end == "source leaves" and source is not reader:
        fleet.leave(source.info.instance_id)
        newer = fleet.join(info("newer", Role.STORE), 3.0)  # may have the row of the instance that left
        fleet.inflight.release("more")
        assert newer.sendings == newer.sending_bytes == 0
        return
    else:
        return
    if other is reader or end != "leaves":
        assert fetch_s(reader, [(source, size)]) == before_s


def oracle(pool, match, reader, first, end):
    """Chooses for each span by looking at all its holders."""

    def preference(state):
        elsewhere = not reader.host or state.host != reader.host
        return state.info.role is not Role.STORE, elsewhere, state.inflight_reads, (state.row - reader.row - 1) % 2**32

    spans = match.spans(first, end, pool.asked_by(reader) & ~reader.bit, len(match.runs))
    return tuple(Fetch(min(pool.sources.among(mask), key=preference), at, until - at) for at, until, mask in spans)


@given(worlds(), st.data())
def test_plans_are_those_of_a_look_at_all_holders(world, data):
    fleet, names, readers = world
    for name in readers:
        failed = data.draw(st.sets(st.sampled_from(names), max_size=2))
        addresses = frozenset(member(fleet, each).info.address for each in failed)
        fleet.set_load(member(fleet, name), InstanceLoad(failed_sources=addresses), 3.0)
    (pool,) = fleet.pools("m")
    match = fleet.index.match(keys(*range(BLOCKS)), BLOCKS, fleet.inflight.expected)
    planner = FetchPlanner(pool, match)
    for name in (*readers, *readers):
        reader = member(fleet, name)
        local = match.held_by(reader)
        end = match.extent(local, pool.asked_by(reader) & ~reader.bit)
        plan = planner.plan(reader, local, end)
        assert plan == oracle(pool, match, reader, local, end)
        spans = [(each.source, each.block_count * LAYOUT.block_bytes) for each in plan]
        assert planner.fetch_s(reader, local, end) == fetch_s(reader, spans)
