"""A cluster with TLS: it serves as without TLS, and refuses callers without the right certificate."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launch.access import role_of
from launch.cluster import LocalCluster
from launch.hints import hints
from launch.process import ROOT, ServiceProcess
from launch.scrape import Scrape
from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.api.lb.v1 import lb_pb2_grpc
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.cli import main
from pinyon.core.address import parse_address
from pinyon.runtime.channel import CHANNEL_OPTIONS, tls_options
from pinyon.runtime.identity import peer_name
from pinyon.runtime.process import child_environment
from pinyon.runtime.tls import client_credentials
from tests.cluster.asking import openai_client
from tests.cluster.fault_tools import instances_of
from tests.cluster.observe import wait_idle
from tests.cluster.reference import Ask, Reference, random_sampling, send, text_tokens
from tests.cluster.specs import cluster_spec
from tests.forks import forked
from tests.tls_files import TestAuthority
from tests.waiting import WAIT_S, wait_until

SEED = 8088
FIRST_KEY, SECOND_KEY = "sk-first", "sk-second"
NOT_LET_IN = {grpc.StatusCode.UNAVAILABLE}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{FIRST_KEY} acme\n")
    return file


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certs")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, keys_file: Path, certs: Path) -> Iterator[LocalCluster]:
    spec = cluster_spec(tls=True, tls_dir=str(certs), prefill=1, decode=1, api_keys_file=str(keys_file))
    with LocalCluster(spec, tmp_path_factory.mktemp("tls-logs"), forked) as running:
        yield running


@pytest.fixture(scope="module")
def authority(secured: LocalCluster, certs: Path) -> TestAuthority:
    """The cluster's own authority."""
    return TestAuthority(certs)


def test_the_printed_line_lists_the_instances(secured: LocalCluster) -> None:
    (line,) = (
        line
        for line in hints(secured.http, secured.conductor, "pinyon-tiny", admin=secured.access.admin)
        if " instances " in line
    )
    shown = subprocess.run(
        ["sh", "-c", line], capture_output=True, cwd="/", env=child_environment(ROOT, 0), timeout=WAIT_S, check=True
    )
    assert b"prefill-0" in shown.stdout


def channel_as(folder: Path | None, service: ServiceProcess, endpoint: str = "grpc") -> grpc.Channel:
    """Returns a channel with the certificates in ``folder``; None: without TLS."""
    address = service.endpoints[endpoint]
    if folder is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    name = peer_name(role_of(service.name), service.name)
    return grpc.secure_channel(address, client_credentials(folder), options=tls_options(name))


def status_of(call: object) -> grpc.StatusCode:
    try:
        call()  # type: ignore[operator]
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_it_serves_the_openai_client_over_https(secured: LocalCluster) -> None:
    with openai_client(secured, FIRST_KEY) as client:
        assert [model.id for model in client.models.list()] == ["pinyon-tiny"]
        ask = {"model": "pinyon-tiny", "prompt": "The jay caches seeds" * 4, "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(**ask)
        parts = list(client.completions.create(**ask, stream=True))
        assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text


async def test_tokens_are_exact_and_reused_and_nothing_goes_by_shm(secured: LocalCluster, reference: Reference) -> None:
    random_ = random.Random(SEED)
    document = text_tokens(random_, 300)
    asks = [Ask(tuple(document + text_tokens(random_, 9)), random_sampling(random_, 8)) for _ in range(12)]
    async with secured.access.channel(secured.services["lb-0"], kind=grpc.aio) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="API key"):
            await send(stub, asks[0])

        async def call(ask: Ask) -> object:
            return await send(WithKey(channel), ask)

        answers = [await call(asks[0]), *await asyncio.gather(*map(call, asks[1:]))]
    assert [answer.tokens for answer in answers] == reference.all_tokens(asks)  # type: ignore[attr-defined]
    assert sum(answer.cached for answer in answers) > 0  # type: ignore[attr-defined]
    await wait_idle(secured)
    scrape = Scrape(secured)
    assert scrape.labelled("pinyon_transfer_path_bytes_total", "tcp") > 0
    assert scrape.labelled("pinyon_transfer_path_bytes_total", "shm") == 0


