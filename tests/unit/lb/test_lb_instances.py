"""The knowledge of instances that lasts between the conductor's lists."""

from __future__ import annotations

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.instances.clusters import Clusters
from pinyon.frontdoor.instances.instances import FIRST_PAUSE_S, MAX_PAUSE_S, ConductorCluster
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.layer import Layer
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import Blind
from pinyon.routing.target import Report
from pinyon.runtime.channel import PLAIN_CHANNELS

MODEL = "m"


def listed(**boots: str) -> conductor_pb2.InstanceList:
    """Returns instances by name; an instance whose boot id begins with a dash takes no requests."""
    layout = common_pb2.KvLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
    return conductor_pb2.InstanceList(
        instances=[
            conductor_pb2.Instance(
                info=conductor_pb2.InstanceInfo(
                    instance_id=name, boot_id=boot, role=common_pb2.ROLE_MIXED, address=f"{name}:1", model=MODEL,
                    model_fingerprint="f", layout=layout,
                ),
                schedulable=not boot.startswith("-"),
            )
            for name, boot in boots.items()
        ]
    )  # fmt: skip


def with_servers(message: conductor_pb2.InstanceList, *names: str) -> conductor_pb2.InstanceList:
    """Returns the list, in which these instances have servers and a layout of their own."""
    for each in message.instances:
        if each.info.instance_id in names:
            each.info.server_url, each.info.layout.layers = f"http://{each.info.instance_id}:8000", 2
    return message


def empty_view(routing: str = "least_loaded") -> ConductorCluster:
    layer = Layer(Blind(), ROUTING_POLICIES.make(routing))
    return ConductorCluster({MODEL: layer}.get)


def taken(view: ConductorCluster, exclude: set[str], now_s: float) -> str:
    """Chooses an instance, and records that a request went there and is over."""
    placement = view.choose(MODEL, 10, exclude, now_s, careful=bool(exclude))
    view.end(view.begin(MODEL, placement))
    return placement.decode_instance_id


def view_of(**boots: str) -> ConductorCluster:
    view = empty_view()
    view.update(listed(**boots), 0.0, first=True)
    return view


def chosen(view: ConductorCluster, now_s: float, *exclude: str) -> str:
    return view.choose(MODEL, 10, exclude, now_s).decode_instance_id


def test_who_failed_comes_last_until_the_pause_ends():
    view = view_of(a="1", b="1")
    assert chosen(view, 0.0) == "a"
    view.failures.failed("a", 0.0)
    assert chosen(view, FIRST_PAUSE_S - 0.1) == "b"
    assert chosen(view, FIRST_PAUSE_S - 0.1, "b") == "a"  # better than no instance
    assert set(view.failures.avoided(FIRST_PAUSE_S - 0.1)) == {"a"}
    assert set(view.failures.avoided(FIRST_PAUSE_S)) == set()
    assert chosen(view, FIRST_PAUSE_S) == "a"


def test_who_said_that_it_leaves():
    view = view_of(a="1", b="-1")
    message = listed(a="1", b="-1", c="-1")
    message.instances[2].load.draining = True
    view.update(message, 0.0)
    assert [view.leaves(name) for name in ("a", "b", "c", "unknown")] == [False, False, True, False]


def test_news_of_an_instance_and_its_success_end_the_pause():
    view = view_of(a="1", b="1")
    for news in (listed(a="2", b="1"), listed(b="1"), listed(a="-2", b="1")):
        view.failures.failed("a", 0.0)
        view.update(news, 0.0)
        view.update(listed(a="2", b="1"), 0.0)
        assert set(view.failures.avoided(0.0)) == set()
    view.failures.failed("a", 0.0)
    view.update(listed(a="2", b="1"), 0.0)  # the same again
    view.update(listed(a="2", b="1", c="1"), 0.0)  # news of another instance
    assert set(view.failures.avoided(0.0)) == {"a"}
    view.failures.succeeded("a", -1.0)  # success of a request that was placed before the failure
    assert set(view.failures.avoided(0.0)) == {"a"}
    view.failures.succeeded("a", 0.0)
    assert set(view.failures.avoided(0.0)) == set()


