"""Tests of ``deploy/compose.yaml``: the built image, eight containers, requests through the published port, losses."""

from __future__ import annotations

import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from tests.docker.containers import REGISTERED, SERVICES, WAIT_S, run, until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

DECODE = ("decode-1", "decode-2")


@pytest.fixture
def client(suite):
    from openai import DefaultHttpxClient, OpenAI  # here, so that collecting this file does not import it

    address = suite.published("lb", 8000)
    http = DefaultHttpxClient(verify=suite.ssl_context())
    with OpenAI(
        base_url=f"https://{address}/v1", api_key="unused", max_retries=0, timeout=WAIT_S, http_client=http
    ) as client:
        yield client


def complete(client, prompt, tokens=16):
    """Returns the text and usage of a greedy completion."""
    answer = client.completions.create(model="pinyon-tiny", prompt=prompt, max_tokens=tokens, temperature=0)
    return answer.choices[0].text, answer.usage


def metric(suite, name):
    """Returns a value from the load balancer's own /metrics, through the published port."""
    address, trust = suite.published("lb", 8000), suite.ssl_context()
    with urllib.request.urlopen(f"https://{address}/metrics", timeout=WAIT_S, context=trust) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split(" ")[0].partition("{")[0] == name)


def test_it_comes_up_healthy(suite, record_property):
    size = int(run("docker", "image", "inspect", "-f", "{{.Size}}", "pinyon:test").stdout)
    figures = {**suite.seconds, "image_mb": size / 1e6}
    for name, value in figures.items():
        record_property(name, round(value, 1))
    print(figures)
    suite.wait_healthy()
    assert size < 500e6


