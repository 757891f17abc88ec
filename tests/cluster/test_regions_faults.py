"""Three regions under load, and what goes wrong in one of them: nothing hangs, and every answer is the right one."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from services.regions import LocalRegions, RegionsSpec
from services.scrape import Scrape
from tests.cluster.specs import cluster_spec
from tests.forks import forked

PROMPTS = 6
TOKENS = 96
CLIENTS = 30
WAIT_S = 90.0
"""Only ends what hangs."""


def ask(regions: LocalRegions, region: str, number: int, timeout_s: float = WAIT_S) -> tuple[str, str]:
    """The text, and who served it last."""
    prompt = f"In region after region, question {number % PROMPTS} is asked."
    fields = {"model": "pinyon-tiny", "prompt": prompt, "max_tokens": TOKENS, "seed": 7, "temperature": 0.8}
    headers = {"content-type": "application/json", "x-pinyon-report": "1"}
    cluster = regions.clusters[region]
    request = urllib.request.Request(f"{cluster.http}/v1/completions", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        answer = json.loads(reply.read())
    return answer["choices"][0]["text"], answer["pinyon"].get("region", region).partition("-lb-")[0]


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[LocalRegions]:
    spec = cluster_spec(
        prefill=0, decode=0, mixed=1, stores=0, engine="paced", engine_profile="tiny", pool_blocks=256,
        extra={"worker": ("--max-batch", "4"), "mixed": ("--max-batch", "4"), "lb": ("--pushing", "pending")},
    )  # fmt: skip
    with LocalRegions(RegionsSpec(("us", "eu", "ap"), spec, delay_ms=20.0), tmp_path, forked) as regions:
        yield regions


class Load:
    """So many requests at once to the first region, until it is stopped."""

    def __init__(self, regions: LocalRegions) -> None:
        self._regions = regions
        self.expected = [ask(regions, "us", number)[0] for number in range(PROMPTS)]
        self._threads = ThreadPoolExecutor(CLIENTS)
        self.asked = 0
        self.answers: list[Future[tuple[str, str]]] = []

    def send(self, count: int) -> None:
        for _ in range(count):
            self.answers.append(self._threads.submit(ask, self._regions, "us", self.asked))
            self.asked += 1

    def check(self) -> Counter[str]:
        """All answers are there and right; who gave how many of them."""
        served: Counter[str] = Counter()
        for number, answer in enumerate(self.answers):
            text, region = answer.result(WAIT_S)
            assert text == self.expected[number % PROMPTS], f"request {number} from {region}"
            served[region] += 1
        self._threads.shutdown()
        return served


def value(regions: LocalRegions, region: str, name: str) -> float:
    return Scrape(regions.clusters[region], metrics=(name,)).total(name)


def until(condition, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)  # a poll with a deadline: processes have no event for us


def taken_by(regions: LocalRegions, region: str) -> None:
    """Until it serves requests of the first region."""
    until(lambda: value(regions, region, "pinyon_worker_running_requests") >= 2, f"{region} serves nothing")


def test_overflow_goes_to_the_others_and_a_killed_load_balancer_costs_nothing(regions: LocalRegions) -> None:
    load = Load(regions)
    load.send(60)
    taken_by(regions, "eu")
    victim = regions.clusters["eu"].services["lb-0"]
    victim.signal(signal.SIGKILL)
    victim.wait(10)
    served = load.check()
    assert served["us"] > 0
    assert served["ap"] > 0
    regions.clusters["eu"].restart("lb-0")
    again = Load(regions)
    again.send(60)
    taken_by(regions, "eu")
    assert again.check()["eu"] > 0
    assert value(regions, "us", "pinyon_lb_in_flight_requests") == 0


def test_a_frozen_load_balancer_is_left_behind(regions: LocalRegions) -> None:
    load = Load(regions)
    load.send(60)
    taken_by(regions, "eu")
    victim = regions.clusters["eu"].services["lb-0"]
    victim.signal(signal.SIGSTOP)
    try:
        load.check()
    finally:
        victim.signal(signal.SIGCONT)
    until(lambda: value(regions, "eu", "pinyon_lb_in_flight_requests") == 0, "requests are left in eu")


def test_a_region_that_is_cut_off(regions: LocalRegions) -> None:
    """All of its processes stand still: no answer comes from there, and no connection is closed."""
    load = Load(regions)
    load.send(60)
    taken_by(regions, "ap")
    for service in regions.clusters["ap"].services.values():
        service.signal(signal.SIGSTOP)
    try:
        load.check()
    finally:
        for service in regions.clusters["ap"].services.values():
            service.signal(signal.SIGCONT)


def test_an_instance_killed_in_mid_stream(regions: LocalRegions) -> None:
    load = Load(regions)
    load.send(60)
    taken_by(regions, "us")
    victim = regions.clusters["us"].services["mixed-0"]
    victim.signal(signal.SIGKILL)
    served = load.check()
    assert served["eu"] + served["ap"] >= 56, "what was here goes on elsewhere"
    load = Load(regions)
    load.send(10)
    assert load.check()["us"] == 0
    regions.clusters["us"].restart("mixed-0")
    until(lambda: ask(regions, "us", 0)[1] == "us", "it is not used when it is back")


def test_law_holds_whatever_fails(tmp_path: Path) -> None:
    spec = cluster_spec(
        prefill=0, decode=0, mixed=1, stores=0, engine="paced", engine_profile="tiny", pool_blocks=256,
        extra={"mixed": ("--max-batch", "4")},
    )  # fmt: skip
    law = {
        "regions": {"us": [], "eu": ["gdpr"], "uk": ["gdpr"]},
        "rules": [{"from": ["gdpr"], "to": ["gdpr"]}, {"from": ["us"], "to": ["us"]}],
    }
    with LocalRegions(RegionsSpec(("eu", "uk", "us"), spec, delay_ms=20.0, geography=law), tmp_path, forked) as regions:
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = [threads.submit(ask, regions, "eu", number) for number in range(40)]
            taken_by(regions, "uk")
            regions.clusters["uk"].services["lb-0"].signal(signal.SIGKILL)
            victim = regions.clusters["eu"].services["mixed-0"]
            victim.signal(signal.SIGKILL)
            victim.wait(10)
            regions.clusters["eu"].restart("mixed-0", wait=False)
            ended = Counter()
            for answer in answers:
                try:
                    ended[answer.result(WAIT_S)[1]] += 1
                except OSError:  # a clear status: nobody was there for as long as it waits
                    ended["refused"] += 1
        assert ended["us"] == 0
        assert value(regions, "us", "pinyon_worker_generated_tokens_total") == 0