@pytest.mark.parametrize("routing", ROUTING_POLICIES.names)
@pytest.mark.parametrize("dead", [{"a", "b", "c"}, {"a", "d", "h"}, set("abcdefg")])
def test_requests_find_those_that_live_at_whatever_time(routing: str, dead: set[str]):
    """The first request of a minute meets the dead; later ones meet one now and then, and go on to a live one."""
    view = empty_view(routing)
    view.update(listed(**dict.fromkeys("abcdefgh", "1")), 0.0, first=True)
    met = 0
    for number in range(600):
        now_s, exclude, failures = number * 0.1, set(), 0
        while (name := taken(view, exclude, now_s)) in dead:
            view.failures.failed(name, now_s)
            exclude.add(name)
            failures += 1
        view.failures.succeeded(name, now_s)
        assert failures <= (len(dead) if number == 0 else 1)
        met += failures
    assert met <= len(dead) * (2 + 60 / MAX_PAUSE_S), "each is tried once in a pause"
    for name in dead:  # all of them are back
        for _ in range(20):
            now_s += MAX_PAUSE_S
            if view.choose(MODEL, 10, set("abcdefgh") - {name}, now_s).decode_instance_id == name:
                view.failures.succeeded(name, now_s)
    assert set(view.failures.avoided(now_s)) == set()


def test_one_request_at_a_time_tries_a_failed_instance():
    """A frozen instance costs a request seconds; the other requests need not pay too."""
    view = view_of(a="1", b="1")
    view.failures.failed("a", 0.0)
    assert [chosen(view, FIRST_PAUSE_S) for _ in range(3)] == ["a", "b", "b"]
    view.failures.succeeded("a", FIRST_PAUSE_S)
    assert chosen(view, FIRST_PAUSE_S) == "a"


def test_instances_a_new_conductor_omits_stay_for_the_grace_time():
    view = view_of(a="1", b="1")
    view.update(listed(), 100.0, first=True)
    assert (view.unconfirmed, view.servable(MODEL, 100.0)) == (2, True)
    view.failures.failed("a", 100.0)
    view.update(listed(b="1"), 101.0)
    assert view.unconfirmed == 1
    assert set(view.failures.avoided(101.0)) == {"a"}, "there is no news of it"
    assert view.addresses == {"a:1", "b:1"}
    renewed, _ = view.update(listed(a="1", b="1"), 102.0)
    assert (view.unconfirmed, renewed) == (0, {"a:1"})
    assert set(view.failures.avoided(102.0)) == set(), "it has registered"
    view.update(listed(), 200.0, first=True)
    assert chosen(view, 209.9) in "ab"
    with pytest.raises(Unavailable):
        chosen(view, 210.0)
    assert not view.servable(MODEL, 210.0)
    assert view.addresses == frozenset()


def test_another_process_at_an_address_is_told_apart():
    view = view_of(a="1", b="1")
    assert view.update(listed(a="2", b="1", c="1"), 1.0) == ({"a:1", "c:1"}, {"a:1"})
    assert view.update(listed(a="2", b="1", c="1"), 2.0) == (set(), set())


def test_whose_weights_are_whose():
    message = listed(a="1", b="1", c="1")
    message.instances[2].info.model_fingerprint = "new"
    view = empty_view()
    view.update(message, 0.0, first=True)
    assert view.with_other_weights(MODEL, "f") == {"c"}
    assert view.with_other_weights(MODEL, "new") == {"a", "b"}
    assert view.with_other_weights("another model", "f") == set()
    assert [view.fingerprint(MODEL, name) for name in "acx"] == ["f", "new", "f"]
    assert view.fingerprint("another model", "x") == ""
    assert [view.keys_fit(view, MODEL, name) for name in "acx"] == [True, False, True]


