"""Availability, credits, and the two layers of Listing 1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.block_keys import chain_block_keys, pack_keys
from pinyon.core.errors import InvalidArgument
from pinyon.core.hash_ring import HashRing
from pinyon.routing.consistent_hash import SEED
from pinyon.routing.geography import Geography, parse_geography
from pinyon.routing.layer import Layer
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES, UNLIMITED
from pinyon.routing.routing_keys import KEYS_MAX, byte_keys, keys_of_blocks, routing_root, token_keys
from pinyon.routing.target import Report, Routed, Target
from pinyon.routing.two_layers import RoutedRequest, RoutingChoice, TwoLayers, Where

ASK = Routed(byte_keys(b"root", b"abcdefgh", 1), "user")


def layer(policy: str = "skywalker", pushing: str = "pending", names: str = "") -> Layer:
    made = Layer(PUSHING_RULES.make(pushing), ROUTING_POLICIES.make(policy))
    for name in names:
        made.join(name)
    return made


def names(targets: list[Target]) -> str:
    return "".join(target.name for target in targets)


def test_a_target_is_available_while_nobody_waits_there() -> None:
    local = layer(pushing="pending:credits=false", names="ab")
    assert names(local.available(0.0)) == ""  # no report of them came
    local.report("a", Report(pending=0), 0.0)
    local.report("b", Report(pending=1), 0.0)
    assert names(local.available(0.5)) == "a"
    assert local.spare(0.5) == UNLIMITED
    assert names(local.available(1.1)) == ""  # the report is too old: the instance may be frozen
    local.report("a", Report(pending=0), 2.0)
    local.set_draining("a", True)
    assert names(local.available(2.0)) == ""
    local.set_draining("a", False)
    local.set_live("a", False)
    assert names(local.available(2.0)) == ""


def test_no_more_are_pushed_between_reports_than_there_is_room() -> None:
    local = layer(names="a")
    local.report("a", Report(pending=0, room=3), 0.0)
    sent = [local.sent(ASK, "a") for _ in range(3) if local.spare(0.0)]
    assert len(sent) == 3
    assert local.choose(Routed(), 0.0) is None
    local.ended(sent[0])  # it has left, so there is room for another request
    assert local.spare(0.0) == 1
    local.report("a", Report(pending=0, room=2, received=1), 0.1)  # two were under way at the report
    assert local.spare(0.1) == 0
    local.report("a", Report(pending=0, room=0, received=3), 0.2)  # one request may wait at its door
    assert local.spare(0.2) == 1
    local.report("a", Report(pending=0, room=2, received=3), 0.2)
    assert local.spare(0.2) == 2


def test_who_cannot_say_how_much_room_it_has_gets_a_burst() -> None:
    local = layer(pushing="pending:burst=2", names="a")
    local.report("a", Report(pending=0), 0.0)
    local.sent(ASK, "a")
    local.sent(ASK, "a")
    assert local.spare(0.0) == 0
    assert local.choose(ASK, 0.0) is None, "nor does anybody wait there for what it has"
    local.report("a", Report(pending=0), 0.1)
    assert local.spare(0.1) == 2
    local.report("a", Report(pending=1), 0.2)
    assert local.choose(ASK, 0.2) is local.get("a"), "it is full"
    assert local.choose(Routed(), 0.2) is None


def test_what_a_conductor_is_asked_for_takes_a_credit_at_once() -> None:
    local = layer(names="a")
    local.report("a", Report(pending=0, room=1), 0.0)
    assert local.has_room(0.0)
    local.hold()
    assert local.spare(0.0) == 0
    assert not local.has_room(0.0)
    local.release()
    assert local.spare(0.0) == 1
    with pytest.raises(ValueError, match="nothing is held"):
        local.release()


def test_what_has_ended_since_a_report_is_no_load() -> None:
    local = layer(names="ab")
    sent = [local.sent(ASK, "a") for _ in range(3)]
    for name in "ab":
        local.report(name, Report(pending=0, running=3, received=3 * (name == "a")), 0.0)
    a = local.get("a")
    assert a is not None
    assert a.load == 3
    local.ended(sent[0])
    assert a.load == 2, "who just had an end is not taken for the busier one"
    assert [target.name for target in local.available(0.0) if target.load == 2] == ["a"]
    local.report("a", Report(pending=0, running=4, received=3), 0.1)
    assert a.load == 4, "others' count, too"
    local.ended(sent[1])
    local.ended(sent[2])
    assert a.load == 2
    local.report("a", Report(pending=0, running=0, received=3), 0.2)
    assert a.load == 0


def test_outstanding_and_blind() -> None:
    local = layer(pushing="outstanding:limit=1", names="a")
    assert local.spare(0.0) == 1
    sent = local.sent(ASK, "a")
    assert local.spare(0.0) == 0
    local.use(pushing=PUSHING_RULES.make("blind"))
    assert local.spare(0.0) == UNLIMITED
    local.ended(sent)
    with pytest.raises(ValueError, match="nothing of ours"):
        local.ended(sent)


def test_a_target_of_a_new_life_is_not_told_of_earlier_ends() -> None:
    local = layer(names="a")
    before = local.sent(ASK, "a")
    local.join("a")
    local.ended(before)
    target = local.get("a")
    assert target is not None
    assert target.outstanding == 0


def test_the_longest_prefix_wins_or_below_half_the_least_busy() -> None:
    local = layer(pushing="blind", names="ab")
    local.sent(Routed(ASK.keys[: 8 * 4]), "a")
    assert local.choose(ASK, 0.0) is local.get("a")  # half of the prompt is there
    assert local.choose(Routed(ASK.keys + ASK.keys), 0.0) is local.get("b")
    assert local.choose(ASK, 0.0, exclude="a") is local.get("b")


def test_a_few_wait_at_the_only_one_with_half_of_their_prompt() -> None:
    local = layer(pushing="pending:door=2", names="ab")
    local.sent(ASK, "a")
    local.report("a", Report(pending=1, received=1), 0.0)
    local.report("b", Report(pending=0, room=9), 0.0)
    assert local.choose(ASK, 0.0) is local.get("a")
    assert local.choose(Routed(ASK.keys + bytes(8 * 9)), 0.0) is local.get("b"), "less than half of it is there"
    assert local.choose(Routed(), 0.0) is local.get("b")
    assert local.choose(ASK, 0.0, exclude="a") is local.get("b")
    assert local.choose(ASK, 1.1) is None, "nothing was heard of them for long"
    local.sent(ASK, "a")
    assert local.choose(ASK, 0.0) is local.get("b"), "two wait there"
    local.report("a", Report(pending=1, received=2), 0.0)
    assert local.choose(ASK, 0.0) is local.get("a")
    local.sent(Routed(ASK.keys[: 8 * 5]), "b")
    assert local.choose(ASK, 0.0) is local.get("b"), "what is missing there is soon computed"
    for rule in ("pending:door=0", "pending:credits=false", "outstanding:limit=1"):
        local.use(pushing=PUSHING_RULES.make(rule))
        local.report("a", Report(pending=1, received=2), 0.0)
        assert not local.may_wait(ASK, 0.0)


def test_a_request_stays_while_few_wait_where_its_prompt_is() -> None:
    two = TwoLayers("us", full(), regions("eu"))
    two.local.sent(ASK, "b")
    two.local.report("b", Report(pending=1, received=1), 0.0)
    assert two.choose(RoutedRequest(ASK), 0.0) == RoutingChoice(Where.LOCAL, "b")
    assert two.choose(RoutedRequest(ASK), 0.0, conducted=True) == RoutingChoice(Where.LOCAL)
    assert two.choose(RoutedRequest(Routed()), 0.0) == RoutingChoice(Where.REMOTE, "eu")
    two.local.report("a", Report(pending=16), 0.0)
    assert two.choose(RoutedRequest(ASK), 0.0) == RoutingChoice(Where.LOCAL, "b")
    assert two.choose(RoutedRequest(ASK), 0.0, conducted=True) == RoutingChoice(Where.REMOTE, "eu"), (
        "that one might get it"
    )
    two.local.set_draining("a", True)
    assert two.choose(RoutedRequest(ASK), 0.0, conducted=True) == RoutingChoice(Where.LOCAL)
    two.local.report("b", Report(pending=16, received=1), 0.0)
    assert two.choose(RoutedRequest(ASK), 0.0) == RoutingChoice(Where.REMOTE, "eu")


@given(
    sent=st.lists(st.tuples(st.sampled_from("abc"), st.text("xy", max_size=6)), max_size=6),
    waiting=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    prompt=st.text("xy", max_size=6),
)
def test_who_waits_gains_half_of_its_prompt(sent: list[tuple[str, str]], waiting: list[int], prompt: str) -> None:
    def asked(text: str) -> Routed:
        return Routed(byte_keys(b"root", text.encode(), 1))

    local = layer(pushing="pending:door=3", names="abc")
    for name, text in sent:
        local.sent(asked(text), name)
    for name, count in zip("abc", waiting, strict=True):
        target = local.get(name)
        assert target is not None
        local.report(name, Report(pending=count, room=1, received=target.sent), 0.0)

    def held(name: str) -> int:
        texts = [text for each, text in sent if each == name]
        return max([length for length in range(len(prompt) + 1) for text in texts if text[:length] == prompt[:length]])

    def most(names: list[str]) -> int:
        return max([held(name) for name in names if any(each == name for each, _ in sent)], default=0)

    free = [name for name, count in zip("abc", waiting, strict=True) if not count]
    full = [name for name, count in zip("abc", waiting, strict=True) if 0 < count < 3]
    chosen = local.choose(asked(prompt), 0.0)
    gained = most(full) - most(free)
    if gained > 0 and gained >= len(prompt) / 2:
        assert chosen is not None
        assert chosen.name in full
        assert held(chosen.name) == most(full)
    else:
        assert chosen is None if not free else chosen is not None and chosen.name in free


def test_of_equally_busy_targets_the_nearest_gets_new_prompts() -> None:
    remote = layer(pushing="blind")
    remote.join("far", distance_s=0.2)
    remote.join("near", distance_s=0.1)
    assert remote.choose(ASK, 0.0) is remote.get("near")
    remote.sent(Routed(), "near")
    assert remote.choose(ASK, 0.0) is remote.get("far")


@given(
    members=st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=8),
    share=st.data(),
    key=st.text(min_size=1, max_size=5),
)
def test_the_ring_goes_on_to_the_next_available_node(members: set[str], share: st.DataObject, key: str) -> None:
    """The choice agrees with a walk over all points that are sorted here."""
    available = share.draw(st.sets(st.sampled_from(sorted(members)), min_size=1))
    ring = layer("consistent_hash:virtual_nodes=8", "blind")
    for name in sorted(members):
        ring.join(name)
    chosen = ring.choose(Routed(b"", key), 0.0, allowed=available)
    assert chosen is not None
    alone = HashRing(available, 8, SEED)  # skipped members might as well be absent
    assert chosen.name == alone.owner(key.encode())


# -- two layers


def full(names: str = "ab") -> Layer:
    made = layer(names=names)
    for name in names:
        made.report(name, Report(pending=1), 0.0)
    return made


def regions(*there: str, queue: int = 0) -> Layer:
    made = layer()
    for name in there:
        made.join(name, region=name)
        made.report(name, Report(pending=queue, room=5, available=1), 0.0)
    return made


def test_local_first_then_remote_then_the_queue() -> None:
    two = TwoLayers("us", full(), regions("eu"))
    assert two.choose(RoutedRequest(ASK), 0.0) == RoutingChoice(Where.REMOTE, "eu")
    two.local.report("b", Report(pending=0), 0.0)
    assert two.choose(RoutedRequest(ASK), 0.0) == RoutingChoice(Where.LOCAL, "b")
    assert two.choose(RoutedRequest(ASK), 0.0, conducted=True) == RoutingChoice(Where.LOCAL)
    two.local.report("b", Report(pending=2), 0.0)
    assert two.choose(RoutedRequest(ASK, exclude=("eu",)), 0.0) == RoutingChoice(Where.WAIT)
    assert two.choose(RoutedRequest(ASK, sender="eu"), 0.0) == RoutingChoice(Where.WAIT)  # never a second hop


@pytest.mark.parametrize(
    ("report", "there"),
    [
        (Report(pending=10, room=1, available=1), True),
        (Report(pending=11, room=1, available=1), False),
        (Report(pending=0, room=1, available=0), False),
        (Report(pending=0, room=0, available=1), True),
    ],
)
def test_an_available_region_has_an_instance_and_a_short_queue(report: Report, there: bool) -> None:
    two = TwoLayers("us", full(), regions("eu"))
    two.remote.report("eu", report, 0.0)
    assert two.choose(RoutedRequest(ASK), 0.0).where is (Where.REMOTE if there else Where.WAIT)


POLICY = parse_geography(
    {
        "regions": {"us": [], "eu": ["gdpr"], "uk": ["gdpr"]},
        "rules": [{"from": ["gdpr"], "to": ["gdpr"]}],
        "tenants": {"acme": ["us"]},
    }
)


def test_load_never_overrides_geography() -> None:
    eu = TwoLayers("eu", full(), regions("us", "uk"), POLICY)
    eu.remote.report("uk", Report(pending=0, available=0), 0.0)
    assert eu.choose(RoutedRequest(ASK), 0.0) == RoutingChoice(Where.WAIT)
    eu.remote.report("uk", Report(pending=0, available=1), 0.0)
    assert eu.choose(RoutedRequest(ASK), 0.0) == RoutingChoice(Where.REMOTE, "uk")
    assert eu.choose(RoutedRequest(ASK, tenant="acme"), 0.0) == RoutingChoice(Where.NOWHERE)
    us = TwoLayers("us", full(), regions("eu"), POLICY)
    assert us.choose(RoutedRequest(ASK), 0.0) == RoutingChoice(Where.REMOTE, "eu")
    us.local.report("a", Report(pending=0), 0.0)
    assert us.choose(RoutedRequest(ASK, ("gdpr",)), 0.0) == RoutingChoice(
        Where.REMOTE, "eu"
    )  # although this region has room
    assert us.choose(RoutedRequest(ASK, ("mars",)), 0.0) == RoutingChoice(Where.NOWHERE)


@pytest.mark.parametrize("conducted", [False, True])
@pytest.mark.parametrize(("routing", "keeps"), [("skywalker", True), ("cache_aware", True), ("least_loaded", False)])
def test_adopted_instances_count_as_local_ones(routing: str, keeps: bool, conducted: bool) -> None:
    """The contents of adopted instances count, not only whether the region's own are full (§4.2)."""
    us = TwoLayers("us", layer(names="a", policy=routing), layer())
    adopted = layer(names="x", policy=routing)
    for each in (us.local, adopted):
        for target in each:
            each.report(target.name, Report(pending=0, running=0, room=4), 0.0)
    us.adopted["eu/eu"] = "eu", adopted
    prompt = Routed(b"".join(number.to_bytes(8, "little") for number in range(8)), "u")
    adopted.sent(prompt, "x")
    assert us.choose(RoutedRequest(prompt), 0.0, conducted=conducted).where is (Where.ADOPTED if keeps else Where.LOCAL)
    other = Routed(b"".join(number.to_bytes(8, "little") for number in range(100, 108)), "v")
    assert us.choose(RoutedRequest(other), 0.0, conducted=conducted).where is Where.LOCAL, "it is the less busy one"
    us.local.report("a", Report(pending=1, running=9, room=0), 0.1)
    assert us.choose(RoutedRequest(other), 0.1, conducted=conducted) == (Where.ADOPTED, "eu/eu")


