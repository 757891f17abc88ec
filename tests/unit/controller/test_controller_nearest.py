from __future__ import annotations

import math

import pytest

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon.federation.distances import Distances, Position, parse_distances
from pinyon.federation.view import Federation, LbInfo, LbState, Member, RegionView
from pinyon.routing.geography import Geography, Rule
from services.controller.regions_page import RegionsPage, nearest

FRANKFURT, VIRGINIA, TOKYO = Position(50.11, 8.68), Position(38.95, -77.45), Position(35.68, 139.69)
PARIS = Position(48.86, 2.35)


def test_great_circles():
    assert FRANKFURT.km_to(FRANKFURT) == 0
    assert FRANKFURT.km_to(VIRGINIA) == pytest.approx(6550, rel=0.01)
    assert TOKYO.km_to(VIRGINIA) == pytest.approx(VIRGINIA.km_to(TOKYO))
    assert Position(0, 179.5).km_to(Position(0, -179.5)) == pytest.approx(111.2, rel=0.01), "over the date line"
    assert Position(90, 0).km_to(Position(-90, 77)) == pytest.approx(math.pi * 6371.0088)
    for wrong in ((91, 0), (0, 181), (math.nan, 0), (0, math.inf)):
        with pytest.raises(InvalidArgument):
            Position(*wrong)


def test_the_best_that_is_known():
    far = Distances({("a", "b"): (90.0, 10.0, 20.0)}, {("a", "b"): 1.0, ("a", "c"): 7.0}, {"a": PARIS, "d": VIRGINIA})
    assert far.ms("b", "a") == 20.0
    assert far.ms("c", "a") == 7.0
    assert far.ms("a", "d") == pytest.approx(PARIS.km_to(VIRGINIA) * 0.015)
    assert far.ms("b", "c") == math.inf
    assert far.ms("x", "x") == 0


def test_tables():
    assert parse_distances({"b": {"a": 3, "c": 4.5}, "a": {"b": 3.0}}) == {("a", "b"): 3.0, ("b", "c"): 4.5}
    for wrong in ([], {"a": 3}, {"a": {"b": -1}}, {"a": {"b": True}}, {"a": {"a": 1}}, {"a": {"b": 1}, "b": {"a": 2}}):
        with pytest.raises(InvalidArgument):
            parse_distances(wrong)
    with pytest.raises(InvalidArgument):
        parse_distances({"a b": {"c": 1}})


def member(lb_id: str, state: LbState = LbState.LIVE, http: str = "http://h") -> Member:
    return Member(LbInfo(lb_id, "1", lb_id[:2], "x:1", http), state, True)


FEDERATION = Federation(
    "e",
    1,
    (RegionView("eu", (), FRANKFURT), RegionView("jp", (), TOKYO), RegionView("us", (), VIRGINIA)),
    (member("eu-0", LbState.FAILED), member("jp-0"), member("us-0"), member("us-1", LbState.DRAINING)),
)
FAR = Distances(positions={"eu": FRANKFURT, "jp": TOKYO, "us": VIRGINIA})


def test_the_nearest_that_lives_comes_first():
    found = nearest(FEDERATION, Geography(), FAR, PARIS)
    assert [(each.region.name, each.live) for each in found] == [("us", True), ("jp", True), ("eu", False)]
    assert found[2].distance_km == pytest.approx(PARIS.km_to(FRANKFURT))
    assert [each.region.name for each in nearest(FEDERATION, Geography(), FAR, home="jp")] == ["jp", "us", "eu"]
    assert [each.region.name for each in nearest(FEDERATION, Geography(), FAR)] == ["jp", "us", "eu"], (
        "nobody is nearer"
    )


def test_the_law_of_the_nearest_region_is_the_clients():
    law = Geography(rules=(Rule(("eu",), ("jp",)),))
    found = nearest(FEDERATION, law, FAR, PARIS)
    assert [(each.region.name, each.allowed) for each in found] == [("jp", True), ("eu", True), ("us", False)]


def test_what_cannot_be_asked():
    with pytest.raises(NotFound):
        nearest(FEDERATION, Geography(), FAR, home="mars")
    with pytest.raises(InvalidArgument):
        nearest(FEDERATION, Geography(), FAR, PARIS, "eu")
    assert nearest(Federation(), Geography(), FAR, PARIS) == ()


def test_head_has_the_length_of_the_page_and_no_body():
    answers = []
    for method in ("GET", "HEAD"):
        fields: dict[str, str] = {}
        asked = {"REQUEST_METHOD": method, "PATH_INFO": "/v1/regions", "QUERY_STRING": ""}
        body = RegionsPage()(asked, lambda status, given, fields=fields: fields.update(given))
        answers.append((fields["Content-Length"], b"".join(body)))
    (length, page), head = answers
    assert length == str(len(page))
    assert head == (length, b"")