class WithKey:
    """The load balancer's stub for a caller with an API key."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = lb_pb2_grpc.LbServiceStub(channel)

    def Generate(self, request: object, timeout: float) -> object:
        return self._stub.Generate(request, timeout=timeout, metadata=[("authorization", f"Bearer {FIRST_KEY}")])


@pytest.mark.parametrize("who", ["plain", "no certificate", "another authority's", "one that ended"])
def test_strangers_get_into_no_service(
    who: str, secured: LocalCluster, authority: TestAuthority, certs: Path, tmp_path: Path
) -> None:
    folder: Path | None = tmp_path / "stranger"
    if who == "plain":
        folder = None
    elif who == "one that ended":
        folder = authority.folder("admin", "late", ended=True)
    else:
        assert folder is not None
        folder.mkdir()
        if who != "no certificate":
            other = TestAuthority(tmp_path / "other").folder("admin", "admin")
            for name in ("tls.crt", "tls.key"):
                shutil.copy(other / name, folder / name)
        shutil.copy(certs / "ca" / "ca.crt", folder / "ca.crt")

    for service in secured.services.values():
        # The load balancer's own port is for users' programs: they have API keys, and need no certificate.
        endpoint = "admin" if service.name.startswith("lb") else "grpc"
        with channel_as(folder, service, endpoint) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            code = status_of(lambda check=check: check(health_pb2.HealthCheckRequest(), timeout=WAIT_S))
        assert code in NOT_LET_IN, (service.name, code)


THEFTS = {
    "a worker places in a tenant's name": ("worker/prefill-0", "conductor", "Schedule"),
    "an admin places in a tenant's name": ("admin/admin", "conductor", "Schedule"),
    "a worker releases placements": ("worker/prefill-0", "conductor", "Release"),
    "a store looks into the index": ("kvstore/kvstore-0", "conductor", "LookupBlocks"),
    "a worker generates in a tenant's name": ("worker/prefill-0", "decode-0", "Generate"),
    "an admin generates in a tenant's name": ("admin/admin", "decode-0", "Generate"),
    "a load balancer puts": ("lb/lb-0", "kvstore-0", "PutStart"),
    "a load balancer reads blocks of a store": ("lb/lb-0", "kvstore-0", "Acquire"),
    "a load balancer reads blocks of a worker": ("lb/lb-0", "decode-0", "Acquire"),
    "an admin reads blocks": ("admin/admin", "kvstore-0", "Acquire"),
    "a store reads blocks of a worker": ("kvstore/kvstore-0", "prefill-0", "Acquire"),
}
METHODS = {
    "Schedule": (conductor_pb2_grpc.ConductorServiceStub, conductor_pb2.ScheduleRequest),
    "Release": (conductor_pb2_grpc.ConductorServiceStub, conductor_pb2.ReleaseRequest),
    "LookupBlocks": (conductor_pb2_grpc.ConductorServiceStub, conductor_pb2.LookupBlocksRequest),
    "Generate": (worker_pb2_grpc.WorkerServiceStub, worker_pb2.GenerateRequest),
    "PutStart": (kvstore_pb2_grpc.KvStoreServiceStub, kvstore_pb2.PutStartRequest),
    "Acquire": (kvstore_pb2_grpc.BlockReadServiceStub, kvstore_pb2.AcquireRequest),
}


@pytest.mark.parametrize(("role", "name", "method"), THEFTS.values(), ids=THEFTS)
def test_another_roles_certificate_opens_nothing(
    role: str, name: str, method: str, secured: LocalCluster, certs: Path
) -> None:
    stub, request = METHODS[method]
    with channel_as(certs / role, secured.services[name]) as channel:
        answer = getattr(stub(channel), method)
        with pytest.raises(grpc.RpcError, match=f"role {role.partition('/')[0]} may not call") as caught:
            read(answer(request(), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def read(answer: object) -> None:
    """Reads a stream to its end, where its status arrives."""
    if hasattr(answer, "__iter__"):
        list(answer)


CLAIMS = {
    "another instance": ("worker/prefill-0", "decode-7", common_pb2.ROLE_DECODE),
    "an instance that is there": ("worker/prefill-0", "decode-0", common_pb2.ROLE_DECODE),
    "another kind": ("worker/prefill-0", "prefill-0", common_pb2.ROLE_STORE),
    "a store as a worker": ("kvstore/kvstore-0", "kvstore-0", common_pb2.ROLE_DECODE),
}


@pytest.mark.parametrize(("who", "instance_id", "role"), CLAIMS.values(), ids=CLAIMS)
def test_nobody_registers_as_another(who: str, instance_id: str, role: int, secured: LocalCluster, certs: Path) -> None:
    info = conductor_pb2.InstanceInfo(
        instance_id=instance_id, boot_id="00" * 16, role=role, address="127.0.0.1:1", model="pinyon-tiny"
    )
    before = {each.info.instance_id: each.info.boot_id for each in instances_of(secured)}
    with channel_as(certs / who, secured.services["conductor"]) as channel:
        report = conductor_pb2_grpc.ConductorServiceStub(channel).ReportSession
        with pytest.raises(grpc.RpcError, match="the certificate is that of") as caught:
            list(report(iter([conductor_pb2.ReportSessionRequest(registration=info)]), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert {each.info.instance_id: each.info.boot_id for each in instances_of(secured)} == before


def test_nobody_asks_for_prefills_as_another(secured: LocalCluster, certs: Path) -> None:
    hello = worker_pb2.PrefillSessionRequest(hello=worker_pb2.PrefillHello(instance_id="decode-7"))
    with (
        channel_as(certs / "worker" / "decode-0", secured.services["prefill-0"]) as channel,
        pytest.raises(grpc.RpcError, match="worker decode-0, not of worker decode-7") as caught,
    ):
        list(worker_pb2_grpc.WorkerServiceStub(channel).PrefillSession(iter([hello]), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def shown(service: ServiceProcess, endpoint: str, folder: Path) -> int:
    """Returns the serial number of the server's certificate."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.check_hostname = False
    with (
        socket.create_connection(parse_address(service.endpoints[endpoint]), timeout=WAIT_S) as plain,
        context.wrap_socket(plain) as stream,
    ):
        raw = stream.getpeercert(binary_form=True)
    assert raw is not None
    return x509.load_der_x509_certificate(raw).serial_number


