"""The last decisions: how they are found, what the log tells of them, and how many it keeps."""

from __future__ import annotations

from random import Random

import pytest

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import PinyonError
from pinyon.core.orders import PrefillReport
from pinyon.messages.explanation import explained_to_proto
from pinyon.messages.prefill_report import first_token_from_proto
from pinyon.placement.decision_log import (
    MODELS_MAX,
    NAME_BYTES,
    SEARCHED,
    DecisionLog,
    LoggedDecision,
    MeasuredFirstToken,
    PredictionErrors,
    is_named,
)
from pinyon.placement.explanation import explain
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from tests.unit.placement.conftest import MIXED, hold, info, keys, make_fleet, member

FIRST = 1_000_000
MIB = 1 << 20


class World:
    """Two instances, and a log of the placements on them."""

    def __init__(self, most=100, bytes_max=64 * MIB, names=("a", "b")) -> None:
        self.fleet = make_fleet(*((name, MIXED) for name in names), inflight_max=10_000)
        self.scheduler = Scheduler(self.fleet, KvCacheCentric())
        self.log = DecisionLog(most, bytes_max, FIRST)
        self.scheduler.consider = self.log.consider

    def place(self, name="r", now_s=1.0, blocks=3, **changes) -> int:
        request = PlacementRequest(name, "m", 16 * blocks + 1, keys(*range(blocks)), 8, **changes)
        try:
            self.scheduler.schedule(request, now_s)
        except PinyonError as error:
            self.log.refused(request, error, now_s)
            return 0
        return self.log.placed(request, now_s)


def took(seconds: float) -> MeasuredFirstToken:
    return MeasuredFirstToken(seconds, PrefillReport("a", 100.0, 0.0, 200.0, 0.0, 49))


def find(log: DecisionLog, asked: str) -> list[LoggedDecision]:
    return [entry for part in log.search(asked) for entry in part]


UNIQUE = "4a4c72628edc00000002"


@pytest.mark.parametrize(
    ("request_id", "asked", "named"),
    [
        ("r", "r", True),
        ("r~1", "r", True),
        ("r~12", "r~12", True),
        ("r~12", "r~1", False),
        ("rr", "r", False),
        (UNIQUE, UNIQUE, True),
        (f"{UNIQUE}-3~1", UNIQUE, True),
        (f"{UNIQUE}-3~1", f"{UNIQUE}-3", True),
        (f"{UNIQUE}-3", f"{UNIQUE}-4", False),
        (f"order-66.{UNIQUE}", "order-66", True),
        (f"order-66.{UNIQUE}", UNIQUE, True),
        (f"order-66.{UNIQUE}-0~2", f"order-66.{UNIQUE}", True),
        (f"order-66.{UNIQUE}-0~2", f"{UNIQUE}-0", True),
        (f"order-66.{UNIQUE}-0~2", f"{UNIQUE}-0~2", True),
        (f"order.66.{UNIQUE}", "order", False),
        (f"order.66.{UNIQUE}", "order.66", True),
        (f"order-66.{UNIQUE}", "order-6", False),
        ("order-66.77", "order-66", False),
    ],
)
def test_a_request_goes_by_what_clients_and_logs_call_it(request_id, asked, named):
    assert is_named(request_id, asked) is named


def test_completions_are_found_by_id_with_attempts_in_order():
    world = World()
    world.place(f"mine.{UNIQUE}", 1.0)
    world.place("another", 2.0)
    world.place(f"mine.{UNIQUE}~1", 3.0)
    for asked in (f"chatcmpl-{UNIQUE}", f"cmpl-{UNIQUE}", UNIQUE, "mine"):
        assert [each.at_s for each in find(world.log, asked)] == [1.0, 3.0]
    world.place("chatcmpl-told", 4.0)
    assert [each.at_s for each in find(world.log, "chatcmpl-told")] == [4.0], "a client may call its own so"
    assert find(world.log, "nobody") == []


def test_a_measurement_belongs_to_its_placement_alone():
    world = World()
    numbers = [world.place("same"), world.place("same")]
    decodes = [each.seen.decision.decode for each in find(world.log, "same")]
    assert world.log.measured(numbers[0], took(0.5), decodes[0]).at_s == 1.0
    assert world.log.measured(numbers[0], took(0.7), decodes[0]) is None, "told already"
    first, second = find(world.log, "same")
    assert first.first_token == took(0.5)
    assert second.first_token is None, "the id was used twice"
    other = next(state for state in world.fleet.instances() if state is not decodes[1])
    assert world.log.measured(numbers[1], took(0.5), other) is None, "it was placed elsewhere"
    for unknown in (0, 1, FIRST - 1, numbers[1] + 1, 1 << 63):
        assert world.log.measured(unknown, took(0.5), decodes[1]) is None