def test_users_of_adopted_instances_stay_where_they_are() -> None:
    us = TwoLayers("us", layer(names="ab", policy="consistent_hash"), layer())
    us.adopted["eu/eu"] = "eu", layer(names="xy", policy="consistent_hash")
    for each in (us.local, us.adopted["eu/eu"][1]):
        for target in each:
            each.report(target.name, Report(pending=0, running=0, room=400), 0.0)
    chosen = {user: us.choose(RoutedRequest(Routed(hash_key=f"u{user}")), 0.0) for user in range(200)}
    assert {choice.where for choice in chosen.values()} == {Where.LOCAL, Where.ADOPTED}
    for target in us.local:
        us.local.report(target.name, Report(pending=0, running=50, room=400), 0.1)
    assert chosen == {user: us.choose(RoutedRequest(Routed(hash_key=f"u{user}")), 0.1) for user in range(200)}


def test_a_region_is_as_busy_as_its_instances() -> None:
    remote = layer()
    for name, instances, running, distance_s in (("big", 100, 101, 0.02), ("tiny", 2, 100, 0.2), ("far", 100, 98, 0.2)):
        remote.join(name, region=name, distance_s=distance_s)
        remote.report(name, Report(0, running, room=4, available=1, instances=instances), 0.0)
    chosen = remote.choose(Routed(), 0.0)
    assert chosen is not None
    assert chosen.name == "big", "of those that are about as busy, the nearest"


