"""Profiles as the starting points of cost models."""

import json
from dataclasses import asdict

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import Role
from pinyon.placement.cost_priors import CostPriors, parse_priors, priors_of
from pinyon.placement.fetch_time import fetch_s
from pinyon.placement.fleet import Fleet
from pinyon.placement.index import BlockIndex
from pinyon.placement.inflight import InFlightTable
from pinyon.profiles.engine_profile import built_in_profiles, load_profile
from pinyon.profiles.machine_profile import built_in_machines, load_machine
from tests.unit.placement.conftest import info


def fleet_with(text: str) -> Fleet:
    return Fleet(BlockIndex(1000), InFlightTable(100, 10.0, 60.0, 600.0), 64, priors=parse_priors(text))


@pytest.mark.parametrize("name", built_in_profiles())
def test_predictions_are_the_engines_steps(name):
    engine = load_profile(name)
    state = fleet_with(name).join(info("m0", Role.MIXED), 0.0)
    for tokens, reused in ((4000, 0), (30_000, 0), (30_000, 20_000)):
        true_s = engine.seconds([(reused, tokens)], 0, 0)
        assert state.prefill_model.predict_s(tokens, reused) == pytest.approx(true_s, rel=0.02)
    for batch, tokens in ((1, 2000), (16, 32_000), (64, 500_000)):
        assert state.decode_model.predict_s(batch, tokens) == pytest.approx(engine.seconds([], batch, tokens), rel=0.02)


@pytest.mark.parametrize("name", built_in_machines())
def test_transfers_are_as_fast_as_the_machines_links(name):
    machine = load_machine(name)
    fleet, size = fleet_with(name), 10**11
    reader = fleet.join(info("m0", Role.MIXED, address="a:1"), 0.0)
    near = fleet.join(info("s0", Role.STORE, address="a:2"), 0.0)
    far = fleet.join(info("s1", Role.STORE, address="b:2"), 0.0)
    slow = fleet.join(info("s2", Role.STORE, address="b:3", on_ssd=True), 0.0)
    through_both = min(machine.nic_bytes_s, machine.ssd_bytes_s)  # the store is on another host
    for source, bytes_s in ((near, machine.dram_bytes_s), (far, machine.nic_bytes_s), (slow, through_both)):
        assert fetch_s(reader, [(source, size)]) == pytest.approx(size / bytes_s, rel=0.01)


def test_measurements_take_over_and_siblings_inherit_them():
    fleet = fleet_with("a800x8-llama-70b")
    state = fleet.join(info("m0", Role.MIXED), 0.0)
    profile = priors_of(load_profile("910b-qwen2.5-7b"))
    k0, k1, k2 = profile.prefill
    for number in range(200):
        tokens = (500, 4000, 16_000)[number % 3]
        fleet.learn_prefills(state, [(tokens, 0, k0 + k1 * tokens + k2 * tokens**2)], 1.0)
    other = fleet.join(info("m1", Role.MIXED), 2.0)
    for each in (state, other):
        assert each.prefill_model.predict_s(8000, 0) == pytest.approx(k0 + k1 * 8000 + k2 * 8000**2, rel=0.05)


def test_each_model_has_its_own(tmp_path):
    engine = tmp_path / "engine.json"
    engine.write_text(json.dumps({**asdict(load_profile("tiny")), "prefill_token_s": 0.5}))
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({**asdict(load_machine("tiny")), "nic_bytes_s": 7.0}))
    priors = parse_priors(f"910b-qwen2.5-7b; big=a800x8-llama-70b;own={engine};links={machine}")
    assert priors[""] == priors_of(load_profile("910b-qwen2.5-7b"), load_machine("910b-qwen2.5-7b"))
    assert priors["own"].prefill[1] == 0.5
    assert priors["own"].transfer == CostPriors().transfer, "an engine's profile says nothing of links"
    assert max(per_byte for _, per_byte in priors["links"].transfer) == 1 / 7.0
    fleet = fleet_with("910b-qwen2.5-7b;m=a800x8-llama-70b")
    assert fleet.join(info("m0", Role.MIXED), 0.0).prefill_model.coefficients[1] == pytest.approx(4.732e-5)
    assert fleet.join(info("x0", Role.MIXED, model="x"), 0.0).prefill_model.coefficients[1] == pytest.approx(127e-6)
    assert parse_priors("") == {}


@pytest.mark.parametrize(
    "text", ["nobody", "tiny;tiny", "a=tiny;a=tiny", "a=", "/no/such.json", ";".join(["x=tiny"] * 99)]
)
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(InvalidArgument):
        parse_priors(text)