def test_requests_through_the_published_port(client):
    prompt = "Where does the jay keep its seeds? " * 8
    text, usage = complete(client, prompt)
    assert text
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 16)
    ask = {"model": "pinyon-tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    parts = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    # Tokens that are there together come in one event, so how many events there are is up to the machine.
    assert "".join(part.choices[0].text for part in parts if part.choices) == text
    assert (parts[-1].choices, parts[-1].usage.completion_tokens) == ([], 16)
    # Either prefill worker may compute the prompt once, where that is sooner than to fetch it. Then both have its KV.
    _, usage = complete(client, prompt)
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_the_conductor_lists_every_instance(suite):
    listed = suite.wait_listed(REGISTERED)
    for name, instance in listed.items():
        assert instance.info.address.startswith(f"{name}:"), "others must find it by its service name"
    roles = {name: instance.info.role for name, instance in listed.items()}
    assert roles == {
        "kvstore": common_pb2.ROLE_STORE,
        "prefill-1": common_pb2.ROLE_PREFILL,
        "prefill-2": common_pb2.ROLE_PREFILL,
        "decode-1": common_pb2.ROLE_DECODE,
        "decode-2": common_pb2.ROLE_DECODE,
    }


def test_a_stranger_gets_in_nowhere(suite):
    """Access without a certificate, from another container of the network and through the published ports."""
    probe = ("python", "-m", "pinyon.runtime.healthcheck")
    for address in ("conductor:7000", "kvstore:7100", "prefill-1:7200", "decode-1:7200", "http://lb:8000/health"):
        said = run("docker", "exec", suite.container("lb"), *probe, address, check=False)
        assert said.returncode == 1, address
    with grpc.insecure_channel(suite.published("conductor", 7000)) as channel, pytest.raises(grpc.RpcError):
        conductor_pb2_grpc.ConductorServiceStub(channel).ListInstances(
            conductor_pb2.ListInstancesRequest(), timeout=WAIT_S
        )


def test_each_service_has_no_files_but_its_own(suite):
    for service in SERVICES:
        said = run("docker", "exec", suite.container(service), "ls", "/run/pinyon", "/certs", check=False)
        assert "ca.key" not in said.stdout
        assert "/certs" not in said.stdout
    own = suite.files("lb") / "tls.crt"
    assert own.read_text() != (suite.files("conductor") / "tls.crt").read_text()


def test_images_hold_what_serves_only(suite):
    said = run("docker", "exec", suite.container("lb"), "ls", "/app/src").stdout.split()
    assert "pinyon" in said
    assert "pinyon_lab" not in said


@pytest.mark.parametrize("service", SERVICES)
def test_containers_may_do_nothing_they_need_not(suite, service):
    # Only init and the service: elsewhere in /proc, a starting health probe is root for a moment.
    ids = "for p in 1 $(cat /proc/1/task/1/children); do grep -e ^Uid: -e ^Gid: -e ^CapEff: /proc/$p/status; done"
    said = run("docker", "exec", suite.container(service), "sh", "-c", ids).stdout
    lines = [line.split() for line in said.splitlines()]
    assert [line[0] for line in lines] == ["Uid:", "Gid:", "CapEff:"] * 2
    assert all(int(line[1]) > 0 for line in lines if line[0] != "CapEff:"), said
    assert all(int(line[1], 16) == 0 for line in lines if line[0] == "CapEff:"), said
    host = suite.inspect(service)["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] > 0
    ports = {port for port, bound in suite.inspect(service)["NetworkSettings"]["Ports"].items() if bound}
    assert ports == {"lb": {"8000/tcp", "8001/tcp"}, "conductor": {"7000/tcp"}}.get(service, set())


def test_a_killed_decode_container_costs_no_request(suite, client):
    """Streams are under way on the killed container; all continue elsewhere with exactly the same tokens."""
    prompts = [f"Tale {index} of the pinyon jay and the pines. " * 3 for index in range(6)]
    tokens = 300
    moved = sum(metric(suite, f"pinyon_lb_{name}_total") for name in ("retries", "resumes"))
    expected = [complete(client, prompt, tokens)[0] for prompt in prompts]
    first_tokens = threading.Semaphore(0)

    def stream(prompt):
        text, counted = "", False
        for part in client.completions.create(
            model="pinyon-tiny", prompt=prompt, max_tokens=tokens, temperature=0, stream=True
        ):
            text += part.choices[0].text
            if text and not counted:
                counted = True
                first_tokens.release()
        return text

    def busiest():
        listed = suite.instances()
        running = {name: listed[name].load.running_requests for name in DECODE if name in listed}
        name = max(running, key=lambda name: running[name], default="")
        return name if running.get(name) else None

    killed = threading.Event()

    def streams_of(prompt):
        """Streams answers one after the other, so that one is under way whenever the container is killed."""
        texts = [stream(prompt)]
        while not killed.is_set():
            texts.append(stream(prompt))
        return texts

    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [pool.submit(streams_of, prompt) for prompt in prompts]
        try:
            # All six streams, as a single one might end before the container is killed.
            assert all(first_tokens.acquire(timeout=WAIT_S) for _ in prompts)
            victim = until("a decode instance runs requests", busiest)
            run("docker", "kill", suite.container(victim))
        finally:
            killed.set()
        # Requests that arrive before the loss is noticed succeed as well.
        assert [complete(client, prompt, tokens)[0] for prompt in prompts[:2]] == expected[:2]
        assert [set(result.result(timeout=WAIT_S)) for result in streams] == [{text} for text in expected]

    assert suite.health(victim) == "exited"
    suite.wait_listed(REGISTERED - {victim})
    for prompt, text in zip(prompts, expected, strict=True):
        assert complete(client, prompt, tokens)[0] == text

    suite.compose("up", "-d")
    suite.wait_healthy()
    suite.wait_listed(REGISTERED)
    assert complete(client, prompts[0], tokens)[0] == expected[0]
    # Retried where no token had come yet, else resumed.
    now = sum(metric(suite, f"pinyon_lb_{name}_total") for name in ("retries", "resumes"))
    assert now > moved, "the container that was killed had nothing under way"


@pytest.mark.parametrize("service", ["decode-2", "conductor", "redis"])
def test_a_process_that_dies_is_restarted(suite, client, service):
    """The restart policy alone restarts it; requests are served meanwhile."""
    expected = complete(client, "The seeds of the pinyon pine. " * 6)[0]
    before = suite.inspect(service)
    boots = {name: instance.info.boot_id for name, instance in suite.instances().items()}
    # killed from inside, so that the engine sees a process that ended, not a person who stopped it
    kill = "kill -9 $(cat /proc/1/task/1/children)"
    run("docker", "exec", suite.container(service), "sh", "-c", kill, check=False)
    if service == "decode-2":
        assert complete(client, "The seeds of the pinyon pine. " * 6)[0] == expected

    began = before["State"]["StartedAt"]
    until(f"{service} is restarted", lambda: suite.inspect(service)["State"]["StartedAt"] != began)
    suite.wait_healthy()
    listed = suite.wait_listed(REGISTERED)
    assert {name for name in boots if listed[name].info.boot_id != boots[name]} == {service} & REGISTERED
    assert suite.inspect(service)["RestartCount"] == before["RestartCount"] + 1
    assert complete(client, "The seeds of the pinyon pine. " * 6)[0] == expected