def test_adopted_instances_are_where_they_are() -> None:
    """The adopting region does not change the law, neither for its own requests nor for requests that others send."""
    law = parse_geography({"regions": {"us": [], "eu": [], "ap": []}, "rules": [{"from": ["eu"], "to": ["us"]}]})
    us = TwoLayers("us", full(), regions(), law)
    adopted = layer(names="x")
    adopted.report("x", Report(pending=0, room=2), 0.0)
    us.adopted["ap/ap"] = "ap", adopted
    assert us.choose(RoutedRequest(ASK), 0.0, conducted=True) == RoutingChoice(Where.ADOPTED, "ap/ap")
    assert us.choose(RoutedRequest(ASK, ("us",)), 0.0, conducted=True) == RoutingChoice(Where.WAIT)
    assert us.choose(RoutedRequest(ASK, sender="eu"), 0.0, conducted=True) == RoutingChoice(Where.WAIT)
    assert us.choose(RoutedRequest(ASK, sender="us"), 0.0, conducted=True) == RoutingChoice(Where.ADOPTED, "ap/ap")


def test_a_dry_run_says_where_and_why_not() -> None:
    eu = TwoLayers("eu", full(), regions("us", "uk"), POLICY)
    eu.remote.report("uk", Report(pending=0, available=0), 0.0)
    assert [(each.region, each.allowed, each.available) for each in eu.dry_run(RoutedRequest(ASK), 0.0)] == [
        ("eu", True, False),
        ("us", False, True),
        ("uk", True, False),
    ]
    assert "gdpr may send to gdpr only" in eu.dry_run(RoutedRequest(ASK), 0.0)[1].reason