def test_what_is_missing_is_said():
    message = listed(p="1", d="1", e="1")
    for instance, role in zip(message.instances, (common_pb2.ROLE_PREFILL, *[common_pb2.ROLE_DECODE] * 2), strict=True):
        instance.info.role = role
    view = empty_view()
    assert view.lacks(MODEL, 0.0) == "No instance of m is available."
    view.update(message, 0.0)
    assert view.lacks(MODEL, 0.0) == view.lacks(MODEL, 0.0, {"e"}) == ""
    assert "generates tokens is available (1 that" in view.lacks(MODEL, 0.0, {"d", "e"})
    assert "computes prompts is available (2 that" in view.lacks(MODEL, 0.0, {"p"})
    message.instances[0].info.model_fingerprint = "other"
    view.update(message, 0.0)
    assert "same weights" in view.lacks(MODEL, 0.0)


def test_who_is_to_be_asked_whether_it_is_there():
    view = view_of(a="1", b="1")

    def unvouched(everyone: bool) -> list[str]:
        return [each.instance_id for each in view.unvouched(MODEL, everyone=everyone)]

    assert (unvouched(False), unvouched(True)) == ([], ["a", "b"])
    view.update(listed(b="1"), 100.0, first=True)
    assert (unvouched(False), sorted(unvouched(True))) == (["a"], ["a", "b"])


def clusters_of(pushing: str, region: str) -> tuple[ServedModels, Clusters]:
    models = ServedModels(region, lambda: 0.0, pushing=pushing, own=(MODEL,))
    clusters = Clusters(models, 1, PLAIN_CHANNELS, "", lambda *_: ConductorCluster(models.layer), lambda: 0.0)
    clusters.home.update(listed(a="1", b="1"), 0.0, first=True)
    return models, clusters


def live_of(models: ServedModels) -> dict[str, bool]:
    return {target.name: target.live for target in models.of(MODEL).layers.local}


@pytest.mark.parametrize(
    ("pushing", "region", "stays"), [("blind", "", True), ("blind", "eu", False), ("pending", "", False)]
)
def test_who_nobody_watches_stays_a_choice_when_it_is_lost(pushing, region, stays):
    models, clusters = clusters_of(pushing, region)
    clusters.load("a:1", worker_pb2.Load(pending=30, running=64), 0)
    clusters.lost("a:1")
    assert live_of(models) == {"a": stays, "b": True}
    pending = {target.name: target.report.pending for target in models.of(MODEL).layers.local}
    unknown = Report().pending
    assert pending == {"a": unknown if stays else 30, "b": unknown}, "nobody might ever report that its load has ended"


def test_all_are_choices_again_when_watching_ends():
    models, clusters = clusters_of("pending", "")
    clusters.lost("a:1")
    models.use(pushing="blind")
    clusters.update_sessions()
    assert live_of(models) == {"a": True, "b": True}


def test_own_instances_outrank_servers_only_if_they_can_serve() -> None:
    view = empty_view()
    for boot, by_servers in (("-1", True), ("1", False), ("-1", True)):
        view.update(with_servers(listed(own=boot, server="1"), "server"), 0.0)
        assert (view.by_servers, set(view.servers)) == (({MODEL}, {"server"}) if by_servers else (set(), set()))
        assert (known := view.model(MODEL)) is not None
        assert known.layout.layers == (2 if by_servers else 1)
        assert chosen(view, 0.0) == ("server" if by_servers else "own")
    prefills = with_servers(listed(own="1", server="1"), "server")
    prefills.instances[0].info.role = common_pb2.ROLE_PREFILL
    view.update(prefills, 0.0)
    assert set(view.servers) == {"server"}


def test_servers_that_are_forgotten_are_told_of() -> None:
    view, told = empty_view(), []
    view.expired = lambda: told.append(set(view.servers))
    view.update(with_servers(listed(a="1", b="1"), "a", "b"), 0.0, first=True)
    view.update(listed(), 1.0, first=True)
    assert view.servable(MODEL, 2.0)
    assert not view.servable(MODEL, 12.0)
    assert told == [set()]