def test_certificates_are_renewed_without_a_restart(
    secured: LocalCluster, authority: TestAuthority, certs: Path
) -> None:
    pids = {service.name: service.pid for service in secured.services.values()}
    admin = certs / "admin" / "admin"
    newer = {}
    for service in secured.services.values():
        folder = authority.folder(role_of(service.name), service.name)
        newer[service.name] = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes()).serial_number
    for service in secured.services.values():
        for endpoint in {"grpc", "http", "admin"} & set(service.endpoints):
            wait_until(  # services check files every two seconds
                lambda service=service, endpoint=endpoint: shown(service, endpoint, admin) == newer[service.name],
                f"{service.name} shows its new certificate on {endpoint}",
            )
    with openai_client(secured, FIRST_KEY) as client:
        assert client.completions.create(model="pinyon-tiny", prompt="after it", max_tokens=2).choices
    assert {service.name: service.pid for service in secured.services.values() if service.alive} == pids


def test_api_keys_are_renewed_without_a_restart(secured: LocalCluster, keys_file: Path) -> None:
    from openai import AuthenticationError

    def accepted(key: str) -> bool:
        with openai_client(secured, key) as client:
            try:
                return bool(client.completions.create(model="pinyon-tiny", prompt="a", max_tokens=1).choices)
            except AuthenticationError:
                return False

    log = secured.services["lb-0"].log_path
    assert accepted(FIRST_KEY)
    assert not accepted(SECOND_KEY)
    try:
        keys_file.write_text(f"{SECOND_KEY} acme\n")
        wait_until(lambda: accepted(SECOND_KEY), "the new key counts")
        assert not accepted(FIRST_KEY)
        keys_file.write_text("no key at all, but what is this\n")
        wait_until(lambda: "the new API keys file cannot be used" in log.read_text(), "the broken file is told")
        assert accepted(SECOND_KEY), "the old keys stay"
    finally:
        keys_file.write_text(f"{FIRST_KEY} acme\n")
    wait_until(lambda: accepted(FIRST_KEY), "the first key is back")


