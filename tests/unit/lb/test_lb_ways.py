"""The ways of requests: the demands that they wait with, those that have room, and regions that refuse or are away."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from prometheus_client import CollectorRegistry

from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable
from pinyon.core.request import RequestClass, SamplingParams
from pinyon.frontdoor.instances.kind import routed
from pinyon.frontdoor.instances.request import Request, Terms
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.request_loop import SHARE, LoopLimits, RequestLoop
from pinyon.frontdoor.served_models import DEMANDS_MAX, WAITING_DEMANDS_MAX, ServedModels
from pinyon.routing.geography import Geography
from pinyon.routing.queue import RequestQueue
from pinyon.routing.target import Report, Routed
from pinyon.routing.two_layers import RoutingChoice
from pinyon.runtime.telemetry import Telemetry


def request(*geographies: str, tenant: str = "t", sender: str = "") -> Request:
    whose = RequestClass(tenant=tenant, geographies=geographies)
    made = Request("id", "m", whose, b"\1\0\0\0" * 8, b"k" * 16, SamplingParams(5), Terms(0.0, 10.0))
    made.sender = sender
    return made


def depart(request: Request, models: ServedModels) -> None:
    whose = request.request_class
    request.depart(models.of(request.model), Routed(), whose.geographies, whose.tenant)


class Ways:
    """Served models asked about requests, in a wrapper because compiled classes cannot be derived from."""

    def __init__(self, region: str, clock, **options) -> None:
        self.models = ServedModels(region, clock, **options)

    def __getattr__(self, name: str):
        return getattr(self.models, name)

    def demand(self, request: Request) -> int:
        depart(request, self.models)
        return self.models.demand(request.served, request.route)

    def elsewhere(self, request: Request) -> str:
        depart(request, self.models)
        return self.models.elsewhere(request.served, request.route)

    def sent(self, request: Request, name: str) -> None:
        depart(request, self.models)
        self.models.sent(request.served, request.route.routed, name)


class Waiting:
    """A queue whose demands are ``waiting``."""

    def __init__(self, **options) -> None:
        self.now_s = 0.0
        self.waiting: set[int] = set()
        self.ways = Ways("us", lambda: self.now_s, pushing="pending", own=["m"], **options)
        self.ways.models.waiting = lambda: self.waiting

    def hear(self, name: str, region: str, available: int) -> None:
        report = Report(0, 0, room=available, received=0, available=available)
        self.ways.heard(name, region, {"m": report}, 0.1, draining=False)

    def instance(self, room: int) -> None:
        layer = self.ways.layer("m")
        assert layer is not None
        if layer.get("i") is None:
            layer.join("i", 8)
        layer.set_live("i", True)
        layer.report("i", Report(0 if room else 1, 0, room=room), self.now_s)


def test_who_may_go_to_the_same_waits_for_the_same():
    ways = (world := Waiting()).ways
    world.hear("lb-eu", "eu", 1)
    assert ways.demand(request()) == ways.demand(request(tenant="other"))
    assert ways.demand(request()) == ways.demand(request("us", "eu")) == ways.demand(request("eu", "us", "nowhere"))
    assert ways.demand(request("us")) != ways.demand(request("eu")) != ways.demand(request())
    assert ways.demand(request()) != ways.demand(request(sender="eu"))


def test_other_regions_are_no_party_to_block_keys():
    """The block keys depend on the layout of one cluster: a prompt that may go elsewhere is known by its tokens."""
    ways = Ways("us", lambda: 0.0, own=["m"])
    assert routed(request(), ways.models, b"").keys == b"k" * 8
    ways.expect("lb-eu", "eu")
    assert routed(request(), ways.models, b"").keys == b"", "8 tokens are no chunk"


def test_a_region_that_comes_later_is_open_to_who_comes_later():
    """A demand tells the destinations of all requests that wait with it, by the first request's words.

    A request that may go to one more region must not share the number."""
    ways = (world := Waiting()).ways
    world.instance(room=0)
    before = ways.demand(request("us", "eu"))
    assert before == ways.demand(request("us")), "no other region is known"
    assert not ways.is_open(before)
    world.hear("lb-eu", "eu", 3)
    after = ways.demand(request("us", "eu"))
    assert after != before
    assert ways.demand(request("us")) != after
    assert ways.is_open(after)
    assert not ways.is_open(ways.demand(request("us")))
    ways.gone("lb-eu")
    assert not ways.is_open(after), "it waits for its own region"
    assert ways.demand(request("us", "eu")) == ways.demand(request("us"))


def test_tenants_with_a_law_of_their_own_wait_by_themselves():
    geography = Geography({"us": (), "eu": ()}, (), {"acme": ("eu",)})
    ways = (world := Waiting(geography=geography)).ways
    world.instance(room=1)
    world.hear("lb-eu", "eu", 0)
    assert ways.is_open(ways.demand(request()))
    assert not ways.is_open(ways.demand(request(tenant="acme")))


def test_demands_that_nobody_waits_with_are_forgotten():
    ways = (world := Waiting()).ways
    first = ways.demand(request())
    world.waiting = {first}
    for each in range(2 * DEMANDS_MAX):
        ways.demand(request(sender=f"s{each}"))
    assert ways.demand(request()) == first
    assert len(ways._demands) <= DEMANDS_MAX
    assert len(ways._numbers) <= DEMANDS_MAX


def test_clients_cannot_make_any_number_of_demands_wait():
    ways = (world := Waiting()).ways
    names = [f"r{each:02}" for each in range(12)]
    for name in names:
        world.hear(f"lb-{name}", name, 0)
    choices = itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(1, 13))
    for choice in itertools.islice(choices, WAITING_DEMANDS_MAX):
        world.waiting.add(ways.demand(request(*choice)))
    with pytest.raises(ResourceExhausted, match="choices of regions"):
        ways.demand(request(*next(choices)))
    assert len(world.waiting) == WAITING_DEMANDS_MAX
    assert ways.demand(request(names[0])) in world.waiting, "who needs what others wait for may wait, too"
    ways.demand(request())  # a request that names no region may wait too
    ways.demand(request(sender="r00"))


def test_credits_of_one_model_are_not_used_up_by_another() -> None:
    """The load balancer counts its received requests of all models together."""
    clock = [0.0]
    ways = Ways("us", lambda: clock[0], pushing="pending", own=["m", "n"])

    def hear(received: int) -> None:
        report = Report(0, 0, room=2, received=received, available=1)
        ways.heard("lb-eu", "eu", {"m": report, "n": report}, 0.1, draining=False)

    hear(0)
    for _ in range(2):
        ways.sent(request(), "lb-eu")
    other = request()
    other.model = "n"
    assert ways.elsewhere(other) == "lb-eu"
    assert ways.elsewhere(request()) == ""
    ways.sent(other, "lb-eu")
    hear(2)
    assert ways.elsewhere(request()) == "lb-eu", "both have arrived"
    ways.sent(other, "lb-eu")
    assert ways.elsewhere(other) == "", "one was under way when it told, and there is one more"
    hear(4)
    assert ways.elsewhere(other) == "lb-eu"


def test_a_region_that_keeps_refusing_is_asked_less_and_less():
    ways = (world := Waiting()).ways

    def available(reports: bool = True) -> bool:
        """Returns whether the other region is available, after it has just reported room."""
        if reports:
            ways.heard("lb-eu", "eu", {"m": Report(pending=0, room=4, available=2)}, 0.05, draining=False)
        (_, other) = ways.dry_run(ways.of("m"), (), "")
        return other.available

    asked = 0
    for tick in range(600):
        world.now_s = tick / 10
        if available():
            asked += 1
            ways.refused("m", "lb-eu")
            assert not available(reports=False)
    assert asked < 30
    world.now_s += 4.0
    assert available()
    ways.refused("m", "lb-eu")
    assert not available()
    ways.accepted("lb-eu", world.now_s + 0.01)
    assert available(), "a request that it serves ends the pause"
    ways.refused("m", "lb-eu")
    ways.gone("lb-eu")
    assert available(), "it may be another one"


class Away:
    """The kind of targets of which none comes."""

    def queues(self, flight: Request) -> bool:
        return False

    def gives_up(self, flight: Request) -> bool:
        return False

    async def place(self, flight: Request, choice: RoutingChoice) -> PinyonError:
        return Unavailable("away")

    async def wait_change(self, flight: Request, timeout_s: float) -> None:
        await asyncio.Event().wait()


async def test_those_who_chose_regions_hold_a_share_of_the_slots() -> None:
    models = ServedModels("us", lambda: 0.0, own=["m"])
    metrics, limits = DoorMetrics(CollectorRegistry(), Line(RequestQueue(1, 1))), LoopLimits(slots=3 * SHARE)
    loop = RequestLoop(models, Away(), metrics, Telemetry("lb", "lb"), limits, lambda: 0.0)

    async def seek(*geographies: str) -> asyncio.Task[None]:
        depart(seeking := request(*geographies), models)
        task = asyncio.ensure_future(loop._place(seeking, None))
        await asyncio.wait({task}, timeout=0)
        return task

    everyone = [await seek() for _ in range(20)]
    chosen = [await seek("us") for _ in range(3)]
    for _ in range(10):
        with pytest.raises(Unavailable, match="many wait"):
            await (await seek("us"))
        everyone.append(await seek())
        chosen[0].cancel()
        await asyncio.wait({chosen.pop(0)})
        chosen.append(await seek("us"))
    assert not any(each.done() for each in (*everyone, *chosen))
    for each in (*everyone, *chosen):
        each.cancel()