def test_what_another_boot_measured_is_not_what_was_predicted():
    world = World(names=("a",))
    number = world.place()
    again = world.fleet.join(info("a", MIXED, boot="2"), 2.0)
    assert world.log.measured(number, took(0.5), again) is None


def test_refusals_are_kept_with_what_they_saw():
    world = World()
    world.place("late", ttft_slo_s=1e-6)
    world.place("unknown", exclude=frozenset(("a", "b")))
    (late,), (unknown,) = find(world.log, "late"), find(world.log, "unknown")
    assert (late.code, late.error[:28]) == ("RESOURCE_EXHAUSTED", "predicted time to first toke")
    assert late.seen.decision.ttft_s > 1e-6
    assert (unknown.code, unknown.seen) == ("UNAVAILABLE", None), "no policy was asked, and none of before counts"
    assert world.log.measured(late.number, took(0.5), late.seen.decision.decode) is None


def test_neither_count_nor_bytes_grow_beyond_their_limits():
    rng = Random(1)
    world = World(most=7)
    numbers = [world.place(f"r{at}") for at in range(50)]
    assert numbers == list(range(FIRST, FIRST + 50))
    assert [each.request.request_id for each in find(world.log, "r49")] == ["r49"]
    assert len(world.log) == 7
    assert find(world.log, "r42") == []
    world = World(bytes_max=40_000)
    sizes = []
    for at in range(200):
        if rng.random() < 0.5:  # a different array of coefficients
            world.fleet.learn_prefills(member(world.fleet, "a"), [(100, 0, 0.1)], 1.0)
        hold(world.fleet, "a", range(rng.randrange(10)))
        world.place(f"r{at}", blocks=rng.randrange(1, 9))
        sizes.append(world.log.size_bytes)
        assert world.log.size_bytes == sum(each.size_bytes for each in world.log._entries)
    assert max(sizes) <= 40_000
    assert 3 < len(world.log) < 20


def test_nothing_of_the_prompt_or_its_client_is_kept():
    world = World()
    request = PlacementRequest("r", "m", 49, keys(1, 2, 3))
    world.scheduler.schedule(request, 1.0)
    world.log.placed(request, 1.0)
    (entry,) = find(world.log, "r")
    kept = [getattr(entry, name) for name in dir(entry) if not name.startswith("__")]
    assert request not in kept
    assert request.block_keys not in kept
    assert world.log._considered is None
    assert entry.request.block_keys == b""


def test_relative_errors_of_the_last_placements():
    errors = PredictionErrors()
    assert errors.mean("m") == 0.0
    assert [errors.add("m", 1.0, 2.0), errors.add("m", 3.0, 2.0), errors.add("n", 1.0, 1.0)] == [True, False, True]
    assert errors.mean("m") == 0.5
    for _ in range(256):
        errors.add("m", 1.0, 4.0)
    assert errors.mean("m") == 0.75, "older ones count no longer"
    for number in range(2 * MODELS_MAX):
        errors.add(f"m{number}", 0.0, 0.0)
    assert errors.mean(f"m{2 * MODELS_MAX - 1}") == 0.0
    assert errors.add("one more", 0.0, 0.0) is False


def test_times_that_are_none_do_not_spoil_an_answer():
    world = World()
    number = world.place()
    (entry,) = find(world.log, "r")
    told = conductor_pb2.FirstTokenMeasurement(placement_number=number, ttft_us=5_000, queue_us=(1 << 64) - 1)
    assert world.log.measured(number, first_token_from_proto(told), entry.seen.decision.decode) is entry
    answer = explained_to_proto(entry, explain(entry), 1.0)
    assert (answer.first_token.ttft_us, answer.first_token.queue_us) == (5_000, 0)


def test_very_many_are_searched_in_parts():
    log = DecisionLog(5000, 64 * MIB, FIRST)
    for number in range(5000):
        log.refused(PlacementRequest(f"r~{number}", "m", 1), PinyonError("no"), 1.0)
    sizes = []
    for part in log.search("r"):
        sizes.append(len(part))
        log.refused(PlacementRequest("r", "m", 1), PinyonError("no"), 1.0)  # this refusal is not reported
    assert (sum(sizes), max(sizes)) == (5000, SEARCHED)
    assert [each.request.request_id for each in find(log, "r")[-3:]] == ["r"] * 3


def test_those_that_are_excluded_count_as_well():
    one, other = (LoggedDecision(1, PlacementRequest("r", "m", 1, exclude=frozenset(names)), 1.0, None)
                  for names in ((), ("a", "b")))  # fmt: skip
    assert other.size_bytes - one.size_bytes == 2 * NAME_BYTES