def test_a_service_does_not_start_with_another_ones_certificate(secured: LocalCluster, certs: Path) -> None:
    for folder, said in (("worker/decode-0", "is that of worker decode-0"), ("lb/lb-0", "is that of lb lb-0")):
        started = subprocess.run(
            [sys.executable, "-m", "services.worker", "--instance-id", "prefill-0", "--tls-dir", str(certs / folder)],
            cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert started.returncode == 1
        assert said in started.stderr


def test_an_admin_changes_what_runs_and_nobody_else(
    secured: LocalCluster, certs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PINYON_TLS_DIR", str(certs / "admin" / "admin"))
    worker, conductor, lb, store = (secured.services[name] for name in ("prefill-0", "conductor", "lb-0", "kvstore-0"))

    def schedulable(name: str) -> bool:
        return any(each.schedulable for each in instances_of(secured) if each.info.instance_id == name)

    def admin(role: str, address: str, *changes: str) -> int:
        return main(["admin", role, address, *changes, "--timeout-s", str(WAIT_S)])

    assert admin("worker", worker.endpoints["grpc"], "draining=true") == 0
    wait_until(lambda: not schedulable("prefill-0"), "nothing is placed on it")
    assert "admin admin at ipv4:127.0.0.1" in worker.log_path.read_text()
    assert admin("worker", worker.endpoints["grpc"], "draining=false") == 0
    wait_until(lambda: schedulable("prefill-0"), "it is used again")

    assert admin("conductor", conductor.endpoints["grpc"], "placement=least_loaded") == 0
    assert ("conductor", "pinyon_conductor_policies_info", ("least_loaded",)) in Scrape(secured).samples
    assert admin("conductor", conductor.endpoints["grpc"], "placement=kvcache_centric") == 0
    assert admin("lb", lb.endpoints["admin"], "routing=round_robin") == 0
    assert admin("lb", lb.endpoints["admin"], "routing=least_loaded") == 0
    for role, service in (("worker", worker), ("kvstore", store)):
        assert admin(role, service.endpoints["grpc"], "eviction=workload_aware:life_s=30") == 0
        shown = (service.name, f"pinyon_{role}_policies_info", "workload_aware:life_s=30")
        assert any(
            (name, metric) == shown[:2] and shown[2] in labels for name, metric, labels in Scrape(secured).samples
        )
        assert admin(role, service.endpoints["grpc"], "eviction=lru") == 0
    capsys.readouterr()

    for role, address, changes, said in (
        ("conductor", conductor.endpoints["grpc"], ["placement=nonsense"], "no placement policy 'nonsense'"),
        ("worker", worker.endpoints["grpc"], ["service_order=fifo"], "needs a restart"),
        ("kvstore", store.endpoints["grpc"], ["eviction=nonsense"], "known: lru, workload_aware"),
        ("lb", lb.endpoints["grpc"], [], "at its --admin-listen"),  # the port of users' programs
    ):
        assert admin(role, address, *changes) == 1
        assert said in capsys.readouterr().err
    monkeypatch.setenv("PINYON_TLS_DIR", str(certs / "worker" / "decode-0"))
    assert admin("worker", worker.endpoints["grpc"], "draining=true") == 1
    assert "role worker may not call" in capsys.readouterr().err
    assert main(["trace", "record", "-", "--lb", lb.endpoints["admin"]]) == 1
    assert "role worker may not call" in capsys.readouterr().err
    assert schedulable("prefill-0")
