"""Two regions and their controller: the load balancer of one is dead for a while, and its instances go on serving."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pinyon.cli import main
from services.regions import LocalRegions, RegionsSpec
from services.scrape import Scrape
from services.supervisor import Supervised, Supervisor
from tests.cluster.specs import cluster_spec
from tests.forks import forked

PROMPTS = 6
TOKENS = 96
CLIENTS = 24
WAIT_S = 90.0
"""Only ends what hangs."""
GENERATED = "pinyon_worker_generated_tokens_total"


@pytest.fixture(params=["", "tls"])
def regions(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalRegions]:
    tls = {"tls": True} if request.param else {}
    spec = cluster_spec(
        prefill=0, decode=0, mixed=1, stores=0, engine="paced", engine_profile="tiny", pool_blocks=256,
        extra={"mixed": ("--max-batch", "4")}, **tls,
    )  # fmt: skip
    several = RegionsSpec(("us", "eu"), spec, delay_ms=10.0, controller_arguments=("--settle-s", "1"))
    with LocalRegions(several, tmp_path, forked) as regions:
        yield regions


class Load:
    """Requests to one region's load balancer, each of which has one right answer."""

    def __init__(self, regions: LocalRegions, region: str, expected: list[str] | None = None) -> None:
        self._cluster = regions.clusters[region]
        self._threads = ThreadPoolExecutor(CLIENTS)
        self.expected = expected or [self._ask(number) for number in range(PROMPTS)]
        self._answers: list[Future[str]] = []

    def _ask(self, number: int) -> str:
        prompt = f"In region after region, question {number % PROMPTS} is asked."
        fields = {"model": "pinyon-tiny", "prompt": prompt, "max_tokens": TOKENS, "seed": 7, "temperature": 0.8}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self._cluster.http}/v1/completions", json.dumps(fields).encode(), headers)
        context = self._cluster.access.ssl_context()
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as reply:
            return json.loads(reply.read())["choices"][0]["text"]

    def send(self, count: int) -> None:
        for _ in range(count):
            self._answers.append(self._threads.submit(self._ask, len(self._answers)))

    def check(self) -> None:
        """All are there, and right."""
        for number, answer in enumerate(self._answers):
            assert answer.result(WAIT_S) == self.expected[number % PROMPTS], f"request {number}"
        self._threads.shutdown()


def value(regions: LocalRegions, region: str, name: str) -> float:
    return Scrape(regions.clusters[region], {"mixed-0"}, metrics=(name,)).total(name)


supervisors: list[Supervisor] = []


@contextlib.contextmanager
def supervised(cluster: Supervised) -> Iterator[list[str]]:
    """While something is waited for, what died is started again; what is said of it."""
    said: list[str] = []
    supervisors.append(Supervisor(cluster, said.append, lambda: False, time.monotonic()))
    try:
        yield said
    finally:
        supervisors.clear()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        for supervisor in supervisors:
            supervisor.tick(time.monotonic())
        assert time.monotonic() < deadline, what
        time.sleep(0.05)  # a poll with a deadline: processes have no event for us


def test_instances_of_a_dead_load_balancer_serve_on_and_are_handed_back(
    regions: LocalRegions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    admin = regions.clusters["us"].access.admin
    controller = regions.controller
    assert controller is not None

    def pinyon(*command: str) -> list[list[str]]:
        tls = () if admin is None else ("--tls-dir", str(admin))
        assert main([*command, "--controller", controller.address, *tls]) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    def serves(lb_id: str) -> str:
        """What the command says of it: its state, then what it serves."""
        return next(" ".join(row[2:-2]) for row in pinyon("regions") if row[1:2] == [lb_id])

    until(lambda: serves("us-lb-0") == "live us" and serves("eu-lb-0") == "live eu", "they are not known")
    load = Load(regions, "eu")
    load.send(40)
    until(lambda: value(regions, "us", "pinyon_worker_running_requests") >= 2, "us serves nothing of eu's")
    victim = regions.clusters["us"].services["lb-0"]
    victim.signal(signal.SIGKILL)
    victim.wait(10)
    until(lambda: serves("us-lb-0").startswith("failed"), "nobody has seen that it died")
    until(lambda: serves("eu-lb-0") == "live eu us/us*", "nobody stands in for it")
    load.check()

    before = value(regions, "us", GENERATED)
    again = Load(regions, "eu", load.expected)
    again.send(40)
    again.check()
    assert value(regions, "us", GENERATED) >= before + 4 * TOKENS, "its instances serve through the other one"
    top = pinyon("top", "--once")
    assert any(row[:1] == ["us-lb-0"] or "us-lb-0" in row for row in top)
    assert any("us-mixed-0" in row for row in top)

    last = Load(regions, "eu", load.expected)
    last.send(40)
    until(lambda: value(regions, "us", "pinyon_worker_running_requests") >= 2, "us serves nothing of eu's")
    with supervised(regions.clusters["us"]) as said:
        until(lambda: serves("us-lb-0") == "live us" and serves("eu-lb-0") == "live eu", "it does not get its own back")
    assert "started again" in said[0]
    last.check()
    home = Load(regions, "us", load.expected)
    home.send(20)
    home.check()


def test_the_controller_may_die_and_be_started_again(regions: LocalRegions) -> None:
    controller = regions.controller
    assert controller is not None
    load = Load(regions, "us")
    load.send(20)
    service = controller.services["controller"]
    service.signal(signal.SIGKILL)
    service.wait(10)
    load.send(20)
    load.check()
    with supervised(controller) as said:
        until(lambda: len(said) == 2, "it is not started again")
    assert "controller is back" in said[1]
    again = Load(regions, "us", load.expected)
    again.send(20)
    again.check()