@given(
    sender=st.sampled_from(["us", "eu", "uk", "elsewhere"]),
    receiver=st.sampled_from(["us", "eu", "uk", "elsewhere"]),
    geographies=st.lists(st.sampled_from(["us", "eu", "gdpr"]), unique=True),
    tenant=st.sampled_from(["acme", "other"]),
)
def test_geography_is_what_all_three_lists_allow(
    sender: str, receiver: str, geographies: list[str], tenant: str
) -> None:
    gdpr = {"eu", "uk"}
    expected = sender == receiver or sender not in gdpr or receiver in gdpr
    expected &= tenant != "acme" or receiver == "us"
    expected &= not geographies or receiver in geographies or ("gdpr" in geographies and receiver in gdpr)
    assert POLICY.may(sender, receiver, geographies, tenant).allowed is expected
    assert Geography().may(sender, receiver, (), tenant).allowed


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "must be an object"),
        ({"region": {}}, "only regions, rules, tenants are known"),
        ({"regions": {"a b": []}}, "names"),
        ({"rules": [{"from": ["eu"], "to": ["*"]}]}, "eu is no region"),
        ({"regions": {"eu": []}, "rules": [{"from": ["eu"], "to": []}]}, "must be a list"),
        ({"tenants": {"acme": ["mars"]}}, "mars is no region"),
    ],
)
def test_a_policy_with_a_mistake_is_refused(document: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_geography(document)


def test_sglangs_router_takes_any_that_matches_whatever_its_load() -> None:
    first, least = layer("cache_aware:first=true", "blind", "abc"), layer("cache_aware", "blind", "abc")
    prompts = [Routed(byte_keys(b"root", bytes([number]) * 8, 1)) for number in range(16)]

    def chosen(local: Layer) -> list[str]:
        targets = [local.choose(prompt, 0.0) for prompt in prompts]
        return [target.name for target in targets if target is not None]

    for local in (first, least):
        for prompt in prompts:
            for name in "ab":
                local.ended(local.sent(prompt, name))
    before = chosen(first)
    assert {*before} == {"a", "b"}, "by the prompt; nobody else has it"
    for local in (first, least):
        for _ in range(20):
            local.sent(Routed(), "a")
    assert chosen(first) == before
    assert chosen(least) == ["b"] * len(prompts)


# -- keys


def test_block_keys_make_routing_keys_block_by_block() -> None:
    tokens = bytes(range(256)) * 4
    keys = chain_block_keys(bytes(16), tokens, 16)
    made = keys_of_blocks(pack_keys(keys))
    assert made == b"".join(key[:8] for key in keys)
    assert len(set(keys)) == len(made) // 8 == 16
    shorter = keys_of_blocks(pack_keys(chain_block_keys(bytes(16), tokens[:640], 16)))
    assert made.startswith(shorter)
    assert len(keys_of_blocks(bytes(16 * (KEYS_MAX + 1)))) == 8 * KEYS_MAX
    assert keys_of_blocks(b"") == b""


def test_routing_keys_are_of_model_tenant_and_secret_alone() -> None:
    roots = {
        routing_root(model, tenant, secret, salt)
        for model in ("m", "n")
        for tenant in ("", "t")
        for secret in (b"", b"s")
        for salt in ("", "x")
    }
    assert len(roots) == 16
    root = routing_root("m", "t", b"s")
    assert token_keys(root, b"\x01\0\0\0" * 128, 64) == byte_keys(root, b"\x01\0\0\0" * 128, 256)
    assert len(byte_keys(root, b"x" * 1023, 256)) == 8 * 3
    assert len(byte_keys(root, b"x" * (KEYS_MAX + 5), 1)) == 8 * KEYS_MAX
    assert byte_keys(root, b"abc", 1)[:16] == byte_keys(root, b"abd", 1)[:16]
    with pytest.raises(ValueError, match="size"):
        byte_keys(root, b"x", 0)


def test_keys_do_not_change_between_versions() -> None:
    """Two load balancers of one federation may be of different versions."""
    assert routing_root("model", "tenant", b"secret").hex() == "202777b58f252a89"
    assert byte_keys(routing_root("model", "tenant"), b"0123", 2).hex() == "13a4d386bfc64d9cbb80cb5515b9ee36"
